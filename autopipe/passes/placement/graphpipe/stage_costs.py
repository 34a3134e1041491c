"""Time and memory of every stretch of the line as one stage, in every way of running it, for any
micro-batch.

All figures grow with the micro-batch by a straight line. They are read off once, and no graph is
made for each size. Every matrix is indexed by (first block, block after the last); seconds are
those of a micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Cluster, Device, Link
from autopipe.ir.problem import Problem, Work
from autopipe.passes.analysis.chain import Matrix, range_sums
from autopipe.passes.analysis.gradients import most_widened
from autopipe.passes.analysis.operators import SampleAxes
from autopipe.passes.cost.fusion import fused
from autopipe.passes.cost.memory_check import equal_device_runs
from autopipe.passes.cost.range_tables import Tables
from autopipe.passes.cost.roofline import (
    accumulate_per_byte,
    annotate_share,
    node_seconds,
    task_seconds,
    update_line,
)
from autopipe.passes.cost.stage_work import exchange_of_gradients, updated_part
from autopipe.passes.placement.graphpipe.search import NEVER, Devices, PartitionStage

Seconds = NDArray[np.float64]


class NodeSeconds:
    """Seconds of every node's forward and backward on micro-batches of any size, shared by any
    number of devices. Work at other sizes of micro-batches lies on the line through that at the
    problem's own and at half of it. Nodes of equal work are looked at once.
    """

    def __init__(self, problem: Problem, samples: SampleAxes) -> None:
        self.problem = problem
        self.samples = samples
        half = annotate_share(problem.graph, samples, problem.precision, 0.5)
        if problem.compiled:
            half = fused(problem.graph, problem.precision, half)
        kinds: dict[tuple[int, Work], int] = {}
        keys = [(id(use), work) for use, work in zip(samples.uses, problem.work, strict=True)]
        self.kind_of = np.array([kinds.setdefault(key, len(kinds)) for key in keys], dtype=np.int64)
        """Which of the different nodes each node is like."""
        self.firsts = np.unique(self.kind_of, return_index=True)[1].tolist()
        self.wholes = [problem.work[node] for node in self.firsts]
        self.halves = [half[node] for node in self.firsts]
        self.axes = np.array([samples.axes[node] is not None for node in self.firsts])
        self.measured = np.array([bool(whole.measured) for whole in self.wholes])
        """Nodes whose measured costs say what a share of the samples takes."""
        self._undivided: dict[int, Seconds] = {}

    def of(self, size: int, degree: int, devices: Sequence[Device]) -> tuple[Seconds, Seconds]:
        """Forward and backward of each node on the slowest of `devices`, backward 0 without
        training.
        """
        every = [self._on(device, size, degree) for device in devices]
        forward, backward = (np.maximum.reduce([each[phase] for each in every]) for phase in (0, 1))
        return forward, backward

    def _on(self, device: Device, size: int, degree: int) -> tuple[Seconds, Seconds]:
        problem = self.problem
        part = size / problem.micro_batch_size
        shares = np.where(self.axes, 1.0 / degree, 1.0)
        work = [
            _between(half, whole, part)
            for half, whole in zip(self.halves, self.wholes, strict=True)
        ]
        forward, backward = node_seconds(work, device, problem.precision, shares)
        if self.measured.any():
            seconds = node_seconds(
                self.wholes, device, problem.precision, np.where(self.axes, part / degree, 1.0)
            )
            forward = np.where(self.measured, seconds[0], forward)
            backward = np.where(self.measured, seconds[1], backward)
        backward = backward if problem.train else np.zeros_like(forward)
        return forward[self.kind_of], backward[self.kind_of]

    def undivided(self, degree: int) -> Seconds:
        """1 for nodes whose samples `degree` devices cannot share."""
        if degree not in self._undivided:
            each = [not self.samples.divides(node, degree) for node in self.firsts]
            self._undivided[degree] = np.array(each, dtype=float)[self.kind_of]
        return self._undivided[degree]


_FIGURES = ("forward_flops", "backward_flops", "forward_bytes", "backward_bytes")


def _between(half: Work, whole: Work, part: float) -> Work:
    """The work of `part` of the samples."""
    found = {}
    for name in _FIGURES:
        less = getattr(half, name)
        more = getattr(whole, name)
        found[name] = max(0.0, 2 * less - more) + 2 * part * (more - less)
    return replace(whole, measured=(), **found)


@dataclass(frozen=True, slots=True)
class DraftStage:
    """A stage that has no devices yet: blocks `start` to `stop - 1` of a line on `degree` devices
    of a run.
    """

    start: int
    stop: int
    run: int
    degree: int
    recompute: bool
    in_flight: int
    memory: float  # Bytes on a device.
    forward: float  # Seconds, like all that follows as `StageOption` has them.
    backward: float
    arriving: float
    returning: float
    end: float


@dataclass(frozen=True, slots=True)
class StageOption:
    """A way of running stretches: on `degree` devices of a run of like ones, with or without
    recomputation.
    """

    run: int
    """Which of the cluster's runs of devices that a stage may have, as `equal_device_runs` counts
    them.
    """
    degree: int
    recompute: bool
    forward: Matrix
    backward: Matrix
    """With the second forward of recomputation, and with adding gradients to those before."""
    arriving: Matrix  # Messages from the stages before.
    returning: Matrix  # Messages with gradients, from the stages after.
    end: Matrix  # Seconds, once a step, of summing gradients over devices and of the update.
    always: Matrix  # Bytes on a device, whatever is in flight.
    kept: Matrix  # Bytes for each micro-batch in flight.
    seconds: Matrix  # All of them, with a share of the step's end; infinite for empty stretches.
    most: NDArray[np.int16]
    """The most micro-batches in flight that memory takes, up to the number of devices; 0 where not
    even one fits.
    """

    def holds(self, start: int, stop: int, in_flight: int) -> bool:
        """True if a stretch can be run so with that many micro-batches in flight."""
        return bool(self.seconds[start, stop] < np.inf and self.most[start, stop] >= in_flight)

    def stage(self, start: int, stop: int, in_flight: int) -> DraftStage:
        at = (start, stop)
        memory = float(self.always[at] + in_flight * self.kept[at])
        seconds = (
            float(each[at])
            for each in (self.forward, self.backward, self.arriving, self.returning, self.end)
        )
        return DraftStage(
            start, stop, self.run, self.degree, self.recompute, in_flight, memory, *seconds
        )


@dataclass(frozen=True, slots=True)
class StagePrices:
    """The options of one size of micro-batch, degrees descending."""

    size: int
    micro_batches: int
    options: tuple[StageOption, ...]
    runs: tuple[int, ...]  # Numbers of devices in each run of like ones, in the order of the line.
    limits: tuple[float, ...]  # Bytes of memory on a device of each run.
    bounds: frozenset[int]
    """Numbers of micro-batches in flight that are the most for some stretch in some way."""

    @property
    def places(self) -> int:
        """Places of the line: one more than blocks."""
        return len(self.options[0].seconds)

    def needs(self, target: float, levels: int) -> list[tuple[Devices, ...]]:
        """By level and run, the fewest devices on which each stretch takes at most `target` seconds
        a micro-batch.
        """
        target = min(target, float(np.finfo(float).max))
        fits = [
            (option, np.where(option.seconds <= target, option.most, 0)) for option in self.options
        ]
        found: list[tuple[Devices, ...]] = []
        for level in range(levels + 1):
            kept = max(1, min(level, self.micro_batches))
            if (kept == level > 1 and kept - 1 in self.bounds) or not found:
                found.append(
                    tuple(
                        np.full((self.places, self.places), NEVER, dtype=np.int16)
                        for _ in self.runs
                    )
                )
                for option, most in fits:
                    found[-1][option.run][most >= kept] = option.degree
            else:
                found.append(found[-1])
        return found

    def stage(self, piece: PartitionStage, target: float) -> DraftStage:
        """A stage in the way that `needs` found: of those on as few devices of its run the
        fastest.
        """
        at = (piece.start, piece.stop)
        kept = min(piece.level, self.micro_batches)
        fitting = (
            option
            for option in self.options
            if option.run == piece.run and option.seconds[at] <= target and option.most[at] >= kept
        )
        return min(fitting, key=lambda option: (option.degree, option.seconds[at])).stage(*at, kept)


def stage_prices(
    tables: Tables, seconds: NodeSeconds, size: int, degrees: Iterable[int], spare: float = 0.0
) -> StagePrices:
    """The prices of micro-batches of `size` samples, by each of some degrees that can share them.
    Each device has its memory limit, and `spare` bytes more.
    """
    problem = tables.problem
    runs = equal_device_runs(problem.cluster)
    limits = [min(map(problem.memory_of, run)) + spare for run in runs]
    shared = bool(problem.graph.batch_axes)
    allowed = [degree for degree in degrees if size % degree == 0 and (shared or degree == 1)]
    options = [
        option
        for index, run in enumerate(runs)
        for degree in allowed
        if degree <= len(run)
        for option in _options(tables, seconds, size, degree, index, limits[index])
    ]
    options.sort(key=lambda option: -option.degree)
    counted = (np.bincount(option.most.ravel()).nonzero()[0].tolist() for option in options)
    bounds = itertools.chain.from_iterable(counted)
    figures = tuple(options), tuple(map(len, runs)), tuple(limits), frozenset(bounds)
    return StagePrices(size, problem.batch_size // size, *figures)


def _options(
    tables: Tables, seconds: NodeSeconds, size: int, degree: int, run: int, limit: float
) -> Iterator[StageOption]:
    """The ways of one degree that the problem's recomputation leaves."""
    problem = tables.problem
    chain = tables.chain
    devices = equal_device_runs(problem.cluster)[run]
    kinds = problem.cluster.kinds_among(devices)
    part = size / problem.micro_batch_size / degree
    received, sent, kept, workspace = (
        each.sharded * part + each.replicated
        for each in (tables.received, tables.sent, tables.kept, tables.workspace)
    )
    link = _mean_link(problem.cluster, devices, degree)
    forward, backward = (
        range_sums(chain.by_block(each)) for each in seconds.of(size, degree, kinds)
    )
    uneven = seconds.undivided(degree)
    device = max(kinds, key=accumulate_per_byte)
    starts = task_seconds(device)
    forward += starts[0]
    if uneven.any():
        forward += np.where(range_sums(chain.by_block(uneven)) > 0.5, np.inf, 0.0)
    launch_s = max(kind.host_launch_s for kind in kinds)
    arriving = tables.arriving * link.latency_s + received / link.bandwidth_bytes_per_s
    always = tables.held(degree) + workspace + received + sent
    empty = np.tri(len(forward), dtype=bool)

    def option(
        recompute: bool,
        backward: Matrix,
        returning: Matrix,
        end: Matrix,
        always: Matrix,
        kept: Matrix,
    ) -> StageOption:
        tasks = forward, backward
        if launch_s:
            on_host = tables.host_seconds(launch_s, recompute)
            tasks = np.maximum(forward, on_host[0]), np.maximum(backward, on_host[1])
        every = tasks[0] + tasks[1] + arriving + returning + end / (problem.batch_size // size)
        room = limit - always
        levels = problem.cluster.size
        with np.errstate(divide="ignore", invalid="ignore"):
            most = np.where(kept > 0, np.floor(room / kept), levels)
        most = np.clip(np.where(room < 0, 0, most), 0, levels).astype(np.int16)
        priced = np.where(empty, np.inf, every), most
        return StageOption(
            run, degree, recompute, *tasks, arriving, returning, end, always, kept, *priced
        )

    if not problem.train:
        zero = np.zeros_like(forward)
        yield option(False, zero, zero, zero, always + tables.low_precision, zero)
        return
    backward += starts[1] + tables.gradients * accumulate_per_byte(device) * (
        1 - size / problem.batch_size
    )
    returning = tables.leaving * link.latency_s + sent / link.bandwidth_bytes_per_s
    update = update_line(device, problem.optimizer.states)
    end = tables.gradients * updated_part(problem, degree) * update.per_byte_s + update.fixed_s * (
        tables.gradients > 0
    )
    end += exchange_of_gradients(problem, devices[:degree]).seconds_each(tables.gradients)
    always = always + received + sent
    if problem.recompute != "full":
        yield option(False, backward, returning, end, always + tables.low_precision, kept)
    if problem.recompute != "none":
        kept_received = received * most_widened(problem.precision)
        yield option(True, forward + backward, returning, end, always + kept, kept_received)


def _mean_link(cluster: Cluster, devices: range, degree: int) -> Link:
    """The link between neighbours of stages on `degree` of a run's `devices`: on average, where
    some are in one node. Which devices a stage gets is not known yet. One of the run's stages has
    neighbours in another group.
    """
    first, levels = cluster.part(devices[0])
    inner = levels[0]
    outer = (levels if cluster.part(devices[-1])[0] == first else cluster.levels)[-1].link
    link = (
        inner.link if len(devices) <= inner.size else _mean(inner.link, outer, degree / inner.size)
    )
    return (
        _mean(link, cluster.levels[-1].link, degree / len(devices))
        if len(devices) < cluster.size
        else link
    )


def _mean(first: Link, second: Link, share: float) -> Link:
    """The first link, and the second for a share of all messages."""
    apart = min(1.0, share)
    latency = apart * second.latency_s + (1 - apart) * first.latency_s
    per_byte = apart / second.bandwidth_bytes_per_s + (1 - apart) / first.bandwidth_bytes_per_s
    return Link(latency, 1 / per_byte)
