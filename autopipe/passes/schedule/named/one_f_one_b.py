"""1F1B: after a warm-up, one forward and one backward in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Phase, Schedule, StageGraph, Task, depths_to_end
from autopipe.passes.schedule.equal_micro_batches import require_equal_micro_batches
from autopipe.passes.schedule.merge import Ticks, merge_orders
from autopipe.passes.schedule.predict import task_ticks
from autopipe.passes.schedule.repetend import find_repetends


@dataclass(frozen=True, slots=True)
class OneForwardOneBackward:
    """Each stage keeps as many micro-batches in flight as there are stages on the longest way from it to the end.

    For a chain this is 1F1B with flushes as in Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training"
    (2021), section 2.2; for a DAG its extension by the depth of each stage, as in Jeon et al., "GraphPipe" (2024).
    Inference runs forwards alone.
    """

    name: ClassVar[str] = "1f1b"

    def requires(self, problem: Problem, placement: Placement) -> None:
        """Raise InfeasibleError where micro-batches differ from stage to stage."""
        require_equal_micro_batches(self.name, problem, placement)

    def run(self, problem: Problem, placement: Placement) -> Schedule:
        """The schedule, for any DAG of stages."""
        graph = StageGraph.of(problem, placement)
        return order_1f1b(graph, problem.micro_batches, problem.train, task_ticks(problem, placement))


def order_1f1b(graph: StageGraph, micro_batches: int, train: bool, ticks: Ticks) -> Schedule:
    """The stages' orders, merged where a device has several stages.

    Stages' orders never wait in a circle: F(s, m) at 2m - depth(s) and B(s, m) at 2m + depth(s) - 1 is a numbering in
    which every task comes after all that it waits for, since depth falls along every edge.
    """
    depths = depths_to_end(len(graph.stage_devices), graph.edges)
    orders = [
        _stage_order(stage, depths[stage], graph.micro_batches_of(stage, micro_batches), train)
        for stage in range(len(depths))
    ]
    lists = merge_orders(orders, graph, ticks)
    return Schedule(micro_batches, lists, find_repetends(lists))


def _stage_order(stage: int, in_flight: int, micro_batches: Sequence[int], train: bool) -> list[Task]:
    """Forwards until `in_flight` micro-batches are kept, then a backward and a forward in turn, then backwards."""
    forwards = [Task(stage, Phase.FORWARD, micro_batch) for micro_batch in micro_batches]
    if not train:
        return forwards
    warm_up = min(in_flight - 1, len(forwards))
    order = forwards[:warm_up]
    for index, micro_batch in enumerate(micro_batches):
        order += forwards[warm_up + index : warm_up + index + 1]
        order.append(Task(stage, Phase.BACKWARD, micro_batch))
    return order
