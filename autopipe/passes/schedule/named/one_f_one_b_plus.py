"""1F1B+: 1F1B with stages on several devices between its slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Phase, Schedule, StageGraph, Task
from autopipe.passes.schedule.equal_micro_batches import require_equal_micro_batches
from autopipe.passes.schedule.named.gpipe import order_gpipe
from autopipe.passes.schedule.named.grid import first_slot, there_and_back
from autopipe.passes.schedule.predict import task_ticks
from autopipe.passes.schedule.repetend import find_repetends


@dataclass(frozen=True, slots=True)
class OneForwardOneBackwardPlus:
    """1F1B on the stages of one device; those of several run just before the next stage, and backward just after it.

    Lin et al., "Tessel" (HPCA 2024), section VI-A, where it is the baseline for placements that split large
    embeddings over all devices. Without such stages it is 1F1B.
    """

    name: ClassVar[str] = "1f1b_plus"

    def requires(self, problem: Problem, placement: Placement) -> None:
        """Raise InfeasibleError where micro-batches differ, or stages of one device share it."""
        require_equal_micro_batches(self.name, problem, placement)
        if problem.train:
            _own_stages(StageGraph.of(problem, placement))

    def run(self, problem: Problem, placement: Placement) -> Schedule:
        """The schedule. Inference runs forwards alone, as soon as possible."""
        graph = StageGraph.of(problem, placement)
        if not problem.train:
            return order_gpipe(graph, problem.micro_batches, False, task_ticks(problem, placement))
        return order_1f1b_plus(graph, problem.micro_batches)


def order_1f1b_plus(graph: StageGraph, micro_batches: int) -> Schedule:
    """The schedule of a training step. Raises InfeasibleError where stages of one device share it."""
    own = _own_stages(graph)
    placed = [pair for each in range(micro_batches) for pair in _placed(graph, own, each)]
    lists: list[list[Task]] = [[] for _ in range(graph.devices)]
    for _, task in sorted(placed, key=lambda each: each[0]):
        for device in graph.stage_devices[task.stage]:
            lists[device].append(task)
    return Schedule(micro_batches, tuple(map(tuple, lists)), find_repetends(lists))


def _own_stages(graph: StageGraph) -> list[int]:
    """The stages of 1F1B itself: those whose devices span no other stage's. Raises InfeasibleError."""
    if graph.pipeline_count > 1:
        raise InfeasibleError(f"schedule 1f1b_plus runs one pipeline, but the placement has {graph.pipeline_count}")
    groups = [frozenset(group) for group in graph.stage_devices]
    own = [stage for stage, group in enumerate(groups) if not any(other < group for other in groups)]
    for place, stage in enumerate(own):
        for other in own[:place]:
            both = groups[stage] & groups[other]
            if both:
                raise InfeasibleError(
                    f"schedule 1f1b_plus runs one stage a device, beside those that span others' devices, but stages "
                    f"{other} and {stage} are both on device {min(both)}",
                    hint="1f1b takes any number of stages a device",
                )
    return own


def _placed(graph: StageGraph, own: list[int], micro_batch: int) -> Iterator[tuple[tuple[int, int, bool, int], Task]]:
    """A micro-batch's tasks, with keys that sort those of all: twice the slot on the grid, odd between slots."""
    forwards = [Task(stage, Phase.FORWARD, micro_batch) for stage in own]
    backwards = [Task(stage, Phase.BACKWARD, micro_batch) for stage in own]
    first = first_slot(micro_batch, len(own), len(own))
    slots = {task: slot for slot, task in there_and_back(forwards, backwards, first)}
    for stage in range(len(graph.stage_devices)):
        near = next((other for other in own if other >= stage), own[-1])
        side = (near < stage) - (near > stage)
        for phase, way in ((Phase.FORWARD, 1), (Phase.BACKWARD, -1)):
            key = 2 * slots[Task(near, phase, micro_batch)] + way * side
            yield (key, micro_batch, phase is Phase.BACKWARD, way * stage), Task(stage, phase, micro_batch)
