"""Both ends of every message, as tasks: which send gives what a receive asks for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autopipe.ir.graph import Value
from autopipe.ir.program import Instruction, Loop, MessageBlock, Program, RankCode, StageOnRank, Verb
from autopipe.ir.task_graph import MessageEnd


class MessageEnds:
    """The messages of a program's sends and receives."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._apart = {rank.rank: _requested_separately(rank) for rank in program.ranks}
        """By rank, the receives that ask for what one stage sends."""

    def received(self, wired: StageOnRank, asked: Instruction) -> tuple[MessageEnd, ...]:
        """Messages of a receive."""
        if asked.verb is Verb.RECEIVE:
            return tuple(
                MessageEnd(
                    piece.source_rank, piece.channel, piece.tensor, self._bytes(piece),
                    f"{piece.source_stage}SEND_F{self._source(piece, asked.micro_batch)}",
                )
                for piece in _between_ranks(wired.receives)
                if asked.source in (None, piece.source_stage) and piece.target_turn.has(asked.micro_batch)
            )  # fmt: skip
        return tuple(
            MessageEnd(
                piece.target_rank, piece.channel, piece.tensor, self._bytes(piece),
                f"{piece.target_stage}SEND_B{self._target(piece, asked.micro_batch)}",
            )
            for piece in _between_ranks(wired.sends)
            if piece.needs_gradient
            and asked.source in (None, piece.target_stage)
            and piece.source_turn.has(asked.micro_batch)
        )  # fmt: skip

    def sent(self, wired: StageOnRank, sent: Instruction) -> tuple[MessageEnd, ...]:
        """Messages of a send."""
        if sent.verb is Verb.SEND:
            return tuple(
                MessageEnd(
                    piece.target_rank, piece.channel, piece.tensor, self._bytes(piece),
                    self._receive(piece, False, self._target(piece, sent.micro_batch)),
                )
                for piece in _between_ranks(wired.sends)
                if piece.source_turn.has(sent.micro_batch)
            )  # fmt: skip
        return tuple(
            MessageEnd(
                piece.source_rank, piece.channel, piece.tensor, self._bytes(piece),
                self._receive(piece, True, self._source(piece, sent.micro_batch)),
            )
            for piece in _between_ranks(wired.receives)
            if piece.needs_gradient and piece.target_turn.has(sent.micro_batch)
        )  # fmt: skip

    def handed(self, wired: StageOnRank, backward: bool, micro_batch: int) -> Iterator[tuple[int, int]]:
        """The stages of this same rank that give a task something, each with its micro-batch."""
        for piece in wired.sends if backward else wired.receives:
            if piece.source_rank == piece.target_rank and (piece.needs_gradient or not backward):
                if backward and piece.source_turn.has(micro_batch):
                    yield piece.target_stage, self._target(piece, micro_batch)
                elif not backward and piece.target_turn.has(micro_batch):
                    yield piece.source_stage, self._source(piece, micro_batch)

    def receive_name(self, stage: int, gradient: bool, micro_batch: int, source: int | None) -> str:
        """A receive's name: `2RECV_F0`, with `@1` behind it where it asks for what stage 1 alone sends."""
        apart = "" if source is None else f"@{source}"
        return f"{stage}RECV_{'B' if gradient else 'F'}{micro_batch}{apart}"

    def _receive(self, piece: MessageBlock, gradient: bool, micro_batch: int) -> str:
        """The receive, on the other rank, of a message."""
        rank, stage, source = piece.target_rank, piece.target_stage, piece.source_stage
        verb = Verb.RECEIVE
        if gradient:
            rank, stage, source, verb = piece.source_rank, source, stage, Verb.RECEIVE_GRADIENT
        apart = (verb, stage, source) in self._apart[rank]
        return self.receive_name(stage, gradient, micro_batch, source if apart else None)

    @staticmethod
    def _source(piece: MessageBlock, micro_batch: int) -> int:
        """The sender's micro-batch of the message for one of the receiver's."""
        return piece.source_turn.micro_batch(piece.target_turn.message(micro_batch))

    @staticmethod
    def _target(piece: MessageBlock, micro_batch: int) -> int:
        """The receiver's micro-batch of the message of one of the sender's."""
        return piece.target_turn.micro_batch(piece.source_turn.message(micro_batch))

    def _bytes(self, piece: MessageBlock) -> int:
        value = _value(self._program.stages[piece.source_stage].outputs, piece.tensor)
        return piece.sent.elements * value.dtype.itemsize


def is_whole(program: Program, wired: StageOnRank, message: MessageEnd, gradient: bool) -> bool:
    """True if a message is used as it came, not put together with others into a tensor of their own."""
    code = program.stages[wired.stage]
    pieces = wired.sends if gradient else wired.receives
    piece = next(each for each in pieces if each.channel == message.channel)
    if gradient:
        return piece.sent.shape == _value(code.outputs, piece.tensor).shape
    return piece.received.shape == _value(code.inputs, piece.tensor).shape


def _between_ranks(pieces: Iterable[MessageBlock]) -> Iterator[MessageBlock]:
    return (piece for piece in pieces if piece.source_rank != piece.target_rank)


def _value(values: Iterable[Value], name: str) -> Value:
    return next(value for value in values if value.name == name)


def _requested_separately(rank: RankCode) -> frozenset[tuple[Verb, int, int]]:
    found = set()
    for item in (*rank.warm_up, *rank.repetend, *rank.cool_down):
        for each in item.body if isinstance(item, Loop) else (item,):
            if each.source is not None:
                found.add((each.verb, each.stage, each.source))
    return frozenset(found)
