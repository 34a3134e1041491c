"""Optimisation levels: how long O2 and O3 search in a GPT-3 that grows, and what they find."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

from autopipe.cli.bench.row import Case, Row
from autopipe.cli.bench.tepdist.models import Training
from autopipe.cli.bench.tepdist.published import PICTURE
from autopipe.passes.placement.tepdist.levels import LevelName, solver_of
from autopipe.passes.sharding.search import Exact, Solver
from autopipe.passes.sharding.tables import Tables, make_tables
from autopipe.passes.solvers.min_sum import Assignment

SIZES = ("1.3b", "2.7b", "6.7b", "13b", "39b", "175b")
_LEVELS: tuple[LevelName, ...] = ("O2", "O3")

_DEVICES = 8
_BATCH, _MICRO_BATCH = 64, 8
_LIMIT_S = 120.0

_SETTING = (
    f"all layers, unrolled, in one stage on {_DEVICES} V100-32GB of one server, {_BATCH} samples of 2048 tokens in "
    f"micro-batches of {_MICRO_BATCH}, memory no limit"
)


def search_times() -> list[Case]:
    """One case a size."""
    return [Case(f"gpt-{size}/p={_DEVICES}", "optimisation levels", partial(_rows, size)) for size in SIZES]


def _rows(size: str) -> Iterator[Row]:
    case = f"gpt-{size}/p={_DEVICES}"
    for level in _LEVELS:
        _searched(_tables((("layers", 2),))[0], solver_of(level, None))  # What loads on first use is not counted.
    tables, seconds = _tables((("size", size),))
    counted = f"{len(tables.nodes)} operators, {len(tables.model.costs)} variables"
    yield Row(case, "table_time_s", None, seconds, "s", "", f"of processor time, once for all levels; {counted}")
    exact, _ = _searched(tables, Exact(_LIMIT_S))
    for level in _LEVELS:
        answer, seconds = _searched(tables, solver_of(level, _LIMIT_S))
        timed = f"{PICTURE}; of processor time, solvers included, tables not, at most {_LIMIT_S:g} s by the clock"
        yield Row(case, "search_time_s", None, seconds, "s", level, f"{timed}; {_SETTING}")
        yield Row(case, "objective", None, float(answer.cost), "s a step", level, _proof(answer, exact))


def _tables(settings: tuple[tuple[str, int | str], ...]) -> tuple[Tables, float]:
    """The search's tables for a GPT, and the seconds that they took."""
    problem = Training("gpt", settings, _DEVICES, _BATCH).given(_MICRO_BATCH)
    start = _processor_s()
    tables = make_tables(problem, range(len(problem.graph.nodes)), tuple(range(_DEVICES)))
    return tables, _processor_s() - start


def _searched(tables: Tables, solver: Solver) -> tuple[Assignment, float]:
    start = _processor_s()
    answer = solver(tables, None)
    return answer, _processor_s() - start


def _proof(answer: Assignment, exact: Assignment) -> str:
    own = "its own proof: least" if answer.proven else f"its own bound: at least {float(answer.bound):.6g}"
    return f"{PICTURE}; {own}; {float(answer.cost / exact.cost):.6f} times the exact search's"


def _processor_s() -> float:
    """Seconds that this process and those that it started and that ended have computed."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
