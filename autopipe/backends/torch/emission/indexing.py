"""Emission of operators that read or write at places given by another tensor."""

from __future__ import annotations

from autopipe.backends.torch.emission.call import Call, Emitter
from autopipe.ir.ops.indexing import indexed_axis
from autopipe.ir.ops.lines import positive


def _gather(call: Call) -> str:
    axis = indexed_axis(call.signature)
    data = call.operand(0)
    fixed = call.constant(1)
    if fixed is not None and fixed.ndim == 0:
        place = positive(int(fixed), data.shape[axis])
        return f"{call.arg(0)}[{', '.join([':'] * axis + [str(place)])}]"
    if axis == 0 and len(data.shape) == 2 and data.dtype.is_floating:
        return f"F.embedding({call.arg(1)}, {call.arg(0)})"
    return f"{call.arg(0)}[{', '.join([':'] * axis + [call.arg(1)])}]"


def _counted_from_front(call: Call) -> bool:
    indices = call.constant(1)
    return indices is not None and bool((indices >= 0).all())


def _gather_elements(call: Call) -> str:
    function = "torch.gather" if _counted_from_front(call) else "operators.gather_elements"
    return f"{function}({call.arg(0)}, {indexed_axis(call.signature)}, {call.arg(1)})"


def _gather_nd(call: Call) -> str:
    batch = call.node.integer("batch_dims")
    if batch:
        return f"operators.gather_nd({call.arg(0)}, {call.arg(1)}, {batch})"
    return f"{call.arg(0)}[{call.arg(1)}.unbind(-1)]"


def _scatter_elements(call: Call) -> str:
    axis = indexed_axis(call.signature)
    reduction = call.node.text("reduction", "none")
    ending = f', "{_REDUCTIONS[reduction]}"' if reduction != "none" else ""
    return f"operators.scatter_elements({call.arg(0)}, {axis}, {call.arg(1)}, {call.arg(2)}{ending})"


def _scatter_nd(call: Call) -> str:
    reduction = call.node.text("reduction", "none")
    ending = f', "{_REDUCTIONS[reduction]}"' if reduction != "none" else ""
    return f"operators.scatter_nd({call.arg(0)}, {call.arg(1)}, {call.arg(2)}{ending})"


_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
"""ONNX's words for what happens to elements written several times, and torch's."""


def _tensor_scatter(call: Call) -> str:
    axis = positive(call.node.integer("axis", -2), len(call.operand(0).shape))
    circular = call.node.text("mode", "linear") == "circular"
    start = call.optional(2)
    return f"operators.tensor_scatter({call.arg(0)}, {call.arg(1)}, {start}, {axis}, circular={circular})"


def _one_hot(call: Call) -> str:
    axis = positive(call.node.integer("axis", -1), len(call.result().shape))
    depth = call.result().shape[axis]
    return f"operators.one_hot({call.arg(0)}, {depth}, {call.arg(2)}, {axis})"


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
