"""Task graphs: what they say is waited for is what the runtime waits for, and memory is the
simulator's.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopipe.ir.errors import CodegenError
from autopipe.ir.program import Instruction, Program
from autopipe.ir.timeline import Prediction, StagePrediction
from autopipe.passes.lower.deadlock_check import prove_no_deadlock
from autopipe.passes.lower.lower import fold_into_sections, lower
from autopipe.passes.lower.task_graph import TaskGraph, TaskSource
from autopipe.passes.lower.traffic import communication_bytes
from autopipe.passes.schedule.simulate import simulate
from tests.distributed.support.drawing import Case, cases
from tests.passes.lower.machine import unrolled

COMPUTES = ("forward", "backward", "backward_input", "backward_weight")
INSTRUCTIONS = (*COMPUTES, "send", "receive")
SOME = settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
Place = tuple[int, int]
"""Rank, and place among the tasks of its graph."""


def lowered(
    case: Case, costs: tuple[StagePrediction, ...] | None = None
) -> tuple[Program, list[TaskGraph]]:
    """The program of a case and the task graphs of its ranks."""
    program = lower(case.graph, case.placement, case.schedule, case.loss)
    costs = costs or (StagePrediction(1.0),) * len(program.stages)
    source = TaskSource(program, case.graph, case.placement, costs)
    return program, [source.graph(rank) for rank in range(program.world_size)]


class Orders:
    """The orders of all ranks' tasks in which nothing runs before what the graphs say that it waits
    for.

    Besides, messages of a channel are sent and asked for in one order, and a group comes to its
    tasks together: its ranks' places of one task are one.
    """

    def __init__(self, program: Program, graphs: list[TaskGraph]) -> None:
        self.graphs = graphs
        self.together: dict[Place, Place] = {}
        self.before: dict[Place, set[Place]] = defaultdict(set)
        named = {
            (graph.rank, node.name): (graph.rank, place)
            for graph in graphs
            for place, node in enumerate(graph.nodes)
            if node.kind in INSTRUCTIONS
        }
        for graph in graphs:
            last: dict[tuple[str, int, bool], Place] = {}
            for place, node in enumerate(graph.nodes):
                if node.kind not in INSTRUCTIONS:
                    continue
                here = graph.rank, place
                if node.kind in COMPUTES:
                    assert node.stage is not None
                    self.together[here] = named[program.stages[node.stage].devices[0], node.name]
                self.before[here] |= {(graph.rank, each) for each in node.after}
                for asked in node.after:
                    receive = graph.nodes[asked]
                    if receive.kind == "receive":
                        self.before[here] |= {
                            named[each.peer, each.task] for each in receive.messages
                        }
                for each in node.messages:
                    lane = (node.kind, each.channel, "_B" in node.name)
                    if lane in last:
                        self.before[here].add(last[lane])
                    last[lane] = here

    def draw(self, random: Random) -> list[list[int]]:
        """One of them, by rank the places of its tasks."""
        merged: dict[Place, list[Place]] = defaultdict(list)
        for place in self.before:
            merged[self.together.get(place, place)].append(place)
        waits = {
            each: {
                self.together.get(other, other) for place in places for other in self.before[place]
            }
            for each, places in merged.items()
        }
        found: list[list[int]] = [[] for _ in self.graphs]
        done: set[Place] = set()
        while waits:
            ready = [each for each, needs in waits.items() if needs <= done]
            chosen = random.choice(ready)
            del waits[chosen]
            done.add(chosen)
            for rank, own in merged[chosen]:
                found[rank].append(own)
        return found


def reordered(program: Program, graphs: list[TaskGraph], orders: list[list[int]]) -> Program:
    """The program with its ranks' instructions in other orders, given by the places of their
    tasks.
    """
    ranks = []
    for code, graph, order in zip(program.ranks, graphs, orders, strict=True):
        places = [place for place, node in enumerate(graph.nodes) if node.kind in INSTRUCTIONS]
        by_place: dict[int, Instruction] = dict(zip(places, unrolled(code), strict=True))
        warm_up, repetend, cool_down = fold_into_sections([by_place[place] for place in order])
        ranks.append(replace(code, warm_up=warm_up, repetend=repetend, cool_down=cool_down))
    return replace(program, ranks=tuple(ranks))


def own_order(graph: TaskGraph) -> list[int]:
    return [place for place, node in enumerate(graph.nodes) if node.kind in INSTRUCTIONS]


@SOME
@given(case=st.booleans().flatmap(cases), random=st.randoms(use_true_random=False))
def test_any_order_that_keeps_the_dependencies_runs(case: Case, random: Random) -> None:
    program, graphs = lowered(case)
    orders = Orders(program, graphs).draw(random)
    try:
        prove_no_deadlock(reordered(program, graphs, orders))
    except CodegenError as error:
        assert "would reduce the gradients" in error.message, (
            "but for the order of sums, which no dependency fixes"
        )


@SOME
@given(case=st.booleans().flatmap(cases), data=st.data())
def test_no_dependency_can_be_broken(case: Case, data: st.DataObject) -> None:
    program, graphs = lowered(case)
    edges = [
        (graph.rank, before, place)
        for graph in graphs
        for place, node in enumerate(graph.nodes)
        if node.kind in INSTRUCTIONS
        for before in node.after
    ]
    if not edges:
        return
    rank, before, after = data.draw(st.sampled_from(edges))
    orders = [own_order(graph) for graph in graphs]
    orders[rank].remove(after)
    orders[rank].insert(orders[rank].index(before), after)
    with pytest.raises(CodegenError):
        prove_no_deadlock(reordered(program, graphs, orders))


@SOME
@given(case=st.booleans().flatmap(cases))
def test_every_send_has_its_receive(case: Case) -> None:
    _, graphs = lowered(case)
    ends: dict[str, list[tuple[object, ...]]] = {"send": [], "receive": []}
    for graph in graphs:
        names = [node.name for node in graph.nodes if node.kind in INSTRUCTIONS]
        assert len(set(names)) == len(names)
        for node in graph.nodes:
            for each in node.messages:
                here = (graph.rank, node.name)
                there = (each.peer, each.task)
                way = (here, there) if node.kind == "send" else (there, here)
                ends[node.kind].append((*way, each.channel, each.bytes, each.tensor))
    assert sorted(ends["send"]) == sorted(ends["receive"])
    assert len(set(ends["send"])) == len(ends["send"])


@SOME
@given(case=st.booleans().flatmap(cases), random=st.randoms(use_true_random=False))
def test_memory_is_what_the_simulator_says(case: Case, random: Random) -> None:
    costs = tuple(
        StagePrediction(1.0, 1.0, 1.0, 1.0, static_bytes=random.randrange(99), kept_bytes=random.randrange(99),
                        weight_kept_bytes=random.randrange(99), transient_bytes=random.randrange(99))
        for _ in case.placement.stages
    )  # fmt: skip
    _, graphs = lowered(case, costs)
    timeline = simulate(
        case.schedule, tuple(stage.devices for stage in case.placement.stages), Prediction(costs)
    )
    for graph, static, peak in zip(
        graphs, timeline.static_memory, timeline.peak_memory, strict=True
    ):
        assert (graph.static_bytes, graph.peak_bytes) == (static, peak)
        assert not graph.nodes or graph.memory_bytes[-1] == static or case.loss is None
        freed = sum(
            node.bytes
            for node in graph.nodes
            if node.kind == "free" and node.what.startswith("tensors saved")
        )
        if case.loss is not None and not any(node.kind == "backward_input" for node in graph.nodes):
            taken = (
                costs[node.stage or 0].kept_bytes for node in graph.nodes if node.kind == "forward"
            )
            assert freed == sum(taken)


@SOME
@given(case=st.booleans().flatmap(cases))
def test_loops_stand_for_all_their_times(case: Case) -> None:
    program, graphs = lowered(case)
    for graph, code in zip(graphs, program.ranks, strict=True):
        assert sum((each.end - each.start) * each.count for each in graph.loops) == len(graph.nodes)
        assert len(own_order(graph)) == len(unrolled(code))
        assert all(
            place > before for place, node in enumerate(graph.nodes) for before in node.after
        )


@SOME
@given(case=cases(True))
def test_shares_are_reduced_updated_and_gathered(case: Case) -> None:
    """With the optimizer's state in shares: the bytes that are predicted move, and each number is
    updated once.
    """
    program, _ = lowered(case)
    program = replace(program, shard=True)
    source = TaskSource(
        program, case.graph, case.placement, (StagePrediction(1.0),) * len(program.stages)
    )
    graphs = [source.graph(rank) for rank in range(program.world_size)]
    size: Counter[str] = Counter()
    for graph in graphs:
        for place, node in enumerate(graph.nodes):
            size[node.kind] += node.bytes
            if node.kind == "gather":
                assert [graph.nodes[before].kind for before in node.after] == [
                    "update"
                ] and place > node.after[0]
    assert case.loss is not None
    count = case.schedule.micro_batches
    moved = communication_bytes(
        case.graph, case.placement, count, program.world_size, case.loss, shard=True
    )
    assert (size["reduce"], size["gather"]) == (moved["gradient"], moved["parameter"])
    held = {(shard.parameter, shard.box) for code in program.ranks for shard in code.shards}
    trained = (
        box.elements * program.parameters[index].value.dtype.itemsize
        for index, box in held
        if program.parameters[index].trainable and program.parameters[index].value.dtype.is_floating
    )
    assert size["update"] == sum(trained)
