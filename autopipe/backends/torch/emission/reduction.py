"""Emission of operators that reduce or order along axes."""

from __future__ import annotations

from collections.abc import Callable

from autopipe.backends.torch.emission.call import Call, Emitter, shared, torch_dtype
from autopipe.ir.graph import DType
from autopipe.ir.ops.normalization import chosen_axis, flattened_axes, reduced_axes, running_axis


def _axes(call: Call) -> str:
    """`dim=1, keepdim=True`."""
    axes = reduced_axes(call.signature)
    spelled = str(axes[0]) if len(axes) == 1 else str(axes)
    return f"dim={spelled}" + (", keepdim=True" if call.node.integer("keepdims", 1) else "")


def _exact(call: Call) -> str:
    """Integers keep their type, which torch's sums would widen."""
    dtype = call.result().dtype
    return f", dtype={torch_dtype(dtype)}" if dtype.is_integer else ""


def _together(call: Call, function: str, *settings: bool) -> str:
    """A call of the runtime's reduction of all ranks' parts; "" where this rank has the reduced axes whole."""
    axes = reduced_axes(call.signature)
    group = shared(call, (f"d{axis}" for axis in axes))
    words = [call.arg(0), str(axes), str(bool(call.node.integer("keepdims", 1))), *map(str, settings), group]
    return f"operators.{function}({', '.join(words)})" if group else ""


def _sum(call: Call, code: str) -> str:
    return f"{code}.sum({_axes(call)}{_exact(call)})"


def _mean(call: Call) -> str:
    if call.result().dtype.is_integer:
        return f"{call.arg(0)}.mean({_axes(call)}, dtype=torch.float64).to({torch_dtype(call.result().dtype)})"
    return f"{call.arg(0)}.mean({_axes(call)})"


def _norm(call: Call) -> str:
    if call.result().dtype.is_integer:
        total = f"{call.arg(0)}.double().square().sum({_axes(call)}).sqrt()"
        return f"{total}.to({torch_dtype(call.result().dtype)})"
    return _together(call, "norm_part") or f"torch.linalg.vector_norm({call.arg(0)}, {_axes(call)})"


def _log_sum_exp(call: Call) -> str:
    return _together(call, "log_sum_exp_part") or f"torch.logsumexp({call.arg(0)}, {_axes(call)})"


def _log_sum(call: Call) -> str:
    return _together(call, "log_sum_part") or f"{_sum(call, call.arg(0))}.log()"


def _product(call: Call) -> str:
    """torch multiplies along one axis a call; the last goes first, so that the others keep their numbers."""
    code = call.arg(0)
    keep = ", keepdim=True" if call.node.integer("keepdims", 1) else ""
    for axis in reversed(reduced_axes(call.signature)):
        code = f"{code}.prod(dim={axis}{keep}{_exact(call)})"
    return code


def _extreme(method: str) -> Emitter:
    """torch refuses the largest of nothing; ONNX says the smallest number there is (for Max)."""

    def emit(call: Call) -> str:
        if not call.operand(0).elements:
            dtype = torch_dtype(call.result().dtype)
            limit = f'float("{"-inf" if method == "amax" else "inf"}")'
            if call.result().dtype is DType.BOOL:
                limit = str(method == "amin")
            elif not call.result().dtype.is_floating:
                limit = f"torch.iinfo({dtype}).{'min' if method == 'amax' else 'max'}"
            return f"torch.full({call.result().shape}, {limit}, dtype={dtype}, device=p.device)"
        return _together(call, "extreme_part", method == "amax") or f"{call.arg(0)}.{method}({_axes(call)})"

    return emit


def _reduction(emit: Emitter, alone: Callable[[str], str] = lambda code: code) -> Emitter:
    """`emit`, or `alone` applied to the operand where there is nothing to reduce over."""
    return lambda call: emit(call) if reduced_axes(call.signature) else alone(call.arg(0))


def _index(function: str) -> Emitter:
    def emit(call: Call) -> str:
        axis = chosen_axis(call.signature)
        keep = ", keepdim=True" if call.node.integer("keepdims", 1) else ""
        last = bool(call.node.integer("select_last_index"))
        group = shared(call, [f"d{axis}"])
        if group:
            settings = f"{axis}, {bool(keep)}, {function == 'argmax'}, {last}"
            return f"operators.index_of_extreme_part({call.arg(0)}, {settings}, {group})"
        if last:
            end = call.operand(0).shape[axis] - 1
            return f"{end} - torch.{function}({call.arg(0)}.flip({axis}), dim={axis}{keep})"
        return f"torch.{function}({call.arg(0)}, dim={axis}{keep})"

    return emit


def _running(function: str) -> Emitter:
    def emit(call: Call) -> str:
        axis = running_axis(call.signature)
        exclusive, backwards = bool(call.node.integer("exclusive")), bool(call.node.integer("reverse"))
        if exclusive or backwards:
            return f"operators.{function}({call.arg(0)}, {axis}, exclusive={exclusive}, reverse={backwards})"
        return f"torch.{function}({call.arg(0)}, dim={axis}{_exact(call)})"

    return emit


def _top_k(call: Call) -> str:
    axis = chosen_axis(call.signature, -1)
    count = call.scalar(1) if call.present(1) else str(call.node.integer("k"))
    largest = bool(call.node.integer("largest", 1))
    return f"operators.top_k({call.arg(0)}, {count}, {axis}, largest={largest})"


def _hardmax(call: Call) -> str:
    return f"operators.hardmax({call.arg(0)}, {flattened_axes(call.signature)})"


REDUCTION: dict[str, Emitter] = {
    "ReduceSum": _reduction(lambda call: _sum(call, call.arg(0))),
    "ReduceMean": _reduction(_mean),
    "ReduceL1": _reduction(lambda call: _sum(call, f"{call.arg(0)}.abs()"), lambda code: f"{code}.abs()"),
    "ReduceL2": _reduction(_norm, lambda code: f"{code}.abs()"),
    "ReduceSumSquare": _reduction(lambda call: _sum(call, f"{call.arg(0)}.square()"), lambda code: f"{code}.square()"),
    "ReduceLogSum": _reduction(_log_sum, lambda code: f"{code}.log()"),
    "ReduceLogSumExp": _reduction(_log_sum_exp),
    "ReduceMax": _reduction(_extreme("amax")),
    "ReduceMin": _reduction(_extreme("amin")),
    "ReduceProd": _reduction(_product),
    "ArgMax": _index("argmax"),
    "ArgMin": _index("argmin"),
    "CumSum": _running("cumsum"),
    "CumProd": _running("cumprod"),
    "TopK": _top_k,
    "Hardmax": _hardmax,
}
