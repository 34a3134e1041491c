"""Where the second halves of split backwards go: into slots in which a lane would wait, or where memory is full."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.schedule import Phase, Task

_CHANGE = {Phase.FORWARD: 1, Phase.INPUT_GRADIENT: 0, Phase.WEIGHT_GRADIENT: -1}
"""Activations that a task adds to those kept: they are needed until parameters have their gradients."""


def fill_weights(orders: Sequence[Sequence[Task]], stages: int, room: int) -> list[list[Task]]:
    """Orders of forwards and input gradients on lanes, with all weight gradients put in.

    All is laid out in slots of equal length, stage after stage as in a chain. A lane that cannot go on (its next task
    waits for another lane, or is a forward for which its `room` for activations is used up) runs the oldest weight
    gradient that it owes. Raises InfeasibleError where the room is too small for the orders.
    """
    lanes = [_Lane(deque(order), room) for order in orders]
    done: set[Task] = set()
    while any(lane.rest or lane.owed for lane in lanes):
        ran = [lane.run_slot(done, stages) for lane in lanes]
        if not any(ran):
            raise InfeasibleError(f"room for {room} activations is too small for this order")
        done.update(task for task in ran if task is not None)
    return [lane.order for lane in lanes]


class _Lane:
    """State of a lane: tasks to do, deferred weight gradients, and activations kept."""

    def __init__(self, rest: deque[Task], room: int) -> None:
        self.rest, self.room, self.kept = rest, room, 0
        self.owed: deque[Task] = deque()
        self.order: list[Task] = []

    def run_slot(self, done: set[Task], stages: int) -> Task | None:
        """The task of the next slot, if there is one to run."""
        if self.rest and self._may_start(self.rest[0], done, stages):
            task = self.rest.popleft()
        elif self.owed:
            task = self.owed.popleft()
        else:
            return None
        self.kept += _CHANGE[task.phase]
        self.order.append(task)
        if task.phase is Phase.INPUT_GRADIENT:
            self.owed.append(Task(task.stage, Phase.WEIGHT_GRADIENT, task.micro_batch))
        return task

    def _may_start(self, task: Task, done: set[Task], stages: int) -> bool:
        if task.phase is Phase.FORWARD:
            before = task.stage == 0 or Task(task.stage - 1, Phase.FORWARD, task.micro_batch) in done
            return before and self.kept < self.room
        last = task.stage == stages - 1
        after = Task(task.stage, Phase.FORWARD, task.micro_batch)
        return after in done and (last or Task(task.stage + 1, Phase.INPUT_GRADIENT, task.micro_batch) in done)
