"""Table I: how long the search takes in the paper's space and under its costs, and what it finds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from autopipe.cli.bench.pase.models import paper_problem
from autopipe.cli.bench.pase.published import DEVICES, LEAST_COST, MODELS, SEARCH_S
from autopipe.cli.bench.row import Case, Row
from autopipe.passes.placement.pase.paper_search import find_strategy, tables_of

_MEASURED = "measured here, once, from the model's graph to the answer; theirs on a Xeon E5 (Sandy Bridge)"


def search_times() -> list[Case]:
    """One case a model and number of devices."""
    return [
        Case(f"{model}/p={devices}", "Table I", partial(_rows, model, devices))
        for model in MODELS
        for devices in DEVICES
    ]


def _rows(model: str, devices: int) -> Iterator[Row]:
    case, place = f"{model}/p={devices}", DEVICES.index(devices)
    problem = paper_problem(model, devices)
    find_strategy(tables_of(paper_problem("rnnlm", 2)))  # What loads on first use is not counted.
    start = time.perf_counter()
    tables = tables_of(problem)
    built = time.perf_counter()
    found = find_strategy(tables)
    end = time.perf_counter()
    proof = "proven least" if found.proven else f"at least {found.bound:.6g}"
    yield Row(case, "search_time_s", SEARCH_S[model][place], end - start, "s", "pase", _MEASURED)
    yield Row(case, "table_time_s", None, built - start, "s", "pase", "of this, building the tables")
    note = f"theirs: the least that their prototype's cost model allows; ours: {proof}"
    yield Row(case, "optimal_cost", LEAST_COST[model][place], int(found.cost), "operations", "pase", note)
