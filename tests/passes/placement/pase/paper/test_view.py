"""Tests of the conversion from ONNX graphs to the paper's layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopipe.configs.zoo import MODELS
from autopipe.ir.graph import Graph, Value
from autopipe.passes.frontend.fusion import cross_entropy
from autopipe.passes.placement.pase.paper_costs import (
    FreeCost,
    Layer,
    LayerGraph,
    LSTMCost,
    MatmulCost,
    build_tables,
)
from autopipe.passes.placement.pase.paper_rules import group_dimensions, make_layer_graph
from autopipe.passes.placement.pase.paper_search import find_strategy
from tests.passes.cost.graphs import F32, Builder
from tests.passes.placement.pase.paper.models import cost_of, model_graph, paper_graph


def layer(graph: LayerGraph, ending: str) -> Layer:
    (found,) = [each for each in graph.layers if each.name.endswith(ending)]
    return found


def axes(placed: Layer) -> dict[str, int]:
    return {axis.name: axis.size for axis in placed.axes}


def pointwise(placed: Layer) -> Any:
    return placed.cost.pointwise if isinstance(placed.cost, MatmulCost) else None


def test_a_fused_projection_and_loss_becomes_a_matmul_and_a_loss() -> None:
    apart = model_graph("rnnlm", 8)
    joined = cross_entropy.fuse_linear_losses(apart, ("loss",))
    assert len(joined.nodes) < len(apart.nodes)
    (first, first_edges), (second, second_edges) = (
        (
            [(each.extents, each.operands, each.results, each.cost) for each in found.layers],
            found.edges,
        )
        for found in map(make_layer_graph, (apart, joined))
    )
    assert (first, first_edges) == (second, second_edges)


def test_pointwise_operations_are_merged_into_the_layer_before() -> None:
    builder = Builder(8, 4)
    hidden = builder.linear("x", 6)
    biased = builder.add(hidden, builder.parameter("bias", (6,)))
    raised = builder.relu(biased)
    result = builder.add(builder.linear(raised, 6), builder.parameter("other", (6,)))
    graph = make_layer_graph(builder.finish(builder.add(result, raised)))
    first, second, joined = graph.layers
    assert (first.nodes, pointwise(first)) == ((0, 1, 2), 2)
    assert (second.nodes, pointwise(second)) == ((3, 4), 0)
    assert joined.nodes == (5,)
    assert [(edge.source, edge.target) for edge in graph.edges] == [(0, 1), (0, 2), (1, 2)]


def test_projections_of_one_value_are_one_matmul_and_of_two_are_stacked() -> None:
    graph = make_layer_graph(paper_graph("transformer"))
    own, cross = (
        layer(graph, f"/decoder.3/{name}/MatMul_1/projections")
        for name in ("attention", "cross_attention")
    )
    extents = {"s": 3, "b": 64, "h": 8, "l": 256, "k": 64, "e": 512}
    assert axes(own) == axes(cross) == extents
    assert own.cost == MatmulCost(batch=(), rows=(1, 3), columns=(0, 2, 4), summed=(5,))
    assert cross.cost == MatmulCost(batch=(0,), rows=(1, 3), columns=(2, 4), summed=(5,))
    assert [each.name for each in graph.layers if each.name.endswith("/stack")] == [
        f"/decoder.{index}/cross_attention/MatMul_1/stack" for index in range(6)
    ]


@pytest.mark.parametrize("bias_first", [False, True])
@pytest.mark.parametrize("narrow", [False, True])
def test_unequal_projections_remain_separate_layers(narrow: bool, bias_first: bool) -> None:
    """Two heads of four; `narrow` values are not of the shape of queries and keys."""
    builder = Builder(2, 8)
    builder.inputs = (Value("x", F32, (2, 4, 8)),)
    builder.shapes["x"] = (2, 4, 8)

    def heads(width: int) -> str:
        rows = builder.linear("x", 2 * width)
        bias = builder.parameter(f"b{len(builder.parameters)}", (2 * width,))
        rows = builder.node("Add", (bias, rows) if bias_first else (rows, bias), (2, 4, 2 * width))
        parts = builder.node("Reshape", (rows,), (2, 4, 2, width))
        return builder.node("Transpose", (parts,), (2, 2, 4, width), perm=(0, 2, 1, 3))

    operands = (heads(4), heads(4), heads(2 if narrow else 4))
    result = builder.node("Attention", operands, (2, 2, 4, 2 if narrow else 4))
    names = [
        each.name.rpartition("/")[2] for each in make_layer_graph(builder.finish(result)).layers
    ]
    if narrow:
        assert names == ["matmul0", "matmul4", "matmul8", "attention12"]
    else:
        assert names == ["projections", "unstack", "scores", "softmax", "attention12"]


def test_merged_heads_remain_separate_axes() -> None:
    output = layer(
        make_layer_graph(paper_graph("transformer")), "/encoder.0/attention/output/MatMul"
    )
    assert axes(output) == {"b0": 64, "m": 256, "n": 512, "k0": 8, "k1": 64}


def test_stacked_lstms_are_one_layer() -> None:
    lstm = make_layer_graph(paper_graph("rnnlm")).layers[1]
    assert lstm.cost == LSTMCost()
    assert axes(lstm) == {"l": 2, "s": 256, "b": 64, "n": 2048, "k": 2048}


def test_states_of_an_lstm_are_located_in_its_result() -> None:
    graph = model_graph("rnnlm", 8)
    first = next(index for index, node in enumerate(graph.nodes) if node.op == "LSTM")
    stated = replace(graph.nodes[first], outputs=(graph.nodes[first].outputs[0], "last"))
    state = Value("last", F32, (1, 8, 32))
    nodes = (*graph.nodes[:first], stated, *graph.nodes[first + 1 :])
    layers = make_layer_graph(replace(graph, nodes=nodes, values=(*graph.values, state)))
    assert [type(each.cost) for each in layers.layers].count(LSTMCost) == 1
    assert layers.locations["last"].groups == ((1,), (2,), (3,))


def test_an_image_is_flattened_and_a_vector_of_channels_is_not() -> None:
    flattened = [
        each.name
        for each in make_layer_graph(paper_graph("alexnet")).layers
        if each.cost == FreeCost()
    ]
    assert flattened == ["/Flatten/ravel", "/Flatten"]
    assert not any(each.contiguous for each in make_layer_graph(paper_graph("inceptionv3")).layers)


@pytest.mark.parametrize("name", MODELS)
def test_any_model_of_the_zoo(name: str) -> None:
    """Each node belongs to exactly one layer or reads weights only or none; the strategy found has
    the cost that the search reports.
    """
    graph = model_graph(name, 8)
    layers = make_layer_graph(graph)
    covered = [node for placed in layers.layers for node in placed.nodes]
    assert len(covered) == len(set(covered))
    assert all(_light(graph, node) for node in set(range(len(graph.nodes))) - set(covered))
    strategy = find_strategy(build_tables(layers, 6))
    assert strategy.cost == pytest.approx(cost_of(layers, strategy.degrees))


def _light(graph: Graph, node: int) -> bool:
    """Whether a node reads weights alone, or no weights at all."""
    origins = set()
    pending = list(graph.nodes[node].inputs)
    while pending:
        name = pending.pop()
        producer = graph.producer(name) if name else None
        if producer is not None:
            pending += graph.nodes[producer].inputs
        elif name and graph.constant(name) is None:
            origins.add(graph.parameter(name) is not None)
    return len(origins) <= 1


@pytest.mark.parametrize(
    ("extents", "shape", "groups"),
    [
        ((2, 3, 4), (6, 4), ((0, 1), (2,))),
        ((2, 1, 4), (2, 4), ((0,), (2,))),
        ((2, 4), (2, 1, 4, 1), ((0,), (), (1,), ())),
        ((2, 6), (2, 2, 3), None),
        ((4, 6), (6, 4), None),
        ((), (1,), ((),)),
    ],
)
def test_regrouping(extents: tuple[int, ...], shape: tuple[int, ...], groups: object) -> None:
    assert group_dimensions(extents, shape) == groups
