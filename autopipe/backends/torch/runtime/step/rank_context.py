"""The part of a rank that its stages, reports and modes use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from autopipe.backends.torch.runtime.communication.transport import Transport
from autopipe.backends.torch.runtime.data.batch_reader import BatchReader, BlockRequest
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.modes.mode import Mode
from autopipe.backends.torch.runtime.options import Options
from autopipe.backends.torch.runtime.step.gradients import GradientReduction
from autopipe.backends.torch.runtime.step.ports import Data
from autopipe.backends.torch.runtime.step.precision import LossScaler, LowPrecisionCopies
from autopipe.backends.torch.runtime.watch.clock import Clock
from autopipe.backends.torch.runtime.watch.heartbeat import Heartbeat

if TYPE_CHECKING:
    from autopipe.backends.torch.runtime.step.stage import Stage


@dataclass(frozen=True, slots=True)
class EvaluationStep:
    """One batch of a validation."""

    reader: BatchReader
    """Reads the validation data."""
    number: int
    """Number of the batch in the validation."""


class RankContext:
    """One rank as its stages, reports and modes see it: settings, connections and the state of the
    current step.
    """

    reader: BatchReader
    """Reads the samples of the run."""
    reduction: GradientReduction
    shared_statistics: frozenset[int] = frozenset()
    """Running statistics, by parameter index, that forward passes of several stages move."""
    loss_scaler: LossScaler | None = None
    """None unless the program trains in fp16."""
    evaluated: EvaluationStep | None = None
    """The batch of a validation that runs now; None outside of a validation. In a validation the
    backward passes do nothing.
    """
    learning_rate: float | None = None
    """Learning rate of the last update, without the factors of parameter groups; None before it."""
    grad_norm: torch.Tensor | None = None
    """Norm of the step's gradients over all ranks before clipping, [] on the device; None unless
    gradients are clipped.
    """
    collect: Callable[[int, int, tuple[torch.Tensor, ...]], None]
    """In inference, called with (stage, micro-batch, results) of each forward. Micro-batches are
    numbered over all steps.
    """

    def __init__(
        self,
        number: int,
        options: Options,
        manifest: Manifest,
        transport: Transport,
        heartbeat: Heartbeat,
        modes: tuple[Mode, ...] = (),
    ) -> None:
        self.number = number
        self.modes = modes
        self.options = options
        self.manifest = manifest
        self.train = manifest.train
        self.seed = manifest.seed if options.seed is None else options.seed
        self.transport = transport
        self.heartbeat = heartbeat
        self.device = transport.device
        self.clock = Clock(self.device)
        self.data = manifest.data.path if options.data is None else options.data
        self.steps_done = 0
        self.step_samples = manifest.batch_size
        """Samples of this step that come from the data. If there are fewer than `batch_size`, the
        rest of the batch is filler samples, which do not count.
        """
        self.batch = 0
        """Number of the current batch among the `gradient_accumulation_steps` of the step."""
        self.counted: torch.Tensor | None = None
        """Fraction of the step's labels that are not ignored, [] on the device. Only this rank's
        part of the sum until the gradients are divided by it. None if the loss is not divided by
        the number of such labels.
        """
        self.stages: dict[int, Stage] = {}
        self.parameters: dict[int, torch.Tensor] = {}
        self.low_precision_copies = LowPrecisionCopies({}, manifest)

    @property
    def training(self) -> bool:
        """True if the current batch is one of a training step, not of a validation."""
        return self.train and self.evaluated is None

    @property
    def samples_done(self) -> int:
        """Number of the next step's first sample, counted from the start of the first run if this
        one resumes a run, also one with another batch size.
        """
        return self.reader.source.sample(self.steps_done)

    def weight(self, stage: int, micro_batch: int) -> float:
        """Return the factor by which filler samples change the weight of a micro-batch's loss.
        `micro_batch` is its number in the step.

        Let a step have n micro-batches of the stage and s samples that are not filler, r of them in
        this micro-batch. The factor is n r / s, which is 1 without filler samples. If the loss is
        divided by a number of labels, the factor is 1 for r > 0 and 0 for r = 0.
        """
        batch = self.manifest.batch_size
        # A validation weights its micro-batches itself.
        if self.step_samples == batch or self.evaluated is not None:
            return 1.0
        size = self.micro_batch_size(stage)
        real = max(0, min(size, self.step_samples - micro_batch * size))
        if self.manifest.counts_labels:
            return float(real > 0)
        return real * (batch // size) / self.step_samples

    def micro_batch_size(self, stage: int) -> int:
        """Return the number of samples in a micro-batch of the stage."""
        return self.manifest.micro_batch_size // self.manifest.stages[stage].micro_batch_ratio

    def read(self, stage: int, micro_batch: int, data: Data) -> torch.Tensor:
        """Return the slice of a graph input that a stage uses for one of its micro-batches, on the
        device. `micro_batch` is its number in the step.
        """
        request = BlockRequest(stage, micro_batch, data.name, data.offsets)
        if self.evaluated is not None:
            return self.evaluated.reader.read(self.evaluated.number, request)
        tensor = self.reader.read(self.steps_done, request)
        if self.modes:
            first_sample = self.samples_done + micro_batch * self.micro_batch_size(stage)
            for mode in self.modes:
                tensor = mode.on_input(tensor, first_sample)
        return tensor

    def clear_step(self) -> None:
        """Forget the state of the current step: losses, undelivered tensors, counted bytes."""
        self.transport.traffic.clear()
        for stage in self.stages.values():
            stage.end_step()
