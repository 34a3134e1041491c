"""Clusters of several kinds of devices for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopipe.ir.cluster import Cluster, Device, DevicePool, Level, Link
from tests.passes.cost.graphs import device

OUTER = Link(1e-5, 1e9)


def kind(speed: float, memory: int = 10**9, name: str | None = None) -> Device:
    """A device that does everything `speed` times as fast as the plain one of tests."""
    plain = device(memory, flops=1e12 * speed, bandwidth=1e11 * speed, latency=1e-6 / speed)
    return replace(plain, name=name or f"x{speed:g}")


def mixed_cluster(parts: Sequence[tuple[int, Device]], per_node: int | None = None) -> Cluster:
    """So many devices of each kind, a group of nodes each; links within a node and outside as
    `cluster` has them.
    """
    groups = []
    for index, (count, _) in enumerate(parts):
        inside = min(count, per_node or count)
        levels = (
            Level("node", inside, Link(1e-6, 1e10)),
            Level("rack", -(-count // inside), OUTER),
        )
        groups.append(DevicePool(f"g{index}", count, levels))
    devices = tuple(each for count, own in parts for each in (own,) * count)
    return Cluster("mixed", devices, (Level("site", len(groups), OUTER),), tuple(groups))
