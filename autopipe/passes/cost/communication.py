"""Costs of collectives and of changes of layout on a cluster.

A collective takes the time of the cheapest algorithm known for it, each an affine function of its
size: rings (Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", JPDC 69(2), 2009), trees, recursive halving and doubling (Thakur, Rabenseifner,
Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19(1), 2005, sections
3 and 4); over several nodes flat over the slowest link, or one level after the other. The link of
an outer level joins two nodes, so what the devices of one node send out together shares it.

Changes of layout (`passes/analysis/resharding.py`) that add nothing up cost by the bytes that
devices lack: each link carries once what is lacking behind it. Ring all-gathers, all-to-alls and
messages move exactly that.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Cluster, Link, slower
from autopipe.ir.layout import (
    Layout,
    MeshAxes,
    Redistribution,
    group_members,
    missing_elements,
    of_neighbours,
)
from autopipe.ir.measured_costs import Affine


@dataclass(frozen=True, slots=True)
class Cost:
    """The cheapest of several ways, for any size."""

    ways: tuple[Affine, ...]

    def seconds(self, size_bytes: float) -> float:
        """Seconds for `size_bytes`; nothing takes no time."""
        if size_bytes <= 0:
            return 0.0
        return min(way.seconds(size_bytes) for way in self.ways)

    def seconds_each(self, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
        best = np.minimum.reduce([way.fixed_s + way.per_byte_s * sizes for way in self.ways])
        return np.where(sizes > 0, best, 0.0)


FREE = Cost((Affine(0.0, 0.0),))
"""Cost in a group of one device."""


def collective(
    kind: str, cluster: Cluster, group: Sequence[int], beside: Sequence[int] = ()
) -> Cost:
    """An `all_reduce`, `all_gather` or `reduce_scatter` of `group`, by `bytes`.

    These are, of a sum, those of the tensor on each device; of an all-gather, those of all shards
    together. All of `beside`, where that is given, do the same at the same time, in groups like
    this one.
    """
    members = tuple(sorted(set(group)))
    if len(members) < 2:
        return FREE
    measured = _measured(cluster, kind, members)
    if measured is None and kind == "reduce_scatter":  # An all-gather run backwards.
        measured = _measured(cluster, "all_gather", members)
    if measured is not None:
        return Cost((measured,))
    first, _ = cluster.part(members[0])
    is_apart = bool(cluster.groups) and cluster.part(members[-1])[0] != first
    slowest, levels = (_levels_among_groups if is_apart else _levels)(cluster, members, beside)
    ways = _ways(kind, [(len(members), slowest)])
    return Cost((*ways, *(_ways(kind, levels) if len(levels) > 1 else ())))


all_reduce, all_gather, reduce_scatter = (
    partial(collective, kind) for kind in ("all_reduce", "all_gather", "reduce_scatter")
)


def _measured(cluster: Cluster, kind: str, group: Sequence[int]) -> Affine | None:
    """Measured line of a collective of a group in one node, or one between those of fewer and of
    more ranks.
    """
    known = cluster.devices[group[0]].collectives
    ranks = len(set(group))
    if not known or len(cluster.kinds_among(group)) > 1:
        return None
    if ranks < 2 or len({cluster.node(device) for device in group}) > 1:
        return None
    fits = {each.ranks: each.fit for each in known if each.kind == kind}
    below = max((size for size in fits if size <= ranks), default=None)
    above = min((size for size in fits if size >= ranks), default=None)
    if below is None or above is None:
        return None
    part = (ranks - below) / (above - below) if above > below else 0.0
    return fits[below] * (1 - part) + fits[above] * part


def _ways(kind: str, levels: Sequence[tuple[int, Link]]) -> list[Affine]:
    """The ways of a collective; `levels` are the members and the link of each level, innermost
    first.

    An all-reduce is a reduce-scatter at each inner level, an all-reduce of the shards over the
    outer ones, and an all-gather back.
    """
    (size, link), *outer = levels
    rounds = (size - 1).bit_length()
    moved = (size - 1) / size / link.bandwidth_bytes_per_s
    ring = Affine((size - 1) * link.latency_s, moved)
    gathers = [ring] if size & (size - 1) else [ring, Affine(rounds * link.latency_s, moved)]
    if outer:
        inside = [way + way for way in gathers] if kind == "all_reduce" else gathers
        return [way + rest for way in inside for rest in _ways(kind, outer)]
    if kind != "all_reduce":
        return gathers
    moved = 2 * (size - 1) / size / link.bandwidth_bytes_per_s
    ring = Affine(2 * (size - 1) * link.latency_s, moved)
    if size & (size - 1):
        return [ring, Affine(2 * rounds * link.latency_s, 2 * rounds / link.bandwidth_bytes_per_s)]
    tree = Affine(rounds * link.latency_s, rounds / link.bandwidth_bytes_per_s)
    return [ring, tree, Affine(2 * rounds * link.latency_s, moved)]


def _levels(
    cluster: Cluster, members: Sequence[int], beside: Sequence[int]
) -> tuple[Link, list[tuple[int, Link]]]:
    """The slowest link between members, and how many of them join at each level, over which link,
    innermost first.

    Each link is as one of several groups of `beside` gets it that share it. No levels are told
    where groups of one level differ in number.
    """
    first, hierarchy = cluster.part(members[0])
    own, others = ([device - first for device in each] for each in (members, set(beside)))
    groups = own
    span = 1
    crossed = []
    found = []
    is_even = True
    for level in hierarchy:
        here = own[0] // span
        sharing = sum(each // span == here for each in others) / sum(
            each // span == here for each in own
        )
        link = _shared(level.link, sharing)
        parents = [group // level.size for group in groups]
        counts = set(Counter(parents).values())
        if max(counts) > 1:
            crossed.append(link)
            found.append((max(counts), link))
        is_even = is_even and len(counts) == 1
        groups = sorted(set(parents))
        span = span * level.size
    return slower(crossed), found if is_even else []


def _levels_among_groups(
    cluster: Cluster, members: Sequence[int], beside: Sequence[int]
) -> tuple[Link, list[tuple[int, Link]]]:
    """The same for members in several groups of a cluster: inside each group, whatever its levels,
    and between.
    """
    parts: defaultdict[int, list[int]] = defaultdict(list)
    for member in members:
        parts[cluster.part(member)[0]].append(member)
    first, own = next(iter(parts.items()))
    sharing = sum(cluster.part(device)[0] == first for device in set(beside)) / len(own)
    outer = _shared(cluster.levels[0].link, sharing)
    inner = [cluster.slowest_link(part) for part in parts.values() if len(part) > 1]
    if not inner or len({len(part) for part in parts.values()}) > 1:
        return slower([*inner, outer]), []
    return slower([*inner, outer]), [(len(own), slower(inner)), (len(parts), outer)]


def _shared(link: Link, sharing: float) -> Link:
    """The link as one of `sharing` exchanges gets it that use it at once."""
    return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / max(1.0, sharing))


def relayout_seconds(
    cluster: Cluster, devices: tuple[int, ...], step: Redistribution, width: float
) -> float:
    """Seconds of one step on a group of `devices`, for a tensor of `width` bytes an element;
    backward takes as long.
    """
    if step.kind == "slice":
        return 0.0
    if step.source.is_partial:
        share = math.prod(step.source.local_shape()) * width
        return reduction_cost(cluster, devices, step.kind, step.over).seconds(share)
    return moving_seconds(cluster, devices, step.source, step.result, width)


@lru_cache(maxsize=4096)
def reduction_cost(cluster: Cluster, devices: tuple[int, ...], kind: str, over: MeshAxes) -> Cost:
    """An `all_reduce` or `reduce_scatter` along axes of the mesh of `devices`, all of them doing so
    at once.
    """
    group = tuple(devices[position] for position in group_members(over, 0))
    return collective(kind, cluster, group, devices)


def moving_seconds(
    cluster: Cluster, devices: Sequence[int], source: Layout, target: Layout, width: float
) -> float:
    """Seconds until all of `devices` have their blocks under `target` of a tensor they hold as
    `source` says.
    """
    group = len(devices)
    total = 0.0
    for size, line in moving_lines(cluster, tuple(devices)):
        have, need = (
            (of_neighbours(layout, size) for layout in (source, target))
            if size > 1
            else (source, target)
        )
        most = int(missing_elements(have, need, group // size).max())
        total += line.seconds(most * width) if most else 0.0
    return total


@lru_cache(maxsize=4096)
def moving_lines(cluster: Cluster, devices: tuple[int, ...]) -> tuple[tuple[int, Affine], ...]:
    """Lines of the time to bring a device, its node and so on the bytes lacking there, each with
    how many neighbours in `devices` share the link. Measured exchanges count where there are any in
    a node of as many devices, else the links.

    Where nodes have different shares of `devices`, or these are in several groups of the cluster,
    all is taken to go over the slowest link between any two. Of all-gathers and all-to-alls a
    device lacks all but its own part; both take about as long.
    """
    measured = _measured(cluster, "all_to_all", devices)
    if measured is not None:
        ranks = len(set(devices))
        return ((1, Affine(measured.fixed_s, measured.per_byte_s * ranks / (ranks - 1))),)
    first, hierarchy = cluster.part(devices[0])
    if any(cluster.part(device)[0] != first for device in devices):
        return ((1, _line(cluster.slowest_link(devices))),)
    found = []
    span = 1
    for level in hierarchy:
        nodes = [(device - first) // span for device in devices]
        count = len(devices) // len(set(nodes))
        if any(len(set(nodes[start : start + count])) > 1 for start in range(0, len(nodes), count)):
            return ((1, _line(cluster.slowest_link(devices))),)
        if len({node // level.size for node in nodes}) < len(set(nodes)):
            found.append((count, _line(level.link)))
        span *= level.size
    return tuple(found)


def _line(link: Link) -> Affine:
    return Affine(link.latency_s, 1 / link.bandwidth_bytes_per_s)
