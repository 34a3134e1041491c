"""Time and memory of each contiguous range of blocks as one stage: for each number of devices, with
and without recomputation, and for any micro-batch size.

Work and bytes are affine functions of the micro-batch size. They are computed from the values at
two sizes, so that no graph is created per size. Each matrix is indexed by (first block, block after
the last), and seconds are per micro-batch unless stated otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Cluster, Device, Link
from autopipe.ir.equality import node_labels
from autopipe.ir.problem import NodeCost, Problem
from autopipe.passes.analysis.chain import Matrix, range_sums
from autopipe.passes.analysis.operators import SampleAxes
from autopipe.passes.cost.communication import message_seconds
from autopipe.passes.cost.fusion import fused_work
from autopipe.passes.cost.memory import MemoryParts, fitting_micro_batches
from autopipe.passes.cost.memory_check import equal_device_ranges
from autopipe.passes.cost.range_tables import RangeTables
from autopipe.passes.cost.roofline import (
    accumulate_seconds_per_byte,
    node_seconds,
    roofline_costs_of_share,
    task_overhead_seconds,
)
from autopipe.passes.cost.stage_work import gradient_reduction_cost
from autopipe.passes.placement.graphpipe.search import UNREACHABLE, Devices, PartitionStage

Seconds = NDArray[np.float64]


class NodeSeconds:
    """Seconds of the forward and backward of each node, for any micro-batch size and any number of
    devices that divide the samples.

    The work at a micro-batch size is interpolated or extrapolated linearly from the work at the
    problem's micro-batch size and at half of it. Equal nodes with equal work form a class, which is
    computed once.
    """

    def __init__(self, problem: Problem, samples: SampleAxes) -> None:
        self.problem = problem
        self.samples = samples
        half = roofline_costs_of_share(problem.graph, samples, problem.precision, 0.5)
        if problem.compiled:
            half = fused_work(problem.graph, problem.precision, half)
        kinds: dict[tuple[int, NodeCost], int] = {}
        keys = zip(node_labels(problem.graph), problem.work, strict=True)
        self.kind_of = np.array([kinds.setdefault(key, len(kinds)) for key in keys], dtype=np.int64)
        """For each node, the index of its class of equal nodes with equal work."""
        self.firsts = np.unique(self.kind_of, return_index=True)[1].tolist()
        self.wholes = [problem.work[node] for node in self.firsts]
        self.halves = [half[node] for node in self.firsts]
        self.axes = np.array([samples.axes[node] is not None for node in self.firsts])
        self.measured = np.array([bool(whole.measured) for whole in self.wholes])
        """For each class: True if its times were measured. Measured times also cover fractions of
        the samples.
        """
        self._undivided: dict[int, Seconds] = {}

    def forward_and_backward(
        self, size: int, degree: int, devices: Sequence[Device]
    ) -> tuple[Seconds, Seconds]:
        """Return (forward, backward): the seconds of each node for a micro-batch of `size` samples
        that is divided among `degree` devices. Each value is the maximum over the device types
        `devices`. Backward is 0 in inference.
        """
        every = [self._on_device_type(device, size, degree) for device in devices]
        forward, backward = (np.maximum.reduce([each[phase] for each in every]) for phase in (0, 1))
        return forward, backward

    def _on_device_type(self, device: Device, size: int, degree: int) -> tuple[Seconds, Seconds]:
        """Return the seconds (forward, backward) of each node on one device type."""
        problem = self.problem
        part = size / problem.micro_batch_size
        shares = np.where(self.axes, 1.0 / degree, 1.0)
        work = [
            _interpolate_work(half, whole, part)
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

    def indivisible_nodes(self, degree: int) -> Seconds:
        """Return an array with 1 for each node whose samples `degree` devices cannot divide evenly,
        and 0 for all other nodes.
        """
        if degree not in self._undivided:
            each = [not self.samples.can_divide(node, degree) for node in self.firsts]
            self._undivided[degree] = np.array(each, dtype=float)[self.kind_of]
        return self._undivided[degree]


_SCALED_FIELDS = ("forward_flops", "backward_flops", "forward_bytes", "backward_bytes")


def _interpolate_work(half: NodeCost, whole: NodeCost, part: float) -> NodeCost:
    """Return the work of a node on the fraction `part` of the samples, given its work on half of
    the samples and on all samples.
    """
    found = {}
    for name in _SCALED_FIELDS:
        less = getattr(half, name)
        more = getattr(whole, name)
        found[name] = max(0.0, 2 * less - more) + 2 * part * (more - less)
    return replace(whole, measured=(), **found)


@dataclass(frozen=True, slots=True)
class DraftStage:
    """A stage without assigned devices: blocks `start` to `stop - 1` on `degree` devices of the run
    (range of equal devices) with index `run`.

    memory: bytes per device with `in_flight` micro-batches in flight.
    The other float fields are seconds, as in `StageOption`.
    """

    start: int
    stop: int
    run: int
    degree: int
    recompute: bool
    in_flight: int
    memory: float
    forward: float
    backward: float
    arriving: float
    returning: float
    end: float


@dataclass(frozen=True, slots=True)
class StageOption:
    """The costs of all contiguous ranges of blocks as stages on `degree` devices of one run (range
    of equal devices), with or without recomputation. Arrays are indexed by (first block, block
    after the last).
    """

    run: int
    """Index of the run of equal devices in `equal_device_ranges(cluster)`."""
    degree: int
    recompute: bool
    forward: Matrix
    backward: Matrix
    """Seconds of backward, including the recomputed forward and the accumulation of gradients."""
    arriving: Matrix
    """Seconds of messages with values from preceding stages."""
    returning: Matrix
    """Seconds of messages with gradients from following stages."""
    end: Matrix
    """Seconds per step of the gradient all-reduce and the optimizer update."""
    always: Matrix
    """Bytes per device that do not depend on the number of micro-batches in flight."""
    kept: Matrix
    """Bytes per device for each micro-batch in flight."""
    seconds: Matrix
    """Sum of the seconds above per micro-batch; `end` is divided by the number of micro-batches.
    Infinite for empty ranges.
    """
    most: NDArray[np.int16]
    """Maximum number of micro-batches in flight that fit the memory, at most the number of devices
    of the cluster; 0 if not even one fits.
    """

    def fits_memory(self, start: int, stop: int, in_flight: int) -> bool:
        """True if blocks `start` to `stop - 1` fit the memory with `in_flight` micro-batches in
        flight.
        """
        return bool(self.seconds[start, stop] < np.inf and self.most[start, stop] >= in_flight)

    def make_stage(self, start: int, stop: int, in_flight: int) -> DraftStage:
        """Return blocks `start` to `stop - 1` as a stage with `in_flight` micro-batches in
        flight.
        """
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
class OptionTable:
    """The stage options for micro-batches of `size` samples, in descending order of the number of
    devices. A stage option (`StageOption`) contains the costs of all ranges of blocks for one
    number of devices.
    """

    size: int
    micro_batches: int
    options: tuple[StageOption, ...]
    runs: tuple[int, ...]
    """Number of devices in each run (range of equal devices)."""
    limits: tuple[float, ...]
    """For each run of equal devices: the smallest memory limit of its devices, in bytes, plus the
    spare bytes of `option_table`.
    """
    bounds: frozenset[int]
    """All values of `StageOption.most` in the options. If the number of micro-batches in flight
    increases, the set of ranges that fit the memory can change only after one of these values.
    """

    @property
    def block_boundaries(self) -> int:
        """Number of block boundaries, one more than the number of blocks."""
        return len(self.options[0].seconds)

    def minimum_devices_by_level(self, target: float, levels: int) -> list[tuple[Devices, ...]]:
        """Return tables with the minimum number of devices on which each range of blocks takes at
        most `target` seconds per micro-batch, or `UNREACHABLE`.

        The list has an entry for each level (number of micro-batches in flight) from 0 to `levels`.
        An entry has one table [start, stop] per run of devices (range of equal devices). Levels
        with equal tables share them.
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
                        np.full(
                            (self.block_boundaries, self.block_boundaries),
                            UNREACHABLE,
                            dtype=np.int16,
                        )
                        for _ in self.runs
                    )
                )
                for option, most in fits:
                    found[-1][option.run][most >= kept] = option.degree
            else:
                found.append(found[-1])
        return found

    def make_stage(self, piece: PartitionStage, target: float) -> DraftStage:
        """Return the stage for `piece`, a stage of a solution of the search with target time
        `target`. Of the options that meet the target and fit the memory, those with the fewest
        devices count, and the fastest of them is used.
        """
        at = (piece.start, piece.stop)
        kept = min(piece.level, self.micro_batches)
        fitting = (
            option
            for option in self.options
            if option.run == piece.run and option.seconds[at] <= target and option.most[at] >= kept
        )
        return min(fitting, key=lambda option: (option.degree, option.seconds[at])).make_stage(
            *at, kept
        )


