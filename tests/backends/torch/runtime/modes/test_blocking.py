"""The one order of tasks and messages: with it, ranks that wait for every message come to their
end.
"""

from __future__ import annotations

from collections import deque

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopipe.backends.torch.runtime.modes.blocking import (
    Event,
    Message,
    StageChannel,
    global_event_order,
)
from autopipe.ir.program import Program
from autopipe.ir.schedule import Phase, Task
from autopipe.passes.lower.lower import lower
from tests.distributed.support.drawing import Case, cases
from tests.distributed.support.drawing_sizes import unequal_cases


def ends_of(program: Program) -> list[StageChannel]:
    return [
        StageChannel(
            piece.channel,
            piece.source_stage,
            piece.source_rank,
            piece.target_stage,
            piece.target_rank,
            piece.needs_gradient,
            piece.source_slice,
            piece.target_slice,
        )
        for rank in program.ranks
        for stage in rank.stages
        for piece in stage.sends
    ]


def meet(turns: list[list[Event]]) -> list[Event]:
    """Run the ranks, each message and each group's task at once on all that have it; the order of
    events.
    """
    rest = [deque(each) for each in turns]
    members: dict[Event, set[int]] = {}
    for rank, each in enumerate(turns):
        for turn in each:
            members.setdefault(turn, set()).add(rank)
    events = []
    moved = True
    while moved:
        moved = False
        for queue in rest:
            while queue and all(
                rest[rank] and rest[rank][0] == queue[0] for rank in members[queue[0]]
            ):
                turn = queue[0]
                for rank in members[turn]:
                    rest[rank].popleft()
                events.append(turn)
                moved = True
    assert not any(rest), "ranks wait for ever"
    return events


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(case=st.booleans().flatmap(lambda train: st.one_of(cases(train), unequal_cases(train))))
def test_ranks_that_wait_for_every_message_come_to_their_end(case: Case) -> None:
    program = lower(case.graph, case.placement, case.schedule, case.loss)
    ends = ends_of(program)
    turns = global_event_order(case.schedule.tasks, ends)
    assert [tuple(turn for turn in each if isinstance(turn, Task)) for each in turns] == list(
        case.schedule.tasks
    )
    place = {event: index for index, event in enumerate(meet(turns))}
    remote = [end for end in ends if end.source_rank != end.target_rank]
    tasks = [task for task in place if isinstance(task, Task)]
    forwards = [
        _carrying(end, False, task) for end in remote for task in tasks if _gives(task, end)
    ]
    backwards = [
        _carrying(end, True, task) for end in remote for task in tasks if _gives_back(task, end)
    ]
    assert {event for event in place if isinstance(event, Message)} == {*forwards, *backwards}
    for message in (*forwards, *backwards):
        end = message.end
        gradient = message.gradient
        source = end.source_stage
        target = end.target_stage
        ends_of_it = (source, end.source_slice), (target, end.target_slice)
        phases = (Phase.BACKWARD, Phase.INPUT_GRADIENT) if gradient else (Phase.FORWARD,)
        ran, runs = (
            next(
                place[task]
                for phase in phases
                if (task := Task(stage, phase, message.number * turn.of + turn.index)) in place
            )
            for stage, turn in (reversed(ends_of_it) if gradient else ends_of_it)
        )
        assert ran < place[message] < runs


def _gives(task: Task, end: StageChannel) -> bool:
    turn = end.source_slice
    return (
        task.phase is Phase.FORWARD
        and task.stage == end.source_stage
        and task.micro_batch % turn.of == turn.index
    )


def _gives_back(task: Task, end: StageChannel) -> bool:
    turn = end.target_slice
    backward = (
        task.phase in (Phase.BACKWARD, Phase.INPUT_GRADIENT)
        and task.micro_batch % turn.of == turn.index
    )
    return end.gradient and backward and task.stage == end.target_stage


def _carrying(end: StageChannel, gradient: bool, task: Task) -> Message:
    return Message(
        end, gradient, task.micro_batch // (end.target_slice if gradient else end.source_slice).of
    )


def test_a_message_stands_right_behind_its_task() -> None:
    """Two forwards on the first rank: the second rank takes each message as it is made, before its
    next task.
    """
    end = StageChannel(0, 0, 0, 1, 1, True)
    lists = [
        [Task.parse(word) for word in row.split()] for row in ("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")
    ]
    first, second = global_event_order(lists, [end])
    assert [_word(turn) for turn in first] == ["0F0", ">0", "0F1", ">1", "<0", "0B0", "<1", "0B1"]
    assert [_word(turn) for turn in second] == [">0", "1F0", ">1", "1F1", "1B0", "<0", "1B1", "<1"]


def _word(turn: Event) -> str:
    return (
        f"{'<' if turn.gradient else '>'}{turn.number}" if isinstance(turn, Message) else str(turn)
    )
