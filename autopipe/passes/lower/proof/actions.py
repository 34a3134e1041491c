"""What a rank's instructions do, as far as others notice: post receives, send, and run tasks that wait for both."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopipe.ir.errors import CodegenError
from autopipe.passes.lower.proof.lanes import Door, Lane, Wait


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What tasks of one kind have done on a rank: a stage's forwards, or either half of its backwards."""

    name: str
    """Stage and phase, such as `2F`."""
    done: set[int] = field(default_factory=set)
    """Micro-batches."""


@dataclass(frozen=True, slots=True, eq=False)
class Asking:
    """Posts receives."""

    lanes: tuple[Lane, ...]

    def run(self, micro_batch: int, rank: int, awake: list[int]) -> None:
        """Raises CodegenError where one is posted out of turn."""
        for lane in self.lanes:
            lane.ask(micro_batch)

    def meets(self, what: Lane | Door) -> bool:
        """Whether it gives others what they wait for."""
        return False


@dataclass(frozen=True, slots=True, eq=False)
class Sending:
    """Sends what a task has computed."""

    lanes: tuple[Lane, ...]
    after: Part

    def run(self, micro_batch: int, rank: int, awake: list[int]) -> None:
        """Wake those who wait for it. Raises CodegenError where it is not there yet, or sent out of turn."""
        if micro_batch not in self.after.done:
            task = f"{self.after.name}{micro_batch}"
            raise CodegenError(f"the results of {task} are sent before it has run", where=f"rank {rank}")
        for lane in self.lanes:
            lane.send(micro_batch)
            if lane.sleeper is not None:
                awake.append(lane.sleeper)
                lane.sleeper = None

    def meets(self, what: Lane | Door) -> bool:
        """Whether it gives others what they wait for."""
        return what in self.lanes


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """Runs a task, when all is there that it needs."""

    name: str
    before: tuple[Part, ...]
    """What must have run on this rank: what it hands over is used at once."""
    lanes: tuple[Lane, ...]
    door: Door | None
    does: tuple[Part, ...]

    def run(self, micro_batch: int, rank: int, awake: list[int]) -> Wait | None:
        """What it waits for, if anything. Raises CodegenError where that was never asked for."""
        for part in self.before:
            if micro_batch not in part.done:
                self._refuse(micro_batch, rank, f"runs before {part.name}{micro_batch}, whose results it uses")
        for lane in self.lanes:
            if micro_batch not in lane.expected:
                sent = f"what {lane.task(micro_batch)} of rank {lane.source} sends"
                self._refuse(micro_batch, rank, f"uses {sent}, which is not asked for before")
            if micro_batch not in lane.arrived:
                lane.sleeper = rank
                return Wait(f"{self.name}{micro_batch}", micro_batch, lane)
        if self.door is not None:
            if not self.door.enter(rank, micro_batch):
                return Wait(f"{self.name}{micro_batch}", micro_batch, self.door)
            awake += self.door.ranks
        for part in self.does:
            if micro_batch in part.done:
                self._refuse(micro_batch, rank, "runs twice")
            part.done.add(micro_batch)
        for lane in self.lanes:
            lane.used += 1
        return None

    def meets(self, what: Lane | Door) -> bool:
        """Whether it gives others what they wait for."""
        return what is self.door

    def _refuse(self, micro_batch: int, rank: int, reason: str) -> None:
        raise CodegenError(f"{self.name}{micro_batch} {reason}", where=f"rank {rank}")


Action = Asking | Sending | Running
