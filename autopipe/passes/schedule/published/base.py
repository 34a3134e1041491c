"""Parts of published schedules: the form of a placement, the grid of slots, split backwards; and GPipe.

The grid is the one that papers draw: a forward and a backward take one slot each, and a micro-batch goes down a
pipeline of depth p in slots f, f + 1, ..., f + p - 1 and comes back in the next p slots. A slot's number says only who
comes first on a device: when tasks really start follows from their times. Every task stands in a later slot than all
that it waits for, so any order by slots can run. A lane is a device, or a group that runs the same stages together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, TypeVar

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Phase, Schedule, StageGraph, Task, lanes_of, on_each_device
from autopipe.passes.schedule.orders import Ticks, find_repetends, merge_orders, require_equal_micro_batches
from autopipe.passes.schedule.predict import task_ticks


@dataclass(frozen=True, slots=True)
class GPipe:
    """Every device runs all forwards of a step, then all backwards, both in the order of the micro-batches.

    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (2019), section 2.3.
    A device keeps the activations of all micro-batches at once.
    """

    name: ClassVar[str] = "gpipe"

    def requires(self, problem: Problem, placement: Placement) -> None:
        require_equal_micro_batches(self.name, problem, placement)

    def run(self, problem: Problem, placement: Placement) -> Schedule:
        graph = StageGraph.of(problem, placement)
        return order_gpipe(graph, problem.micro_batches, problem.train, task_ticks(problem, placement))


def order_gpipe(graph: StageGraph, micro_batches: int, train: bool, ticks: Ticks) -> Schedule:
    """All forwards, list-scheduled, then (in training) all backwards, list-scheduled; for any DAG of stages."""
    stages = range(len(graph.stage_devices))
    merged = [
        merge_orders(
            [[Task(s, phase, m) for m in graph.micro_batches_of(s, micro_batches)] for s in stages], graph, ticks
        )
        for phase in ((Phase.FORWARD, Phase.BACKWARD) if train else (Phase.FORWARD,))
    ]
    lanes = lanes_of(graph.stage_devices, ((),) * graph.devices)
    orders = [tuple(chain.from_iterable(phase[devices[0]] for phase in merged)) for devices in lanes]
    tasks = on_each_device(lanes, orders)
    return Schedule(micro_batches, tasks, find_repetends(tasks))


LaneStages = tuple[tuple[int, ...], ...]
"""The stages of each lane, ascending; lanes in the order in which the first pipeline reaches them."""

Form = Callable[[str, StageGraph], LaneStages]
"""The lanes of a placement, for a schedule's name. Raises InfeasibleError where stages are not placed so."""

_MOST = 16
"""Stages whose lanes a message tells."""

_LOOPS = "strategy tessel_shapes places stages so with shape: v and chunks: 2 or more, manual by its constraints"
_CHAIN = "strategy tessel_shapes places stages so with shape: v, manual by its constraints"
_WAVES = "strategy tessel_shapes places stages so with shape: v, chunks: 2 and wave: true, manual by its constraints"
_OPPOSITE = "strategy tessel_shapes places stages so with shape: x, manual by its constraints"


