"""Emitters (functions that return the Python code of one use of an operator) for operators that
move elements: reshape, slice, pad, index and resize.
"""

from __future__ import annotations

import itertools
from functools import partial

from autopipe.backends.torch.codegen.call import (
    Call,
    CodeEmitter,
    call_code,
    float_literal,
    python_literal,
    template_emitter,
)
from autopipe.ir.graph import DType
from autopipe.ir.ops.movement import (
    ResizedAxis,
    pad_widths,
    resized_axes,
    slice_ranges,
    transpose_permutation,
)
from autopipe.ir.ops.operator import nonnegative_axis, stated_axes


def shape_arguments(shape: tuple[int, ...]) -> str:
    """Return the sizes as arguments of a tensor method: `8, 128, 768`, or `()` for a scalar."""
    return ", ".join(map(str, shape)) or "()"


def reshape_code(code: str, shape: tuple[int, ...]) -> str:
    """Return code that reshapes the tensor `code`, such as `x.reshape(8, 128, 768)`."""
    return f"{code}.reshape({shape_arguments(shape)})"


def _emit_reshape(call: Call) -> str:
    return reshape_code(call.arg(0), call.result().shape)


def _emit_squeeze_or_unsqueeze(method: str, call: Call) -> str:
    axes = stated_axes(call, 1) or ()
    return f"{call.arg(0)}.{method}({axes[0]})" if len(axes) == 1 else _emit_reshape(call)


def _emit_transpose(call: Call) -> str:
    order = transpose_permutation(call)
    moved = [axis for axis, source in enumerate(order) if axis != source]
    if not moved:
        return call.arg(0)
    if len(moved) == 2:
        return f"{call.arg(0)}.transpose({moved[0]}, {moved[1]})"
    return f"{call.arg(0)}.permute({', '.join(map(str, order))})"


def _emit_expand(call: Call) -> str:
    if call.operand(0).shape == call.result().shape:
        return call.arg(0)
    return f"{call.arg(0)}.expand({shape_arguments(call.result().shape)})"


