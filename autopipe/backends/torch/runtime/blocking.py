"""Stages that wait for every message right where they come to it: what overlapping messages with tasks is measured by.

A generated step sends and posts receives where that overlaps best; waiting at those places would deadlock. So these
stages take no notice of them, and exchange messages between tasks as the one order of all ranks has it (`turns`).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from autopipe.backends.torch.runtime.stage import Stage
from autopipe.backends.torch.runtime.turns import ChannelEnd, Event, Message, global_event_order
from autopipe.backends.torch.runtime.wiring import Receive, Send
from autopipe.ir.schedule import MicroBatchSlice, Phase, Task

if TYPE_CHECKING:
    from autopipe.backends.torch.runtime.rank import Rank


class BlockingStage(Stage):
    """A stage whose messages are `GlobalOrder`' to exchange."""

    def receive(self, micro_batch: int, source: int | None = None) -> None:
        """Nothing: see `GlobalOrder`."""

    def send(self, micro_batch: int) -> None:
        """Nothing: see `GlobalOrder`."""

    def receive_gradient(self, micro_batch: int, source: int | None = None) -> None:
        """Nothing: see `GlobalOrder`."""

    def send_gradient(self, micro_batch: int) -> None:
        """Nothing: see `GlobalOrder`."""

    def forward(self, micro_batch: int) -> None:
        """Exchange what comes before, and compute."""
        if self._comes_to(Phase.FORWARD, micro_batch):
            super().forward(micro_batch)

    def backward(self, micro_batch: int) -> None:
        """Exchange what comes before, and compute."""
        if self._comes_to(Phase.BACKWARD, micro_batch):
            super().backward(micro_batch)

    def input_gradient(self, micro_batch: int) -> None:
        """Exchange what comes before, and compute."""
        if self._comes_to(Phase.INPUT_GRADIENT, micro_batch):
            super().input_gradient(micro_batch)

    def weight_gradient(self, micro_batch: int) -> None:
        """Exchange what comes before, and compute."""
        if self._comes_to(Phase.WEIGHT_GRADIENT, micro_batch):
            super().weight_gradient(micro_batch)

    def _comes_to(self, phase: Phase, micro_batch: int) -> bool:
        assert self._rank.turns is not None
        return self._rank.turns.come_to(Task(self.number, phase, micro_batch))


class GlobalOrder:
    """This rank's tasks and messages in the one order of all ranks, for one step after the other."""

    def __init__(self, rank: Rank) -> None:
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
            turn = self._rest.popleft()
            if turn == task:
                return
            assert isinstance(turn, Message), f"{turn} is left out"
            self._exchange(turn)

    def _exchange(self, message: Message) -> None:
        """Send or receive, and wait for it."""
        end, number = message.end, self._rank.number
        if number == end.source_rank:
            stage = self._rank.stages[end.source_stage]
            wire: Send | Receive = next(each for each in stage.sends if each.channel == end.channel)
        else:
            stage = self._rank.stages[end.target_stage]
            wire = next(each for each in stage.receives if each.channel == end.channel)
        sends = message.ranks[0] == number
        with self._rank.pulse.waiting():
            (stage.give if sends else stage.ask)(wire, MicroBatchSlice(*wire.slice).micro_batch(message.number)).wait()

    def _agree(self) -> list[Event]:
        """Tell the others this rank's tasks and channels, and order those of all."""
        number, stages, train = self._rank.number, self._rank.stages.values(), self._rank.train
        own = {
            "tasks": [str(task) for task in self._tasks],
            "ends": [
                (wire.channel, stage.number, number, wire.stage, wire.rank, wire.gradient and train)
                for stage in stages
                for wire in stage.sends
            ],
            "leaving": [(wire.channel, wire.slice) for stage in stages for wire in stage.sends],
            "arriving": [(wire.channel, wire.slice) for stage in stages for wire in stage.receives],
        }
        every = [json.loads(data) for data in self._rank.meeting.gather(json.dumps(own).encode())]
        leaving, arriving = (
            {channel: MicroBatchSlice(*turn) for each in every for channel, turn in each[way]}
            for way in ("leaving", "arriving")
        )
        ends = [
            replace(ChannelEnd(*end), source_turn=leaving[end[0]], target_turn=arriving[end[0]])
            for end in sorted(end for each in every for end in each["ends"])
        ]
        return global_event_order([[Task.parse(task) for task in each["tasks"]] for each in every], ends)[number]
