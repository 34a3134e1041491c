"""Stages that wait for every message where they come to it: what overlapping messages with tasks is
measured by.

A generated step sends and posts receives where that overlaps best; waiting there would deadlock. So
these stages exchange messages between tasks, in one order of all tasks and messages that all ranks
share: a topological order of tasks with each message, one item for both ends, right behind the task
that gives it (Lin et al., "Tessel" (HPCA 2024), section V).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from autopipe.backends.torch.runtime.modes.execution import Execution, stage_arguments
from autopipe.backends.torch.runtime.step.ports import Port, Recv, Send
from autopipe.backends.torch.runtime.step.rank_context import RankContext
from autopipe.backends.torch.runtime.step.stage import Stage
from autopipe.ir.schedule import EVERY, MicroBatchSlice, Phase, Task

_UNITS = {Phase.FORWARD: 1, Phase.BACKWARD: 2, Phase.INPUT_GRADIENT: 1, Phase.WEIGHT_GRADIENT: 1}
"""Rough lengths: they choose among orders, all of which are correct."""


@dataclass(frozen=True, slots=True)
class ChannelEnd:
    """A channel, from a stage on one rank to a stage on another, or on the same."""

    channel: int
    source_stage: int
    source_rank: int
    target_stage: int
    target_rank: int
    gradient: bool
    source_slice: MicroBatchSlice = EVERY
    target_slice: MicroBatchSlice = EVERY


@dataclass(frozen=True, slots=True)
class Message:
    """One message on a channel, forwards or, as gradient, back; `number` counts those of its
    direction in a step.
    """

    end: ChannelEnd
    gradient: bool
    number: int

    @property
    def ranks(self) -> tuple[int, int]:
        ends = self.end.source_rank, self.end.target_rank
        return (ends[1], ends[0]) if self.gradient else ends


Event = Task | Message


def global_event_order(
    lists: Sequence[Sequence[Task]], ends: Sequence[ChannelEnd]
) -> list[list[Event]]:
    """For each rank its tasks and messages in the one order. `lists` are the ranks' tasks; a
    group's run together. What can start first comes first, so that the order is near to that in
    which things happen.
    """
    orders: list[list[Event]] = [[] for _ in lists]
    rest = [deque(tasks) for tasks in lists]
    clocks = [0] * len(lists)
    ranks = defaultdict[int, list[int]](list)
    for rank, tasks in enumerate(lists):
        for stage in {task.stage for task in tasks}:
            ranks[stage].append(rank)
    # By stage, and whether of gradients: stages whose messages it needs, with its slice and theirs;
    # where its own go.
    needs = defaultdict[tuple[int, bool], set[tuple[MicroBatchSlice, int, MicroBatchSlice]]](set)
    leaving = defaultdict[tuple[int, bool], list[tuple[ChannelEnd, MicroBatchSlice]]](list)
    for end in ends:
        there = (end.source_stage, end.source_slice)
        back = (end.target_stage, end.target_slice)
        for gradient, (source, given), (target, taken) in (
            (False, there, back),
            (True, back, there),
        ):
            if end.gradient or not gradient:
                needs[target, gradient].add((taken, source, given))
                if end.source_rank != end.target_rank:
                    leaving[source, gradient].append((end, given))
    done: set[tuple[int, bool, int]] = set()

    def can_run(task: Task) -> bool:
        if any(not rest[rank] or rest[rank][0] != task for rank in ranks[task.stage]):
            return False
        backward = task.phase is not Phase.FORWARD
        number = task.micro_batch
        return task.phase is Phase.WEIGHT_GRADIENT or all(
            (source, backward, given.micro_batch(taken.message(number))) in done
            for taken, source, given in needs[task.stage, backward]
            if taken.has(number)
        )

    def start(task: Task) -> int:
        return max(clocks[rank] for rank in ranks[task.stage])

    while ready := [task for task in {tasks[0] for tasks in rest if tasks} if can_run(task)]:
        task = min(ready, key=lambda task: (start(task), task.stage, task.micro_batch))
        ends_at = start(task) + _UNITS[task.phase]
        for rank in ranks[task.stage]:
            rest[rank].popleft()
            clocks[rank] = ends_at
            orders[rank].append(task)
        if task.phase is Phase.WEIGHT_GRADIENT:
            continue
        backward = task.phase is not Phase.FORWARD
        done.add((task.stage, backward, task.micro_batch))
        for end, given in leaving[task.stage, backward]:
            if given.has(task.micro_batch):
                message = Message(end, backward, given.message(task.micro_batch))
                for rank in message.ranks:
                    orders[rank].append(message)
    return orders


def _is_forward(event: Event) -> bool:
    return not event.gradient if isinstance(event, Message) else event.phase is Phase.FORWARD


class BlockingStage(Stage):
    """A stage whose messages are `GlobalOrder`'s to exchange, before its tasks."""

    def __init__(self, order: GlobalOrder, *wiring: Any) -> None:
        super().__init__(*wiring)
        self._order = order

    def _remote(self, *_: Any, **__: Any) -> list[Any]:
        return []  # Nothing is received or sent where a step says so.

    def forward(self, micro_batch: int) -> None:
        if self._order.reach(Task(self.number, Phase.FORWARD, micro_batch)):
            super().forward(micro_batch)

    def backward(self, micro_batch: int) -> None:
        if self._rank.training and self._order.reach(
            Task(self.number, Phase.BACKWARD, micro_batch)
        ):
            super().backward(micro_batch)

    def backward_input(self, micro_batch: int) -> None:
        if self._rank.training and self._order.reach(
            Task(self.number, Phase.INPUT_GRADIENT, micro_batch)
        ):
            super().backward_input(micro_batch)

    def backward_weight(self, micro_batch: int) -> None:
        if self._rank.training and self._order.reach(
            Task(self.number, Phase.WEIGHT_GRADIENT, micro_batch)
        ):
            super().backward_weight(micro_batch)


