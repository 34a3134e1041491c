"""What every stretch of the line takes as one stage, and how many micro-batches its devices can keep.

All figures grow with the micro-batch by a straight line. They are read off once, and no graph is made for each size.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Cluster, Link
from autopipe.passes.cost.chain_tables import Tables
from autopipe.passes.cost.communication import all_reduce
from autopipe.passes.cost.ranges import Matrix, range_sums
from autopipe.passes.cost.roofline import accumulate_seconds, update_seconds
from autopipe.passes.placement.graphpipe.search import NEVER, Devices
from autopipe.passes.placement.graphpipe.seconds import NodeSeconds

Counts = NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class Way:
    """A way of running a stretch: on `degree` devices, with or without recomputation."""

    degree: int
    recompute: bool
    seconds: Matrix
    """Seconds of a micro-batch: forward, backward, messages, and a share of the step's end."""
    most: Counts
    """The most micro-batches in flight that memory takes; 0 where not even one fits."""
    always: Matrix
    """Bytes on a device, whatever is in flight."""
    kept: Matrix
    """Bytes for each micro-batch in flight."""


@dataclass(frozen=True, slots=True)
class Prices:
    """The ways of one size of micro-batch, degrees descending."""

    size: int
    micro_batches: int
    ways: tuple[Way, ...]
    limit: float
    """Bytes of memory on a device."""
    bounds: frozenset[int]
    """Numbers of micro-batches in flight that are the most for some stretch in some way."""

    @property
    def places(self) -> int:
        """Places of the line: one more than blocks."""
        return len(self.ways[0].seconds)

    def needs(self, target: float, levels: int) -> list[Devices]:
        """By level, the fewest devices on which each stretch takes at most `target` seconds a micro-batch."""
        fits = [
            (way.degree, np.where((way.seconds <= target) & (way.seconds < np.inf), way.most, 0)) for way in self.ways
        ]
        found: list[Devices] = []
        for level in range(levels + 1):
            kept = max(1, min(level, self.micro_batches))
            if (kept == level > 1 and kept - 1 in self.bounds) or not found:
                found.append(np.full((self.places, self.places), NEVER, dtype=np.int16))
                for degree, most in fits:
                    found[-1][most >= kept] = degree
            else:
                found.append(found[-1])
        return found

    def way(self, start: int, stop: int, level: int, target: float) -> Way:
        """The way that `needs` found for a stretch."""
        kept = min(level, self.micro_batches)
        fitting = (
            way for way in reversed(self.ways) if way.seconds[start, stop] <= target and way.most[start, stop] >= kept
        )
        return min(fitting, key=lambda way: (way.degree, way.seconds[start, stop]))


def make_prices(
    tables: Tables, seconds: NodeSeconds, size: int, degrees: tuple[int, ...], levels: int, spare: float = 0.0
) -> Prices:
    """The prices with micro-batches of `size` samples, for stages on so many devices; at most `levels` in flight.

    Each device has its memory limit, and `spare` bytes more.
    """
    problem = tables.problem
    count = problem.batch_size // size
    scale = size / problem.micro_batch_size
    ways: list[Way] = []
    empty = np.where(np.tri(tables.chain.blocks + 1, dtype=bool), np.inf, 0.0)
    limit = min(map(problem.memory_of, range(problem.cluster.size))) + spare
    for degree in sorted(degrees, reverse=True):
        received, sent = (each.cut * (scale / degree) + each.whole for each in (tables.received, tables.sent))
        rest = empty + _end_seconds(tables, degree, count)
        first, second = links(problem.cluster, degree), 1 if problem.train else 0
        rest += tables.arriving * first.latency_s + received / first.bandwidth_bytes_per_s
        rest += second * (tables.leaving * first.latency_s + sent / first.bandwidth_bytes_per_s)
        forward, backward = (range_sums(tables.chain.by_block(each)) for each in seconds.of(size, degree))
        always = tables.state + (tables.workspace.cut * (scale / degree) + tables.workspace.whole)
        always += (1 + second) * (received + sent)
        kept = tables.kept.cut * (scale / degree) + tables.kept.whole if problem.train else np.zeros_like(always)
        if not problem.train or problem.recompute != "full":
            ways.append(_way(degree, False, forward + backward + rest, always, kept, limit, levels))
        if problem.train and problem.recompute != "none":
            ways.append(_way(degree, True, 2 * forward + backward + rest, always + kept, received, limit, levels))
    bounds = (np.bincount(way.most.ravel()).nonzero()[0].tolist() for way in ways)
    return Prices(size, count, tuple(ways), limit, frozenset(itertools.chain.from_iterable(bounds)))


def _way(degree: int, recompute: bool, seconds: Matrix, always: Matrix, kept: Matrix, limit: float, levels: int) -> Way:
    room = limit - always
    with np.errstate(divide="ignore", invalid="ignore"):
        most = np.where(room < 0, 0, np.where(kept > 0, np.floor(room / kept), levels))
    return Way(degree, recompute, seconds, np.minimum(most, levels).astype(np.int16), always, kept)


def _end_seconds(tables: Tables, degree: int, count: int) -> Matrix:
    """A micro-batch's share of summing gradients over devices and of the update, and of adding gradients up."""
    problem = tables.problem
    if not problem.train:
        return np.zeros_like(tables.gradients)
    device = problem.cluster.devices[0]
    per_byte = update_seconds(device, 1.0, problem.optimizer.states) - device.launch_latency_s
    update = tables.gradients * per_byte + device.launch_latency_s * (tables.gradients > 0)
    reduce = all_reduce(problem.cluster, range(degree)).seconds_each(tables.gradients)
    added: Matrix = (reduce + update) / count + tables.gradients * accumulate_seconds(device, 1.0) * (1 - 1 / count)
    return added


def links(cluster: Cluster, degree: int) -> Link:
    """The link between neighbours of stages on `degree` devices: on average, where some are in one node and some not.

    Which devices a stage gets is not known yet.
    """
    inner = cluster.levels[0]
    outer = cluster.levels[-1].link
    if cluster.size <= inner.size:
        return inner.link
    apart = min(1.0, degree / inner.size)
    latency = apart * outer.latency_s + (1 - apart) * inner.link.latency_s
    per_byte = apart / outer.bandwidth_bytes_per_s + (1 - apart) / inner.link.bandwidth_bytes_per_s
    return Link(latency, 1 / per_byte)
