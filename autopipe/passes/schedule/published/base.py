"""Parts that published schedules share: placement patterns, the slot grid, the insertion of weight
gradients, and the schedule GPipe.

The slot grid is the diagram that papers draw. Each forward and each backward takes one slot. A
micro-batch whose first forward is in slot f passes a pipeline of p stages in slots f, ..., f + p -
1, and its backwards run in the next p slots. Slots only define the order of tasks on a device; the
real start times follow from the lengths of the tasks. Each task has a later slot than all tasks on
which it depends, so an order by slots never deadlocks.

A pipeline rank is a device, or a group of devices that run the same stages together.
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
from autopipe.ir.schedule import (
    Phase,
    Schedule,
    StageGraph,
    Task,
    expand_to_devices,
    group_equal_devices,
)
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
    """Each device runs all forwards of a step, then all backwards, both in the order of
    micro-batches.

    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism"
    (2019), section 2.3. A device saves the activations of all micro-batches of a step.
    """

    name: ClassVar[str] = "gpipe"

    def requires(self, problem: Problem, placement: Placement) -> None:
        """Raise InfeasibleError if stages have different micro-batch sizes."""
        require_equal_micro_batches(self.name, problem, placement)

    def run(self, problem: Problem, placement: Placement) -> Schedule:
        """Return the GPipe schedule of a placement."""
        graph = StageGraph.of(problem, placement)
        return order_gpipe(
            graph, problem.micro_batches, problem.train, task_ticks(problem, placement)
        )


def order_gpipe(graph: StageGraph, micro_batches: int, train: bool, ticks: Ticks) -> Schedule:
    """Return the GPipe schedule: all forwards, then, if `train`, all backwards. If devices have
    several stages, a list schedule (`merge_orders`) orders the forwards, and another one the
    backwards. The stages may form any DAG.
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
    ranks = group_equal_devices(graph.stage_devices, ((),) * graph.devices)
    orders = [
        tuple(chain.from_iterable(phase[devices[0]] for phase in merged)) for devices in ranks
    ]
    tasks = expand_to_devices(ranks, orders)
    return Schedule(micro_batches, tasks, find_repetends(tasks))


RankStages = tuple[tuple[int, ...], ...]
"""The stages of each pipeline rank, in ascending order. If there are two pipelines, each rank has a
stage of the first pipeline, then one of the second. Ranks are numbered in the order in which the
first pipeline visits them.
"""

_MAX_LISTED_STAGES = 16
"""Maximum number of stages for which an error message lists the pipeline ranks."""


@dataclass(frozen=True, slots=True)
class PlacementPattern:
    """The order in which the pipelines of a placement visit the pipeline ranks 0, ..., p - 1."""

    requirement: str
    """Relative clause that completes the message "schedule s requires stages that"."""
    options: str
    """Options of strategy tessel_shapes that create a placement with this pattern, for hints."""
    pipelines: int = 1
    """Number of pipelines, 1 or 2. Two pipelines have one stage per rank each and run in opposite
    directions, and the number of ranks is even.
    """
    returns: bool = False
    """True if the pipeline visits the ranks in ascending and then in descending order."""
    repeats: bool = False
    """True if the pipeline may repeat its path over the ranks."""

    @property
    def hint(self) -> str:
        """Hint for a placement that does not have this pattern."""
        return (
            f"use strategy tessel_shapes with {self.options}, or strategy manual with constraints"
        )

    def rank_stages(self, schedule: str, graph: StageGraph) -> RankStages:
        """Return the stages of each pipeline rank. Raises InfeasibleError, which names `schedule`,
        if the placement does not have this pattern.
        """
        if graph.pipeline_count != self.pipelines:
            required = f"{self.pipelines} {plural(self.pipelines, 'pipeline')}"
            reason = (
                f"schedule {schedule} requires {required}, but the placement has "
                f"{graph.pipeline_count}"
            )
            raise InfeasibleError(reason, hint=(CHAIN if self.pipelines == 1 else self).hint)
        rank_of_group = _pipeline_ranks(schedule, graph)
        pipeline_of = graph.pipelines or (0,) * len(graph.stage_devices)
        stages = sorted(range(len(pipeline_of)), key=lambda stage: pipeline_of[stage])
        path = [rank_of_group[frozenset(graph.stage_devices[stage])] for stage in stages]
        ranks = range(len(rank_of_group))
        one_pass = [*ranks]
        if self.returns or self.pipelines == 2:
            one_pass += reversed(ranks)
        passes = len(path) // len(one_pass)
        is_balanced = len({pipeline_of.count(each) for each in range(self.pipelines)}) == 1
        if path == one_pass * passes and passes > 1 and self.returns and not self.repeats:
            reason = (
                f"schedule {schedule} requires 2 stages per device, but the placement has "
                f"{2 * passes}"
            )
            raise InfeasibleError(reason, hint=self.hint)
        if path != one_pass * passes or not is_balanced or (passes > 1 and not self.repeats):
            listed = " ".join(map(str, path[:_MAX_LISTED_STAGES]))
            if len(path) > _MAX_LISTED_STAGES:
                listed += " ..."
            reason = (
                f"schedule {schedule} requires stages that {self.requirement}, but they are on "
                f"pipeline ranks {listed}"
            )
            raise InfeasibleError(reason, hint=self.hint)
        if self.pipelines == 2 and len(ranks) % 2:
            reason = (
                f"schedule {schedule} requires an even number of devices per pipeline, but the "
                f"placement has {len(ranks)}"
            )
            raise InfeasibleError(reason)
        return tuple(
            tuple(stage for stage, own in zip(stages, path, strict=True) if own == rank)
            for rank in ranks
        )


