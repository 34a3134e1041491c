"""List schedules: valid for any blocks, and without idle time if backwards are split and devices
are equally loaded.
"""

from __future__ import annotations

import pytest
from hypothesis import given, strategies

from autopipe.ir.block_schedule import Block, BlockGraph, BlockSchedule
from autopipe.passes.schedule.tessel.search import best_list_schedule, list_schedule, search
from tests.passes.schedule.tessel.random_blocks import block_graphs
from tests.passes.schedule.tessel.replay import faults


def split_chain(devices: int, times: tuple[int, int, int], chunks: int = 1) -> BlockGraph:
    """Return the F, I and W of stages that visit the devices in ascending and descending order. F
    uses 1 of memory, W frees it.
    """
    forward, inputs, weights = times
    stages = devices * chunks
    places = [
        stage % devices if stage // devices % 2 == 0 else devices - 1 - stage % devices
        for stage in range(stages)
    ]
    blocks = [
        Block(f"F{stage}", (places[stage],), forward, 1, (stage - 1,) if stage else ())
        for stage in range(stages)
    ]
    last = stages - 1
    for stage in reversed(range(stages)):
        blocks.append(Block(f"I{stage}", (places[stage],), inputs, 0, (last,)))
        last = len(blocks) - 1
        blocks.append(Block(f"W{stage}", (places[stage],), weights, -1, (last,)))
    return BlockGraph(devices, tuple(blocks), (None,) * devices)


@given(strategies.data(), strategies.integers(1, 6), strategies.integers(1, 4))
def test_list_schedules_are_valid(
    data: strategies.DataObject, micro_batches: int, in_flight: int
) -> None:
    graph = data.draw(block_graphs(blocks=7, devices=3, times=(1, 5)))
    starts = list_schedule(graph, micro_batches, in_flight)
    if starts is not None:
        assert not faults(BlockSchedule(graph, starts), micro_batches)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(("devices", "micro_batches"), [(4, 16), (4, 64), (8, 32)])
def test_equal_halves_leave_no_device_idle(devices: int, micro_batches: int, chunks: int) -> None:
    graph = split_chain(devices, (10, 10, 10), chunks)
    starts = best_list_schedule(graph, micro_batches)
    assert starts is not None
    schedule = BlockSchedule(graph, starts)
    assert not faults(schedule, micro_batches)
    assert schedule.makespan == (devices - 1) * 10 + micro_batches * 30 * chunks


def test_the_search_uses_a_shorter_list_schedule() -> None:
    graph = split_chain(4, (10, 12, 9))
    found = search(graph, 64)
    assert (found.period, found.optimal, found.makespan) == (31, True, 3 * 10 + 64 * 31)
    assert max(found.peak_memory) <= 6, "1F1B has 4, ZB-H2 7"
