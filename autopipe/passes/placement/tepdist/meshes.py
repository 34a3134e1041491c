"""The factorisations of a cluster's devices into stages and the mesh of each stage.

The meshes that have the groups of devices which constraints ask for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopipe.ir.cluster import Cluster
from autopipe.ir.errors import ConfigurationError
from autopipe.passes.analysis.constraints import ResolvedConstraint
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


def constrained_meshes(
    cluster: Cluster, stages: int | None, resolved: Sequence[ResolvedConstraint]
) -> tuple[Mesh, ...]:
    """The meshes of `cluster`, into `stages` stages where that is given, that constraints leave.

    Where they ask for devices, each group asked for is a stage's, in the order asked for: in equal groups of all
    devices, or in stages of just these groups, which need not be equal. Raises ConfigurationError, naming a constraint,
    where no mesh has them.
    """
    found = tuple(meshes(cluster, stages))
    asked = _groups(resolved)
    if not asked:
        return found
    with_them = [_reordered(mesh, asked) for mesh in found if _has(mesh, asked)]
    if not with_them and stages in (None, len(asked)):
        of_them = Mesh(tuple(asked), f"{len(asked)} stage{'s' if len(asked) > 1 else ''} as asked for")
        with_them = [of_them] if sum(map(len, asked)) == len({device for group in asked for device in group}) else []
    if with_them:
        return tuple(dict.fromkeys(with_them))
    wish = next(wish for wish in resolved if wish.devices is not None)
    many = f" with {stages} stages" if stages else ""
    raise ConfigurationError(
        f"{wish} asks for devices {list(wish.devices or ())}, which no stage can have{many}",
        hint="stages have equal groups of neighbours, or just the groups asked for, if no two of them overlap; "
        "strategy manual follows any constraint",
    )


def _groups(resolved: Sequence[ResolvedConstraint]) -> list[tuple[int, ...]]:
    """The groups of devices, each once, by the stage that is asked for with them, else by their first node."""
    ranks: dict[frozenset[int], tuple[tuple[int, int], tuple[int, ...]]] = {}
    for wish in resolved:
        if wish.devices is not None:
            stage = wish.constraint.stage
            rank = (wish.nodes[0], 0) if stage is None else (-1, stage)
            members = frozenset(wish.devices)
            before, group = ranks.get(members, (rank, wish.devices))
            ranks[members] = min(before, rank), group
    return [group for _, group in sorted(ranks.values())]


def _has(mesh: Mesh, asked: Sequence[tuple[int, ...]]) -> bool:
    groups = set(map(frozenset, mesh.groups))
    return all(frozenset(group) in groups for group in asked)


def _reordered(mesh: Mesh, asked: Sequence[tuple[int, ...]]) -> Mesh:
    by_members = {frozenset(group): group for group in asked}
    return replace(mesh, groups=tuple(by_members.get(frozenset(group), group) for group in mesh.groups))
