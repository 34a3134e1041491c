"""The minimum memory of block graphs, against all orders of small graphs."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.block_schedule import Block, BlockGraph
from autopipe.ir.errors import InfeasibleError
from autopipe.passes.schedule.published.blocks import shape_blocks
from autopipe.passes.schedule.tessel.model import minimum_memory, require_memory


def peaks(graph, order):
    """Return the peak memory of each device if blocks start in this order, at least 0."""
    found = []
    for device in range(graph.devices):
        used = peak = 0
        for index in order:
            used += graph.blocks[index].memory if device in graph.blocks[index].devices else 0
            peak = max(peak, used)
        found.append(peak)
    return found


def orders(graph):
    """Yield all orders of one micro-batch's blocks."""
    for order in permutations(range(len(graph.blocks))):
        place = {index: position for position, index in enumerate(order)}
        if all(
            place[other] < place[index] for index in order for other in graph.blocks[index].after
        ):
            yield order


@st.composite
def graphs(draw, tight=False):
    devices = draw(st.integers(3 if tight else 1, 3))
    blocks = []
    for index in range(draw(st.integers(1, 6))):
        own = tuple(sorted(draw(st.sets(st.integers(0, devices - 1), min_size=1))))
        after = tuple(sorted(draw(st.sets(st.integers(0, index - 1), max_size=2)))) if index else ()
        blocks.append(Block(f"b{index}", own, 1, draw(st.integers(-3, 3)), after))
    limit = st.integers(0, 3) if tight else st.none() | st.integers(0, 5)
    limits = tuple(draw(limit) for _ in range(devices))
    return BlockGraph(devices, tuple(blocks), limits)


@given(graphs())
def test_minimum_memory_equals_that_of_the_best_order(graph):
    for device in range(graph.devices):
        fit = [
            found[device]
            for found in (peaks(graph, order) for order in orders(graph))
            if all(
                room is None or peak <= room
                for other, (peak, room) in enumerate(zip(found, graph.memory, strict=True))
                if other != device
            )
        ]
        assert minimum_memory(graph, device, graph.memory) == (min(fit) if fit else math.inf)


@given(graphs() | graphs(tight=True))
@settings(max_examples=400)
def test_a_micro_batch_is_rejected_exactly_if_no_order_fits(graph):
    fits = any(
        all(
            room is None or peak <= room
            for peak, room in zip(peaks(graph, order), graph.memory, strict=True)
        )
        for order in orders(graph)
    )
    if fits:
        require_memory(graph, 1)
    else:
        with pytest.raises(InfeasibleError):
            require_memory(graph, 1)


def test_the_error_names_the_device_and_the_needed_memory():
    blocks = (
        Block("F", (1,), 1, 3),
        Block("G", (0, 1), 1, 2, (0,)),
        Block("B", (0, 1), 1, -2, (1,)),
    )
    with pytest.raises(InfeasibleError, match="the memory limit is 4, but 5 is needed") as caught:
        require_memory(BlockGraph(2, blocks, (2, 4)), 1)
    assert (caught.value.where, caught.value.hint) == (
        "device 1",
        "raise the memory limit of the device to at least 5",
    )
    require_memory(BlockGraph(2, blocks, (2, 5)), 1)
    with pytest.raises(InfeasibleError, match="9 is needed"):  # each micro-batch leaves 3 in use
        require_memory(BlockGraph(2, blocks, (2, 5)), 3)


def test_memory_that_suffices_per_device_but_not_together():
    """No block frees memory before all four have started, so the order of starts does not
    matter.
    """
    blocks = (
        Block("a", (0,), 1, 1), Block("x", (1,), 1, 2, (0,)), Block("b", (0,), 1, 1), Block("y", (1,), 1, 2, (2,)),
        Block("free0", (0,), 1, -2, (1, 3)), Block("free1", (1,), 1, -4, (1, 3)),
    )  # fmt: skip
    require_memory(BlockGraph(2, blocks, (2, 4)), 8)
    with pytest.raises(InfeasibleError, match="the memory limit is 3, but 4 is needed"):
        require_memory(BlockGraph(2, blocks, (2, 3)), 8)


@pytest.mark.parametrize("name", ["v", "x", "m", "nn", "k"])
def test_the_shapes_need_the_memory_of_one_micro_batch(name):
    least = 2 if name == "k" else 1
    require_memory(shape_blocks(name, 32, True, memory=least), 128)
    with pytest.raises(InfeasibleError, match=f"the memory limit is {least - 1}, but {least} is"):
        require_memory(shape_blocks(name, 32, True, memory=least - 1), 128)


def test_micro_batches_that_free_first_may_need_less_together():
    """One micro-batch needs 4. Of two, one can first run up to the point where it has freed
    memory.
    """
    changes = (-5, 9, -9, 5)
    blocks = tuple(
        Block(f"b{index}", (0,), 1, change, (index - 1,) if index else ())
        for index, change in enumerate(changes)
    )
    graph = BlockGraph(1, blocks, (0,))
    with pytest.raises(InfeasibleError, match="4 is needed"):
        require_memory(graph, 1)
    require_memory(graph, 2)
