"""Labels of nodes and keys of subgraphs, against a comparison of all pairs."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.ir.equality import node_labels, subgraph_key
from autopipe.ir.graph import DType, Graph, Value
from autopipe.passes.analysis.layers import find_layers
from tests.distributed.support.builder import Builder
from tests.distributed.support.zoo import small_graph

Subgraph = list[tuple[str, tuple[str, ...]]]
SIZES = {"a": 1, "b": 2, "c": 3}
"""Number of values that a node of each label reads and writes."""


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Up to ten nodes of few kinds, so that some are equal."""
    builder = Builder()
    value = builder.input((4, 4))
    for _ in range(draw(st.integers(1, 10))):
        kind = draw(st.sampled_from(("Tanh", "MatMul", "Softmax", "Add", "Twice")))
        if kind == "Tanh":
            value = builder.node("Tanh", value)
        elif kind == "MatMul":
            side = builder.shape(value)[1]
            weight = builder.parameter((side, draw(st.sampled_from((4, 8)))), draw(st.booleans()))
            value = builder.node("MatMul", value, weight)
        elif kind == "Softmax":
            value = builder.node("Softmax", value, axis=draw(st.sampled_from((0, 1))))
        elif kind == "Add":
            number = draw(st.sampled_from((0.0, 1.0)))
            count = draw(st.sampled_from((1, 4)))
            full = np.full((count, builder.shape(value)[1]), number)
            value = builder.node("Add", value, builder.constant(full, DType.FLOAT64))
        else:
            value = builder.node("Add", value, value)
    return builder.graph(value)


def describe(graph: Graph, name: str, compared: int) -> Hashable:
    """Return what equal nodes have in common of a value."""
    for parameter in graph.parameters:
        if parameter.value.name == name:
            return type_of(parameter.value), "trained" if parameter.trainable else "buffer"
    for constant in graph.constants:
        if constant.value.name == name:
            numbers = constant.array.reshape(-1).tolist()
            return type_of(constant.value), tuple(numbers) if len(numbers) <= compared else "large"
    return type_of(graph.type_of(name)), "value"


def type_of(value: Value) -> Hashable:
    return value.dtype, value.shape


@given(graphs(), st.sampled_from((0, 8, 1000)))
def test_equal_nodes_have_equal_labels(graph: Graph, compared: int) -> None:
    labels = node_labels(graph, compared)
    if compared == 1000:
        assert labels == node_labels(graph)
    for (one, label), (other, other_label) in itertools.combinations(
        zip(graph.nodes, labels, strict=True), 2
    ):
        equal = (one.op, one.attributes) == (other.op, other.attributes)
        for names, other_names in ((one.inputs, other.inputs), (one.outputs, other.outputs)):
            equal &= [describe(graph, name, compared) for name in names] == [
                describe(graph, name, compared) for name in other_names
            ]
        assert (label == other_label) == equal


def test_absent_results_count_only_if_results_are_compared() -> None:
    builder = Builder()
    value = builder.node("Tanh", builder.node("Tanh", builder.input((4, 4))))
    graph = builder.graph(value)
    first, second = graph.nodes
    graph = replace(graph, nodes=(replace(first, outputs=(*first.outputs, "")), second))
    assert len(set(node_labels(graph))) == 2
    assert len(set(node_labels(graph, compare_results=False))) == 1


def test_loops_are_equal_if_their_bodies_are() -> None:
    builder = Builder()
    value = builder.input((4, 4))
    for op in ("Tanh", "Sigmoid", "Tanh"):
        body = Builder()
        body.input((), DType.INT64, batch_axis=None)
        state = body.input((4, 4))
        value = builder.loop(body.graph(body.node(op, state)), 2, [value], [])
    first, second, third = node_labels(builder.graph(value))
    assert first == third != second


@st.composite
def subgraphs(draw: st.DrawFn) -> Subgraph:
    labels = draw(st.lists(st.sampled_from(sorted(SIZES)), max_size=4))
    names = st.sampled_from(("", "p", "q", "r"))
    return [(label, tuple(draw(names) for _ in range(SIZES[label]))) for label in labels]


def are_equal(
    one: Subgraph, other: Subgraph, described: dict[str, int], other_described: dict[str, int]
) -> bool:
    """Return True if labels, descriptions and wiring are equal, by comparing all pairs of values."""
    if [label for label, _ in one] != [label for label, _ in other]:
        return False
    names = [name for _, each in one for name in each]
    other_names = [name for _, each in other for name in each]
    pairs = list(zip(names, other_names, strict=True))
    return all(
        (left == "") == (right == "") and described.get(left) == other_described.get(right)
        for left, right in pairs
    ) and all(
        (left == second_left) == (right == second_right)
        for (left, right), (second_left, second_right) in itertools.combinations(pairs, 2)
    )


@given(
    subgraphs(),
    subgraphs(),
    st.booleans(),
    st.permutations(("p", "q", "r")),
    st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 1)),
)
def test_equal_subgraphs_have_equal_keys(
    one: Subgraph, other: Subgraph, renamed: bool, names: Sequence[str], facts: tuple[int, ...]
) -> None:
    described = dict(zip(("p", "q", "r"), facts, strict=True))
    other_described = dict(zip(names, facts, strict=True))
    if renamed:
        new_name = {"": "", **dict(zip(("p", "q", "r"), names, strict=True))}
        other = [(label, tuple(new_name[name] for name in each)) for label, each in one]
    equal = are_equal(one, other, described, other_described)
    assert equal or not renamed
    key = subgraph_key(one, described.__getitem__)
    assert (key == subgraph_key(other, other_described.__getitem__)) == equal


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "unet"])
def test_instances_of_a_layer_are_equal_subgraphs(name: str) -> None:
    graph, _ = small_graph(name)
    labels = node_labels(graph, 64)

    def key_of(instance: Sequence[int]) -> Hashable:
        nodes = [graph.nodes[index] for index in instance]
        named = [(*node.inputs, *node.outputs) for node in nodes]
        values = [
            tuple(name for name in names if not (graph.parameter(name) or graph.constant(name)))
            for names in named
        ]
        return subgraph_key(
            zip((labels[index] for index in instance), values, strict=True), lambda _: None
        )

    for layer in find_layers(graph):
        assert len({key_of(instance) for instance in layer.instances}) == 1
