"""Emission of convolutions."""

from __future__ import annotations

from autopipe.backends.torch.emission.call import Call, Emitter, torch_dtype
from autopipe.ir.ops.operator import SpatialWindow, window_of

Extents = tuple[int, ...]


def each(values: Extents) -> str:
    """The same number for every axis as one number, else a tuple."""
    return repr(values[0]) if len(set(values)) == 1 else repr(values)


def pads(begin: Extents, end: Extents) -> str:
    """Pads in the order of `F.pad`: last axis first."""
    return repr(tuple(pad for axis in reversed(range(len(begin))) for pad in (begin[axis], end[axis])))


def _window(call: Call, weight: int = 1) -> SpatialWindow:
    kernel = call.operand(weight).shape[2:]
    window = window_of(call.node, kernel, call.operand(0).shape[2:], call.result().shape[2:])
    return window.inside(call.is_split)


def _settings(window: SpatialWindow, groups: int, padding: Extents) -> str:
    """Stride, padding, dilation and groups as keywords, where they are not torch's defaults."""
    found = {"stride": window.strides, "padding": padding, "dilation": window.dilations}
    neutral = {"stride": 1, "padding": 0, "dilation": 1}
    words = [f"{name}={each(values)}" for name, values in found.items() if set(values) != {neutral[name]}]
    if groups != 1:
        words.append(f"groups={groups}")
    return "".join(f", {word}" for word in words)


def _conv(call: Call) -> str:
    window = _window(call)
    groups = call.operand(0).shape[1] // call.operand(1).shape[1]
    source, padding = call.arg(0), window.begin
    if window.begin != window.end:
        source, padding = f"F.pad({source}, {pads(window.begin, window.end)})", (0,) * len(window.kernel)
    bias = f", {call.bias(2, 'c')}" if call.present(2) else ""
    return f"F.conv{len(window.kernel)}d({source}, {call.arg(1)}{bias}{_settings(window, groups, padding)})"


def _conv_transpose(call: Call) -> str:
    """torch pads both ends alike and adds what is left at the end; other crops are cut out by the runtime."""
    node = call.node
    source, kernel, result = call.operand(0).shape[2:], call.operand(1).shape[2:], call.result().shape[2:]
    begin = _transpose_begin(call)
    ones = (1,) * len(kernel)
    window = SpatialWindow(kernel, node.integers("strides") or ones, node.integers("dilations") or ones, begin, begin)
    groups = call.result().shape[1] // call.operand(1).shape[1]
    full = window.spread(source)
    extra = tuple(extent - (size - 2 * pad) for extent, size, pad in zip(result, full, begin, strict=True))
    fits = all(
        0 <= more < max(stride, dilation)
        for more, stride, dilation in zip(extra, window.strides, window.dilations, strict=True)
    )
    operands = ", ".join((call.arg(0), call.arg(1), *([call.bias(2, "c")] if call.present(2) else [])))
    if fits and all(pad >= 0 for pad in begin):
        output = f", output_padding={each(extra)}" if any(extra) else ""
        return f"F.conv_transpose{len(kernel)}d({operands}{_settings(window, groups, begin)}{output})"
    end = tuple(extent - size + pad for extent, size, pad in zip(result, full, begin, strict=True))
    crop = pads(tuple(-pad for pad in begin), end)
    operands = f"{call.arg(0)}, {call.arg(1)}, {call.bias(2, 'c')}"
    return f"operators.conv_transpose({operands}, {window.strides}, {window.dilations}, {groups}, {crop})"


def _transpose_begin(call: Call) -> Extents:
    """Elements cut off before the first of the result."""
    node = call.node
    source, kernel, result = call.operand(0).shape[2:], call.operand(1).shape[2:], call.result().shape[2:]
    rank = len(kernel)
    policy = node.text("auto_pad", "NOTSET")
    if policy == "NOTSET" and not node.has("output_shape"):
        return node.integers("pads")[:rank] or (0,) * rank
    if policy == "VALID":
        return (0,) * rank
    none, ones = (0,) * rank, (1,) * rank
    bare = SpatialWindow(kernel, node.integers("strides") or ones, node.integers("dilations") or ones, none, none)
    more = node.integers("output_padding") or none
    totals = [full + extra - kept for full, extra, kept in zip(bare.spread(source), more, result, strict=True)]
    return tuple(total // 2 if policy == "SAME_UPPER" else total - total // 2 for total in totals)


def _conv_integer(call: Call) -> str:
    window = _window(call)
    groups = call.operand(0).shape[1] // call.operand(1).shape[1]
    operands = f"{call.arg(0)}, {call.arg(1)}, {call.optional(2)}, {call.optional(3)}"
    return f"operators.conv_integer({operands}, {_runtime_settings(window, groups)})"


def _conv_quantized(call: Call) -> str:
    window = _window(call, 3)
    groups = call.operand(0).shape[1] // call.operand(3).shape[1]
    operands = ", ".join(call.optional(index) for index in range(9))
    dtype = torch_dtype(call.result().dtype)
    return f"operators.conv_quantized({operands}, {dtype}, {_runtime_settings(window, groups)})"


def _runtime_settings(window: SpatialWindow, groups: int) -> str:
    return f"{window.strides}, {pads(window.begin, window.end)}, {window.dilations}, {groups}"


def _deform_conv(call: Call) -> str:
    window = _window(call)
    groups = call.operand(0).shape[1] // call.operand(1).shape[1]
    offset_groups = call.node.integer("offset_group", 1)
    operands = ", ".join(call.optional(index) for index in range(5))
    settings = f"{window.strides}, {window.begin}, {window.dilations}, {groups}, {offset_groups}"
    return f"operators.deform_conv({operands}, {settings})"


CONVOLUTION: dict[str, Emitter] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "ConvInteger": _conv_integer,
    "QLinearConv": _conv_quantized,
    "DeformConv": _deform_conv,
}
