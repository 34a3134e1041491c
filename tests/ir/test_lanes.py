"""Devices that do the same, told apart by their stages and their lists."""

from __future__ import annotations

from autopipe.ir.schedule import expand_to_devices, group_equal_devices, groups_by_stage


def test_devices_are_alike_if_stages_and_lists_are() -> None:
    stages = ((0, 1, 2, 3), (4, 5), (5, 4), (6,))
    orders = [("a",), ("a",), ("b",), ("a",), ("c",), ("c",), ("d",), ()]
    lanes = group_equal_devices(stages, orders)
    assert lanes == ((0, 1, 3), (2,), (4, 5), (6,), (7,))
    assert groups_by_stage(stages, lanes) == ((0, 1), (2,), (2,), (3,))
    assert expand_to_devices(lanes, "abcde") == ("a", "a", "b", "a", "c", "c", "d", "e")
