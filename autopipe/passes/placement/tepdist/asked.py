"""The meshes that have the groups of devices which constraints ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopipe.ir.cluster import Cluster
from autopipe.ir.errors import ConfigurationError
from autopipe.passes.analysis.constraints import ResolvedConstraint
from autopipe.passes.placement.tepdist.meshes import Mesh, meshes


def constrained_meshes(cluster: Cluster, stages: int | None, wishes: Sequence[ResolvedConstraint]) -> tuple[Mesh, ...]:
    """The meshes of `cluster`, into `stages` stages where that is given, that constraints leave.

    Where they ask for devices, each group asked for is a stage's, in the order asked for: in equal groups of all
    devices, or in stages of just these groups, which need not be equal. Raises ConfigurationError, naming a constraint,
    where no mesh has them.
    """
    found = tuple(meshes(cluster, stages))
    asked = _groups(wishes)
    if not asked:
        return found
    with_them = [_reordered(mesh, asked) for mesh in found if _has(mesh, asked)]
    if not with_them and stages in (None, len(asked)):
        of_them = Mesh(tuple(asked), f"{len(asked)} stage{'s' if len(asked) > 1 else ''} as asked for")
        with_them = [of_them] if sum(map(len, asked)) == len({device for group in asked for device in group}) else []
    if with_them:
        return tuple(dict.fromkeys(with_them))
    wish = next(wish for wish in wishes if wish.devices is not None)
    many = f" with {stages} stages" if stages else ""
    raise ConfigurationError(
        f"{wish} asks for devices {list(wish.devices or ())}, which no stage can have{many}",
        hint="stages have equal groups of neighbours, or just the groups asked for, if no two of them overlap; "
        "strategy manual follows any constraint",
    )


def _groups(wishes: Sequence[ResolvedConstraint]) -> list[tuple[int, ...]]:
    """The groups of devices, each once, by the stage that is asked for with them, else by their first node."""
    ranks: dict[frozenset[int], tuple[tuple[int, int], tuple[int, ...]]] = {}
    for wish in wishes:
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
