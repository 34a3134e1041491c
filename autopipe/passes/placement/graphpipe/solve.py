"""The binary search over what a sample may take, and its answers: the best line of stages by their depth."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopipe.passes.placement.graphpipe.estimate import stage_depths, step_seconds
from autopipe.passes.placement.graphpipe.fewest import fewest_devices
from autopipe.passes.placement.graphpipe.line import BlockLine
from autopipe.passes.placement.graphpipe.prices import StagePrices
from autopipe.passes.placement.graphpipe.search import TargetProbe
from autopipe.passes.placement.graphpipe.stages import DraftStage

_WORTH_WIDENING = 1.2
"""Partitions that take no longer than this many times the best are given the devices that they leave over."""

_FEW_STAGES = 6
"""Of more stages, cuts stay where the search puts them."""

_ROUNDING = 1e-9
"""Share of what stages take at least by which sums in another order may be below it."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A line of stages on micro-batches of `size` samples."""

    drafts: tuple[DraftStage, ...]
    size: int
    depth: int
    step_s: float
    """Seconds of a step, as far as the search's own prices tell."""
    memory: float
    """Share of the memory limit that the fullest device needs, as far as they tell."""


@dataclass(frozen=True, slots=True)
class Solver:
    """Search on one line with at most `devices` devices."""

    line: BlockLine
    devices: int
    train: bool

    def answers(self, prices: StagePrices, least: float, limit: float) -> Iterator[Partition]:
        """The fastest line of stages, then the fastest of less depth, and so on, as long as they promise to be better.

        No stage takes less than `least` seconds a micro-batch; a step must take less than `limit`.
        """
        levels = self._levels(prices)
        while levels:
            target = self.fastest(prices, least, limit / prices.micro_batches, levels)
            if target is None:
                return
            answer = self._answer(prices, target, levels)
            yield answer
            if answer.step_s < limit * _WORTH_WIDENING:
                answer = self.widened(answer, prices)
                yield answer
            limit = min(limit, answer.step_s)
            levels = answer.depth - 1
            least = target

    def whole(self, prices: StagePrices) -> Partition | None:
        """The fastest single stage; None where memory holds none."""
        at = (0, prices.places - 1)
        fitting = [price for price in prices.each if price.seconds[at] < np.inf and price.most[at]]
        if not fitting:
            return None
        way = min(fitting, key=lambda price: float(price.seconds[at])).way
        return self._judged((DraftStage.of(way, *at, 1),), prices)

    def widened(self, answer: Partition, prices: StagePrices) -> Partition:
        """The answer with devices that it leaves over given to the stages where they shorten the step most.

        Of few stages the cuts are moved too, where that does: the target of the search does not ask for it.
        """
        best = answer
        while True:
            spare = list(prices.runs)
            for draft in best.drafts:
                spare[draft.run] -= draft.degree
            others = [
                self._judged((*best.drafts[:stage], wider, *best.drafts[stage + 1 :]), prices)
                for stage, draft in enumerate(best.drafts)
                for wider in self._wider(draft, prices, spare[draft.run])
            ]
            if len(best.drafts) <= _FEW_STAGES:
                others += (self._judged(drafts, prices) for drafts in self._moved(best.drafts, prices))
            better = min(others, key=lambda other: other.step_s, default=best)
            if better.step_s >= best.step_s:
                return best
            best = better

    def _moved(self, drafts: tuple[DraftStage, ...], prices: StagePrices) -> Iterator[tuple[DraftStage, ...]]:
        """The stages with one cut a block further on or back, where depths and memory stay as they are."""
        depths = stage_depths(self._before(drafts))
        for stage, (one, other) in enumerate(itertools.pairwise(drafts)):
            for cut in (one.stop - 1, one.stop + 1):
                if not one.start < cut < other.stop:
                    continue
                first = self._resized(one, one.start, cut, prices)
                second = self._resized(other, cut, other.stop, prices)
                if first is not None and second is not None:
                    found = (*drafts[:stage], first, second, *drafts[stage + 2 :])
                    if stage_depths(self._before(found)) == depths:
                        yield found

    def _resized(self, draft: DraftStage, start: int, stop: int, prices: StagePrices) -> DraftStage | None:
        """A stage of other blocks on as many devices; None where they cannot be shared or memory does not hold it."""
        at = (start, stop)
        for price in prices.each:
            way = price.way
            alike = (way.run, way.degree, way.recompute) == (draft.run, draft.degree, draft.recompute)
            if alike and price.seconds[at] < np.inf and price.most[at] >= draft.in_flight:
                return DraftStage.of(price.way, start, stop, draft.in_flight)
        return None

    def _wider(self, draft: DraftStage, prices: StagePrices, spare: int) -> Iterator[DraftStage]:
        """A stage on more devices of its run, `spare` at most, with what it keeps in flight."""
        for price in prices.each:
            at = (draft.start, draft.stop)
            more = price.way.degree - draft.degree if price.way.run == draft.run else 0
            if 0 < more <= spare and price.seconds[at] < np.inf and price.most[at] >= draft.in_flight:
                yield DraftStage.of(price.way, draft.start, draft.stop, draft.in_flight)

    def is_held(self, prices: StagePrices) -> bool:
        """True if memory holds some line of stages, however long they take."""
        return self._meets(prices, np.inf, self._levels(prices))

    def any_answer(self, prices: StagePrices) -> Partition:
        """A line of stages that memory holds, however long they take, where there is one."""
        return self._answer(prices, np.inf, self._levels(prices))

    def _levels(self, prices: StagePrices) -> int:
        """The most stages that follow one another."""
        return min(self.devices, prices.places - 1)

    def fastest(self, prices: StagePrices, low: float, high: float, levels: int) -> float | None:
        """The least number of seconds, between two, that every stage of some line of this depth takes at most."""
        slowest = (np.max(price.seconds, where=price.seconds < np.inf, initial=0.0) for price in prices.each)
        high = min(high, float(max(slowest)))
        # One stage less has the others take about so much more.
        step = low / levels
        while 0 < step < high - low:
            if self._meets(prices, low + step, levels):
                high = low + step
                break
            low += step
            step *= 2
        else:
            if high < low or not self._meets(prices, high, levels):
                return None
        low *= 1 - _ROUNDING
        found = [each.seconds[(each.seconds >= low) & (each.seconds <= high) & (each.most > 0)] for each in prices.each]
        values = np.unique(np.concatenate(found))
        first, last = 0, len(values) - 1
        while first < last:
            middle = (first + last) // 2
            if self._meets(prices, float(values[middle]), levels):
                last = middle
            else:
                first = middle + 1
        return float(values[first])

    def _meets(self, prices: StagePrices, target: float, levels: int) -> bool:
        """True if the devices are enough; mostly it is told without levels."""
        needs = prices.needs(target, levels)
        if fewest_devices(self.line.regions, needs[1], prices.runs) > self.devices:
            return False
        if needs[1] is needs[-1] and levels == self._levels(prices):
            return True  # No line has more levels than devices or blocks, and it keeps what it will.
        search = TargetProbe(needs.__getitem__, prices.places, prices.runs, levels)
        return search.least(self.line.regions)[0] <= self.devices

    def _answer(self, prices: StagePrices, target: float, levels: int) -> Partition:
        """The line that meets the target with the fewest micro-batches in flight."""
        # Mostly no fewer do: from the most downwards.
        fewer = 1
        while fewer < levels and self._meets(prices, target, levels - fewer):
            levels -= fewer
            fewer *= 2
        low = max(levels - fewer, 0) + 1
        while low < levels:
            middle = (low + levels) // 2
            if self._meets(prices, target, middle):
                levels = middle
            else:
                low = middle + 1
        needs = prices.needs(target, levels)
        search = TargetProbe(needs.__getitem__, prices.places, prices.runs, levels, traced=True)
        drafts = []
        for piece in search.way(search.least(self.line.regions)[1]):
            way = prices.way(piece, target)
            drafts.append(DraftStage.of(way, piece.start, piece.stop, min(piece.level, prices.micro_batches)))
        return self._judged(tuple(drafts), prices)

    def _judged(self, drafts: tuple[DraftStage, ...], prices: StagePrices) -> Partition:
        memory = max(draft.memory / prices.limits[draft.run] for draft in drafts)
        before = self._before(drafts)
        step = step_seconds(drafts, before, prices.micro_batches, self.train)
        return Partition(drafts, prices.size, max(stage_depths(before)), step, memory)

    def _before(self, drafts: Sequence[DraftStage]) -> list[list[int]]:
        """For each stage the stages that it reads from."""
        masks = [(1 << draft.stop) - (1 << draft.start) for draft in drafts]
        found = []
        for draft in drafts:
            read = 0
            for block in range(draft.start, draft.stop):
                read |= self.line.needs[block]
            found.append([stage for stage, mask in enumerate(masks) if mask & read and masks[stage] < 1 << draft.start])
        return found
