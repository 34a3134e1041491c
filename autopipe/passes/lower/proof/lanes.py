"""Synchronisation between ranks: messages in order, and barriers of groups."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopipe.ir.errors import CodegenError
from autopipe.ir.schedule import MicroBatchSlice


@dataclass(slots=True, eq=False)
class ProofChannel:
    """The messages of one channel in one direction, by number. They arrive in the order in which they are sent."""

    channel: int
    source: int
    """Rank that sends."""
    target: int
    """Rank that asks."""
    sender: str
    """Task whose result is sent: its stage and phase, such as `2F`."""
    sends: MicroBatchSlice
    """The sender's micro-batches that a message is made of."""
    asks: MicroBatchSlice
    """The receiver's micro-batches that use one."""
    sent: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    arrived: set[int] = field(default_factory=set)
    expected: set[int] = field(default_factory=set)
    used: int = 0
    sleeper: int | None = None
    """The rank that sleeps until something is sent."""

    def send(self, message: int) -> None:
        """Put a message on its way. Raises CodegenError where the other end asks for another one."""
        self.sent.append(message)
        self.arrived.add(message)
        self._check(len(self.sent) - 1)

    def ask(self, message: int) -> None:
        """Post a receive. Raises CodegenError where the other end sends another message."""
        self.asked.append(message)
        self.expected.add(message)
        self._check(len(self.asked) - 1)

    def _check(self, place: int) -> None:
        if place < min(len(self.sent), len(self.asked)) and self.sent[place] != self.asked[place]:
            raise CodegenError(
                f"message {place} of channel {self.channel} is {self.task(self.sent[place])} of rank {self.source}, "
                f"but rank {self.target} asks for {self.task(self.asked[place])}",
                hint="messages of a channel arrive in the order in which they are sent",
            )

    def task(self, message: int) -> str:
        """The task whose result a message is."""
        return f"{self.sender}{self.sends.micro_batch(message)}"


@dataclass(slots=True, eq=False)
class Barrier:
    """A task that the ranks of a group run together, because they exchange parts of tensors while it runs."""

    ranks: tuple[int, ...]
    there: dict[int, set[int]] = field(default_factory=dict)
    """By micro-batch, the ranks that have come to it."""

    def enter(self, rank: int, micro_batch: int) -> bool:
        """Come to the task; whether all the others are there."""
        came = self.there.setdefault(micro_batch, set())
        came.add(rank)
        return len(came) == len(self.ranks)

    def missing(self, micro_batch: int) -> int:
        """A rank that is waited for."""
        return next(rank for rank in self.ranks if rank not in self.there[micro_batch])


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a rank does not go on in `task`: a lane lacks a message, a door a rank; `number` is the message's, or the
    micro-batch's.
    """

    task: str
    number: int
    what: ProofChannel | Barrier

    @property
    def rank(self) -> int:
        """The rank that is waited for."""
        return self.what.source if isinstance(self.what, ProofChannel) else self.what.missing(self.number)
