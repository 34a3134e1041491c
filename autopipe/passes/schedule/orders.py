"""List scheduling, which merges the orders of stages into one order per device, and detection of
the part of an order that repeats.
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
from autopipe.ir.repetition import longest_run
from autopipe.ir.schedule import (
    Phase,
    Repetend,
    StageGraph,
    Task,
    expand_to_devices,
    group_equal_devices,
    groups_by_stage,
    overlapping_intervals,
)
from autopipe.ir.words import plural

Ticks = Callable[[Task], int]
"""A function that returns the length of a task as an integer. With integers, equal instants are
exactly equal.
"""


def merge_orders(
    stage_orders: Sequence[Sequence[Task]], graph: StageGraph, ticks: Ticks
) -> tuple[tuple[Task, ...], ...]:
    """Return one order of tasks per device: a list schedule of the tasks of its stages.

    Each stage keeps its order in `stage_orders`. The forward of a stage waits for the forwards of
    the stages that send to it, on all micro-batches that share samples with its micro-batch. A
    backward waits for the backwards of the stages that it sends to, in the same way.

    An idle device starts the ready task with the highest priority: backward before forward, then
    older samples, then later stages. A task of a stage on several devices starts on all of these at
    once. If one of these devices is busy, the idle devices are reserved: no task of lower priority
    starts on them.

    If each device has at most one stage, the result consists of the orders of the stages.

    The result always runs without a deadlock: tasks start in one total order that respects all
    dependencies, and each device's order is a subsequence of it.
    """
    if len({device for group in graph.stage_devices for device in group}) == sum(
        map(len, graph.stage_devices)
    ):
        orders = zip(map(tuple, stage_orders), graph.stage_devices, strict=True)
        order_of_device = {device: order for order, group in orders for device in group}
        return tuple(order_of_device.get(device, ()) for device in range(graph.devices))
    # Devices with equal stages are idle at equal times. They form one pipeline rank, which
    # represents all of them.
    pipeline_ranks = group_equal_devices(graph.stage_devices, ((),) * graph.devices)
    groups = groups_by_stage(graph.stage_devices, pipeline_ranks)
    free = [True] * len(pipeline_ranks)
    lists = [list[Task]() for _ in pipeline_ranks]
    ratios = [graph.micro_batch_ratio_at(stage) for stage in range(len(stage_orders))]
    # Samples per micro-batch of each stage, measured in the largest unit that makes all numbers
    # integers.
    samples = [math.lcm(*ratios) // ratio for ratio in ratios]
    all_tasks = {task for order in stage_orders for task in order}
    remaining = [deque(order) for order in stage_orders]
    busy = set[int]()
    done = set[Task]()
    before, after = ([list[int]() for _ in stage_orders] for _ in range(2))
    for source, target in graph.edges:
        before[target].append(source)
        after[source].append(target)

    def is_ready(stage: int) -> bool:
        """True if the stage runs no task and all tasks that its next task depends on are done."""
        if stage in busy or not remaining[stage]:
            return False
        task = remaining[stage][0]
        dependencies = (
            Task(source, task.phase, number)
            for source in (before if task.phase is Phase.FORWARD else after)[stage]
            for number in overlapping_intervals(task.micro_batch, ratios[stage], ratios[source])
        )
        return all(dependency in done for dependency in dependencies if dependency in all_tasks)

    def priority(task: Task) -> tuple[bool, int, int]:
        """Return the key by which ready tasks are sorted; the smallest key has the highest
        priority.
        """
        return task.phase is Phase.FORWARD, task.micro_batch * samples[task.stage], -task.stage

    waiting = set(filter(is_ready, range(len(remaining))))
    running: list[tuple[int, int, Task]] = []
    now = 0
    while True:
        reserved: set[int] = set()
        for task in sorted((remaining[stage][0] for stage in waiting), key=priority):
            if not all(free[rank] and rank not in reserved for rank in groups[task.stage]):
                reserved.update(groups[task.stage])
                continue
            waiting.discard(task.stage)
            busy.add(task.stage)
            remaining[task.stage].popleft()
            for rank in groups[task.stage]:
                free[rank] = False
                lists[rank].append(task)
            heapq.heappush(running, (now + ticks(task), task.stage, task))
        if not running:
            return expand_to_devices(pipeline_ranks, list(map(tuple, lists)))
        now = running[0][0]
        while running and running[0][0] == now:
            task = heapq.heappop(running)[2]
            done.add(task)
            busy.discard(task.stage)
            for rank in groups[task.stage]:
                free[rank] = True
            following = after if task.phase is Phase.FORWARD else before
            waiting.update(filter(is_ready, (task.stage, *following[task.stage])))


_PHASES = list(Phase)
_LARGEST_STRIDE = 8
"""Maximum number of micro-batches by which one repetition advances. The repeated part contains at
most this number of tasks of each (stage, phase) of the device.
"""


def find_repetends(orders: Sequence[Sequence[Task]]) -> tuple[Repetend, ...]:
    """Return, for each order, the part that repeats. Orders that are one list object are analysed
    once.
    """
    by_identity = {id(order): order for order in orders}
    repetends = {key: _find_repetend(order) for key, order in by_identity.items()}
    return tuple(repetends[id(order)] for order in orders)


def _find_repetend(order: Sequence[Task]) -> Repetend:
    """Return the repeated part (repetend) of a device's order with which a program lists the fewest
    tasks.

    The order is split into warm-up tasks, `count` repetitions of `length` tasks, and cool-down
    tasks. Each repetition equals the previous one with all micro-batch indices increased by
    `stride`. A program lists only one repetition, so it has len(order) - length * (count - 1)
    lines. The result has the minimum number of lines; ties go to the smallest length, then to the
    earliest start. Its length is 0 if nothing repeats. Time O(n * longest), where n = len(order)
    and `longest` is the maximum length tried.
    """
    best = Repetend(0, 0, 0)
    minimum_lines = len(order)
    kinds = np.array(
        [task.stage * len(_PHASES) + _PHASES.index(task.phase) for task in order], dtype=np.int64
    )
    micro_batches = np.array([task.micro_batch for task in order], dtype=np.int64)
    longest = min(len(order) // 2, _LARGEST_STRIDE * len(set(kinds.tolist())))
    for length in range(1, longest + 1):
        is_equal = kinds[length:] == kinds[:-length]
        start, count, stride = longest_run(is_equal, micro_batches, length)
        lines = len(order) - length * (count - 1)
        if count and lines < minimum_lines:
            best = Repetend(start, length, count, stride)
            minimum_lines = lines
    return best


def require_equal_micro_batches(scheduler: str, problem: Problem, placement: Placement) -> None:
    """Raise InfeasibleError, which names `scheduler`, if the micro-batch size of a stage differs
    from that of the problem.
    """
    for index, stage in enumerate(placement.stages):
        if stage.micro_batch_size != problem.micro_batch_size:
            raise InfeasibleError(
                f"schedule {scheduler} requires one micro-batch size for all stages, but stage "
                f"{index} uses {stage.micro_batch_size} "
                f"{plural(stage.micro_batch_size, 'sample')} and the step uses "
                f"{problem.micro_batch_size} per micro-batch",
                hint="use schedule kfkb or tessel, which support a micro-batch size per stage",
            )
