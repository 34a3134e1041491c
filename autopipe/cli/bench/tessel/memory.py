"""Figure 12: the bubble rate by memory, counted in stage activations, of repetends with each block once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from autopipe.cli.bench.row import Case, Row
from autopipe.ir.errors import InfeasibleError
from autopipe.passes.schedule.block_shapes import SHAPES, shape
from autopipe.passes.schedule.tessel.search import search_in_flight

_DEVICES = 4
_MOST = 8
_UNITS = 64


def bubble_by_memory() -> list[Case]:
    """One case a shape."""
    return [Case(f"{name}/{_DEVICES}", "Figure 12", partial(_one, name)) for name in SHAPES]


def _one(name: str) -> Iterator[Row]:
    case = f"{name}/{_DEVICES}"
    for memory in range(1, _MOST + 1):
        try:
            made = search_in_flight(shape(name, _DEVICES, train=True, memory=memory), _UNITS, _UNITS)
        except InfeasibleError as error:
            yield Row(case, "bubble_rate", None, None, "", f"M={memory}", error.message)
            continue
        rate = made.steady_bubble_rate
        note = f"computed: period {made.period}, {'proven' if made.optimal else f'gap {made.gap:.1%}'}"
        yield Row(case, "bubble_rate", None, rate, "", f"M={memory}", note)
        if rate == 0.0:
            return
