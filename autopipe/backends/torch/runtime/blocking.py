"""Stages that wait for every message right where they come to it: what overlapping messages with tasks is measured by.

A generated step sends and posts receives where that overlaps best; waiting at those places would deadlock. So these
stages take no notice of them, and exchange messages between tasks, in one order of all tasks and messages that is the
same for all ranks: a topological order of tasks in which a message, one item for both ends, stands right behind the
task whose result it is (Lin et al., "Tessel" (HPCA 2024), section V).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopipe.backends.torch.runtime.stage import RankContext, Receive, Send, Stage
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
    source_turn: MicroBatchSlice = EVERY
    target_turn: MicroBatchSlice = EVERY


@dataclass(frozen=True, slots=True)
class Message:
    """One message on a channel, forwards or, as gradient, back; `number` counts those of its direction in a step."""

    end: ChannelEnd
    gradient: bool
    number: int

    @property
    def ranks(self) -> tuple[int, int]:
        ends = self.end.source_rank, self.end.target_rank
        return (ends[1], ends[0]) if self.gradient else ends


Event = Task | Message


def global_event_order(lists: Sequence[Sequence[Task]], ends: Sequence[ChannelEnd]) -> list[list[Event]]:
    """For each rank its tasks and messages in the one order. `lists` are the ranks' tasks; a group's run together.

    What can start first comes first, so that the order is near to that in which things happen.
    """
    merge = _EventMerge(lists, ends)
    while (task := merge.next_task()) is not None:
        merge.run(task)
    return merge.orders


class _EventMerge:
    """How far every rank has come in the order."""

    def __init__(self, lists: Sequence[Sequence[Task]], ends: Sequence[ChannelEnd]) -> None:
        self.orders: list[list[Event]] = [[] for _ in lists]
        self._rest = [deque(tasks) for tasks in lists]
        self._clocks = [0] * len(lists)
        self._done: set[Task] = set()
        self._ends = ends
        self._ranks: dict[int, list[int]] = {}
        for rank, tasks in enumerate(lists):
            for stage in {task.stage for task in tasks}:
                self._ranks.setdefault(stage, []).append(rank)
        self._sources: dict[tuple[int, bool], set[tuple[MicroBatchSlice, int, MicroBatchSlice]]] = {}
        """By stage, and whether of gradients, the stages whose messages it needs, between its slice and theirs."""
        for end in ends:
            forward = end.target_turn, end.source_stage, end.source_turn
            self._sources.setdefault((end.target_stage, False), set()).add(forward)
            if end.gradient:
                backward = end.source_turn, end.target_stage, end.target_turn
                self._sources.setdefault((end.source_stage, True), set()).add(backward)

    def next_task(self) -> Task | None:
        """That which can start first; None at the end."""
        heads = {rest[0] for rest in self._rest if rest}
        ready = [task for task in heads if self._can_run(task)]
        return min(ready, key=lambda task: (self._start(task), task.stage, task.micro_batch), default=None)

    def _can_run(self, task: Task) -> bool:
        if any(not self._rest[rank] or self._rest[rank][0] != task for rank in self._ranks[task.stage]):
            return False
        if task.phase is Phase.WEIGHT_GRADIENT:
            return True
        backward = task.phase is not Phase.FORWARD
        phases = (Phase.BACKWARD, Phase.INPUT_GRADIENT) if backward else (Phase.FORWARD,)
        return all(
            any(Task(stage, phase, other.micro_batch(own.message(task.micro_batch))) in self._done for phase in phases)
            for own, stage, other in self._sources.get((task.stage, backward), ())
            if own.has(task.micro_batch)
        )

    def _start(self, task: Task) -> int:
        return max(self._clocks[rank] for rank in self._ranks[task.stage])

    def run(self, task: Task) -> None:
        """Put the task, and behind it the messages that carry its results, in the order."""
        end = self._start(task) + _UNITS[task.phase]
        for rank in self._ranks[task.stage]:
            self._rest[rank].popleft()
            self._clocks[rank] = end
            self.orders[rank].append(task)
        self._done.add(task)
        for message in self._messages(task):
            for rank in message.ranks:
                self.orders[rank].append(message)

    def _messages(self, task: Task) -> Iterator[Message]:
        if task.phase is Phase.WEIGHT_GRADIENT:
            return
        backward = task.phase is not Phase.FORWARD
        for end in self._ends:
            leaves = end.gradient and end.target_stage == task.stage if backward else end.source_stage == task.stage
            turn = end.target_turn if backward else end.source_turn
            if leaves and turn.has(task.micro_batch) and end.source_rank != end.target_rank:
                yield Message(end, backward, turn.message(task.micro_batch))


class BlockingStage(Stage):
    """A stage whose messages are `GlobalOrder`'s to exchange, before its tasks."""

    def receive(self, micro_batch: int, source: int | None = None) -> None: ...
    def send(self, micro_batch: int) -> None: ...
    def receive_gradient(self, micro_batch: int, source: int | None = None) -> None: ...
    def send_gradient(self, micro_batch: int) -> None: ...

    def forward(self, micro_batch: int) -> None:
        if self._comes_to(Phase.FORWARD, micro_batch):
            super().forward(micro_batch)

    def backward(self, micro_batch: int) -> None:
        if self._comes_to(Phase.BACKWARD, micro_batch):
            super().backward(micro_batch)

    def input_gradient(self, micro_batch: int) -> None:
        if self._comes_to(Phase.INPUT_GRADIENT, micro_batch):
            super().input_gradient(micro_batch)

    def weight_gradient(self, micro_batch: int) -> None:
        if self._comes_to(Phase.WEIGHT_GRADIENT, micro_batch):
            super().weight_gradient(micro_batch)

    def _comes_to(self, phase: Phase, micro_batch: int) -> bool:
        return self._rank.comes_to(Task(self.number, phase, micro_batch))


