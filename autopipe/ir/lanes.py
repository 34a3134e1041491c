"""Devices that do the same: what holds for one of them holds for all, so that one stands for a large group."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

Value = TypeVar("Value")

Lanes = tuple[tuple[int, ...], ...]
"""Devices that are in the same stages, ascending, each once; those with the least device first."""


def lanes_of(stage_devices: Sequence[Sequence[int]], orders: Sequence[Sequence[Hashable]]) -> Lanes:
    """The devices, of which `orders` holds one list each, by the stages that they are in and their lists."""
    stages: list[list[int]] = [[] for _ in orders]
    for stage, devices in enumerate(stage_devices):
        for device in devices:
            stages[device].append(stage)
    equal: dict[Sequence[Hashable], int] = {}
    known: dict[int, int] = {}
    found: dict[Hashable, list[int]] = {}
    for device, order in enumerate(orders):
        # Comparing lists takes long, and mostly they are one.
        if id(order) not in known:
            known[id(order)] = equal.setdefault(tuple(order), len(equal))
        found.setdefault((*stages[device], known[id(order)]), []).append(device)
    return tuple(map(tuple, found.values()))


def lane_groups(stage_devices: Sequence[Sequence[int]], lanes: Lanes) -> tuple[tuple[int, ...], ...]:
    """The lanes of each stage, by number, each once."""
    lane = {device: index for index, devices in enumerate(lanes) for device in devices}
    return tuple(tuple(dict.fromkeys(lane[device] for device in group)) for group in stage_devices)


def on_each_device(lanes: Lanes, values: Sequence[Value]) -> tuple[Value, ...]:
    """The value of each device's lane: one and the same for all devices of a lane."""
    found = {device: value for devices, value in zip(lanes, values, strict=True) for device in devices}
    return tuple(found[device] for device in range(len(found)))
