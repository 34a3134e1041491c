"""Devices that do the same, told apart by their stages and their lists."""

from __future__ import annotations

from autopipe.ir.schedule import lane_groups, lanes_of, on_each_device


def test_devices_are_alike_if_stages_and_lists_are() -> None:
    stages = ((0, 1, 2, 3), (4, 5), (5, 4), (6,))
    orders = [("a",), ("a",), ("b",), ("a",), ("c",), ("c",), ("d",), ()]
    lanes = lanes_of(stages, orders)
    assert lanes == ((0, 1, 3), (2,), (4, 5), (6,), (7,))
    assert lane_groups(stages, lanes) == ((0, 1), (2,), (2,), (3,))
    assert on_each_device(lanes, "abcde") == ("a", "a", "b", "a", "c", "c", "d", "e")
