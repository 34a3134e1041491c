"""Schedules: the order of the tasks on each device, and the check of this order.

Schedulers read a `StageGraph`, which has the stages of a placement and their dependencies. Devices
with equal stages and equal task lists form a lane; checks examine only one device per lane.
"""

from __future__ import annotations

import enum
import re
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from autopipe.ir.codec import AsList, Count, Index
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.placement import Placement, stage_edges
from autopipe.ir.problem import Problem
from autopipe.ir.words import plural


class Phase(enum.Enum):
    """Phase of a task: forward, backward, or one half of a split backward (gradients of inputs,
    gradients of weights).
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"

    # Millions of tasks are hashed, and the hash of Enum, which is written in Python, is slow.
    # Hashing by identity is valid because each member is one object.
    __hash__ = object.__hash__


_TASK_PATTERN = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True, slots=True, order=False)
class Task:
    """One phase of one stage on one micro-batch of the stage. Its text is such as `2F0`: stage 2,
    forward, micro-batch 0.
    """

    stage: int
    phase: Phase
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.phase.value}{self.micro_batch}"

    @staticmethod
    def parse(text: str) -> Task:
        """Return the task with a text such as `2F0`. Raise ConfigurationError for an invalid
        text.
        """
        match = _TASK_PATTERN.fullmatch(text)
        if match is None:
            raise ConfigurationError(
                f"{text!r} is not a task",
                "write a task such as 2F0: the stage, the phase, the micro-batch",
            )
        return Task(int(match[1]), Phase(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True)
class Repetend:
    """The steady state of a device's task list (Tessel: repetend): `length` tasks from index
    `start` on, which occur `count` times in succession. The micro-batches of each repetition are
    `stride` larger than those of the repetition before. `length` is 0 if the device has no steady
    state.
    """

    start: Index
    length: Index
    count: Index
    stride: Index = 1


Repetends = tuple[Annotated[Repetend, AsList()], ...]


@dataclass(frozen=True, slots=True)
class Proof:
    """Proven quality of a schedule: of its period, or of its step time if it has no period."""

    order: str
    """Name of the scheduler whose order the schedule has. A search may choose the order of a
    published schedule.
    """
    lower_bound: float
    """Lower bound of the period of all schedules of the placement, in the unit of
    `Schedule.period`.
    """
    optimal: bool
    """True if no schedule has a shorter period, except for `rounding`."""
    rounding: float = 0.0
    """Maximum fraction by which the search overestimates the period, because it rounds times to
    integers.
    """


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of the tasks on each device. The tasks of a stage are in the list of each of its
    devices.
    """

    micro_batches: int
    """Number of micro-batches of the step. A stage with smaller micro-batches runs several for each
    of them (`StageGraph.ratios`).
    """
    tasks: tuple[tuple[Task, ...], ...]
    """Tasks of each device, in the order in which they run."""
    repetends: Repetends | None = None
    """Steady state of the task list of each device; None if it is not known."""
    period: float | None = None
    """Simulated time of one repetition of the steady state, in seconds or in a unit of the
    scheduler; None if there is no steady state.
    """
    proof: Proof | None = None

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.tasks)

    def has_orders_of(self, other: Schedule) -> bool:
        """Return True if each device runs the same tasks in the same order as in `other`."""
        # The devices of a stage usually use one list object. Each pair of list objects is compared
        # only a single time.
        pairs = {
            (id(own), id(its)): (own, its)
            for own, its in zip(self.tasks, other.tasks, strict=False)
        }
        same = (self.micro_batches, self.devices) == (other.micro_batches, other.devices)
        return same and all(own == its for own, its in pairs.values())

    def grid(self) -> str:
        """Return the schedule as text, one line per device: `0: 0F0 0F1 …`."""
        # The devices of a stage usually use one list object. Each list object is converted to text
        # only a single time.
        orders = {id(order): order for order in self.tasks}
        texts = {number: " ".join(map(str, order)) for number, order in orders.items()}
        return "\n".join(f"{device}: {texts[id(order)]}" for device, order in enumerate(self.tasks))

    def verify(self, graph: StageGraph, train: bool) -> None:
        """Raise InvalidScheduleError unless the schedule is complete and free of deadlocks.

        It is complete if each device of a stage has each phase of each micro-batch of the stage's
        pipeline once. It is free of deadlocks if the tasks can run in the order of each device and
        after the tasks on which they depend. A forward depends on the forwards of preceding stages.
        A backward depends on its forward and on the backwards of succeeding stages. The second half
        of a split backward depends on the first half. Tasks of different stages depend on each
        other only if their micro-batches have samples in common.
        """
        lanes = group_equal_devices(graph.stage_devices, self.tasks)
        firsts = [devices[0] for devices in lanes]
        for device in firsts:
            _check_tasks(self, graph, train, device)
        groups = groups_by_stage(graph.stage_devices, lanes)
        needs = _dependency_function(graph, [self.tasks[device] for device in firsts])
        waiting = [deque(self.tasks[device]) for device in firsts]
        done: set[_TaskKey] = set()
        moved = True
        while moved:
            moved = False
            for queue in waiting:
                while queue and done.issuperset(needs(queue[0])):
                    task = queue[0]
                    if any(
                        not waiting[lane] or waiting[lane][0] != task for lane in groups[task.stage]
                    ):
                        # This task must run at the same time on all devices of the stage. One of
                        # them must run another task first, so this queue waits.
                        break
                    for lane in groups[task.stage]:
                        waiting[lane].popleft()
                    done.add((task.stage, task.phase, task.micro_batch))
                    moved = True
        for device, queue in zip(firsts, waiting, strict=True):
            if queue:
                missing = next((Task(*need) for need in needs(queue[0]) if need not in done), None)
                why = f"waits for {missing}, which can never run" if missing else "never starts"
                position = len(self.tasks[device]) - len(queue)
                raise InvalidScheduleError(self, device, position, f"{queue[0]} {why}")