def _emit_split(call: Call) -> str:
    axis = call.axis()
    if len(call.results) == 1:
        return call.arg(0)
    total = call.operand(0).shape[axis]
    sizes = [value.shape[axis] if value is not None else -1 for value in call.results]
    if -1 in sizes:
        stated = call.integers(1) or call.node.integers("split")
        sizes = list(stated) or [-(-total // len(sizes))] * (len(sizes) - 1)
        sizes += [total - sum(sizes)] * (not stated)
    even = sizes[0] > 0 and len(set(sizes[:-1])) == 1 and 0 < sizes[-1] <= sizes[0]
    return f"torch.split({call.arg(0)}, {sizes[0] if even else sizes}, dim={axis})"


def _emit_slice(call: Call) -> str:
    taken = slice_ranges(call)
    backwards = [str(axis) for axis, (_, count, step) in enumerate(taken) if step < 0 and count]
    code = f"{call.arg(0)}.flip({', '.join(backwards)})" if backwards else call.arg(0)
    parts = [
        _dimension_slice_code(*each, extent)
        for each, extent in zip(taken, call.operand(0).shape, strict=True)
    ]
    while parts and parts[-1] == ":":
        parts.pop()
    return f"{code}[{', '.join(parts)}]" if parts else code


def _dimension_slice_code(start: int, count: int, step: int, extent: int) -> str:
    """Return the code of the slice of one dimension of size `extent`: `count` elements from index
    `start` with step `step`. For a negative step, the dimension must have been flipped before.
    """
    if not count:
        return "0:0"
    if step < 0:
        start = extent - 1 - start
        step = -step
    if (start, count, step) == (0, extent, 1):
        return ":"
    stop = start + (count - 1) * step + 1
    to_end = len(range(start, extent, step)) == count
    return f"{start or ''}:{'' if to_end else stop}" + (f":{step}" if step > 1 else "")


def _emit_pad(call: Call) -> str:
    pads = pad_widths(call)
    mode = call.text_attribute("mode", "constant", ("constant", "reflect", "edge", "wrap"))
    if all(pair == (0, 0) for pair in pads):
        return call.arg(0)
    if mode != "constant":
        return f'operators.pad({call.arg(0)}, {pads}, "{mode}")'
    return pad_code(
        call.arg(0),
        pads,
        call.float_attribute("value", 0.0) if call.opset < 11 else call.scalar(2) or "0",
    )


def pad_code(code: str, pads: tuple[tuple[int, int], ...], value: str = "0") -> str:
    """Return code that pads the tensor `code`, such as `F.pad(x, (left, right, top, bottom))`, or
    `code` if there are no pads. `pads` has pairs (before, after) from the first dimension on;
    `F.pad` starts at the last dimension.
    """
    inner = itertools.dropwhile(lambda pair: pair == (0, 0), pads)
    flat = tuple(count for pair in reversed([*inner]) for count in pair)
    return (
        call_code("F.pad", code, flat, value=None if value in ("0", "0.0") else value)
        if flat
        else code
    )


def _emit_center_crop_pad(call: Call) -> str:
    """Return the code of a CenterCropPad, which crops the dimensions that are larger than those of
    the result and pads the smaller ones. If the difference is odd, the additional element is
    cropped or padded at the end.
    """
    before = call.operand(0).shape
    after = call.result().shape
    parts = []
    pads = []
    for extent, target in zip(before, after, strict=True):
        start = max(0, (extent - target) // 2)
        parts.append(_dimension_slice_code(start, min(extent, target), 1, extent))
        missing = max(0, target - extent)
        pads.append((missing // 2, missing - missing // 2))
    cut = (
        f"{call.arg(0)}[{', '.join(parts)}]" if any(part != ":" for part in parts) else call.arg(0)
    )
    return pad_code(cut, tuple(pads))


def _emit_depth_and_space(call: Call, to_space: bool) -> str:
    """Return the code of DepthToSpace (`to_space`) or SpaceToDepth."""
    block = call.node.integer("blocksize")
    (batch, channels, height, width) = call.operand(0).shape
    if call.text_attribute("mode", "DCR", ("DCR", "CRD")) == "CRD":
        return f"F.pixel_{'shuffle' if to_space else 'unshuffle'}({call.arg(0)}, {block})"
    if to_space:
        extents = (batch, block, block, channels // block**2, height, width)
        order = "0, 3, 4, 1, 5, 2"
    else:
        extents = (batch, channels, height // block, block, width // block, block)
        order = "0, 3, 5, 1, 2, 4"
    return reshape_code(
        f"{reshape_code(call.arg(0), extents)}.permute({order})", call.result().shape
    )


def _emit_trilu(call: Call) -> str:
    function = "torch.triu" if call.node.integer("upper", 1) else "torch.tril"
    diagonal = call.scalar(1) or "0"
    for axis, sign in ((call.rank - 2, "+"), (call.rank - 1, "-")):
        if group := call.group(f"d{axis}"):
            diagonal += f" {sign} {group}.position * {call.operand(0).shape[axis]}"
    return f"{function}({call.arg(0)}, {diagonal})"


def _emit_col2im(call: Call) -> str:
    image = call.integers(1)
    block = call.integers(2)
    ones = (1,) * len(block)
    settings = {name: call.node.integers(name, ones) for name in ("dilations", "strides")}
    pads = call.node.integers("pads", (0,) * (2 * len(block)))
    return call_code("operators.col2im", call.arg(0), image, block, **settings, pads=pads)


def _emit_gather(call: Call) -> str:
    """Return the code of a Gather."""
    axis = call.axis()
    fixed = _constant_index_code(call)
    if group := call.group(f"d{axis}"):
        return f"operators.sharded_gather({call.arg(0)}, {axis}, {call.arg(1)}, {group})"
    # Indices that are not constant are assumed to be nonnegative, because they usually read an
    # embedding table. If one is negative, `F.embedding` raises an error.
    may_count = call.constant(1) is None or _has_nonnegative_indices(call)
    if (
        not fixed
        and axis == 0
        and call.rank == 2
        and call.operand(0).dtype.is_floating
        and may_count
    ):
        return f"F.embedding({call.arg(1)}, {call.arg(0)})"
    return f"{call.arg(0)}[{', '.join([*[':'] * axis, fixed or call.arg(1)])}]"


def _constant_index_code(call: Call) -> str:
    """Return the code of a Python index for the constant indices of a Gather: an integer for a
    single index, or a slice for consecutive indices. Return "" if the indices are not constant or
    not consecutive.
    """
    indices = call.constant(1)
    if indices is None or indices.ndim > 1 or not indices.size:
        return ""
    first, *others = (
        nonnegative_axis(index, call.operand(0).shape[call.axis()]) for index in call.integers(1)
    )
    if indices.ndim == 0:
        return str(first)
    return (
        f"{first}:{first + len(others) + 1}"
        if others == [*range(first + 1, first + len(others) + 1)]
        else ""
    )


def _has_nonnegative_indices(call: Call) -> bool:
    """Return True if operand 1, the indices, is a constant without negative elements."""
    indices = call.constant(1)
    return indices is not None and bool((indices >= 0).all())


def _emit_gather_elements(call: Call) -> str:
    axis = call.axis()
    if group := call.group("v"):
        return f"operators.sharded_gather_elements({call.arg(0)}, {axis}, {call.arg(1)}, {group})"
    function = "torch.gather" if _has_nonnegative_indices(call) else "operators.gather_elements"
    return f"{function}({call.arg(0)}, {axis}, {call.arg(1)})"


def _emit_gather_nd(call: Call) -> str:
    if batch := call.node.integer("batch_dims"):
        return f"operators.gather_nd({call.args(2)}, {batch})"
    return f"{call.arg(0)}[{call.arg(1)}.unbind(-1)]"


_SCATTER_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
"""torch's name of each scatter reduction of ONNX. The reduction combines the elements that are
written to one position.
"""


def _scatter_reduction_code(call: Call) -> str | None:
    """Return the code of torch's name of the node's reduction, or None if there is no reduction."""
    reduction = call.text_attribute("reduction", "none", ("none", *_SCATTER_REDUCTIONS))
    return f'"{_SCATTER_REDUCTIONS[reduction]}"' if reduction != "none" else None


def _emit_scatter_elements(call: Call) -> str:
    operands = call.arg(0), call.axis(), call.arg(1), call.arg(2)
    return call_code("operators.scatter_elements", *operands, _scatter_reduction_code(call))


def _emit_tensor_scatter(call: Call) -> str:
    circular = call.text_attribute("mode", "linear", ("linear", "circular")) == "circular"
    return call_code(
        "operators.tensor_scatter", call.args(2), call.optional(2), call.axis(-2), circular=circular
    )


def _emit_one_hot(call: Call) -> str:
    axis = nonnegative_axis(call.node.integer("axis", -1), len(call.result().shape))
    operands = call.arg(0), call.result().shape[axis], call.arg(2)
    return call_code("operators.one_hot", *operands, axis, call.group("v"))


def _emit_resize(call: Call) -> str:
    """Return the code of a Resize or Upsample. The defaults of its attributes depend on the opset;
    before opset 11, the coordinates are asymmetric.
    """
    axes = resized_axes(call)
    node = call.node
    if not axes:
        return call.arg(0)
    early = node.op == "Upsample" or call.opset < 11
    mode = node.text("mode", "nearest")
    places = node.text("coordinate_transformation_mode", "asymmetric" if early else "half_pixel")
    rounding = node.text("nearest_mode", "floor" if early else "round_prefer_floor")
    if code := _interpolation_code(call, axes, mode, places, rounding):
        return code
    entries = (
        f"({each.axis}, {each.result}, "
        f"{', '.join(map(python_literal, (each.scale, *each.region)))})"
        for each in axes
    )
    return call_code(
        "operators.resize",
        call.arg(0),
        f"[{', '.join(entries)}]",
        repr(mode),
        repr(places),
        rounding=repr(rounding) if mode == "nearest" else None,
        coefficient=call.float_attribute("cubic_coeff_a", -0.75) if mode == "cubic" else None,
        antialias=call.flag("antialias"),
        exclude_outside=call.flag("exclude_outside"),
        outside=float_literal(node.number("extrapolation_value"))
        if places == "tf_crop_and_resize"
        else None,
    )


_LINEAR_MODES = {3: "linear", 4: "bilinear", 5: "trilinear"}


def _interpolation_code(
    call: Call, axes: tuple[ResizedAxis, ...], mode: str, places: str, rounding: str
) -> str:
    """Return a call of `F.interpolate`, or "" if this function does not compute the semantics of
    the node. `mode`, `places` and `rounding` are the attributes `mode`,
    `coordinate_transformation_mode` and `nearest_mode`.
    """
    node = call.node
    rank = call.rank
    exact = all(each.axis > 1 and each.scale == each.result / each.source for each in axes)
    floating = call.operand(0).dtype in (DType.FLOAT32, DType.FLOAT64)
    plain = not node.integer("antialias") and not node.integer("exclude_outside")
    if not (
        exact
        and floating
        and plain
        and node.number("cubic_coeff_a", -0.75) == -0.75
        and rank in _LINEAR_MODES
    ):
        return ""
    size = call.result().shape[2:]
    if mode == "nearest":
        whole = all(each.scale == int(each.scale) for each in axes)
        rounds = places == "half_pixel" and rounding.startswith("round")
        floors = places == "asymmetric" and rounding == "floor"
        return f"F.interpolate({call.arg(0)}, {size})" if whole and (rounds or floors) else ""
    corners = True if places == "align_corners" else None
    known = corners or places == "half_pixel" or (places == "pytorch_half_pixel" and min(size) > 1)
    if not known or (mode == "cubic" and rank != 4):
        return ""
    method = repr("bicubic" if mode == "cubic" else _LINEAR_MODES[rank])
    return call_code("F.interpolate", call.arg(0), size, mode=method, align_corners=corners)


def _emit_compress(call: Call) -> str:
    axis = call.axis() if call.node.has("axis") else None
    return call_code("operators.compress", call.args(2), str(axis), call.result().shape[axis or 0])


MOVEMENT: dict[str, CodeEmitter] = {
    **dict.fromkeys(("Reshape", "Flatten"), _emit_reshape),
    "Squeeze": partial(_emit_squeeze_or_unsqueeze, "squeeze"),
    "Unsqueeze": partial(_emit_squeeze_or_unsqueeze, "unsqueeze"),
    "Identity": template_emitter("{0}"),
    "Transpose": _emit_transpose,
    "Expand": _emit_expand,
    "Concat": lambda call: (
        call.arg(0) if len(call.codes) == 1 else f"torch.cat([{call.args()}], dim={call.axis()})"
    ),
    "Split": _emit_split,
    "Slice": _emit_slice,
    "Pad": _emit_pad,
    "Tile": lambda call: f"{call.arg(0)}.repeat({shape_arguments(call.integers(1))})",
    "CenterCropPad": _emit_center_crop_pad,
    "DepthToSpace": partial(_emit_depth_and_space, to_space=True),
    "SpaceToDepth": partial(_emit_depth_and_space, to_space=False),
    "ReverseSequence": lambda call: call_code(
        "operators.reverse_sequence",
        call.args(2),
        call.node.integer("time_axis"),
        call.node.integer("batch_axis", 1),
    ),
    "Trilu": _emit_trilu,
    "Compress": _emit_compress,
    "Col2Im": _emit_col2im,
    "Gather": _emit_gather,
    "GatherElements": _emit_gather_elements,
    "GatherND": _emit_gather_nd,
    **dict.fromkeys(("Scatter", "ScatterElements"), _emit_scatter_elements),
    "ScatterND": lambda call: call_code(
        "operators.scatter_nd", call.args(3), _scatter_reduction_code(call)
    ),
    "TensorScatter": _emit_tensor_scatter,
    "OneHot": _emit_one_hot,
    "NonZero": lambda call: call_code("operators.nonzero", call.arg(0), call.result().shape[1]),
    **dict.fromkeys(("Resize", "Upsample"), _emit_resize),
}
