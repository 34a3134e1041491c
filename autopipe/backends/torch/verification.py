"""Compare losses and gradients that two runs have recorded: ranks against one device."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.errors import VerificationError

_ROUNDING = 1e-6
"""A gradient whose norm is below this share of all gradients' norm is zero but for rounding: a key's bias before a
softmax has none, and what is left of it in float32 has no digits to compare. It is compared absolutely."""
_RESPONSES = 4
"""How many times what a rounding of every input and weight changes may come of the roundings of a whole step: a layer's
roundings are as if its weights had been rounded (Higham and Mary, "Sharper Probabilistic Backward Error Analysis for
Basic Linear Algebra Kernels with Random Data", SIAM Journal on Scientific Computing 42(5), 2020), forwards and back in
each of two runs, √4 times what one such rounding changes, and by chance twice that."""
_NO_DIGITS = 0.1
"""A tensor that is changed by more than this has no digits to compare: it is held against all that is compared."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a tensor is from its reference: ‖a − b‖₂ / ‖b‖₂ in float64, absolute where ‖b‖ is 0."""

    tensor: str
    relative: float
    share: float = 1.0
    """How large the reference is beside all that is compared, by norms."""


def limit_of(bound: float, found: Difference, response: float) -> float:
    """The largest difference for a tensor that one step of every input and weight changes by `response`, where it is
    `bound` for one that is well conditioned."""
    if response > _NO_DIGITS:
        return bound / max(found.share, bound)
    return bound + _RESPONSES * response


def difference(name: str, ours: np.ndarray, reference: np.ndarray, scale: float = 0.0) -> Difference:
    """The difference of two arrays; infinite where shapes, infinities, NaNs or (of whole numbers) any element differ.
    With `scale`, the norm of all that is compared, a reference that is zero but for rounding is compared in its
    units."""
    unequal = Difference(name, math.inf)
    if ours.shape != reference.shape:
        return unequal
    if not np.issubdtype(reference.dtype, np.inexact):
        return Difference(name, 0.0) if np.array_equal(ours, reference) else unequal
    wide = np.complex128 if np.iscomplexobj(reference) else np.float64
    left, right = ours.astype(wide).ravel(), reference.astype(wide).ravel()
    differ = (left != right) & ~(np.isnan(left) & np.isnan(right))
    if not (np.isfinite(left[differ]).all() and np.isfinite(right[differ]).all()):
        return unequal
    distance = float(np.linalg.norm(left[differ] - right[differ]))
    norm = float(np.linalg.norm(right[np.isfinite(right)]))
    if norm <= _ROUNDING * scale:
        norm = scale
    return Difference(name, distance / norm if norm else distance, norm / scale if scale else 1.0)


def gradient_differences(ranks: Manifest, recorded: Path, expected: Path) -> Iterator[Difference]:
    """One difference a parameter: the worst of its blocks. `recorded` and `expected` are folders of recorded gradients.
    Raises VerificationError where a trained parameter has no recorded gradient, or no rank has the parameter."""
    whole = {int(index): array for index, array in _read(expected, 0).items()}
    scale = float(np.sqrt(sum(float(np.sum(np.square(each.astype(np.float64)))) for each in whole.values())))
    worst: dict[int, Difference] = {}
    for rank, shards in enumerate(ranks.shards):
        gradients = _read(recorded, rank)
        for shard in shards:
            entry = ranks.parameters[shard.parameter]
            if str(shard.parameter) not in gradients or shard.parameter not in whole:
                if not entry.trainable:
                    continue
                raise VerificationError(f"no gradient was recorded for {entry.value.name!r}", where=f"rank {rank}")
            ours, reference = gradients[str(shard.parameter)], whole[shard.parameter][shard.box.slices]
            found = difference(entry.value.name, ours, reference, scale)
            worst[shard.parameter] = max(worst.get(shard.parameter, found), found, key=lambda each: each.relative)
    for index in sorted(whole):
        if index not in worst:
            raise VerificationError(f"no rank holds {ranks.parameters[index].value.name!r}", where=str(recorded))
        yield worst[index]


def _read(folder: Path, rank: int) -> dict[str, np.ndarray]:
    path = folder / f"gradients_{rank:03d}.npz"
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except OSError as error:
        raise VerificationError("gradients were not recorded", where=str(path)) from error


def read_losses(report: Path) -> list[float]:
    return [float(json.loads(line)["loss"]) for line in report.read_text(encoding="utf-8").splitlines()]


def read_outputs(path: Path) -> dict[str, np.ndarray]:
    """The outputs of an inference run by name."""
    with np.load(path, allow_pickle=False) as stored:
        return {str(name): stored[f"output_{index}"] for index, name in enumerate(stored["names"])}