def option_table(
    tables: RangeTables, seconds: NodeSeconds, size: int, degrees: Iterable[int], spare: float = 0.0
) -> OptionTable:
    """Return the stage options (`StageOption`) for micro-batches of `size` samples, on the numbers
    of devices in `degrees` that divide `size`.

    `spare` bytes are added to the memory limit of each device.
    """
    problem = tables.problem
    runs = equal_device_ranges(problem.cluster)
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
    return OptionTable(
        size,
        problem.batch_size // size,
        tuple(options),
        tuple(map(len, runs)),
        tuple(limits),
        frozenset(bounds),
    )


def _options(
    tables: RangeTables, seconds: NodeSeconds, size: int, degree: int, run: int, limit: float
) -> Iterator[StageOption]:
    """Yield the stage options on `degree` devices of the run (range of equal devices) with index
    `run`, whose memory limit is `limit` bytes: with recomputation, without it, or both, as the
    problem permits.
    """
    problem = tables.problem
    chain = tables.chain
    devices = equal_device_ranges(problem.cluster)[run]
    kinds = problem.cluster.device_types_among(devices)
    micro_batches = problem.batch_size // size
    part = size / problem.micro_batch_size / degree
    memory = MemoryParts(
        tables.state_bytes(degree),
        tables.low_precision,
        tables.workspace.scaled(part),
        tables.received.scaled(part),
        tables.sent.scaled(part),
        tables.kept.scaled(part),
    )
    link = _mean_link(problem.cluster, devices, degree)
    forward, backward = (
        range_sums(chain.sums_by_block(each))
        for each in seconds.forward_and_backward(size, degree, kinds)
    )
    uneven = seconds.indivisible_nodes(degree)
    device = max(kinds, key=accumulate_seconds_per_byte)
    starts = task_overhead_seconds(device)
    forward += starts[0]
    if uneven.any():
        forward += tables.infinite_with(uneven)
    launch_s = max(kind.host_launch_s for kind in kinds)
    arriving = message_seconds(link, tables.arriving, memory.received)
    empty = np.tri(len(forward), dtype=bool)

    def make_option(
        recompute: bool, backward: Matrix, returning: Matrix, end: Matrix
    ) -> StageOption:
        """Return the option with the given recomputation; the matrices contain seconds, as in
        `StageOption`.
        """
        always, kept = memory.needed(problem, recompute)
        tasks = forward, backward
        if launch_s:
            on_host = tables.host_seconds(launch_s, recompute)
            tasks = np.maximum(forward, on_host[0]), np.maximum(backward, on_host[1])
        every = tasks[0] + tasks[1] + arriving + returning + end / micro_batches
        most = fitting_micro_batches(limit - always, kept, problem.cluster.size).astype(np.int16)
        seconds = np.where(empty, np.inf, every)
        return StageOption(
            run, degree, recompute, *tasks, arriving, returning, end, always, kept, seconds, most
        )

    if not problem.train:
        zero = np.zeros_like(forward)
        yield make_option(False, zero, zero, zero)
        return
    backward += starts[1] + tables.accumulate_seconds(device, micro_batches)
    returning = message_seconds(link, tables.leaving, memory.sent)
    reduce = gradient_reduction_cost(problem, devices[:degree])
    end = tables.step_end_seconds(degree, device, reduce)
    if problem.recompute != "full":
        yield make_option(False, backward, returning, end)
    if problem.recompute != "none":
        yield make_option(True, forward + backward, returning, end)


def _mean_link(cluster: Cluster, devices: range, degree: int) -> Link:
    """Return the average link between neighbouring stages that have `degree` devices each.

    The devices of a stage are not known yet, so the link between two stages is an average: some
    neighbouring stages share a node of the cluster, others do not, and one stage of the run has a
    neighbour in another group of the cluster.
    """
    first, levels = cluster.part(devices[0])
    inner = levels[0]
    outer = (levels if cluster.part(devices[-1])[0] == first else cluster.levels)[-1].link
    link = (
        inner.link
        if len(devices) <= inner.size
        else _mix_links(inner.link, outer, degree / inner.size)
    )
    return (
        _mix_links(link, cluster.levels[-1].link, degree / len(devices))
        if len(devices) < cluster.size
        else link
    )


def _mix_links(first: Link, second: Link, fraction: float) -> Link:
    """Return a link with the mean latency and the mean seconds per byte of two links; `fraction` of
    all messages use the second link.
    """
    weight = min(1.0, fraction)
    latency = weight * second.latency_s + (1 - weight) * first.latency_s
    per_byte = weight / second.bandwidth_bytes_per_s + (1 - weight) / first.bandwidth_bytes_per_s
    return Link(latency, 1 / per_byte)
