"""The order in which the steps of a run take samples that lie stored: epoch by epoch, each shuffled
where that is asked for. It depends on the seed and the number of samples alone, so it is one order
on any number of ranks, and a run that goes on under another plan goes on in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

_ROUNDS = 8

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run has come. Batches of earlier steps may have had another size and other
    micro-batches.
    """

    steps: int = 0
    """Steps done."""
    samples: int = 0
    """Samples taken from the data."""
    forwards: int | None = 0
    """Micro-batches of all steps; None if they were not counted."""


START = Position()


def shuffled(places: Numbers, samples: int, seed: int, epoch: int) -> Numbers:
    """The stored samples at `places` of an epoch's order, a permutation of [0, samples).

    It is a Feistel network over the numbers of 2h bits that hold `samples`, walked on from numbers
    that are too large (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002): any place
    costs the same, and no rank holds the whole order, which of 10^9 samples has 8 GB.
    """
    half = max(1, -(-(samples - 1).bit_length() // 2))
    mask = np.uint64((1 << half) - 1)
    keys = _round_keys(seed, epoch)
    found = places.astype(np.uint64)
    outside = np.ones(len(places), bool)
    while outside.any():
        left = found[outside] >> np.uint64(half)
        right = found[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        found[outside] = left << np.uint64(half) | right
        outside = found >= np.uint64(samples)
    return found.astype(np.int64)


@lru_cache(maxsize=16)
def _round_keys(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    """Return the keys of the network's rounds in an epoch."""
    from autopipe.backends.torch.runtime.random_numbers.philox import (
        Purpose,
        as_unsigned,
        draw_run,
        key_of,
    )  # They import torch.

    halves = (
        as_unsigned(draw_run(key_of(seed, Purpose.SHUFFLE, epoch), 0, 2 * _ROUNDS))
        .numpy()
        .astype(np.uint64)
    )
    return halves[::2] << np.uint64(32) | halves[1::2]


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The batches of `samples` stored samples for a run that goes on from `begin`. Sample numbers
    run on from epoch to epoch: number n is at place n mod `samples` of epoch n // `samples`, both
    from 0.
    """

    samples: int
    batch_size: int
    keeps_last: bool
    """True if the samples at an epoch's end that fill no batch are a step of their own; else they
    are left out.
    """
    seed: int | None = None
    """Of the shuffle; None for the order in which samples are stored."""
    epochs: int | None = None
    """Epochs after which the data ends; None for no end."""
    begin: Position = START

    @property
    def steps_per_epoch(self) -> int:
        return self._steps(self.samples)

    @property
    def left_over(self) -> int:
        """Samples at an epoch's end that are left out."""
        return 0 if self.keeps_last else self.samples % self.batch_size

    @property
    def end(self) -> int | None:
        """The number of steps after which the data has ended."""
        if self.epochs is None:
            return None
        epoch, within = divmod(self.begin.samples, self.samples)
        if epoch >= self.epochs:
            return self.begin.steps
        rest = self._steps(self.samples - within)
        return self.begin.steps + rest + (self.epochs - epoch - 1) * self.steps_per_epoch

    def _steps(self, samples: int) -> int:
        return -(-samples // self.batch_size) if self.keeps_last else samples // self.batch_size

    def sample(self, step: int) -> int:
        """The number of a step's first sample; no step before `begin` is asked for."""
        epoch, within = divmod(self.begin.samples, self.samples)
        done = step - self.begin.steps
        rest = self._steps(self.samples - within)
        if done < rest:
            return self.begin.samples + done * self.batch_size
        epochs, step = divmod(done - rest, self.steps_per_epoch)
        return (epoch + 1 + epochs) * self.samples + step * self.batch_size

    def count(self, step: int) -> int:
        """Samples of a step, fewer than a batch in an epoch's last one that is kept; 0 where the
        data has ended.
        """
        if self.end is not None and step >= self.end:
            return 0
        return min(self.batch_size, self.samples - self.sample(step) % self.samples)

    def stored(self, start: int, stop: int) -> range | Numbers:
        """Where the samples of numbers [start, stop), all of one epoch, are stored."""
        epoch, place = divmod(start, self.samples)
        places = range(place, place + stop - start)
        return (
            places
            if self.seed is None
            else shuffled(np.asarray(places), self.samples, self.seed, epoch)
        )
