"""Parts of published schedules: the form of a placement, the grid of slots, split backwards; and
GPipe.

The grid is the one that papers draw: a forward and a backward take one slot each, and a micro-batch
goes down a pipeline of depth p in slots f, f + 1, ..., f + p - 1 and comes back in the next p
slots. A slot's number says only who comes first on a device: when tasks really start follows from
their times. Every task stands in a later slot than all that it waits for, so any order by slots can
run. A lane is a device, or a group that runs the same stages together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, TypeVar

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Phase, Schedule, StageGraph, Task, lanes_of, on_each_device
from autopipe.ir.words import plural
from autopipe.passes.schedule.orders import (
    Ticks,
    find_repetends,
    merge_orders,
    require_equal_micro_batches,
)
from autopipe.passes.schedule.predict import task_ticks


@dataclass(frozen=True, slots=True)
class GPipe:
    """Every device runs all forwards of a step, then all backwards, both in the order of the
    micro-batches.

    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism"
    (2019), section 2.3. A device keeps the activations of all micro-batches at once.
    """

    name: ClassVar[str] = "gpipe"

    def requires(self, problem: Problem, placement: Placement) -> None:
        require_equal_micro_batches(self.name, problem, placement)

    def run(self, problem: Problem, placement: Placement) -> Schedule:
        graph = StageGraph.of(problem, placement)
        return order_gpipe(
            graph, problem.micro_batches, problem.train, task_ticks(problem, placement)
        )


def order_gpipe(graph: StageGraph, micro_batches: int, train: bool, ticks: Ticks) -> Schedule:
    """All forwards, list-scheduled, then (in training) all backwards, list-scheduled; for any DAG
    of stages.
    """
    stages = range(len(graph.stage_devices))
    merged = [
        merge_orders(
            [[Task(s, phase, m) for m in graph.micro_batches_of(s, micro_batches)] for s in stages],
            graph,
            ticks,
        )
        for phase in ((Phase.FORWARD, Phase.BACKWARD) if train else (Phase.FORWARD,))
    ]
    lanes = lanes_of(graph.stage_devices, ((),) * graph.devices)
    orders = [
        tuple(chain.from_iterable(phase[devices[0]] for phase in merged)) for devices in lanes
    ]
    tasks = on_each_device(lanes, orders)
    return Schedule(micro_batches, tasks, find_repetends(tasks))


LaneStages = tuple[tuple[int, ...], ...]
"""The stages of each lane, ascending (of two pipelines first the one's); lanes as the first
pipeline reaches them.
"""

_MOST = 16  # Stages whose lanes a message tells.


@dataclass(frozen=True, slots=True)
class Form:
    """The way in which a placement's pipelines pass its p lanes."""

    wanted: str
    """Completes "schedule s wants stages that"."""
    options: str
    """Of the strategy tessel_shapes, for such a placement."""
    pipelines: int = 1
    """2 for two pipelines of a stage a lane, in opposite directions over an even number of lanes.
    """
    returns: bool = False
    """True if the pipeline goes down and comes up again."""
    repeats: bool = False
    """True if it may do so again and again."""

    @property
    def hint(self) -> str:
        return (
            f"strategy tessel_shapes places stages so with {self.options}, manual by its "
            "constraints"
        )

    def lanes(self, schedule: str, graph: StageGraph) -> LaneStages:
        """The lanes of a placement, for a schedule's name. Raises InfeasibleError where stages are
        not placed so.
        """
        if graph.pipeline_count != self.pipelines:
            wanted = (
                "one pipeline"
                if self.pipelines == 1
                else f"{self.pipelines} {plural(self.pipelines, 'pipeline')}"
            )
            reason = (
                f"schedule {schedule} runs {wanted}, but the placement has {graph.pipeline_count}"
            )
            raise InfeasibleError(reason, hint=(CHAIN if self.pipelines == 1 else self).hint)
        lane = _lane_numbers(schedule, graph)
        of = graph.pipelines or (0,) * len(graph.stage_devices)
        stages = sorted(range(len(of)), key=lambda stage: of[stage])
        path = [lane[frozenset(graph.stage_devices[stage])] for stage in stages]
        lanes = range(len(lane))
        once = [*lanes, *reversed(lanes)] if self.returns or self.pipelines == 2 else [*lanes]
        times = len(path) // len(once)
        equal = len({of.count(each) for each in range(self.pipelines)}) == 1
        if path == once * times and times > 1 and self.returns and not self.repeats:
            reason = f"schedule {schedule} runs two stages a device, but here are {2 * times}"
            raise InfeasibleError(reason, hint=self.hint)
        if path != once * times or not equal or (times > 1 and not self.repeats):
            on = " ".join(map(str, path[:_MOST])) + (" ..." if len(path) > _MOST else "")
            reason = f"schedule {schedule} wants stages that {self.wanted}, but they lie on {on}"
            raise InfeasibleError(reason, hint=self.hint)
        if self.pipelines == 2 and len(lanes) % 2:
            reason = (
                f"schedule {schedule} runs on an even number of devices, but a pipeline has "
                f"{len(lanes)}"
            )
            raise InfeasibleError(reason)
        return tuple(
            tuple(s for s, each in zip(stages, path, strict=True) if each == own) for own in lanes
        )


def _lane_numbers(schedule: str, graph: StageGraph) -> dict[frozenset[int], int]:
    """The lane of each group of devices. Raises InfeasibleError where two groups have some in
    common.
    """
    groups = list(dict.fromkeys(map(frozenset, graph.stage_devices)))
    for pair in (
        (other, group)
        for place, group in enumerate(groups)
        for other in groups[:place]
        if group & other
    ):
        listed = " and on ".join(", ".join(map(str, sorted(group))) for group in pair)
        raise InfeasibleError(
            f"schedule {schedule} runs stages on the same devices or on different ones, but "
            "here are stages on "
            f"devices {listed}",
            hint="1f1b_plus takes stages on several devices beside stages on one",
        )
    return {group: place for place, group in enumerate(groups)}


CHAIN = Form("lie on one device each, like 0 1 2", "shape: v")
LOOPS = Form(
    "pass all devices in turn, like 0 1 2 0 1 2", "shape: v and chunks: 2 or more", repeats=True
)
_DOWN_AND_UP = (
    "go down the devices and up again, like 0 1 2 2 1 0",
    "shape: v, chunks: 2 and wave: true",
)
ONE_WAVE = Form(*_DOWN_AND_UP, returns=True)
WAVES = Form(*_DOWN_AND_UP, returns=True, repeats=True)
OPPOSITE = Form(
    "form two pipelines that pass the devices in opposite directions", "shape: x", pipelines=2
)


@dataclass(frozen=True, slots=True)
class Published:
    """A schedule whose order follows from the form of the placement alone, not from times.

    Stages of a pipeline are taken for a chain, in their order: a DAG of stages can run like this
    too. Inference runs forwards alone, as soon as possible. It has no options, and so its
    subclasses are dataclasses without saying so.
    """

    name: ClassVar[str]
    form: ClassVar[Form]

    def requires(self, problem: Problem, placement: Placement) -> None:
        require_equal_micro_batches(self.name, problem, placement)
        if problem.train:
            self.lanes(StageGraph.of(problem, placement), problem.micro_batches)

    def run(self, problem: Problem, placement: Placement) -> Schedule:
        graph = StageGraph.of(problem, placement)
        if not problem.train:
            return order_gpipe(graph, problem.micro_batches, False, task_ticks(problem, placement))
        return self.order(graph, problem.micro_batches)

    def order(self, graph: StageGraph, micro_batches: int) -> Schedule:
        """The schedule of a training step. Raises InfeasibleError where the form is another one."""
        lists: list[tuple[Task, ...]] = [()] * graph.devices
        for order in map(tuple, self.orders(self.lanes(graph, micro_batches), micro_batches)):
            for device in graph.stage_devices[order[0].stage]:
                lists[device] = order
        return Schedule(micro_batches, tuple(lists), find_repetends(lists))

    def lanes(self, graph: StageGraph, micro_batches: int) -> LaneStages:
        """The placement's lanes. Raises InfeasibleError, saying what is wanted, where it is not for
        this schedule.
        """
        return self.form.lanes(self.name, graph)

    def orders(self, lanes: LaneStages, micro_batches: int) -> Sequence[Sequence[Task]]:
        """Each lane's tasks in order."""
        raise NotImplementedError


Item = TypeVar("Item")


def first_slot(index: int, depth: int, group: int) -> int:
    """The first slot of the index-th unit of a pipeline where units come in groups. Those of a
    group follow two slots apart; a group begins 2 * depth slots after the one before. With groups
    of `depth` units all are two slots apart: 1F1B.
    """
    return 2 * (depth * (index // group) + index % group)


def there_and_back(
    forwards: Sequence[Item], backwards: Sequence[Item], first: int
) -> Iterator[tuple[int, Item]]:
    """(slot, item) of one unit; both are given by stage."""
    last = 2 * len(forwards) - 1
    yield from ((first + stage, item) for stage, item in enumerate(forwards))
    yield from ((first + last - stage, item) for stage, item in enumerate(backwards))


def on_grid(
    pipeline: Sequence[int], micro_batches: Iterable[int], group: int
) -> Iterator[tuple[int, Task]]:
    """(slot, task) of all micro-batches that a pipeline of these stages runs, in groups of
    `group`.
    """
    for index, m in enumerate(micro_batches):
        forwards = [Task(s, Phase.FORWARD, m) for s in pipeline]
        backwards = [Task(s, Phase.BACKWARD, m) for s in pipeline]
        yield from there_and_back(forwards, backwards, first_slot(index, len(pipeline), group))


def in_turn(
    forwards: Sequence[Task], backwards: Sequence[Task], kept: int, k: int = 1
) -> list[Task]:
    """Forwards until `kept` micro-batches are kept, then k backwards and k forwards in turn, then
    backwards.
    """
    order = list(forwards[:kept])
    for first in range(0, len(backwards), k):
        order += [*backwards[first : first + k], *forwards[kept + first : kept + first + k]]
    return order


def by_lane(lanes: LaneStages, slots: Iterable[tuple[int, Task]]) -> list[list[Task]]:
    lane_of = {stage: place for place, stages in enumerate(lanes) for stage in stages}
    orders: list[list[Task]] = [[] for _ in lanes]
    for _, task in sorted(slots, key=lambda each: each[0]):
        orders[lane_of[task.stage]].append(task)
    return orders


def spell(
    words: Iterable[str], stages: Sequence[int], micro_batches: Sequence[Sequence[int]]
) -> list[Task]:
    """A device's order spelled as it is drawn: F0 F1 B1 W ... A letter is a phase; the digit behind
    it says on which of the device's `stages`. W stands alone: the oldest weight gradient that is
    owed. A word takes the first of the stage's `micro_batches` that has not had its forward, or its
    backward. One that finds none left says nothing.
    """
    forwards, backwards = ([deque(each) for each in micro_batches] for _ in range(2))
    owed: deque[Task] = deque()
    order: list[Task] = []
    for word in words:
        if word == "W":
            order.append(owed.popleft())
            continue
        phase = Phase(word[0])
        place = int(word[1:])
        left = (forwards if phase is Phase.FORWARD else backwards)[place]
        if not left:
            continue
        order.append(Task(stages[place], phase, left.popleft()))
        if phase is Phase.INPUT_GRADIENT:
            owed.append(Task(stages[place], Phase.WEIGHT_GRADIENT, order[-1].micro_batch))
    return order


_CHANGE = {Phase.FORWARD: 1, Phase.INPUT_GRADIENT: 0, Phase.WEIGHT_GRADIENT: -1}
"""Activations that a task adds to those kept: they are needed until parameters have their
gradients.
"""


def fill_weights(orders: Sequence[Sequence[Task]], stages: int, room: int) -> list[list[Task]]:
    """Orders of F and I on lanes, with all W put in. All is laid out in slots of equal length,
    stage after stage as in a chain. A lane that cannot go on (its next task waits for another lane,
    or is a forward for which its `room` for activations is used up) runs the oldest weight gradient
    that it owes. Raises InfeasibleError where the room is too small for the orders.
    """
    done: set[Task] = set()

    def may_start(task: Task, kept: int) -> bool:
        s = task.stage
        m = task.micro_batch
        if task.phase is Phase.FORWARD:
            return kept < room and (s == 0 or Task(s - 1, Phase.FORWARD, m) in done)
        ready = s == stages - 1 or Task(s + 1, Phase.INPUT_GRADIENT, m) in done
        return ready and Task(s, Phase.FORWARD, m) in done

    rest = [deque(order) for order in orders]
    owed: list[deque[Task]] = [deque() for _ in orders]
    filled: list[list[Task]] = [[] for _ in orders]
    kept = [0] * len(orders)
    while any(rest) or any(owed):
        slot = []
        for lane, order in enumerate(filled):
            ready = rest[lane] and may_start(rest[lane][0], kept[lane])
            queue = rest[lane] if ready else owed[lane]
            if not queue:
                continue
            task = queue.popleft()
            order.append(task)
            slot.append(task)
            kept[lane] += _CHANGE[task.phase]
            if task.phase is Phase.INPUT_GRADIENT:
                owed[lane].append(Task(task.stage, Phase.WEIGHT_GRADIENT, task.micro_batch))
        if not slot:
            raise InfeasibleError(f"room for {room} activations is too small for this order")
        done.update(slot)
    return filled
