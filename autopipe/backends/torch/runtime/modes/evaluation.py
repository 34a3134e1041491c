"""Validation on the ranks that train: the step's forwards alone, over all samples of other data,
each counted once.

The loss is a mean over the samples of a micro-batch. So that the last, partial one counts its own
samples alone, it is filled up with one sample, repeated, and a micro-batch of nothing but that
sample says what is to be taken off again. Where labels may be ignored, what fills up has such
labels instead, which count for nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from autopipe.backends.torch.runtime.data.batch_reader import BatchReader
from autopipe.backends.torch.runtime.data.sample_order import START
from autopipe.backends.torch.runtime.data.sample_source import Source
from autopipe.backends.torch.runtime.data.sources import open_source
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.options import Options
from autopipe.backends.torch.runtime.step.rank_context import EvaluationStep, RankContext
from autopipe.ir.errors import ConfigurationError, LaunchError
from autopipe.ir.program import InputRange
from autopipe.ir.training import DataSettings, Evaluation, Training
from autopipe.ir.words import plural


def evaluation_of(manifest: Manifest, options: Options) -> Evaluation:
    """The settings of a run: those of the manifest, with what the options say in their place."""
    found = manifest.evaluation
    data = options.eval_data or found.data
    interval = options.eval_interval or found.interval
    return replace(found, data=data, interval=interval)


class EverySample(Source):
    """All samples of a source that ends, once.

    The last batch is filled up with the last sample, of which there may be another batch: it has a
    whole micro-batch of that sample, unless labels that are ignored do the filling. If the loss of
    a batch does not follow from the losses of its parts, samples that fill no batch are left out.
    """

    def __init__(self, manifest: Manifest, source: Source) -> None:
        super().__init__(manifest, START)
        self.source = source
        self.samples: int | None = None
        """How many there are, once the last was come to."""
        self._ignores = any(entry.ignored is not None for entry in manifest.inputs)

    def count(self, step: int) -> int:
        """A batch, filled up where samples lack, or 0 where all have been there. Steps are asked
        for in order.
        """
        batch = self._manifest.batch_size
        size = self._manifest.micro_batch_size
        if self.samples is None and (count := self.source.count(step)) < batch:
            self.samples = step * batch + (count if self._manifest.loss_division.divisible else 0)
        if self.samples is None:
            return batch
        filling = -self.samples % size
        end = self.samples + filling + (size if filling and not self._ignores else 0)
        return batch if step * batch < end else 0

    def rows(self, entry: InputRange, start: int, stop: int) -> np.ndarray:
        samples = self.samples
        axis = entry.batch_axis
        if samples is None or stop <= samples:
            return self.source.rows(entry, start, stop)
        if axis is None:
            return self.source.rows(entry, 0, 0)
        filling = self.source.rows(entry, samples - 1, samples)
        if entry.ignored is not None:
            filling = np.full_like(filling, entry.ignored)
        parts = [filling] * (stop - max(start, samples))
        if start < samples:
            parts.insert(0, self.source.rows(entry, start, samples))
        return np.concatenate(parts, axis)

    def weight(self, start: int, size: int) -> int:
        """Samples that the loss of a micro-batch of `size` stands for, of which the first is number
        `start`.
        """
        left = size if self.samples is None else self.samples - start
        if self._ignores:
            return min(max(left, 0), size)
        return size if left > 0 else left if left > -size else 0


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Figures of a validation, over all ranks, after step `step`."""

    step: int
    eval_loss: float
    eval_samples: int
    eval_time_s: float
    best_loss: float
    """The lowest so far, of step `best_step`."""
    best_step: int

    def line(self) -> str:
        best = (
            "best"
            if self.step == self.best_step
            else f"best {self.best_loss:.6f} of step {self.best_step}"
        )
        return (
            f"evaluation after step {self.step}  loss {self.eval_loss:.6f} ({best})  "
            f"{self.eval_samples:,} {plural(self.eval_samples, 'sample')}  "
            f"{self.eval_time_s:.2f} s"
        )