_TASKS_AROUND_ERROR = 6
"""Number of tasks that a message shows before and after the wrong task."""


class InvalidScheduleError(InfeasibleError):
    """A schedule that cannot run. The message contains the reason and the task lists, with the
    wrong task in brackets.
    """

    def __init__(self, schedule: Schedule, device: int, position: int, reason: str) -> None:
        grid = [[str(task) for task in order] for order in schedule.tasks]
        if position < len(grid[device]):
            grid[device][position] = f"[{grid[device][position]}]"
        lines = [f"{index}: {' '.join(cells)}" for index, cells in enumerate(grid)]
        super().__init__("\n".join([reason, *lines]), where=f"device {device}")
        self.device = device
        self.position = position
        self.reason = reason
        start = max(0, position - _TASKS_AROUND_ERROR)
        stop = position + _TASKS_AROUND_ERROR + 1
        cells = grid[device]
        self.around = " ".join(
            [*["..."] * (start > 0), *cells[start:stop], *["..."] * (stop < len(cells))]
        )
        """Text of the tasks before and after the wrong one, with the wrong one in brackets."""


Value = TypeVar("Value")
DeviceGroups = tuple[tuple[int, ...], ...]
"""Disjoint groups (lanes) of devices with equal stages and equal task lists. They are ordered by
their first device.
"""


