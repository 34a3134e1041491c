"""Time and memory of every range of the line as one stage, by number of devices.

All figures grow with the micro-batch by a straight line. They are read off once, and no graph is made for each size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Cluster, Link
from autopipe.passes.analysis.chain import Matrix, range_sums
from autopipe.passes.cost.memory_check import equal_device_runs
from autopipe.passes.cost.range_tables import Tables
from autopipe.passes.cost.roofline import accumulate_per_byte, task_seconds, update_line
from autopipe.passes.cost.stage_work import exchange_of_gradients, updated_part
from autopipe.passes.placement.graphpipe.seconds import NodeSeconds


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
