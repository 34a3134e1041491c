"""Resize and Upsample: resized axes stay whole, others are independent."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.ops.lines import names, positive, spell, unindexed
from autopipe.ir.ops.row import NotationLine, Operator, Signature
from autopipe.ir.space import Space


@dataclass(frozen=True, slots=True)
class ResizedAxis:
    """One axis that changes, and by how much; `region` is the part of it that is read, from 0 to 1."""

    axis: int
    source: int
    result: int
    scale: float
    region: tuple[float, float]


def resized_axes(signature: Signature) -> tuple[ResizedAxis, ...]:
    """The axes that a Resize or Upsample changes. Raises ModelError where neither scales nor sizes are known."""
    source, result = signature.operand(0).shape, signature.result().shape
    rank = len(source)
    axes = [positive(axis, rank) for axis in signature.node.integers("axes")] or list(range(rank))
    scales = _scales(signature, axes)
    roi = _numbers(signature, 1) if len(signature.operands) > 2 else ()
    crops = signature.node.text("coordinate_transformation_mode") == "tf_crop_and_resize" and len(roi) == 2 * len(axes)
    found = []
    for place, axis in enumerate(axes):
        region = (roi[place], roi[len(axes) + place]) if crops else (0.0, 1.0)
        if scales[place] != 1.0 or source[axis] != result[axis] or region != (0.0, 1.0):
            found.append(ResizedAxis(axis, source[axis], result[axis], scales[place], region))
    return tuple(found)


def _scales(signature: Signature, axes: list[int]) -> tuple[float, ...]:
    """Scale of each of `axes`: stated, or from the sizes, the same for all where the aspect ratio is kept."""
    if signature.node.has("scales"):
        return signature.node.numbers("scales")
    stated = _numbers(signature, 1 if len(signature.operands) == 2 else 2)
    if stated:
        return stated
    sizes = _numbers(signature, 3)
    if not sizes:
        raise ModelError("Resize has neither scales nor sizes that are known", where=repr(signature.node.name))
    scales = [size / signature.operand(0).shape[axis] for size, axis in zip(sizes, axes, strict=True)]
    policy = signature.node.text("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return tuple(scales)
    return ((min if policy == "not_larger" else max)(scales),) * len(scales)


def _numbers(signature: Signature, index: int) -> tuple[float, ...]:
    array = signature.constant(index)
    return () if array is None else tuple(float(value) for value in np.asarray(array, np.float64).reshape(-1))


_WORDS = {
    "mode": {"nearest", "linear", "cubic"},
    "coordinate_transformation_mode": {
        "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_crop_and_resize",
        "tf_half_pixel_for_nn",
    },
    "nearest_mode": {"round_prefer_floor", "round_prefer_ceil", "floor", "ceil"},
    "keep_aspect_ratio_policy": {"stretch", "not_larger", "not_smaller"},
}  # fmt: skip
"""Allowed values of attributes."""


def resize(signature: Signature) -> NotationLine:
    """`*d i -> *d o` with i and o whole. Raises ModelError for a word that ONNX does not define."""
    for name, words in _WORDS.items():
        if signature.node.has(name) and signature.node.text(name) not in words:
            raise ModelError(
                f"Resize has {name} {signature.node.text(name)!r}, not {', '.join(sorted(words))}",
                where=repr(signature.node.name),
            )
    changed = [each.axis for each in resized_axes(signature)]
    axes = names(len(signature.operand(0).shape))
    source, result = list(axes), list(axes)
    for axis in changed:
        source[axis], result[axis] = f"i{axis}!", f"o{axis}!"
    others = [None if value is None else unindexed(value.shape) for value in signature.operands[1:]]
    return spell([source, *others], [result])


def _flops(signature: Signature, space: Space) -> float:
    """A multiply-add a tap: two taps an axis for linear, four for cubic."""
    taps = {"linear": 2, "cubic": 4}.get(signature.node.text("mode", "nearest"), 0)
    return 2.0 * taps ** len(resized_axes(signature)) * math.prod(signature.result().shape) if taps else 0.0


RESIZE = (
    Operator("Resize", resize, "memory", _flops, 1.0, static=(1, 2, 3)),
    Operator("Upsample", resize, "memory", _flops, 1.0, static=(1,)),
)
