"""Common parts of schedules that are published for one form of placement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Schedule, StageGraph, Task
from autopipe.passes.schedule.equal_micro_batches import require_equal_micro_batches
from autopipe.passes.schedule.named.gpipe import order_gpipe
from autopipe.passes.schedule.named.lanes import Lanes, on_devices
from autopipe.passes.schedule.predict import task_ticks


@dataclass(frozen=True, slots=True)
class Published(ABC):
    """A schedule whose order follows from the form of the placement alone, not from times.

    Stages of a pipeline are taken for a chain, in their order: a DAG of stages can run like this too. Inference runs
    forwards alone, as soon as possible.
    """

    name: ClassVar[str]

    def requires(self, problem: Problem, placement: Placement) -> None:
        """Raise InfeasibleError where micro-batches differ from stage to stage, or the form is another one."""
        require_equal_micro_batches(self.name, problem, placement)
        if problem.train:
            self.lanes(StageGraph.of(problem, placement), problem.micro_batches)

    def run(self, problem: Problem, placement: Placement) -> Schedule:
        """The schedule."""
        graph = StageGraph.of(problem, placement)
        if not problem.train:
            return order_gpipe(graph, problem.micro_batches, False, task_ticks(problem, placement))
        return self.order(graph, problem.micro_batches)

    def order(self, graph: StageGraph, micro_batches: int) -> Schedule:
        """The schedule of a training step. Raises InfeasibleError where the form is another one."""
        return on_devices(graph, micro_batches, self.orders(self.lanes(graph, micro_batches), micro_batches))

    @abstractmethod
    def lanes(self, graph: StageGraph, micro_batches: int) -> Lanes:
        """The placement's lanes. Raises InfeasibleError, saying what is wanted, where it is not for this schedule."""

    @abstractmethod
    def orders(self, lanes: Lanes, micro_batches: int) -> Sequence[Sequence[Task]]:
        """Each lane's tasks in order."""
