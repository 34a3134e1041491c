"""All ranks' instructions run against each other, computing nothing, to show that every rank comes
to its end.

Sends never wait, a rank receives in the order in which another one sends to it, tasks wait for
their messages and for their group: as no choice is left, one run stands for all. What orders
instructions has no part in it, so that a fault there is found here.

A validation runs a step's forwards and their messages alone, in the same order. As a forward waits
for forwards only, who waits for whom is then a part of what is shown here to have no circle, and
the messages from one rank to another are the same at both ends with the same ones left out.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from autopipe.ir.errors import CodegenError
from autopipe.ir.program import Loop, MessageBlock, Program, RankCode, Verb
from autopipe.ir.schedule import EVERY, MicroBatchSlice


@dataclass(slots=True, eq=False)
class Communicator:
    """All that a rank sends another one, which NCCL matches with what that one receives by order
    alone.
    """

    sent: list[tuple[ProofChannel, int]] = field(default_factory=list)
    posted: list[tuple[ProofChannel, int]] = field(default_factory=list)

    def check_order(self) -> None:
        """Raise CodegenError where the last place at which both ends are known has another message
        at either.
        """
        last = min(len(self.sent), len(self.posted)) - 1
        if last >= 0 and self.sent[last] != self.posted[last]:
            (sends, sent) = self.sent[last]
            (asks, asked) = self.posted[last]
            raise CodegenError(
                f"rank {sends.source} sends {sends.task(sent)} on channel {sends.channel} to "
                f"rank {sends.target} where "
                f"that asks for {asks.task(asked)} on channel {asks.channel}",
                hint="NCCL matches the messages from one rank to another by their order",
            )


@dataclass(slots=True, eq=False)
class ProofChannel:
    """The messages of one channel in one direction, by number."""

    communicator: Communicator
    channel: int
    source: int
    target: int
    sender: str
    """Task whose result is sent: its stage and phase, such as `2F`."""
    sends: MicroBatchSlice
    """The sender's micro-batches that a message is made of."""
    uses: MicroBatchSlice
    """The receiver's micro-batches that use one."""
    sent: list[int] = field(default_factory=list)
    posted: list[int] = field(default_factory=list)
    place: dict[int, int] = field(default_factory=dict)
    """Where among the receives that of a message was posted first."""
    used: int = 0
    sleeper: int | None = None
    """The rank that sleeps until something is sent."""

    def send(self, message: int) -> None:
        self.sent.append(message)
        self._check_order()
        self.communicator.sent.append((self, message))
        self.communicator.check_order()

    def post(self, message: int) -> None:
        self.place.setdefault(message, len(self.posted))
        self.posted.append(message)
        self._check_order()
        self.communicator.posted.append((self, message))
        self.communicator.check_order()

    def _check_order(self) -> None:
        """Raise CodegenError where the last message of which both ends are known is one here,
        another one there.
        """
        last = min(len(self.sent), len(self.posted)) - 1
        if last >= 0 and self.sent[last] != self.posted[last]:
            raise CodegenError(
                f"message {last} of channel {self.channel} is {self.task(self.sent[last])} of "
                f"rank {self.source}, "
                f"but rank {self.target} asks for {self.task(self.posted[last])}",
                hint="messages of a channel arrive in the order in which they are sent",
            )

    def task(self, message: int) -> str:
        return f"{self.sender}{self.sends.micro_batch(message)}"


