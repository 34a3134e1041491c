"""kFkB: after a warm-up, k backwards and k forwards in turn, on micro-batches of each stage's own size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Phase, Schedule, StageGraph, Task
from autopipe.passes.cost.memory import stages_in_flight
from autopipe.passes.schedule.merge import Ticks, merge_orders
from autopipe.passes.schedule.predict import task_ticks
from autopipe.passes.schedule.repetend import find_repetends


@dataclass(frozen=True, slots=True)
class KForwardsKBackwards:
    """Each stage keeps as many samples in flight as the stages behind it ask for, and runs k tasks of a kind in a row.

    Jeon et al., "GraphPipe" (2024), Algorithm 2: stages may have micro-batches of different sizes and several stages
    before and behind them; what is kept follows from the paper's Table 2, and each backward comes as early as that
    allows. With equal sizes and k = 1 it is 1F1B. Inference runs forwards alone.
    """

    name: ClassVar[str] = "kfkb"

    k: int | tuple[int, ...] = 1
    """Forwards, and backwards, in a row: one number, or one for each stage. 1 keeps the fewest samples."""

    def requires(self, problem: Problem, placement: Placement) -> None:
        """Raise ConfigurationError where `k` is no number, or no list of them, for these stages."""
        stages = len(placement.stages)
        if len(self.ks(stages)) != stages:
            raise ConfigurationError(
                f"schedule.k has {len(self.ks(stages))} numbers, but the placement {stages} stages",
                hint="give one number for all, or one for each stage",
            )
        if min(self.ks(stages)) < 1:
            raise ConfigurationError(f"schedule.k is {min(self.ks(stages))}", hint="it must be at least 1")

    def run(self, problem: Problem, placement: Placement) -> Schedule:
        """The schedule, for any DAG of stages."""
        graph, ks = StageGraph.of(problem, placement), self.ks(len(placement.stages))
        return order_kfkb(graph, problem.micro_batches, ks, problem.train, task_ticks(problem, placement))

    def ks(self, stages: int) -> tuple[int, ...]:
        """The k of each stage."""
        return (self.k,) * stages if isinstance(self.k, int) else self.k


def order_kfkb(graph: StageGraph, micro_batches: int, ks: Sequence[int], train: bool, ticks: Ticks) -> Schedule:
    """The stages' orders, merged where a device has several stages; `micro_batches` are the largest ones of a step."""
    orders = [
        stage_order(stage, kept, k, graph.micro_batches_of(stage, micro_batches), train)
        for stage, (kept, k) in enumerate(zip(kept_micro_batches(graph, ks), ks, strict=True))
    ]
    lists = merge_orders(orders, graph, ticks)
    return Schedule(micro_batches, lists, find_repetends(lists))


def kept_micro_batches(graph: StageGraph, ks: Sequence[int]) -> tuple[int, ...]:
    """The most of its own micro-batches that each stage keeps between forward and backward."""
    turns = [graph.micro_batch_ratio_at(stage) for stage in range(len(ks))]
    samples = [math.lcm(*turns) // each for each in turns]
    in_flight = stages_in_flight(ks, samples, graph.edges)
    return tuple(kept // size for kept, size in zip(in_flight, samples, strict=True))


def stage_order(stage: int, warm_up: int, k: int, micro_batches: Sequence[int], train: bool) -> list[Task]:
    """Forwards until `warm_up` micro-batches are kept, then k backwards and k forwards in turn, then backwards."""
    forwards = [Task(stage, Phase.FORWARD, micro_batch) for micro_batch in micro_batches]
    if not train:
        return forwards
    order = forwards[:warm_up]
    for first in range(0, len(micro_batches), k):
        order += [Task(stage, Phase.BACKWARD, micro_batch) for micro_batch in micro_batches[first : first + k]]
        order += forwards[warm_up + first : warm_up + first + k]
    return order
