"""Lines of stages over runs of different devices, against all there are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.cluster import Cluster
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.problem import Problem
from autopipe.passes.cost.measured import with_micro_batch_size
from autopipe.passes.cost.memory_check import check_stage_devices, device_memory
from autopipe.passes.cost.range_tables import make_range_tables
from autopipe.passes.cost.roofline import mean_node_seconds
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.placement.graphpipe.micro_batch_search import PartitionSolver
from autopipe.passes.placement.graphpipe.series_parallel import (
    decompose_series_parallel,
    make_block_chain,
    make_units,
)
from autopipe.passes.placement.graphpipe.stage_costs import NodeSeconds, OptionTable, option_table
from autopipe.passes.placement.graphpipe.strategy import GraphPipe
from tests.passes.cost.graphs import cluster, perceptron, problem
from tests.passes.cost.mixed import kind, mixed_cluster
from tests.passes.placement.graphpipe.models import model
from tests.passes.placement.graphpipe.test_strategy import TWO

SIZE = 4


def prices_of(both: Problem) -> tuple[PartitionSolver, OptionTable]:
    units = make_units(both.graph)
    seconds = sum(mean_node_seconds(both))
    tree = decompose_series_parallel(
        units.needs, [float(seconds[list(nodes)].sum()) for nodes in units.nodes]
    )[0]
    line = make_block_chain(both.graph, units, tree, seconds, 100, both.cluster.size)
    tables = make_range_tables(both, line.chain)
    prices = option_table(tables, NodeSeconds(both, tables.samples), SIZE, (1, 2))
    return PartitionSolver(line, both.cluster.size, both.train), prices


def chains(
    prices: OptionTable, start: int, run: int, room: int
) -> Iterator[list[tuple[int, int, int, int]]]:
    """Every chain of (start, stop, run, degree) from a place on, runs in order, with so many
    devices left of `run`.
    """
    if start == prices.block_boundaries - 1:
        yield []
        return
    for later in range(run, len(prices.runs)):
        left = room if later == run else prices.runs[later]
        for stop, degree in itertools.product(range(start + 1, prices.block_boundaries), (1, 2)):
            if degree <= left:
                for rest in chains(prices, stop, later, left - degree):
                    yield [(start, stop, later, degree), *rest]


def least_of_all(prices: OptionTable, levels: int) -> float:
    best = np.inf
    for chain in chains(prices, 0, 0, prices.runs[0]):
        if len(chain) > levels:
            continue
        slowest = 0.0
        for place, (start, stop, run, degree) in enumerate(reversed(chain), 1):
            kept = min(place, prices.micro_batches)
            fitting = [
                float(each.seconds[start, stop])
                for each in prices.options
                if (each.run, each.degree) == (run, degree) and each.most[start, stop] >= kept
            ]
            slowest = max(slowest, min(fitting, default=np.inf))
        best = min(best, slowest)
    return best


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.sampled_from([8, 64, 512]), min_size=2, max_size=4),
    st.tuples(
        st.integers(1, 2), st.sampled_from([0.5, 1.0, 4.0]), st.sampled_from([10**9, 400_000])
    ),
    st.tuples(st.integers(1, 2), st.sampled_from([0.5, 2.0]), st.sampled_from([10**9, 400_000])),
    st.integers(1, 4),
)
def test_no_chain_over_runs_has_a_faster_slowest_stage(
    widths: list[int],
    first: tuple[int, float, int],
    second: tuple[int, float, int],
    micro_batches: int,
) -> None:
    parts = [
        (count, kind(speed, memory, str(place)))
        for place, (count, speed, memory) in enumerate((first, second))
    ]
    both = problem(perceptron(widths, SIZE), mixed_cluster(parts), micro_batches)
    solver, prices = prices_of(both)
    best = least_of_all(prices, min(both.cluster.size, prices.block_boundaries - 1))
    found = list(solver.search_partitions(prices, 0.0, np.inf))
    if best == np.inf:
        assert not found
        return
    slowest = max(draft.forward + draft.backward + draft.arriving + draft.returning + draft.end / micro_batches
                  for draft in found[0].drafts)  # fmt: skip
    assert slowest == pytest.approx(best)
    for answer in found:
        for run, count in enumerate(prices.runs):
            assert sum(draft.degree for draft in answer.drafts if draft.run == run) <= count
        order = [draft.run for draft in answer.drafts]
        assert order == sorted(order)
        assert answer.memory <= 1


def test_a_run_is_priced_as_its_kind_is() -> None:
    graph = perceptron([64, 512, 64], SIZE)
    fast = kind(4.0)
    slow = kind(1.0)
    for run, own in enumerate((fast, slow)):
        alone = problem(graph, Cluster("c", (own,) * 4, cluster(4).levels), 4)
        both = problem(graph, Cluster("c", (fast, fast, slow, slow), cluster(4).levels), 4)
        tables = make_range_tables(both, prices_of(alone)[0].line.chain)
        prices = option_table(tables, NodeSeconds(both, tables.samples), SIZE, (2,))
        (one,) = [each for each in prices.options if each.run == run]
        other_tables = make_range_tables(alone, prices_of(alone)[0].line.chain)
        (other,) = option_table(
            other_tables, NodeSeconds(alone, other_tables.samples), SIZE, (2,)
        ).options
        for name in ("forward", "backward", "end", "always", "kept"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize("speeds", [(4.0, 1.0), (1.0, 4.0)])
def test_branches_over_two_kinds(speeds: tuple[float, float]) -> None:
    parts = [(2, kind(0.01 * speed)) for speed in speeds]
    both = problem(model(TWO, 8), mixed_cluster(parts), 8)
    answer = GraphPipe().run(both)
    sized = with_micro_batch_size(both, answer.stages[0].micro_batch_size)
    check_stage_devices(both, answer)
    used = {device for stage in answer.stages for device in stage.devices}
    fast = {device for device in range(4) if both.cluster.devices[device].name == "x0.04"}
    assert fast <= used
    memory = device_memory(sized, answer, stage_costs(sized, answer))
    assert all(need <= both.memory_of(device) for device, need in enumerate(memory))


def test_too_little_memory_is_said_of_the_device_it_is() -> None:
    both = problem(
        perceptron([64] * 5), mixed_cluster([(1, kind(1.0, 30_000)), (1, kind(2.0, 20_000))])
    )
    with pytest.raises(
        InfeasibleError, match=r"of 2 needs .* on device \d, .* over the limit of (29.30|19.53) KiB"
    ):
        GraphPipe().run(both)


@settings(deadline=None, max_examples=10)
@given(st.lists(st.sampled_from([8, 64, 512]), min_size=3, max_size=5), st.integers(1, 2))
def test_kinds_that_are_equal_give_the_plan_of_one_kind(widths: list[int], half: int) -> None:
    same = kind(1.0)
    parted = problem(perceptron(widths), mixed_cluster([(half, same), (half, same)], per_node=1), 4)
    whole = problem(perceptron(widths), mixed_cluster([(2 * half, same)], per_node=1), 4)
    assert GraphPipe().run(parted) == GraphPipe().run(whole)
