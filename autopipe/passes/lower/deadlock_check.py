"""Check that no rank of a program waits forever. It runs the instructions of all ranks without
computing anything.

Objective: prove that each rank reaches the end of its step, whatever the speeds of the ranks.

Model: each rank executes its instructions in order. A send never blocks. A receive is posted
without blocking. A task blocks until the messages that it uses have been sent, and until each rank
of its stage's group has reached the task. Messages from one rank to another arrive in the order in
which they were sent.

One execution is sufficient: in this model, an instruction that can run stays able to run, whatever
other ranks do. All execution orders therefore run the same set of instructions, and either each
order reaches the end or none does. Each instruction runs once, so time and memory are linear in the
number of instructions.

This module shares no code with the modules that order instructions, so that it does not repeat a
fault of those modules.

The proof also covers a validation run, which executes only the forwards of a step and their
messages, in the same order. A forward waits only for forwards. The waits of a validation are
therefore a subset of the waits of a step, and both ends of a channel omit the same messages.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from autopipe.ir.errors import CodegenError
from autopipe.ir.program import Loop, MessageSlice, Opcode, Program, RankCode
from autopipe.ir.schedule import EVERY_MICRO_BATCH, MicroBatchSlice


@dataclass(slots=True, eq=False)
class Communicator:
    """The messages from one rank to another rank, as (channel, number of the message), in the order
    in which they are sent and in the order in which their receives are posted. NCCL matches the
    sends and receives of a pair of ranks by their order alone.
    """

    sent: list[tuple[ProofChannel, int]] = field(default_factory=list)
    posted: list[tuple[ProofChannel, int]] = field(default_factory=list)

    def check_order(self) -> None:
        """Compare `sent` and `posted` at the last index that both lists have.

        Raises CodegenError if the source sends another message at this position than the target
        receives.
        """
        last = min(len(self.sent), len(self.posted)) - 1
        if last >= 0 and self.sent[last] != self.posted[last]:
            (sends, sent) = self.sent[last]
            (receives, received) = self.posted[last]
            raise CodegenError(
                f"rank {sends.source} sends {sends.task(sent)} on channel {sends.channel} to "
                f"rank {sends.target}, which receives {receives.task(received)} on "
                f"channel {receives.channel} at this position",
                hint="NCCL matches the messages between two ranks by their order",
            )


@dataclass(slots=True, eq=False)
class ProofChannel:
    """The messages of one channel of the program in one direction. Each message has a number."""

    communicator: Communicator
    channel: int
    source: int
    target: int
    sender: str
    """Stage and phase of the task whose results are sent, such as `2F`."""
    sends: MicroBatchSlice
    """Micro-batches of the sender that produce the messages."""
    uses: MicroBatchSlice
    """Micro-batches of the receiver that use the messages."""
    sent: list[int] = field(default_factory=list)
    """Numbers of the messages sent so far, in order."""
    posted: list[int] = field(default_factory=list)
    """Numbers of the messages whose receives have been posted so far, in order."""
    first_posted: dict[int, int] = field(default_factory=dict)
    """Position in `posted` of the first receive of each message."""
    used: int = 0
    """Number of times that a task of the receiver has used a message."""
    sleeper: int | None = None
    """Rank that is blocked until the next send on this channel; None if there is none."""

    def send(self, message: int) -> None:
        """Record that the source sends the message with this number. Raises CodegenError if the
        target expects another message at this position.
        """
        self.sent.append(message)
        self._check_order()
        self.communicator.sent.append((self, message))
        self.communicator.check_order()

    def post(self, message: int) -> None:
        """Record that the target posts a receive for the message with this number. Raises
        CodegenError if the source sends another message at this position.
        """
        self.first_posted.setdefault(message, len(self.posted))
        self.posted.append(message)
        self._check_order()
        self.communicator.posted.append((self, message))
        self.communicator.check_order()

    def _check_order(self) -> None:
        """Compare the messages of the two ends of the channel, `sent` and `posted`, at the last
        index that both lists have.

        Raises CodegenError if the two ends have different messages there.
        """
        last = min(len(self.sent), len(self.posted)) - 1
        if last >= 0 and self.sent[last] != self.posted[last]:
            raise CodegenError(
                f"message {last} of channel {self.channel} is {self.task(self.sent[last])} of "
                f"rank {self.source}, "
                f"but rank {self.target} receives {self.task(self.posted[last])}",
                hint="a rank receives the messages of a channel in the order of the sends",
            )

    def task(self, message: int) -> str:
        """Return the name of the task that produces the message with this number, such as `2F0`."""
        return f"{self.sender}{self.sends.micro_batch(message)}"


@dataclass(slots=True, eq=False)
class Barrier:
    """A task that starts on all ranks of a group together, because its collectives need all of
    these ranks.
    """

    ranks: tuple[int, ...]
    arrived: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """For each micro-batch, the ranks that have reached the task."""


@dataclass(frozen=True, slots=True)
class Wait:
    """The reason why a rank is blocked in `task`. `awaited` is the channel of a message that has
    not been sent, or a barrier that another rank has not reached.
    """

    task: str
    number: int
    """Number of the message on the channel, or the micro-batch of the task at the barrier."""
    awaited: ProofChannel | Barrier

    @property
    def rank(self) -> int:
        """A rank that the blocked rank waits for: the sender of the message, or the first rank
        that has not reached the barrier.
        """
        if isinstance(self.awaited, ProofChannel):
            return self.awaited.source
        arrived = self.awaited.arrived[self.number]
        return next(rank for rank in self.awaited.ranks if rank not in arrived)


_Item = TypeVar("_Item")
Periodic = tuple[tuple[_Item, ...], ...]
"""Items of each micro-batch, with a period: micro-batch m has the items of entry `m %
len(periodic)`.
"""


def items_by_micro_batch(items: Iterable[tuple[MicroBatchSlice, _Item]]) -> Periodic[_Item]:
    """Return the items of each micro-batch, given pairs (slice of micro-batches, item).

    A slice selects every n-th micro-batch. The length of the result is the least common multiple of
    all n.
    """
    pairs = tuple(items)
    period = math.lcm(*(micro_batches.of for micro_batches, _ in pairs))
    return tuple(
        tuple(item for micro_batches, item in pairs if micro_batches.has(index))
        for index in range(period)
    )


LocalDependency = tuple[str, MicroBatchSlice, MicroBatchSlice]
"""A dependency on another task of the same rank, as a triple: stage and phase of that task, such as
`2F`; the slice of micro-batches that it runs on; the slice of micro-batches that use its results.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Action:
    """An instruction of a rank, for any micro-batch. It posts receives, runs a task when its inputs
    have arrived, or sends the results of a task.
    """

    name: str = ""
    """Stage and phase of the task that runs or whose results are sent, such as `2F`. "" for an
    instruction that posts receives.
    """
    posts: Periodic[ProofChannel] = ((),)
    """Channels on which the action posts a receive."""
    after: Periodic[LocalDependency] = ((),)
    """Tasks of the same rank that must have run before the action."""
    uses: Periodic[ProofChannel] = ((),)
    """Channels of the messages that the task uses."""
    barrier: Barrier | None = None
    completes: tuple[str, ...] = ()
    """Parts of the stage's step that have run after the action: its forward (F), the half of its
    backward that computes gradients of inputs (B), the half that computes gradients of weights (W).
    For example, `2F`.
    """
    sends: Periodic[ProofChannel] | None = None
    """Channels on which the results of the task `name` are sent; None if the action sends nothing.
    """

    def run(
        self, micro_batch: int, done: Mapping[str, set[int]], rank: int, awake: list[int]
    ) -> Wait | None:
        """Run the action on a micro-batch and return None, or return the reason why it cannot run
        yet.

        `done` contains, by stage and phase such as `2F`, the micro-batches on which the rank `rank`
        has run this part of its step. The action adds the micro-batch to `done`, and appends the
        ranks that may be able to continue now to `awake`. Raises CodegenError if the action can
        never run, or contradicts the instructions of another rank.
        """
        for channel in self.posts[micro_batch % len(self.posts)]:
            channel.post(channel.uses.message(micro_batch))
        for part, produced_by, used_by in self.after[micro_batch % len(self.after)]:
            producer = produced_by.micro_batch(used_by.message(micro_batch))
            if producer not in done[part]:
                reason = f"runs before {part}{producer}, whose results it uses"
                self._reject(micro_batch, rank, reason)
        channels = self.uses[micro_batch % len(self.uses)]
        for channel in channels:
            message = channel.uses.message(micro_batch)
            if message not in channel.first_posted:
                sent = f"the result of {channel.task(message)} of rank {channel.source}"
                self._reject(micro_batch, rank, f"uses {sent}, but no receive is posted before")
            if channel.first_posted[message] >= len(channel.sent):
                channel.sleeper = rank
                return Wait(f"{self.name}{micro_batch}", message, channel)
        if self.barrier is not None:
            self.barrier.arrived[micro_batch].add(rank)
            if len(self.barrier.arrived[micro_batch]) < len(self.barrier.ranks):
                return Wait(f"{self.name}{micro_batch}", micro_batch, self.barrier)
            awake += self.barrier.ranks
        for part in self.completes:
            if micro_batch in done[part]:
                self._reject(micro_batch, rank, "runs twice")
            done[part].add(micro_batch)
        for channel in channels:
            channel.used += 1
        if self.sends is not None:
            if micro_batch not in done[self.name]:
                raise CodegenError(
                    f"the program sends the results of {self.name}{micro_batch} before running "
                    "this task",
                    where=f"rank {rank}",
                )
            for channel in self.sends[micro_batch % len(self.sends)]:
                channel.send(channel.sends.message(micro_batch))
                if channel.sleeper is not None:
                    awake.append(channel.sleeper)
                    channel.sleeper = None
        return None

    def resolves(self, wait: Wait, micro_batch: int) -> bool:
        """True if this action on `micro_batch` sends the message that `wait` is for, or reaches its
        barrier.
        """
        if isinstance(wait.awaited, Barrier):
            return wait.awaited is self.barrier and wait.number == micro_batch
        sends = self.sends or ((),)
        return (
            wait.awaited in sends[micro_batch % len(sends)]
            and wait.awaited.sends.message(micro_batch) == wait.number
        )

    def _reject(self, micro_batch: int, rank: int, reason: str) -> None:
        """Raise CodegenError for the task on this micro-batch. `reason` is the predicate of the
        message.
        """
        raise CodegenError(f"{self.name}{micro_batch} {reason}", where=f"rank {rank}")


