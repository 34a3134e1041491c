"""The factorisations of a cluster's devices into stages and the mesh of each stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopipe.ir.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Mesh:
    """The devices of each stage, in the order in which splits count them: what is split outermost, samples first, goes
    over the outer level of the mesh."""

    groups: tuple[tuple[int, ...], ...]
    name: str
    """Stages and the levels of each one's mesh, such as `2 stages of 2 x 4 devices`."""

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.groups)

    @property
    def width(self) -> int:
        """Devices of the largest stage."""
        return max(map(len, self.groups))


def meshes(cluster: Cluster, stages: int | None = None) -> Iterator[Mesh]:
    """Every way to make equal groups of all devices, into so many stages where that is given.

    Groups are neighbours in the cluster, so that a stage's mesh lies in one node where it can. One of several whole
    nodes has two levels, and both orders of them: nodes outside, so that samples are shared among nodes and other axes
    within one, and the other way around.
    """
    for count in [stages] if stages else range(1, cluster.size + 1):
        if cluster.size % count:
            continue
        width, of_node = cluster.size // count, cluster.devices_per_node
        groups = tuple(tuple(range(first, first + width)) for first in range(0, cluster.size, width))
        nodes, rest = divmod(width, of_node)
        if nodes <= 1 or rest or of_node == 1:
            yield Mesh(groups, _name(count, str(width), width))
            continue
        yield Mesh(groups, _name(count, f"{nodes} x {of_node}", width))
        crossed = tuple(
            tuple(group[node * of_node + place] for place in range(of_node) for node in range(nodes))
            for group in groups
        )
        yield Mesh(crossed, _name(count, f"{of_node} x {nodes}", width))


def _name(stages: int, levels: str, width: int) -> str:
    return f"{stages} stage{'s' if stages > 1 else ''} of {levels} device{'s' if width > 1 else ''}"
