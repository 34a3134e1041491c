"""Operators that put elements elsewhere without looking at them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopipe.ir.ops.elementwise import first_operand
from autopipe.ir.ops.lines import (
    aligned,
    axes_of,
    marked,
    names,
    opaque,
    positive,
    replaced,
    spell,
    unindexed,
)
from autopipe.ir.ops.row import NotationLine, Operator, Signature


def permutation(signature: Signature) -> tuple[int, ...]:
    """Transpose's attribute `perm`; all dimensions reversed where it is not given."""
    rank = len(signature.operand(0).shape)
    return signature.node.integers("perm", tuple(range(rank - 1, -1, -1)))


def _transpose(signature: Signature) -> NotationLine:
    words = names(len(signature.operand(0).shape))
    return spell([words], [[words[axis] for axis in permutation(signature)]])


def _expand(signature: Signature) -> NotationLine:
    result = signature.result().shape
    words = names(len(result))
    return spell([aligned(signature.operand(0).shape, result, words), ["1"]], [words])


def joined_axis(signature: Signature) -> int:
    """The axis of Concat and Split, counted from the front."""
    return positive(signature.node.integer("axis"), len(signature.operand(0).shape))


def _pieces(signature: Signature) -> NotationLine:
    """`a 1, a 1 -> a 1` of Concat, `a 1 -> a 1, a 1` of Split: no split along the axis that is put together."""
    words = replaced(names(len(signature.operand(0).shape)), [joined_axis(signature)])
    sizes = signature.node.op == "Split"
    operands = [["1"] if sizes and index else words for index, _ in enumerate(signature.operands)]
    return spell(operands, [None if value is None else words for value in signature.results])


def slices(signature: Signature) -> tuple[tuple[int, int, int], ...]:
    """Range that Slice takes of each dimension: first index, number of elements, step (which may be negative)."""
    shape = signature.operand(0).shape
    if signature.opset < 10:
        starts, ends = signature.node.integers("starts"), signature.node.integers("ends")
        axes = signature.node.integers("axes", tuple(range(len(starts))))
        steps: tuple[int, ...] = (1,) * len(starts)
    else:
        starts, ends = _integers(signature, 1), _integers(signature, 2)
        axes = _integers(signature, 3) or tuple(range(len(starts)))
        steps = _integers(signature, 4) or (1,) * len(starts)
    taken = [(0, extent, 1) for extent in shape]
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis = positive(axis, len(shape))
        span = range(*slice(start, end, step).indices(shape[axis]))
        taken[axis] = (span.start, len(span), step)
    return tuple(taken)


def _integers(signature: Signature, index: int) -> tuple[int, ...]:
    array = signature.constant(index)
    return () if array is None else tuple(int(each) for each in array.reshape(-1))


def _slice(signature: Signature) -> NotationLine:
    shape = signature.operand(0).shape
    cut = [axis for axis, taken in enumerate(slices(signature)) if taken != (0, shape[axis], 1)]
    return _resized(signature, cut)


def _resized(signature: Signature, axes: Sequence[int]) -> NotationLine:
    """One dimension to one, those at `axes` not indexed because their extents change."""
    words = replaced(names(len(signature.operand(0).shape)), axes)
    rest = [None if value is None else unindexed(value.shape) for value in signature.operands[1:]]
    return spell([words, *rest], [words])


def padding(signature: Signature) -> tuple[tuple[int, int], ...]:
    """Elements that Pad adds before and after, for each dimension; negative ones are taken away."""
    rank = len(signature.operand(0).shape)
    array = signature.constant(1)
    flat = signature.node.integers("pads") if array is None else tuple(int(each) for each in array.reshape(-1))
    axes = axes_of(signature, 3) or tuple(range(rank))
    pads = [(0, 0)] * rank
    for position, axis in enumerate(axes):
        pads[axis] = (flat[position], flat[position + len(axes)])
    return tuple(pads)


