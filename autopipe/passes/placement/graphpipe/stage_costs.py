"""Time and memory of every range of the line as one stage, by number of devices.

All figures grow with the micro-batch by a straight line. They are read off once, and no graph is made for each size.

Seconds of every node's forward and backward on micro-batches of any size, shared by any number of devices.

For one size of micro-batch: which stretches meet a target, in which way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Cluster, Device, Link
from autopipe.ir.problem import Problem, Work
from autopipe.passes.analysis.chain import Matrix, range_sums
from autopipe.passes.analysis.operators import SampleAxes
from autopipe.passes.cost.memory_check import equal_device_runs
from autopipe.passes.cost.range_tables import Tables
from autopipe.passes.cost.roofline import accumulate_per_byte, annotate_share, node_seconds, task_seconds, update_line
from autopipe.passes.cost.stage_work import exchange_of_gradients, updated_part
from autopipe.passes.placement.graphpipe.search import NEVER, Devices, PartitionStage

Seconds = NDArray[np.float64]


class NodeSeconds:
    """Work at other sizes of micro-batches lies on the line through that at the problem's own and at half of it.

    Nodes of equal work are looked at once.
    """

    def __init__(self, problem: Problem, samples: SampleAxes) -> None:
        self.problem, self.samples = problem, samples
        half = annotate_share(problem.graph, samples, problem.precision, 0.5)
        kinds: dict[tuple[int, Work], int] = {}
        keys = [(id(use), work) for use, work in zip(samples.uses, problem.work, strict=True)]
        self.kind_of = np.array([kinds.setdefault(key, len(kinds)) for key in keys], dtype=np.int64)
        """Which of the different nodes each node is like."""
        self.firsts = np.unique(self.kind_of, return_index=True)[1].tolist()
        self.works = [(half[node], problem.work[node]) for node in self.firsts]
        self.axes = np.array([samples.axes[node] is not None for node in self.firsts])
        self.measured = np.array([bool(whole.measured) for _, whole in self.works])
        """Nodes whose measured costs say what a share of the samples takes."""

        self._undivided: dict[int, Seconds] = {}

    def of(self, size: int, degree: int, devices: Sequence[Device]) -> tuple[Seconds, Seconds]:
        """Forward and backward of each node on the slowest of `devices`, backward 0 without training."""
        every = [self._on(device, size, degree) for device in devices]
        forward, backward = (np.maximum.reduce([each[phase] for each in every]) for phase in (0, 1))
        return forward, backward

    def _on(self, device: Device, size: int, degree: int) -> tuple[Seconds, Seconds]:
        problem = self.problem
        part = size / problem.micro_batch_size
        shares = np.where(self.axes, 1.0 / degree, 1.0)
        work = [_between(half, whole, part) for half, whole in self.works]
        forward, backward = node_seconds(work, device, problem.precision, shares)
        if self.measured.any():
            wholes = [whole for _, whole in self.works]
            seconds = node_seconds(wholes, device, problem.precision, np.where(self.axes, part / degree, 1.0))
            forward = np.where(self.measured, seconds[0], forward)
            backward = np.where(self.measured, seconds[1], backward)
        if not problem.train:
            backward = np.zeros_like(forward)
        return forward[self.kind_of], backward[self.kind_of]

    def undivided(self, degree: int) -> Seconds:
        """1 for nodes whose samples `degree` devices cannot share."""
        found = self._undivided.get(degree)
        if found is None:
            each = [degree > 1 and not self.samples.divides(node, degree) for node in self.firsts]
            found = self._undivided[degree] = np.array(each, dtype=float)[self.kind_of]
        return found


def _between(half: Work, whole: Work, part: float) -> Work:
    """The work of `part` of the samples."""

    def at(less: float, more: float) -> float:
        return max(0.0, 2 * less - more) + 2 * part * (more - less)

    return replace(
        whole,
        forward_flops=at(half.forward_flops, whole.forward_flops),
        backward_flops=at(half.backward_flops, whole.backward_flops),
        forward_bytes=at(half.forward_bytes, whole.forward_bytes),
        backward_bytes=at(half.backward_bytes, whole.backward_bytes),
        measured=(),
    )


@dataclass(frozen=True, slots=True)
class StageOption:
    """A way of running stretches: on `degree` devices of a run of like ones, with or without recomputation.

    Every matrix is indexed by (first block, block after the last); seconds are those of a micro-batch.
    """

    run: int
    """Which of the cluster's runs of devices that a stage may have."""
    degree: int
    recompute: bool
    forward: Matrix
    backward: Matrix
    """With the second forward of recomputation, and with adding gradients to those before."""
    arriving: Matrix
    """Seconds of messages from the stages before."""
    returning: Matrix
    """Seconds of messages with gradients, from the stages after."""
    end: Matrix
    """Seconds, once a step, of summing gradients over devices and of the update."""
    always: Matrix
    """Bytes on a device, whatever is in flight."""
    kept: Matrix
    """Bytes for each micro-batch in flight."""

    def seconds(self, micro_batches: int) -> Matrix:
        """All of them, with a share of the step's end; infinite for empty stretches."""
        every: Matrix = self.forward + self.backward + self.arriving + self.returning + self.end / micro_batches
        return np.where(np.tri(len(every), dtype=bool), np.inf, every)

    def most(self, limit: float, levels: int) -> NDArray[np.int16]:
        """The most micro-batches in flight that memory takes, up to `levels`; 0 where not even one fits."""
        room = limit - self.always
        with np.errstate(divide="ignore", invalid="ignore"):
            found = np.where(self.kept > 0, np.floor(room / self.kept), levels)
        return np.clip(np.where(room < 0, 0, found), 0, levels).astype(np.int16)


