from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.placement import Placement, Stage
from autopipe.passes.placement.piper.strategy import LIGHT, MAX_FRACTION, merge_nodes
from tests.passes.cost.graphs import Builder


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 99), st.integers(0, 99)),
        min_size=1,
        max_size=30,
    )
)
def test_blocks_are_a_partition_in_an_order_that_needs_what_comes_first(
    steps: list[tuple[int, int, int]],
) -> None:
    builder = Builder(4, 8)
    values = [builder.linear("x", 8)]
    for kind, one, two in steps:
        left = values[one % len(values)]
        right = values[two % len(values)]
        if kind == 0:
            values.append(builder.relu(left))
        else:
            values.append(builder.linear(left, 8) if kind == 1 else builder.add(left, right))
    graph = builder.finish(values[-1])
    weights = np.array([50.0 if node.op == "MatMul" else 0.1 for node in graph.nodes])
    blocks = merge_nodes(graph, weights)
    Placement(tuple(Stage(nodes, (0,), 4) for nodes in blocks.nodes)).verify(graph)
    block_of = {node: number for number, nodes in enumerate(blocks.nodes) for node in nodes}
    needs = [0] * len(blocks.nodes)
    for index, node in enumerate(graph.nodes):
        for name in node.inputs:
            producer = graph.producer(name)
            if producer is not None and block_of[producer] != block_of[index]:
                needs[block_of[index]] |= 1 << block_of[producer]
    assert tuple(needs) == blocks.needs
    shares = weights / weights.sum()
    for nodes in blocks.nodes:
        own = shares[list(nodes)]
        light = own[own <= LIGHT].sum()
        assert len(nodes) == 1 or own.sum() - light <= max(MAX_FRACTION, own.max()) + 1e-9


def test_layers_with_a_way_around_them_are_blocks() -> None:
    """x -> linear -> relu -> linear, added to x: what is inside exchanges most and leaves nothing
    to cut.
    """
    builder = Builder(4, 8)
    data = "x"
    for _ in range(40):
        inner = builder.linear(builder.relu(builder.linear(data, 32)), 8)
        data = builder.add(inner, data)
    graph = builder.finish(data)
    weights = np.array([1.0 if node.op == "MatMul" else 0.02 for node in graph.nodes])
    blocks = merge_nodes(graph, weights)
    assert [len(nodes) for nodes in blocks.nodes] == [4] * 40
    assert [graph.nodes[nodes[-1]].op for nodes in blocks.nodes] == ["Add"] * 40
