"""What messages and collectives take between ranks of this machine."""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import replace
from pathlib import Path

from autopipe.backends.torch.profiler.exchanges import measure_exchanges
from autopipe.backends.torch.profiler.posts import Ends, Pairs, measure_ends, measure_period
from autopipe.cli.profiling.medley import MESSAGE_BYTES, write_pair
from autopipe.cli.profiling.pipeline import Pipeline
from autopipe.ir.costs import Affine, ExchangeCost
from autopipe.ir.errors import LaunchError

_MESSAGES = 6
"""Of a task, where it is measured what the others take beside the first."""


def exchanges_of(ranks: int, device: str, seconds: float, pipeline: Pipeline | None = None) -> tuple[ExchangeCost, ...]:
    """Messages and collectives of up to so many ranks, for about `seconds`; of messages' ends what they take in a
    pipeline: in the model's, where there is one that runs. Raises LaunchError where a rank fails."""
    found = measure_exchanges(ranks, device, seconds)
    with tempfile.TemporaryDirectory(prefix="autopipe-profile-") as scratch:
        together, apart, laden = (Path(scratch) / name for name in ("together", "apart", "laden"))
        for folder, count, messages in ((together, 1, 1), (apart, 2, 1), (laden, 2, _MESSAGES)):
            write_pair(folder, count, messages)
        ends, size = measure_ends(Pairs(together, apart, laden, _MESSAGES), device), MESSAGE_BYTES
    if pipeline is not None:
        with contextlib.suppress(LaunchError):
            ends, size = _ends_in(pipeline, device, ends), pipeline.size_bytes
    return tuple(part for each in found for part in (_posts(each, ends, size) if each.kind == "post" else (each,)))


def _ends_in(pipeline: Pipeline, device: str, ends: Ends) -> Ends:
    """What the ends of messages take in the model's pipeline, each but the first as long as in `ends`.

    Raises LaunchError where it does not run.
    """
    both = measure_period(pipeline.folder, device) - pipeline.own_s
    return replace(ends, first=max(0.0, both / 2 - (pipeline.messages - 1) * ends.following))


def _posts(post: ExchangeCost, ends: Ends, size: int) -> tuple[ExchangeCost, ExchangeCost]:
    """What a first message's end and each other's take: in a pipeline whose messages are `size` bytes, and by bytes as
    was measured of messages."""
    following = ExchangeCost("follow", post.ranks, _through(post.fit, ends.following, MESSAGE_BYTES), ())
    return replace(post, fit=_through(post.fit, ends.first, size)), following


def _through(line: Affine, seconds: float, size: int) -> Affine:
    """The line of the same slope, or a flatter one from 0, that gives `seconds` for `size` bytes."""
    if seconds < line.per_byte_s * size:
        return Affine(0.0, seconds / size)
    return Affine(seconds - line.per_byte_s * size, line.per_byte_s)
