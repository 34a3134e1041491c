"""Methods against each other on the same tables, those of Table I."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from autopipe.cli.bench.pase.milp import least_by_milp, pairs
from autopipe.cli.bench.pase.models import paper_problem
from autopipe.cli.bench.pase.published import BREADTH_FIRST_S, DEVICES, FLEXFLOW_S, MODELS, SEARCH_S
from autopipe.cli.bench.row import Case, Row
from autopipe.passes.placement.pase.paper_costs import PaperTables
from autopipe.passes.placement.pase.paper_search import model_of, sample_axes, tables_of
from autopipe.passes.solvers.min_sum import Assignment, MinSum, TableTooLargeError, eliminate, solve
from autopipe.passes.solvers.min_sum.metropolis import walk

_ITERATIONS = 250_000
"""Section IV-A stops FlexFlow after so many."""
_TEMPERATURE = 0.1
_MOST_PAIRS = 60_000
_MILP_S = 30.0

_Published = Mapping[str, Sequence[float]]


def methods() -> list[Case]:
    """One case a model and number of devices."""
    return [
        Case(f"{model}/p={devices}", "methods", partial(_rows, model, devices))
        for model in MODELS
        for devices in DEVICES
    ]


def _rows(model: str, devices: int) -> Iterator[Row]:
    problem = paper_problem(model, devices)
    tables = tables_of(problem)
    costs = model_of(tables)
    start = _samples_first(tables, sample_axes(problem.graph, tables.graph))
    random_walk = partial(walk, start=start, iterations=_ITERATIONS, temperature=_TEMPERATURE)
    exact: list[tuple[str, Callable[[MinSum], Assignment], _Published, str]] = [
        ("dual, prune, eliminate", solve, {}, ""),
        ("eliminate, generate_seq", partial(eliminate, ordering="generate_seq"), SEARCH_S, "; theirs with its tables"),
        ("eliminate, min_fill", partial(eliminate, ordering="min_fill"), {}, ""),
        (
            "eliminate, breadth_first",
            partial(eliminate, ordering="breadth_first"),
            BREADTH_FIRST_S,
            "; theirs with its tables",
        ),
        ("mcmc", random_walk, FLEXFLOW_S, f"; at most {_ITERATIONS} steps from data parallelism; theirs is FlexFlow"),
    ]
    least = solve(costs).cost
    for name, method, published, note in exact:
        yield from _method(model, devices, name, costs, least, method, published, note)
    yield _milp(f"{model}/p={devices}", costs, least)


def _method(
    model: str,
    devices: int,
    name: str,
    costs: MinSum,
    least: float,
    method: Callable[[MinSum], Assignment],
    published: _Published,
    note: str,
) -> Iterator[Row]:
    case, theirs = f"{model}/p={devices}", published.get(model)
    figure = theirs[DEVICES.index(devices)] if theirs else None
    began = time.perf_counter()
    try:
        answer = method(costs)
    except TableTooLargeError as error:
        yield Row(case, "solve_time_s", figure, None, "s", name, str(error).partition(";")[0])
        return
    seconds = time.perf_counter() - began
    yield Row(case, "solve_time_s", figure, seconds, "s", name, f"measured here, once, tables not counted{note}")
    if not answer.proven:
        excess = f"of the best strategy's cost{note}"
        yield Row(case, "cost_over_least", None, float(answer.cost / least), "times", name, excess)


def _milp(case: str, costs: MinSum, least: float) -> Row:
    count = pairs(costs)
    if count > _MOST_PAIRS:
        return Row(case, "solve_time_s", None, None, "s", "milp", f"{count} pairs are too many for an integer program")
    start = time.perf_counter()
    found, proven = least_by_milp(costs, _MILP_S)
    seconds = time.perf_counter() - start
    if not proven:
        return Row(case, "solve_time_s", None, None, "s", "milp", f"HiGHS through scipy, not done in {_MILP_S:.0f} s")
    note = f"HiGHS through scipy, {count} pairs"
    if abs(found - least) > 1e-6 * least:
        note += f"; its answer costs {found / least:.6f} times the least, within its tolerances"
    return Row(case, "solve_time_s", None, seconds, "s", "milp", note)


def _samples_first(tables: PaperTables, counted: Sequence[int | None]) -> list[int]:
    """The choice that comes nearest to data parallelism: nothing cut but samples, and those as often as allowed."""
    found = []
    for configurations, axis in zip(tables.configurations, counted, strict=True):
        parts = configurations.prod(axis=1)
        by_samples = parts if axis is None else parts - configurations[:, axis]
        allowed = [row for row in range(len(parts)) if by_samples[row] == (1 if axis is None else 0)]
        found.append(max(allowed, key=lambda row: int(parts[row])))
    return found
