"""Compare losses and gradients that two runs have recorded: ranks against one device."""

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

_ROUNDING = 1e-6
"""A gradient whose norm is below this share of all gradients' norm is zero but for rounding: a
key's bias before a softmax has none, and what is left of it in float32 has no digits to compare. It
is compared absolutely.
"""
_RESPONSES = 4
"""How many times what a rounding of every input and weight changes may come of the roundings of a
whole step: a layer's roundings are as if its weights had been rounded (Higham and Mary, "Sharper
Probabilistic Backward Error Analysis for Basic Linear Algebra Kernels with Random Data", SIAM
Journal on Scientific Computing 42(5), 2020), forwards and back in each of two runs, √4 times what
one such rounding changes, and by chance twice that.
"""
_SPREADS = 2
"""How many times a reference's distance from itself may lie between it and another right result."""
_NO_DIGITS = 0.1
"""A tensor that is changed by more than this has no digits to compare: it is held against all that
is compared.
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a tensor is from its reference: ‖a − b‖₂ / ‖b‖₂ in float64, absolute where ‖b‖ is
    0.
    """

    tensor: str
    relative: float
    share: float = 1.0
    """How large the reference is beside all that is compared, by norms."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How far ONNX Runtime's results for a tensor are from its results in another way, as relative
    differences.
    """

    optimizations: float
    """With its graph optimizations."""
    float64: float | None = None
    """In float64. None if ONNX Runtime cannot compute the model in float64."""
    one_device: float | None = None
    """How far one device's results are from ONNX Runtime's in float64."""

    def raised(self, limit: float, unit: float) -> float:
        """Return the limit of one device's difference from ONNX Runtime, given the `limit` without
        the spread.

        Both may be as far from the exact result as ONNX Runtime is from itself, so the limit rises
        by twice that distance, at most to half of the digits of a type with unit roundoff `unit`.
        If one device's results are within `limit` of those in float64, the rise is the distance of
        ONNX Runtime from the latter, whatever its size.
        """
        known = [
            each
            for each in (self.optimizations, self.float64)
            if each is not None and math.isfinite(each)
        ]
        found = max(limit, min(limit + _SPREADS * max(known, default=0.0), math.sqrt(unit)))
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


def limit_of(bound: float, found: Difference, response: float) -> float:
    """The largest difference for a tensor that one step of every input and weight changes by
    `response`, where it is `bound` for one that is well conditioned.
    """
    if response > _NO_DIGITS:
        return bound / max(found.share, bound)
    return bound + _RESPONSES * response


def difference(
    name: str, ours: np.ndarray, reference: np.ndarray, scale: float = 0.0
) -> Difference:
    """The difference of two arrays; infinite where shapes, infinities, NaNs or (of whole numbers)
    any element differ. With `scale`, the norm of all that is compared, a reference that is zero but
    for rounding is compared in its units.
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
    if norm <= _ROUNDING * scale:
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
    """Return one difference per trained parameter, or per buffer unless `trainable`: the worst of
    its blocks.

    `recorded` and `expected` are folders of recorded gradients or `parameters` of a step. Raises
    VerificationError if a parameter is not recorded, or no rank has it.
    """
    trained = {
        str(index) for index, each in enumerate(ranks.parameters) if _is_compared(each, trainable)
    }
    whole = {
        int(index): array
        for index, array in _read(expected, kind, step, 0).items()
        if index in trained
    }
    scale = float(
        np.sqrt(sum(float(np.sum(np.square(each.astype(np.float64)))) for each in whole.values()))
    )
    worst: dict[int, Difference] = {}
    for rank, shards in enumerate(ranks.shards):
        tensors = _read(recorded, kind, step, rank)
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
                f"no rank holds {ranks.parameters[index].value.name!r}", where=str(recorded)
            )
        yield worst[index]


def has_buffers(manifest: Manifest) -> bool:
    """True if the program holds floating-point tensors that are not trained, such as running
    statistics.
    """
    return any(_is_compared(each, trainable=False) for each in manifest.parameters)


def _is_compared(parameter: Parameter, trainable: bool) -> bool:
    return parameter.trainable == trainable and parameter.value.dtype.is_floating


def write_whole_gradients(ranks: Manifest, recorded: Path, target: Path) -> int:
    """Put the ranks' recorded gradients together, for one device to update by. Returns the number
    of steps.
    """
    target.mkdir(exist_ok=True)
    steps = 0
    while record_file(recorded, "gradients", steps, 0).exists():
        whole: dict[int, np.ndarray] = {}
        for rank, shards in enumerate(ranks.shards):
            gradients = _read(recorded, "gradients", steps, rank)
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


def _read(folder: Path, kind: str, step: int, rank: int) -> dict[str, np.ndarray]:
    path = record_file(folder, kind, step, rank)
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except OSError as error:
        raise VerificationError(f"{kind} were not recorded", where=str(path)) from error


def read_losses(report: Path) -> list[float]:
    """Of the steps in a report, in which there may be notes too."""
    records = map(json.loads, report.read_text(encoding="utf-8").splitlines())
    return [float(each["loss"]) for each in records if "loss" in each]


def read_outputs(path: Path, manifest: Manifest) -> dict[str, np.ndarray]:
    """The outputs of an inference run by name."""
    with np.load(path, allow_pickle=False) as stored:
        return {
            output.value.name: stored[key]
            for output, key in zip(manifest.outputs, manifest.output_keys, strict=True)
        }