class Evaluator:
    """Validates when it is due. All ranks come to the same figures, and so to the same
    decisions.
    """

    def __init__(self, rank: RankContext, settings: Evaluation, steps: int) -> None:
        self._rank = rank
        self._settings = settings
        self._steps = steps
        # Sources of data then end where the data do; nothing is accumulated.
        self._manifest = replace(rank.manifest, train=False, training=Training())
        self.best: tuple[float, int] | None = None
        """The lowest loss so far, and its step."""
        self._failed = 0  # Validations since then.
        self._validated = 0  # Steps that were done at the last.

    def is_due(self, last: bool) -> bool:
        """True if the step that was done last is one to validate after; `last` if no other
        follows.
        """
        done = self._rank.steps_done
        interval = self._settings.interval
        return done > self._validated and (
            last or done == self._steps or (interval is not None and done % interval == 0)
        )

    def has_no_patience_left(self) -> bool:
        return self._settings.patience is not None and self._failed >= self._settings.patience

    def restore(self, best: tuple[float, int]) -> None:
        """Go on where a run has had its lowest loss before."""
        self.best = best
        interval = self._settings.interval or self._steps
        self._failed = max(0, self._rank.steps_done // interval - (best[1] + 1) // interval)

    def run(self, step: Callable[[], None]) -> EvaluationReport:
        """Run a step's forwards over all of the data. Raises LaunchError for a loss of NaN or
        infinity.
        """
        rank = self._rank
        began = time.perf_counter()
        by_label = self._rank.manifest.counts_labels
        if by_label:
            rank.counted = torch.zeros((), dtype=torch.float64, device=rank.device)
        data = self._settings.data
        settings = DataSettings(sequence_length=rank.manifest.data.sequence_length)
        source = EverySample(
            self._manifest, open_source(self._manifest, data, rank.seed, settings=settings)
        )
        reader = BatchReader(self._manifest, source, rank.device)
        total = 0.0
        number = 0
        while source.count(number):
            rank.evaluated = EvaluationStep(reader, number)
            step()
            with rank.heartbeat.waiting():
                rank.transport.finish()
            total += self._loss(source, number)
            rank.clear_step()
            number += 1
        rank.evaluated = None
        if not source.samples:
            few = "no sample" if self._manifest.loss_division.divisible else "no whole batch"
            raise ConfigurationError(f"there is {few} to validate on", where=data or "")
        counted = float(rank.counted) if by_label and rank.counted is not None else 0.0
        shares = rank.transport.gather_numbers([total, counted])
        loss = sum(share for share, _ in shares)
        labels = sum(share for _, share in shares)
        if by_label:
            division = rank.manifest.loss_division
            # Of a batch, on average: what is added to a divisor is so for each batch.
            divisor = division.divisor(labels / number)
            loss = division.loss(loss / number / divisor) if divisor else math.nan
        else:
            loss = rank.manifest.loss_division.loss(loss / source.samples)
        done = rank.steps_done - 1
        if not math.isfinite(loss):
            raise LaunchError(
                f"the validation loss after step {done} is not a finite number", where=data or ""
            )
        self._validated = rank.steps_done
        self._failed += 1
        if self.best is None or loss < self.best[0]:
            self.best = (loss, done)
            self._failed = 0
        return EvaluationReport(done, loss, source.samples, time.perf_counter() - began, *self.best)

    def _loss(self, source: EverySample, number: int) -> float:
        """This rank's share of the loss of all samples of a step together."""
        total = 0.0
        for index, stage in self._rank.stages.items():
            count = self._manifest.micro_batches_at(index)
            size = self._manifest.batch_size // count
            for micro_batch, loss in stage.losses.items():
                if (
                    self._rank.manifest.counts_labels
                ):  # A sum, of labels of samples that fill a batch up nothing.
                    total += float(loss) * stage.loss_share
                elif weight := source.weight(
                    number * self._manifest.batch_size + micro_batch * size, size
                ):
                    total += float(loss) * stage.loss_share * count * weight
        return total