def group_equal_devices(
    stage_devices: Sequence[Sequence[int]], orders: Sequence[Sequence[Hashable]]
) -> DeviceGroups:
    """Return the groups of devices with equal stages and equal lists. `stage_devices` has the
    devices of each stage, and `orders` the list of each device.
    """
    stages: list[list[int]] = [[] for _ in orders]
    for stage, devices in enumerate(stage_devices):
        for device in devices:
            stages[device].append(stage)
    equal: dict[Sequence[Hashable], int] = {}
    known: dict[int, int] = {}
    found: dict[Hashable, list[int]] = {}
    for device, order in enumerate(orders):
        # Devices usually use one list object for equal orders. Each object is looked up by identity
        # first, because comparing lists is slow.
        if id(order) not in known:
            known[id(order)] = equal.setdefault(tuple(order), len(equal))
        found.setdefault((*stages[device], known[id(order)]), []).append(device)
    return tuple(map(tuple, found.values()))


def groups_by_stage(
    stage_devices: Sequence[Sequence[int]], lanes: DeviceGroups
) -> tuple[tuple[int, ...], ...]:
    """Return, for each stage, the indices of the lanes that contain its devices. A lane is a group
    of devices with equal stages and equal task lists.
    """
    lane = {device: index for index, devices in enumerate(lanes) for device in devices}
    return tuple(tuple(dict.fromkeys(lane[device] for device in group)) for group in stage_devices)


def expand_to_devices(lanes: DeviceGroups, values: Sequence[Value]) -> tuple[Value, ...]:
    """Return a tuple with one value per device, given one value per lane (group of devices with
    equal stages and equal task lists).
    """
    found = {
        device: value for devices, value in zip(lanes, values, strict=True) for device in devices
    }
    return tuple(found[device] for device in range(len(found)))


@dataclass(frozen=True, slots=True)
class StageGraph:
    """The stages of a placement in topological order, and the dependencies between them. Each edge
    leads to a stage with a larger index.
    """

    devices: int
    """Number of devices of the cluster, including devices that run no stage."""
    stage_devices: tuple[tuple[int, ...], ...]
    edges: tuple[tuple[int, int], ...]
    """Distinct pairs (source stage, target stage), sorted. Both stages belong to one pipeline."""
    pipelines: tuple[int, ...] = ()
    """Index of the pipeline of each stage; () if there is one pipeline."""
    ratios: tuple[int, ...] = ()
    """Number of micro-batches of each stage per micro-batch of the problem; () if it is 1 for all
    stages.
    """

    @staticmethod
    def of(problem: Problem, placement: Placement) -> StageGraph:
        """Return the stage graph of a placement. Raise InfeasibleError if the micro-batch size of a
        stage does not divide the micro-batch size of the problem, or if sizes differ and there are
        several pipelines.
        """
        return StageGraph(
            problem.cluster.size,
            tuple(stage.devices for stage in placement.stages),
            stage_edges(problem.graph, placement),
            pipelines_of(placement),
            micro_batch_ratios(placement, problem.micro_batch_size),
        )

    @property
    def depth(self) -> int:
        """Number of stages on the longest path."""
        return max(depths_to_end(len(self.stage_devices), self.edges), default=0)

    @property
    def pipeline_count(self) -> int:
        """Number of pipelines."""
        return 1 + max(self.pipelines, default=0)

    def micro_batch_ratio_at(self, stage: int) -> int:
        """Return the number of micro-batches of a stage per micro-batch of the problem."""
        return self.ratios[stage] if self.ratios else 1

    def micro_batches_sharing_samples(self, stage: int, micro_batch: int, other: int) -> range:
        """Return the micro-batches of the stage `other` that have samples in common with the
        micro-batch `micro_batch` of the stage `stage`.
        """
        return overlapping_intervals(
            micro_batch, self.micro_batch_ratio_at(stage), self.micro_batch_ratio_at(other)
        )

    def dependencies_of(
        self, stage: int, phase: Phase, micro_batch: int
    ) -> list[tuple[int, Phase, int]]:
        """Return the tasks, as (stage, phase, micro-batch), that must end before a task starts. If
        a task of the same stage is among them, it is first. The tasks of other stages have the
        phase of the given task.
        """
        if phase is Phase.WEIGHT_GRADIENT:
            return [(stage, Phase.INPUT_GRADIENT, micro_batch)]
        if phase is Phase.FORWARD:
            own = []
            around = [source for source, target in self.edges if target == stage]
        else:
            own = [(stage, Phase.FORWARD, micro_batch)]
            around = [target for source, target in self.edges if source == stage]
        return own + [
            (other, phase, each)
            for other in around
            for each in self.micro_batches_sharing_samples(stage, micro_batch, other)
        ]

    def micro_batches_of(self, stage: int, micro_batches: int) -> range:
        """Return the micro-batches that a stage runs if the problem has `micro_batches`
        micro-batches. With p pipelines, micro-batch m runs on pipeline m mod p. If stages have
        smaller micro-batches than the problem (`ratios`), there is only one pipeline.
        """
        if self.ratios:
            return range(micro_batches * self.ratios[stage])
        first = self.pipelines[stage] if self.pipelines else 0
        return range(first, micro_batches, self.pipeline_count)


