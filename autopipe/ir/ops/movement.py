"""Definitions of operators that move elements: by fixed indices, by indices in a tensor, by
resizing, and by reshaping. Iteration spaces are written in the notation of `autopipe.ir.space`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.ops.elementwise import first_operand_space
from autopipe.ir.ops.operator import (
    Integers,
    Operator,
    Range,
    Signature,
    axis_names,
    broadcast_words,
    mark_words,
    move_first_by_broadcast,
    move_through_reshape,
    nonnegative_axis,
    replace_words,
    space_along_axes,
    space_from_words,
    space_with_changed_axes,
    stated_axes,
    unindexed_words,
    unsplittable_space,
)
from autopipe.ir.space import Space


def transpose_permutation(signature: Signature) -> tuple[int, ...]:
    """Return the attribute `perm` of a Transpose; without it, the permutation that reverses the
    dimensions.
    """
    return signature.node.integers("perm", tuple(range(signature.rank - 1, -1, -1)))


def _transpose_space(signature: Signature) -> Space:
    words = signature.words
    return space_from_words(
        signature, [words], [[words[axis] for axis in transpose_permutation(signature)]]
    )


def _expand_space(signature: Signature) -> Space:
    result = signature.result().shape
    words = axis_names(len(result))
    return space_from_words(
        signature, [broadcast_words(signature.operand(0).shape, result, words), "1"], [words]
    )


def slice_ranges(signature: Signature) -> tuple[tuple[int, int, int], ...]:
    """Return (first index, number of elements, step) for each dimension of the operand of a Slice.
    The step may be negative.
    """
    shape = signature.operand(0).shape
    if signature.opset < 10:
        starts = signature.node.integers("starts")
        ends = signature.node.integers("ends")
        axes = signature.node.integers("axes", tuple(range(len(starts))))
        steps: tuple[int, ...] = (1,) * len(starts)
    else:
        starts = signature.integers(1)
        ends = signature.integers(2)
        axes = signature.integers(3) or tuple(range(len(starts)))
        steps = signature.integers(4) or (1,) * len(starts)
    taken = [(0, extent, 1) for extent in shape]
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        axis = nonnegative_axis(axis, len(shape))
        span = range(*slice(start, end, step).indices(shape[axis]))
        taken[axis] = (span.start, len(span), step)
    return tuple(taken)


def _slice_space(signature: Signature) -> Space:
    """Return the iteration space of a Slice. Dimensions of which it takes only a part have no
    axes.
    """
    shape = signature.operand(0).shape
    return space_with_changed_axes(
        signature,
        [
            axis
            for axis, taken in enumerate(slice_ranges(signature))
            if taken != (0, shape[axis], 1)
        ],
    )


def pad_widths(signature: Signature) -> tuple[tuple[int, int], ...]:
    """Return (before, after) for each dimension: the number of elements that a Pad adds at both
    ends. A negative number removes elements.
    """
    flat = (
        signature.node.integers("pads") if signature.constant(1) is None else signature.integers(1)
    )
    axes = stated_axes(signature, 3) or tuple(range(signature.rank))
    pads = [(0, 0)] * signature.rank
    for position, axis in enumerate(axes):
        pads[axis] = (flat[position], flat[position + len(axes)])
    return tuple(pads)


def _resized_space(signature: Signature) -> Space:
    """Return the iteration space of an operator that changes the sizes of some dimensions, such as
    Tile. These dimensions have no axes.
    """
    shapes = zip(signature.operand(0).shape, signature.result().shape, strict=True)
    return space_with_changed_axes(
        signature, [axis for axis, (before, after) in enumerate(shapes) if before != after]
    )


def _depth_to_space_space(signature: Signature) -> Space:
    """Return the iteration space of DepthToSpace or SpaceToDepth, which converts between `b (c r!
    s!) h w` and `b c (h r!) (w s!)`, with r and s of the block size. In mode DCR, the channels are
    (r! s! c).
    """
    block = signature.node.integer("blocksize")
    deep = "b (c r! s!) h w" if signature.node.text("mode", "DCR") == "CRD" else "b (r! s! c) h w"
    sides = [deep], ["b c (h r!) (w s!)"]
    source, result = sides if signature.node.op == "DepthToSpace" else sides[::-1]
    return space_from_words(signature, source, result, r=block, s=block)


def _reverse_sequence_space(signature: Signature) -> Space:
    """Return the iteration space of a ReverseSequence. The dimension of time cannot be split."""
    words = signature.words
    time = signature.node.integer("time_axis")
    batch = signature.node.integer("batch_axis", 1)
    return space_from_words(signature, [mark_words(words, [time], "!"), [words[batch]]], [words])


def _col2im_space(signature: Signature) -> Space:
    """Return the iteration space `b (c k!) 1 -> b c *1` of a Col2Im: batch b, channels c and
    positions k in a block.
    """
    return space_from_words(
        signature, ["b (c k!) 1"], ["b c *1"], k=math.prod(signature.integers(2))
    )


def _compress_space(signature: Signature) -> Space:
    """Return the iteration space of a Compress. The dimension `axis` has no axis; without the
    attribute `axis`, the operator cannot be split.
    """
    return (
        space_with_changed_axes(signature, [signature.axis()])
        if signature.node.has("axis")
        else unsplittable_space(signature)
    )


def _move_through_concat(
    signature: Signature, slot: int, result: int, array: Integers
) -> Integers | None:
    """Return `array`, one entry per element of operand `slot`, at its position in the result of a
    Concat, with -1 elsewhere (see `Move`).
    """
    axis = nonnegative_axis(signature.node.integer("axis"), array.ndim)
    start = sum(signature.operand(before).shape[axis] for before in range(slot))
    joined = np.full(signature.result(result).shape, -1)
    joined[(slice(None),) * axis + (slice(start, start + array.shape[axis]),)] = array
    return joined


def _move_through_split(
    signature: Signature, slot: int, result: int, array: Integers
) -> Integers | None:
    """Return the part of `array`, one entry per element of the operand, that one result of a Split
    contains (see `Move`).
    """
    if slot:
        return None
    axis = nonnegative_axis(signature.node.integer("axis"), array.ndim)
    before = signature.results[:result]
    start = sum(each.shape[axis] for each in before if each is not None)
    extent = signature.result(result).shape[axis]
    return np.take(array, np.arange(start, start + extent), axis)


def _move_through_slice(
    signature: Signature, slot: int, result: int, array: Integers
) -> Integers | None:
    """Return the part of `array`, one entry per element of the operand, that a Slice takes (see
    `Move`).
    """
    if slot:
        return None
    for axis, (first, count, step) in enumerate(slice_ranges(signature)):
        array = np.take(array, first + step * np.arange(count), axis)
    return array


def _move_through_pad(
    signature: Signature, slot: int, result: int, array: Integers
) -> Integers | None:
    """Return `array`, one entry per element of the operand, with -1 at the positions that a Pad
    adds, or None if the pads are not known or copy elements (see `Move`).
    """
    pads = signature.constant(1)
    if (
        slot
        or pads is None
        or signature.node.text("mode", "constant") != "constant"
        or pads.min(initial=0) < 0
    ):
        return None
    axes = signature.constant(3) if signature.present(3) else np.arange(array.ndim)
    if axes is None:
        return None
    widths = np.zeros((array.ndim, 2), np.int64)
    widths[axes] = pads.reshape(2, -1).T
    return np.pad(array, widths, constant_values=-1)


def _move_through_tile(
    signature: Signature, slot: int, result: int, array: Integers
) -> Integers | None:
    """Return `array`, one entry per element of the operand, repeated as a Tile repeats its operand
    (see `Move`).
    """
    if slot:
        return None
    shapes = zip(signature.result(result).shape, array.shape, strict=True)
    return np.tile(array, [extent // part for extent, part in shapes])


def _move_through_transpose(
    signature: Signature, slot: int, result: int, array: Integers
) -> Integers | None:
    """Return `array`, one entry per element of the operand, with the dimensions in the order of a
    Transpose's result (see `Move`).
    """
    return None if slot else array.transpose(transpose_permutation(signature))


MOVEMENT = (
    Operator(
        "Identity",
        first_operand_space,
        "view",
        same_elements=True,
        linear="together",
        moved=move_through_reshape,
    ),
    Operator(
        "Transpose", _transpose_space, "view", linear="together", moved=_move_through_transpose
    ),
    Operator(
        "Expand",
        _expand_space,
        "view",
        static=(1,),
        shaping=(1,),
        sizes=(1,),
        linear="together",
        moved=move_first_by_broadcast,
    ),
    Operator(
        "Concat",
        lambda use: space_with_changed_axes(use, [use.axis()], len(use.operands)),
        "memory",
        linear="together",
        moved=_move_through_concat,
    ),
    Operator(
        "Split",
        lambda use: space_with_changed_axes(use, [use.axis()]),
        "view",
        static=(1,),
        shaping=(1,),
        sizes=(1,),
        linear="together",
        moved=_move_through_split,
    ),
    Operator(
        "Slice",
        _slice_space,
        "view",
        static=(1, 2, 3, 4),
        sizes=(1, 2, 3, 4),
        linear="together",
        moved=_move_through_slice,
    ),
    Operator(
        "Pad",
        lambda use: space_with_changed_axes(use, np.flatnonzero(np.any(pad_widths(use), 1))),
        "memory",
        static=(1, 2, 3),
        linear="together",
        moved=_move_through_pad,
    ),
    Operator(
        "Tile",
        _resized_space,
        "memory",
        static=(1,),
        sizes=(1,),
        linear="together",
        moved=_move_through_tile,
    ),
    Operator("CenterCropPad", _resized_space, "memory", static=(1,), shaping=(1,)),
    Operator("DepthToSpace", _depth_to_space_space, "memory"),
    Operator("SpaceToDepth", _depth_to_space_space, "memory"),
    Operator("ReverseSequence", _reverse_sequence_space, "memory", keeps=("1",), reads_axis=True),
    # The last two dimensions are marked `&`, because a split operator depends on the device: each
    # device derives the indices of its rows and columns from its coordinates.
    Operator(
        "Trilu",
        lambda use: space_along_axes(use, [use.rank - 2, use.rank - 1], "&"),
        "memory",
        static=(1,),
    ),
    Operator("Compress", _compress_space, "memory", static=(1,), computable=(1,)),
    Operator("Col2Im", _col2im_space, "memory", static=(1, 2)),
)


def _gather_space(signature: Signature) -> Space:
    """Return the iteration space `a v& b, i -> a i b` of a Gather: i are the indices into v, the
    dimension `axis` of the table.

    If v is split, a device returns the rows of its own shard of the table, and zeros for all
    others; the results are added. v cannot be split if the indices are constant or the table is not
    floating-point.
    """
    mark = "&" if signature.constant(1) is None and signature.operand(0).dtype.is_floating else "!"
    data = signature.words
    axis = signature.axis()
    indices = axis_names(len(signature.operand(1).shape), "i")
    return space_from_words(
        signature,
        [mark_words(data, [axis], mark), indices],
        [[*data[:axis], *indices, *data[axis + 1 :]]],
    )


def _words_of_equal_dimensions(signature: Signature) -> list[str]:
    """Return the axis names that data and indices have in common, one per dimension of the data. A
    dimension has an axis if both tensors have one size there and it is not the dimension of the
    attribute `axis`; otherwise its word is "1".
    """
    shapes = zip(signature.operand(0).shape, signature.operand(1).shape, strict=True)
    apart = [
        place
        for place, (data, other) in enumerate(shapes)
        if data != other or place == signature.axis()
    ]
    return replace_words(signature.words, apart)


def _gather_elements_space(signature: Signature) -> Space:
    """Return the iteration space of a GatherElements. If the table is split along the gathered
    dimension v, a device returns the elements of its own shard, and zeros for all others; the
    results are added.
    """
    axis = signature.axis()
    table = _words_of_equal_dimensions(signature)
    picked = [*table[:axis], signature.words[axis], *table[axis + 1 :]]
    if signature.operand(0).shape[axis] > 1 and signature.operand(0).dtype.is_floating:
        table[axis] = "v&"
    return space_from_words(signature, [table, picked], [picked])


def _scatter_elements_space(signature: Signature) -> Space:
    table = _words_of_equal_dimensions(signature)
    return space_from_words(signature, [table, table, table], [table])


def _gather_nd_space(signature: Signature) -> Space:
    """Return the iteration space `b 1 t, b i 1 -> b i t` of a GatherND: batch b, positions i of the
    indices, and remaining dimensions t. The last dimension of the indices contains one index for
    each dimension of the data that is neither in b nor in t.
    """
    batch = signature.node.integer("batch_dims")
    data = signature.operand(0).shape
    indices = signature.operand(1).shape
    depth = batch + indices[-1]
    shared = axis_names(batch, "b")
    places = [*shared, *axis_names(len(indices) - 1 - batch, "i")]
    rest = axis_names(len(data) - depth, "t")
    return space_from_words(
        signature,
        [[*shared, *unindexed_words(data[batch:depth]), *rest], [*places, "1"]],
        [[*places, *rest]],
    )


def _scatter_nd_space(signature: Signature) -> Space:
    """Return the iteration space `1 t, 1 1, 1 t -> 1 t` of a ScatterND: only the dimensions t,
    which the indices do not address, have axes.
    """
    data = signature.operand(0).shape
    indices = signature.operand(1).shape
    rest = axis_names(len(data) - indices[-1], "t")
    table = [*unindexed_words(data[: indices[-1]]), *rest]
    return space_from_words(
        signature,
        [table, unindexed_words(indices), [*unindexed_words(indices[:-1]), *rest]],
        [table],
    )


def _one_hot_space(signature: Signature) -> Space:
    """Return the iteration space `*i, 1, 1 -> *i v&` of a OneHot. If the classes v are split, each
    device derives the range of its classes from its coordinate.
    """
    rank = len(signature.result().shape)
    axis = nonnegative_axis(signature.node.integer("axis", -1), rank)
    words = axis_names(rank - 1, "i")
    return space_from_words(signature, [words], [[*words[:axis], "v&", *words[axis:]]])


def _tensor_scatter_space(signature: Signature) -> Space:
    """Return the iteration space of a TensorScatter, which writes an update into a cache at one
    position per sample. No axis indexes the dimension of the positions.
    """
    cache = replace_words(signature.words, [signature.axis(-2)])
    return space_from_words(
        signature, [cache, cache, *([["d0"]] if signature.present(2) else [])], [cache]
    )


def _axis_index_range(signature: Signature, slot: int) -> Range | None:
    """Return the range of operand 1, the indices along the dimension `axis` of operand 0; None for
    other operands. A negative index counts from the end.
    """
    table = signature.operand(0).shape
    if slot != 1 or not table:
        return None
    extent = table[signature.axis()]
    return -extent, extent


def _gather_index_range(signature: Signature, slot: int) -> Range | None:
    """Return the range of operand 1 of a Gather, the indices; None for other operands. Indices into
    an embedding table, a floating-point matrix that is indexed along its first axis, are assumed to
    be nonnegative.
    """
    found = _axis_index_range(signature, slot)
    table = signature.operand(0)
    embeds = len(table.shape) == 2 and table.dtype.is_floating and signature.axis() == 0
    return (0, found[1]) if found is not None and embeds else found


def _gather_nd_index_range(signature: Signature, slot: int) -> Range | None:
    """Return the range of operand 1 of a GatherND or ScatterND, the indices, with one bound per
    dimension that they address; None for other operands.
    """
    if slot != 1:
        return None
    first = signature.node.integer("batch_dims")
    shape = signature.operand(1).shape
    extents = np.asarray(signature.operand(0).shape[first : first + shape[-1]], np.int64)
    return np.broadcast_to(-extents, shape), np.broadcast_to(extents, shape)


def _cache_position_range(signature: Signature, slot: int) -> Range | None:
    """Return the range of operand 2 of a TensorScatter: the positions at which an update fits into
    the cache; None for other operands.
    """
    if slot != 2:
        return None
    axis = signature.axis(-2)
    return 0, signature.operand(0).shape[axis] - signature.operand(1).shape[axis] + 1


def _one_hot_class_range(signature: Signature, slot: int) -> Range | None:
    """Return the range of operand 0 of a OneHot, the classes; None for other operands, or if the
    number of classes is not constant.
    """
    depth = signature.constant(1)
    return None if slot or depth is None else (0, int(depth.reshape(-1)[0]))


def _move_through_gather(
    signature: Signature, slot: int, result: int, array: Integers
) -> Integers | None:
    """Return the entries of `array`, one per element of the table, that a Gather with constant
    indices takes, or None if its indices are not constant (see `Move`). Exporters write `x[:, 3]`
    as such a Gather.
    """
    indices = signature.constant(1)
    if slot or indices is None:
        return None
    axis = nonnegative_axis(signature.node.integer("axis"), max(array.ndim, 1))
    return np.take(array, indices, axis)


INDEXING = (
    Operator(
        "Gather",
        _gather_space,
        "memory",
        keeps=("1",),
        weights=(0,),
        linear="together",
        finite_at=((1, 0),),
        layer_weights=(0,),
        lookup=True,
        index_range=_gather_index_range,
        moved=_move_through_gather,
    ),
    Operator(
        "GatherElements",
        _gather_elements_space,
        "memory",
        keeps=("1",),
        finite_at=((1, 0),),
        index_range=_axis_index_range,
    ),
    Operator(
        "GatherND",
        _gather_nd_space,
        "memory",
        keeps=("1",),
        finite_at=((1, 0),),
        index_range=_gather_nd_index_range,
    ),
    Operator(
        "Scatter", _scatter_elements_space, "memory", keeps=("1",), index_range=_axis_index_range
    ),
    Operator(
        "ScatterElements",
        _scatter_elements_space,
        "memory",
        keeps=("1",),
        index_range=_axis_index_range,
    ),
    Operator(
        "ScatterND", _scatter_nd_space, "memory", keeps=("1",), index_range=_gather_nd_index_range
    ),
    Operator(
        "TensorScatter",
        _tensor_scatter_space,
        "memory",
        keeps=("2",),
        index_range=_cache_position_range,
    ),
    Operator(
        "OneHot",
        _one_hot_space,
        "memory",
        keeps=("0",),
        static=(1,),
        shaping=(1,),
        index_range=_one_hot_class_range,
    ),
    Operator(
        "NonZero", unsplittable_space, "memory", static=(0,), computable=(0,), differentiable=False
    ),
)


def reshape_space(signature: Signature) -> Space:
    """Return the iteration space of a reshape, such as `(a b) c -> a b c`. Both shapes are divided
    into factors that they have in common; each factor has an axis.

    Dimensions without common factors in their order, such as 4 3 -> 6 2, have no axes. Raise
    ModelError if the numbers of elements differ.
    """
    source = signature.operand(0).shape
    target = signature.result().shape
    if math.prod(source) != math.prod(target):
        message = (
            f"{signature.node.op} makes {target} of {source}, which has another number of elements"
        )
        raise ModelError(message, where=repr(signature.node.name))
    left = unindexed_words(source)
    right = unindexed_words(target)
    extents: dict[str, int] = {}
    # `ends` contains the cumulative products of the sizes of both shapes. A product that occurs in
    # both lists ends a segment of dimensions with equal numbers of elements.
    ends = [list(itertools.accumulate(shape, int.__mul__)) for shape in (source, target)]
    common = sorted({1, *ends[0]} & {1, *ends[1]}) if signature.operand(0).elements else []
    for first, last in itertools.pairwise(common):
        cuts = sorted({first, *(end for side in ends for end in side if first < end <= last)})
        if any(inner % outer for outer, inner in itertools.pairwise(cuts)):
            continue
        axes = {inner: f"a{len(extents) + index}" for index, inner in enumerate(cuts[1:])}
        extents |= {axes[inner]: inner // outer for outer, inner in itertools.pairwise(cuts)}
        for words, shape, side in ((left, source, ends[0]), (right, target, ends[1])):
            for place, (extent, end) in enumerate(zip(shape, side, strict=True)):
                if extent > 1 and first < end <= last:
                    group = [axes[cut] for cut in cuts if end // extent < cut <= end]
                    words[place] = group[0] if len(group) == 1 else f"({' '.join(group)})"
    return space_from_words(signature, [left], [right], **extents)


def _reshape_operator(
    name: str, shape: tuple[int, ...] = (1,), sizes: tuple[int, ...] = ()
) -> Operator:
    """Return the definition of an operator that changes only the shape of its operand. `shape` has
    the indices of operands that determine the new shape, and `sizes` those that contain its sizes.
    """
    return Operator(
        name,
        reshape_space,
        "view",
        static=shape,
        shaping=shape,
        sizes=sizes,
        same_elements=True,
        linear="together",
        moved=move_through_reshape,
    )


REGROUP = (
    _reshape_operator("Reshape", sizes=(1,)),
    _reshape_operator("Flatten", ()),
    _reshape_operator("Squeeze"),
    _reshape_operator("Unsqueeze"),
)


@dataclass(frozen=True, slots=True)
class ResizedAxis:
    """An axis that a Resize changes: its index, its sizes before and after, and the scale. `region`
    is the part of the axis that is read, as fractions of its size.
    """

    axis: int
    source: int
    result: int
    scale: float
    region: tuple[float, float]


def resized_axes(signature: Signature) -> tuple[ResizedAxis, ...]:
    """Return the axes that a Resize or Upsample changes. Raise ModelError if neither the scales nor
    the sizes are constant.
    """
    source = signature.operand(0).shape
    result = signature.result().shape
    axes = [
        nonnegative_axis(axis, len(source)) for axis in signature.node.integers("axes")
    ] or list(range(len(source)))
    scales = _axis_scales(signature, axes)
    roi = _constant_floats(signature, 1) if len(signature.operands) > 2 else ()
    crops = signature.node.text("coordinate_transformation_mode") == "tf_crop_and_resize" and len(
        roi
    ) == 2 * len(axes)
    found = []
    for place, axis in enumerate(axes):
        region = (roi[place], roi[len(axes) + place]) if crops else (0.0, 1.0)
        if scales[place] != 1.0 or source[axis] != result[axis] or region != (0.0, 1.0):
            found.append(ResizedAxis(axis, source[axis], result[axis], scales[place], region))
    return tuple(found)


def _axis_scales(signature: Signature, axes: list[int]) -> tuple[float, ...]:
    """Return the scale of each axis in `axes`, as the node states it or as the ratio of the sizes.
    If the node states sizes and preserves the aspect ratio, all scales are equal. Raise ModelError
    if neither the scales nor the sizes are constant.
    """
    if signature.node.has("scales"):
        return signature.node.numbers("scales")
    stated = _constant_floats(signature, 1 if len(signature.operands) == 2 else 2)
    if stated:
        return stated
    sizes = _constant_floats(signature, 3)
    if not sizes:
        raise ModelError(
            "Resize requires constant scales or constant sizes", where=repr(signature.node.name)
        )
    scales = [
        size / signature.operand(0).shape[axis] for size, axis in zip(sizes, axes, strict=True)
    ]
    policy = signature.node.text("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return tuple(scales)
    return ((min if policy == "not_larger" else max)(scales),) * len(scales)


def _constant_floats(signature: Signature, index: int) -> tuple[float, ...]:
    """Return the elements of the constant operand `index`, or () if it is not a constant."""
    array = signature.constant(index)
    return () if array is None else tuple(array.astype(np.float64).reshape(-1).tolist())


_ALLOWED_ATTRIBUTE_TEXTS = {
    "mode": {"nearest", "linear", "cubic"},
    "coordinate_transformation_mode": {
        "half_pixel",
        "half_pixel_symmetric",
        "pytorch_half_pixel",
        "align_corners",
        "asymmetric",
        "tf_crop_and_resize",
        "tf_half_pixel_for_nn",
    },
    "nearest_mode": {"round_prefer_floor", "round_prefer_ceil", "floor", "ceil"},
    "keep_aspect_ratio_policy": {"stretch", "not_larger", "not_smaller"},
}
"""Allowed values of the text attributes of Resize."""


def resize_space(signature: Signature) -> Space:
    """Return the iteration space `*d i! -> *d o!` of a Resize or Upsample: the axes i and o that it
    changes cannot be split. Raise ModelError if a text attribute has a value that ONNX does not
    define.
    """
    for name, words in _ALLOWED_ATTRIBUTE_TEXTS.items():
        if signature.node.has(name) and signature.node.text(name) not in words:
            message = (
                f"Resize has {name} {signature.node.text(name)!r}, not {', '.join(sorted(words))}"
            )
            raise ModelError(message, where=repr(signature.node.name))
    source = signature.words
    result = signature.words
    for axis in (each.axis for each in resized_axes(signature)):
        source[axis] = f"i{axis}!"
        result[axis] = f"o{axis}!"
    return space_from_words(signature, [source], [result])


def _resize_flops(signature: Signature, space: Space) -> float:
    """Return the FLOPs of interpolation: for each element of the result, one multiply-add per
    element of the operand that contributes to it. Along each resized axis, two elements contribute
    in mode linear, and four in mode cubic. The FLOPs of mode nearest are 0.
    """
    taps = {"linear": 2, "cubic": 4}.get(signature.node.text("mode", "nearest"), 0)
    return (
        2.0 * taps ** len(resized_axes(signature)) * math.prod(signature.result().shape)
        if taps
        else 0.0
    )


RESIZE = (
    Operator(
        "Resize",
        resize_space,
        "memory",
        _resize_flops,
        1.0,
        static=(1, 2, 3),
        interpolation="nearest",
    ),
    Operator(
        "Upsample", resize_space, "memory", _resize_flops, 1.0, static=(1,), interpolation="nearest"
    ),
)

OPERATOR_DEFINITIONS = (*MOVEMENT, *INDEXING, *REGROUP, *RESIZE)
