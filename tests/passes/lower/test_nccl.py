"""Programs by NCCL's and CUDA's rules: nothing waits for ever, whatever the schedule, and what
would is refused.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial, reduce
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopipe.ir.errors import CodegenError
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.program import Instruction, Opcode, Program
from autopipe.ir.schedule import Phase, Schedule, Task
from autopipe.passes.lower.deadlock_check import prove_no_deadlock
from autopipe.passes.lower.hardware_queues import check_hardware_queues
from autopipe.passes.lower.lower import fold_into_sections, lower
from autopipe.passes.registry import scheduler_names
from tests.distributed.support.builder import Builder, mlp
from tests.distributed.support.drawing import Case, cases
from tests.distributed.support.drawing_sizes import unequal_cases
from tests.distributed.support.shapes import line, problem_of, scheduled, tied_chain
from tests.passes.lower.machine import unrolled
from tests.passes.lower.nccl import Device, communicators, stopped

QUEUES = (8, 32)
"""CUDA_DEVICE_MAX_CONNECTIONS as CUDA has it, and as launched ranks have it."""


RANKS = (2, 4, 8)
SCHEDULES = [
    # Tessel searches for 10 seconds on 8 ranks.
    pytest.param(name, ranks, marks=[pytest.mark.sweep] if (name, ranks) == ("tessel", 8) else [])
    for name in scheduler_names()
    if name != "csv"  # csv follows a file
    for ranks in RANKS
]


@pytest.mark.parametrize(("name", "ranks"), SCHEDULES)
def test_every_schedule_ends(name: str, ranks: int) -> None:
    graph, loss = tied_chain(4 * ranks)
    for micro_batches in (ranks, 2 * ranks, 2 * ranks + 1):
        found = scheduled(name, problem_of(graph, loss, micro_batches, ranks))
        if found is None:
            assert micro_batches != 2 * ranks, f"{name} takes none of the placements"
            continue
        program = lower(graph, *found, loss)
        for queues in QUEUES:
            assert not stopped(program, queues)


def check(case: Case) -> None:
    """Streams and queues end as the proof says, also where queues are so few that some programs
    stop.
    """
    program = lower(case.graph, case.placement, case.schedule, case.loss)
    traces = prove_no_deadlock(program)
    assert not stopped(program, 32)
    for queues in (1, 2, *QUEUES):
        if stopped(program, queues):
            assert max(len(Device(program, rank).streams) for rank in program.ranks) > queues
            with pytest.raises(CodegenError, match="would never start"):
                check_hardware_queues(program, traces, queues)
        else:
            check_hardware_queues(program, traces, queues)


DRAWN = st.booleans().flatmap(lambda train: st.one_of(cases(train), unequal_cases(train)))


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(case=DRAWN)
def test_random_placements_end(case: Case) -> None:
    check(case)


@pytest.mark.sweep
@settings(
    max_examples=1000,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(case=DRAWN)
def test_many_random_placements_end(case: Case) -> None:
    check(case)


def both_ways() -> Program:
    """Two chains in opposite directions on two ranks, so that each sends the other values and
    gradients.
    """
    graph, loss = tied_chain(4)
    placement = Placement(line(graph, (0, 1)) + line(graph, (1, 0), 1))
    found = scheduled("chimera", problem_of(graph, loss, 4, 2))
    assert found is not None
    assert found[0] == placement
    return lower(graph, *found, loss)


def test_ranks_are_joined_by_one_communicator_each_way() -> None:
    assert communicators(both_ways()) == {("pair", 0, 1), ("pair", 1, 0)}


def _receives(flat: list[Instruction]) -> list[int]:
    return [
        place
        for place, each in enumerate(flat)
        if each.opcode in (Opcode.RECV, Opcode.RECV_GRADIENT)
    ]


def test_receives_of_two_channels_in_another_order_are_refused() -> None:
    """Also where each channel's own order still holds, which is all that gloo asks for."""
    program = both_ways()
    refusals = []
    for rank, code in enumerate(program.ranks):
        flat = unrolled(code)
        places = [
            place
            for place, each in enumerate(flat)
            if each.opcode in (Opcode.RECV, Opcode.RECV_GRADIENT)
        ]
        for first, second in pairwise(places):
            one = flat[first]
            other = flat[second]
            if (one.opcode, one.stage) != (other.opcode, other.stage):
                swapped = [
                    {first: other, second: one}.get(place, each) for place, each in enumerate(flat)
                ]
                with pytest.raises(CodegenError) as caught:
                    prove_no_deadlock(_with(program, rank, swapped))
                refusals.append(str(caught.value))
    assert any("to rank 1, which receives" in each for each in refusals)


def _with(program: Program, rank: int, flat: list[Instruction]) -> Program:
    warm_up, repetend, cool_down = fold_into_sections(flat)
    code = replace(program.ranks[rank], warm_up=warm_up, repetend=repetend, cool_down=cool_down)
    return replace(
        program, ranks=tuple(code if each.rank == rank else each for each in program.ranks)
    )


def test_parts_are_asked_for_in_the_order_in_which_they_are_sent() -> None:
    """One micro-batch of the second stage takes two of the first, which sends the second halves
    late.
    """
    graph, loss = mlp(1)
    placement = Placement((Stage((0,), (0,), 2), Stage((1, 2, 3), (1,), 4)))
    forwards = [Task(0, Phase.FORWARD, index) for index in (0, 2, 1, 3)]
    first = (*forwards, *(Task(0, Phase.BACKWARD, index) for index in range(4)))
    second = tuple(
        Task(1, phase, index) for phase in (Phase.FORWARD, Phase.BACKWARD) for index in range(2)
    )
    program = lower(graph, placement, Schedule(2, (first, second)), loss)
    assert communicators(program) == {("pair", 0, 1), ("pair", 1, 0)}
    asked = [each for each in unrolled(program.ranks[1]) if each.opcode is Opcode.RECV]
    assert asked == [
        Instruction(Opcode.RECV, 1, micro_batch, part=part)
        for part in (0, 1)
        for micro_batch in (0, 1)
    ]
    for queues in QUEUES:
        assert not stopped(program, queues)
    together = [
        replace(each, part=None)
        for each in unrolled(program.ranks[1])
        if each.opcode is not Opcode.RECV or each.part == 0
    ]
    with pytest.raises(
        CodegenError,
        match="rank 0 sends 0F2 on channel 0 to rank 1, which receives 0F1 on channel 1 at this position",
    ):
        prove_no_deadlock(_with(program, 1, together))


def test_a_rank_that_too_many_others_send_to_is_refused() -> None:
    builder = Builder()
    given = builder.input((4, 4))
    products = [builder.node("MatMul", given, builder.parameter((4, 4))) for _ in range(65)]
    loss = builder.mean_square(reduce(partial(builder.node, "Add"), products))
    graph = builder.graph(loss)
    last = tuple(range(65, len(graph.nodes)))
    placement = Placement(
        (*(Stage((rank,), (rank,), 4) for rank in range(65)), Stage(last, (65,), 4))
    )
    schedule = Schedule(
        1,
        tuple((Task(rank, Phase.FORWARD, 0), Task(rank, Phase.BACKWARD, 0)) for rank in range(66)),
    )
    with pytest.raises(CodegenError, match="rank 65: 65 ranks send to the rank"):
        lower(graph, placement, schedule, loss)
