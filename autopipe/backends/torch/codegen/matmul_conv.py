"""Emitters (functions that return the Python code of one use of an operator) for matmuls,
convolutions, pooling and recurrent layers.
"""

from __future__ import annotations

from functools import partial
from string import ascii_lowercase

from autopipe.backends.torch.codegen.call import (
    Call,
    CodeEmitter,
    call_code,
    common_type_emitter,
    float_literal,
    template_emitter,
)
from autopipe.ir.graph import DType
from autopipe.ir.ops.matmul_conv import equation_of, has_bias
from autopipe.ir.ops.operator import SpatialWindow, window_of

# The functions below emit the code of matmuls.


def _emit_matmul(call: Call) -> str:
    if call.result().dtype.is_integer:
        return f"operators.matmul_whole({call.args(2)})"
    return matmul_code(call, call.arg(0), call.arg(1))


def matmul_code(call: Call, left: str, right: str) -> str:
    """Return the code of the matmul of operands 0 and 1. `left` and `right` are the code of these
    operands, transposed if the node requires this.

    The code is a `torch.einsum` if one operand lacks a batch dimension of the other or broadcasts
    it: einsum merges this dimension with the rows of the other operand. `torch.matmul` would
    instead copy the operand for each index of the dimension, and would sum as many gradients.
    """
    shapes = call.operand(0).shape, call.operand(1).shape
    rank = max(map(len, shapes))
    stacks = [(1,) * (rank - len(shape)) + shape[:-2] for shape in shapes]
    if min(map(len, shapes)) < 3 or rank >= len(ascii_lowercase) or stacks[0] == stacks[1]:
        return f"torch.matmul({left}, {right})"
    lead = ascii_lowercase[: rank - 2]
    row, inner, column = list(ascii_lowercase[rank - 2 : rank + 1])
    first, second = (lead[rank - len(shape) :] for shape in shapes)
    equation = f"{first}{row}{inner},{second}{inner}{column}->{lead}{row}{column}"
    return f"torch.einsum({equation!r}, {left}, {right})"


def _emit_gemm(call: Call) -> str:
    """Return the code of a Gemm: `F.linear` if the weight has shape [out, in] as in
    torch.nn.Linear, otherwise `torch.addmm` or `torch.mm`, with transposed views if needed.
    """
    node = call.node
    transposed = bool(call.node.integer("transB"))
    left = f"{call.arg(0)}.t()" if node.integer("transA") else call.arg(0)
    right = f"{call.arg(1)}.t()" if transposed else call.arg(1)
    whole = call.result().dtype.is_integer
    values = {name: node.number(name, 1.0) for name in ("beta", "alpha")}
    factors = {
        name: repr(int(value)) if whole else float_literal(value)
        for name, value in values.items()
        if value != 1.0
    }
    bias = call.bias(2, "k") if has_bias(call) else None
    if bias is None:
        if transposed and "alpha" not in factors:
            return f"F.linear({left}, {call.arg(1)})"
        return (
            f"{factors['alpha']} * torch.mm({left}, {right})"
            if "alpha" in factors
            else f"torch.mm({left}, {right})"
        )
    if transposed and not factors and call.operand(2).shape == call.result().shape[1:]:
        return f"F.linear({left}, {call.arg(1)}, {bias})"
    return call_code("torch.addmm", bias, left, right, **factors)


# The functions below emit the code of convolutions.

Extents = tuple[int, ...]


def number_or_tuple_code(values: Extents) -> str:
    """Return the code of one number if all values are equal, otherwise the code of a tuple."""
    return repr(values[0]) if len(set(values)) == 1 else repr(values)


def pads_code(begin: Extents, end: Extents) -> str:
    """Return the code of pads in the order of `F.pad`: begin and end of the last axis first.
    `begin` and `end` have one entry per spatial axis.
    """
    return repr(
        tuple(pad for axis in reversed(range(len(begin))) for pad in (begin[axis], end[axis]))
    )


def _local_spatial_window(call: Call, kernel: Extents) -> SpatialWindow:
    """Return the window of a convolution or pooling on this rank. An axis that is split has no
    pads, because the layout of the operand already includes the elements beyond the edges of the
    shard.
    """
    window = window_of(call.node, kernel, call.operand(0).shape[2:], call.result().shape[2:])
    return window.without_split_pads(call.is_split)


def _window_and_groups(call: Call, weight: int = 1) -> tuple[SpatialWindow, int]:
    """Return (window, number of groups) of a convolution on this rank. `weight` is the index of the
    weight operand.
    """
    shape = call.operand(weight).shape
    return _local_spatial_window(call, shape[2:]), call.operand(0).shape[1] // shape[1]


