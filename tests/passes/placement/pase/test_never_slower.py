"""Tests that pase is never slower, in the simulator, than handcrafted and random strategies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopipe.configs.zoo import MODELS
from autopipe.ir.cluster import Cluster, Level, Link
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.problem import Mode, Problem
from autopipe.passes.cost.roofline import roofline_costs
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.placement.data_parallel import DataParallel
from autopipe.passes.placement.handcrafted import Handcrafted, OneWeirdTrick
from autopipe.passes.placement.pase.strategy import Mcmc, Pase
from autopipe.passes.registry import Strategy
from tests.passes.cost.graphs import cluster
from tests.passes.placement.pase.paper.models import model_graph

BASELINES: tuple[Strategy, ...] = (
    DataParallel(),
    Handcrafted(),
    Handcrafted(tensor=2),
    OneWeirdTrick(),
    Mcmc(iterations=1000, temperature=0.5),
)
FEW = ("alexnet", "transformer")
REST = tuple(
    pytest.param(name, marks=pytest.mark.sweep) for name in sorted(MODELS) if name not in FEW
)


def links(devices: int, per_node: int, inside: float, between: float) -> Cluster:
    """Devices whose kernels start at once, with links of so many bytes a second in a node and
    between nodes.
    """
    found = cluster(devices, memory=10**12, latency=1e-9)
    levels = (
        Level("node", per_node, Link(1e-9, inside)),
        Level("cluster", -(-devices // per_node), Link(1e-9, between)),
    )
    return replace(found, levels=levels)


@pytest.mark.parametrize(
    "devices", [links(4, 2, 1e10, 1e9), links(8, 4, 1e9, 1e9)], ids=["2x2", "2x4"]
)
@pytest.mark.parametrize("model", [*FEW, *REST])
def test_never_slower(model: str, devices: Cluster) -> None:
    graph = model_graph(model, 16)
    given = Problem(graph, roofline_costs(graph), devices, 32, 2, Mode.TRAIN, "loss")
    best = seconds(given, Pase())
    assert best is not None
    found = {strategy: seconds(given, strategy) for strategy in BASELINES}
    assert any(found.values())
    assert {
        strategy: other for strategy, other in found.items() if other and other < best * (1 - 1e-9)
    } == {}


def seconds(given: Problem, strategy: Strategy) -> float | None:
    """A step's; None where the strategy is refused or makes a pipeline, which overlaps what is not
    its own.
    """
    try:
        strategy.requires(given)
        placement = strategy.run(given)
    except InfeasibleError:
        return None
    if len(placement.stages) > 1:
        return None
    (cost,) = stage_costs(given, placement)
    return (
        given.micro_batches * (cost.forward_s + cost.backward_s) + cost.gradient_s + cost.update_s
    )