def pipelines_of(placement: Placement) -> tuple[int, ...]:
    """Return the index of the pipeline of each stage; () if there is one pipeline."""
    return tuple(stage.pipeline for stage in placement.stages) if placement.pipelines > 1 else ()


def micro_batch_ratios(placement: Placement, micro_batch_size: int) -> tuple[int, ...]:
    """Return the number of micro-batches of each stage per micro-batch of `micro_batch_size`
    samples; () if it is 1 for all stages. Micro-batch n of a stage with b samples per micro-batch
    has the samples n·b to n·b + b - 1 of the step.

    Raise InfeasibleError if the size of a stage does not divide `micro_batch_size`, or if the sizes
    differ and there are several pipelines.
    """
    sizes = tuple(stage.micro_batch_size for stage in placement.stages)
    for index, size in enumerate(sizes):
        if micro_batch_size % size:
            raise InfeasibleError(
                f"stage {index} has micro-batches of {size} {plural(size, 'sample')}, which do "
                f"not divide the {micro_batch_size} {plural(micro_batch_size, 'sample')} of a "
                "micro-batch of the step"
            )
    if set(sizes) <= {micro_batch_size}:
        return ()
    if placement.pipelines > 1:
        raise InfeasibleError(
            f"stages have micro-batches of {min(sizes)} and {micro_batch_size} "
            f"{plural(micro_batch_size, 'sample')}, but with several pipelines "
            "all stages must have equal micro-batch sizes"
        )
    return tuple(micro_batch_size // size for size in sizes)


def overlapping_intervals(number: int, parts: int, other_parts: int) -> range:
    """Return the indices of the intervals of length 1 / `other_parts` that overlap the interval
    with index `number` of length 1 / `parts`. The intervals with index 0 start at 0.
    """
    return range(number * other_parts // parts, -(-(number + 1) * other_parts // parts))


def depths_to_end(stages: int, edges: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Return, for each stage, the number of stages on the longest path that starts at it, including
    itself. A chain of p stages gives p, …, 1.
    """
    depths = [1] * stages
    for source, target in sorted(edges, reverse=True):
        depths[source] = max(depths[source], depths[target] + 1)
    return tuple(depths)


_TaskKey = tuple[int, Phase, int]
"""(stage, phase, micro-batch) of a task, a tuple because tuples are hashed faster than instances of
`Task`.
"""
_TRAIN_PHASES = (
    frozenset({Phase.FORWARD, Phase.BACKWARD}),
    frozenset({Phase.FORWARD, Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT}),
)


def _dependency_function(
    graph: StageGraph, orders: Sequence[Sequence[Task]]
) -> Callable[[Task], list[_TaskKey]]:
    """Return a function that returns the tasks that must end before a given task starts."""
    before: defaultdict[int, list[int]] = defaultdict(list)
    after: defaultdict[int, list[int]] = defaultdict(list)
    for source, target in graph.edges:
        before[target].append(source)
        after[source].append(target)
    # The split is stored per stage and micro-batch, because a schedule may split only some
    # backwards of a stage.
    half = Phase.INPUT_GRADIENT
    whole = Phase.BACKWARD
    split = {
        (task.stage, task.micro_batch) for order in orders for task in order if task.phase is half
    }

    def dependencies(task: Task) -> list[_TaskKey]:
        own = task.micro_batch
        phase = task.phase
        if phase is Phase.WEIGHT_GRADIENT:
            return [(task.stage, half, own)]
        around = (before if phase is Phase.FORWARD else after)[task.stage]
        shared = [
            (stage, number)
            for stage in around
            for number in (
                graph.micro_batches_sharing_samples(task.stage, own, stage)
                if graph.ratios
                else (own,)
            )
        ]
        if phase is Phase.FORWARD:
            return [(stage, phase, number) for stage, number in shared]
        halves = [
            (stage, half if (stage, number) in split else whole, number) for stage, number in shared
        ]
        return [(task.stage, Phase.FORWARD, own), *halves]

    return dependencies


def _check_tasks(schedule: Schedule, graph: StageGraph, train: bool, device: int) -> None:
    """Raise InvalidScheduleError unless the list of a device contains each task of its stages once
    and no other task.
    """
    order = schedule.tasks[device]

    def error_at(position: int, reason: str) -> InvalidScheduleError:
        return InvalidScheduleError(schedule, device, position, reason)

    seen: dict[tuple[int, int], frozenset[Phase]] = {}
    """Phases so far, by (stage, micro-batch)."""
    for position, task in enumerate(order):
        if task.stage >= len(graph.stage_devices) or device not in graph.stage_devices[task.stage]:
            raise error_at(position, f"stage {task.stage} is not on device {device}")
        phases = seen.get((task.stage, task.micro_batch), frozenset())
        if task.phase in phases:
            raise error_at(position, f"{task} occurs twice")
        if (
            not 0
            <= task.micro_batch
            < schedule.micro_batches * graph.micro_batch_ratio_at(task.stage)
        ):
            raise error_at(position, f"there is no micro-batch {task.micro_batch}")
        if task.micro_batch not in graph.micro_batches_of(task.stage, schedule.micro_batches):
            raise error_at(
                position,
                (
                    f"micro-batch {task.micro_batch} does not run on the pipeline of stage "
                    f"{task.stage}"
                ),
            )
        if not train and task.phase is not Phase.FORWARD:
            raise error_at(position, f"{task} is a backward, but the schedule is for inference")
        seen[task.stage, task.micro_batch] = phases | {task.phase}
    for stage, devices in enumerate(graph.stage_devices):
        for micro_batch in (
            graph.micro_batches_of(stage, schedule.micro_batches) if device in devices else ()
        ):
            phases = seen.get((stage, micro_batch), frozenset())
            if phases not in (_TRAIN_PHASES if train else ({Phase.FORWARD},)):
                have = "".join(sorted(phase.value for phase in phases)) or "nothing"
                raise error_at(
                    max(len(order) - 1, 0),
                    f"stage {stage} runs {have} on micro-batch {micro_batch}",
                )


@dataclass(frozen=True, slots=True)
class MicroBatchSlice:
    """The micro-batches index, index + of, index + 2·of, … of a stage. A channel, which sends one
    slice of a tensor from one rank to another, has messages for these micro-batches only.
    """

    index: Index = 0
    of: Count = 1

    def has(self, micro_batch: int) -> bool:
        """Return True if the slice contains the micro-batch."""
        return micro_batch % self.of == self.index

    def message(self, micro_batch: int) -> int:
        """Return the number of the message for a micro-batch of the slice."""
        return micro_batch // self.of

    def micro_batch(self, message: int) -> int:
        """Return the micro-batch of the slice for which a message is sent."""
        return message * self.of + self.index


EVERY_MICRO_BATCH = MicroBatchSlice()
