"""What messages and collectives take between ranks of this machine."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from autopipe.backends.torch.profiler.exchanges import measure_exchanges
from autopipe.backends.torch.profiler.posts import Ends, Pairs, measure_ends
from autopipe.cli.profiling.medley import MESSAGE_BYTES, write_pair
from autopipe.ir.costs import Affine, ExchangeCost

_MESSAGES = 6
"""Of a task, where it is measured what the others take beside the first."""


def exchanges_of(ranks: int, device: str, seconds: float) -> tuple[ExchangeCost, ...]:
    """Messages and collectives of up to so many ranks, for about `seconds`; of messages' ends what they take in a
    pipeline. Raises LaunchError where a rank fails."""
    found = measure_exchanges(ranks, device, seconds)
    with tempfile.TemporaryDirectory(prefix="autopipe-profile-") as scratch:
        together, apart, laden = (Path(scratch) / name for name in ("together", "apart", "laden"))
        for folder, count, messages in ((together, 1, 1), (apart, 2, 1), (laden, 2, _MESSAGES)):
            write_pair(folder, count, messages)
        ends = measure_ends(Pairs(together, apart, laden, _MESSAGES), device)
    return tuple(part for each in found for part in (_posts(each, ends) if each.kind == "post" else (each,)))


def _posts(post: ExchangeCost, ends: Ends) -> tuple[ExchangeCost, ExchangeCost]:
    """What a first message's end and each other's take: in a pipeline, and by bytes as was measured of messages."""
    following = ExchangeCost("follow", post.ranks, _through(post.fit, ends.following), ())
    return replace(post, fit=_through(post.fit, ends.first)), following


def _through(line: Affine, seconds: float) -> Affine:
    """The line of the same slope, or a flatter one from 0, through `seconds` at the size of the pipeline's messages."""
    if seconds < line.per_byte_s * MESSAGE_BYTES:
        return Affine(0.0, seconds / MESSAGE_BYTES)
    return Affine(seconds - line.per_byte_s * MESSAGE_BYTES, line.per_byte_s)
