"""`python -m benchmarks pase`: the paper's costs to the last digit, and every strategy beside data
parallelism.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from autopipe.passes.solvers.min_sum import Edge, MinSum, solve
from benchmarks.pase import DEVICES, MODELS, STRATEGIES, cases, least_by_milp, paper_problem
from tests.cli.command_line import CommandLine

ORDERINGS = ("generate_seq", "min_fill", "breadth_first")


def test_figures_stand_beside_the_papers(command_line: CommandLine) -> None:
    rows = json.loads(command_line.done("pase", "--only", "rnnlm/p=4", "--json").out)["rows"]
    (cost,) = [row for row in rows if row["metric"] == "optimal_cost"]
    assert cost["ours"] == cost["theirs"] == 6866837733376
    timed = {row["variant"] for row in rows if row["metric"] == "solve_time_s" and row["ours"]}
    assert timed == {
        "dual, prune, eliminate",
        *(f"eliminate, {name}" for name in ORDERINGS),
        "mcmc",
        "milp",
    }
    speedups = {row["variant"]: row["ours"] for row in rows if row["metric"] == "speedup"}
    for cluster in ("1080ti-pcie", "2080ti-pcie"):
        others = [speedups[f"{name}, {cluster}"] or 0.0 for name in ("handcrafted", "mcmc")]
        assert speedups[f"pase, {cluster}"] >= max(1.0, *others)


def test_every_model_and_number_of_devices_has_cases() -> None:
    parts = {(case.name, case.part) for case in cases()}
    both = {
        (f"{model}/p={devices}", part)
        for model in MODELS
        for devices in DEVICES
        for part in ("Table I", "Figure 6")
    }
    assert both <= parts
    assert {name for name, part in parts if part == "Table II"} == {
        f"{model}/p=32" for model in MODELS
    }


@pytest.mark.parametrize("model", MODELS)
def test_the_layers_of_table_2_are_there(model: str) -> None:
    assert STRATEGIES[model].keys() <= {node.name for node in paper_problem(model, 4).graph.nodes}


def test_the_integer_program_finds_the_least() -> None:
    drawn = np.random.default_rng(3)
    costs = tuple(drawn.integers(0, 9, size).astype(float) for size in (3, 4, 2, 3))
    ends = [(0, 1), (1, 2), (2, 3), (3, 0), (1, 3), (0, 1)]
    edges = tuple(
        Edge(one, two, drawn.integers(0, 9, (len(costs[one]), len(costs[two]))))
        for one, two in ends
    )
    model = MinSum(costs, edges)
    found, proven = least_by_milp(model, 30.0)
    assert proven
    assert found == pytest.approx(solve(model).cost)
