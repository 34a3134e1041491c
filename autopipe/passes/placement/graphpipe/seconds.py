"""Seconds of every node's forward and backward on micro-batches of any size, shared by any number of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Device
from autopipe.ir.problem import Problem, Work
from autopipe.passes.analysis.operators import SampleAxes
from autopipe.passes.cost.roofline import annotate_share, node_seconds

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
        """Those that go by what was measured, which says itself what a share of the samples takes."""

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
