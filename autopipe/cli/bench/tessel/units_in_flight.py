"""Figure 11: the bubble rate by how many micro-batches may take part in a repetend, with memory for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from autopipe.cli.bench.row import Case, Row
from autopipe.cli.bench.tessel.published import UNITS_FOR_ZERO_BUBBLE
from autopipe.passes.schedule.block_shapes import SHAPES, shape
from autopipe.passes.schedule.tessel.search import search_in_flight

_DEVICES = 4
_MOST = 8
_UNITS = 64


def bubble_by_units() -> list[Case]:
    """One case a shape."""
    return [Case(f"{name}/{_DEVICES}", "Figure 11", partial(_one, name)) for name in SHAPES]


def _one(name: str) -> Iterator[Row]:
    case, blocks = f"{name}/{_DEVICES}", shape(name, _DEVICES, train=True)
    enough: int | None = None
    for units in range(1, _MOST + 1):
        made = search_in_flight(blocks, _UNITS, units)
        rate = made.steady_bubble_rate
        assert rate is not None
        note = f"computed: period {made.period}, {'proven' if made.optimal else f'gap {made.gap:.1%}'}"
        yield Row(case, "bubble_rate", None, rate, "", f"N_R={units}", note)
        if rate == 0.0:
            enough = units
            break
    note = "micro-batches in a repetend from which the bubble is zero (Figure 11)"
    yield Row(case, "units_for_zero_bubble", UNITS_FOR_ZERO_BUBBLE.get(case), enough, "", "tessel", note)