_LETTERS = {
    Opcode.FORWARD: "F",
    Opcode.BACKWARD: "B",
    Opcode.BACKWARD_INPUT: "I",
    Opcode.BACKWARD_WEIGHT: "W",
}


@dataclass(frozen=True, slots=True)
class Connections:
    """The channels, communicators and barriers of a program, which connect its ranks."""

    channels: dict[tuple[int, bool], ProofChannel] = field(default_factory=dict)
    """The channels, by (number of the channel, True if it carries gradients)."""
    communicators: dict[tuple[int, int], Communicator] = field(default_factory=dict)
    """The communicators, by (sending rank, receiving rank)."""
    barriers: dict[tuple[int, Opcode], Barrier] = field(default_factory=dict)
    """The barriers, by (stage, opcode of the task)."""


class RankTrace:
    """The execution of the instructions of one rank: pairs (action, micro-batch) in order, and the
    position of the next one.
    """

    def __init__(self, rank: RankCode, program: Program, connections: Connections) -> None:
        self.rank = rank.rank
        self.done: defaultdict[str, set[int]] = defaultdict(set)
        """For each part of a stage's step, such as `2F`, the micro-batches on which the rank has
        run it.
        """
        self.position = 0
        self._program = program
        self._connections = connections
        self._wired = {each.stage: each for each in rank.stages}
        self._action = functools.cache(self._make_action)
        self.steps = list(self._unroll(rank))

    def run(self, awake: list[int]) -> Wait | None:
        """Run actions until one is blocked, and return the reason, or None if the rank has reached
        the end of the step.

        Appends the ranks that may be able to continue to `awake`.
        """
        while self.position < len(self.steps):
            action, micro_batch = self.steps[self.position]
            wait = action.run(micro_batch, self.done, self.rank, awake)
            if wait is not None:
                return wait
            self.position += 1
        return None

    def _unroll(self, rank: RankCode) -> Iterator[tuple[Action, int]]:
        """Yield the pairs (action, micro-batch) of all instructions of the rank, with loops
        unrolled.
        """
        for item in (*rank.warm_up, *rank.repetend, *rank.cool_down):
            loop = item if isinstance(item, Loop) else Loop((item,), 1)
            strides = loop.strides or (loop.stride,) * len(loop.body)
            actions = [
                self._action(each.opcode, each.stage, each.source, each.part) for each in loop.body
            ]
            for iteration in range(loop.count):
                for action, each, stride in zip(actions, loop.body, strides, strict=True):
                    yield action, each.micro_batch + iteration * stride

    def _make_action(
        self, opcode: Opcode, stage: int, source: int | None, part: int | None
    ) -> Action:
        """Return the action of the instructions with this opcode and stage. A receive may be
        restricted to the messages of one sending stage, `source`, and to those of one slice of its
        micro-batches, the slice with the index `part`; None stands for no restriction.
        """
        receives = self._wired[stage].receives
        sends = self._wired[stage].sends
        forward = f"{stage}F"
        backward = f"{stage}B"
        weights = f"{stage}W"
        match opcode:
            case Opcode.RECV:
                return Action(posts=self._channels_between(receives, False, source, part))
            case Opcode.RECV_GRADIENT:
                return Action(posts=self._channels_between(sends, True, source, part))
            case Opcode.SEND:
                return Action(forward, sends=self._channels_between(sends, False))
            case Opcode.SEND_GRADIENT:
                return Action(backward, sends=self._channels_between(receives, True))
            case Opcode.FORWARD:
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
                    after=items_by_micro_batch(before),
                    uses=self._channels_between(receives, False),
                    barrier=self._barrier(stage, opcode),
                    completes=(forward,),
                )
            case Opcode.BACKWARD_WEIGHT:
                # A task that computes weight gradients does not all-reduce them: the all-reduce
                # follows at the end of the step. The task therefore runs no collective and needs no
                # barrier.
                return Action(
                    weights,
                    after=(((backward, EVERY_MICRO_BATCH, EVERY_MICRO_BATCH),),),
                    completes=(weights,),
                )
            case _:
                given = [(EVERY_MICRO_BATCH, (forward, EVERY_MICRO_BATCH, EVERY_MICRO_BATCH))]
                given += (
                    (
                        piece.source_slice,
                        (f"{piece.target_stage}B", piece.target_slice, piece.source_slice),
                    )
                    for piece in sends
                    if piece.needs_gradient and piece.target_rank == self.rank
                )
                return Action(
                    f"{stage}{_LETTERS[opcode]}",
                    after=items_by_micro_batch(given),
                    uses=self._channels_between(sends, True),
                    barrier=self._barrier(stage, opcode),
                    completes=(backward, weights) if opcode is Opcode.BACKWARD else (backward,),
                )

    def _channels_between(
        self,
        pieces: tuple[MessageSlice, ...],
        gradient: bool,
        source: int | None = None,
        part: int | None = None,
    ) -> Periodic[ProofChannel]:
        """Return, by micro-batch of this rank, the channels on which the messages `pieces`, or
        their gradients if `gradient`, are sent between this rank and other ranks.

        `source` restricts the channels to those from the stage `source`, `part` to those of the
        slice of the sender's micro-batches with this index.
        """
        return items_by_micro_batch(
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

    def _channel(self, piece: MessageSlice, gradient: bool) -> ProofChannel:
        """Return the channel of a message in one direction, creating it at the first call."""
        key = piece.channel, gradient
        connections = self._connections
        if key not in connections.channels:
            ends = [
                (piece.source_rank, piece.source_stage, piece.source_slice),
                (piece.target_rank, piece.target_stage, piece.target_slice),
            ]
            (source, stage, sends), (target, _, uses) = ends[::-1] if gradient else ends
            task = f"{stage}{'B' if gradient else 'F'}"
            communicator = connections.communicators.setdefault((source, target), Communicator())
            connections.channels[key] = ProofChannel(
                communicator, piece.channel, source, target, task, sends, uses
            )
        return connections.channels[key]

    def _barrier(self, stage: int, opcode: Opcode) -> Barrier | None:
        """Return the barrier of the tasks of a stage with this opcode, creating it at the first
        call. None if the stage is on one rank.
        """
        ranks = self._program.stages[stage].devices
        return (
            self._connections.barriers.setdefault((stage, opcode), Barrier(ranks))
            if len(ranks) > 1
            else None
        )


def prove_no_deadlock(program: Program) -> tuple[RankTrace, ...]:
    """Return the trace of each rank after all ranks have reached the end of the step.

    The check establishes these conditions:

    - No ranks wait for each other in a cycle.
    - A task uses a message only after its receive was posted, and a result of its own rank only
      after that result was computed.
    - The messages of each channel are received in the order in which they are sent, and each
      message is sent and received once.
    - Each task of the step runs once.
    - The ranks of a group start the gradient all-reduces of their stages in one order.

    Raises CodegenError, with the names of the tasks, if one of these conditions is violated. Time
    and memory are linear in the number of instructions.
    """
    connections = Connections()
    traces = tuple(RankTrace(rank, program, connections) for rank in program.ranks)
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
    for channel in connections.channels.values():
        if len(channel.sent) > len(channel.posted):
            task = channel.task(channel.sent[len(channel.posted)])
            raise CodegenError(
                f"rank {channel.source} sends {task}, which rank {channel.target} never receives"
            )
        if channel.used < len(channel.posted):
            raise CodegenError(
                f"rank {channel.target} receives {channel.sender} {len(channel.posted)} times "
                f"and uses it {channel.used} times"
            )
    _check_reductions(program, traces)
    return traces


def _check_waits(waits: dict[int, Wait], traces: Sequence[RankTrace]) -> None:
    """Raise CodegenError if a rank is still blocked when no rank can continue. `waits` contains the
    reason for each blocked rank.

    The error names a message or barrier that no later instruction provides. If there is none, it
    names a cycle of ranks that wait for each other.
    """

    def description(rank: int) -> str:
        """Return a clause that says for what a blocked rank waits."""
        wait = waits[rank]
        awaited = f"rank {wait.rank} to reach the same task"
        if isinstance(wait.awaited, ProofChannel):
            awaited = f"{wait.awaited.task(wait.number)} of rank {wait.rank}"
        return f"rank {rank} would wait in {wait.task} for {awaited}"

    for rank, wait in sorted(waits.items()):
        other = traces[wait.rank]
        if not any(
            action.resolves(wait, micro_batch)
            for action, micro_batch in other.steps[other.position :]
        ):
            raise CodegenError(f"{description(rank)}, which never happens")
    if waits:
        rank = min(waits)
        seen = list[int]()
        while rank not in seen:
            seen.append(rank)
            rank = waits[rank].rank
        cycle = seen[seen.index(rank) :]
        raise CodegenError(f"deadlock: {', '.join(map(description, cycle))}")


def _check_reductions(program: Program, traces: Sequence[RankTrace]) -> None:
    """Raise CodegenError if two ranks of a group would start the group's gradient all-reduces in
    different orders.

    The home stage of a parameter shard (`ParameterShard.home`) is the only stage that uses the
    shard, if exactly the ranks of this stage hold it. A rank starts the all-reduce of such a shard
    after the last backward of the home stage in the step. The gradients of shards without a home
    stage are reduced at the end of the step and are not checked.
    """
    orders: dict[tuple[int, ...], tuple[int, list[int]]] = {}
    for rank, trace in zip(program.ranks, traces, strict=True):
        stages_of_group: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for shard in rank.shards:
            if shard.home is not None and len(shard.gradient_ranks) > 1:
                stages_of_group[shard.gradient_ranks].add(shard.home)
        last_position = {
            action.completes[-1]: position
            for position, (action, _) in enumerate(trace.steps)
            if action.completes
        }
        parts = sorted(last_position, key=last_position.__getitem__)
        finished = [int(part[:-1]) for part in parts if part.endswith("W")]
        for group, stages in stages_of_group.items():
            order = [stage for stage in finished if stage in stages]
            first_rank, expected = orders.setdefault(group, (trace.rank, order))
            if order != expected:
                raise CodegenError(
                    f"rank {first_rank} would reduce the gradients of its stages in the order "
                    f"{expected}, but rank {trace.rank} in the order {order}",
                )
