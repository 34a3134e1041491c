"""Steps of a placement in the simulator: as the graph of stages that it is, and as a chain."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Schedule, StageGraph
from autopipe.ir.timeline import Message, Prediction, Timeline
from autopipe.passes.cost.measured import resized
from autopipe.passes.schedule.limits import check_memory
from autopipe.passes.schedule.predict import predict, ticks_of
from autopipe.passes.schedule.published.one_f_one_b import order_kfkb
from autopipe.passes.schedule.simulate import simulate


@dataclass(frozen=True, slots=True)
class Step:
    """A placement, the order of its tasks, and the step they make."""

    problem: Problem
    placement: Placement
    schedule: Schedule
    timeline: Timeline
    depth: int

    @property
    def throughput(self) -> float:
        """Samples a second."""
        return self.problem.batch_size / self.timeline.end

    @property
    def micro_batch_size(self) -> int:
        """The largest of any stage."""
        return self.problem.micro_batch_size


def graph_step(problem: Problem, placement: Placement) -> Step:
    """Stages wait for those that they read from alone. Raises InfeasibleError where memory does not hold it."""
    sized = _sized(problem, placement)
    return _step(sized, placement, StageGraph.of(sized, placement), predict(sized, placement))


def sequential_step(problem: Problem, placement: Placement) -> Step:
    """Each stage also waits for the one before it, as in a sequential pipeline: PipeDream's and Piper's.

    Micro-batches are kept by the place of a stage in the chain. Raises InfeasibleError where memory does not hold it.
    """
    sized = _sized(problem, placement)
    graph, predicted = StageGraph.of(sized, placement), predict(sized, placement)
    chain = tuple(itertools.pairwise(range(len(placement.stages))))
    return _step(
        sized,
        placement,
        replace(graph, edges=tuple(sorted({*graph.edges, *chain}))),
        replace(predicted, messages=(*predicted.messages, *(_word(placement, *pair) for pair in chain))),
    )


def _sized(problem: Problem, placement: Placement) -> Problem:
    """The problem on the placement's largest micro-batches."""
    return resized(problem, math.lcm(*(stage.micro_batch_size for stage in placement.stages)))


def _word(placement: Placement, source: int, target: int) -> Message:
    """A message of no bytes, which takes no time."""
    one, two = (placement.stages[stage].devices[0] for stage in (source, target))
    return Message(source, target, one, two, 0, 0, 0.0, 0.0)


def _step(problem: Problem, placement: Placement, graph: StageGraph, predicted: Prediction) -> Step:
    ones = (1,) * len(placement.stages)
    schedule = order_kfkb(graph, problem.micro_batches, ones, problem.train, ticks_of(predicted.stages))
    timeline = simulate(schedule, graph.stage_devices, predicted)
    check_memory(problem, placement, timeline)
    return Step(problem, placement, schedule, timeline, graph.depth)
