"""What messages and collectives take between ranks of this machine."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from autopipe.backends.torch.profiler.exchanges import measure_exchanges
from autopipe.backends.torch.profiler.posts import measure_post
from autopipe.cli.profiling.medley import MESSAGE_BYTES, write_pair
from autopipe.ir.costs import Affine, ExchangeCost


def exchanges_of(ranks: int, device: str, seconds: float) -> tuple[ExchangeCost, ...]:
    """Messages and collectives of up to so many ranks, for about `seconds`; of a message's ends what they take in a
    pipeline. Raises LaunchError where a rank fails."""
    found = measure_exchanges(ranks, device, seconds)
    with tempfile.TemporaryDirectory(prefix="autopipe-profile-") as scratch:
        programs = {count: Path(scratch) / f"pair-{count}" for count in (1, 2)}
        for count, folder in programs.items():
            write_pair(folder, count)
        post = measure_post(programs[1], programs[2], device)
    return tuple(replace(each, fit=_through(each.fit, post)) if each.kind == "post" else each for each in found)


def _through(line: Affine, seconds: float) -> Affine:
    """The line of the same slope, or a flatter one from 0, through `seconds` at the size of the pipeline's messages."""
    if seconds < line.per_byte_s * MESSAGE_BYTES:
        return Affine(0.0, seconds / MESSAGE_BYTES)
    return Affine(seconds - line.per_byte_s * MESSAGE_BYTES, line.per_byte_s)
