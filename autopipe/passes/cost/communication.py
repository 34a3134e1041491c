"""Costs of messages and collectives on a cluster.

A message of n bytes takes latency + n / bandwidth of the link between its two devices. A collective takes the time of
the cheapest algorithm known for it, each an affine function of its size as well:

* rings: Patarasuk, Yuan: "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009;
* trees, recursive halving and doubling, scatter + all-gather broadcast: Thakur, Rabenseifner, Gropp: "Optimization of
  collective communication operations in MPICH", IJHPCA 19(1), 2005, sections 3 and 4;
* all-to-all in log2 n rounds: Bruck et al., "Efficient algorithms for all-to-all communications in multiport
  message-passing systems", IEEE TPDS 8(11), 1997.

A group that spans several nodes uses either the flat algorithm over its slowest link or one level after the other:
inside the nodes, then between them. The link of an outer level joins two *groups* (nodes), so what the devices of one
node send out together shares it: the columns of a mesh that exchange something at the same time, above all.

Cost of a change of layout (`passes/analysis/resharding.py`): reductions as collectives, the rest by the bytes that
devices lack. Where nothing is added up, each link carries once what is lacking behind it: a device's own link what the
device lacks, a node's what its devices lack together. Ring all-gathers, all-to-alls and messages move exactly that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Cluster, Level, Link, slower
from autopipe.ir.layout import Layout, MeshAxes, Relayout, lacking, members, of_neighbours
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
        """The same for an array of sizes."""
        best = np.minimum.reduce([way.fixed_s + way.per_byte_s * sizes for way in self.ways])
        return np.where(sizes > 0, best, 0.0)


FREE = Cost((Affine(0.0, 0.0),))
"""Cost in a group of one device."""

_Flat = Callable[[int, Link], list[Affine]]


def send(cluster: Cluster, source: int, target: int, size_bytes: float) -> float:
    """Seconds from one device to another; nothing for no bytes or within one device."""
    if source == target or size_bytes <= 0:
        return 0.0
    return cluster.link(source, target).seconds(size_bytes)


def all_reduce(cluster: Cluster, group: Sequence[int], beside: Sequence[int] = ()) -> Cost:
    """Sum of one tensor of `bytes` a device, left whole on each device of `group`.

    All of `beside`, where that is given, do the same at the same time, in groups like this one.
    """

    def up_and_down(levels: list[tuple[int, Link]]) -> list[Affine]:
        (size, link), *outer = levels
        if not outer:
            return _all_reduce(size, link)
        halves = _gather(size, link)
        return [half + half + rest for half in halves for rest in up_and_down(outer)]

    return _cost(cluster, "all_reduce", group, _all_reduce, up_and_down, beside)


def all_gather(cluster: Cluster, group: Sequence[int], beside: Sequence[int] = ()) -> Cost:
    """The shards of a tensor of `bytes` in all, left whole on each device of `group`; `beside` as in `all_reduce`."""

    def outwards(levels: list[tuple[int, Link]]) -> list[Affine]:
        (size, link), *outer = levels
        if not outer:
            return _gather(size, link)
        return [inner + rest for inner in _gather(size, link) for rest in outwards(outer)]

    return _cost(cluster, "all_gather", group, _gather, outwards, beside)


def reduce_scatter(cluster: Cluster, group: Sequence[int], beside: Sequence[int] = ()) -> Cost:
    """Sum of one tensor of `bytes` a device, left in shards: an all-gather run backwards."""
    return _measured(cluster, "reduce_scatter", group) or all_gather(cluster, group, beside)


def broadcast(cluster: Cluster, group: Sequence[int]) -> Cost:
    """A tensor of `bytes` on one device, left whole on each device of `group`."""

    def inwards(levels: list[tuple[int, Link]]) -> list[Affine]:
        (size, link), *outer = levels
        if not outer:
            return _broadcast(size, link)
        return [inner + rest for inner in _broadcast(size, link) for rest in inwards(outer)]

    return _cost(cluster, "broadcast", group, _broadcast, inwards)


def all_to_all(cluster: Cluster, group: Sequence[int]) -> Cost:
    """Each device of `group` holds `bytes` and sends an equal part to every one."""

    def by_level(levels: list[tuple[int, Link]]) -> list[Affine]:
        total = math.prod(size for size, _ in levels)
        inside = 1
        found = Affine(0.0, 0.0)
        for size, link in levels:
            # What leaves a group of `inside` devices for other groups of this level shares the group's link.
            found += Affine((size - 1) * link.latency_s, inside * (size - 1) * inside / total / _rate(link))
            inside *= size
        return [found]

    return _cost(cluster, "all_to_all", group, _exchange, by_level)


def measured_moves(cluster: Cluster, group: Sequence[int]) -> Affine | None:
    """Measured line of exchanges in which nothing is added up, by the bytes that a device of `group` lacks.

    Of all-gathers and all-to-alls a device lacks all but its own part; both take about as long.
    """
    found = _measured(cluster, "all_to_all", group)
    if found is None:
        return None
    (way,), ranks = found.ways, len(set(group))
    return Affine(way.fixed_s, way.per_byte_s * ranks / (ranks - 1))


def _measured(cluster: Cluster, kind: str, group: Sequence[int]) -> Cost | None:
    """Measured cost of a collective of a group in one node, or one between those of fewer and of more ranks."""
    device = cluster.devices[group[0]]
    known = device.collectives
    alike = known and len({cluster.devices[device] for device in group}) == 1
    ranks = len(set(group))
    if not alike or ranks < 2 or len({cluster.node(device) for device in group}) > 1:
        return None
    line = _between({each.ranks: each.fit for each in known if each.kind == kind}, ranks)
    if line is None:
        return None
    return Cost((line,))


def _between(fits: Mapping[int, Affine], ranks: int) -> Affine | None:
    """Line for `ranks` ranks, or between those of fewer and of more; None where there are not both."""
    below = max((size for size in fits if size <= ranks), default=None)
    above = min((size for size in fits if size >= ranks), default=None)
    if below is None or above is None:
        return None
    part = (ranks - below) / (above - below) if above > below else 0.0
    return fits[below] * (1 - part) + fits[above] * part


def _cost(
    cluster: Cluster,
    kind: str,
    group: Sequence[int],
    flat: _Flat,
    by_level: Callable[[list[tuple[int, Link]]], list[Affine]],
    beside: Sequence[int] = (),
) -> Cost:
    members = tuple(sorted(set(group)))
    if len(members) < 2:
        return FREE
    measured = _measured(cluster, kind, members)
    if measured is not None:
        return measured
    first, hierarchy = cluster.part(members[0])
    if cluster.groups and cluster.part(members[-1])[0] != first:
        slowest, levels = _among_groups(cluster, members, beside)
    else:
        own, others = (tuple(each - first for each in some) for some in (members, beside))
        slowest, levels = _in_one_group(hierarchy, own, others)
    ways = flat(len(members), slowest)
    if len(levels) > 1:
        ways = ways + by_level(levels)
    return Cost(tuple(ways))


def _in_one_group(
    hierarchy: Sequence[Level], members: tuple[int, ...], beside: Sequence[int]
) -> tuple[Link, list[tuple[int, Link]]]:
    """The slowest link, and how many join at each level; devices are counted from the first of the hierarchy."""
    links = tuple(_links(hierarchy, members, beside))
    crossed = {_level(hierarchy, first, second) for first, second in itertools.pairwise(members)}
    return slower(links[level] for level in crossed), _levels(hierarchy, members, links)


def _among_groups(
    cluster: Cluster, members: tuple[int, ...], beside: Sequence[int]
) -> tuple[Link, list[tuple[int, Link]]]:
    """The same where members are in several groups of a cluster: inside each group, whatever its levels, and between.

    Levels are [] where groups have different numbers of them.
    """
    parts: dict[int, list[int]] = {}
    for member in members:
        parts.setdefault(cluster.part(member)[0], []).append(member)
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


def _links(hierarchy: Sequence[Level], members: tuple[int, ...], beside: Sequence[int]) -> Iterator[Link]:
    """The link of each level as one of several groups gets it that share it."""
    all_devices = set(beside)
    span = 1
    for level in hierarchy:
        here = members[0] // span
        sharing = sum(device // span == here for device in all_devices) / sum(each // span == here for each in members)
        yield _shared(level.link, sharing)
        span *= level.size


def _level(hierarchy: Sequence[Level], first: int, second: int) -> int:
    """The level of the smallest group that holds both devices."""
    for index, level in enumerate(hierarchy[:-1]):
        first, second = first // level.size, second // level.size
        if first == second:
            return index
    return len(hierarchy) - 1


def _levels(hierarchy: Sequence[Level], members: tuple[int, ...], links: tuple[Link, ...]) -> list[tuple[int, Link]]:
    """How many members join at each level, innermost first; empty where groups of one level differ in number."""
    found = []
    groups = members
    for level, link in zip(hierarchy, links, strict=True):
        parents = [member // level.size for member in groups]
        counts = {parents.count(parent) for parent in set(parents)}
        if len(counts) != 1:
            return []
        count = counts.pop()
        if count > 1:
            found.append((count, link))
        groups = tuple(sorted(set(parents)))
    return found


def _rate(link: Link) -> float:
    return link.bandwidth_bytes_per_s


def _rounds(size: int) -> int:
    """ceil(log2 size)."""
    return (size - 1).bit_length()


def _all_reduce(size: int, link: Link) -> list[Affine]:
    moved = 2 * (size - 1) / size / _rate(link)
    rounds = _rounds(size)
    ring = Affine(2 * (size - 1) * link.latency_s, moved)
    tree = Affine(rounds * link.latency_s, rounds / _rate(link))
    if size & (size - 1):
        return [ring, Affine(2 * rounds * link.latency_s, 2 * rounds / _rate(link))]
    return [ring, tree, Affine(2 * rounds * link.latency_s, moved)]


def _gather(size: int, link: Link) -> list[Affine]:
    moved = (size - 1) / size / _rate(link)
    ring = Affine((size - 1) * link.latency_s, moved)
    return [ring] if size & (size - 1) else [ring, Affine(_rounds(size) * link.latency_s, moved)]


def _broadcast(size: int, link: Link) -> list[Affine]:
    rounds = _rounds(size)
    tree = Affine(rounds * link.latency_s, rounds / _rate(link))
    scattered = Affine((rounds + size - 1) * link.latency_s, 2 * (size - 1) / size / _rate(link))
    return [tree, scattered]


def _exchange(size: int, link: Link) -> list[Affine]:
    pairs = Affine((size - 1) * link.latency_s, (size - 1) / size / _rate(link))
    bruck = Affine(_rounds(size) * link.latency_s, _rounds(size) / 2 / _rate(link))
    return [pairs, bruck]


def relayout_seconds(cluster: Cluster, devices: tuple[int, ...], step: Relayout, width: float) -> float:
    """Seconds of one step on a group of `devices`, for a tensor of `width` bytes an element; backward takes as long."""
    if step.kind == "slice":
        return 0.0
    if step.source.is_partial:
        share = math.prod(step.source.local_shape()) * width
        return reduction_cost(cluster, devices, step.kind, step.over).seconds(share)
    return moving_seconds(cluster, devices, step.source, step.result, width)


@lru_cache(maxsize=4096)
def reduction_cost(cluster: Cluster, devices: tuple[int, ...], kind: str, over: MeshAxes) -> Cost:
    """An `all_reduce` or `reduce_scatter` along axes of the mesh of `devices`, all of them doing so at once."""
    group = tuple(devices[position] for position in members(over, 0))
    return (all_reduce if kind == "all_reduce" else reduce_scatter)(cluster, group, devices)


def moving_seconds(cluster: Cluster, devices: Sequence[int], source: Layout, target: Layout, width: float) -> float:
    """Seconds until all of `devices` have their blocks under `target` of a tensor they hold as `source` says."""
    group = len(devices)
    total = 0.0
    for size, line in moving_lines(cluster, tuple(devices)):
        have, need = (of_neighbours(layout, size) for layout in (source, target)) if size > 1 else (source, target)
        most = int(lacking(have, need, group // size).max())
        total += line.seconds(most * width) if most else 0.0
    return total


@lru_cache(maxsize=4096)
def moving_lines(cluster: Cluster, devices: tuple[int, ...]) -> tuple[tuple[int, Affine], ...]:
    """Lines of the time to bring a device, its node and so on the bytes lacking there, each with how many neighbours in
    `devices` share the link. Measured exchanges count where there are any in a node of as many devices, else the links.
    """
    measured = measured_moves(cluster, devices)
    if measured is not None:
        return ((1, measured),)
    levels = _link_levels(cluster, devices)
    return tuple((size, Affine(link.latency_s, 1 / link.bandwidth_bytes_per_s)) for size, link in levels)


def _link_levels(cluster: Cluster, devices: tuple[int, ...]) -> tuple[tuple[int, Link], ...]:
    """The links into a device, into its node and so on, each with how many neighbours in `devices` share it.

    Where nodes have different shares of `devices`, or these are in several groups of the cluster, all is taken to go
    over the slowest link between any two.
    """
    first, hierarchy = cluster.part(devices[0])
    if any(cluster.part(device)[0] != first for device in devices):
        return ((1, cluster.slowest_link(devices)),)
    found = []
    span = 1
    for level in hierarchy:
        nodes = [(device - first) // span for device in devices]
        count = len(devices) // len(set(nodes))
        if any(len(set(nodes[start : start + count])) > 1 for start in range(0, len(nodes), count)):
            return ((1, cluster.slowest_link(devices)),)
        if len({node // level.size for node in nodes}) < len(set(nodes)):
            found.append((count, level.link))
        span *= level.size
    return tuple(found)
