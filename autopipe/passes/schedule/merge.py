"""List scheduling: the orders of stages merged into one order a device."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from autopipe.ir.schedule import Phase, Task

Ticks = Callable[[Task], int]
"""A task's length in whole units, so that equal instants compare equal."""


def merge_orders(
    stage_orders: Sequence[Sequence[Task]],
    stage_devices: Sequence[Sequence[int]],
    edges: Sequence[tuple[int, int]],
    devices: int,
    ticks: Ticks,
) -> tuple[tuple[Task, ...], ...]:
    """For each device the tasks of its stages, in the order in which a list schedule starts them.

    Each stage keeps its own order; F waits for F along `edges`, B for B against them. A device that is free takes the
    startable task that comes first by: backward before forward, older micro-batch before younger, later stage before
    earlier. A task of a stage on several devices starts on all of them at once; while it waits for some, the others are
    kept free for it unless a task before it in that order wants them. Where every device has one stage the result is
    the stages' own orders.

    Tasks start in one total order that agrees with every dependency, and each device's list is a part
    of it: the result can always run.
    """
    state = _State(stage_orders, stage_devices, edges, devices)
    running: list[tuple[int, int, Task]] = []
    now = 0
    while True:
        for task in state.start_ready():
            heapq.heappush(running, (now + ticks(task), task.stage, task))
        if not running:
            return tuple(map(tuple, state.lists))
        now = running[0][0]
        while running and running[0][0] == now:
            state.finish(heapq.heappop(running)[2])


class _State:
    """Which tasks are done, which may start, and which devices are free."""

    def __init__(
        self,
        stage_orders: Sequence[Sequence[Task]],
        stage_devices: Sequence[Sequence[int]],
        edges: Sequence[tuple[int, int]],
        devices: int,
    ) -> None:
        self.orders = stage_orders
        self.devices = stage_devices
        self.free = [True] * devices
        self.lists: list[list[Task]] = [[] for _ in range(devices)]
        self.position = [0] * len(stage_orders)
        self.idle = set(range(len(stage_orders)))
        self.done: set[Task] = set()
        self.given = {task for order in stage_orders for task in order}
        self.before: list[list[int]] = [[] for _ in stage_orders]
        self.after: list[list[int]] = [[] for _ in stage_orders]
        for source, target in edges:
            self.before[target].append(source)
            self.after[source].append(target)

    def start_ready(self) -> list[Task]:
        """Start what can start now, and return it."""
        heads = (self.orders[stage][self.position[stage]] for stage in self.idle if self._has_more(stage))
        waiting = sorted((task for task in heads if self._ready(task)), key=_preference)
        reserved: set[int] = set()
        started = []
        for task in waiting:
            group = self.devices[task.stage]
            if all(self.free[device] and device not in reserved for device in group):
                self._start(task)
                started.append(task)
            else:
                reserved.update(group)
        return started

    def finish(self, task: Task) -> None:
        self.done.add(task)
        self.idle.add(task.stage)
        for device in self.devices[task.stage]:
            self.free[device] = True

    def _start(self, task: Task) -> None:
        self.idle.discard(task.stage)
        self.position[task.stage] += 1
        for device in self.devices[task.stage]:
            self.free[device] = False
            self.lists[device].append(task)

    def _has_more(self, stage: int) -> bool:
        return self.position[stage] < len(self.orders[stage])

    def _ready(self, task: Task) -> bool:
        sources = self.before if task.phase is Phase.FORWARD else self.after
        needs = (Task(stage, task.phase, task.micro_batch) for stage in sources[task.stage])
        return all(need in self.done for need in needs if need in self.given)


def _preference(task: Task) -> tuple[bool, int, int]:
    return task.phase is Phase.FORWARD, task.micro_batch, -task.stage
