"""The factorisations of a cluster's devices into stages and the mesh of each stage."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopipe.ir.cluster import Cluster
from autopipe.passes.batching import divisors
from autopipe.passes.cost.memory_check import equal_device_runs


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
    """Every way to make equal groups of all devices, into `stages` stages where that is given.

    Groups are neighbours in the cluster, so that a stage's mesh lies in one node where it can. One of several whole
    nodes has two levels, and both orders of them: nodes outside, so that samples are shared among nodes and other axes
    within one, and the other way around. Where devices are of several kinds, groups are equal within each kind.
    """
    runs = equal_device_runs(cluster)
    # The widest groups first, so that few stages come first.
    for widths in itertools.product(*(divisors(len(run))[::-1] for run in runs)):
        count = sum(len(run) // width for run, width in zip(runs, widths, strict=True))
        if stages not in (None, count):
            continue
        ways = [_ways(cluster, run, width) for run, width in zip(runs, widths, strict=True)]
        yield _joined([way[0] for way in ways])
        if any(len(way) > 1 for way in ways):
            yield _joined([way[-1] for way in ways])


@dataclass(frozen=True, slots=True)
class _Part:
    """The stages on devices of one kind."""

    groups: tuple[tuple[int, ...], ...]
    levels: str
    """Extents of each one's mesh, such as `2 x 4`."""


def _ways(cluster: Cluster, run: range, width: int) -> tuple[_Part, ...]:
    """The ways to count the devices of equal groups of a run: along nodes, and across where it has whole ones."""
    groups = tuple(tuple(range(first, first + width)) for first in range(run.start, run.stop, width))
    first, levels = cluster.part(run.start)
    of_node = levels[0].size
    nodes, rest = divmod(width, of_node)
    if nodes <= 1 or rest or of_node == 1 or cluster.part(run.stop - 1)[0] != first:
        return (_Part(groups, str(width)),)
    crossed = tuple(
        tuple(group[node * of_node + place] for place in range(of_node) for node in range(nodes)) for group in groups
    )
    return _Part(groups, f"{nodes} x {of_node}"), _Part(crossed, f"{of_node} x {nodes}")


def _joined(parts: Sequence[_Part]) -> Mesh:
    groups = tuple(group for part in parts for group in part.groups)
    names = " and ".join(
        f"{len(part.groups)} stage{'s' * (len(part.groups) > 1)} of {part.levels} "
        f"device{'s' * (len(part.groups[0]) > 1)}"
        for part in parts
    )
    return Mesh(groups, names)
