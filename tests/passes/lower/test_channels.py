"""How many messages are held at once: replayed one by one, and known for schedules that everyone
knows.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopipe.ir.placement import Placement, Stage
from autopipe.ir.program import MessageSlice, Opcode, Program
from autopipe.passes.lower.lower import lower
from tests.distributed.support.builder import mlp
from tests.distributed.support.drawing import Case, cases
from tests.distributed.support.drawing_sizes import unequal_cases
from tests.distributed.support.running import schedule_of
from tests.passes.lower.machine import Machine, unrolled


def most_held(program: Program) -> dict[tuple[int, bool], int]:
    """By channel and direction, by walking every rank's instructions with what is held in hand."""
    most: Counter[tuple[int, bool]] = Counter()
    for rank in program.ranks:
        wires = {each.stage: each for each in rank.stages}
        held: dict[tuple[int, bool], set[int]] = {}
        for each in unrolled(rank):
            wired = wires[each.stage]
            micro_batch = each.micro_batch
            code = program.stages[each.stage]
            gradient = each.opcode is Opcode.RECV_GRADIENT
            if each.opcode in (Opcode.RECV, Opcode.RECV_GRADIENT):
                for piece in wired.sends if gradient else wired.receives:
                    ranks = {piece.source_rank, piece.target_rank}
                    turn = piece.source_slice if gradient else piece.target_slice
                    carries = micro_batch % turn.of == turn.index and (
                        piece.needs_gradient or not gradient
                    )
                    if len(ranks) == 2 and Machine.takes(each, piece, gradient) and carries:
                        here = held.setdefault((piece.channel, gradient), set())
                        here.add(micro_batch)
                        most[piece.channel, gradient] = max(
                            most[piece.channel, gradient], len(here)
                        )
            shapes = {value.name: value.shape for value in (*code.inputs, *code.outputs)}
            ends = {Opcode.BACKWARD, Opcode.BACKWARD_WEIGHT} if program.train else {Opcode.FORWARD}
            for piece in wired.receives:
                if each.opcode in ends or (
                    each.opcode is Opcode.FORWARD and is_block(piece, shapes, False)
                ):
                    held.get((piece.channel, False), set()).discard(micro_batch)
            for piece in wired.sends:
                if each.opcode in ends or (
                    each.opcode is Opcode.BACKWARD_INPUT and is_block(piece, shapes, True)
                ):
                    held.get((piece.channel, True), set()).discard(micro_batch)
        assert not any(held.values())
    return most


def is_block(piece: MessageSlice, shapes: dict[str, tuple[int, ...]], gradient: bool) -> bool:
    return (piece.sent if gradient else piece.received).shape != shapes[piece.tensor]


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(case=st.booleans().flatmap(lambda train: st.one_of(cases(train), unequal_cases(train))))
def test_channels_know_how_much_is_held(case: Case) -> None:
    program = lower(case.graph, case.placement, case.schedule, case.loss)
    stated = {(each.number, False): each.buffers for each in program.channels}
    stated |= {(each.number, True): each.gradient_buffers for each in program.channels}
    assert {key: count for key, count in stated.items() if count} == most_held(program)


@pytest.mark.parametrize("micro_batches", [8, 40])
def test_1f1b_holds_as_many_as_are_in_flight_and_one_on_its_way(micro_batches: int) -> None:
    graph, loss = mlp(3)
    placement = Placement(
        tuple(Stage(nodes, (rank,), 4) for rank, nodes in enumerate(((0, 1), (2, 3), (4, 5, 6, 7))))
    )
    program = lower(graph, placement, schedule_of(graph, placement, micro_batches), loss)
    assert [each.buffers for each in program.channels] == [3, 2]
    assert [each.gradient_buffers for each in program.channels] == [2, 2], (
        "backwards in a row at the end"
    )
    gpipe = lower(graph, placement, schedule_of(graph, placement, micro_batches, "gpipe"), loss)
    assert [each.buffers for each in gpipe.channels] == [micro_batches, micro_batches]
