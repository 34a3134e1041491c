"""Measure messages and collectives between ranks of this machine."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from autopipe.backends.torch.profiler.communication import (
    PostOverhead,
    StagePairs,
    measure_exchanges,
    measure_period,
    measure_post_overhead,
)
from autopipe.cli.profiling.medley import MESSAGE_BYTES, write_pair
from autopipe.cli.profiling.pipeline import Pipeline
from autopipe.ir.measured_costs import Affine, ExchangeCost

_MESSAGES = 6
"""Of a task, where it is measured what the others take beside the first."""
_RUNS = 3
"""Of the model's pipeline, of which the middle one counts: a program is faster in one process than in another."""


def exchanges_of(ranks: int, device: str, seconds: float) -> tuple[ExchangeCost, ...]:
    """Messages and collectives of up to `ranks` ranks, for about `seconds`, and the CPU time of their ends in small
    pipelines. Raises LaunchError where a rank fails.
    """
    found = measure_exchanges(ranks, device, seconds)
    with tempfile.TemporaryDirectory(prefix="autopipe-profile-") as scratch:
        together, apart, laden = (Path(scratch) / name for name in ("together", "apart", "laden"))
        for folder, count, messages in ((together, 1, 1), (apart, 2, 1), (laden, 2, _MESSAGES)):
            write_pair(folder, count, messages)
        ends = measure_post_overhead(StagePairs(together, apart, laden, _MESSAGES), device)
    return tuple(part for each in found for part in (_posts(each, ends) if each.kind == "post" else (each,)))


def _posts(post: ExchangeCost, ends: PostOverhead) -> tuple[ExchangeCost, ExchangeCost]:
    """Costs of posting a first message and each further one: from a pipeline, and by bytes from messages alone."""
    first, following = (_through(post.fit, seconds, MESSAGE_BYTES) for seconds in (ends.first, ends.following))
    return replace(post, fit=first), ExchangeCost("follow", post.ranks, following, ())


def in_pipeline(exchanges: tuple[ExchangeCost, ...], pipeline: Pipeline, device: str) -> tuple[ExchangeCost, ...]:
    """The exchanges with what the ends of messages take in the model's pipeline, each but the first as in a small one.

    Raises LaunchError where it does not run.
    """
    follow = next(each.fit.fixed_s for each in exchanges if each.kind == "follow")  # Bytes count as the first's.
    period = statistics.median(measure_period(pipeline.folder, device) for _ in range(_RUNS))
    both = period - pipeline.period_s
    first = max(0.0, both / 2 - (pipeline.messages - 1) * follow)
    return tuple(
        replace(each, fit=_through(each.fit, first, pipeline.size_bytes)) if each.kind == "post" else each
        for each in exchanges
    )


def _through(line: Affine, seconds: float, size: int) -> Affine:
    """The line of the same slope, or a flatter one from 0, that gives `seconds` for `size` bytes."""
    if seconds < line.per_byte_s * size:
        return Affine(0.0, seconds / size)
    return Affine(seconds - line.per_byte_s * size, line.per_byte_s)
