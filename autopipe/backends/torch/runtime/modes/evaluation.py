"""Validation during training: the forward passes of the generated step on all samples of the
validation data. Each sample counts once.

The loss of a micro-batch of n samples is a mean over its samples. If the last micro-batch has only
r < n samples from the data, it is filled with n - r copies of the last sample x. Let L be its mean
loss and l(x) the loss of x. The sum of the losses of its r real samples is then n L - (n - r) l(x).
To measure l(x), another micro-batch follows that consists of copies of x only.

If labels can be ignored, the filler samples get ignored labels instead and do not count.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from autopipe.backends.torch.runtime.data.batch_reader import BatchReader
from autopipe.backends.torch.runtime.data.sample_order import START_OF_RUN
from autopipe.backends.torch.runtime.data.sample_source import SampleSource
from autopipe.backends.torch.runtime.data.sources import open_source
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.options import RankOptions
from autopipe.backends.torch.runtime.step.stage import EvaluationStep, RankContext
from autopipe.ir.errors import ConfigurationError, LaunchError
from autopipe.ir.program import InputRange
from autopipe.ir.training import DataSettings, Evaluation, Training
from autopipe.ir.words import plural


def evaluation_settings(manifest: Manifest, options: RankOptions) -> Evaluation:
    """Return the validation settings of a run: the settings in the manifest, with the values that
    options override.
    """
    found = manifest.evaluation
    data = options.eval_data or found.data
    interval = options.eval_interval or found.interval
    return replace(found, data=data, interval=interval)


class ValidationSource(SampleSource):
    """A source that returns each sample of `source`, which must end, once and in order.

    The last batch is completed with filler samples, copies of the last sample. If a micro-batch
    contains both samples of the data and filler samples, a micro-batch of filler samples only
    follows, which measures the loss of the last sample. It is not needed if filler samples have
    ignored labels. If the loss of a batch cannot be computed from the losses of its micro-batches,
    samples that do not fill a batch are omitted.
    """

    def __init__(self, manifest: Manifest, source: SampleSource) -> None:
        super().__init__(manifest, START_OF_RUN)
        self.source = source
        self.samples: int | None = None
        """Number of samples of `source` that count in the loss of the validation. None until the
        end of the source is reached.
        """
        self._ignores = any(entry.ignored is not None for entry in manifest.inputs)

    def sample_count(self, step: int) -> int:
        """Return the batch size if the validation has a batch `step`, otherwise 0. Must be called
        with `step` 0, 1, 2, ... in this order.
        """
        batch = self._manifest.batch_size
        size = self._manifest.micro_batch_size
        if self.samples is None and (count := self.source.sample_count(step)) < batch:
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
        """Return the number of samples for which the loss of a micro-batch counts. `start` is the
        number of its first sample, `size` its number of samples. The result is negative for the
        micro-batch that consists of copies only: its loss, times the number of filler samples, is
        subtracted.
        """
        left = size if self.samples is None else self.samples - start
        if self._ignores:
            return min(max(left, 0), size)
        return size if left > 0 else left if left > -size else 0


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Result of a validation over all ranks. `step` is the index of the last step before the
    validation.
    """

    step: int
    eval_loss: float
    eval_samples: int
    eval_time_s: float
    best_loss: float
    """The lowest validation loss of the run so far."""
    best_step: int
    """Index of the last step before the validation with the lowest loss."""

    def line(self) -> str:
        """Return the report as one line of text."""
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
    """Runs validations when they are due. All ranks compute equal losses and therefore take equal
    decisions.
    """

    def __init__(self, rank: RankContext, settings: Evaluation, steps: int) -> None:
        """`steps` is the number of steps after which the run ends."""
        self._rank = rank
        self._settings = settings
        self._steps = steps
        # A validation uses the manifest of an inference program, because sources for inference end
        # with their data. The default `Training()` disables gradient accumulation.
        self._manifest = replace(rank.manifest, train=False, training=Training())
        self.best: tuple[float, int] | None = None
        """(loss, step) of the lowest validation loss so far: `step` is the index of the last step
        before that validation. None before the first validation.
        """
        self._failed = 0
        """Number of validations since the validation with the lowest loss."""
        self._validated = 0
        """Number of steps that the run had done at the last validation."""

    def is_due(self, last: bool) -> bool:
        """Return True if a validation is due now, between two steps. `last` is True if no other
        step follows.
        """
        done = self._rank.steps_done
        interval = self._settings.interval
        return done > self._validated and (
            last or done == self._steps or (interval is not None and done % interval == 0)
        )

    def has_run_out_of_patience(self) -> bool:
        """Return True if the loss has not improved in the last `patience` validations, a setting.
        False if it is not set.
        """
        return self._settings.patience is not None and self._failed >= self._settings.patience

    def restore(self, best: tuple[float, int]) -> None:
        """Set the lowest loss so far, as (loss, step), to the value of the run that this run
        resumes.
        """
        self.best = best
        interval = self._settings.interval or self._steps
        self._failed = max(0, self._rank.steps_done // interval - (best[1] + 1) // interval)

    def run(self, step: Callable[[], None]) -> EvaluationReport:
        """Validate: run the forward passes of the generated function `step` on all validation data.
        Return the result. Collective over all ranks. Raise LaunchError if the loss is not finite,
        ConfigurationError if the data have too few samples.
        """
        rank = self._rank
        began = time.perf_counter()
        by_label = self._rank.manifest.counts_labels
        if by_label:
            rank.counted = torch.zeros((), dtype=torch.float64, device=rank.device)
        data = self._settings.data
        settings = DataSettings(sequence_length=rank.manifest.data.sequence_length)
        source = ValidationSource(
            self._manifest, open_source(self._manifest, data, rank.seed, settings=settings)
        )
        reader = BatchReader(self._manifest, source, rank.device)
        total = 0.0
        number = 0
        while source.sample_count(number):
            rank.evaluated = EvaluationStep(reader, number)
            step()
            with rank.heartbeat.record_wait():
                rank.transport.finish()
            total += self._local_loss_of_batch(source, number)
            rank.clear_step()
            number += 1
        rank.evaluated = None
        if not source.samples:
            needed = "sample" if self._manifest.loss_division.divisible else "full batch"
            raise ConfigurationError(
                f"the validation data contain less than one {needed}", where=data or ""
            )
        counted = float(rank.counted) if by_label and rank.counted is not None else 0.0
        shares = rank.transport.gather_numbers([total, counted])
        loss = sum(share for share, _ in shares)
        labels = sum(share for _, share in shares)
        if by_label:
            division = rank.manifest.loss_division
            # The divisor of a batch may have a constant addend. So the sum of losses and the number
            # of labels are first averaged over the batches, and the divisor is computed from the
            # averages.
            divisor = division.divisor(labels / number)
            loss = division.loss(loss / number / divisor) if divisor else math.nan
        else:
            loss = rank.manifest.loss_division.loss(loss / source.samples)
        done = rank.steps_done - 1
        if not math.isfinite(loss):
            raise LaunchError(
                f"the validation loss after step {done} is infinite or NaN", where=data or ""
            )
        self._validated = rank.steps_done
        self._failed += 1
        if self.best is None or loss < self.best[0]:
            self.best = (loss, done)
            self._failed = 0
        return EvaluationReport(done, loss, source.samples, time.perf_counter() - began, *self.best)

    def _local_loss_of_batch(self, source: ValidationSource, number: int) -> float:
        """Return this rank's contribution to the sum of the losses of all samples of batch
        `number`, after the forward passes of this batch.
        """
        total = 0.0
        for index, stage in self._rank.stages.items():
            count = self._manifest.micro_batch_count(index)
            size = self._manifest.batch_size // count
            for micro_batch, loss in stage.losses.items():
                # If the program counts labels, the loss of a micro-batch is a sum over labels.
                # Filler samples, which complete the last batch, have only ignored labels and add 0
                # to this sum.
                if self._rank.manifest.counts_labels:
                    total += float(loss) * stage.loss_share
                elif weight := source.weight(
                    number * self._manifest.batch_size + micro_batch * size, size
                ):
                    total += float(loss) * stage.loss_share * count * weight
        return total
