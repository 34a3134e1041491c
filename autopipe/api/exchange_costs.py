"""Measurement of the costs of messages and collectives, and their correction by a run of the
model's pipeline.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

from autopipe.api.model_programs import Pipeline
from autopipe.api.synthetic_programs import MESSAGE_BYTES, write_pair
from autopipe.backends.torch.profiler.communication import (
    measure_exchanges,
    measure_period,
    measure_post_overhead,
)
from autopipe.ir.measured_costs import (
    AffineTime,
    ExchangeCost,
)
from autopipe.ir.output_files import scratch_folder

_MESSAGES_PER_TASK = 6
"""Number of messages per task in the program that measures the time of each message after the
first.
"""
_PIPELINE_RUNS = 3
"""Number of runs of the model's pipeline. Their median is used, because the speed of a program
differs between processes.
"""


def exchanges_of(ranks: int, device: str, seconds: float) -> tuple[ExchangeCost, ...]:
    """Return the measured costs of messages and collectives of up to `ranks` ranks, and the time
    that sending and receiving take from the tasks of small pipelines. Messages and collectives are
    measured for about `seconds`. Raise LaunchError if a rank fails.
    """
    found = measure_exchanges(ranks, device, seconds)
    with scratch_folder("profile") as scratch:
        together, apart, laden = (Path(scratch) / name for name in ("together", "apart", "laden"))
        for folder, count, messages in (
            (together, 1, 1),
            (apart, 2, 1),
            (laden, 2, _MESSAGES_PER_TASK),
        ):
            write_pair(folder, count, messages)
        ends = measure_post_overhead(together, apart, laden, _MESSAGES_PER_TASK, device)
    costs: list[ExchangeCost] = []
    for each in found:
        if each.kind == "post":
            # Small pipelines measure the times of the first message of a task ("post") and of each
            # further message ("follow"). The exchange of single messages measures how the time
            # grows per byte.
            first, following = (_line_through(each.fit, seconds, MESSAGE_BYTES) for seconds in ends)
            costs += (replace(each, fit=first), ExchangeCost("follow", each.ranks, following, ()))
        else:
            costs.append(each)
    return tuple(costs)


def in_pipeline(
    exchanges: tuple[ExchangeCost, ...], pipeline: Pipeline, device: str
) -> tuple[ExchangeCost, ...]:
    """Return the communication costs with the time that sending and receiving take in the model's
    pipeline. This run corrects only the time of the first message of a task. The time of each
    further message stays as it was measured in a small pipeline. Raise LaunchError if the pipeline
    fails.
    """
    # Only the constant part of the time of further messages is subtracted, because the bytes are
    # part of the line of the first message.
    follow = next(each.fit.fixed_s for each in exchanges if each.kind == "follow")
    period = statistics.median(
        measure_period(pipeline.folder, device) for _ in range(_PIPELINE_RUNS)
    )
    both = period - pipeline.period_s
    first = max(0.0, both / 2 - (pipeline.messages - 1) * follow)
    return tuple(
        replace(each, fit=_line_through(each.fit, first, pipeline.size_bytes))
        if each.kind == "post"
        else each
        for each in exchanges
    )


def _line_through(line: AffineTime, seconds: float, size: int) -> AffineTime:
    """Return the line with the slope of `line` that has the value `seconds` at `size` bytes. If
    that line would be negative at 0 bytes, return the line through 0 instead.
    """
    if seconds < line.per_byte_s * size:
        return AffineTime(0.0, seconds / size)
    return AffineTime(seconds - line.per_byte_s * size, line.per_byte_s)