def _pipeline_ranks(schedule: str, graph: StageGraph) -> dict[frozenset[int], int]:
    """Return the pipeline rank of each set of devices that runs a stage, numbered in the order of
    the stages. Raises InfeasibleError if two different sets share a device.
    """
    groups = list(dict.fromkeys(map(frozenset, graph.stage_devices)))
    for pair in (
        (other, group)
        for rank, group in enumerate(groups)
        for other in groups[:rank]
        if group & other
    ):
        listed = " and on ".join(", ".join(map(str, sorted(group))) for group in pair)
        raise InfeasibleError(
            f"schedule {schedule} requires stages whose device groups are equal or disjoint, but "
            f"two stages are on devices {listed}",
            hint="use schedule 1f1b_plus for stages on several devices of other stages",
        )
    return {group: rank for rank, group in enumerate(groups)}


CHAIN = PlacementPattern("are on one pipeline rank each, such as 0 1 2", "shape: v")
LOOPS = PlacementPattern(
    "visit all pipeline ranks repeatedly in ascending order, such as 0 1 2 0 1 2",
    "shape: v and stages_per_rank: 2 or more",
    repeats=True,
)
_DOWN_AND_UP = (
    "visit all pipeline ranks in ascending and then in descending order, such as 0 1 2 2 1 0",
    "shape: v, stages_per_rank: 2 and style: v",
)
ONE_WAVE = PlacementPattern(*_DOWN_AND_UP, returns=True)
WAVES = PlacementPattern(*_DOWN_AND_UP, returns=True, repeats=True)
OPPOSITE = PlacementPattern(
    "form two pipelines that visit the pipeline ranks in opposite directions",
    "shape: x",
    pipelines=2,
)


