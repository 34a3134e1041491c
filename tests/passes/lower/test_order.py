"""The ranks' instructions, followed one by one: nobody waits in a circle, and every message meets its receive."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopipe.ir.placement import Placement, Stage
from autopipe.ir.program import Collective, Instruction, Loop, Piece, Program, RankCode, Section, StageOnRank, Verb
from autopipe.ir.schedule import Phase, Schedule, Task
from autopipe.ir.stage_graph import StageGraph
from autopipe.passes.lower import lower
from autopipe.passes.lower.order import sections
from tests.distributed.builder import Builder, mlp
from tests.distributed.drawing import Case, cases


def expanded(*parts: Section) -> list[Instruction]:
    """Instructions with loops unrolled."""
    found: list[Instruction] = []
    for item in (each for part in parts for each in part):
        if isinstance(item, Loop):
            for turn in range(item.count):
                found += [each.shifted(turn * item.stride) for each in item.body]
        else:
            found.append(item)
    return found


def unrolled(rank: RankCode) -> list[Instruction]:
    return expanded(rank.warm_up, rank.repetend, rank.cool_down)


class Machine:
    """All ranks of a program, without numbers: sends return at once, receives match sends of their channel in turn."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.lists = [unrolled(rank) for rank in program.ranks]
        self.wires = {(rank.rank, stage.stage): stage for rank in program.ranks for stage in rank.stages}
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
        return self.lists[rank][self.position[rank]] if self.position[rank] < len(self.lists[rank]) else None

    def run(self) -> None:
        moved = True
        while moved:
            moved = False
            for rank in range(self.program.world_size):
                while (instruction := self.head(rank)) is not None and self.can_run(rank, instruction):
                    for member in self.together(instruction, rank):
                        self.step(member, instruction)
                    moved = True
        stuck = {rank: str(self.head(rank)) for rank in range(self.program.world_size) if self.head(rank) is not None}
        assert not stuck, f"wait for ever: {stuck}"
        assert self.sent == self.posted, "messages without receives, or out of turn"

    def together(self, instruction: Instruction, rank: int) -> tuple[int, ...]:
        """A computation with exchanges runs on the whole group at once."""
        computes = instruction.verb in (Verb.FORWARD, Verb.BACKWARD)
        return self.exchanging.get(instruction.stage, (rank,)) if computes else (rank,)

    def can_run(self, rank: int, instruction: Instruction) -> bool:
        group = self.together(instruction, rank)
        return all(self.head(member) == instruction and self.is_ready(member, instruction) for member in group)

    def is_ready(self, rank: int, instruction: Instruction) -> bool:
        if instruction.verb not in (Verb.FORWARD, Verb.BACKWARD):
            return True
        backward = instruction.verb is Verb.BACKWARD
        return all(
            self.has_arrived(rank, piece, instruction.micro_batch, backward)
            for piece in self.incoming(self.wires[rank, instruction.stage], backward)
        )

    @staticmethod
    def incoming(wired: StageOnRank, backward: bool) -> list[Piece]:
        return [piece for piece in wired.sends if piece.needs_gradient] if backward else list(wired.receives)

    @staticmethod
    def outgoing(wired: StageOnRank, backward: bool) -> list[Piece]:
        return [piece for piece in wired.receives if piece.needs_gradient] if backward else list(wired.sends)

    def has_arrived(self, rank: int, piece: Piece, micro_batch: int, backward: bool) -> bool:
        if piece.source_rank == piece.target_rank:
            other = piece.target_stage if backward else piece.source_stage
            verb = Verb.BACKWARD if backward else Verb.FORWARD
            return (rank, Instruction(verb, other, micro_batch)) in self.done
        channel = (piece.channel, backward)
        assert micro_batch in self.posted[channel], f"rank {rank} waits for what it never asked for"
        place = self.posted[channel].index(micro_batch)
        if place >= len(self.sent[channel]):
            return False
        assert self.sent[channel][place] == micro_batch, "another micro-batch arrives"
        return True

    def step(self, rank: int, instruction: Instruction) -> None:
        wired = self.wires[rank, instruction.stage]
        verb, micro_batch = instruction.verb, instruction.micro_batch
        backward = verb in (Verb.RECEIVE_GRADIENT, Verb.SEND_GRADIENT, Verb.BACKWARD)
        if verb in (Verb.RECEIVE, Verb.RECEIVE_GRADIENT):
            book = self.posted
            pieces = [
                piece
                for piece in self.incoming(wired, backward)
                if instruction.source in (None, piece.target_stage if backward else piece.source_stage)
            ]
        else:
            book, pieces = self.sent, self.outgoing(wired, backward)
        if verb in (Verb.SEND, Verb.SEND_GRADIENT):
            before = Verb.BACKWARD if backward else Verb.FORWARD
            assert (rank, Instruction(before, instruction.stage, micro_batch)) in self.done
        if verb not in (Verb.FORWARD, Verb.BACKWARD):
            for piece in pieces:
                if piece.source_rank != piece.target_rank:
                    book[piece.channel, backward].append(micro_batch)
        self.done.add((rank, instruction))
        self.position[rank] += 1


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=st.booleans().flatmap(cases))
def test_no_rank_waits_for_ever(case: Case) -> None:
    program = lower(case.graph, case.placement, case.schedule, case.loss)
    for rank in program.ranks:
        verbs = {Phase.FORWARD: Verb.FORWARD, Phase.BACKWARD: Verb.BACKWARD}
        tasks = [
            Instruction(verbs[task.phase], task.stage, task.micro_batch) for task in case.schedule.tasks[rank.rank]
        ]
        assert [each for each in unrolled(rank) if each.verb in verbs.values()] == tasks
    Machine(program).run()


