"""List scheduling: the orders of stages merged into one order a device."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence

from autopipe.ir.schedule import Phase, StageGraph, Task, lane_groups, lanes_of, on_each_device, sharing

Ticks = Callable[[Task], int]
"""A task's length in whole units, so that equal instants compare equal."""


def merge_orders(
    stage_orders: Sequence[Sequence[Task]], graph: StageGraph, ticks: Ticks
) -> tuple[tuple[Task, ...], ...]:
    """For each device the tasks of its stages, in the order in which a list schedule starts them.

    Each stage keeps its own order; F waits for F along the graph's edges, B for B against them, of all micro-batches
    that have samples of its own. A device that is free takes the startable task that comes first by: backward before
    forward, older samples before younger, later stage before earlier. A task of a stage on several devices starts on
    all of them at once; while it waits for some, the others are kept free for it unless a task before it in that order
    wants them. Where every device has one stage the result is the stages' own orders.

    Tasks start in one total order that agrees with every dependency, and each device's list is a part
    of it: the result can always run.
    """
    if len({device for group in graph.stage_devices for device in group}) == sum(map(len, graph.stage_devices)):
        return _own_orders(stage_orders, graph)
    # Devices of the same stages are free and busy together: one of them stands for all.
    lanes = lanes_of(graph.stage_devices, ((),) * graph.devices)
    state = _State(stage_orders, graph, lane_groups(graph.stage_devices, lanes), len(lanes))
    running: list[tuple[int, int, Task]] = []
    now = 0
    while True:
        for task in state.start_ready():
            heapq.heappush(running, (now + ticks(task), task.stage, task))
        if not running:
            return on_each_device(lanes, [tuple(order) for order in state.lists])
        now = running[0][0]
        while running and running[0][0] == now:
            state.finish(heapq.heappop(running)[2])


def _own_orders(stage_orders: Sequence[Sequence[Task]], graph: StageGraph) -> tuple[tuple[Task, ...], ...]:
    """For each device the order of its only stage; () where it has none."""
    orders = zip(map(tuple, stage_orders), graph.stage_devices, strict=True)
    found = {device: order for order, group in orders for device in group}
    return tuple(found.get(device, ()) for device in range(graph.devices))


class _State:
    """Which tasks are done, which stages' next tasks may start, and which devices, by lane, are free."""

    def __init__(
        self, stage_orders: Sequence[Sequence[Task]], graph: StageGraph, groups: Sequence[Sequence[int]], lanes: int
    ) -> None:
        self.devices = groups
        self.free = [True] * lanes
        self.lists: list[list[Task]] = [[] for _ in range(lanes)]
        self.turns = [graph.micro_batch_ratio_at(stage) for stage in range(len(stage_orders))]
        self.samples = [math.lcm(*self.turns) // each for each in self.turns]
        """Samples of each stage's micro-batches, in units that make all of them whole."""
        self.rest = [deque(order) for order in stage_orders]
        self.running: set[int] = set()
        self.done: set[Task] = set()
        self.given = {task for order in stage_orders for task in order}
        self.before: list[list[int]] = [[] for _ in stage_orders]
        self.after: list[list[int]] = [[] for _ in stage_orders]
        for source, target in graph.edges:
            self.before[target].append(source)
            self.after[source].append(target)
        self.waiting = {stage for stage in range(len(stage_orders)) if self._ready(stage)}
        """Stages whose next task waits for nothing but devices."""

    def start_ready(self) -> list[Task]:
        """Start what can start now, and return it."""
        reserved: set[int] = set()
        started = []
        for task in sorted((self.rest[stage][0] for stage in self.waiting), key=self._preference):
            group = self.devices[task.stage]
            if all(self.free[device] and device not in reserved for device in group):
                self._start(task)
                started.append(task)
            else:
                reserved.update(group)
        return started

    def finish(self, task: Task) -> None:
        self.done.add(task)
        self.running.discard(task.stage)
        for device in self.devices[task.stage]:
            self.free[device] = True
        following = self.after if task.phase is Phase.FORWARD else self.before
        self.waiting.update(stage for stage in (task.stage, *following[task.stage]) if self._ready(stage))

    def _start(self, task: Task) -> None:
        self.waiting.discard(task.stage)
        self.running.add(task.stage)
        self.rest[task.stage].popleft()
        for device in self.devices[task.stage]:
            self.free[device] = False
            self.lists[device].append(task)

    def _ready(self, stage: int) -> bool:
        """True if a stage is idle and all that its next task needs is done."""
        if stage in self.running or not self.rest[stage]:
            return False
        task = self.rest[stage][0]
        sources = self.before if task.phase is Phase.FORWARD else self.after
        needs = (
            Task(source, task.phase, number)
            for source in sources[stage]
            for number in sharing(task.micro_batch, self.turns[stage], self.turns[source])
        )
        return all(need in self.done for need in needs if need in self.given)

    def _preference(self, task: Task) -> tuple[bool, int, int]:
        return task.phase is Phase.FORWARD, task.micro_batch * self.samples[task.stage], -task.stage