@dataclass(slots=True, eq=False)
class Barrier:
    """A task that the ranks of a group run together, because they exchange parts of tensors while
    it runs.
    """

    ranks: tuple[int, ...]
    there: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By micro-batch, the ranks that have come to it."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a rank does not go on in `task`: a message of a channel, or a rank of a barrier, is not
    there yet.
    """

    task: str
    number: int
    """Of the message; at a barrier the micro-batch."""
    what: ProofChannel | Barrier

    @property
    def rank(self) -> int:
        if isinstance(self.what, ProofChannel):
            return self.what.source
        return next(rank for rank in self.what.ranks if rank not in self.what.there[self.number])


_Each = TypeVar("_Each")
ByTurn = tuple[tuple[_Each, ...], ...]
"""Items by micro-batch: the one at its index modulo the length."""


def by_turn(found: Iterable[tuple[MicroBatchSlice, _Each]]) -> ByTurn[_Each]:
    """Items for each micro-batch, from items that concern every micro-batch of a slice."""
    each = tuple(found)
    period = math.lcm(*(turn.of for turn, _ in each))
    return tuple(tuple(one for turn, one in each if turn.has(index)) for index in range(period))


Handover = tuple[str, MicroBatchSlice, MicroBatchSlice]
"""A task of the same rank, such as `2F`, whose result is used; its micro-batches, and those that
use them.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Action:
    """A rank's action on any micro-batch: it posts receives, runs a task when all is there, or
    sends a result.
    """

    name: str = ""
    """The task that runs, or whose result is sent, such as `2F`."""
    posts: ByTurn[ProofChannel] = ((),)
    after: ByTurn[Handover] = ((),)
    uses: ByTurn[ProofChannel] = ((),)
    barrier: Barrier | None = None
    completes: tuple[str, ...] = ()
    """Parts of a stage's step that are done then: its forward (F), either half of its backward (B,
    W).
    """
    sends: ByTurn[ProofChannel] | None = None

    def run(
        self, micro_batch: int, done: Mapping[str, set[int]], rank: int, awake: list[int]
    ) -> Wait | None:
        """Run, waking those who wait for it; or return what it waits for.

        `done` are the micro-batches of each part that the rank has run. Raises CodegenError where
        it can never run.
        """
        for channel in self.posts[micro_batch % len(self.posts)]:
            channel.post(channel.uses.message(micro_batch))
        for part, gives, takes in self.after[micro_batch % len(self.after)]:
            if (giver := gives.micro_batch(takes.message(micro_batch))) not in done[part]:
                self._refuse(micro_batch, rank, f"runs before {part}{giver}, whose results it uses")
        channels = self.uses[micro_batch % len(self.uses)]
        for channel in channels:
            message = channel.uses.message(micro_batch)
            if message not in channel.place:
                sent = f"what {channel.task(message)} of rank {channel.source} sends"
                self._refuse(micro_batch, rank, f"uses {sent}, which is not asked for before")
            if channel.place[message] >= len(channel.sent):
                channel.sleeper = rank
                return Wait(f"{self.name}{micro_batch}", message, channel)
        if self.barrier is not None:
            self.barrier.there[micro_batch].add(rank)
            if len(self.barrier.there[micro_batch]) < len(self.barrier.ranks):
                return Wait(f"{self.name}{micro_batch}", micro_batch, self.barrier)
            awake += self.barrier.ranks
        for part in self.completes:
            if micro_batch in done[part]:
                self._refuse(micro_batch, rank, "runs twice")
            done[part].add(micro_batch)
        for channel in channels:
            channel.used += 1
        if self.sends is not None:
            if micro_batch not in done[self.name]:
                raise CodegenError(
                    f"the results of {self.name}{micro_batch} are sent before it has run",
                    where=f"rank {rank}",
                )
            for channel in self.sends[micro_batch % len(self.sends)]:
                channel.send(channel.sends.message(micro_batch))
                if channel.sleeper is not None:
                    awake.append(channel.sleeper)
                    channel.sleeper = None
        return None

    def gives(self, wait: Wait, micro_batch: int) -> bool:
        """True if it gives another rank what that waits for."""
        if isinstance(wait.what, Barrier):
            return wait.what is self.barrier and wait.number == micro_batch
        sends = self.sends or ((),)
        return (
            wait.what in sends[micro_batch % len(sends)]
            and wait.what.sends.message(micro_batch) == wait.number
        )

    def _refuse(self, micro_batch: int, rank: int, reason: str) -> None:
        raise CodegenError(f"{self.name}{micro_batch} {reason}", where=f"rank {rank}")


_LETTERS = {
    Verb.FORWARD: "F",
    Verb.BACKWARD: "B",
    Verb.INPUT_GRADIENT: "I",
    Verb.WEIGHT_GRADIENT: "W",
}


@dataclass(frozen=True, slots=True)
class Shared:
    """The ends at which all ranks meet."""

    channels: dict[tuple[int, bool], ProofChannel] = field(default_factory=dict)
    """By number, and whether they carry gradients."""
    communicators: dict[tuple[int, int], Communicator] = field(default_factory=dict)
    """By the rank that sends and the one that receives."""
    barriers: dict[tuple[int, Verb], Barrier] = field(default_factory=dict)


