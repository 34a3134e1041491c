"""What graphpipe finds for models with branches computes what one device does, under each schedule that takes it."""

from __future__ import annotations

import itertools
from math import lcm
from pathlib import Path

import pytest

from autopipe.ir.cluster import Cluster, Level, Link
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Mode, Problem
from autopipe.ir.stage_graph import StageGraph
from autopipe.passes.base import Scheduler
from autopipe.passes.cost.resized import resized
from autopipe.passes.cost.work import annotate
from autopipe.passes.placement.graphpipe.strategy import GraphPipe
from autopipe.passes.schedule.named.kfkb import KForwardsKBackwards
from autopipe.passes.schedule.named.one_f_one_b import OneForwardOneBackward
from autopipe.passes.schedule.tessel.scheduler import Tessel
from tests.distributed.pool import Pools
from tests.distributed.trained import check
from tests.distributed.zoo import SmallModels, small_graph
from tests.passes.cost.graphs import device

MODELS = ("two-branch", "mmt", "dlrm", "candle-uno")
SCHEDULERS: dict[str, Scheduler] = {
    "kfkb": KForwardsKBackwards(),
    "1f1b": OneForwardOneBackward(),
    "tessel": Tessel(time_limit=1.0),
}
SIZES = (1, 2, 4)
BATCH = 16
LATENCIES = (0.0, 1e-6, 1e-5)
"""Seconds that an operator takes at least: without any, stages share out their samples; the more, the more stages."""


def problem_of(name: str, devices: int, latency: float, size: int) -> Problem:
    """Training of a small model on devices, four in a node, in micro-batches of so many samples."""
    graph, loss = small_graph(name, size)
    inside = min(devices, 4)
    levels = (Level("node", inside, Link(0.0, 1e9)), Level("cluster", -(-devices // inside), Link(0.0, 2.5e8)))
    cluster = Cluster("toy", (device(memory=10**11, latency=latency),) * devices, levels)
    return Problem(graph, annotate(graph), cluster, BATCH, BATCH // size, Mode.TRAIN, loss)


def sized(problem: Problem, placement: Placement) -> Problem:
    """The problem on the largest micro-batches of any stage."""
    return resized(problem, lcm(*(stage.micro_batch_size for stage in placement.stages)))


def check_step(
    pools: Pools, models: SmallModels, name: str, problem: Problem, placement: Placement, schedule: str, folder: Path
) -> float:
    """Run a step; how far it is from one device's."""
    scheduler = SCHEDULERS[schedule]
    scheduler.requires(problem, placement)
    order = scheduler.run(problem, placement)
    order.verify(StageGraph.of(problem, placement), train=True)
    model = models.of(name, problem.micro_batch_size, problem.micro_batches)
    return check(pools, model, placement, folder, order).difference


def side_by_side(problem: Problem, placement: Placement) -> bool:
    """Whether there are stages of which neither waits for the other."""
    graph = StageGraph.of(problem, placement)
    stages = range(len(placement.stages))
    after = {stage: {stage} for stage in stages}
    for source, target in sorted(graph.edges, reverse=True):
        after[source] |= after[target]
    return any(two not in after[one] for one, two in itertools.combinations(stages, 2))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "devices", "size", "schedule"),
    [
        ("two-branch", 4, 4, "kfkb"),
        ("mmt", 4, 2, "1f1b"),
        ("dlrm", 4, 1, "tessel"),
        ("candle-uno", 4, 2, "kfkb"),
        ("mmt", 8, 4, "kfkb"),
        ("two-branch", 8, 2, "1f1b"),
    ],
)
def test_uniform_micro_batches(
    pools: Pools, small_models: SmallModels, tmp_path: Path, name: str, devices: int, size: int, schedule: str
) -> None:
    problem = problem_of(name, devices, 1e-6, size)
    placement = GraphPipe().run(problem)
    assert side_by_side(problem, placement)
    check_step(pools, small_models, name, problem, placement, schedule, tmp_path)


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("latency", LATENCIES)
@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("name", MODELS)
def test_every_size_and_schedule(
    pools: Pools, small_models: SmallModels, tmp_path: Path, name: str, devices: int, latency: float
) -> None:
    for size in SIZES:
        problem = problem_of(name, devices, latency, size)
        placement = GraphPipe().run(problem)
        for schedule in SCHEDULERS:
            check_step(pools, small_models, name, problem, placement, schedule, tmp_path / f"{size}{schedule}")