def _conv_arguments(window: SpatialWindow, groups: int, padding: Extents) -> dict[str, object]:
    """Return the keyword arguments `stride`, `padding`, `dilation` and `groups` of torch's
    convolutions, without those that have torch's default.
    """
    found = {
        "stride": (window.strides, 1),
        "padding": (padding, 0),
        "dilation": (window.dilations, 1),
    }
    found["groups"] = (groups,), 1
    return {
        name: number_or_tuple_code(values)
        for name, (values, neutral) in found.items()
        if set(values) != {neutral}
    }


def _emit_conv(call: Call) -> str:
    window, groups = _window_and_groups(call)
    source = call.arg(0)
    padding = window.begin
    if window.begin != window.end:
        source = f"F.pad({source}, {pads_code(window.begin, window.end)})"
        padding = (0,) * len(window.kernel)
    bias = call.bias(2, "c") if call.present(2) else None
    return call_code(
        f"F.conv{len(window.kernel)}d",
        source,
        call.arg(1),
        bias,
        **_conv_arguments(window, groups, padding),
    )


def _emit_conv_transpose(call: Call) -> str:
    """Return the code of a ConvTranspose. torch can crop equal numbers of elements at both ends of
    an axis, with additional elements at the end (`output_padding`); the runtime implements all
    other crops.
    """
    node = call.node
    source = call.operand(0).shape[2:]
    kernel = call.operand(1).shape[2:]
    result = call.result().shape[2:]
    none = (0,) * len(kernel)
    ones = (1,) * len(kernel)
    window = SpatialWindow(
        kernel, node.integers("strides") or ones, node.integers("dilations") or ones, none, none
    )
    full = window.covered_sizes(source)
    # `begin` is the number of elements at the start of each axis that are cropped from the full
    # result of the transposed convolution.
    policy = node.text("auto_pad", "NOTSET")
    if policy == "NOTSET" and not node.has("output_shape"):
        begin = node.integers("pads")[: len(kernel)] or none
    elif policy == "VALID":
        begin = none
    else:
        more = node.integers("output_padding") or none
        totals = [size + extra - kept for size, extra, kept in zip(full, more, result, strict=True)]
        begin = tuple(
            total // 2 if policy == "SAME_UPPER" else total - total // 2 for total in totals
        )
    groups = call.result().shape[1] // call.operand(1).shape[1]
    extra = tuple(
        extent - (size - 2 * pad) for extent, size, pad in zip(result, full, begin, strict=True)
    )
    fits = all(
        0 <= more < max(stride, dilation)
        for more, stride, dilation in zip(extra, window.strides, window.dilations, strict=True)
    )
    if fits and all(pad >= 0 for pad in begin):
        bias = call.bias(2, "c") if call.present(2) else None
        settings = _conv_arguments(window, groups, begin) | {
            "output_padding": number_or_tuple_code(extra) if any(extra) else None
        }
        return call_code(f"F.conv_transpose{len(kernel)}d", call.args(2), bias, **settings)
    end = tuple(extent - size + pad for extent, size, pad in zip(result, full, begin, strict=True))
    crop = pads_code(tuple(-pad for pad in begin), end)
    operands = call.args(2), call.bias(2, "c"), window.strides, window.dilations, groups, crop
    return call_code("operators.conv_transpose", *operands)


def _runtime_conv_arguments(window: SpatialWindow, groups: int) -> str:
    """Return the code of strides, pads, dilations and groups for the runtime's convolutions."""
    return f"{window.strides}, {pads_code(window.begin, window.end)}, {window.dilations}, {groups}"


def _emit_deform_conv(call: Call) -> str:
    window, groups = _window_and_groups(call)
    settings = (
        window.strides,
        window.begin,
        window.dilations,
        groups,
        call.node.integer("offset_group", 1),
    )
    return call_code("operators.deform_conv", call.optionals(5), *settings)


# The functions below emit the code of pooling operators.


def _pooling_window(call: Call) -> SpatialWindow:
    """Return the window of a pooling node on this rank."""
    return _local_spatial_window(call, call.node.integers("kernel_shape"))


