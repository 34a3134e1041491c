"""Table II: idle time in the steady state, by placement and schedule, where all devices have the same work."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from autopipe.cli.bench.row import Case, Row
from autopipe.cli.bench.tessel.published import BUBBLE_RATES
from autopipe.ir.block_schedule import BlockSchedule
from autopipe.passes.schedule.block_shapes import shape
from autopipe.passes.schedule.published.blocks import schedule_blocks
from autopipe.passes.schedule.tessel.model import turn_of
from autopipe.passes.schedule.tessel.search import search

_DEVICES = 4
_UNITS = 24
"""Enough for every schedule to reach its steady state."""

_OWN_SHAPE = {"1f1b": "v", "chimera": "x"}
"""Schedules that the paper runs on their own placement, whatever the row's."""


def bubble_rates() -> list[Case]:
    """One case a placement."""
    return [Case(f"{name}/{_DEVICES}", "Table II", partial(_of_shape, name)) for name in ("m", "nn", "k")]


def _of_shape(name: str) -> Iterator[Row]:
    case = f"{name}/{_DEVICES}"
    for (published_case, schedule), theirs in BUBBLE_RATES.items():
        if published_case != case:
            continue
        blocks = shape(_OWN_SHAPE.get(schedule, name), _DEVICES, train=True)
        made = search(blocks, _UNITS) if schedule == "tessel" else schedule_blocks(schedule, blocks, _UNITS)
        period, units = _steady(made)
        micro_batches = units * blocks.micro_batches_per_unit
        note = f"{period} time units for {micro_batches} micro-batch{'es' if micro_batches > 1 else ''}, counted"
        yield Row(case, "bubble_rate", theirs, 1 - units * max(blocks.loads) / period, "", schedule, note)
        yield Row(case, "period", None, period / units, "per unit", schedule, note)


def _steady(schedule: BlockSchedule) -> tuple[int, int]:
    """The length of what repeats over the middle third of a schedule, and the units in it."""
    first, last = schedule.units // 3, 2 * schedule.units // 3
    for units in range(1, last - first):
        distance = turn_of(schedule.starts, units, first, last)
        if distance is not None:
            return distance, units
    raise AssertionError("a named schedule repeats")
