"""How long the search takes for the five shapes, and what it proves."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from autopipe.cli.bench.row import Case, Row
from autopipe.cli.bench.tessel.published import AVERAGE_SEARCH_S
from autopipe.passes.schedule.block_shapes import SHAPES, shape
from autopipe.passes.schedule.tessel.search import search

_DEVICES = (4, 8, 16, 32)
_UNITS = 128


def search_times() -> list[Case]:
    """One case a shape and number of devices."""
    return [
        Case(f"{name}/{devices}", "search time", partial(_one, name, devices))
        for devices in _DEVICES
        for name in SHAPES
    ]


def _one(name: str, devices: int) -> Iterator[Row]:
    case = f"{name}/{devices}"
    blocks = shape(name, devices, train=True)
    search(shape("m", 2, train=True), 8)  # What loads on first use is not counted.
    start = time.perf_counter()
    made = search(blocks, _UNITS)
    seconds = time.perf_counter() - start
    proven = "proven least" if made.optimal else f"at least {made.lower_bound}, gap {made.gap:.1%}"
    theirs = AVERAGE_SEARCH_S if devices == 4 else None
    note = f"measured here, once, steady state and {_UNITS} units; theirs is the mean of all their searches"
    yield Row(case, "search_time_s", theirs, seconds, "s", "tessel", note)
    yield Row(
        case, "period", max(blocks.loads), made.period, "per unit", "tessel", f"theirs: the largest load; {proven}"
    )
    yield Row(case, "makespan", None, made.makespan, "", "tessel", f"{_UNITS} units")