def _is_torch_pooling_exact(call: Call, window: SpatialWindow, ceil: bool = False) -> bool:
    """Return True if torch's pooling can compute the node: it must give the shape of the node's
    result, and it requires pads that are equal at both ends of an axis and at most half of a
    window. `ceil` is the value of torch's `ceil_mode`.
    """
    counts = []
    for extent, begin, reach, stride in zip(
        call.operand(0).shape[2:], window.begin, window.reach, window.strides, strict=True
    ):
        steps, left = divmod(extent + 2 * begin - reach, stride)
        # With `ceil_mode`, torch omits a last window that would start in the pads at the end of an
        # axis, so this window is not part of the count.
        more = ceil and left > 0 and (steps + 1) * stride < extent + begin
        counts.append(steps + 1 + more)
    small = all(2 * begin <= size for begin, size in zip(window.begin, window.kernel, strict=True))
    return small and window.begin == window.end and tuple(counts) == call.result().shape[2:]


def _exact_pads_code(call: Call, window: SpatialWindow) -> str:
    """Return the code of the pads, in the order of `F.pad`, with which the windows of the result
    exactly cover the padded operand.
    """
    end = window.exact_end_pads(call.operand(0).shape[2:], call.result().shape[2:])
    return pads_code(window.begin, tuple(max(extent, 0) for extent in end))


def _runtime_pooling_code(function: str, call: Call, *settings: object) -> str:
    """Return the call of the runtime's pooling function `function`, which supports all windows and
    pads. `settings` are its further arguments.
    """
    window = _pooling_window(call)
    shape = window.kernel, window.strides, window.dilations
    return call_code(
        f"operators.{function}", call.arg(0), *shape, _exact_pads_code(call, window), *settings
    )


def _pooling_arguments(window: SpatialWindow, padding: bool) -> list[str]:
    """Return the arguments kernel size, stride, padding and dilation of torch's pooling, without
    trailing default values. The padding is 0 unless `padding` is set.
    """
    dilated = set(window.dilations) != {1}
    begin = (
        [number_or_tuple_code(window.begin) if padding else "0"]
        if (padding and any(window.begin)) or dilated
        else []
    )
    return [
        number_or_tuple_code(window.kernel),
        number_or_tuple_code(window.strides),
        *begin,
        *([number_or_tuple_code(window.dilations)] if dilated else []),
    ]


def _emit_max_pool(call: Call) -> str:
    window = _pooling_window(call)
    source = call.arg(0)
    dtype = call.operand(0).dtype
    if len(call.node.outputs) > 1 and call.node.outputs[1]:
        return _runtime_pooling_code(
            "max_pool_with_indices", call, call.node.integer("storage_order")
        )
    narrow = dtype in (DType.INT8, DType.UINT8)
    if narrow:
        source = f"{source}.float()"
    fits = _is_torch_pooling_exact(call, window)
    fits_up = _is_torch_pooling_exact(call, window, ceil=True)
    if not fits and not fits_up:
        source = f'F.pad({source}, {_exact_pads_code(call, window)}, value=float("-inf"))'
    function = f"F.max_pool{len(window.kernel)}d"
    settings = _pooling_arguments(window, fits or fits_up)
    pooled = call_code(
        function, source, *settings, ceil_mode=True if fits_up and not fits else None
    )
    pooled = f"{pooled}.to({call.dtype})" if narrow else pooled
    return f"({pooled}, None)" if len(call.node.outputs) > 1 else pooled


def _emit_average_pool(call: Call) -> str:
    window = _pooling_window(call)
    counted = bool(call.node.integer("count_include_pad"))
    if _is_torch_pooling_exact(call, window) and set(window.dilations) == {1}:
        function = f"F.avg_pool{len(window.kernel)}d"
        settings = _pooling_arguments(window, True)
        excluded = False if any(window.begin + window.end) and not counted else None
        return call_code(function, call.arg(0), *settings, count_include_pad=excluded)
    none = (0,) * len(window.kernel)
    return _runtime_pooling_code(
        "average_pool",
        call,
        pads_code(window.begin, window.end) if counted else pads_code(none, none),
    )


def _emit_global_pool(template: str, call: Call) -> str:
    """Return the code of a pooling over all spatial axes. In `template`, x stands for the operand,
    axes for these axes, and p for the attribute p.
    """
    axes = tuple(range(2, call.rank))
    return template.format(x=call.arg(0), axes=axes, p=call.node.integer("p", 2))


def _emit_global_max_pool(call: Call) -> str:
    axes = tuple(range(2, call.rank))
    if group := call.group(*(f"i{axis - 2}" for axis in axes)):
        return f"operators.sharded_extreme({call.arg(0)}, {axes}, True, True, {group})"
    return f"torch.amax({call.arg(0)}, {axes}, keepdim=True)"


