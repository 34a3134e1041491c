"""Chains over devices of different kinds, against all there are."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.cluster import Cluster
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.problem import Constraint
from autopipe.passes.cost.memory_check import check_stage_devices, device_memory
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.placement.pipedream import PipeDream
from tests.passes.cost.graphs import cluster, perceptron, problem
from tests.passes.cost.mixed import OUTER, kind, mixed_cluster
from tests.passes.placement.pipedream.test_search import chains
from tests.passes.placement.pipedream.test_strategy import fits, place, prices

SPEEDS = st.sampled_from([0.5, 1.0, 4.0])
MEMORY = st.sampled_from([10**9, 600_000])


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.sampled_from([8, 64, 512]), min_size=3, max_size=4),
    st.tuples(st.integers(1, 2), SPEEDS, MEMORY),
    st.tuples(st.integers(1, 2), SPEEDS, MEMORY),
    st.integers(1, 5),
)
def test_no_chain_without_straddling_has_a_faster_slowest_stage(
    widths: list[int],
    first: tuple[int, float, int],
    second: tuple[int, float, int],
    micro_batches: int,
) -> None:
    graph = perceptron(widths)
    kinds = [kind(speed, memory, f"{speed}-{memory}") for _, speed, memory in (first, second)]
    devices = (kinds[0],) * first[0] + (kinds[1],) * second[0]
    # One level of links and no groups: the order of devices is the one that is given.
    given = problem(graph, Cluster("c", devices, cluster(len(devices)).levels), micro_batches)
    best = float("inf")
    for stages in range(1, len(devices) + 1):
        for chain in chains(len(graph.nodes), len(devices), stages, (1, 2)):
            placement = place(graph, chain)
            whole = all(
                len({devices[each] for each in stage.devices}) == 1 for stage in placement.stages
            )
            if whole and fits(given, placement):
                best = min(best, max(prices(given, placement)))
    strategy = PipeDream(objective="slowest_stage")
    if best == float("inf"):
        try:
            assert strategy.run(given).devices < len(devices)
        except InfeasibleError as error:
            assert "over the limit" in str(error)
        return
    answer = strategy.run(given)
    check_stage_devices(given, answer)
    assert fits(given, answer)
    assert max(prices(given, answer)) == pytest.approx(best, rel=2e-3)


def test_a_slow_device_gets_less_work_in_proportion() -> None:
    graph = perceptron([256] * 51)
    both = problem(graph, mixed_cluster([(2, kind(0.004)), (2, kind(0.001))]), micro_batches=16)
    answer = PipeDream(replicate=False, objective="slowest_stage").run(both)
    layers = {stage.devices[0]: len(stage.nodes) for stage in answer.stages}
    assert layers[0] + layers[1] == pytest.approx(4 * (layers[2] + layers[3]), rel=0.2)
    seconds = [cost.forward_s + cost.backward_s for cost in stage_costs(both, answer)]
    assert max(seconds) < 1.5 * min(seconds)


def test_devices_with_little_memory_come_where_less_is_kept() -> None:
    """A pipeline's last stages keep fewer micro-batches: devices with little memory stand there,
    however given.
    """
    graph = perceptron([64] * 17, batch=256)
    plain = problem(graph, cluster(4), micro_batches=16)
    needs = device_memory(
        plain, even := PipeDream(replicate=False).run(plain), stage_costs(plain, even)
    )
    large = kind(1.0, 10**9, "large")
    small = kind(1.0, needs[2], "small")
    for parts in itertools.permutations([(2, large), (2, small)]):
        both = problem(graph, mixed_cluster(parts), micro_batches=16)
        answer = PipeDream(replicate=False).run(both)
        assert fits(both, answer)
        names = [both.cluster.devices[stage.devices[0]].name for stage in answer.stages]
        assert names == ["large", "large", "small", "small"]


@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.sampled_from([8, 64, 512]), min_size=3, max_size=5),
    st.integers(1, 2),
    st.integers(1, 5),
)
def test_kinds_that_are_equal_give_the_plan_of_one_kind(
    widths: list[int], half: int, micro_batches: int
) -> None:
    graph = perceptron(widths)
    same = kind(1.0)
    parted = problem(graph, mixed_cluster([(half, same), (half, same)]), micro_batches)
    levels = (parted.cluster.groups[0].levels[0], replace(parted.cluster.levels[0], link=OUTER))
    whole = replace(parted, cluster=Cluster("c", parted.cluster.devices, levels))
    assert PipeDream().run(parted) == PipeDream().run(whole)


def test_a_constraint_or_an_option_lets_a_stage_straddle() -> None:
    graph = perceptron([64, 64, 64], batch=12)
    both = problem(graph, mixed_cluster([(1, kind(1.0)), (1, kind(1.5))]))
    asked = replace(both, constraints=(Constraint("*", devices=(0, 1)),))
    assert [stage.devices for stage in PipeDream().run(asked).stages] == [(0, 1)]
    assert all(len(stage.devices) == 1 for stage in PipeDream(max_stages=2).run(both).stages)
    slower = mixed_cluster([(1, kind(0.001)), (1, kind(0.0011))])
    free = problem(perceptron([512, 512, 512], batch=12), replace(slower, allow_mixed_stages=True))
    assert [stage.devices for stage in PipeDream(max_stages=1).run(free).stages] == [(0, 1)]