class RankTrace:
    """One rank: its actions in order, each with its micro-batch, and how far it has come."""

    def __init__(self, rank: RankCode, program: Program, shared: Shared) -> None:
        self.rank = rank.rank
        self.done: defaultdict[str, set[int]] = defaultdict(set)
        """By part of a stage's step, such as `2F`, the micro-batches that it has run on."""
        self.position = 0
        self._program = program
        self._shared = shared
        self._wired = {each.stage: each for each in rank.stages}
        self._action = functools.cache(self._made)
        self.steps = list(self._unrolled(rank))

    def run(self, awake: list[int]) -> Wait | None:
        """Run as far as it comes, waking ranks; return what it waits for then, None at its end."""
        while self.position < len(self.steps):
            action, micro_batch = self.steps[self.position]
            wait = action.run(micro_batch, self.done, self.rank, awake)
            if wait is not None:
                return wait
            self.position += 1
        return None

    def _unrolled(self, rank: RankCode) -> Iterator[tuple[Action, int]]:
        for item in (*rank.warm_up, *rank.repetend, *rank.cool_down):
            loop = item if isinstance(item, Loop) else Loop((item,), 1)
            strides = loop.strides or (loop.stride,) * len(loop.body)
            actions = [
                self._action(each.verb, each.stage, each.source, each.part) for each in loop.body
            ]
            for turn in range(loop.count):
                for action, each, stride in zip(actions, loop.body, strides, strict=True):
                    yield action, each.micro_batch + turn * stride

    def _made(self, verb: Verb, stage: int, source: int | None, part: int | None) -> Action:
        receives = self._wired[stage].receives
        sends = self._wired[stage].sends
        forward = f"{stage}F"
        backward = f"{stage}B"
        weights = f"{stage}W"
        match verb:
            case Verb.RECEIVE:
                return Action(posts=self._between(receives, False, source, part))
            case Verb.RECEIVE_GRADIENT:
                return Action(posts=self._between(sends, True, source, part))
            case Verb.SEND:
                return Action(forward, sends=self._between(sends, False))
            case Verb.SEND_GRADIENT:
                return Action(backward, sends=self._between(receives, True))
            case Verb.FORWARD:
                before = (
                    (
                        piece.target_slice,
                        (f"{piece.source_stage}F", piece.source_slice, piece.target_slice),
                    )
                    for piece in receives
                    if piece.source_rank == self.rank
                )
                return Action(
                    forward,
                    after=by_turn(before),
                    uses=self._between(receives, False),
                    barrier=self._barrier(stage, verb),
                    completes=(forward,),
                )
            case (
                Verb.WEIGHT_GRADIENT
            ):  # Sums over ranks are made at the step's end: it joins no group.
                return Action(weights, after=(((backward, EVERY, EVERY),),), completes=(weights,))
            case _:
                given = [(EVERY, (forward, EVERY, EVERY))]
                given += (
                    (
                        piece.source_slice,
                        (f"{piece.target_stage}B", piece.target_slice, piece.source_slice),
                    )
                    for piece in sends
                    if piece.needs_gradient and piece.target_rank == self.rank
                )
                return Action(
                    f"{stage}{_LETTERS[verb]}",
                    after=by_turn(given),
                    uses=self._between(sends, True),
                    barrier=self._barrier(stage, verb),
                    completes=(backward, weights) if verb is Verb.BACKWARD else (backward,),
                )

    def _between(
        self,
        pieces: tuple[MessageBlock, ...],
        gradient: bool,
        source: int | None = None,
        part: int | None = None,
    ) -> ByTurn[ProofChannel]:
        """The channels, between different ranks, of pieces or of their gradients, by this rank's
        micro-batches.

        With `source` those alone whose other end is that stage, with `part` a slice of that index.
        """
        return by_turn(
            (
                piece.source_slice if piece.source_rank == self.rank else piece.target_slice,
                self._channel(piece, gradient),
            )
            for piece in pieces
            if piece.source_rank != piece.target_rank
            and (piece.needs_gradient or not gradient)
            and source in (None, piece.target_stage if gradient else piece.source_stage)
            and part in (None, piece.target_slice.index if gradient else piece.source_slice.index)
        )

    def _channel(self, piece: MessageBlock, gradient: bool) -> ProofChannel:
        key = piece.channel, gradient
        shared = self._shared
        if key not in shared.channels:
            ends = [
                (piece.source_rank, piece.source_stage, piece.source_slice),
                (piece.target_rank, piece.target_stage, piece.target_slice),
            ]
            (source, stage, sends), (target, _, uses) = ends[::-1] if gradient else ends
            task = f"{stage}{'B' if gradient else 'F'}"
            communicator = shared.communicators.setdefault((source, target), Communicator())
            shared.channels[key] = ProofChannel(
                communicator, piece.channel, source, target, task, sends, uses
            )
        return shared.channels[key]

    def _barrier(self, stage: int, verb: Verb) -> Barrier | None:
        ranks = self._program.stages[stage].devices
        return (
            self._shared.barriers.setdefault((stage, verb), Barrier(ranks))
            if len(ranks) > 1
            else None
        )