def _emit_max_unpool(call: Call) -> str:
    """Return the code of a MaxUnpool. The indices in its second operand refer to a tensor whose
    shape follows from the kernel, strides and pads. This tensor can be smaller or larger than the
    result.
    """
    node = call.node
    source = call.operand(0).shape
    kernel = node.integers("kernel_shape")
    rank = len(kernel)
    strides = node.integers("strides", (1,) * rank)
    edges = node.integers("pads", (0,) * (2 * rank))
    axes = zip(source[2:], strides, edges[:rank], edges[rank:], kernel, strict=True)
    extents = (
        (count - 1) * stride - begin - end + size for count, stride, begin, end, size in axes
    )
    return f"operators.max_unpool({call.args(2)}, {(*source[:2], *extents)}, {call.result().shape})"


# The functions below emit the code of recurrent layers. It calls functions of the runtime, which
# use torch's fused layers if these support the settings.

_RECURRENT_OPERANDS = (
    "x",
    "weight",
    "recurrence",
    "bias",
    "lengths",
    "hidden",
    "cell",
    "peepholes",
)

_DEFAULT_ACTIVATIONS = {
    "RNN": ("tanh",),
    "GRU": ("sigmoid", "tanh"),
    "LSTM": ("sigmoid", "tanh", "tanh"),
}
"""Default activations of each recurrent operator, for one direction."""


def _emit_recurrent_layer(call: Call) -> str:
    """Return the call of the runtime's recurrent layer. Optional operands that are present, and
    attributes that differ from their defaults, are keyword arguments.
    """
    node = call.node
    settings: dict[str, object] = {
        _RECURRENT_OPERANDS[index]: call.arg(index)
        for index in range(3, len(call.codes))
        if call.present(index)
    }
    if node.text("direction", "forward") != "forward":
        settings["direction"] = repr(node.text("direction"))
    activations = tuple(name.lower() for name in node.texts("activations"))
    if activations and activations != _DEFAULT_ACTIVATIONS[node.op] * (
        len(activations) // len(_DEFAULT_ACTIVATIONS[node.op])
    ):
        settings["activations"] = repr(activations)
    for name in ("alpha", "beta"):
        if values := node.numbers(f"activation_{name}"):
            settings[name] = f"({', '.join(map(float_literal, values))},)"
    settings["clip"] = float_literal(node.number("clip")) if node.has("clip") else None
    flags = {
        "linear_before_reset": "reset_after",
        "input_forget": "coupled",
        "layout": "batch_first",
    }
    settings |= {word: call.flag(name) for name, word in flags.items()}
    code = call_code(
        f"operators.{node.op.lower()}", call.args(3), **settings, group=call.group("h")
    )
    return call.outputs(code)


MATMUL_CONV: dict[str, CodeEmitter] = {
    "MatMul": _emit_matmul,
    "autopipe.Linear": template_emitter("F.linear({0}, {1}.t(), {2})"),
    "Gemm": common_type_emitter(_emit_gemm),
    "Einsum": lambda call: f"torch.einsum({str(equation_of(call))!r}, {call.args()})",
    "MatMulInteger": lambda call: f"operators.matmul_integer({call.optionals(4)})",
    "QLinearMatMul": lambda call: f"operators.matmul_quantized({call.args(8)}, {call.dtype})",
    "Conv": common_type_emitter(_emit_conv),
    "ConvTranspose": common_type_emitter(_emit_conv_transpose),
    "ConvInteger": lambda call: call_code(
        "operators.conv_integer",
        call.optionals(4),
        _runtime_conv_arguments(*_window_and_groups(call)),
    ),
    "QLinearConv": lambda call: call_code(
        "operators.conv_quantized",
        call.optionals(9),
        call.dtype,
        _runtime_conv_arguments(*_window_and_groups(call, 3)),
    ),
    "DeformConv": _emit_deform_conv,
    "MaxPool": _emit_max_pool,
    "AveragePool": _emit_average_pool,
    "LpPool": lambda call: _runtime_pooling_code("lp_pool", call, call.node.integer("p", 2)),
    "GlobalAveragePool": partial(_emit_global_pool, "torch.mean({x}, {axes}, keepdim=True)"),
    "GlobalMaxPool": _emit_global_max_pool,
    "GlobalLpPool": partial(
        _emit_global_pool, "torch.linalg.vector_norm({x}, {p}, {axes}, keepdim=True)"
    ),
    "MaxUnpool": _emit_max_unpool,
    **dict.fromkeys(("RNN", "GRU", "LSTM"), _emit_recurrent_layer),
}