def ways_of(tables: Tables, seconds: NodeSeconds, size: int, degree: int, run: int = 0) -> Iterator[StageOption]:
    """The ways that the problem's recomputation leaves, with micro-batches of `size` samples.

    `run` is that of the devices, as `equal_device_runs` counts them.
    """
    problem, chain = tables.problem, tables.chain
    devices = equal_device_runs(problem.cluster)[run]
    kinds = problem.cluster.kinds_among(devices)
    part = size / problem.micro_batch_size / degree
    received, sent, kept, workspace = (
        each.cut * part + each.whole for each in (tables.received, tables.sent, tables.kept, tables.workspace)
    )
    link = _mean_link(problem.cluster, devices, degree)
    forward, backward = (range_sums(chain.by_block(each)) for each in seconds.of(size, degree, kinds))
    uneven = seconds.undivided(degree)
    device = max(kinds, key=accumulate_per_byte)
    starts = task_seconds(device)
    forward += starts[0]
    if uneven.any():
        forward += np.where(range_sums(chain.by_block(uneven)) > 0.5, np.inf, 0.0)
    arriving = tables.arriving * link.latency_s + received / link.bandwidth_bytes_per_s
    always = tables.held(degree) + workspace + received + sent
    if not problem.train:
        zero = np.zeros_like(forward)
        yield StageOption(run, degree, False, forward, zero, arriving, zero, zero, always, zero)
        return
    backward += starts[1] + tables.gradients * accumulate_per_byte(device) * (1 - size / problem.batch_size)
    returning = tables.leaving * link.latency_s + sent / link.bandwidth_bytes_per_s
    update = update_line(device, problem.optimizer.states)
    end = tables.gradients * updated_part(problem, degree) * update.per_byte_s + update.fixed_s * (tables.gradients > 0)
    end += exchange_of_gradients(problem, devices[:degree]).seconds_each(tables.gradients)
    always = always + received + sent
    if problem.recompute != "full":
        yield StageOption(run, degree, False, forward, backward, arriving, returning, end, always, kept)
    if problem.recompute != "none":
        yield StageOption(
            run, degree, True, forward, forward + backward, arriving, returning, end, always + kept, received
        )


