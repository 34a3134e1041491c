"""Emission of pooling."""

from __future__ import annotations

from autopipe.backends.torch.emission.call import Call, Emitter, shared
from autopipe.backends.torch.emission.convolution import each, pads
from autopipe.ir.graph import DType
from autopipe.ir.ops.operator import SpatialWindow, window_of

_LOWEST = 'float("-inf")'


def _window(call: Call) -> SpatialWindow:
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


def _settings(window: SpatialWindow, padding: bool) -> str:
    words = [each(window.kernel), each(window.strides)]
    dilated = set(window.dilations) != {1}
    if (padding and any(window.begin)) or dilated:
        words.append(each(window.begin) if padding else "0")
    if dilated:
        words.append(each(window.dilations))
    return ", ".join(words)


def _max_pool(call: Call) -> str:
    window = _window(call)
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
    pooled = f"F.max_pool{rank}d({source}, {_settings(window, fits or fits_up)}{up})"
    pooled = f"{pooled}.to(torch.{call.operand(0).dtype.value})" if narrow else pooled
    return f"({pooled}, None)" if len(call.node.outputs) > 1 else pooled


def _average_pool(call: Call) -> str:
    window = _window(call)
    counted = bool(call.node.integer("count_include_pad"))
    if _fits(call, window) and set(window.dilations) == {1}:
        excluded = ", count_include_pad=False" if window.is_padded and not counted else ""
        return f"F.avg_pool{len(window.kernel)}d({call.arg(0)}, {_settings(window, True)}{excluded})"
    settings = _general(call, window)
    stated = pads(window.begin, window.end) if counted else pads(*[(0,) * len(window.kernel)] * 2)
    return f"operators.average_pool({call.arg(0)}, {settings}, {stated})"


def _lp_pool(call: Call) -> str:
    return f"operators.lp_pool({call.arg(0)}, {_general(call, _window(call))}, {call.node.integer('p', 2)})"


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
