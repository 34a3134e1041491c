"""A program with many micro-batches has no more lines than one with few, because repetitions are
loops.
"""

from __future__ import annotations

import pytest

from autopipe.ir.program import Instruction, Loop, Opcode
from autopipe.ir.schedule import Phase, StageGraph
from autopipe.ir.timeline import Message, Prediction, StagePrediction
from autopipe.passes.lower.lower import fold_into_sections
from autopipe.passes.schedule.simulate import simulate
from autopipe.passes.schedule.tessel.model import SearchOptions
from autopipe.passes.schedule.tessel.search import search
from autopipe.passes.schedule.tessel.stage_blocks import (
    busiest_seconds,
    stage_blocks,
    stage_schedule,
)

VERBS = {
    Phase.FORWARD: Opcode.FORWARD,
    Phase.BACKWARD: Opcode.BACKWARD,
    Phase.INPUT_GRADIENT: Opcode.BACKWARD_INPUT,
    Phase.WEIGHT_GRADIENT: Opcode.BACKWARD_WEIGHT,
}


def graph_of(kind: str, devices: int) -> StageGraph:
    """Return a chain (v), a chain that returns over the same devices (vv), two opposite chains (x),
    or a chain after a stage on all devices (m).
    """
    chain = tuple((stage, stage + 1) for stage in range(devices - 1))
    groups = tuple((stage,) for stage in range(devices))
    if kind == "vv":
        return StageGraph(
            devices,
            groups + groups[::-1],
            tuple((each, each + 1) for each in range(2 * devices - 1)),
        )
    if kind == "x":
        mirrored = tuple((devices + source, devices + target) for source, target in chain)
        return StageGraph(
            devices, groups + groups[::-1], chain + mirrored, (0,) * devices + (1,) * devices
        )
    if kind == "m":
        return StageGraph(
            devices,
            (tuple(range(devices)), *groups),
            tuple((each, each + 1) for each in range(devices)),
        )
    return StageGraph(devices, groups, chain)


def searched(kind: str, devices: int, micro_batches: int, split: bool):
    graph = graph_of(kind, devices)
    free = tuple(
        Message(a, b, graph.stage_devices[a][0], graph.stage_devices[b][0], 0, 0, 0.0, 0.0)
        for a, b in graph.edges
    )
    prediction = Prediction((StagePrediction(1.0, 2.0, 1.0, 1.0),) * len(graph.stage_devices), free)
    blocks = stage_blocks(
        graph, prediction, True, busiest_seconds(graph, prediction) / 12, split=split
    )
    options = SearchOptions(2.0, patience=20.0, unrolled=60)  # The value that the scheduler uses.
    found = search(blocks.graph, -(-micro_batches // graph.pipeline_count), options)
    assert found.optimal
    return graph, prediction, stage_schedule(blocks, found, graph, micro_batches)


def lines_of(schedule) -> list[int]:
    """Return the lines of each rank's step, with the lines of loops counted once."""

    def count(section) -> int:
        return sum(1 + count(each.body) if isinstance(each, Loop) else 1 for each in section)

    flat = (
        [Instruction(VERBS[each.phase], each.stage, each.micro_batch) for each in order]
        for order in schedule.tasks
    )
    return [sum(count(section) for section in fold_into_sections(each)) for each in flat]


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("kind", ["v", "vv", "x", "m"])
def test_lines_do_not_grow_with_micro_batches(kind, split):
    # 64 and more micro-batches: for 16 micro-batches of an X with split backwards, the list
    # schedule is shorter and has even fewer lines.
    few, many = (lines_of(searched(kind, 4, count, split)[2]) for count in (64, 512))
    assert sum(many) <= sum(few)
    assert max(many) < 80, (
        "warm-up and cool-down have the length of a few repetitions for any number of micro-batches"
    )


def test_32_devices_with_512_micro_batches():
    few, many = (searched("v", 32, count, split=True) for count in (32, 512))
    assert sum(lines_of(many[2])) <= sum(lines_of(few[2]))
    graph, prediction, schedule = many
    step = simulate(schedule, graph.stage_devices, prediction)
    assert len(step.spans) == 32 * 512 * 3
    least = 3 * 512 + 31  # No bubble except for the critical path of the first micro-batch.
    assert least <= step.end < 1.02 * least
