"""Tests of partitions of models: the crossing bytes are the bytes sent, and fixed nodes are in
their stages.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from autopipe.configs.zoo import build, configure
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.placement import Placement, Stage, crossing_values, recomputed_nodes
from autopipe.ir.problem import Mode, Problem
from autopipe.passes.analysis.gradients import differentiable_values
from autopipe.passes.cost.roofline import roofline_costs
from autopipe.passes.frontend import read_model
from autopipe.passes.partition.min_cut_ilp import StagePartition, partition_nodes
from tests.passes.cost.graphs import Builder, cluster
from tests.passes.cost.graphs import problem as given

GPT = (("layers", "2"), ("vocabulary", "1024"), ("sequence", "16"))
FLAVA = (("text_layers", "4"), ("image_layers", "4"))


@cache
def zoo_problem(name: str, settings: tuple[tuple[str, str], ...]) -> Problem:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        build(configure(name, {**dict(settings), "loss": "true", "weights": "none"})).save(path)
        model = read_model(path, batch=2)
    return Problem(
        model.graph,
        roofline_costs(model.graph),
        cluster(8, latency=1e-9),
        8,
        4,
        model.mode,
        model.loss,
    )


def placement_of(problem: Problem, division: StagePartition) -> Placement:
    """One device a stage."""
    size = problem.micro_batch_size
    placement = Placement(
        tuple(Stage(nodes, (place,), size) for place, nodes in enumerate(division.nodes))
    )
    placement.verify(problem.graph)
    return placement


def sent(problem: Problem, placement: Placement) -> float:
    """Bytes of messages and of the gradients that come back."""
    returned = differentiable_values(problem.graph) if problem.train else frozenset()
    crossing = [name for name, _, _ in crossing_values(problem.graph, placement)]
    return sum(
        problem.graph.type_of(name).bytes * (2 if name in returned else 1) for name in crossing
    )


@pytest.mark.parametrize(("name", "settings"), [("gpt", GPT), ("flava", FLAVA)])
def test_crossing_bytes_are_the_bytes_sent(
    name: str, settings: tuple[tuple[str, str], ...]
) -> None:
    problem = zoo_problem(name, settings)
    division = partition_nodes(problem, 3, 0.1)
    placement = placement_of(problem, division)
    assert division.crossing_bytes == sent(problem, placement)
    assert division.bound <= division.crossing_bytes <= division.contiguous_bytes
    assert 0 <= division.imbalance <= 0.1 + 1e-6
    assert division.proven
    assert division == partition_nodes(problem, 3, 0.1)


def test_stages_of_a_branched_model_send_less_than_contiguous_ones() -> None:
    division = partition_nodes(zoo_problem("flava", FLAVA), 4, 0.1)
    assert division.proven
    assert division.crossing_bytes < division.contiguous_bytes


def test_inference_sends_no_gradients() -> None:
    problem = replace(zoo_problem("gpt", GPT), mode=Mode.INFER)
    division = partition_nodes(problem, 2, 0.2)
    assert division.crossing_bytes == sent(problem, placement_of(problem, division))
    assert division.crossing_bytes < partition_nodes(zoo_problem("gpt", GPT), 2, 0.2).crossing_bytes


def test_fixed_operators_are_in_the_required_stages() -> None:
    problem = zoo_problem("gpt", GPT)
    nodes = [index for index, node in enumerate(problem.graph.nodes) if "layers.0" in node.name]
    shared = min(recomputed_nodes(problem.graph))
    settled = {nodes[-1]: 0, shared: 2}
    division = partition_nodes(problem, 3, 1.0, settled)
    placement_of(problem, division)
    assert nodes[-1] in division.nodes[0]
    assert shared in division.nodes[2]


def test_fixed_branches_are_parallel_although_the_file_interleaves_them() -> None:
    builder = Builder(8, 16)
    left = "x"
    right = "x"
    for _ in range(3):
        left = builder.linear(left, 16)
        right = builder.linear(right, 16)
    problem = given(builder.finish(left, right), cluster(2))
    assert partition_nodes(problem, 2, 0.0, {4: 0, 1: 1}).nodes == ((0, 2, 4), (1, 3, 5))
    assert partition_nodes(problem, 2, 0.0, {4: 1, 1: 0}).nodes == ((1, 3, 5), (0, 2, 4))


def test_contradictory_fixed_operators_are_named() -> None:
    problem = zoo_problem("gpt", GPT)
    late = next(index for index, node in enumerate(problem.graph.nodes) if "layers.1" in node.name)
    with pytest.raises(
        ConfigurationError, match=r"'/layers\.1.* in stage 0, but .*/Gather' in stage 1"
    ):
        partition_nodes(problem, 3, 1.0, {0: 1, late: 0})


def test_an_infeasible_tolerance_reports_the_minimum() -> None:
    builder = Builder(8, 16)
    data = "x"
    for width in (16, 4096, 4096):
        data = builder.linear(data, width)
    problem = given(builder.finish(data), cluster(2))
    expected = r"exceeds the mean by at most 8\.0%: the minimum imbalance is \d+\.\d%"
    with pytest.raises(InfeasibleError, match=expected) as refused:
        partition_nodes(problem, 2, 0.08)
    smallest = float(str(refused.value).split("imbalance is ")[1].split("%")[0]) / 100
    assert partition_nodes(problem, 2, smallest).imbalance <= smallest + 1e-6
    with pytest.raises(InfeasibleError, match="3 operators cannot be partitioned into 4 stages"):
        partition_nodes(problem, 4, 0.08)


def test_without_time_the_best_contiguous_partition_is_returned() -> None:
    division = partition_nodes(zoo_problem("flava", FLAVA), 4, 0.1, time_limit=0.0)
    assert division.crossing_bytes == division.contiguous_bytes
    assert not division.proven
    assert len(np.concatenate(division.nodes)) == len(zoo_problem("flava", FLAVA).graph.nodes)