def _mean_link(cluster: Cluster, devices: range, degree: int) -> Link:
    """The link between neighbours of stages on `degree` of a run's `devices`: on average, where some are in one node.

    Which devices a stage gets is not known yet. One of the run's stages has neighbours in another group.
    """
    first, levels = cluster.part(devices[0])
    inner, outer = levels[0], (levels if cluster.part(devices[-1])[0] == first else cluster.levels)[-1].link
    link = inner.link if len(devices) <= inner.size else _mean(inner.link, outer, degree / inner.size)
    return _mean(link, cluster.levels[-1].link, degree / len(devices)) if len(devices) < cluster.size else link


def _mean(first: Link, second: Link, share: float) -> Link:
    """The first link, and the second for a share of all messages."""
    apart = min(1.0, share)
    latency = apart * second.latency_s + (1 - apart) * first.latency_s
    per_byte = apart / second.bandwidth_bytes_per_s + (1 - apart) / first.bandwidth_bytes_per_s
    return Link(latency, 1 / per_byte)


@dataclass(frozen=True, slots=True)
class StagePrice:
    """Prices of an option: the seconds of each range of blocks, and the most micro-batches in flight."""

    way: StageOption
    seconds: Matrix
    most: NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class StagePrices:
    """The prices of one size of micro-batch, degrees descending."""

    size: int
    micro_batches: int
    each: tuple[StagePrice, ...]
    runs: tuple[int, ...]
    """Numbers of devices in each run of like ones, in the order of the line."""
    limits: tuple[float, ...]
    """Bytes of memory on a device of each run."""
    bounds: frozenset[int]
    """Numbers of micro-batches in flight that are the most for some stretch in some way."""

    @property
    def places(self) -> int:
        """Places of the line: one more than blocks."""
        return len(self.each[0].seconds)

    def needs(self, target: float, levels: int) -> list[tuple[Devices, ...]]:
        """By level and run, the fewest devices on which each stretch takes at most `target` seconds a micro-batch."""
        target = min(target, float(np.finfo(float).max))
        fits = [(price.way, np.where(price.seconds <= target, price.most, 0)) for price in self.each]
        found: list[tuple[Devices, ...]] = []
        for level in range(levels + 1):
            kept = max(1, min(level, self.micro_batches))
            if (kept == level > 1 and kept - 1 in self.bounds) or not found:
                found.append(tuple(np.full((self.places, self.places), NEVER, dtype=np.int16) for _ in self.runs))
                for way, most in fits:
                    found[-1][way.run][most >= kept] = way.degree
            else:
                found.append(found[-1])
        return found

    def way(self, piece: PartitionStage, target: float) -> StageOption:
        """The way that `needs` found for a stage: of those on as few devices of its run the fastest."""
        start, stop, kept = piece.start, piece.stop, min(piece.level, self.micro_batches)
        fitting = (
            price
            for price in self.each
            if price.way.run == piece.run and price.seconds[start, stop] <= target and price.most[start, stop] >= kept
        )
        return min(fitting, key=lambda price: (price.way.degree, price.seconds[start, stop])).way


def make_prices(
    ways: list[StageOption], size: int, micro_batches: int, runs: Sequence[int], limits: Sequence[float], levels: int
) -> StagePrices:
    """Prices of stages with at most `levels` micro-batches in flight, on runs of devices with memory."""
    ordered = sorted(ways, key=lambda way: -way.degree)
    each = tuple(StagePrice(way, way.seconds(micro_batches), way.most(limits[way.run], levels)) for way in ordered)
    bounds = (np.bincount(price.most.ravel()).nonzero()[0].tolist() for price in each)
    return StagePrices(
        size, micro_batches, each, tuple(runs), tuple(limits), frozenset(itertools.chain.from_iterable(bounds))
    )
