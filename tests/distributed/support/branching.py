"""Models with branches on clusters where pipelines are worth it: their problems, schedules, and
steps on ranks.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from random import Random

from autopipe.ir.cluster import Cluster, Level, Link
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Mode, Problem
from autopipe.ir.schedule import StageGraph
from autopipe.passes.cost.roofline import roofline_costs
from autopipe.passes.registry import Scheduler
from autopipe.passes.schedule.published.one_f_one_b import (
    KForwardsKBackwards,
    OneForwardOneBackward,
)
from autopipe.passes.schedule.tessel.scheduler import Tessel
from tests.distributed.support.pool import Pools
from tests.distributed.support.trained import Trained, check
from tests.passes.cost.graphs import device

SCHEDULERS: dict[str, Scheduler] = {
    "kfkb": KForwardsKBackwards(),
    "1f1b": OneForwardOneBackward(),
    "tessel": Tessel(time_limit=1.0),
}
BATCH = 16


def cluster_of(devices: int, latency: float) -> Cluster:
    """Devices, four in a node, on which an operator takes at least `latency` seconds.

    Without any, small stages share out their samples; the more, the more stages there are.
    """
    inside = min(devices, 4)
    levels = (
        Level("node", inside, Link(0.0, 1e9)),
        Level("cluster", -(-devices // inside), Link(0.0, 2.5e8)),
    )
    return Cluster("toy", (device(memory=10**11, latency=latency),) * devices, levels)


def training(graph: Graph, loss: str, cluster: Cluster) -> Problem:
    """Training on a batch of `BATCH` samples, in micro-batches of as many as the graph has."""
    size = next(graph.type_of(name).shape[axis] for name, axis in graph.batch_axes)
    return Problem(graph, roofline_costs(graph), cluster, BATCH, BATCH // size, Mode.TRAIN, loss)


def side_by_side(problem: Problem, placement: Placement) -> bool:
    """Whether there are stages of which neither waits for the other."""
    graph = StageGraph.of(problem, placement)
    stages = range(len(placement.stages))
    behind = {stage: {stage} for stage in stages}
    for source, target in sorted(graph.edges, reverse=True):
        assert source < target, "stages stand in topological order"
        behind[source] |= behind[target]
    return any(two not in behind[one] for one, two in itertools.combinations(stages, 2))


def with_own_sizes(random: Random, problem: Problem, placement: Placement) -> Placement:
    """The stages with micro-batches of their own, drawn: the largest is the problem's, and replicas
    share each.
    """
    largest = problem.micro_batch_size
    sizes = [
        random.choice(
            [
                size
                for size in range(1, largest + 1)
                if largest % size == 0 and size % len(stage.devices) == 0
            ]
        )
        for stage in placement.stages
    ]
    sizes[random.randrange(len(sizes))] = largest
    pairs = zip(placement.stages, sizes, strict=True)
    return replace(
        placement, stages=tuple(replace(stage, micro_batch_size=size) for stage, size in pairs)
    )


def schedules_of(placement: Placement) -> tuple[str, ...]:
    """The schedules that take stages with such micro-batches."""
    sizes = {stage.micro_batch_size for stage in placement.stages}
    return tuple(name for name in SCHEDULERS if name != "1f1b" or len(sizes) == 1)


def check_step(
    pools: Pools,
    model: Trained,
    problem: Problem,
    placement: Placement,
    schedule: str,
    folder: Path,
) -> float:
    """Run a step on ranks under the schedule of that name; how far it is from one device's."""
    scheduler = SCHEDULERS[schedule]
    scheduler.requires(problem, placement)
    order = scheduler.run(problem, placement)
    order.verify(StageGraph.of(problem, placement), train=True)
    return check(pools, model, placement, folder, order).difference