class GlobalOrder:
    """This rank's tasks and messages in the one order of all ranks, for one step after the
    other.
    """

    def __init__(self, rank: RankContext) -> None:
        self._rank = rank
        self._tasks: list[Task] = []
        self._order: list[Event] | None = None
        self._rest: deque[Event] = deque()

    def note(self, step: Callable[[], None]) -> list[Event]:
        """The order; before the first step walk through it noting its tasks, and agree with the
        other ranks.
        """
        if self._order is None:
            step()
            self._order = self._agree()
        return self._order

    def begin(self, step: Callable[[], None]) -> None:
        """Begin a batch of a step."""
        order = self.note(step)
        self._rest.extend(order if self._rank.training else filter(_is_forward, order))

    def reach(self, task: Task | None) -> bool:
        """Exchange what comes before a task, or at a step's end (None) behind its last; False if it
        is only noted.
        """
        if self._order is None:
            assert task is not None, "a step that is noted has no end"
            self._tasks.append(task)
            return False
        while self._rest and (event := self._rest.popleft()) != task:
            assert isinstance(event, Message), f"{event} is left out"
            end = event.end
            rank = self._rank
            leaves = rank.number == end.source_rank
            stage = rank.stages[end.source_stage if leaves else end.target_stage]
            ports: Sequence[Send | Recv] = stage.sends if leaves else stage.receives
            port = next(each for each in ports if each.channel == end.channel)
            act = stage.start_send if event.ranks[0] == rank.number else stage.post_recv
            with rank.heartbeat.waiting(port.rank, port.channel):
                act(port, MicroBatchSlice(*port.slice).micro_batch(event.number)).wait()
        return True

    def _agree(self) -> list[Event]:
        """Tell the others this rank's tasks and channels, and order those of all."""
        number = self._rank.number
        stages = self._rank.stages.values()
        train = self._rank.train
        own = {
            "tasks": [str(task) for task in self._tasks],
            "ends": [
                (
                    port.channel,
                    stage.number,
                    number,
                    port.stage,
                    port.rank,
                    port.gradient and train,
                    port.slice,
                )
                for stage in stages
                for port in stage.sends
            ],
            "arriving": [(port.channel, port.slice) for stage in stages for port in stage.receives],
        }
        every = self._rank.transport.make_control_group().run_collectively("order", lambda: own)
        arriving = {
            channel: MicroBatchSlice(*numbers)
            for each in every
            for channel, numbers in each["arriving"]
        }
        ends = [
            ChannelEnd(*(*end, MicroBatchSlice(*leaving), arriving[end[0]]))
            for *end, leaving in sorted(end for each in every for end in each["ends"])
        ]
        return global_event_order(
            [[Task.parse(task) for task in each["tasks"]] for each in every], ends
        )[number]


class BlockingExecution(Execution):
    """Runs stages with blocking send and receive in the order of a `GlobalOrder`."""

    def __init__(self) -> None:
        self._order: GlobalOrder | None = None

    def _order_of(self, rank: RankContext) -> GlobalOrder:
        if self._order is None:
            self._order = GlobalOrder(rank)
        return self._order

    def make_stage(
        self, rank: RankContext, number: int, module: ModuleType, ports: tuple[Port, ...]
    ) -> Stage:
        order = self._order_of(rank)
        return BlockingStage(order, rank, number, module, stage_arguments(rank), ports)

    def before_step(self, rank: RankContext, step: Callable[[], None]) -> None:
        self._order_of(rank).note(step)

    def run_batch(self, rank: RankContext, step: Callable[[], None]) -> None:
        order = self._order_of(rank)
        order.begin(step)
        step()
        order.reach(None)