INSTRUCTIONS = st.builds(Instruction, st.sampled_from(list(Verb)), st.integers(0, 2), st.integers(0, 3))
LOOPS = st.builds(Loop, st.lists(INSTRUCTIONS, min_size=1, max_size=4).map(tuple), st.integers(1, 6), st.integers(1, 2))


@given(st.lists(st.one_of(INSTRUCTIONS, LOOPS), max_size=6))
def test_loops_unroll_to_the_list_they_were_made_of(parts: list[Instruction | Loop]) -> None:
    flat = expanded(tuple(parts))
    assert expanded(*sections(flat)) == flat


@given(st.builds(Loop, st.lists(INSTRUCTIONS, min_size=1, max_size=4).map(tuple), st.integers(2, 9)))
def test_what_repeats_becomes_one_loop(loop: Loop) -> None:
    warm_up, repetend, cool_down = sections(expanded((loop,)))
    assert len(repetend) == 1
    assert isinstance(repetend[0], Loop)
    assert len(repetend[0].body) <= len(loop.body)
    assert repetend[0].count * len(repetend[0].body) + len(warm_up) + len(cool_down) <= loop.count * len(loop.body)


def test_receives_follow_the_order_in_which_the_other_stage_sends() -> None:
    graph, loss = mlp(1)
    placement = Placement((Stage((0,), (0,), 4), Stage((1, 2, 3), (1,), 4)))
    orders = [
        tuple(Task(stage, phase, index) for phase in (Phase.FORWARD, Phase.BACKWARD) for index in order)
        for stage, order in enumerate([(0, 1), (1, 0)])
    ]
    schedule = Schedule(2, tuple(orders))
    schedule.verify(StageGraph(2, ((0,), (1,)), ((0, 1),)), True)
    program = lower(graph, placement, schedule, loss)
    Machine(program).run()
    asked = [[each for each in unrolled(rank) if each.verb.value.startswith("receive")] for rank in program.ranks]
    assert asked[1] == [Instruction(Verb.RECEIVE, 1, 0), Instruction(Verb.RECEIVE, 1, 1)]
    assert asked[0] == [Instruction(Verb.RECEIVE_GRADIENT, 0, 1), Instruction(Verb.RECEIVE_GRADIENT, 0, 0)]


def test_stages_that_send_in_different_orders_are_asked_one_by_one() -> None:
    builder = Builder()
    given = builder.input((4, 4))
    left = builder.node("MatMul", given, builder.parameter((4, 4)))
    right = builder.node("MatMul", given, builder.parameter((4, 4)))
    loss = builder.mean_square(builder.node("Mul", left, right))
    graph = builder.graph(loss)
    placement = Placement((Stage((0,), (0,), 4), Stage((1,), (1,), 4), Stage((2, 3, 4), (2,), 4)))
    orders = [
        tuple(Task(stage, phase, index) for phase in (Phase.FORWARD, Phase.BACKWARD) for index in order)
        for stage, order in enumerate([(0, 1), (1, 0), (0, 1)])
    ]
    program = lower(graph, placement, Schedule(2, tuple(orders)), loss)
    Machine(program).run()
    asked = [each for each in unrolled(program.ranks[2]) if each.verb is Verb.RECEIVE]
    assert [(each.source, each.micro_batch) for each in asked] == [(0, 0), (1, 1), (1, 0), (0, 1)]