def round_robin(schedule: str, graph: StageGraph) -> LaneStages:
    """Lanes of a pipeline that passes all of them in turn, once or again and again: 0 1 2 0 1 2.

    Raises InfeasibleError where it does otherwise.
    """
    (path,) = _paths(schedule, graph, 1)
    once = tuple(range(max(path) + 1))
    if len(path) % len(once) or path != once * (len(path) // len(once)):
        raise _refusal(schedule, "pass all devices in turn, like 0 1 2 0 1 2", path, _LOOPS)
    return _stages_of(path)


def one_each(schedule: str, graph: StageGraph) -> LaneStages:
    """Lanes of one stage each. Raises InfeasibleError where some have several."""
    (path,) = _paths(schedule, graph, 1)
    if path != tuple(range(len(path))):
        raise _refusal(schedule, "lie on one device each, like 0 1 2", path, _CHAIN)
    return _stages_of(path)


def waves(schedule: str, graph: StageGraph) -> LaneStages:
    """Lanes of a pipeline that goes down and comes up again, once or several times: 0 1 2 2 1 0.

    Raises InfeasibleError where it does otherwise.
    """
    (path,) = _paths(schedule, graph, 1)
    wave = (*range(max(path) + 1), *reversed(range(max(path) + 1)))
    if len(path) % len(wave) or path != wave * (len(path) // len(wave)):
        raise _refusal(schedule, "go down the devices and up again, like 0 1 2 2 1 0", path, _WAVES)
    return _stages_of(path)


def one_wave(schedule: str, graph: StageGraph) -> LaneStages:
    """Lanes of two stages each, as of a V: 0 1 2 2 1 0. Raises InfeasibleError where they are otherwise."""
    lanes = waves(schedule, graph)
    if len(lanes[0]) > 2:
        reason = f"schedule {schedule} runs two stages a device, but here are {len(lanes[0])}"
        raise InfeasibleError(reason, hint=_WAVES)
    return lanes


def opposite(schedule: str, graph: StageGraph) -> LaneStages:
    """Lanes of two pipelines that pass the same devices, one stage each, in opposite directions; an even number.

    On each lane stands first the stage of pipeline 0. Raises InfeasibleError where they are otherwise.
    """
    down, up = _paths(schedule, graph, 2)
    if down != tuple(range(len(down))) or up != down[::-1]:
        wanted = "form two pipelines that pass the devices in opposite directions"
        raise _refusal(schedule, wanted, down + up, _OPPOSITE)
    if len(down) % 2:
        raise InfeasibleError(f"schedule {schedule} runs on an even number of devices, but a pipeline has {len(down)}")
    stages = _by_pipeline(graph)
    return tuple(zip(stages[0], reversed(stages[1]), strict=True))


def _paths(schedule: str, graph: StageGraph, pipelines: int) -> tuple[tuple[int, ...], ...]:
    """The lane of each stage, for each pipeline. Raises InfeasibleError where there are more or fewer pipelines."""
    if graph.pipeline_count != pipelines:
        wanted = "one pipeline" if pipelines == 1 else f"{pipelines} pipelines"
        reason = f"schedule {schedule} runs {wanted}, but the placement has {graph.pipeline_count}"
        raise InfeasibleError(reason, hint=_CHAIN if pipelines == 1 else _OPPOSITE)
    groups = list(dict.fromkeys(map(frozenset, graph.stage_devices)))
    for pair in ((other, group) for place, group in enumerate(groups) for other in groups[:place] if group & other):
        listed = " and on ".join(", ".join(map(str, sorted(group))) for group in pair)
        raise InfeasibleError(
            f"schedule {schedule} runs stages on the same devices or on different ones, but here are stages on "
            f"devices {listed}",
            hint="1f1b_plus takes stages on several devices beside stages on one",
        )
    lane = {group: place for place, group in enumerate(groups)}
    return tuple(
        tuple(lane[frozenset(graph.stage_devices[stage])] for stage in stages) for stages in _by_pipeline(graph)
    )


def _by_pipeline(graph: StageGraph) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(graph.pipeline_count)]
    for stage in range(len(graph.stage_devices)):
        found[graph.pipelines[stage] if graph.pipelines else 0].append(stage)
    return found


def _stages_of(path: Sequence[int]) -> LaneStages:
    return tuple(tuple(s for s, lane in enumerate(path) if lane == each) for each in range(max(path) + 1))


def _refusal(schedule: str, wanted: str, path: Sequence[int], hint: str) -> InfeasibleError:
    lies = " ".join(map(str, path[:_MOST])) + (" ..." if len(path) > _MOST else "")
    return InfeasibleError(f"schedule {schedule} wants stages that {wanted}, but they lie on {lies}", hint=hint)


@dataclass(frozen=True, slots=True)
class Published(ABC):
    """A schedule whose order follows from the form of the placement alone, not from times.

    Stages of a pipeline are taken for a chain, in their order: a DAG of stages can run like this too. Inference runs
    forwards alone, as soon as possible.
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
        """The placement's lanes. Raises InfeasibleError, saying what is wanted, where it is not for this schedule."""
        return type(self).form(self.name, graph)

    @abstractmethod
    def orders(self, lanes: LaneStages, micro_batches: int) -> Sequence[Sequence[Task]]:
        """Each lane's tasks in order."""


Item = TypeVar("Item")


def first_slot(index: int, depth: int, group: int) -> int:
    """The first slot of the index-th unit of a pipeline where units come in groups.

    Those of a group follow two slots apart; a group begins 2 * depth slots after the one before. With groups
    of `depth` units all are two slots apart: 1F1B.
    """
    return 2 * (depth * (index // group) + index % group)


def there_and_back(forwards: Sequence[Item], backwards: Sequence[Item], first: int) -> Iterator[tuple[int, Item]]:
    """(slot, item) of one unit; both are given by stage."""
    last = 2 * len(forwards) - 1
    yield from ((first + stage, item) for stage, item in enumerate(forwards))
    yield from ((first + last - stage, item) for stage, item in enumerate(backwards))


def on_grid(pipeline: Sequence[int], micro_batches: Iterable[int], group: int) -> Iterator[tuple[int, Task]]:
    """(slot, task) of all micro-batches that a pipeline of these stages runs, in groups of `group`."""
    for index, m in enumerate(micro_batches):
        forwards = [Task(s, Phase.FORWARD, m) for s in pipeline]
        backwards = [Task(s, Phase.BACKWARD, m) for s in pipeline]
        yield from there_and_back(forwards, backwards, first_slot(index, len(pipeline), group))


def one_in_turn(forwards: Sequence[Task], backwards: Sequence[Task], warm_up: int) -> list[Task]:
    """`warm_up` forwards, then a forward and a backward in turn, then the backwards that are left."""
    order = list(forwards[:warm_up])
    for index, backward in enumerate(backwards):
        order += [*forwards[warm_up + index : warm_up + index + 1], backward]
    return order


def by_lane(lanes: LaneStages, slots: Iterable[tuple[int, Task]]) -> list[list[Task]]:
    lane_of = {stage: place for place, stages in enumerate(lanes) for stage in stages}
    orders: list[list[Task]] = [[] for _ in lanes]
    for _, task in sorted(slots, key=lambda each: each[0]):
        orders[lane_of[task.stage]].append(task)
    return orders


def spell(words: Iterable[str], stages: Sequence[int], micro_batches: Sequence[Sequence[int]]) -> list[Task]:
    """A device's order spelled as it is drawn: F0 F1 B1 W ...

    A letter is a phase; the digit behind it says on which of the device's `stages`. W stands alone: the oldest weight
    gradient that is owed. A word takes the first of the stage's `micro_batches` that has not had its forward, or its
    backward. One that finds none left says nothing.
    """
    forwards, backwards = ([deque(each) for each in micro_batches] for _ in range(2))
    owed: deque[Task] = deque()
    order: list[Task] = []
    for word in words:
        if word == "W":
            order.append(owed.popleft())
            continue
        phase, place = Phase(word[0]), int(word[1:])
        left = (forwards if phase is Phase.FORWARD else backwards)[place]
        if not left:
            continue
        order.append(Task(stages[place], phase, left.popleft()))
        if phase is Phase.INPUT_GRADIENT:
            owed.append(Task(stages[place], Phase.WEIGHT_GRADIENT, order[-1].micro_batch))
    return order


_CHANGE = {Phase.FORWARD: 1, Phase.INPUT_GRADIENT: 0, Phase.WEIGHT_GRADIENT: -1}
"""Activations that a task adds to those kept: they are needed until parameters have their gradients."""


def fill_weights(orders: Sequence[Sequence[Task]], stages: int, room: int) -> list[list[Task]]:
    """Orders of F and I on lanes, with all W put in.

    All is laid out in slots of equal length, stage after stage as in a chain. A lane that cannot go on (its next task
    waits for another lane, or is a forward for which its `room` for activations is used up) runs the oldest weight
    gradient that it owes. Raises InfeasibleError where the room is too small for the orders.
    """
    done: set[Task] = set()

    def may_start(task: Task, kept: int) -> bool:
        s, m = task.stage, task.micro_batch
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
