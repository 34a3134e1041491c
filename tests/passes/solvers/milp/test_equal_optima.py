"""Solvers prove equal optima of the integer programs of plans and partitions.

`benchmarks/integer_programs.py` compares the programs of the test suite and of the TePDist paper.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopipe.passes.partition.min_cut_ilp import partition_nodes
from autopipe.passes.placement.tepdist.levels import O2, O3
from autopipe.passes.sharding.search import SplitTables, make_split_tables
from autopipe.passes.solvers.milp import MilpResult, Status, solve
from benchmarks.recorded_programs import Optima, find_optima, program_paths, read_program, recording
from benchmarks.tepdist import Training
from tests.passes.placement.tepdist.division.test_divide import FLAVA, GPT, zoo_problem
from tests.passes.solvers.milp.test_solve import knapsack

SOLVERS = ("auto", "highs", "cbc")
EQUAL = 1e-9
"""Maximum relative difference of equal optima."""


def tables_of(model: str, layers: int) -> SplitTables:
    """Return the tables of the search for splits of a model on four devices."""
    problem = Training(model, (("layers", layers),), 4, 32).given(8)
    return make_split_tables(problem, range(len(problem.graph.nodes)), (0, 1, 2, 3))


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return files with the programs of two partitions into stages, and of two levels of the search
    within a memory limit.
    """
    folder = tmp_path_factory.mktemp("programs")
    experts = tables_of("moe", 2)
    layer = tables_of("gpt", 1)
    with recording(folder):
        partition_nodes(zoo_problem("gpt", GPT), 3, 0.1)
        partition_nodes(zoo_problem("flava", FLAVA), 3, 0.1)
        for tables, level in ((experts, O2()), (layer, O3())):
            level(tables, 0.7 * float(level(tables, None).memory))
    return program_paths(folder)


def test_solvers_prove_equal_optima(programs: list[Path]) -> None:
    assert len(programs) >= 5
    for path in programs:
        optima = find_optima(read_program(path), SOLVERS, 60.0)
        assert optima.proven.keys() == set(SOLVERS), path
        for other in SOLVERS[1:]:
            difference = optima.difference("auto", other)
            assert difference is not None
            assert difference <= EQUAL, (path, optima.proven)


def test_a_program_is_recorded_once_and_unchanged(tmp_path: Path) -> None:
    with recording(tmp_path):
        answers = [solve(knapsack(), 60.0), solve(knapsack(), 60.0), solve(knapsack(7.0), 60.0)]
    solve(knapsack(5.0), 60.0)
    assert [answer.objective for answer in answers] == [-12, -12, -9]
    found = [read_program(path) for path in program_paths(tmp_path)]
    assert sorted(float(model.row_upper[0]) for model in found) == [7, 9]
    for model in found:
        assert model.matrix.toarray().tolist() == [[2, 4]]
        # Costs are recorded as the solver gets them, scaled by a power of two.
        assert (model.cost / knapsack().cost).tolist() == [model.cost[0] / -3] * 2
        assert (model.lower.tolist(), model.upper.tolist(), model.integral.all()) == (
            [0, 0],
            [10, 10],
            True,
        )


def test_solvers_agree_that_there_is_no_minimum() -> None:
    model = replace(knapsack(), row_upper=np.array([np.inf]), upper=np.array([np.inf, np.inf]))
    optima = find_optima(model, SOLVERS, 60.0)
    assert optima.proven == dict.fromkeys(SOLVERS, -np.inf)
    assert optima.difference("auto", "cbc") == 0


def test_optima_are_compared_if_both_are_proven() -> None:
    values = np.zeros(1)
    optima = Optima({
        "auto": MilpResult(Status.OPTIMAL, values, 10.0, 10.0),
        "highs": MilpResult(Status.OPTIMAL, values, 8.0, 8.0),
        "cbc": MilpResult(Status.FEASIBLE, values, 12.0),
        "scip": MilpResult(Status.INFEASIBLE),
        "copt": MilpResult(Status.INFEASIBLE),
    })  # fmt: skip
    assert optima.difference("auto", "highs") == pytest.approx(0.2)
    assert optima.difference("auto", "cbc") is None
    assert optima.difference("scip", "copt") == 0
    assert optima.difference("auto", "scip") == np.inf
