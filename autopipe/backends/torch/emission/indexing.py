"""Emission of operators that read or write at places given by another tensor."""

from __future__ import annotations

from autopipe.backends.torch.emission.call import Call, Emitter
from autopipe.ir.ops.movement import indexed_axis
from autopipe.ir.ops.operator import positive


def _gather(call: Call) -> str:
    axis = indexed_axis(call.signature)
    data = call.operand(0)
    before = [":"] * axis
    if call.is_split(f"d{axis}"):
        return f"operators.gather_part({call.arg(0)}, {axis}, {call.arg(1)}, {call.group(f'd{axis}')})"
    fixed = _range(call, axis)
    if fixed:
        return f"{call.arg(0)}[{', '.join([*before, fixed])}]"
    if axis == 0 and len(data.shape) == 2 and data.dtype.is_floating and _may_count_from_front(call):
        return f"F.embedding({call.arg(1)}, {call.arg(0)})"
    return f"{call.arg(0)}[{', '.join([*before, call.arg(1)])}]"


def _range(call: Call, axis: int) -> str:
    """Known indices as Python writes them, one place or a range of neighbours; "" where they are neither."""
    indices = call.constant(1)
    if indices is None or indices.ndim > 1 or not indices.size:
        return ""
    extent = call.operand(0).shape[axis]
    places = [positive(int(index), extent) for index in indices.reshape(-1)]
    if indices.ndim == 0:
        return str(places[0])
    neighbours = places == list(range(places[0], places[0] + len(places)))
    return f"{places[0]}:{places[-1] + 1}" if neighbours else ""


def _may_count_from_front(call: Call) -> bool:
    """Indices that are not known are taken to be those of an embedding, which are not negative (torch checks)."""
    return call.constant(1) is None or _counted_from_front(call)


def _counted_from_front(call: Call) -> bool:
    indices = call.constant(1)
    return indices is not None and bool((indices >= 0).all())


def _gather_elements(call: Call) -> str:
    if call.is_split("v"):
        axis = indexed_axis(call.signature)
        return f"operators.gather_elements_part({call.arg(0)}, {axis}, {call.arg(1)}, {call.group('v')})"
    function = "torch.gather" if _counted_from_front(call) else "operators.gather_elements"
    return f"{function}({call.arg(0)}, {indexed_axis(call.signature)}, {call.arg(1)})"


def _gather_nd(call: Call) -> str:
    batch = call.node.integer("batch_dims")
    if batch:
        return f"operators.gather_nd({call.arg(0)}, {call.arg(1)}, {batch})"
    return f"{call.arg(0)}[{call.arg(1)}.unbind(-1)]"


def _scatter_elements(call: Call) -> str:
    axis = indexed_axis(call.signature)
    reduction = call.choice("reduction", "none", ("none", *_REDUCTIONS))
    ending = f', "{_REDUCTIONS[reduction]}"' if reduction != "none" else ""
    return f"operators.scatter_elements({call.arg(0)}, {axis}, {call.arg(1)}, {call.arg(2)}{ending})"


def _scatter_nd(call: Call) -> str:
    reduction = call.choice("reduction", "none", ("none", *_REDUCTIONS))
    ending = f', "{_REDUCTIONS[reduction]}"' if reduction != "none" else ""
    return f"operators.scatter_nd({call.arg(0)}, {call.arg(1)}, {call.arg(2)}{ending})"


_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
"""ONNX's words for what happens to elements written several times, and torch's."""


def _tensor_scatter(call: Call) -> str:
    axis = positive(call.node.integer("axis", -2), len(call.operand(0).shape))
    circular = call.choice("mode", "linear", ("linear", "circular")) == "circular"
    start = call.optional(2)
    return f"operators.tensor_scatter({call.arg(0)}, {call.arg(1)}, {start}, {axis}, circular={circular})"


def _one_hot(call: Call) -> str:
    axis = positive(call.node.integer("axis", -1), len(call.result().shape))
    depth = call.result().shape[axis]
    group = f", {call.group('v')}" if call.is_split("v") else ""
    return f"operators.one_hot({call.arg(0)}, {depth}, {call.arg(2)}, {axis}{group})"


INDEXING: dict[str, Emitter] = {
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Scatter": _scatter_elements,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "TensorScatter": _tensor_scatter,
    "OneHot": _one_hot,
    "NonZero": lambda call: f"torch.nonzero({call.arg(0)}).T",
}
