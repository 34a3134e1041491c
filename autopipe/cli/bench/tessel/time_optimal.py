"""Figure 9: solving the whole schedule at once, against searching the steady state and extending it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from autopipe.cli.bench.row import Case, Row
from autopipe.cli.bench.tessel.published import TIME_OPTIMAL_V_16_S
from autopipe.passes.schedule.block_shapes import shape
from autopipe.passes.schedule.tessel.model import SearchOptions
from autopipe.passes.schedule.tessel.search import search, search_whole

_DEVICES = 4
_SIZES = (("v", 4), ("v", 16), ("x", 4), ("m", 4), ("nn", 4), ("nn", 6), ("k", 4))
_TIME_LIMIT = 30.0


def time_optimal() -> list[Case]:
    """One case a shape and number of units."""
    return [Case(f"{name}/{_DEVICES}", "Figure 9", partial(_one, name, units)) for name, units in _SIZES]


def _one(name: str, units: int) -> Iterator[Row]:
    case, blocks = f"{name}/{_DEVICES}", shape(name, _DEVICES, train=True)
    start = time.perf_counter()
    whole = search_whole(blocks, units, SearchOptions(time_limit=_TIME_LIMIT))
    whole_s = time.perf_counter() - start
    start = time.perf_counter()
    made = search(blocks, units)
    search_s = time.perf_counter() - start
    proof = "proven" if whole.optimal else f"stopped at {_TIME_LIMIT:.0f} s, at least {whole.lower_bound}"
    theirs = TIME_OPTIMAL_V_16_S if (name, units) == ("v", 16) else None
    yield Row(case, "search_time_s", theirs, whole_s, "s", f"whole, N={units}", f"measured here, once; {proof}")
    yield Row(case, "search_time_s", None, search_s, "s", f"steady, N={units}", "measured here, once")
    yield Row(case, "makespan", None, whole.makespan, "", f"whole, N={units}", proof)
    yield Row(case, "makespan", None, made.makespan, "", f"steady, N={units}", "steady state and ends, or better")