@dataclass(frozen=True, slots=True)
class Published:
    """Base class of schedules whose order follows from the placement pattern alone, not from the
    lengths of tasks.

    The stages of a pipeline are treated as a chain in the order of their indices. Stages that form
    another DAG can run this order too, because edges lead from smaller to larger indices. Inference
    runs the forwards of GPipe. Subclasses add no fields, so they need no dataclass decorator.
    """

    name: ClassVar[str]
    pattern: ClassVar[PlacementPattern]

    def requires(self, problem: Problem, placement: Placement) -> None:
        """Raise InfeasibleError if stages have different micro-batch sizes or, in training, if the
        placement or the number of micro-batches does not suit this schedule.
        """
        require_equal_micro_batches(self.name, problem, placement)
        if problem.train:
            self.rank_stages(StageGraph.of(problem, placement), problem.micro_batches)

    def run(self, problem: Problem, placement: Placement) -> Schedule:
        """Return the schedule of a placement."""
        graph = StageGraph.of(problem, placement)
        if not problem.train:
            return order_gpipe(graph, problem.micro_batches, False, task_ticks(problem, placement))
        return self.order(graph, problem.micro_batches)

    def order(self, graph: StageGraph, micro_batches: int) -> Schedule:
        """Return the schedule of a training step. Raises InfeasibleError if the placement or the
        number of micro-batches does not suit this schedule.
        """
        lists: list[tuple[Task, ...]] = [()] * graph.devices
        for order in map(tuple, self.orders(self.rank_stages(graph, micro_batches), micro_batches)):
            for device in graph.stage_devices[order[0].stage]:
                lists[device] = order
        return Schedule(micro_batches, tuple(lists), find_repetends(lists))

    def rank_stages(self, graph: StageGraph, micro_batches: int) -> RankStages:
        """Return the stages of each pipeline rank. Raises InfeasibleError, which states the
        requirement, if the placement or the number of micro-batches does not suit this schedule.
        """
        return self.pattern.rank_stages(self.name, graph)

    def orders(self, rank_stages: RankStages, micro_batches: int) -> Sequence[Sequence[Task]]:
        """Return the order of tasks of each pipeline rank. Subclasses define this method, or
        override `order`.
        """
        raise NotImplementedError


Item = TypeVar("Item")