def prove(program: Program) -> tuple[RankTrace, ...]:
    """Every rank's trace. Raises CodegenError, naming the tasks, unless every rank's program runs
    to its end.

    It does if no ranks wait for one another in a circle, nothing is used before it was asked for or
    computed, messages are asked for in the order in which they are sent, each is sent and asked for
    once, each task runs once, and groups come to their exchanges in one order. Time and memory grow
    with the number of instructions.
    """
    shared = Shared()
    traces = tuple(RankTrace(rank, program, shared) for rank in program.ranks)
    waits: dict[int, Wait] = {}
    awake = [trace.rank for trace in reversed(traces)]
    while awake:
        rank = awake.pop()
        waits.pop(rank, None)
        wait = traces[rank].run(awake)
        if wait is not None:
            waits[rank] = wait
    _check_waits(waits, traces)
    for trace, code in zip(traces, program.ranks, strict=True):
        for wired in code.stages:
            due = program.micro_batches_of(wired.stage)
            for letter in "FBW" if program.train else "F":
                for micro_batch in sorted(
                    trace.done[f"{wired.stage}{letter}"].symmetric_difference(due)
                ):
                    reason = "never runs" if micro_batch in due else "does not belong to the step"
                    raise CodegenError(
                        f"{wired.stage}{letter}{micro_batch} {reason}", where=f"rank {code.rank}"
                    )
    for channel in shared.channels.values():
        if len(channel.sent) > len(channel.posted):
            task = channel.task(channel.sent[len(channel.posted)])
            raise CodegenError(
                f"rank {channel.source} sends {task}, which rank {channel.target} never asks for"
            )
        if channel.used < len(channel.posted):
            raise CodegenError(
                f"rank {channel.target} asks for {channel.sender} more often than it uses it"
            )
    _check_reductions(program, traces)
    return traces


def _check_waits(waits: dict[int, Wait], traces: Sequence[RankTrace]) -> None:
    """Raise CodegenError for one who waits for what never comes, or for the circle that waiting
    ends in.
    """

    def told(rank: int) -> str:
        wait = waits[rank]
        what = f"rank {wait.rank} to join in"
        if isinstance(wait.what, ProofChannel):
            what = f"{wait.what.task(wait.number)} of rank {wait.rank}"
        return f"rank {rank} would wait in {wait.task} for {what}"

    for rank, wait in sorted(waits.items()):
        other = traces[wait.rank]
        if not any(
            action.gives(wait, micro_batch) for action, micro_batch in other.steps[other.position :]
        ):
            raise CodegenError(f"{told(rank)}, which never comes")
    if waits:
        rank = min(waits)
        seen = list[int]()
        while rank not in seen:
            seen.append(rank)
            rank = waits[rank].rank
        raise CodegenError(f"deadlock: {', '.join(map(told, seen[seen.index(rank) :]))}")


def _check_reductions(program: Program, traces: Sequence[RankTrace]) -> None:
    """Raise CodegenError where ranks would start the sums of gradients over one group in different
    orders.

    A stage's sums start with its last backward, if all ranks of the group have it.
    """
    orders: dict[tuple[int, ...], tuple[int, list[int]]] = {}
    for rank, trace in zip(program.ranks, traces, strict=True):
        homes: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for shard in rank.shards:
            if shard.home is not None and len(shard.gradient_ranks) > 1:
                homes[shard.gradient_ranks].add(shard.home)
        ends = {
            action.completes[-1]: place
            for place, (action, _) in enumerate(trace.steps)
            if action.completes
        }
        last = [int(part[:-1]) for part in sorted(ends, key=ends.__getitem__) if part.endswith("W")]
        for group, stages in homes.items():
            found = [stage for stage in last if stage in stages]
            first, order = orders.setdefault(group, (trace.rank, found))
            if order != found:
                raise CodegenError(
                    f"rank {first} would add up gradients of stages {order}, rank {trace.rank} "
                    f"of stages {found}, "
                    "in these orders"
                )
