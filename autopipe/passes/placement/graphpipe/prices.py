"""For one size of micro-batch: which stretches meet a target, in which way."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.passes.analysis.chain import Matrix
from autopipe.passes.placement.graphpipe.search import NEVER, Devices, PartitionStage
from autopipe.passes.placement.graphpipe.ways import StageOption


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
