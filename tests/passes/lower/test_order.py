"""The ranks' instructions, followed one by one: nobody waits in a circle, and every message meets
its receive.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopipe.ir.placement import Placement, Stage
from autopipe.ir.program import Instruction, Loop, Opcode
from autopipe.ir.schedule import Phase, Schedule, StageGraph, Task
from autopipe.passes.lower.lower import fold_into_sections, lower
from tests.distributed.support.builder import Builder, mlp
from tests.distributed.support.drawing import Case, cases
from tests.distributed.support.drawing_sizes import unequal_cases
from tests.passes.lower.machine import TASKS, Machine, expanded, unrolled


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(case=st.booleans().flatmap(lambda train: st.one_of(cases(train), unequal_cases(train))))
def test_no_rank_waits_for_ever(case: Case) -> None:
    program = lower(case.graph, case.placement, case.schedule, case.loss)
    for rank in program.ranks:
        tasks = [
            Instruction(TASKS[task.phase], task.stage, task.micro_batch)
            for task in case.schedule.tasks[rank.rank]
        ]
        assert [each for each in unrolled(rank) if each.opcode in TASKS.values()] == tasks
    Machine(program).run()


INSTRUCTIONS = st.builds(
    Instruction, st.sampled_from(list(Opcode)), st.integers(0, 2), st.integers(0, 3)
)
LOOPS = st.builds(
    Loop,
    st.lists(INSTRUCTIONS, min_size=1, max_size=4).map(tuple),
    st.integers(1, 6),
    st.integers(1, 2),
)


@given(st.lists(st.one_of(INSTRUCTIONS, LOOPS), max_size=6))
def test_loops_unroll_to_the_list_they_were_made_of(parts: list[Instruction | Loop]) -> None:
    flat = expanded(tuple(parts))
    assert expanded(*fold_into_sections(flat)) == flat


@given(
    st.builds(Loop, st.lists(INSTRUCTIONS, min_size=1, max_size=4).map(tuple), st.integers(2, 9))
)
def test_what_repeats_becomes_one_loop(loop: Loop) -> None:
    warm_up, repetend, cool_down = fold_into_sections(expanded((loop,)))
    assert len(repetend) == 1
    assert isinstance(repetend[0], Loop)
    assert len(repetend[0].body) <= len(loop.body)
    assert repetend[0].count * len(repetend[0].body) + len(warm_up) + len(
        cool_down
    ) <= loop.count * len(loop.body)


@pytest.mark.parametrize("turns", [(1, 4), (4, 1), (2, 4), (1, 1)])
def test_stages_that_take_turns_are_rolled_up_together(turns: tuple[int, int]) -> None:
    """Two stages on a rank: the same text whatever the number of micro-batches."""
    texts = set()
    for micro_batches in (8, 64):
        order = [
            Instruction(Opcode.FORWARD, stage, micro_batch * turns[stage] + turn)
            for micro_batch in range(micro_batches)
            for stage in (0, 1)
            for turn in range(turns[stage])
        ]
        order += [replace(each, opcode=Opcode.BACKWARD) for each in order]
        parts = fold_into_sections(order, turns)
        assert expanded(*parts) == order
        texts.add(
            sum(len(each.body) if isinstance(each, Loop) else 1 for part in parts for each in part)
        )
    assert texts == {2 * sum(turns)}


def test_receives_follow_the_order_in_which_the_other_stage_sends() -> None:
    graph, loss = mlp(1)
    placement = Placement((Stage((0,), (0,), 4), Stage((1, 2, 3), (1,), 4)))
    orders = [
        tuple(
            Task(stage, phase, index)
            for phase in (Phase.FORWARD, Phase.BACKWARD)
            for index in order
        )
        for stage, order in enumerate([(0, 1), (1, 0)])
    ]
    schedule = Schedule(2, tuple(orders))
    schedule.verify(StageGraph(2, ((0,), (1,)), ((0, 1),)), True)
    program = lower(graph, placement, schedule, loss)
    Machine(program).run()
    asked = [
        [each for each in unrolled(rank) if each.opcode.value.startswith("recv")]
        for rank in program.ranks
    ]
    assert asked[1] == [Instruction(Opcode.RECV, 1, 0), Instruction(Opcode.RECV, 1, 1)]
    assert asked[0] == [
        Instruction(Opcode.RECV_GRADIENT, 0, 1),
        Instruction(Opcode.RECV_GRADIENT, 0, 0),
    ]


def test_stages_that_send_in_different_orders_are_asked_one_by_one() -> None:
    builder = Builder()
    given = builder.input((4, 4))
    left = builder.node("MatMul", given, builder.parameter((4, 4)))
    right = builder.node("MatMul", given, builder.parameter((4, 4)))
    loss = builder.mean_square(builder.node("Mul", left, right))
    graph = builder.graph(loss)
    placement = Placement((Stage((0,), (0,), 4), Stage((1,), (1,), 4), Stage((2, 3, 4), (2,), 4)))
    orders = [
        tuple(
            Task(stage, phase, index)
            for phase in (Phase.FORWARD, Phase.BACKWARD)
            for index in order
        )
        for stage, order in enumerate([(0, 1), (1, 0), (0, 1)])
    ]
    program = lower(graph, placement, Schedule(2, tuple(orders)), loss)
    Machine(program).run()
    asked = [each for each in unrolled(program.ranks[2]) if each.opcode is Opcode.RECV]
    assert [each.micro_batch for each in asked if each.source == 0] == [0, 1]
    assert [each.micro_batch for each in asked if each.source == 1] == [1, 0]
    assert len(asked) == 4
