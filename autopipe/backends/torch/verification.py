"""Comparison of the losses, gradients and parameters that a run on several ranks recorded with
those of a run on one device.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.modes.records import record_file
from autopipe.ir.errors import VerificationError
from autopipe.ir.graph import Parameter

_ZERO_GRADIENT_FRACTION = 1e-6
"""A gradient counts as zero if its norm is at most this fraction of the norm of all gradients
together. For example, the exact gradient of the bias of an attention's keys is zero, and its
float32 value consists of rounding errors only. The difference of a zero gradient is divided by the
norm of all gradients.
"""
_RESPONSE_FACTOR = 4
"""Tolerance for the rounding errors of a step, as a multiple of the change of the result if all
inputs and weights are rounded once.

The rounding errors of a layer have the effect of rounding its weights (Higham and Mary, "Sharper
Probabilistic Backward Error Analysis for Basic Linear Algebra Kernels with Random Data", SIAM
Journal on Scientific Computing 42(5), 2020). The forwards and backwards of two runs are four such
roundings. Random errors add up to √4 times the change by one rounding, and a safety factor of 2
covers their variation.
"""
_SPREAD_FACTOR = 2
"""If two results of the reference implementation for a tensor differ by d, the maximum allowed
difference from the reference rises by this factor times d.
"""
_MAX_RELIABLE_RESPONSE = 0.1
"""Maximum relative change of a tensor by one rounding of all inputs and weights for which the
digits of the tensor are reliable. The error of a tensor with a larger change is compared with the
norm of all compared tensors instead of its own norm.
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """Relative difference of a tensor a from its reference b: ‖a − b‖₂ / ‖b‖₂, computed in float64.
    If b is zero, it is the absolute difference ‖a − b‖₂, unless the norm of other tensors takes the
    place of ‖b‖₂ (see `array_difference`).
    """

    tensor: str
    relative: float
    share: float = 1.0
    """Norm of the reference as a fraction of the norm of all compared tensors."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Differences between results for one tensor that ONNX Runtime computes with different
    settings. They show how much rounding changes the tensor. All are relative: the 2-norm of the
    difference, divided by the 2-norm of the reference.
    """

    optimizations: float
    """Difference between the results with and without graph optimizations."""
    float64: float | None = None
    """Difference between the results in the model's type and in float64; None if ONNX Runtime
    cannot compute the model in float64.
    """
    one_device: float | None = None
    """Difference between the result of the program on one device and ONNX Runtime's float64 result;
    None if it is not known.
    """

    def raised_limit(self, limit: float, unit: float) -> float:
        """Return the maximum difference that is allowed between the result of one device and ONNX
        Runtime's result. `limit` is the maximum without regard to the spread, and `unit` the unit
        roundoff of the compared type.

        The distance of both results from the exact result may equal the distance d between ONNX
        Runtime's own results. The limit therefore rises by 2 d, but not above √`unit`, which
        corresponds to half of the type's digits. If the result of one device is within `limit` of
        the float64 result, the returned maximum is at least `limit` plus the distance of ONNX
        Runtime's result from the float64 result.
        """
        known = [
            each
            for each in (self.optimizations, self.float64)
            if each is not None and math.isfinite(each)
        ]
        found = max(limit, min(limit + _SPREAD_FACTOR * max(known, default=0.0), math.sqrt(unit)))
        if self.float64 is not None and self.one_device is not None and self.one_device <= limit:
            found = max(found, limit + self.float64)
        return found

    def __str__(self) -> str:
        text = f"it is {self.optimizations:.1e} away from its results with optimizations"
        if self.float64 is None or self.one_device is None:
            return text
        return (
            f"{text}, {self.float64:.1e} from its results in float64, of which one device is "
            f"{self.one_device:.1e} away"
        )


def max_tensor_difference(bound: float, found: Difference, response: float) -> float:
    """Return the maximum relative difference that is allowed for a tensor. `bound` is the maximum
    for a well-conditioned tensor. `found` is the measured difference. `response` is the relative
    change of the tensor if all inputs and weights are rounded once.
    """
    if response > _MAX_RELIABLE_RESPONSE:
        return bound / max(found.share, bound)
    return bound + _RESPONSE_FACTOR * response


def array_difference(
    name: str, ours: np.ndarray, reference: np.ndarray, scale: float = 0.0
) -> Difference:
    """Return the difference of the array `ours` from `reference`, which both belong to the tensor
    `name`. The difference is infinite if the shapes differ, if infinities or NaNs are at different
    positions, or if integer arrays differ in any element.

    `scale` is the norm of all compared tensors together, or 0 if it is not known. A reference that
    is zero except for rounding errors is compared relative to `scale`.
    """
    unequal = Difference(name, math.inf)
    if ours.shape != reference.shape:
        return unequal
    if not np.issubdtype(reference.dtype, np.inexact):
        return Difference(name, 0.0) if np.array_equal(ours, reference) else unequal
    wide = np.complex128 if np.iscomplexobj(reference) else np.float64
    left = ours.astype(wide).ravel()
    right = reference.astype(wide).ravel()
    differ = (left != right) & ~(np.isnan(left) & np.isnan(right))
    if not (np.isfinite(left[differ]).all() and np.isfinite(right[differ]).all()):
        return unequal
    distance = float(np.linalg.norm(left[differ] - right[differ]))
    norm = float(np.linalg.norm(right[np.isfinite(right)]))
    if norm <= _ZERO_GRADIENT_FRACTION * scale:
        norm = scale
    return Difference(name, distance / norm if norm else distance, norm / scale if scale else 1.0)


