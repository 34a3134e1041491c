"""A rank's instructions as actions, loops unrolled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from autopipe.ir.program import Instruction, Loop, MessageBlock, Program, RankCode, StageOnRank, Verb
from autopipe.ir.schedule import EVERY, MicroBatchSlice
from autopipe.passes.lower.proof.actions import (
    Action,
    ByTurn,
    LocalHandover,
    PostReceives,
    RunTask,
    SendResults,
    StagePhase,
    by_turn,
)
from autopipe.passes.lower.proof.lanes import Barrier, ProofChannel, Wait

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
