"""Visible actions of a rank's instructions: post receives, send, and run tasks that wait for both."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from autopipe.ir.errors import CodegenError
from autopipe.ir.schedule import MicroBatchSlice
from autopipe.passes.lower.proof.lanes import Barrier, ProofChannel, Wait

_Each = TypeVar("_Each")
ByTurn = tuple[tuple[_Each, ...], ...]
"""Items by micro-batch: the one at its index modulo the length."""


def by_turn(found: Iterable[tuple[MicroBatchSlice, _Each]]) -> ByTurn[_Each]:
    """Items for each micro-batch, from items that concern every micro-batch of a slice."""
    each = tuple(found)
    period = math.lcm(*(turn.of for turn, _ in each))
    return tuple(tuple(one for turn, one in each if turn.has(index)) for index in range(period))


@dataclass(frozen=True, slots=True, eq=False)
class StagePhase:
    """Progress of one kind of task on a rank: a stage's forwards, or either half of its backwards."""

    name: str
    """Stage and phase, such as `2F`."""
    done: set[int] = field(default_factory=set)
    """Micro-batches."""


@dataclass(frozen=True, slots=True, eq=False)
class PostReceives:
    """Posts receives."""

    lanes: ByTurn[ProofChannel]

    def run(self, micro_batch: int, rank: int, awake: list[int]) -> None:
        """Raises CodegenError where one is posted out of turn."""
        for lane in self.lanes[micro_batch % len(self.lanes)]:
            lane.ask(lane.asks.message(micro_batch))

    def meets(self, wait: Wait, micro_batch: int) -> bool:
        """True if it gives another rank what that waits for."""
        return False


@dataclass(frozen=True, slots=True, eq=False)
class SendResults:
    """Sends what a task has computed."""

    lanes: ByTurn[ProofChannel]
    after: StagePhase

    def run(self, micro_batch: int, rank: int, awake: list[int]) -> None:
        """Wake those who wait for it. Raises CodegenError where it is not there yet, or sent out of turn."""
        if micro_batch not in self.after.done:
            task = f"{self.after.name}{micro_batch}"
            raise CodegenError(f"the results of {task} are sent before it has run", where=f"rank {rank}")
        for lane in self.lanes[micro_batch % len(self.lanes)]:
            lane.send(lane.sends.message(micro_batch))
            if lane.sleeper is not None:
                awake.append(lane.sleeper)
                lane.sleeper = None

    def meets(self, wait: Wait, micro_batch: int) -> bool:
        """True if it gives another rank what that waits for."""
        lane = wait.what
        if not isinstance(lane, ProofChannel) or lane not in self.lanes[micro_batch % len(self.lanes)]:
            return False
        return lane.sends.message(micro_batch) == wait.number


@dataclass(frozen=True, slots=True, eq=False)
class LocalHandover:
    """Value that a task gets from another of its own rank: used at once, so `part` must have run on it."""

    part: StagePhase
    gives: MicroBatchSlice
    uses: MicroBatchSlice

    def giver(self, micro_batch: int) -> int:
        """The micro-batch of `part` that a micro-batch of the task uses."""
        return self.gives.micro_batch(self.uses.message(micro_batch))


@dataclass(frozen=True, slots=True, eq=False)
class RunTask:
    """Runs a task, when all is there that it needs."""

    name: str
    before: ByTurn[LocalHandover]
    lanes: ByTurn[ProofChannel]
    door: Barrier | None
    does: tuple[StagePhase, ...]

    def run(self, micro_batch: int, rank: int, awake: list[int]) -> Wait | None:
        """Run, and return what it waits for, if anything. Raises CodegenError where that was never asked for."""
        for handed in self.before[micro_batch % len(self.before)]:
            if (giver := handed.giver(micro_batch)) not in handed.part.done:
                self._refuse(micro_batch, rank, f"runs before {handed.part.name}{giver}, whose results it uses")
        lanes = self.lanes[micro_batch % len(self.lanes)]
        for lane in lanes:
            message = lane.asks.message(micro_batch)
            if message not in lane.expected:
                sent = f"what {lane.task(message)} of rank {lane.source} sends"
                self._refuse(micro_batch, rank, f"uses {sent}, which is not asked for before")
            if message not in lane.arrived:
                lane.sleeper = rank
                return Wait(f"{self.name}{micro_batch}", message, lane)
        if self.door is not None:
            if not self.door.enter(rank, micro_batch):
                return Wait(f"{self.name}{micro_batch}", micro_batch, self.door)
            awake += self.door.ranks
        for part in self.does:
            if micro_batch in part.done:
                self._refuse(micro_batch, rank, "runs twice")
            part.done.add(micro_batch)
        for lane in lanes:
            lane.used += 1
        return None

    def meets(self, wait: Wait, micro_batch: int) -> bool:
        """True if it gives another rank what that waits for."""
        return wait.what is self.door and wait.number == micro_batch

    def _refuse(self, micro_batch: int, rank: int, reason: str) -> None:
        raise CodegenError(f"{self.name}{micro_batch} {reason}", where=f"rank {rank}")


Action = PostReceives | SendResults | RunTask
