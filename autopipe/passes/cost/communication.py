"""Costs of collectives and of redistributions on a cluster.

The time of a collective is the minimum over several algorithms. Each algorithm takes a + b * bytes
seconds. The algorithms are rings (Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", JPDC 69(2), 2009), trees, and recursive halving and doubling (Thakur,
Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19(1),
2005, sections 3 and 4). A collective over several nodes runs either over the slowest link at once,
or one level of the cluster after the other. The devices of a node share the node's link to other
nodes.

A redistribution (`passes/analysis/resharding.py`) that reduces no partial sums costs one time per
level of the cluster, and these times add up. The link of a level carries the bytes of the new
layout that the devices below the link do not hold yet; the maximum over the links of the level
counts. Ring all-gathers, all-to-alls and messages move exactly these bytes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Cluster, Link, slowest_of
from autopipe.ir.layout import (
    Layout,
    MeshAxes,
    Redistribution,
    group_members,
    layout_over_neighbours,
    missing_elements,
)
from autopipe.ir.measured_costs import AffineTime

Amount = TypeVar("Amount", float, NDArray[np.float64])
"""A number of messages, bytes or seconds: of one stage, or an array with one entry per stage."""


def message_seconds(link: Link, messages: Amount, size_bytes: Amount) -> Amount:
    """Return the seconds to send `messages` messages, with `size_bytes` bytes in total, one after
    the other over `link`.
    """
    return messages * link.latency_s + size_bytes / link.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """Seconds of a collective as a function of bytes: the minimum of several affine functions, one
    per algorithm.
    """

    ways: tuple[AffineTime, ...]
    """One function from bytes to seconds per algorithm."""

    def seconds(self, size_bytes: float) -> float:
        """Return the seconds of the collective for `size_bytes` bytes; 0 for 0 bytes."""
        if size_bytes <= 0:
            return 0.0
        return min(way.seconds(size_bytes) for way in self.ways)

    def seconds_each(self, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds of the collective for each entry of `sizes`, in bytes; 0 for 0
        bytes.
        """
        best = np.minimum.reduce([way.fixed_s + way.per_byte_s * sizes for way in self.ways])
        return np.where(sizes > 0, best, 0.0)


FREE = CollectiveCost((AffineTime(0.0, 0.0),))
"""The cost of a collective in a group of one device: 0 seconds."""


def collective_cost(
    kind: str, cluster: Cluster, group: Sequence[int], concurrent: Sequence[int] = ()
) -> CollectiveCost:
    """Return the cost of an `all_reduce`, `all_gather` or `reduce_scatter` of the devices `group`,
    as a function of bytes.

    The bytes of an all-reduce or reduce-scatter are those of the tensor on each device. The bytes
    of an all-gather are those of its result. A group of one device costs nothing (`FREE`).

    concurrent: all devices, those of `group` included, that run this collective at the same time,
    in groups of equal shape. Groups that use one link divide its bandwidth among them. If it is
    empty, only `group` runs the collective.
    """
    members = tuple(sorted(set(group)))
    if len(members) < 2:
        return FREE
    measured = _measured_collective(cluster, kind, members)
    if measured is None and kind == "reduce_scatter":
        # The time of an all-gather also serves for a reduce-scatter that was not measured, because
        # a reduce-scatter moves equally many bytes in the opposite direction.
        measured = _measured_collective(cluster, "all_gather", members)
    if measured is not None:
        return CollectiveCost((measured,))
    first, _ = cluster.part(members[0])
    spans_groups = bool(cluster.groups) and cluster.part(members[-1])[0] != first
    levels_of = _links_among_groups if spans_groups else _links_by_level
    slowest, levels = levels_of(cluster, members, concurrent)
    ways = _algorithm_times(kind, [(len(members), slowest)])
    return CollectiveCost((*ways, *(_algorithm_times(kind, levels) if len(levels) > 1 else ())))


all_reduce, all_gather, reduce_scatter = (
    partial(collective_cost, kind) for kind in ("all_reduce", "all_gather", "reduce_scatter")
)


