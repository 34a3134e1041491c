"""Stages: what is refused, which values cross, and which nodes every stage computes for itself."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import DType, Graph
from autopipe.ir.placement import (
    Placement,
    Split,
    Stage,
    crossing_values,
    node_ranges,
    recomputed_nodes,
    stage_edges,
)
from tests.distributed.support.builder import Builder, mlp


def masked() -> Graph:
    """A mask made of an input (nodes 0, 1), a product (2), and two users of the mask (3, 5)."""
    builder = Builder()
    ids = builder.input((4, 4), DType.INT64)
    mask = builder.node("Cast", builder.node("Greater", ids, builder.constant(2)), to=11)
    value = builder.node("MatMul", builder.input((4, 4)), builder.parameter((4, 4)))
    first = builder.node("Mul", value, mask)
    second = builder.node("Mul", builder.node("Tanh", first), mask)
    return builder.graph(second)


def place(*groups: tuple[tuple[int, ...], int]) -> Placement:
    return Placement(tuple(Stage(nodes, (device,), 4) for nodes, device in groups))


def test_what_depends_on_inputs_alone_and_costs_little_is_recomputed() -> None:
    assert recomputed_nodes(masked()) == {0, 1}
    builder = Builder()
    product = builder.node("MatMul", builder.input((4, 4)), builder.input((4, 4)))
    after = builder.node("Tanh", product)
    graph = builder.graph(
        builder.node("Add", builder.node("Neg", builder.parameter((4, 4))), after)
    )
    assert recomputed_nodes(graph) == frozenset()


def test_values_that_cross_are_listed_once_and_recomputed_ones_never() -> None:
    graph = masked()
    placement = place(((0, 1, 2), 0), ((3,), 1), ((4, 5), 2))
    assert list(crossing_values(graph, placement)) == [("v2", 0, 1), ("v3", 1, 2)]
    assert stage_edges(graph, placement) == ((0, 1), (1, 2))


def test_a_value_crosses_once_to_each_stage_that_needs_it() -> None:
    builder = Builder()
    value = builder.node("MatMul", builder.input((4, 4)), builder.parameter((4, 4)))
    for _ in range(3):
        last = builder.node("Mul", value, value)
    graph = builder.graph(last)
    placement = place(((0,), 0), ((1, 2), 1), ((3,), 2))
    assert list(crossing_values(graph, placement)) == [("v0", 0, 1), ("v0", 0, 2)]


def test_each_pipeline_has_edges_of_its_own() -> None:
    graph = masked()
    first = place(((0, 1, 2), 0), ((3, 4, 5), 1))
    second = place(((0, 1, 2, 3), 1), ((4, 5), 0))
    placement = Placement(
        first.stages + tuple(replace(stage, pipeline=1) for stage in second.stages)
    )
    placement.verify(graph)
    assert list(crossing_values(graph, placement)) == [("v2", 0, 1), ("v3", 2, 3)]
    assert placement.pipelines == 2
    assert placement.stage_of(1) == {0: 2, 1: 2, 2: 2, 3: 2, 4: 3, 5: 3}


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((Stage((0, 1, 2), (), 4), Stage((3,), (0,), 4)), r"stage 0 lists the devices \(\)"),
        ((Stage((0, 1, 2, 3), (0, 0), 4),), r"stage 0 lists the devices \(0, 0\)"),
        ((Stage((0, 1), (0,), 4), Stage((1, 2, 3), (1,), 4)), "node 'n1' is in stages 0 and 1"),
        ((Stage((0, 1), (0,), 4),), "2 nodes are in no stage, first 'n2'"),
        (
            (Stage((2, 3), (0,), 4), Stage((0, 1), (1,), 4)),
            "stage 0 reads a value of the later stage 1",
        ),
        (
            (Stage((0, 1, 2, 3), (0,), 4), Stage((0, 1, 2), (1,), 4, pipeline=1)),
            "1 node is in no stage of pipeline 1",
        ),
        (
            (Stage((0, 1, 2, 3), (0,), 4), Stage((0, 1, 2, 3), (1,), 4, pipeline=2)),
            "4 nodes .* of pipeline 1",
        ),
    ],
)
def test_placements_that_are_refused(stages: tuple[Stage, ...], message: str) -> None:
    graph, _ = mlp(1)
    with pytest.raises(InfeasibleError, match=message):
        Placement(stages).verify(graph)


def test_devices_and_splits() -> None:
    splits = ((1, (Split("m", 2), Split("n", 3))),)
    stage = Stage((0, 1), (5, 2), 4, splits)
    assert stage.splits_of(1) == (Split("m", 2), Split("n", 3))
    assert stage.splits_of(0) == ()
    assert str(Split("m", 2)) == "m:2"
    assert Placement((stage,)).devices == 6
    assert Placement((stage,)).stage_of() == {0: 0, 1: 0}


@given(st.sets(st.integers(0, 30)))
def test_ranges_hold_just_the_nodes(nodes: set[int]) -> None:
    ranges = node_ranges(sorted(nodes))
    assert [node for start, stop in ranges for node in range(start, stop)] == sorted(nodes)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(ranges))