def _pad(signature: Signature) -> NotationLine:
    return _resized(signature, [axis for axis, pads in enumerate(padding(signature)) if pads != (0, 0)])


def _tile(signature: Signature) -> NotationLine:
    shapes = zip(signature.operand(0).shape, signature.result().shape, strict=True)
    return _resized(signature, [axis for axis, (before, after) in enumerate(shapes) if before != after])


def _center_crop_pad(signature: Signature) -> NotationLine:
    return _tile(signature)


def _depth_to_space(signature: Signature) -> NotationLine:
    block = signature.node.integer("blocksize")
    channels = "c r! s!" if signature.node.text("mode", "DCR") == "CRD" else "r! s! c"
    return NotationLine(f"b ({channels}) h w -> b c (h r) (w s)", (("r", block), ("s", block)))


def _space_to_depth(signature: Signature) -> NotationLine:
    block = signature.node.integer("blocksize")
    channels = "c r s" if signature.node.text("mode", "DCR") == "CRD" else "r s c"
    return NotationLine(f"b c (h r!) (w s!) -> b ({channels}) h w", (("r", block), ("s", block)))


def _reverse_sequence(signature: Signature) -> NotationLine:
    words = names(len(signature.operand(0).shape))
    time, batch = signature.node.integer("time_axis"), signature.node.integer("batch_axis", 1)
    return spell([marked(words, [time], "!"), [words[batch]]], [words])


def _trilu(signature: Signature) -> NotationLine:
    """`*b r& c& -> *b r c`: devices know where their rows and columns are."""
    rank = len(signature.operand(0).shape)
    words = names(rank)
    rest = [None if value is None else unindexed(value.shape) for value in signature.operands[1:]]
    return spell([marked(words, [rank - 2, rank - 1], "&"), *rest], [words])


def _compress(signature: Signature) -> NotationLine:
    if not signature.node.has("axis"):
        return opaque(signature)
    return _resized(signature, [joined_axis(signature)])


def patch_positions(signature: Signature) -> tuple[int, ...]:
    """Number of places, along each spatial dimension, where a patch of Col2Im lies."""
    image, block = _integers(signature, 1), _integers(signature, 2)
    rank = len(block)
    dilations = signature.node.integers("dilations", (1,) * rank)
    strides = signature.node.integers("strides", (1,) * rank)
    pads = signature.node.integers("pads", (0,) * (2 * rank))
    return tuple(
        (image[i] + pads[i] + pads[i + rank] - dilations[i] * (block[i] - 1) - 1) // strides[i] + 1 for i in range(rank)
    )


def _col2im(signature: Signature) -> NotationLine:
    points = math.prod(_integers(signature, 2))
    spatial = " ".join(unindexed(signature.result().shape[2:]))
    return NotationLine(f"b (c k!) 1, 1, 1 -> b c {spatial}", (("k", points),))


MOVEMENT = (
    Operator("Identity", first_operand, "view"),
    Operator("Transpose", _transpose, "view"),
    Operator("Expand", _expand, "view", static=(1,)),
    Operator("Concat", _pieces, "memory"),
    Operator("Split", _pieces, "view", static=(1,)),
    Operator("Slice", _slice, "view", static=(1, 2, 3, 4)),
    Operator("Pad", _pad, "memory", static=(1, 2, 3)),
    Operator("Tile", _tile, "memory", static=(1,)),
    Operator("CenterCropPad", _center_crop_pad, "memory", static=(1,)),
    Operator("DepthToSpace", _depth_to_space, "memory"),
    Operator("SpaceToDepth", _space_to_depth, "memory"),
    Operator("ReverseSequence", _reverse_sequence, "memory", keeps=("1",)),
    Operator("Trilu", _trilu, "memory", static=(1,)),
    Operator("Compress", _compress, "memory", static=(1,)),
    Operator("Col2Im", _col2im, "memory", static=(1, 2)),
)
