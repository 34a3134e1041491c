"""All ranks' instructions run against each other, computing nothing, to show that every rank comes to its end.

Sends never wait, messages of a channel are received in the order in which they are sent, tasks wait for their messages
and for their group: as no choice is left, one run stands for all. What orders instructions has no part in it, so that
a fault there is found here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from autopipe.ir.errors import CodegenError
from autopipe.ir.program import Instruction, Loop, MessageBlock, Program, RankCode, StageOnRank, Verb
from autopipe.ir.schedule import EVERY, MicroBatchSlice


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


_LETTERS = {
    Verb.FORWARD: "F",
    Verb.BACKWARD: "B",
    Verb.INPUT_GRADIENT: "I",
    Verb.WEIGHT_GRADIENT: "W",
}


@dataclass(slots=True)
class ProgramSync:
    """The lanes and doors of a program, made as they are asked for."""

    program: Program
    lanes: dict[tuple[int, bool], ProofChannel] = field(default_factory=dict)
    doors: dict[tuple[int, str], Barrier] = field(default_factory=dict)

    def lane(self, piece: MessageBlock, gradient: bool) -> ProofChannel:
        """Of a piece, or of its gradient, which travels back."""
        found = self.lanes.get((piece.channel, gradient))
        if found is None:
            first = piece.source_rank, piece.source_stage, piece.source_turn
            last = piece.target_rank, piece.target_stage, piece.target_turn
            (source, stage, sends), (target, _, asks) = (last, first) if gradient else (first, last)
            found = ProofChannel(piece.channel, source, target, f"{stage}{'B' if gradient else 'F'}", sends, asks)
            self.lanes[piece.channel, gradient] = found
        return found

    def door(self, stage: int, verb: Verb) -> Barrier | None:
        """Of a task that a group runs together. Gradients of parameters are left to each rank."""
        ranks = self.program.stages[stage].devices
        if len(ranks) == 1 or verb is Verb.WEIGHT_GRADIENT:
            return None
        return self.doors.setdefault((stage, _LETTERS[verb]), Barrier(ranks))


class RankTrace:
    """One rank: its actions in order, each with its micro-batch."""

    def __init__(self, rank: RankCode, stages: ProgramSync) -> None:
        self.rank = rank.rank
        self.parts: dict[tuple[int, str], StagePhase] = {}
        self._stages = stages
        self._wired = {each.stage: each for each in rank.stages}
        self._actions: dict[tuple[Verb, int, int | None], Action] = {}
        self.steps = list(self._unrolled(rank))
        self.position = 0

    def part(self, stage: int, letter: str) -> StagePhase:
        """Progress of a stage's forwards (F) or either half of its backwards (B, the first, and W)."""
        return self.parts.setdefault((stage, letter), StagePhase(f"{stage}{letter}"))

    def will_meet(self, wait: Wait) -> bool:
        """True if what is still to run here sends, or joins in, what another rank waits for."""
        return any(action.meets(wait, micro_batch) for action, micro_batch in self.steps[self.position :])

    def last_gradients(self) -> list[int]:
        """Stages in the order in which their last gradients of parameters are computed."""
        ends = {
            action.does[-1].name: place
            for place, (action, _) in enumerate(self.steps)
            if isinstance(action, RunTask) and action.does[-1].name.endswith("W")
        }
        return [int(name[:-1]) for name in sorted(ends, key=ends.__getitem__)]

    def _unrolled(self, rank: RankCode) -> Iterator[tuple[Action, int]]:
        for item in (*rank.warm_up, *rank.repetend, *rank.cool_down):
            if isinstance(item, Instruction):
                yield self._action(item), item.micro_batch
            elif isinstance(item, Loop):
                strides = item.strides or (item.stride,) * len(item.body)
                body = [(self._action(each), each.micro_batch) for each in item.body]
                for turn in range(item.count):
                    for (action, micro_batch), stride in zip(body, strides, strict=True):
                        yield action, micro_batch + turn * stride

    def _action(self, instruction: Instruction) -> Action:
        key = instruction.verb, instruction.stage, instruction.source
        if key not in self._actions:
            self._actions[key] = self._make(self._wired[instruction.stage], instruction.verb, instruction.source)
        return self._actions[key]

    def _make(self, wired: StageOnRank, verb: Verb, source: int | None) -> Action:
        stage = wired.stage
        match verb:
            case Verb.RECEIVE:
                return PostReceives(
                    self._lanes(wired.receives, False, lambda piece: source in (None, piece.source_stage))
                )
            case Verb.RECEIVE_GRADIENT:
                return PostReceives(self._lanes(wired.sends, True, lambda piece: source in (None, piece.target_stage)))
            case Verb.SEND:
                return SendResults(self._lanes(wired.sends, False), self.part(stage, "F"))
            case Verb.SEND_GRADIENT:
                return SendResults(self._lanes(wired.receives, True), self.part(stage, "B"))
            case Verb.FORWARD:
                return self._forward(wired)
            case Verb.WEIGHT_GRADIENT:
                before = LocalHandover(self.part(stage, "B"), EVERY, EVERY)
                return RunTask(f"{stage}W", ((before,),), ((),), None, (self.part(stage, "W"),))
            case _:
                return self._backward(wired, verb)

    def _forward(self, wired: StageOnRank) -> RunTask:
        stage, own = wired.stage, self.rank
        before = (
            (piece.target_turn, LocalHandover(self.part(piece.source_stage, "F"), piece.source_turn, piece.target_turn))
            for piece in wired.receives
            if piece.source_rank == own
        )
        door, does = self._stages.door(stage, Verb.FORWARD), (self.part(stage, "F"),)
        return RunTask(f"{stage}F", by_turn(before), self._lanes(wired.receives, False), door, does)

    def _backward(self, wired: StageOnRank, verb: Verb) -> RunTask:
        stage = wired.stage
        before = [(EVERY, LocalHandover(self.part(stage, "F"), EVERY, EVERY))]
        before += (
            (piece.source_turn, LocalHandover(self.part(piece.target_stage, "B"), piece.target_turn, piece.source_turn))
            for piece in wired.sends
            if piece.needs_gradient and piece.target_rank == self.rank
        )
        does = [self.part(stage, "B")] + [self.part(stage, "W")] * (verb is Verb.BACKWARD)
        lanes, door = self._lanes(wired.sends, True), self._stages.door(stage, verb)
        return RunTask(f"{stage}{_LETTERS[verb]}", by_turn(before), lanes, door, tuple(does))

    def _lanes(
        self,
        pieces: tuple[MessageBlock, ...],
        gradient: bool,
        wanted: Callable[[MessageBlock], bool] = lambda piece: True,
    ) -> ByTurn[ProofChannel]:
        """The lanes, between different ranks, of the wanted pieces or of their gradients, by this rank's turns."""
        return by_turn(
            (self._own_turn(piece), self._stages.lane(piece, gradient))
            for piece in pieces
            if piece.source_rank != piece.target_rank and (piece.needs_gradient or not gradient) and wanted(piece)
        )

    def _own_turn(self, piece: MessageBlock) -> MicroBatchSlice:
        return piece.source_turn if piece.source_rank == self.rank else piece.target_turn


