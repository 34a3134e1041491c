"""When each device runs which stage on which micro-batch: the decision a scheduler makes, and its
check.

Schedulers see a placement as a `StageGraph`; devices that do the same are a lane, of which one
stands for all.
"""

from __future__ import annotations

import enum
import re
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from autopipe.ir.codec import Count, Index, Row
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.placement import Placement, stage_edges
from autopipe.ir.problem import Problem
from autopipe.ir.words import plural


class Phase(enum.Enum):
    """Phase of a task: a forward, a whole backward, or the two halves of a split backward."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"

    # Members are equal only to themselves. Tasks are hashed by the million, and Enum's own hash is
    # written in Python.
    __hash__ = object.__hash__


_TASK = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True, slots=True, order=False)
class Task:
    """One phase of one stage on one of the stage's micro-batches, printed and parsed as `2F0`."""

    stage: int
    phase: Phase
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.phase.value}{self.micro_batch}"

    @staticmethod
    def parse(text: str) -> Task:
        """The task that `text` spells. Raises ConfigurationError."""
        match = _TASK.fullmatch(text)
        if match is None:
            raise ConfigurationError(
                f"{text!r} is not a task", "tasks are written like 2F0: stage, phase, micro-batch"
            )
        return Task(int(match[1]), Phase(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True)
class Repetend:
    """The part of a device's list that repeats: `length` tasks from index `start` on, 0 where the
    device has none, `count` times, each time with the stages' own micro-batch indices one `stride`
    further.
    """

    start: Index
    length: Index
    count: Index
    stride: Index = 1


Repetends = tuple[Annotated[Repetend, Row()], ...]


@dataclass(frozen=True, slots=True)
class Proof:
    """Quality of a schedule's period (of its step, where it has none) for its placement, as its
    search proved it.

    `order` names the schedule whose order it is: the searched one's own, or a published one that
    was no worse. No period is below `lower_bound`, in its units; where it is `optimal` it is the
    least but for `rounding`, the share by which the search may have overstated it, by rounding
    times to whole numbers.
    """

    order: str
    lower_bound: float
    optimal: bool
    rounding: float = 0.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """For each device the tasks it runs, in order. A task of a stage on several devices is in each
    one's list.

    `micro_batches` are the step's: of these a stage may run several of its own for one
    (`StageGraph.ratios`).

    `repetends`, where known, marks the steady state of each device's list. `period` is the
    simulated length of one repetition in seconds or in the scheduler's own units, and `proof` what
    a search proved of it.
    """

    micro_batches: int
    tasks: tuple[tuple[Task, ...], ...]
    repetends: Repetends | None = None
    period: float | None = None
    proof: Proof | None = None

    @property
    def devices(self) -> int:
        return len(self.tasks)

    def has_orders_of(self, other: Schedule) -> bool:
        """True if each device runs the same tasks in the same order."""
        # Devices of a group mostly have one list.
        pairs = {
            (id(own), id(its)): (own, its)
            for own, its in zip(self.tasks, other.tasks, strict=False)
        }
        same = (self.micro_batches, self.devices) == (other.micro_batches, other.devices)
        return same and all(own == its for own, its in pairs.values())

    def grid(self) -> str:
        orders = {id(order): order for order in self.tasks}  # Devices of a group mostly have one.
        texts = {number: " ".join(map(str, order)) for number, order in orders.items()}
        return "\n".join(f"{device}: {texts[id(order)]}" for device, order in enumerate(self.tasks))

    def verify(self, graph: StageGraph, train: bool) -> None:
        """Raise WrongScheduleError unless the schedule can run. Every stage runs each phase of each
        of its pipeline's micro-batches once on each of its devices; and some execution respects
        every device's order, F before F along the graph's edges, backwards against them, and F
        before B (I before W) of a stage: between stages of tasks that have samples in common.
        """
        lanes = lanes_of(graph.stage_devices, self.tasks)
        firsts = [devices[0] for devices in lanes]
        for device in firsts:
            _check_tasks(self, graph, train, device)
        groups = lane_groups(graph.stage_devices, lanes)
        needs = _needs_in(graph, [self.tasks[device] for device in firsts])
        waiting = [deque(self.tasks[device]) for device in firsts]
        done: set[_Number] = set()
        moved = True
        while moved:
            moved = False
            for queue in waiting:
                while queue and done.issuperset(needs(queue[0])):
                    task = queue[0]
                    if any(
                        not waiting[lane] or waiting[lane][0] != task for lane in groups[task.stage]
                    ):
                        # A group computes together: the task is not yet next on all lanes of its
                        # stage.
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
                raise WrongScheduleError(self, device, position, f"{queue[0]} {why}")


_AROUND = 6
"""Cells of an order on either side of the wrong one."""


class WrongScheduleError(InfeasibleError):
    """A schedule that cannot run: the message is the reason, and the grid with the cell that shows
    it in brackets.
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
        start = max(0, position - _AROUND)
        stop = position + _AROUND + 1
        cells = grid[device]
        self.around = " ".join(
            [*["..."] * (start > 0), *cells[start:stop], *["..."] * (stop < len(cells))]
        )
        """The cells around the wrong one."""


Value = TypeVar("Value")
Lanes = tuple[tuple[int, ...], ...]
"""Devices that are in the same stages, ascending, each once; those with the least device first."""


def lanes_of(stage_devices: Sequence[Sequence[int]], orders: Sequence[Sequence[Hashable]]) -> Lanes:
    """The devices, of which `orders` holds one list each, by the stages that they are in and their
    lists.
    """
    stages: list[list[int]] = [[] for _ in orders]
    for stage, devices in enumerate(stage_devices):
        for device in devices:
            stages[device].append(stage)
    equal: dict[Sequence[Hashable], int] = {}
    known: dict[int, int] = {}
    found: dict[Hashable, list[int]] = {}
    for device, order in enumerate(orders):
        # Comparing lists takes long, and mostly they are one.
        if id(order) not in known:
            known[id(order)] = equal.setdefault(tuple(order), len(equal))
        found.setdefault((*stages[device], known[id(order)]), []).append(device)
    return tuple(map(tuple, found.values()))


def lane_groups(
    stage_devices: Sequence[Sequence[int]], lanes: Lanes
) -> tuple[tuple[int, ...], ...]:
    lane = {device: index for index, devices in enumerate(lanes) for device in devices}
    return tuple(tuple(dict.fromkeys(lane[device] for device in group)) for group in stage_devices)


def on_each_device(lanes: Lanes, values: Sequence[Value]) -> tuple[Value, ...]:
    """The value of each device's lane: one and the same for all devices of a lane."""
    found = {
        device: value for devices, value in zip(lanes, values, strict=True) for device in devices
    }
    return tuple(found[device] for device in range(len(found)))


@dataclass(frozen=True, slots=True)
class StageGraph:
    """Stages numbered topologically: each edge leads from a smaller to a larger index."""

    devices: int
    """Devices of the cluster; some may have no stage."""
    stage_devices: tuple[tuple[int, ...], ...]
    edges: tuple[tuple[int, int], ...]
    """(source, target), sorted, each once; both ends in one pipeline."""
    pipelines: tuple[int, ...] = ()
    """The pipeline of each stage; () where there is but one."""
    ratios: tuple[int, ...] = ()
    """Micro-batches that each stage runs for one of the problem's; () where all stages run those of
    the problem.
    """

    @staticmethod
    def of(problem: Problem, placement: Placement) -> StageGraph:
        """The stage graph of a placement on the problem's cluster. Raises InfeasibleError where a
        stage's micro-batches are no equal parts of the problem's.
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
        return max(depths_to_end(len(self.stage_devices), self.edges), default=0)

    @property
    def pipeline_count(self) -> int:
        return 1 + max(self.pipelines, default=0)

    def micro_batch_ratio_at(self, stage: int) -> int:
        return self.ratios[stage] if self.ratios else 1

    def sharing(self, stage: int, micro_batch: int, other: int) -> range:
        """The micro-batches of another stage that have samples of a stage's micro-batch."""
        return sharing(
            micro_batch, self.micro_batch_ratio_at(stage), self.micro_batch_ratio_at(other)
        )

    def needs(self, stage: int, phase: Phase, micro_batch: int) -> list[tuple[int, Phase, int]]:
        """Tasks that must be done before one, by stage, phase and micro-batch; its stage's own, if
        any, is the first. Of other stages they are in the task's own phase.
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
            for each in self.sharing(stage, micro_batch, other)
        ]

    def micro_batches_of(self, stage: int, micro_batches: int) -> range:
        """The micro-batches that a stage runs where the problem has `micro_batches`. Of several
        pipelines, m runs on pipeline m mod their number; there is but one where stages have ratios
        of their own.
        """
        if self.ratios:
            return range(micro_batches * self.ratios[stage])
        first = self.pipelines[stage] if self.pipelines else 0
        return range(first, micro_batches, self.pipeline_count)


def pipelines_of(placement: Placement) -> tuple[int, ...]:
    return tuple(stage.pipeline for stage in placement.stages) if placement.pipelines > 1 else ()


def micro_batch_ratios(placement: Placement, micro_batch_size: int) -> tuple[int, ...]:
    """Micro-batches that each stage runs for one of `micro_batch_size` samples; () where it is one
    for each. Number n of a stage with micro-batches of b samples has the step's samples from n * b
    on, b of them. Raises InfeasibleError where one does not divide `micro_batch_size`, or where
    several pipelines have different ones.
    """
    sizes = tuple(stage.micro_batch_size for stage in placement.stages)
    for index, size in enumerate(sizes):
        if micro_batch_size % size:
            raise InfeasibleError(
                f"stage {index} has micro-batches of {size} {plural(size, 'sample')}, "
                f"which do not divide those of {micro_batch_size}"
            )
    if set(sizes) <= {micro_batch_size}:
        return ()
    if placement.pipelines > 1:
        raise InfeasibleError(
            f"stages have micro-batches of {min(sizes)} and {micro_batch_size} "
            f"{plural(micro_batch_size, 'sample')}, but with several pipelines "
            "all have to have the same"
        )
    return tuple(micro_batch_size // size for size in sizes)


def sharing(number: int, parts: int, other_parts: int) -> range:
    """The numbers of the `other_parts` parts of something that meet part `number` of its `parts`,
    both counted on.
    """
    return range(number * other_parts // parts, -(-(number + 1) * other_parts // parts))


def depths_to_end(stages: int, edges: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """For each stage the number of stages on the longest path from it to an end, itself included. A
    chain of p stages gives p, ..., 1.
    """
    depths = [1] * stages
    for source, target in sorted(edges, reverse=True):
        depths[source] = max(depths[source], depths[target] + 1)
    return tuple(depths)


_Number = tuple[int, Phase, int]
"""A task's stage, phase and micro-batch: tasks are looked up by the million, and tuples are hashed
sooner.
"""
_TRAIN_PHASES = (
    frozenset({Phase.FORWARD, Phase.BACKWARD}),
    frozenset({Phase.FORWARD, Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT}),
)


def _needs_in(
    graph: StageGraph, orders: Sequence[Sequence[Task]]
) -> Callable[[Task], list[_Number]]:
    """A function to the tasks that must be done before one: those around it that have samples in
    common with it.
    """
    before: defaultdict[int, list[int]] = defaultdict(list)
    after: defaultdict[int, list[int]] = defaultdict(list)
    for source, target in graph.edges:
        before[target].append(source)
        after[source].append(target)
    # A step may split some of a stage's backwards and leave others whole.
    half = Phase.INPUT_GRADIENT
    whole = Phase.BACKWARD
    split = {
        (task.stage, task.micro_batch) for order in orders for task in order if task.phase is half
    }

    def needs(task: Task) -> list[_Number]:
        own = task.micro_batch
        phase = task.phase
        if phase is Phase.WEIGHT_GRADIENT:
            return [(task.stage, half, own)]
        around = (before if phase is Phase.FORWARD else after)[task.stage]
        shared = [
            (stage, number)
            for stage in around
            for number in (graph.sharing(task.stage, own, stage) if graph.ratios else (own,))
        ]
        if phase is Phase.FORWARD:
            return [(stage, phase, number) for stage, number in shared]
        halves = [
            (stage, half if (stage, number) in split else whole, number) for stage, number in shared
        ]
        return [(task.stage, Phase.FORWARD, own), *halves]

    return needs


def _check_tasks(schedule: Schedule, graph: StageGraph, train: bool, device: int) -> None:
    """Raise WrongScheduleError unless a device runs all tasks of its stages once, and no others."""
    order = schedule.tasks[device]

    def wrong(position: int, reason: str) -> WrongScheduleError:
        return WrongScheduleError(schedule, device, position, reason)

    seen: dict[tuple[int, int], frozenset[Phase]] = {}
    """By stage and micro-batch the phases so far."""
    for position, task in enumerate(order):
        if task.stage >= len(graph.stage_devices) or device not in graph.stage_devices[task.stage]:
            raise wrong(position, f"stage {task.stage} is not on device {device}")
        phases = seen.get((task.stage, task.micro_batch), frozenset())
        if task.phase in phases:
            raise wrong(position, f"{task} stands twice")
        if (
            not 0
            <= task.micro_batch
            < schedule.micro_batches * graph.micro_batch_ratio_at(task.stage)
        ):
            raise wrong(position, f"there is no micro-batch {task.micro_batch}")
        if task.micro_batch not in graph.micro_batches_of(task.stage, schedule.micro_batches):
            raise wrong(
                position,
                (
                    f"micro-batch {task.micro_batch} does not run on the pipeline of stage "
                    f"{task.stage}"
                ),
            )
        if not train and task.phase is not Phase.FORWARD:
            raise wrong(position, f"{task} is a backward, but nothing trains")
        seen[task.stage, task.micro_batch] = phases | {task.phase}
    for stage, devices in enumerate(graph.stage_devices):
        for micro_batch in (
            graph.micro_batches_of(stage, schedule.micro_batches) if device in devices else ()
        ):
            phases = seen.get((stage, micro_batch), frozenset())
            if phases not in (_TRAIN_PHASES if train else ({Phase.FORWARD},)):
                have = "".join(sorted(phase.value for phase in phases)) or "nothing"
                raise wrong(
                    max(len(order) - 1, 0),
                    f"stage {stage} runs {have} on micro-batch {micro_batch}",
                )


@dataclass(frozen=True, slots=True)
class MicroBatchSlice:
    """Every `of`-th micro-batch of a stage, from number `index` on: those of which a channel
    carries something, each in a message of its own.
    """

    index: Index = 0
    of: Count = 1

    def has(self, micro_batch: int) -> bool:
        return micro_batch % self.of == self.index

    def message(self, micro_batch: int) -> int:
        return micro_batch // self.of

    def micro_batch(self, message: int) -> int:
        return message * self.of + self.index


EVERY = MicroBatchSlice()