def first_slot(index: int, depth: int, group: int) -> int:
    """Return the slot of the first forward of micro-batch `index` on the slot grid, the diagram in
    which each forward and each backward takes one time slot. The pipeline has `depth` stages, and
    micro-batches run in groups of `group`.

    The slot is 2 * (depth * (index // group) + index % group). Micro-batches of a group start two
    slots apart, and groups start 2 * depth slots apart. If `group` equals `depth`, all
    micro-batches start two slots apart, which is 1F1B.
    """
    return 2 * (depth * (index // group) + index % group)


def forward_and_backward_slots(
    forwards: Sequence[Item], backwards: Sequence[Item], first: int
) -> Iterator[tuple[int, Item]]:
    """Yield (slot, item) for the tasks of one micro-batch on the slot grid, on which each task
    takes one time slot. Forwards have consecutive slots from slot `first` on, and backwards have
    the slots after them.

    `forwards` and `backwards` contain one item per stage, both ordered by stage; the backward of
    the last stage runs first.
    """
    last = 2 * len(forwards) - 1
    yield from ((first + stage, item) for stage, item in enumerate(forwards))
    yield from ((first + last - stage, item) for stage, item in enumerate(backwards))


def grid_slots(
    pipeline: Sequence[int], micro_batches: Iterable[int], group: int
) -> Iterator[tuple[int, Task]]:
    """Yield (slot, task) for all tasks of `micro_batches` on the slot grid, on which each task
    takes one time slot. `pipeline` contains the stages of the pipeline, and micro-batches run in
    groups of `group`, as in `first_slot`.
    """
    for index, m in enumerate(micro_batches):
        forwards = [Task(s, Phase.FORWARD, m) for s in pipeline]
        backwards = [Task(s, Phase.BACKWARD, m) for s in pipeline]
        yield from forward_and_backward_slots(
            forwards, backwards, first_slot(index, len(pipeline), group)
        )


def alternate_phases(
    forwards: Sequence[Task], backwards: Sequence[Task], in_flight: int, k: int = 1
) -> list[Task]:
    """Return `in_flight` forwards, then alternately k backwards and k forwards as long as forwards
    remain, then the remaining backwards.
    """
    order = list(forwards[:in_flight])
    for first in range(0, len(backwards), k):
        order += [
            *backwards[first : first + k],
            *forwards[in_flight + first : in_flight + first + k],
        ]
    return order


def orders_by_slot(rank_stages: RankStages, slots: Iterable[tuple[int, Task]]) -> list[list[Task]]:
    """Return the tasks of each pipeline rank in the order of their time slots. `slots` has pairs
    (slot, task). Tasks of one slot keep their order in `slots`.
    """
    rank_of = {stage: rank for rank, stages in enumerate(rank_stages) for stage in stages}
    orders: list[list[Task]] = [[] for _ in rank_stages]
    for _, task in sorted(slots, key=lambda each: each[0]):
        orders[rank_of[task.stage]].append(task)
    return orders


def order_from_notation(
    words: Iterable[str], stages: Sequence[int], micro_batches: Sequence[Sequence[int]]
) -> list[Task]:
    """Return the order of tasks of a device, given as words in the notation of the papers, such as
    F0 F1 B1 W.

    The letter of a word is a phase, and the number is an index into the device's `stages`. A word
    stands for the first micro-batch of this stage whose forward (or backward) is not yet in the
    order; it is skipped if there is none. `micro_batches` contains the micro-batches of each stage.
    The word W has no number: it is the oldest weight gradient whose input gradient (I) is in the
    order and which is not yet in the order itself.
    """
    forwards = [deque(each) for each in micro_batches]
    backwards = [deque(each) for each in micro_batches]
    pending_weights: deque[Task] = deque()
    order: list[Task] = []
    for word in words:
        if word == "W":
            order.append(pending_weights.popleft())
            continue
        phase = Phase(word[0])
        index = int(word[1:])
        remaining = (forwards if phase is Phase.FORWARD else backwards)[index]
        if not remaining:
            continue
        order.append(Task(stages[index], phase, remaining.popleft()))
        if phase is Phase.INPUT_GRADIENT:
            weight_gradient = Task(stages[index], Phase.WEIGHT_GRADIENT, order[-1].micro_batch)
            pending_weights.append(weight_gradient)
    return order


_ADDED_ACTIVATIONS = {Phase.FORWARD: 1, Phase.INPUT_GRADIENT: 0, Phase.WEIGHT_GRADIENT: -1}
"""Change of the number of saved activations of a device by a task. An activation is saved until its
weight gradient has run.
"""


def insert_weight_gradients(
    orders: Sequence[Sequence[Task]], stages: int, capacity: int
) -> list[list[Task]]:
    """Return the orders of all pipeline ranks with the weight gradients W inserted. `orders` has
    the forwards and input gradients of each rank.

    For this purpose, time is divided into slots, each task takes one slot, and the `stages` stages
    form a chain. In each slot, a rank runs its next task of `orders` if all tasks that it depends
    on are done and, for a forward, fewer than `capacity` activations are saved. Otherwise the rank
    runs its oldest weight gradient whose input gradient has run, if any. Raises InfeasibleError if
    no rank can run a task, because `capacity` is too small.
    """
    done: set[Task] = set()

    def may_start(task: Task, saved: int) -> bool:
        """True if all tasks that `task` depends on are done and, for a forward, `saved` is below
        the capacity.
        """
        s = task.stage
        m = task.micro_batch
        if task.phase is Phase.FORWARD:
            return saved < capacity and (s == 0 or Task(s - 1, Phase.FORWARD, m) in done)
        ready = s == stages - 1 or Task(s + 1, Phase.INPUT_GRADIENT, m) in done
        return ready and Task(s, Phase.FORWARD, m) in done

    remaining = [deque(order) for order in orders]
    pending_weights: list[deque[Task]] = [deque() for _ in orders]
    filled: list[list[Task]] = [[] for _ in orders]
    saved = [0] * len(orders)
    while any(remaining) or any(pending_weights):
        slot = []
        for rank, order in enumerate(filled):
            ready = remaining[rank] and may_start(remaining[rank][0], saved[rank])
            queue = remaining[rank] if ready else pending_weights[rank]
            if not queue:
                continue
            task = queue.popleft()
            order.append(task)
            slot.append(task)
            saved[rank] += _ADDED_ACTIVATIONS[task.phase]
            if task.phase is Phase.INPUT_GRADIENT:
                pending_weights[rank].append(
                    Task(task.stage, Phase.WEIGHT_GRADIENT, task.micro_batch)
                )
        if not slot:
            raise InfeasibleError(
                f"the order requires more activations in memory than the limit of {capacity} per "
                "device"
            )
        done.update(slot)
    return filled
