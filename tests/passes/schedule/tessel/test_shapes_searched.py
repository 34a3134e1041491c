"""The five shapes with their known optimal periods, and placements beyond them."""

from __future__ import annotations

import pytest
from replay import faults

from autopipe.ir.block_schedule import Block, BlockGraph
from autopipe.passes.schedule.published.blocks import SHAPES, shape_blocks
from autopipe.passes.schedule.tessel.model import Budget, SearchOptions, steady_state_peak
from autopipe.passes.schedule.tessel.periodic import minimize_memory
from autopipe.passes.schedule.tessel.search import search, shortest_steady_state
from autopipe.passes.solvers.cp_sat import Limit

MEMORY = {"v": 4, "x": 4, "m": 6, "nn": 6, "k": 6}
"""Memory limit of each shape on 4 devices."""
PERIOD = {"v": 4, "x": 8, "m": 6, "nn": 8, "k": 6}
MAKESPAN = {
    6: {"v": 36, "x": 54, "m": 48, "nn": 60, "k": 40},
    32: {"v": 140, "x": 265, "m": 204, "nn": 268, "k": 196},
    128: {"v": 524, "x": 1033, "m": 780, "nn": 1036, "k": 772},
}


@pytest.mark.parametrize("micro_batches", [6, 32, 128])
@pytest.mark.parametrize("name", SHAPES)
def test_four_devices_reach_the_known_period_in_training(name: str, micro_batches: int) -> None:
    schedule = search(
        shape_blocks(name, 4, True, MEMORY[name]),
        micro_batches,
        SearchOptions(time_limit=5.0, patience=6.0),
    )
    assert faults(schedule, micro_batches) == []
    assert schedule.makespan <= MAKESPAN[micro_batches][name]
    if schedule.repetend:
        assert schedule.period == schedule.lower_bound == PERIOD[name]
        assert schedule.optimal


@pytest.mark.parametrize("name", SHAPES)
def test_four_devices_reach_the_known_period_in_inference(name: str) -> None:
    schedule = search(shape_blocks(name, 4, train=False), 16)
    assert (
        schedule.period == schedule.lower_bound == {"v": 1, "x": 2, "m": 2, "nn": 3, "k": 2}[name]
    )
    assert faults(schedule, 16) == []


@pytest.mark.parametrize("devices", [8, 16, 32])
@pytest.mark.parametrize("name", SHAPES)
def test_the_period_is_proven_on_more_devices(name: str, devices: int) -> None:
    graph = shape_blocks(name, devices, True, MEMORY[name] * devices // 4)
    steady, bound = shortest_steady_state(graph, 1, Budget(SearchOptions()))
    assert steady.period == bound == PERIOD[name]


@pytest.mark.parametrize(("name", "least"), [("v", 4), ("x", 4), ("m", 5), ("nn", 6), ("k", 3)])
def test_the_minimum_memory_at_the_minimum_period(name: str, least: int) -> None:
    graph = shape_blocks(name, 4, True)
    found = minimize_memory(
        graph, shortest_steady_state(graph, 1, Budget(SearchOptions()))[0], Limit(60, 5)
    )
    assert found.cyclic is not None
    assert max(steady_state_peak(graph, found.cyclic, device) for device in range(4)) == least


@pytest.mark.parametrize("devices", [4, 8])
def test_two_stages_per_device_with_split_backwards_have_no_bubble_at_half_the_memory_of_1f1b(
    devices: int,
) -> None:
    schedule = search(two_chunks(devices, room=devices), 3 * devices, SearchOptions(time_limit=3.0))
    assert schedule.steady_bubble_rate == 0
    assert schedule.optimal
    assert faults(schedule, 3 * devices) == []


def two_chunks(devices: int, room: int) -> BlockGraph:
    """Return stages that visit the devices in ascending and descending order. Each forward uses 1
    of memory until its weight gradient; 1F1B would use that of both stages of as many micro-batches
    as there are devices.
    """
    places = [*range(devices), *reversed(range(devices))]
    count = len(places)
    forwards = [
        Block(f"F{at}", (places[at],), 1, 1, (at - 1,) if at else ()) for at in range(count)
    ]
    inputs = [Block(f"I{at}", (places[-1 - at],), 1, 0, (count + at - 1,)) for at in range(count)]
    weights = [Block(f"W{at}", (places[-1 - at],), 1, -1, (count + at,)) for at in range(count)]
    return BlockGraph(devices, (*forwards, *inputs, *weights), (room,) * devices)
