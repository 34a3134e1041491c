"""Every strategy on devices of different kinds: it weighs them, or says in one line that it does
not.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopipe.ir.errors import AutopipeError, InfeasibleError
from autopipe.ir.problem import Problem
from autopipe.passes.cost.memory_check import check_stage_devices
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.placement.grid import Grid
from autopipe.passes.placement.pase.strategy import Pase
from autopipe.passes.placement.tessel_shapes import TesselShapes
from autopipe.passes.registry import Strategy, strategy_class, strategy_names
from tests.passes.cost.graphs import perceptron, problem
from tests.passes.cost.mixed import kind, mixed_cluster

STRADDLE = ("breadth_first", "data_parallel", "handcrafted", "mcmc", "pase", "piper")


def given(slow: float = 0.01, **more: int) -> Problem:
    both = mixed_cluster([(2, kind(0.04, name="fast")), (2, kind(slow, name="slow"))])
    return problem(perceptron([128] * 41), both, 16, **more)


@pytest.mark.parametrize(
    "name", [name for name in strategy_names() if name not in ("auto", "explicit", "manual")]
)
def test_a_strategy_straddles_no_kinds_or_says_so(name: str) -> None:
    both = given()
    strategy = strategy_class(name)()
    try:
        strategy.requires(both)
        placement = strategy.run(both)
    except AutopipeError as error:
        assert name in STRADDLE or "convolution" in error.message
        if name in STRADDLE:
            assert isinstance(error, InfeasibleError)
            assert "2 fast and 2 slow" in error.message and "\n" not in error.message
            assert "cluster.allow_mixed_stages" in error.hint
        return
    check_stage_devices(both, placement)
    assert name not in STRADDLE


@pytest.mark.parametrize("name", ["data_parallel", "pase", "handcrafted", "grid", "tessel_shapes"])
def test_any_strategy_straddles_kinds_where_it_is_allowed_to(name: str) -> None:
    both = given()
    free = replace(both, cluster=replace(both.cluster, allow_mixed_stages=True))
    strategy = strategy_class(name)()
    strategy.requires(free)
    strategy.run(free).verify(free.graph)


@pytest.mark.parametrize(
    "strategy",
    [
        TesselShapes("v"),
        TesselShapes("v", stages_per_rank=2),
        Grid(pipeline=2),
        Grid(pipeline=4),
        Pase(stages=2),
    ],
)
def test_slow_devices_get_less_work(strategy: Strategy) -> None:
    both = given(slow=0.02)
    placement = strategy.run(both)
    work = {"fast": 0, "slow": 0}
    for stage in placement.stages:
        work[both.cluster.devices[stage.devices[0]].name] += sum(
            both.graph.nodes[n].op == "MatMul" for n in stage.nodes
        )
    assert work["fast"] >= 1.7 * work["slow"] > 0
    costs = stage_costs(both, placement)
    seconds = [cost.forward_s + cost.backward_s for cost in costs]
    assert max(seconds) < 2 * min(seconds)


def test_two_directions_over_different_devices() -> None:
    both = given(slow=0.02)
    placement = TesselShapes("x").run(both)
    assert {stage.pipeline for stage in placement.stages} == {0, 1}
    placement.verify(both.graph)


def test_degrees_that_only_straddle_are_refused() -> None:
    both = problem(perceptron([128] * 9), mixed_cluster([(1, kind(1.0)), (3, kind(2.0))]), 8)
    with pytest.raises(
        InfeasibleError, match="a group has devices of different types: 1 x1 and 3 x2"
    ):
        Grid(pipeline=2).run(both)
    with pytest.raises(
        InfeasibleError, match="stage 0 would have devices of different kinds: 1 x1 and 1 x2"
    ):
        Pase(stages=2).run(both)
