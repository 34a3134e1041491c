"""Tests of the paper's strategies as placements, and of data parallelism in the paper's space."""

from __future__ import annotations

import math

import pytest

from autopipe.ir.errors import CodegenError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.ops import operator_of
from autopipe.ir.placement import Placement, Split
from autopipe.ir.problem import Problem
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.lower.lower import lower
from autopipe.passes.placement.data_parallel import DataParallel
from autopipe.passes.placement.pase.paper_costs import LayerGraph
from autopipe.passes.placement.pase.paper_rules import make_layer_graph
from autopipe.passes.placement.pase.paper_search import (
    PaperStrategy,
    find_strategy,
    make_paper_tables,
    paper_placement,
)
from autopipe.passes.schedule.published.base import GPipe
from tests.passes.placement.pase.paper.models import (
    PAPER,
    cost_of,
    data_parallel,
    model_graph,
    paper_graph,
    problem_of,
)


def chosen(layers: LayerGraph, **degrees: tuple[int, ...]) -> PaperStrategy:
    """The layers whose names end in a key cut by its degrees (a dot stands for a slash), all others
    whole.
    """
    found = [
        next(
            (cut for key, cut in degrees.items() if each.name.endswith(key)), (1,) * len(each.axes)
        )
        for each in layers.layers
    ]
    return PaperStrategy(layers, tuple(found), 0.0, 0.0, False)


def splits(problem: Problem, placement: Placement, op: str) -> list[str]:
    """The splits of the nodes of one operator."""
    found = dict(placement.stages[0].splits)
    nodes = [index for index, node in enumerate(problem.graph.nodes) if node.op == op]
    return [" ".join(map(str, found.get(node, ()))) for node in nodes]


def refusal(problem: Problem, placement: Placement) -> str:
    schedule = GPipe().run(problem, placement)
    with pytest.raises(CodegenError) as caught:
        lower(problem.graph, placement, schedule, "loss")
    return str(caught.value)


def test_splits_of_table_ii_are_the_nodes_own() -> None:
    problem = problem_of(paper_graph("alexnet"), 32)
    placement = paper_placement(problem, find_strategy(make_paper_tables(problem)))
    assert splits(problem, placement, "Gemm") == ["n:4 k:8", "n:8 k:4", "n:4 k:8"]
    assert splits(problem, placement, "Conv")[:4] == ["n:32", "n:32", "n:32", "n:16 c:2"]
    assert splits(problem, placement, "Relu")[-2:] == ["x1:4", "x1:8"]


def test_a_split_of_stacked_layers_is_rejected_by_name() -> None:
    problem = problem_of(model_graph("rnnlm", 8), 4)
    placement = paper_placement(
        problem, chosen(make_layer_graph(problem.graph), LSTM=(2, 1, 2, 1, 1))
    )
    assert splits(problem, placement, "LSTM") == ["b:2 l:2", "b:2"]
    assert all(cost.forward_s > 0 for cost in stage_costs(problem, placement))
    assert "LSTM lacks the axis 'l'" in refusal(problem, placement)


def test_a_split_of_stacked_projections_is_rejected_by_name() -> None:
    problem = problem_of(model_graph("transformer", 8), 3)
    placement = paper_placement(
        problem, chosen(make_layer_graph(problem.graph), projections=(3, 1, 1, 1, 1, 1))
    )
    assert splits(problem, placement, "MatMul")[0] == "s:3"
    assert "MatMul lacks the axis 's'" in refusal(problem, placement)


def test_a_split_inside_a_node_is_rejected_by_name() -> None:
    problem = problem_of(model_graph("transformer", 8), 4)
    placement = paper_placement(
        problem, chosen(make_layer_graph(problem.graph), scores=(1, 1, 1, 2, 1))
    )
    assert set(splits(problem, placement, "Attention")) == {"scores.m:2"}
    assert "scores.m" in refusal(problem, placement)


def test_heads_are_columns_and_rows_of_their_projections() -> None:
    problem = problem_of(model_graph("transformer", 8), 4)
    layers = make_layer_graph(problem.graph)
    heads = {"projections": (1, 2, 2, 1, 1, 1), "encoder.0/attention/MatMul_1": (2, 2, 1, 1, 1)}
    output = {"encoder.0/attention/output/MatMul": (2, 1, 1, 2, 1)}
    placement = paper_placement(problem, chosen(layers, **heads, **output))
    assert splits(problem, placement, "MatMul")[:4] == ["b0:2 n:2"] * 3 + ["b0:2 k:2"]
    assert splits(problem, placement, "Attention")[0] == "b:2 h:2"


def test_parts_must_divide_the_devices() -> None:
    problem = problem_of(model_graph("rnnlm", 8), 3)
    strategy = chosen(make_layer_graph(problem.graph), LSTM=(2, 1, 1, 1, 1))
    with pytest.raises(InfeasibleError, match="LSTM into 2 parts, which does not divide 3 devices"):
        paper_placement(problem, strategy)


@pytest.mark.parametrize(
    "name", ["alexnet", "inceptionv3", "rnnlm", "transformer", "gpt", "llama", "mt5", "wide-resnet"]
)
def test_data_parallelism_is_that_of_the_strategy(name: str) -> None:
    """Each node that reads weights or activations is split as strategy data_parallel splits it."""
    graph = model_graph(name, 8)
    problem = problem_of(graph, 4)
    layers = make_layer_graph(graph)
    strategy = PaperStrategy(layers, data_parallel(graph, layers, 4), 0.0, 0.0, False)
    ours = dict(paper_placement(problem, strategy).stages[0].splits)
    theirs = dict(DataParallel().run(problem).stages[0].splits)
    assert set(ours) <= set(theirs)
    assert all(ours[node] == theirs[node] == (Split(theirs[node][0].axis, 4),) for node in ours)
    assert {_kind(graph, node) for node in set(theirs) - set(ours)} <= {"view"}


def _kind(graph: Graph, node: int) -> str:
    row = operator_of(graph.nodes[node])
    assert row is not None
    return row.kind


@pytest.mark.parametrize("name", PAPER)
def test_searched_strategies_beat_data_parallelism(name: str) -> None:
    problem = problem_of(paper_graph(name), 8)
    strategy = find_strategy(make_paper_tables(problem))
    assert all(math.prod(each) <= 8 for each in strategy.degrees)
    layers = make_layer_graph(problem.graph)
    assert strategy.cost < cost_of(layers, data_parallel(problem.graph, layers, 8))
