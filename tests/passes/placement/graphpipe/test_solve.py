"""The search against every valid way of running small models."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopipe.ir.problem import Problem
from autopipe.passes.cost.range_tables import make_range_tables
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.placement.graphpipe.micro_batch_search import PartitionSolver
from autopipe.passes.placement.graphpipe.series_parallel import (
    alternative_trees,
    decompose_series_parallel,
    make_block_chain,
    make_units,
)
from autopipe.passes.placement.graphpipe.stage_costs import NodeSeconds, option_table
from tests.passes.cost.graphs import HOST_LAUNCHES, cluster, problem
from tests.passes.placement.graphpipe.models import Judge, Shape, degrees, model, partitions, shapes

SIZE = 4


def least_found(given: Problem, others: bool) -> float:
    """The least seconds of a micro-batch on the slowest stage; infinite where memory holds no
    stages.
    """
    units = make_units(given.graph)
    forward, backward = node_seconds(given.work, given.cluster.devices[0], given.precision)
    weights = [float((forward + backward)[list(nodes)].sum()) for nodes in units.nodes]
    tree = decompose_series_parallel(units.needs, weights)[0]
    best = np.inf
    for each in (tree, *(alternative_trees(tree, units.needs, weights) if others else ())):
        line = make_block_chain(
            given.graph, units, each, forward + backward, 100, given.cluster.size
        )
        tables = make_range_tables(given, line.chain)
        seconds = NodeSeconds(given, tables.samples)
        prices = option_table(tables, seconds, SIZE, range(1, given.cluster.size + 1))
        found = PartitionSolver(line, given.cluster.size, given.train).minimum_target(
            prices, 0.0, best, given.cluster.size
        )
        best = best if found is None else found
    return best


def least_of_all(given: Problem) -> float:
    """The same over all partitions into convex stages and all numbers of devices for each."""
    judge = Judge.of(given)
    best = np.inf
    for stages in partitions(given.graph, given.cluster.size):
        for each in degrees(len(stages), given.cluster.size, SIZE):
            placement = judge.place(list(zip(stages, each, strict=True)))
            seconds = judge.seconds(placement)
            if seconds < best and judge.fits(placement):
                best = seconds
    return best


@settings(max_examples=60)
@given(
    shapes(),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from([10**9, 200_000, 60_000]),
    st.sampled_from([1e12, 1e10]),
    st.sampled_from(HOST_LAUNCHES),
)
def test_no_valid_stages_are_faster(
    shape: Shape, devices: int, micro_batches: int, memory: int, flops: float, host_launch: float
) -> None:
    graph = model(shape, SIZE)
    assume(len(graph.nodes) <= 7)
    given = problem(
        graph, cluster(devices, memory=memory, flops=flops, host_launch=host_launch), micro_batches
    )
    assert least_found(given, others=True) == pytest.approx(least_of_all(given), rel=1e-9)


BRANCHES = ("parallel", (("series", (256, 256)), ("series", (256, 256))))


@pytest.mark.parametrize("memory", [10**9, 330_000])
def test_equal_branches_need_no_other_line(memory: int) -> None:
    given = problem(model(BRANCHES, SIZE), cluster(2, memory=memory), 4)
    assert least_found(given, others=False) == pytest.approx(least_of_all(given), rel=1e-9)