def _measured_collective(cluster: Cluster, kind: str, group: Sequence[int]) -> AffineTime | None:
    """Return the time of a collective as a function of bytes, interpolated linearly between the
    measured numbers of ranks.

    None if the devices of `group` are in several nodes or of several types, or if no measurements
    of this collective surround the group's number of ranks.
    """
    known = cluster.devices[group[0]].collectives
    ranks = len(set(group))
    if not known or len(cluster.device_types_among(group)) > 1:
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


def _algorithm_times(kind: str, levels: Sequence[tuple[int, Link]]) -> list[AffineTime]:
    """Return, for each algorithm of a collective, its time as a function of bytes.

    `levels` contains (number of members, link) of each level of the cluster, innermost first. Over
    several levels, an all-reduce is a reduce-scatter at each inner level, an all-reduce of the
    shards at the outermost level, and an all-gather at each inner level.
    """
    (size, link), *outer = levels
    rounds = (size - 1).bit_length()
    moved = (size - 1) / size / link.bandwidth_bytes_per_s
    ring = AffineTime((size - 1) * link.latency_s, moved)
    gathers = [ring] if size & (size - 1) else [ring, AffineTime(rounds * link.latency_s, moved)]
    if outer:
        inside = [way + way for way in gathers] if kind == "all_reduce" else gathers
        return [way + rest for way in inside for rest in _algorithm_times(kind, outer)]
    if kind != "all_reduce":
        return gathers
    moved = 2 * (size - 1) / size / link.bandwidth_bytes_per_s
    ring = AffineTime(2 * (size - 1) * link.latency_s, moved)
    if size & (size - 1):
        return [
            ring,
            AffineTime(2 * rounds * link.latency_s, 2 * rounds / link.bandwidth_bytes_per_s),
        ]
    tree = AffineTime(rounds * link.latency_s, rounds / link.bandwidth_bytes_per_s)
    return [ring, tree, AffineTime(2 * rounds * link.latency_s, moved)]


def _links_by_level(
    cluster: Cluster, members: Sequence[int], concurrent: Sequence[int]
) -> tuple[Link, list[tuple[int, Link]]]:
    """Return (slowest, levels) for a collective of the devices `members`.

    slowest: the slowest link that connects members.
    levels: pairs (number, link) of the levels of the cluster at which members are connected,
    innermost first. A level divides the devices into sets, for example into nodes. `number` is the
    number of parts of each set that contain members. The parts are the sets of the next inner level
    or, at the innermost level, devices. Empty if this number differs between the sets of a level.

    The bandwidth of a link is divided among the groups of the devices `concurrent` that share it.
    """
    first, hierarchy = cluster.part(members[0])
    own = [device - first for device in members]
    others = [device - first for device in set(concurrent)]
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
        link = _shared_link(level.link, sharing)
        parents = [group // level.size for group in groups]
        counts = set(Counter(parents).values())
        if max(counts) > 1:
            crossed.append(link)
            found.append((max(counts), link))
        is_even = is_even and len(counts) == 1
        groups = sorted(set(parents))
        span = span * level.size
    return slowest_of(crossed), found if is_even else []


def _links_among_groups(
    cluster: Cluster, members: Sequence[int], concurrent: Sequence[int]
) -> tuple[Link, list[tuple[int, Link]]]:
    """Return the result of `_links_by_level` for members in several pools of a mixed cluster. Each
    pool has nodes and links of its own.

    There are two levels: one inside the pools, with the slowest link between members of one pool,
    and one between the pools.
    """
    parts: defaultdict[int, list[int]] = defaultdict(list)
    for member in members:
        parts[cluster.part(member)[0]].append(member)
    first, own = next(iter(parts.items()))
    sharing = sum(cluster.part(device)[0] == first for device in set(concurrent)) / len(own)
    outer = _shared_link(cluster.levels[0].link, sharing)
    inner = [cluster.slowest_link(part) for part in parts.values() if len(part) > 1]
    if not inner or len({len(part) for part in parts.values()}) > 1:
        return slowest_of([*inner, outer]), []
    return slowest_of([*inner, outer]), [(len(own), slowest_of(inner)), (len(parts), outer)]


def _shared_link(link: Link, sharing: float) -> Link:
    """Return the link with its bandwidth divided by `sharing`, the number of collectives that use
    it at the same time; values below 1 count as 1.
    """
    return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / max(1.0, sharing))


