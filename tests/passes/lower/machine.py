"""Loops unrolled, and a program's instructions followed one by one."""

from __future__ import annotations

from collections import defaultdict

from autopipe.ir.program import (
    Collective,
    Instruction,
    Loop,
    MessageSlice,
    Opcode,
    Program,
    RankCode,
    Section,
    StageOnRank,
)
from autopipe.ir.schedule import Phase

TASKS = {
    Phase.FORWARD: Opcode.FORWARD,
    Phase.BACKWARD: Opcode.BACKWARD,
    Phase.INPUT_GRADIENT: Opcode.BACKWARD_INPUT,
    Phase.WEIGHT_GRADIENT: Opcode.BACKWARD_WEIGHT,
}
BACKWARDS = (Opcode.BACKWARD, Opcode.BACKWARD_INPUT)
"""What gives the gradients of what a stage received."""


def expanded(*parts: Section) -> list[Instruction]:
    """Instructions with loops unrolled."""
    found: list[Instruction] = []
    for item in (each for part in parts for each in part):
        if isinstance(item, Loop):
            strides = item.strides or [item.stride] * len(item.body)
            for turn in range(item.count):
                found += [
                    each.shifted(turn * stride)
                    for each, stride in zip(item.body, strides, strict=True)
                ]
        else:
            found.append(item)
    return found


def unrolled(rank: RankCode) -> list[Instruction]:
    return expanded(rank.warm_up, rank.repetend, rank.cool_down)


class Machine:
    """All ranks of a program, without numbers: sends return at once, receives match sends of their
    channel in turn.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.lists = [unrolled(rank) for rank in program.ranks]
        self.wires = {
            (rank.rank, stage.stage): stage for rank in program.ranks for stage in rank.stages
        }
        self.position = [0] * program.world_size
        self.sent: dict[tuple[int, bool], list[int]] = defaultdict(list)
        self.posted: dict[tuple[int, bool], list[int]] = defaultdict(list)
        self.done: set[tuple[int, Instruction]] = set()
        self.exchanging = {
            stage.stage: stage.devices
            for stage in program.stages
            if any(isinstance(operation, Collective) for operation in stage.operations)
        }

    def head(self, rank: int) -> Instruction | None:
        return (
            self.lists[rank][self.position[rank]]
            if self.position[rank] < len(self.lists[rank])
            else None
        )

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for rank in range(self.program.world_size):
                while (instruction := self.head(rank)) is not None and self.can_run(
                    rank, instruction
                ):
                    for member in self.together(instruction, rank):
                        self.step(member, instruction)
                    moved = True
        stuck = {
            rank: str(self.head(rank))
            for rank in range(self.program.world_size)
            if self.head(rank) is not None
        }
        assert not stuck, f"wait for ever: {stuck}"
        assert self.sent == self.posted, "messages without receives, or out of turn"

    def together(self, instruction: Instruction, rank: int) -> tuple[int, ...]:
        """A computation with exchanges runs on the whole group at once."""
        computes = instruction.opcode in (Opcode.FORWARD, *BACKWARDS)
        return self.exchanging.get(instruction.stage, (rank,)) if computes else (rank,)

    def can_run(self, rank: int, instruction: Instruction) -> bool:
        group = self.together(instruction, rank)
        return all(
            self.head(member) == instruction and self.is_ready(member, instruction)
            for member in group
        )

    def is_ready(self, rank: int, instruction: Instruction) -> bool:
        if instruction.opcode is Opcode.BACKWARD_WEIGHT:
            before = Instruction(Opcode.BACKWARD_INPUT, instruction.stage, instruction.micro_batch)
            assert (rank, before) in self.done
        if instruction.opcode not in (Opcode.FORWARD, *BACKWARDS):
            return True
        backward = instruction.opcode in BACKWARDS
        return all(
            self.has_arrived(rank, piece, number, backward)
            for piece in self.incoming(self.wires[rank, instruction.stage], backward)
            if (number := self.message(piece, not backward, instruction.micro_batch)) is not None
        )

    @staticmethod
    def message(piece: MessageSlice, at_target: bool, micro_batch: int) -> int | None:
        """The number of the message that has to do with a micro-batch at one end; None where it is
        not its turn.
        """
        turn = piece.target_slice if at_target else piece.source_slice
        return micro_batch // turn.of if micro_batch % turn.of == turn.index else None

    @staticmethod
    def takes(instruction: Instruction, piece: MessageSlice, backward: bool) -> bool:
        """True if a receive is of a piece, or of its gradient."""
        stage = piece.source_stage
        turn = piece.source_slice
        if backward:
            stage = piece.target_stage
            turn = piece.target_slice
        return instruction.source in (None, stage) and instruction.part in (None, turn.index)

    @staticmethod
    def incoming(wired: StageOnRank, backward: bool) -> list[MessageSlice]:
        return (
            [piece for piece in wired.sends if piece.needs_gradient]
            if backward
            else list(wired.receives)
        )

    @staticmethod
    def outgoing(wired: StageOnRank, backward: bool) -> list[MessageSlice]:
        return (
            [piece for piece in wired.receives if piece.needs_gradient]
            if backward
            else list(wired.sends)
        )

    def has_arrived(self, rank: int, piece: MessageSlice, number: int, backward: bool) -> bool:
        if piece.source_rank == piece.target_rank:
            other = piece.source_stage
            turn = piece.source_slice
            if backward:
                other = piece.target_stage
                turn = piece.target_slice
            return self.has_run(rank, other, number * turn.of + turn.index, backward)
        channel = (piece.channel, backward)
        assert number in self.posted[channel], f"rank {rank} waits for what it never asked for"
        place = self.posted[channel].index(number)
        if place >= len(self.sent[channel]):
            return False
        assert self.sent[channel][place] == number, "another micro-batch arrives"
        return True

    def has_run(self, rank: int, stage: int, micro_batch: int, backward: bool) -> bool:
        opcodes = BACKWARDS if backward else (Opcode.FORWARD,)
        return any(
            (rank, Instruction(opcode, stage, micro_batch)) in self.done for opcode in opcodes
        )

    def step(self, rank: int, instruction: Instruction) -> None:
        wired = self.wires[rank, instruction.stage]
        opcode = instruction.opcode
        micro_batch = instruction.micro_batch
        backward = opcode in (Opcode.RECV_GRADIENT, Opcode.SEND_GRADIENT)
        if opcode in (Opcode.RECV, Opcode.RECV_GRADIENT):
            book = self.posted
            pieces = [
                piece
                for piece in self.incoming(wired, backward)
                if self.takes(instruction, piece, backward)
            ]
        else:
            book = self.sent
            pieces = self.outgoing(wired, backward)
        if opcode in (Opcode.SEND, Opcode.SEND_GRADIENT):
            assert self.has_run(rank, instruction.stage, micro_batch, backward)
        if opcode not in TASKS.values():
            at_target = (book is self.posted) != backward
            for piece in pieces:
                number = self.message(piece, at_target, micro_batch)
                if piece.source_rank != piece.target_rank and number is not None:
                    book[piece.channel, backward].append(number)
        self.done.add((rank, instruction))
        self.position[rank] += 1