class GlobalOrder:
    """This rank's tasks and messages in the one order of all ranks, for one step after the other."""

    def __init__(self, rank: RankContext) -> None:
        self._rank = rank
        self._tasks: list[Task] = []
        self._order: list[Event] | None = None
        self._rest: deque[Event] = deque()

    def begin(self, step: Callable[[], None]) -> None:
        """Begin a step; before the first, walk through it noting its tasks, and agree with the other ranks."""
        if self._order is None:
            step()
            self._order = self._agree()
        self._rest.extend(self._order)

    def end(self) -> None:
        """Exchange what comes behind the step's last task."""
        self._exchange_until(None)

    def come_to(self, task: Task) -> bool:
        """Exchange what comes before a task, and say whether to run it now."""
        if self._order is None:
            self._tasks.append(task)
            return False
        self._exchange_until(task)
        return True

    def _exchange_until(self, task: Task | None) -> None:
        while self._rest:
            event = self._rest.popleft()
            if event == task:
                return
            assert isinstance(event, Message), f"{event} is left out"
            self._exchange(event)

    def _exchange(self, message: Message) -> None:
        end, number = message.end, self._rank.number
        if number == end.source_rank:
            stage = self._rank.stages[end.source_stage]
            port: Send | Receive = next(each for each in stage.sends if each.channel == end.channel)
        else:
            stage = self._rank.stages[end.target_stage]
            port = next(each for each in stage.receives if each.channel == end.channel)
        act = stage.start_send if message.ranks[0] == number else stage.post_recv
        with self._rank.heartbeat.waiting():
            act(port, MicroBatchSlice(*port.slice).micro_batch(message.number)).wait()

    def _agree(self) -> list[Event]:
        """Tell the others this rank's tasks and channels, and order those of all."""
        number, stages, train = self._rank.number, self._rank.stages.values(), self._rank.train
        own = {
            "tasks": [str(task) for task in self._tasks],
            "ends": [
                (port.channel, stage.number, number, port.stage, port.rank, port.gradient and train, port.slice)
                for stage in stages
                for port in stage.sends
            ],
            "arriving": [(port.channel, port.slice) for stage in stages for port in stage.receives],
        }
        every = [json.loads(data) for data in self._rank.control_group.gather(json.dumps(own).encode())]
        arriving = {channel: MicroBatchSlice(*numbers) for each in every for channel, numbers in each["arriving"]}
        ends = [
            replace(ChannelEnd(*end), source_turn=MicroBatchSlice(*leaving), target_turn=arriving[end[0]])
            for *end, leaving in sorted(end for each in every for end in each["ends"])
        ]
        return global_event_order([[Task.parse(task) for task in each["tasks"]] for each in every], ends)[number]
