"""The proof that a program runs to its end: it lets good programs pass and finds every fault put
into one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopipe.ir.errors import CodegenError
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.program import Instruction, Loop, Opcode, Program
from autopipe.passes.lower.deadlock_check import prove_no_deadlock
from autopipe.passes.lower.lower import fold_into_sections, lower
from tests.distributed.support.builder import mlp
from tests.distributed.support.drawing import Case, cases
from tests.distributed.support.portions import forwards_first
from tests.distributed.support.running import schedule_of, stage_graph
from tests.passes.lower.machine import Machine, unrolled

Change = Callable[[list[Instruction]], list[Instruction]]


def chain(train: bool = True) -> Program:
    """Three stages on a rank each under 1F1B, five micro-batches."""
    graph, loss = mlp(3)
    stages = tuple(
        Stage(nodes, (rank,), 4) for rank, nodes in enumerate(((0, 1), (2, 3), (4, 5, 6, 7)))
    )
    placement = Placement(stages)
    return lower(
        graph, placement, schedule_of(graph, placement, 5, train=train), loss if train else None
    )


def grouped() -> Program:
    """Two stages on the same two ranks."""
    graph, loss = mlp(2)
    splits = tuple((node, (Split("x0", 2),)) for node in (1, 3))
    placement = Placement(
        (Stage((0, 1), (0, 1), 4, splits[:1]), Stage((2, 3, 4, 5), (0, 1), 4, splits[1:]))
    )
    return lower(graph, placement, schedule_of(graph, placement, 2), loss)


def changed(program: Program, rank: int, change: Change) -> Program:
    """The program with another order on one rank, rolled into loops again."""
    code = program.ranks[rank]
    warm_up, repetend, cool_down = fold_into_sections(change(unrolled(code)))
    ranks = list(program.ranks)
    ranks[rank] = replace(code, warm_up=warm_up, repetend=repetend, cool_down=cool_down)
    return replace(program, ranks=tuple(ranks))


def without(opcode: Opcode, stage: int, micro_batch: int) -> Change:
    gone = Instruction(opcode, stage, micro_batch)

    def change(flat: list[Instruction]) -> list[Instruction]:
        assert gone in flat
        return [each for each in flat if each != gone]

    return change


def swapped(first: Instruction, second: Instruction) -> Change:
    def change(flat: list[Instruction]) -> list[Instruction]:
        assert {first, second} <= set(flat)
        other = {first: second, second: first}
        return [other.get(each, each) for each in flat]

    return change


FAULTS = {
    "two receives swapped": (
        1,
        swapped(Instruction(Opcode.RECV, 1, 2), Instruction(Opcode.RECV, 1, 3)),
        "message 2 of channel 0 is 0F2 of rank 0, but rank 1 receives 0F3",
    ),
    "two sends swapped": (
        0,
        swapped(Instruction(Opcode.SEND, 0, 0), Instruction(Opcode.SEND, 0, 1)),
        "rank 0: the program sends the results of 0F1 before running this task",
    ),
    "a send dropped": (
        0,
        without(Opcode.SEND, 0, 4),
        "rank 1 would wait in 1F4 for 0F4 of rank 0, which never happens",
    ),
    "a send of a gradient dropped": (
        2,
        without(Opcode.SEND_GRADIENT, 2, 4),
        "rank 1 would wait in 1B4 for 2B4 of rank 2, which never happens",
    ),
    "an early send dropped": (
        0,
        without(Opcode.SEND, 0, 1),
        "message 1 of channel 0 is 0F2 of rank 0, but rank 1 receives 0F1",
    ),
    "a receive dropped": (
        1,
        without(Opcode.RECV, 1, 4),
        "rank 1: 1F4 uses the result of 0F4 of rank 0, but no receive is posted before",
    ),
    "a receive after its use": (
        1,
        swapped(Instruction(Opcode.RECV, 1, 4), Instruction(Opcode.FORWARD, 1, 4)),
        "rank 1: 1F4 uses the result of 0F4 of rank 0, but no receive is posted before",
    ),
    "a receive too many": (
        1,
        lambda flat: [*flat, Instruction(Opcode.RECV, 1, 5)],
        "rank 1 receives 0F 6 times and uses it 5 times",
    ),
    "a send too many": (
        0,
        lambda flat: [*flat, Instruction(Opcode.SEND, 0, 4)],
        "rank 0 sends 0F4, which rank 1 never receives",
    ),
    "a backward before its forward": (
        0,
        lambda flat: [Instruction(Opcode.BACKWARD, 0, 0), *flat],
        "rank 0: 0B0 runs before 0F0, whose results it uses",
    ),
    "a task twice": (
        0,
        lambda flat: [Instruction(Opcode.FORWARD, 0, 0), *flat],
        "rank 0: 0F0 runs twice",
    ),
    "a backward left out": (
        0,
        without(Opcode.BACKWARD, 0, 4),
        "rank 0: 0B4 never runs",
    ),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_each_fault_is_named(fault: str) -> None:
    rank, change, message = FAULTS[fault]
    program = chain()
    with pytest.raises(CodegenError) as caught:
        prove_no_deadlock(changed(program, rank, change))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def portions() -> Program:
    """A stage on single samples, then one on four, then one on two, a rank each, two micro-batches
    of four.
    """
    graph, loss = mlp(3)
    parts = zip(((0, 1), (2, 3), (4, 5, 6, 7)), (1, 4, 2), strict=True)
    placement = Placement(
        tuple(Stage(nodes, (rank,), size) for rank, (nodes, size) in enumerate(parts))
    )
    return lower(graph, placement, forwards_first(stage_graph(graph, placement), 2), loss)


FAULTS_IN_PORTIONS: dict[str, tuple[int, Change, str]] = {
    "one portion is not sent": (
        0,
        without(Opcode.SEND, 0, 6),
        "rank 0 sends 0F7 on channel 3 to rank 1, which receives 0F6 on channel 2 at this position",
    ),
    "a portion is not asked for": (
        2,
        without(Opcode.RECV, 2, 3),
        "rank 2: 2F3 uses the result of 1F1 of rank 1, but no receive is posted before",
    ),
    "a portion of the gradient is not sent": (
        2,
        without(Opcode.SEND_GRADIENT, 2, 3),
        "rank 1 would wait in 1B1 for 2B3 of rank 2, which never happens",
    ),
    "portions of one channel in another order": (
        2,
        swapped(Instruction(Opcode.RECV, 2, 1), Instruction(Opcode.RECV, 2, 3)),
        "message 0 of channel 5 is 1F0 of rank 1, but rank 2 receives 1F1",
    ),
    "a portion is never computed": (
        0,
        without(Opcode.BACKWARD, 0, 7),
        "rank 0: 0B7 never runs",
    ),
}


@pytest.mark.parametrize("fault", list(FAULTS_IN_PORTIONS))
def test_faults_between_micro_batches_of_different_sizes(fault: str) -> None:
    rank, change, message = FAULTS_IN_PORTIONS[fault]
    with pytest.raises(CodegenError) as caught:
        prove_no_deadlock(changed(portions(), rank, change))
    assert message in str(caught.value)


def test_a_circle_names_who_waits_for_whom() -> None:
    """Rank 1 wants all forwards before a backward, rank 0 under 1F1B a backward before its fourth
    forward.
    """

    def forwards_first(flat: list[Instruction]) -> list[Instruction]:
        forwards = (Opcode.RECV, Opcode.FORWARD, Opcode.SEND)
        return [each for each in flat if each.opcode in forwards] + [
            each for each in flat if each.opcode not in forwards
        ]

    with pytest.raises(CodegenError) as caught:
        prove_no_deadlock(changed(chain(), 1, forwards_first))
    assert str(caught.value) == (
        "deadlock: rank 0 would wait in 0B0 for 1B0 of rank 1, rank 1 would wait in 1F3 for 0F3 of "
        "rank 0"
    )


def test_a_group_that_comes_to_its_exchanges_in_two_orders() -> None:
    program = grouped()
    change = swapped(Instruction(Opcode.FORWARD, 0, 1), Instruction(Opcode.BACKWARD, 1, 0))
    prove_no_deadlock(program)
    with pytest.raises(CodegenError) as caught:
        prove_no_deadlock(changed(program, 1, change))
    assert "rank 0 would wait in " in str(caught.value)
    assert "rank 1 would wait in " in str(caught.value)
    assert "to reach the same task" in str(caught.value)


def test_sums_of_gradients_start_in_one_order() -> None:
    """The second halves need no exchange, but the last ones of two stages start their sums."""
    program = grouped()

    def halved(flat: list[Instruction]) -> list[Instruction]:
        found = []
        for each in flat:
            if each.opcode is Opcode.BACKWARD:
                found.append(replace(each, opcode=Opcode.BACKWARD_INPUT))
            else:
                found.append(each)
        return found

    def ending(*stages: int) -> Change:
        return lambda flat: [
            *halved(flat),
            *(
                Instruction(Opcode.BACKWARD_WEIGHT, stage, index)
                for stage in stages
                for index in range(2)
            ),
        ]

    prove_no_deadlock(changed(changed(program, 0, ending(0, 1)), 1, ending(0, 1)))
    with pytest.raises(
        CodegenError,
        match=r"rank 0 .* stages in the order \[0, 1\], but rank 1 in the order \[1, 0\]",
    ):
        prove_no_deadlock(changed(changed(program, 0, ending(0, 1)), 1, ending(1, 0)))


def test_a_loop_that_stops_too_early() -> None:
    program = chain(train=False)
    code = program.ranks[0]
    (loop,) = code.repetend
    assert isinstance(loop, Loop)
    ranks = (replace(code, repetend=(replace(loop, count=loop.count - 1),)), *program.ranks[1:])
    with pytest.raises(
        CodegenError, match="rank 1 would wait in 1F4 for 0F4 of rank 0, which never happens"
    ):
        prove_no_deadlock(replace(program, ranks=ranks))


FEW = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@FEW
@given(case=st.booleans().flatmap(cases), data=st.data())
def test_no_instruction_can_be_left_out(case: Case, data: st.DataObject) -> None:
    program = lower(case.graph, case.placement, case.schedule, case.loss)
    rank = data.draw(st.sampled_from([code.rank for code in program.ranks if unrolled(code)]))
    gone = data.draw(st.integers(0, len(unrolled(program.ranks[rank])) - 1))
    with pytest.raises(CodegenError):
        prove_no_deadlock(changed(program, rank, lambda flat: flat[:gone] + flat[gone + 1 :]))


@FEW
@given(case=cases(True))
def test_a_validation_runs_to_its_end(case: Case) -> None:
    """Forwards and their messages alone, in the step's order, as a rank runs them that
    validates.
    """
    program = lower(case.graph, case.placement, case.schedule, case.loss)
    forwards = (Opcode.RECV, Opcode.FORWARD, Opcode.SEND)
    for rank in range(program.world_size):
        program = changed(
            program, rank, lambda flat: [each for each in flat if each.opcode in forwards]
        )
    prove_no_deadlock(replace(program, train=False))


@FEW
@given(case=st.booleans().flatmap(cases), data=st.data())
def test_what_passes_runs(case: Case, data: st.DataObject) -> None:
    """Two instructions of a rank swapped: if the proof still holds, every rank does come to its
    end.
    """
    program = lower(case.graph, case.placement, case.schedule, case.loss)
    rank = data.draw(st.sampled_from([code.rank for code in program.ranks if unrolled(code)]))
    places = st.integers(0, len(unrolled(program.ranks[rank])) - 1)
    one = data.draw(places)
    other = data.draw(places)

    def change(flat: list[Instruction]) -> list[Instruction]:
        flat[one], flat[other] = flat[other], flat[one]
        return flat

    mutated = changed(program, rank, change)
    try:
        prove_no_deadlock(mutated)
    except CodegenError:
        return
    Machine(mutated).run()
