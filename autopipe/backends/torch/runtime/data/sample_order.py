"""The order in which the steps of a run read stored samples: epoch by epoch. Each epoch is shuffled
if the data settings request it.

The order of an epoch depends only on the seed, the epoch and the number of samples. So the order is
equal for any number of ranks, and a run that resumes under another plan continues in the same
order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

_FEISTEL_ROUNDS = 8

SampleNumbers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Position of a run in its data. A run that resumes another run continues the counts of that
    run, whose steps may have had another batch size and another number of micro-batches.
    """

    steps: int = 0
    """Number of steps that have run."""
    samples: int = 0
    """Number of the next step's first sample, counted from the start of the first run. Numbers
    increase across epochs.
    """
    forwards: int | None = 0
    """Number of micro-batches in all steps that have run; None if a checkpoint of an earlier
    version does not state it.
    """


START_OF_RUN = RunProgress()


def shuffle_positions(places: SampleNumbers, samples: int, seed: int, epoch: int) -> SampleNumbers:
    """Return, for each position in `places`, the index of the stored sample at that position of the
    shuffled epoch `epoch` (counted from 0). The shuffle is a permutation of [0, samples).

    The permutation is a Feistel network of `_FEISTEL_ROUNDS` rounds over integers of 2h bits, with
    the smallest h >= 1 for which 2^(2h) >= samples. A round maps the halves (L, R) to (R, L xor F(R
    xor key)), with F = `_mix_bits` reduced to h bits. The network permutes [0, 2^(2h)). While its
    output is not below `samples`, it is applied again to the output (cycle walking; Black and
    Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002), which keeps the mapping a
    permutation of [0, samples).

    A position costs about as much at the end of an epoch as at its start, and no rank stores the
    order, which would take 8 GB for 10^9 samples.
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
            mixed = left ^ (_mix_bits(right ^ key) & mask)
            left = right
            right = mixed
        found[outside] = left << np.uint64(half) | right
        outside = found >= np.uint64(samples)
    return found.astype(np.int64)


@lru_cache(maxsize=16)
def _round_keys(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    """Return the round keys of the Feistel network for an epoch: 64-bit words, uint64
    [_FEISTEL_ROUNDS].
    """
    # The import is in the function, because it loads torch and the launcher loads this module
    # without torch.
    from autopipe.backends.torch.runtime.random_numbers.philox import (
        Purpose,
        as_unsigned,
        draw_sequence,
        key_of,
    )

    halves = (
        as_unsigned(draw_sequence(key_of(seed, Purpose.SHUFFLE, epoch), 0, 2 * _FEISTEL_ROUNDS))
        .numpy()
        .astype(np.uint64)
    )
    return halves[::2] << np.uint64(32) | halves[1::2]


def _mix_bits(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the value of SplitMix64's mixing function for each 64-bit word (Steele, Lea and Flood,
    "Fast splittable pseudorandom number generators", OOPSLA 2014).
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """The batches of `samples` stored samples, for a run that starts or resumes at `begin`.

    Sample numbers increase across epochs: sample number n is at position n mod `samples` of epoch n
    // `samples`, counted from 0. No batch contains samples of two epochs.
    """

    samples: int
    batch_size: int
    keeps_last: bool
    """True if the samples at the end of an epoch that do not fill a batch form a step with fewer
    samples. False if they are skipped.
    """
    seed: int | None = None
    """Seed of the shuffle; None if samples are read in the order in which they are stored."""
    epochs: int | None = None
    """Number of epochs after which the data end; None if they never end."""
    begin: RunProgress = START_OF_RUN

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps of an epoch that is read from its start."""
        return self._steps(self.samples)

    @property
    def skipped_samples(self) -> int:
        """Number of samples at the end of each epoch that are skipped because they do not fill a
        batch.
        """
        return 0 if self.keeps_last else self.samples % self.batch_size

    @property
    def steps_until_end(self) -> int | None:
        """Number of steps, counted from the start of the first run, after which the data end; None
        if they never end.
        """
        if self.epochs is None:
            return None
        epoch, within = divmod(self.begin.samples, self.samples)
        if epoch >= self.epochs:
            return self.begin.steps
        rest = self._steps(self.samples - within)
        return self.begin.steps + rest + (self.epochs - epoch - 1) * self.steps_per_epoch

    def _steps(self, samples: int) -> int:
        """Return the number of steps that the last `samples` samples of an epoch fill."""
        return -(-samples // self.batch_size) if self.keeps_last else samples // self.batch_size

    def first_sample(self, step: int) -> int:
        """Return the number of the first sample of `step`, which must not precede the first step of
        this run.
        """
        epoch, within = divmod(self.begin.samples, self.samples)
        done = step - self.begin.steps
        rest = self._steps(self.samples - within)
        if done < rest:
            return self.begin.samples + done * self.batch_size
        epochs, step = divmod(done - rest, self.steps_per_epoch)
        return (epoch + 1 + epochs) * self.samples + step * self.batch_size

    def sample_count(self, step: int) -> int:
        """Return the number of samples of `step`. It is less than a batch in the last step of an
        epoch if `keeps_last`, and 0 if the data have ended.
        """
        if self.steps_until_end is not None and step >= self.steps_until_end:
            return 0
        return min(self.batch_size, self.samples - self.first_sample(step) % self.samples)

    def stored_indices(self, start: int, stop: int) -> range | SampleNumbers:
        """Return the indices, in the stored arrays, of the samples with numbers [start, stop),
        which must belong to one epoch. The result is a range without shuffling, otherwise an int64
        array.
        """
        epoch, place = divmod(start, self.samples)
        places = range(place, place + stop - start)
        return (
            places
            if self.seed is None
            else shuffle_positions(np.asarray(places), self.samples, self.seed, epoch)
        )
