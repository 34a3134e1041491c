"""Emission of products.

Emission of pooling.

Emission of convolutions.

Emission of recurrent layers: calls of the runtime, which uses torch's fused layers where they fit.
"""

from __future__ import annotations

from string import ascii_lowercase

from autopipe.backends.torch.emission.call import Call, Emitter, literal, number, shared, torch_dtype
from autopipe.ir.graph import DType
from autopipe.ir.ops.operator import SpatialWindow, window_of
from autopipe.ir.ops.products import equation_of, has_bias


def _matmul(call: Call) -> str:
    if call.result().dtype.is_integer:
        return f"operators.matmul_whole({call.arg(0)}, {call.arg(1)})"
    return multiply(call, call.arg(0), call.arg(1))


def multiply(call: Call, left: str, right: str) -> str:
    """The product of the first two operands, each as it is or transposed, as `left` and `right` write them."""
    equation = _stacked(call.operand(0).shape, call.operand(1).shape)
    if equation is None:
        return f"torch.matmul({left}, {right})"
    return f"torch.einsum({equation!r}, {left}, {right})"


def _stacked(left: tuple[int, ...], right: tuple[int, ...]) -> str | None:
    """The equation of a product of stacks of matrices, one of which is read again along an axis only the other has.

    None where there is no such axis. `torch.matmul` writes a copy of the matrices for each time they are read, and
    sums gradients as many; `torch.einsum` takes such an axis for rows of the other factor, as one would by hand.
    """
    rank = max(len(left), len(right))
    if min(len(left), len(right)) < 3 or rank >= len(ascii_lowercase):
        return None
    stacks = [(1,) * (rank - len(shape)) + shape[:-2] for shape in (left, right)]
    if stacks[0] == stacks[1]:
        return None
    lead, row, inner, column = ascii_lowercase[: rank - 2], *ascii_lowercase[rank - 2 : rank + 1]
    first, second = (lead[rank - len(shape) :] for shape in (left, right))
    return f"{first}{row}{inner},{second}{inner}{column}->{lead}{row}{column}"


def _gemm(call: Call) -> str:
    """`F.linear` where the weight lies as in torch.nn.Linear, else `torch.addmm` on transposed views."""
    node = call.node
    alpha, beta = node.number("alpha", 1.0), node.number("beta", 1.0)
    left = f"{call.arg(0)}.t()" if node.integer("transA") else call.arg(0)
    right = f"{call.arg(1)}.t()" if node.integer("transB") else call.arg(1)
    if not has_bias(call.signature):
        if node.integer("transB") and alpha == 1.0:
            return f"F.linear({left}, {call.arg(1)})"
        product = f"torch.mm({left}, {right})"
        return product if alpha == 1.0 else f"{_factor(call, alpha)} * {product}"
    bias = call.bias(2, "k")
    if node.integer("transB") and alpha == beta == 1.0 and call.operand(2).shape == call.result().shape[1:]:
        return f"F.linear({left}, {call.arg(1)}, {bias})"
    factors = f", beta={_factor(call, beta)}" if beta != 1.0 else ""
    factors += f", alpha={_factor(call, alpha)}" if alpha != 1.0 else ""
    return f"torch.addmm({bias}, {left}, {right}{factors})"


def _factor(call: Call, value: float) -> str:
    return literal(int(value)) if call.result().dtype.is_integer else number(value)


def _einsum(call: Call) -> str:
    operands = ", ".join(call.arg(index) for index in range(len(call.codes)))
    return f"torch.einsum({str(equation_of(call.signature))!r}, {operands})"


def _matmul_integer(call: Call) -> str:
    arguments = ", ".join((call.arg(0), call.arg(1), call.optional(2), call.optional(3)))
    return f"operators.matmul_integer({arguments})"


def _matmul_quantized(call: Call) -> str:
    arguments = ", ".join(call.arg(index) for index in range(8))
    return f"operators.matmul_quantized({arguments}, {torch_dtype(call.result().dtype)})"


