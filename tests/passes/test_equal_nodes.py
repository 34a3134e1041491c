"""What passes compute once for equal nodes, against the result of each node by itself."""

from __future__ import annotations

import itertools
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.equality import node_labels
from autopipe.ir.graph import DType, Graph
from autopipe.ir.ops import signature_of, space_of
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Optimizer
from autopipe.passes.analysis.operators import op_instances, sample_axes
from autopipe.passes.cost.measured import Operations, with_micro_batch_size
from autopipe.passes.cost.roofline import roofline_costs
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.placement.graphpipe.stage_costs import NodeSeconds
from autopipe.passes.placement.grid import Degrees, place_grid
from autopipe.passes.placement.tepdist.intra_stage import IntraStageSearch
from autopipe.passes.placement.tepdist.levels import O2
from autopipe.passes.sharding.node_costs import StageOptions
from autopipe.passes.sharding.search import SplitProblem, SplitTables, make_split_tables
from tests.distributed.support.builder import Builder
from tests.distributed.support.zoo import small_graph
from tests.passes.cost.graphs import cluster, perceptron, problem
from tests.passes.placement.pase.random_graphs import graphs

WIDTHS = st.lists(st.sampled_from((8, 16)), min_size=7, max_size=9)


def all_different(graph: Graph) -> tuple[int, ...]:
    """Return labels under which no two nodes are equal."""
    return tuple(range(len(graph.nodes)))


def assert_equal_tables(one: SplitTables, other: SplitTables) -> None:
    assert one.configurations == other.configurations
    for name in ("gradients", "backwards", "passing"):
        for left, right in zip(getattr(one, name), getattr(other, name), strict=True):
            assert np.array_equal(left, right), name
    for left, right in zip(one.model.costs, other.model.costs, strict=True):
        assert np.array_equal(left, right)
    for left, right in zip(one.model.node_memory, other.model.node_memory, strict=True):
        assert np.array_equal(left, right)
    for edges, other_edges in (
        (one.model.edges, other.model.edges),
        (one.kept_again, other.kept_again),
    ):
        for edge, other_edge in zip(edges, other_edges, strict=True):
            assert (edge.source, edge.target) == (other_edge.source, other_edge.target)
            assert np.array_equal(edge.costs, other_edge.costs)


@settings(max_examples=15)
@given(graphs(), st.booleans())
def test_tables_of_splits_are_those_of_each_node(graph: Graph, recompute: bool) -> None:
    own = problem(graph, cluster(4, 2), optimizer=Optimizer("adamw"))
    options = StageOptions(given=frozenset(graph.outputs), in_flight=2, recompute=recompute)
    nodes = range(len(graph.nodes))
    shared = make_split_tables(own, nodes, (0, 1, 2, 3), options)
    with mock.patch("autopipe.passes.sharding.node_costs.node_labels", all_different):
        alone = make_split_tables(own, nodes, (0, 1, 2, 3), options)
    assert_equal_tables(shared, alone)


@settings(max_examples=15)
@given(WIDTHS, st.sampled_from((2, 4, 8)), st.sampled_from((1, 2)))
def test_seconds_at_any_size_are_those_of_each_node(
    widths: list[int], size: int, degree: int
) -> None:
    own = problem(perceptron(widths), cluster(4))
    samples = sample_axes(own.graph)
    shared = NodeSeconds(own, samples)
    with mock.patch("autopipe.passes.placement.graphpipe.stage_costs.node_labels", all_different):
        alone = NodeSeconds(own, samples)
    assert len(alone.firsts) == len(own.graph.nodes) > len(shared.firsts)
    for left, right in zip(
        shared.forward_and_backward(size, degree, own.cluster.kinds),
        alone.forward_and_backward(size, degree, own.cluster.kinds),
        strict=True,
    ):
        assert np.array_equal(left, right)
    assert np.array_equal(shared.indivisible_nodes(3), alone.indivisible_nodes(3))


@pytest.mark.parametrize("name", ["gpt", "moe", "unet", "mt5"])
def test_instances_and_operations_are_those_of_each_node(name: str) -> None:
    graph, _ = small_graph(name)
    uses = op_instances(graph)
    operations = Operations(graph, "bf16")
    by_key = {}
    for index, (node, use) in enumerate(zip(graph.nodes, uses, strict=True)):
        space = space_of(graph, node)
        assert use.space == space
        assert use.flops == use.row.flops(signature_of(graph, node), space)
        key = operations.key(index)
        assert by_key.setdefault(key, operations.operation(index)) == operations.operation(index)
    assert len({id(use) for use in uses}) == len(set(node_labels(graph))) < len(graph.nodes)


@settings(max_examples=10)
@given(WIDTHS, st.integers(1, 3))
def test_stages_with_equal_keys_have_equal_tables(widths: list[int], layers: int) -> None:
    own = problem(perceptron(widths), cluster(4))
    count = len(own.graph.nodes)
    bounds = [*range(0, count, 2 * layers), count]
    ranges = [tuple(range(*each)) for each in itertools.pairwise(bounds)]
    placement = Placement(tuple(Stage(nodes, (0, 1), 8) for nodes in ranges))
    inside = SplitProblem(own, placement, {})
    search = IntraStageSearch(own, O2())
    found: dict[object, SplitTables] = {}
    for nodes, each in zip(ranges, inside.options, strict=True):
        options = replace(each, in_flight=1)
        tables = make_split_tables(own, nodes, (0, 1), options)
        assert_equal_tables(
            found.setdefault(search.stage_key(nodes, (0, 1), options), tables), tables
        )


def test_stages_with_different_bodies_of_loops_are_searched_again() -> None:
    """Until the key contained the body, the second loop got the splits of the first one."""
    builder = Builder()
    value = builder.input((8, 8))
    for op in ("Tanh", "Softmax", "Tanh"):
        body = Builder()
        body.input((), DType.INT64, batch_axis=None)
        state = body.input((8, 8))
        value = builder.loop(body.graph(body.node(op, state)), 2, [value], [])
    own = problem(builder.graph(value), cluster(2))
    search = IntraStageSearch(own, O2())
    first, second, third = (
        search.stage_key([index], (0, 1), StageOptions(given=frozenset(node.outputs)))
        for index, node in enumerate(own.graph.nodes)
    )
    assert first == third != second


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["gpt", "moe", "unet", "mt5"])
def test_costs_of_stages_are_those_of_each_node(name: str, recompute: bool) -> None:
    """The bytes of a backward and the layouts are computed once for equal nodes."""
    graph, loss = small_graph(name, 4)
    own = replace(
        problem(perceptron([8, 8]), cluster(4)),
        graph=graph,
        work=roofline_costs(graph, "bf16", (8, 0)),
        loss=loss,
        batch_size=16,
        precision="bf16",
    )
    placed = place_grid(with_micro_batch_size(own, 4), Degrees(2, 1, 2), 2, style="loop")
    placement = Placement(tuple(replace(each, recompute=recompute) for each in placed.stages))
    shared = stage_costs(own, placement)
    fresh = replace(graph, name="another")
    with (
        mock.patch("autopipe.passes.cost.memory.node_labels", all_different),
        mock.patch("autopipe.passes.cost.stage_work.node_labels", all_different),
    ):
        assert stage_costs(replace(own, graph=fresh), placement) == shared
