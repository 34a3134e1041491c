"""List scheduling: the orders of stages merged into one order a device; and the steady state of a
device's order.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import (
    Phase,
    Repetend,
    StageGraph,
    Task,
    lane_groups,
    lanes_of,
    on_each_device,
    sharing,
)
from autopipe.ir.words import plural

Ticks = Callable[[Task], int]
"""A task's length in whole units, so that equal instants compare equal."""


def merge_orders(
    stage_orders: Sequence[Sequence[Task]], graph: StageGraph, ticks: Ticks
) -> tuple[tuple[Task, ...], ...]:
    """For each device the tasks of its stages, in the order in which a list schedule starts them.

    Each stage keeps its own order; F waits for F along the graph's edges, B for B against them, of
    all micro-batches that have samples of its own. A device that is free takes the startable task
    that comes first by: backward before forward, older samples before younger, later stage before
    earlier. A task of a stage on several devices starts on all of them at once; while it waits for
    some, the others are kept free for it unless a task before it in that order wants them. Where
    every device has one stage the result is the stages' own orders.

    Tasks start in one total order that agrees with every dependency, and each device's list is a
    part of it: the result can always run.
    """
    if len({device for group in graph.stage_devices for device in group}) == sum(
        map(len, graph.stage_devices)
    ):
        orders = zip(map(tuple, stage_orders), graph.stage_devices, strict=True)
        found = {device: order for order, group in orders for device in group}
        return tuple(found.get(device, ()) for device in range(graph.devices))
    # Devices of the same stages are free and busy together: one of them stands for all.
    lanes = lanes_of(graph.stage_devices, ((),) * graph.devices)
    groups = lane_groups(graph.stage_devices, lanes)
    free = [True] * len(lanes)
    lists = [list[Task]() for _ in lanes]
    ratios = [graph.micro_batch_ratio_at(stage) for stage in range(len(stage_orders))]
    samples = [
        math.lcm(*ratios) // each for each in ratios
    ]  # In units that make those of all micro-batches whole.
    given = {task for order in stage_orders for task in order}
    rest = [deque(order) for order in stage_orders]
    busy = set[int]()
    done = set[Task]()
    before, after = ([list[int]() for _ in stage_orders] for _ in range(2))
    for source, target in graph.edges:
        before[target].append(source)
        after[source].append(target)

    def is_ready(stage: int) -> bool:
        """True if a stage is idle and all that its next task needs is done."""
        if stage in busy or not rest[stage]:
            return False
        task = rest[stage][0]
        needs = (
            Task(source, task.phase, number)
            for source in (before if task.phase is Phase.FORWARD else after)[stage]
            for number in sharing(task.micro_batch, ratios[stage], ratios[source])
        )
        return all(need in done for need in needs if need in given)

    def preference(task: Task) -> tuple[bool, int, int]:
        return task.phase is Phase.FORWARD, task.micro_batch * samples[task.stage], -task.stage

    waiting = set(filter(is_ready, range(len(rest))))
    running: list[tuple[int, int, Task]] = []
    now = 0
    while True:
        reserved: set[int] = set()
        for task in sorted((rest[stage][0] for stage in waiting), key=preference):
            if not all(free[lane] and lane not in reserved for lane in groups[task.stage]):
                reserved.update(groups[task.stage])
                continue
            waiting.discard(task.stage)
            busy.add(task.stage)
            rest[task.stage].popleft()
            for lane in groups[task.stage]:
                free[lane] = False
                lists[lane].append(task)
            heapq.heappush(running, (now + ticks(task), task.stage, task))
        if not running:
            return on_each_device(lanes, list(map(tuple, lists)))
        now = running[0][0]
        while running and running[0][0] == now:
            task = heapq.heappop(running)[2]
            done.add(task)
            busy.discard(task.stage)
            for lane in groups[task.stage]:
                free[lane] = True
            following = after if task.phase is Phase.FORWARD else before
            waiting.update(filter(is_ready, (task.stage, *following[task.stage])))


_PHASES = list(Phase)
_LARGEST_STRIDE = 8
"""Micro-batches that one repetition may advance by; a body runs each of its kinds of task that many
times.
"""


def find_repetends(orders: Sequence[Sequence[Task]]) -> tuple[Repetend, ...]:
    """The repetition of each list; those of devices that share one are found once."""
    known = {id(order): order for order in orders}
    found = {number: _find_repetend(order) for number, order in known.items()}
    return tuple(found[id(order)] for order in orders)


def _find_repetend(order: Sequence[Task]) -> Repetend:
    """The repetition that leaves the fewest lines when it is written once; the shortest, then the
    earliest of equals. The list is warm-up, `count` repetitions of `length` tasks that move on by
    `stride` micro-batches, cool-down. A repetend of length 0 says that nothing repeats.
    """
    best = Repetend(0, 0, 0)
    fewest = len(order)
    kinds = np.array(
        [task.stage * len(_PHASES) + _PHASES.index(task.phase) for task in order], dtype=np.int64
    )
    micro_batches = np.array([task.micro_batch for task in order], dtype=np.int64)
    longest = min(len(order) // 2, _LARGEST_STRIDE * len(set(kinds.tolist())))
    for length in range(1, longest + 1):
        strides = micro_batches[length:] - micro_batches[:-length]
        strides = np.where((kinds[length:] == kinds[:-length]) & (strides > 0), strides, 0)
        # Runs of one stride: n tasks in a row that come again `length` further make 1 + n // length
        # repetitions.
        edges = np.flatnonzero(np.diff(strides)) + 1
        starts = np.concatenate(([0], edges))
        ends = np.concatenate((edges, [len(strides)]))
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            count = 1 + (end - start) // length
            lines = len(order) - length * (count - 1)
            if count > 1 and lines < fewest and strides[start] > 0:
                best = Repetend(start, length, count, int(strides[start]))
                fewest = lines
    return best


def require_equal_micro_batches(scheduler: str, problem: Problem, placement: Placement) -> None:
    for index, stage in enumerate(placement.stages):
        if stage.micro_batch_size != problem.micro_batch_size:
            raise InfeasibleError(
                f"{scheduler} runs all stages on equal micro-batches, but stage {index} has "
                f"{stage.micro_batch_size} "
                f"{plural(stage.micro_batch_size, 'sample')} a micro-batch "
                f"where the step has {problem.micro_batch_size}",
                hint="schedules kfkb and tessel take stages with micro-batches of their own",
            )
