"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Phase, Schedule, StageGraph, Task, lanes_of, on_each_device
from autopipe.passes.schedule.equal_micro_batches import require_equal_micro_batches
from autopipe.passes.schedule.merge import Ticks, merge_orders
from autopipe.passes.schedule.predict import task_ticks
from autopipe.passes.schedule.repetend import find_repetends


@dataclass(frozen=True, slots=True)
class GPipe:
    """Every device runs all forwards of a step, then all backwards, both in the order of the micro-batches.

    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (2019), section 2.3.
    A device keeps the activations of all micro-batches at once.
    """

    name: ClassVar[str] = "gpipe"

    def requires(self, problem: Problem, placement: Placement) -> None:
        """Raise InfeasibleError where micro-batches differ from stage to stage."""
        require_equal_micro_batches(self.name, problem, placement)

    def run(self, problem: Problem, placement: Placement) -> Schedule:
        """The schedule, for any DAG of stages."""
        graph = StageGraph.of(problem, placement)
        return order_gpipe(graph, problem.micro_batches, problem.train, task_ticks(problem, placement))


def order_gpipe(graph: StageGraph, micro_batches: int, train: bool, ticks: Ticks) -> Schedule:
    """All forwards, list-scheduled, then (in training) all backwards, list-scheduled."""
    phases = (Phase.FORWARD, Phase.BACKWARD) if train else (Phase.FORWARD,)
    lanes = lanes_of(graph.stage_devices, ((),) * graph.devices)
    lists: list[tuple[Task, ...]] = [()] * len(lanes)
    for phase in phases:
        orders = [
            [Task(stage, phase, micro_batch) for micro_batch in graph.micro_batches_of(stage, micro_batches)]
            for stage in range(len(graph.stage_devices))
        ]
        merged = merge_orders(orders, graph, ticks)
        lists = [before + merged[devices[0]] for before, devices in zip(lists, lanes, strict=True)]
    tasks = on_each_device(lanes, lists)
    return Schedule(micro_batches, tasks, find_repetends(tasks))
