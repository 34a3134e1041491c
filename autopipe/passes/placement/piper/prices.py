"""The price of every stage between two downsets, for each way in which a group may share it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Device
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.operators import SampleAxes, sample_axes
from autopipe.passes.cost.roofline import update_line
from autopipe.passes.cost.stage_work import exchange_of_gradients, updated_part
from autopipe.passes.partition.downsets import Downsets, Figures, Pairs
from autopipe.passes.placement.piper.blocks import Blocks
from autopipe.passes.placement.piper.figures import BlockFigures, Sums, block_figures
from autopipe.passes.placement.piper.messages import Messages
from autopipe.passes.placement.piper.sharing import StageSharing, sharings

_ROUNDING = 1e-9

_AHEAD = 2
"""By what factor more time stages are priced for than is asked for."""

ANY_PLACE = np.iinfo(np.int16).max
"""A stage that fits wherever it stands."""


@dataclass(frozen=True, slots=True)
class Option:
    """Stages shared in one way: pairs of downsets, seconds a micro-batch, and the farthest place from the end, counted
    from 1, at which memory holds each."""

    sharing: StageSharing
    recompute: bool
    pairs: NDArray[np.int64]
    seconds: Figures
    farthest: NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class Chains:
    """Facts common to micro-batches of any size: blocks, their downsets, and the messages between them."""

    blocks: Blocks
    downsets: Downsets
    received: Messages
    sent: Messages
    samples: int
    """Samples that messages are counted for."""


class StagePrices:
    """Prices of stages for the micro-batches of one problem.

    A stage receives and sends over the slowest link that there is, since where it stands is not known, and is as slow
    as on the slowest device.
    """

    def __init__(self, problem: Problem, chains: Chains) -> None:
        self.problem, self.chains = problem, chains
        cluster = problem.cluster
        self.link = cluster.slowest_link(range(cluster.size))
        self.limit = min(map(problem.memory_of, range(cluster.size)))
        self._known_s, self._known = -np.inf, list[Option]()
        """The most seconds for which options are known, and these: a search asks again and again, for a bit more."""

    @cached_property
    def _shared(self) -> list[tuple[StageSharing, BlockFigures]]:
        problem, blocks = self.problem, self.chains.blocks
        ways = sharings(problem, blocks, self.samples)
        return [(sharing, block_figures(problem, blocks, sharing)) for sharing in ways]

    @cached_property
    def samples(self) -> SampleAxes:
        """The batch axes of the problem's graph."""
        return sample_axes(self.problem.graph)

    @cached_property
    def _least_work(self) -> NDArray[np.float64]:
        """For each block the least seconds of a micro-batch's computation, times the devices that share it."""
        work = [sharing.devices * (figures.forward_s + figures.backward_s) for sharing, figures in self._shared]
        found: NDArray[np.float64] = np.min(work, axis=0)
        return found

    @property
    def least_s(self) -> float:
        """Seconds that the slowest stage takes at least: an even share of what all blocks take."""
        return float(self._least_work.sum()) / self.problem.cluster.size

    @property
    def most_s(self) -> float:
        """Seconds that no stage exceeds."""
        chains, whole = self.chains, self._whole
        messages = sum(
            each.count.max() * self.link.latency_s
            + (each.cut.max() + each.whole.max()) / self.link.bandwidth_bytes_per_s
            for each in (chains.received, chains.sent)
        )
        found = (
            float((2 * figures.forward_s + figures.backward_s).sum())
            + float(self._step_seconds(sharing, figures, whole).max())
            for sharing, figures in self._shared
        )
        return max(found) + float(messages)

    @cached_property
    def _left(self) -> Figures:
        """The least work that each stage leaves to others."""
        downsets = self.chains.downsets
        found: Figures = self._least_work.sum() - Sums(self._least_work).over(downsets, downsets.pairs)
        return found

    def options(self, most_s: float) -> list[Option]:
        """All stages that take no more than `most_s`, fit somewhere, and leave no more work to the other devices than
        these do in that time; smaller groups first."""
        if len(self.problem.cluster.kinds) > 1:  # Which kind updates slowest is told by all stages that are priced.
            return self._options(self.chains.downsets.pairs, most_s)
        if most_s > self._known_s:
            self._known_s = most_s * _AHEAD
            self._known = self._options(self.chains.downsets.pairs, self._known_s)
        found = (self._within(option, most_s) for option in self._known)
        return [option for option in found if len(option.pairs)]

    def _within(self, option: Option, most_s: float) -> Option:
        """Part of an option with less time."""
        fits = option.seconds <= most_s
        if others := self._others(option.sharing):
            fits &= self._left.take(option.pairs) <= others * most_s
        places = np.flatnonzero(fits)
        return replace(
            option,
            pairs=option.pairs.take(places),
            seconds=option.seconds.take(places),
            farthest=option.farthest.take(places),
        )

    def _others(self, sharing: StageSharing) -> int:
        """The devices outside a group."""
        return self.problem.cluster.size - sharing.devices

    def whole(self) -> list[Option]:
        """All blocks as one stage, in every way that fits."""
        return self._options(self._whole, np.inf)

    @cached_property
    def _whole(self) -> Pairs:
        """The pair of all blocks and none."""
        downsets = self.chains.downsets
        return downsets.pairs.some((downsets.outer == 0) & (downsets.inner == len(downsets.holds) - 1))

    def _options(self, among: Pairs, most_s: float) -> list[Option]:
        ways = ((*each, recompute) for each in self._shared for recompute in self._recomputations())
        found = (self._option(*way, among, most_s) for way in ways)
        return [option for option in found if len(option.pairs)]

    def _recomputations(self) -> tuple[bool, ...]:
        wanted = self.problem.recompute if self.problem.train else "none"
        return {"none": (False,), "full": (True,)}.get(wanted, (False, True))

    def _option(
        self, sharing: StageSharing, figures: BlockFigures, recompute: bool, among: Pairs, most_s: float
    ) -> Option:
        compute = figures.backward_s + figures.forward_s * (2 if recompute else 1)
        seconds = Sums(compute).over(self.chains.downsets, among)
        left, others = self._left.take(among.numbers), self._others(sharing)
        enough = left <= (others * most_s if others else _ROUNDING * seconds)
        places = np.flatnonzero((seconds <= most_s) & enough)
        pairs = among.some(places)
        seconds = seconds[places] + self._step_seconds(sharing, figures, pairs) + self._message_seconds(sharing, pairs)
        quick = np.flatnonzero(seconds <= most_s)
        pairs, seconds = pairs.some(quick), seconds[quick]
        farthest = self._farthest(sharing, figures, recompute, pairs)
        fits = farthest > 0
        return Option(sharing, recompute, pairs.numbers[fits], seconds[fits], farthest[fits])

    def _message_seconds(self, sharing: StageSharing, pairs: Pairs) -> Figures:
        found = np.zeros(1)
        for messages in (self.chains.received, self.chains.sent)[: 2 if self.problem.train else 1]:
            size = messages.local_bytes(self._share(sharing), pairs)
            count = messages.count.take(pairs.numbers)
            found = found + count * self.link.latency_s + size / self.link.bandwidth_bytes_per_s
        return found

    def _share(self, sharing: StageSharing) -> float:
        """The part that a replica's micro-batch is of the samples that messages are counted for."""
        return self.problem.micro_batch_size / self.chains.samples / sharing.replicas

    def _step_seconds(self, sharing: StageSharing, figures: BlockFigures, pairs: Pairs) -> Figures:
        """A micro-batch's share of the end of a step: summing gradients over replicas, updating parameters."""
        if not self.problem.train:
            return np.zeros(1)
        problem, downsets = self.problem, self.chains.downsets
        whole = figures.gradients.over(downsets, pairs)
        cut = figures.cut_gradients.over(downsets, pairs)
        every, alike = range(sharing.devices), range(0, sharing.devices, sharing.tensor)
        seconds = exchange_of_gradients(problem, every).seconds_each(whole)
        seconds = seconds + exchange_of_gradients(problem, alike).seconds_each(cut)
        updated = whole * updated_part(problem, len(every)) + cut * updated_part(problem, len(alike))
        seconds = seconds + max((self._update(device, updated) for device in set(problem.cluster.devices)), key=np.sum)
        found: Figures = seconds / self.problem.micro_batches
        return found

    def _update(self, device: Device, gradients: Figures) -> Figures:
        update = update_line(device, self.problem.optimizer.states)
        found: Figures = gradients * update.per_byte_s + update.fixed_s * (gradients > 0)
        return found

    def _farthest(
        self, sharing: StageSharing, figures: BlockFigures, recompute: bool, pairs: Pairs
    ) -> NDArray[np.int16]:
        """The farthest place from the end at which each stage fits; 0 for none. At place k it keeps k micro-batches."""
        downsets, train = self.chains.downsets, self.problem.train
        received = self.chains.received.local_bytes(self._share(sharing), pairs)
        buffers = received + self.chains.sent.local_bytes(self._share(sharing), pairs)
        always = figures.state.over(downsets, pairs) + self._workspace(figures, pairs) + (1 + train) * buffers
        each = figures.kept.over(downsets, pairs) if train else np.zeros_like(always)
        if recompute:
            always, each = always + each, received
        room = self.limit - always + 1e-3  # Sums of bytes are whole numbers, but for rounding.
        with np.errstate(divide="ignore", invalid="ignore"):
            count = np.where(each > 0, np.floor(room / each), np.inf)
        count = np.where(room < 0, 0, np.where(count >= self.problem.micro_batches, ANY_PLACE, count))
        return np.minimum(count, ANY_PLACE).astype(np.int16)

    def _workspace(self, figures: BlockFigures, pairs: Pairs) -> Figures:
        """The most that one of a stage's blocks needs."""
        downsets = self.chains.downsets
        found = np.zeros(len(pairs.inner))
        for size in np.unique(figures.workspace):
            count = downsets.holds[:, figures.workspace == size].sum(axis=1)
            found[pairs.difference(count) > 0] = size
        return found
