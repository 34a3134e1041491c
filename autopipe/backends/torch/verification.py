"""Comparison of the losses and gradients that two runs have recorded: those of the ranks and those
of one device.
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
"""A gradient counts as zero if its norm is below this fraction of the norm of all gradients. For
example, the exact gradient of a key's bias before a softmax is zero, and its float32 value consists
of rounding errors only. It is compared with an absolute tolerance.
"""
_RESPONSE_FACTOR = 4
"""Factor between the change by one rounding of all inputs and weights, and the tolerance for the
roundings of a full step.

The roundings of a layer have the effect of rounding its weights (Higham and Mary, "Sharper
Probabilistic Backward Error Analysis for Basic Linear Algebra Kernels with Random Data", SIAM
Journal on Scientific Computing 42(5), 2020). Forward and backward in two runs are four such
roundings, with √4 times the change by one, and a safety factor of 2 covers random variation.
"""
_SPREAD_FACTOR = 2
"""A correct result may differ from the reference by this multiple of the distance between two
results of the reference implementation.
"""
_MAX_RELIABLE_RESPONSE = 0.1
"""A tensor that one rounding changes by more than this relative amount has no reliable digits. Its
error is compared with the norm of all compared tensors instead.
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of a tensor from its reference, ‖a − b‖₂ / ‖b‖₂ in float64. If ‖b‖₂ is 0, the
    difference is absolute.
    """

    tensor: str
    relative: float
    share: float = 1.0
    """Norm of the reference as a fraction of the norm of all compared tensors."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Relative differences between results for one tensor that ONNX Runtime computes in different
    ways.
    """

    optimizations: float
    """Difference of the result with graph optimizations from the one without."""
    float64: float | None = None
    """Difference of the float64 result. None if ONNX Runtime cannot compute the model in
    float64.
    """
    one_device: float | None = None
    """Difference of one device's result from ONNX Runtime's float64 result."""

    def raised(self, limit: float, unit: float) -> float:
        """Return the maximum difference between one device and ONNX Runtime. `limit` is the maximum
        without regard to the spread.

        Both results may be as far from the exact result as ONNX Runtime's results are from one
        another. The limit therefore rises by twice that distance, but not above half of the digits
        of a type with unit roundoff `unit`. If the result of one device is within `limit` of the
        float64 result, the limit may rise to `limit` plus the distance of ONNX Runtime's result
        from the float64 result, however large that is.
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


def tensor_limit(bound: float, found: Difference, response: float) -> float:
    """Return the maximum difference for a tensor that rounding all inputs and weights changes by
    `response`. `bound` is the maximum for a well-conditioned tensor.
    """
    if response > _MAX_RELIABLE_RESPONSE:
        return bound / max(found.share, bound)
    return bound + _RESPONSE_FACTOR * response


def difference(
    name: str, ours: np.ndarray, reference: np.ndarray, scale: float = 0.0
) -> Difference:
    """Return the difference of two arrays. It is infinite if the shapes, infinities, NaNs, or any
    elements of integer arrays differ.

    `scale` is the norm of all compared tensors. If it is given, a reference that is zero except for
    rounding errors is compared relative to it.
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
    """Return the maximum difference per trained parameter, or per buffer unless `trainable`, over
    its blocks.

    `recorded` and `expected` are folders with the recorded gradients or `parameters` of a step.
    Raise VerificationError if a parameter was not recorded, or no rank has it.
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
            found = difference(entry.value.name, ours, reference, scale)
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
    return parameter.trainable == trainable and parameter.value.dtype.is_floating


def write_whole_gradients(ranks: Manifest, recorded: Path, target: Path) -> int:
    """Assemble the recorded gradients of all ranks, so that one device can update its parameters
    with them. Return the number of steps.
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
    path = record_file(folder, kind, step, rank)
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except OSError as error:
        raise VerificationError(
            f"the {kind} of the step were not recorded", where=str(path)
        ) from error


def read_losses(report: Path) -> list[float]:
    """Return the losses of the steps in a report. Other records, for example notes, are skipped."""
    records = map(json.loads, report.read_text(encoding="utf-8").splitlines())
    return [float(each["loss"]) for each in records if "loss" in each]


def read_outputs(path: Path, manifest: Manifest) -> dict[str, np.ndarray]:
    """Return the outputs of an inference run by name."""
    with np.load(path, allow_pickle=False) as stored:
        return {
            output.value.name: stored[key]
            for output, key in zip(manifest.outputs, manifest.output_keys, strict=True)
        }
