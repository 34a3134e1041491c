"""Cost of a change of layout (`passes/lower/relayout.py`): reductions as collectives, the rest by the bytes that
devices lack. Where nothing is added up, each link carries once what is lacking behind it: a device's own link what the
device lacks, a node's what its devices lack together. Ring all-gathers, all-to-alls and messages move exactly that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from autopipe.ir.cluster import Cluster, Link
from autopipe.ir.layout import Layout, MeshAxes, Relayout, lacking, members, of_neighbours
from autopipe.ir.measured_costs import Affine
from autopipe.passes.cost.communication import Cost, all_reduce, measured_moves, reduce_scatter


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