def prove(program: Program) -> None:
    """Raise CodegenError, naming the tasks, unless every rank's program runs to its end.

    It does if no ranks wait for one another in a circle, nothing is used before it was asked for or computed, messages
    are asked for in the order in which they are sent, each is sent and asked for once, each task runs once, and groups
    come to their exchanges in one order. Time and memory grow with the number of instructions.
    """
    stages = ProgramSync(program)
    scripts = [RankTrace(rank, stages) for rank in program.ranks]
    _check_waits(_run(scripts), scripts)
    for rank, script in zip(program.ranks, scripts, strict=True):
        _check_complete(program, rank, script)
    _check_lanes(stages)
    _check_reductions(program, scripts)


def _run(scripts: list[RankTrace]) -> dict[int, Wait]:
    """Run all ranks as far as they come; what each of those that do not come to the end waits for."""
    waits: dict[int, Wait] = {}
    awake = [script.rank for script in reversed(scripts)]
    while awake:
        script = scripts[awake.pop()]
        waits.pop(script.rank, None)
        steps, position = script.steps, script.position
        while position < len(steps):
            action, micro_batch = steps[position]
            wait = action.run(micro_batch, script.rank, awake)
            if wait is not None:
                waits[script.rank] = wait
                break
            position += 1
        script.position = position
    return waits


def _check_waits(waits: dict[int, Wait], scripts: list[RankTrace]) -> None:
    """Raise CodegenError for one who waits for what never comes, or for the circle that waiting ends in."""
    for rank, wait in sorted(waits.items()):
        if not scripts[wait.rank].will_meet(wait):
            raise CodegenError(f"{_waiting(rank, wait)}, which never comes")
    if waits:
        rank, seen = min(waits), list[int]()
        while rank not in seen:
            seen.append(rank)
            rank = waits[rank].rank
        circle = seen[seen.index(rank) :]
        raise CodegenError(f"deadlock: {', '.join(_waiting(each, waits[each]) for each in circle)}")


def _waiting(rank: int, wait: Wait) -> str:
    what = f"rank {wait.rank}"
    if isinstance(wait.what, ProofChannel):
        what = f"{wait.what.task(wait.number)} of {what}"
    elif isinstance(wait.what, Barrier):
        what += " to join in"
    return f"rank {rank} would wait in {wait.task} for {what}"


def _check_lanes(stages: ProgramSync) -> None:
    for lane in stages.lanes.values():
        if len(lane.sent) > len(lane.asked):
            task = lane.task(lane.sent[len(lane.asked)])
            raise CodegenError(f"rank {lane.source} sends {task}, which rank {lane.target} never asks for")
        if lane.used < len(lane.asked):
            raise CodegenError(f"rank {lane.target} asks for {lane.sender} more often than it uses it")


def _check_complete(program: Program, rank: RankCode, script: RankTrace) -> None:
    """Raise CodegenError unless each task has run on each of its stage's micro-batches."""
    for wired in rank.stages:
        due = program.micro_batches_of(wired.stage)
        for letter in "FBW" if program.train else "F":
            for micro_batch in sorted(script.part(wired.stage, letter).done.symmetric_difference(due)):
                reason = "never runs" if micro_batch in due else "does not belong to the step"
                raise CodegenError(f"{wired.stage}{letter}{micro_batch} {reason}", where=f"rank {rank.rank}")


def _check_reductions(program: Program, scripts: list[RankTrace]) -> None:
    """Raise CodegenError where ranks would start the sums of gradients over one group in different orders.

    A stage's sums start with its last backward, if all ranks of the group have it.
    """
    orders: dict[tuple[int, ...], tuple[int, list[int]]] = {}
    for rank, script in zip(program.ranks, scripts, strict=True):
        homes: dict[tuple[int, ...], set[int]] = {}
        for shard in rank.shards:
            if shard.home is not None and len(shard.gradient_ranks) > 1:
                homes.setdefault(shard.gradient_ranks, set()).add(shard.home)
        for group, stages in homes.items():
            found = [stage for stage in script.last_gradients() if stage in stages]
            first, order = orders.setdefault(group, (script.rank, found))
            if order != found:
                raise CodegenError(
                    f"rank {first} would add up gradients of stages {order}, rank {script.rank} of stages {found}, "
                    "in these orders"
                )