def tensor_differences(
    ranks: Manifest,
    recorded: Path,
    expected: Path,
    kind: str = "gradients",
    step: int = 0,
    trainable: bool = True,
) -> Iterator[Difference]:
    """Yield one difference per trained parameter or, unless `trainable`, per floating-point buffer:
    the largest difference over the shards of the tensor on all ranks.

    `recorded` and `expected` are the folders in which the ranks and the single device recorded
    tensors. `kind` is "gradients" or "parameters", and `step` the number of the step. Raise
    VerificationError if a tensor was not recorded, or if no rank holds it.
    """
    trained = {
        str(index) for index, each in enumerate(ranks.parameters) if _is_compared(each, trainable)
    }
    whole = {
        int(index): array
        for index, array in _read_recorded(expected, kind, step, 0).items()
        if index in trained
    }
    scale = float(
        np.sqrt(sum(float(np.sum(np.square(each.astype(np.float64)))) for each in whole.values()))
    )
    worst: dict[int, Difference] = {}
    for rank, shards in enumerate(ranks.shards):
        tensors = _read_recorded(recorded, kind, step, rank)
        for shard in shards:
            entry = ranks.parameters[shard.parameter]
            if not _is_compared(entry, trainable):
                continue
            if str(shard.parameter) not in tensors or shard.parameter not in whole:
                message = f"no {kind.removesuffix('s')} was recorded for {entry.value.name!r}"
                raise VerificationError(message, where=f"rank {rank}")
            ours = tensors[str(shard.parameter)]
            reference = whole[shard.parameter][shard.box.slices]
            found = array_difference(entry.value.name, ours, reference, scale)
            worst[shard.parameter] = max(
                worst.get(shard.parameter, found), found, key=lambda each: each.relative
            )
    for index in sorted(whole):
        if index not in worst:
            raise VerificationError(
                f"no rank recorded the parameter {ranks.parameters[index].value.name!r}",
                where=str(recorded),
            )
        yield worst[index]


def has_buffers(manifest: Manifest) -> bool:
    """Return True if the program has floating-point tensors that are not trained, for example
    running statistics.
    """
    return any(_is_compared(each, trainable=False) for each in manifest.parameters)


def _is_compared(parameter: Parameter, trainable: bool) -> bool:
    """Return True for a trained floating-point parameter or, unless `trainable`, for a
    floating-point buffer.
    """
    return parameter.trainable == trainable and parameter.value.dtype.is_floating


def write_whole_gradients(ranks: Manifest, recorded: Path, target: Path) -> int:
    """Assemble full gradients from the shards that all ranks recorded in the folder `recorded`, and
    write them to the folder `target`, one file per step. A run on one device can then update its
    parameters with these gradients. Return the number of steps.
    """
    target.mkdir(exist_ok=True)
    steps = 0
    while record_file(recorded, "gradients", steps, 0).exists():
        whole: dict[int, np.ndarray] = {}
        for rank, shards in enumerate(ranks.shards):
            gradients = _read_recorded(recorded, "gradients", steps, rank)
            for shard in (each for each in shards if str(each.parameter) in gradients):
                block = gradients[str(shard.parameter)]
                shape = ranks.parameters[shard.parameter].value.shape
                whole.setdefault(shard.parameter, np.zeros(shape, block.dtype))[
                    shard.box.slices
                ] = block
        found = {str(index): array for index, array in whole.items()}
        np.savez(record_file(target, "gradients", steps, 0), **found)  # type: ignore[arg-type]
        steps += 1
    return steps


def _read_recorded(folder: Path, kind: str, step: int, rank: int) -> dict[str, np.ndarray]:
    """Return the tensors that a rank recorded in a step, by the index of the parameter as text.
    Raise VerificationError if there is no record.
    """
    path = record_file(folder, kind, step, rank)
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except OSError as error:
        raise VerificationError(
            f"the {kind} of the step were not recorded", where=str(path)
        ) from error


def read_losses(report: Path) -> list[float]:
    """Return the loss of each step in a report file. Records without a loss, for example notes, are
    skipped.
    """
    records = map(json.loads, report.read_text(encoding="utf-8").splitlines())
    return [float(each["loss"]) for each in records if "loss" in each]


def read_outputs(path: Path, manifest: Manifest) -> dict[str, np.ndarray]:
    """Return the outputs that an inference run of the program wrote to the file `path`, by name."""
    with np.load(path, allow_pickle=False) as stored:
        return {
            output.value.name: stored[key]
            for output, key in zip(manifest.outputs, manifest.output_keys, strict=True)
        }