PRODUCTS: dict[str, Emitter] = {
    "MatMul": _matmul,
    "autopipe.Linear": lambda call: f"F.linear({call.arg(0)}, {call.arg(1)}.t(), {call.arg(2)})",
    "Gemm": _gemm,
    "Einsum": _einsum,
    "MatMulInteger": _matmul_integer,
    "QLinearMatMul": _matmul_quantized,
}


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


_LOWEST = 'float("-inf")'


def _pooling_window(call: Call) -> SpatialWindow:
    kernel = call.node.integers("kernel_shape")
    window = window_of(call.node, kernel, call.operand(0).shape[2:], call.result().shape[2:])
    return window.inside(call.is_split)


def _fits(call: Call, window: SpatialWindow, ceil: bool = False) -> bool:
    """True if torch's own pads, equal at both ends and at most half a window, give this result."""
    small = all(2 * begin <= size for begin, size in zip(window.begin, window.kernel, strict=True))
    extents = zip(call.operand(0).shape[2:], window.begin, window.reach, window.strides, strict=True)
    counts = tuple(_count(*each, ceil) for each in extents)
    return small and window.begin == window.end and counts == call.result().shape[2:]


def _count(extent: int, begin: int, reach: int, stride: int, ceil: bool) -> int:
    """Windows along one axis; rounded up, the last must still start before the pads at the end."""
    room = extent + 2 * begin - reach
    if not ceil:
        return room // stride + 1
    count = -(-room // stride) + 1
    return count - 1 if (count - 1) * stride >= extent + begin else count


def _exact_pads(call: Call, window: SpatialWindow) -> str:
    """Pads with which the windows of the result fit exactly."""
    end = window.needed(call.operand(0).shape[2:], call.result().shape[2:])
    return pads(window.begin, tuple(max(extent, 0) for extent in end))


def _pooling_settings(window: SpatialWindow, padding: bool) -> str:
    words = [each(window.kernel), each(window.strides)]
    dilated = set(window.dilations) != {1}
    if (padding and any(window.begin)) or dilated:
        words.append(each(window.begin) if padding else "0")
    if dilated:
        words.append(each(window.dilations))
    return ", ".join(words)


def _max_pool(call: Call) -> str:
    window = _pooling_window(call)
    rank = len(window.kernel)
    if len(call.node.outputs) > 1 and call.node.outputs[1]:
        order = call.node.integer("storage_order")
        settings = f"{window.kernel}, {window.strides}, {window.dilations}, {_exact_pads(call, window)}, {order}"
        return f"operators.max_pool_with_indices({call.arg(0)}, {settings})"
    source = call.arg(0)
    narrow = call.operand(0).dtype in (DType.INT8, DType.UINT8)
    if narrow:
        source = f"{source}.float()"
    fits, fits_up = _fits(call, window), _fits(call, window, ceil=True)
    if not fits and not fits_up:
        source = f"F.pad({source}, {_exact_pads(call, window)}, value={_LOWEST})"
    up = ", ceil_mode=True" if fits_up and not fits else ""
    pooled = f"F.max_pool{rank}d({source}, {_pooling_settings(window, fits or fits_up)}{up})"
    pooled = f"{pooled}.to(torch.{call.operand(0).dtype.value})" if narrow else pooled
    return f"({pooled}, None)" if len(call.node.outputs) > 1 else pooled


def _average_pool(call: Call) -> str:
    window = _pooling_window(call)
    counted = bool(call.node.integer("count_include_pad"))
    if _fits(call, window) and set(window.dilations) == {1}:
        excluded = ", count_include_pad=False" if window.is_padded and not counted else ""
        return f"F.avg_pool{len(window.kernel)}d({call.arg(0)}, {_pooling_settings(window, True)}{excluded})"
    settings = _general(call, window)
    stated = pads(window.begin, window.end) if counted else pads(*[(0,) * len(window.kernel)] * 2)
    return f"operators.average_pool({call.arg(0)}, {settings}, {stated})"


def _lp_pool(call: Call) -> str:
    return f"operators.lp_pool({call.arg(0)}, {_general(call, _pooling_window(call))}, {call.node.integer('p', 2)})"


def _general(call: Call, window: SpatialWindow) -> str:
    return f"{window.kernel}, {window.strides}, {window.dilations}, {_exact_pads(call, window)}"


def _global(template: str) -> Emitter:
    def emit(call: Call) -> str:
        axes = tuple(range(2, len(call.operand(0).shape)))
        return template.format(x=call.arg(0), axes=axes, p=call.node.integer("p", 2))

    return emit


def _global_max(call: Call) -> str:
    axes = tuple(range(2, len(call.operand(0).shape)))
    group = shared(call, (f"i{axis - 2}" for axis in axes))
    if group:
        return f"operators.extreme_part({call.arg(0)}, {axes}, True, True, {group})"
    return f"torch.amax({call.arg(0)}, {axes}, keepdim=True)"


def _unpool(call: Call) -> str:
    inferred = _unpooled(call)
    return f"operators.max_unpool({call.arg(0)}, {call.arg(1)}, {inferred}, {call.result().shape})"


def _unpooled(call: Call) -> tuple[int, ...]:
    """Shape of the tensor in which the indices count."""
    node, source = call.node, call.operand(0).shape
    kernel = node.integers("kernel_shape")
    strides, edges = node.integers("strides") or (1,) * len(kernel), node.integers("pads") or (0,) * (2 * len(kernel))
    extents = [
        (source[axis + 2] - 1) * strides[axis] - edges[axis] - edges[len(kernel) + axis] + kernel[axis]
        for axis in range(len(kernel))
    ]
    return (*source[:2], *extents)


POOLING: dict[str, Emitter] = {
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "LpPool": _lp_pool,
    "GlobalAveragePool": _global("torch.mean({x}, {axes}, keepdim=True)"),
    "GlobalMaxPool": _global_max,
    "GlobalLpPool": _global("torch.linalg.vector_norm({x}, {p}, {axes}, keepdim=True)"),
    "MaxUnpool": _unpool,
}


_OPERANDS = ("x", "weight", "recurrence", "bias", "lengths", "hidden", "cell", "peepholes")

_USUAL = {"RNN": ("tanh",), "GRU": ("sigmoid", "tanh"), "LSTM": ("sigmoid", "tanh", "tanh")}
"""Activations of one direction where none are stated."""


def _recurrent(function: str) -> Emitter:
    def emit(call: Call) -> str:
        words = [call.arg(index) for index in range(3)]
        words += [f"{_OPERANDS[index]}={call.arg(index)}" for index in range(3, len(call.codes)) if call.present(index)]
        words += _recurrent_settings(call)
        if call.is_split("h"):
            words.append(f"group={call.group('h')}")
        code = f"operators.{function}({', '.join(words)})"
        count = len(call.node.outputs)
        return f"{code}[0]" if count == 1 else f"{code}[:{count}]"

    return emit


def _recurrent_settings(call: Call) -> list[str]:
    """Attributes that differ from their defaults, as keywords."""
    node = call.node
    words = []
    if node.text("direction", "forward") != "forward":
        words.append(f"direction={node.text('direction')!r}")
    activations = tuple(name.lower() for name in node.texts("activations"))
    if activations and activations != _USUAL[node.op] * (len(activations) // len(_USUAL[node.op])):
        words.append(f"activations={activations!r}")
    for name in ("activation_alpha", "activation_beta"):
        if node.numbers(name):
            words.append(f"{name.removeprefix('activation_')}=({', '.join(map(number, node.numbers(name)))},)")
    if node.has("clip"):
        words.append(f"clip={number(node.number('clip'))}")
    flags = {"linear_before_reset": "reset_after", "input_forget": "coupled", "layout": "batch_first"}
    words += [f"{word}=True" for name, word in flags.items() if node.integer(name)]
    return words


RECURRENT: dict[str, Emitter] = {name: _recurrent(name.lower()) for name in ("RNN", "GRU", "LSTM")}
