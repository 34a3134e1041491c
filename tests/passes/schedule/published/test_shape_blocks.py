"""The five placement shapes of the Tessel paper as block graphs."""

from __future__ import annotations

import pytest

from autopipe.ir.errors import ConfigurationError
from autopipe.passes.schedule.published.blocks import SHAPES, shape_blocks


def chain(graph):
    """Return the names of the blocks in an order of execution."""
    return [graph.blocks[index].name for index in graph.order]


@pytest.mark.parametrize(
    ("name", "train", "infer"), [("v", 4, 1), ("x", 8, 2), ("m", 6, 2), ("nn", 8, 3), ("k", 6, 2)]
)
@pytest.mark.parametrize("devices", [2, 4, 8, 32])
def test_every_device_has_the_published_load(name, train, infer, devices):
    assert shape_blocks(name, devices, True).loads == (train,) * devices
    assert shape_blocks(name, devices, False).loads == (infer,) * devices


@pytest.mark.parametrize("name", SHAPES)
def test_memory_returns_to_0_and_only_training_uses_memory(name):
    trained = shape_blocks(name, 4, True, memory=3)
    inferred = shape_blocks(name, 4, False)
    assert trained.memory == (3,) * 4
    assert inferred.memory == (None,) * 4
    for device in range(4):
        assert sum(block.memory for block in trained.blocks if device in block.devices) == 0
    assert not any(block.memory for block in inferred.blocks)
    assert len(trained.blocks) == 2 * len(inferred.blocks)
    assert trained.micro_batches_per_unit == (2 if name == "x" else 1)


def test_dependencies_equal_the_published_ones():
    v = ["F0", "F1", "F2", "F3", "B3", "B2", "B1", "B0"]
    assert chain(shape_blocks("v", 4, True)) == v
    assert chain(shape_blocks("M", 4, True)) == ["TPf0", *v, "TPb0"]
    nn = ["TPf0", "F0", "F1", "TPf1", "F2", "F3", "B3", "B2", "TPb1", "B1", "B0", "TPb0"]
    assert chain(shape_blocks("nn", 4, True)) == nn
    k = shape_blocks("k", 4, True)
    after = {block.name: [k.blocks[index].name for index in block.after] for block in k.blocks}
    assert after == {
        "F0": [], "F1": ["F0"], "F2": [], "F3": ["F2"], "TPf0": ["F1", "F3"], "TPb0": ["TPf0"],
        "B3": ["TPb0"], "B2": ["B3"], "B1": ["TPb0"], "B0": ["B1"],
    }  # fmt: skip
    x = shape_blocks("x", 4, True)
    devices = {block.name: block.devices[0] for block in x.blocks}
    assert [devices[name] for name in ("F0", "F3", "F4", "F7", "B4", "B7")] == [0, 3, 3, 0, 3, 0]


def test_times_of_forward_and_backward_can_be_set():
    graph = shape_blocks("m", 4, True, forward=2, backward=5)
    assert {(block.name[0], block.time) for block in graph.blocks} == {("F", 2), ("B", 5), ("T", 1)}


@pytest.mark.parametrize(("name", "devices"), [("v", 3), ("v", 0), ("v", -2), ("w", 4)])
def test_unknown_shapes_and_odd_numbers_of_devices_are_rejected(name, devices):
    with pytest.raises(ConfigurationError):
        shape_blocks(name, devices, True)