def redistribution_seconds(
    cluster: Cluster, devices: tuple[int, ...], step: Redistribution, width: float
) -> float:
    """Return the seconds of one redistribution of a tensor on the group `devices`; 0 for a slice.

    `width` is the number of bytes per element. The redistribution of the gradient in backward takes
    equally long.
    """
    if step.kind == "slice":
        return 0.0
    if step.source.is_partial:
        local_bytes = math.prod(step.source.local_shape()) * width
        return reduction_cost(cluster, devices, step.kind, step.over).seconds(local_bytes)
    return transfer_seconds(cluster, devices, step.source, step.result, width)


@lru_cache(maxsize=4096)
def reduction_cost(
    cluster: Cluster, devices: tuple[int, ...], kind: str, over: MeshAxes
) -> CollectiveCost:
    """Return the cost of an `all_reduce` or `reduce_scatter` over the axes `over` of the device
    mesh of `devices`, as a function of the bytes on each device.

    These axes divide the mesh into groups. All groups run the collective at the same time.
    """
    group = tuple(devices[position] for position in group_members(over, 0))
    return collective_cost(kind, cluster, group, devices)


def transfer_seconds(
    cluster: Cluster, devices: Sequence[int], source: Layout, target: Layout, width: float
) -> float:
    """Return the seconds to redistribute a tensor on the group `devices` from layout `source`,
    without partial sums, to layout `target`.

    `width` is the number of bytes per element.
    """
    group = len(devices)
    total = 0.0
    for size, line in transfer_times_by_level(cluster, tuple(devices)):
        have, need = (
            (layout_over_neighbours(layout, size) for layout in (source, target))
            if size > 1
            else (source, target)
        )
        most = int(missing_elements(have, need, group // size).max())
        total += line.seconds(most * width) if most else 0.0
    return total


@lru_cache(maxsize=4096)
def transfer_times_by_level(
    cluster: Cluster, devices: tuple[int, ...]
) -> tuple[tuple[int, AffineTime], ...]:
    """Return the pairs (neighbours, time) from which the seconds of a redistribution on the group
    `devices` follow: one pair per level of the cluster that connects devices, innermost first.

    neighbours: number of consecutive entries of `devices` that share one link of this level.
    time: seconds of the link, as a function of the bytes that these neighbours need and do not
    hold.

    There is only one pair, with 1 neighbour, in three cases: a measured all-to-all of the devices
    gives the time; neighbours would be in different sets of a level, for example in two nodes; or
    the devices belong to several pools of a mixed cluster. In the last two cases, the slowest link
    between any two devices counts.
    """
    measured = _measured_collective(cluster, "all_to_all", devices)
    if measured is not None:
        ranks = len(set(devices))
        return ((1, AffineTime(measured.fixed_s, measured.per_byte_s * ranks / (ranks - 1))),)
    first, hierarchy = cluster.part(devices[0])
    if any(cluster.part(device)[0] != first for device in devices):
        return ((1, _link_time(cluster.slowest_link(devices))),)
    found = []
    span = 1
    for level in hierarchy:
        nodes = [(device - first) // span for device in devices]
        count = len(devices) // len(set(nodes))
        if any(len(set(nodes[start : start + count])) > 1 for start in range(0, len(nodes), count)):
            return ((1, _link_time(cluster.slowest_link(devices))),)
        if len({node // level.size for node in nodes}) < len(set(nodes)):
            found.append((count, _link_time(level.link)))
        span *= level.size
    return tuple(found)


def _link_time(link: Link) -> AffineTime:
    """Return the seconds of one message over `link` as a function of its bytes."""
    return AffineTime(link.latency_s, 1 / link.bandwidth_bytes_per_s)
