"""Modes with which `autopipe verify` compares a program with a reference. They record gradients,
parameters and values of variables, replay recorded gradients, or perturb inputs and parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autopipe.backends.torch.runtime.data.batch_reader import BlockRequest
from autopipe.backends.torch.runtime.modes.records import (
    RECORDED_STEPS,
    dump_tensors,
    load_gradients,
    record_file,
    run_recorded,
)
from autopipe.backends.torch.runtime.step.stage import Mode, RankContext, Stage


class Record(Mode):
    """Writes this rank's gradients and updated parameters of the first `RECORDED_STEPS` steps to a
    folder.
    """

    probes = True
    exact_matmuls = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_gradients(self, rank: RankContext) -> None:
        if rank.steps_done < RECORDED_STEPS:
            self._write("gradients", rank, rank.reduction.gradients())

    def on_update(self, rank: RankContext) -> None:
        if rank.steps_done < RECORDED_STEPS:
            self._write("parameters", rank, rank.parameters)

    def _write(self, kind: str, rank: RankContext, tensors: Mapping[int, torch.Tensor]) -> None:
        dump_tensors(self._folder, kind, rank.steps_done, rank.number, tensors)

    def repeats_step(self, rank: RankContext) -> bool:
        """Return True if fp16 gradients overflowed in the step, so that its update was skipped.
        Such gradients cannot be compared. The repeated step has a smaller loss scale.
        """
        return rank.loss_scaler is not None and rank.loss_scaler.was_skipped()


class RecordValues(Mode):
    """Writes the values of all tensor variables in the first forward of each stage to a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_stages(self, rank: RankContext) -> None:
        for stage in rank.stages.values():
            file = record_file(self._folder, "values", stage.number, rank.number)
            stage.function = _record_first_forward(stage, file)


def _record_first_forward(stage: Stage, file: Path) -> Callable[..., Any]:
    """Return a replacement of the forward of `stage`. At its first call it writes the values of all
    tensor variables to `file`, and restores the original forward for later calls.
    """
    function = stage.function

    def forward(*arguments: Any) -> Any:
        stage.function = function
        return run_recorded(function, arguments, file)

    return forward


class Replay(Mode):
    """Updates parameters by recorded gradients. Only step 0 runs forward and backward passes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def computes_step(self, step: int) -> bool:
        return step == 0

    def on_gradients(self, rank: RankContext) -> None:
        load_gradients(self._folder, rank.steps_done, rank.parameters)


class Perturb(Mode):
    """Changes each floating-point number in inputs, parameters and scalar constants by the relative
    amount `step`, up or down. `verify` compares such a run with a run without changes, to measure
    how rounding errors grow.
    """

    def __init__(self, step: float) -> None:
        self._step = step

    def on_parameters(self, parameters: Mapping[int, torch.Tensor]) -> None:
        for index, tensor in parameters.items():
            tensor.data = perturb(tensor.data, self._step, index)

    def on_constants(self, constants: dict[str, torch.Tensor]) -> None:
        # Scalar constants are perturbed too, because in some models the scales of quantized tensors
        # are the only floating-point numbers.
        for key, name in enumerate(sorted(constants)):
            if constants[name].numel() == 1:
                constants[name] = perturb(constants[name], self._step, key)

    def on_input(
        self, rank: RankContext, request: BlockRequest, tensor: torch.Tensor
    ) -> torch.Tensor:
        size = rank.manifest.micro_batch_size_at(request.stage)
        first_sample = rank.samples_done + request.micro_batch * size
        return perturb(tensor, self._step, first_sample)


def perturb(tensor: torch.Tensor, step: float, key: int) -> torch.Tensor:
    """Return `tensor` with each number multiplied by 1 + `step` or 1 - `step`. The choice is
    pseudo-random and depends on `key` and the position only. A tensor that is not floating-point is
    returned unchanged.
    """
    if not tensor.is_floating_point():
        return tensor
    signs = np.random.default_rng(key).integers(0, 2, tensor.shape, np.int8)
    factors = 1 + (torch.as_tensor(2 * signs - 1) * step).to(torch.float64)
    return (tensor.double() * factors.to(tensor.device)).to(tensor.dtype)
