"""Emission of operators that combine operands element by element."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from autopipe.backends.torch.emission.call import Call, Emitter, torch_dtype
from autopipe.ir.graph import DType


def element(call: Call, index: int) -> str:
    """An operand's code, or a number where it is a known scalar and another tensor gives the result its shape."""
    value = call.scalar(index)
    if value is None or call.operand(index).dtype is DType.BOOL:
        return call.arg(index)
    shape = call.result().shape
    shaped = any(
        place != index and each is not None and each.shape == shape and call.scalar(place) is None
        for place, each in enumerate(call.signature.operands)
    )
    return value if shaped else call.arg(index)


def infix(symbol: str) -> Emitter:
    """`a + b + c`."""
    return lambda call: f" {symbol} ".join(element(call, index) for index in range(len(call.codes)))


def unary(function: str) -> Emitter:
    """`torch.relu(x)`."""
    return lambda call: f"{function}({call.arg(0)})"


def _tensors(function: str) -> Emitter:
    """A function of two tensors."""
    return lambda call: f"{function}({call.arg(0)}, {call.arg(1)})"


def _div(call: Call) -> str:
    if call.result().dtype.is_integer:
        return f'torch.div({call.arg(0)}, {element(call, 1)}, rounding_mode="trunc")'
    return f"{element(call, 0)} / {element(call, 1)}"


def _mod(call: Call) -> str:
    function = "torch.fmod" if call.node.integer("fmod") else "torch.remainder"
    return f"{function}({call.arg(0)}, {element(call, 1)})"


def _pow(call: Call) -> str:
    base, exponent = call.operand(0).dtype, call.operand(1).dtype
    code = f"torch.pow({call.arg(0)}, {element(call, 1)})"
    return code if base is exponent or (element(call, 1) != call.arg(1) and base.is_floating) else _cast(code, base)


def _cast(code: str, dtype: DType) -> str:
    return f"{code}.to({torch_dtype(dtype)})"


def _mean(call: Call) -> str:
    total = " + ".join(call.arg(index) for index in range(len(call.codes)))
    return f"({total}) / {len(call.codes)}" if len(call.codes) > 1 else total


def _extreme(function: str, bound: str) -> Emitter:
    """`torch.maximum(torch.maximum(a, b), c)`; against a known scalar `torch.clamp(a, min=0.0)`."""

    def emit(call: Call) -> str:
        if len(call.codes) == 2:
            for place in (0, 1):
                value = element(call, place)
                if value != call.arg(place):
                    return f"torch.clamp({call.arg(1 - place)}, {bound}={value})"
        codes = [call.arg(index) for index in range(len(call.codes))]
        return functools.reduce(lambda left, right: f"{function}({left}, {right})", codes)

    return emit


def _where(call: Call) -> str:
    """One side may be a number: the other is a tensor then, and gives the result its type."""
    codes = [call.arg(1), call.arg(2)]
    for side, other in ((2, 1), (1, 2)):
        value = call.scalar(side)
        shape = np.broadcast_shapes(call.operand(0).shape, call.operand(other).shape)
        if value is not None and shape == call.result().shape and call.operand(side).dtype is not DType.BOOL:
            codes[side - 1] = value
            break
    return f"torch.where({call.arg(0)}, {codes[0]}, {codes[1]})"


def _clip(call: Call) -> str:
    if call.opset < 11:
        bounds = [f"{name}={call.stated(name, 0.0)}" for name in ("min", "max") if call.node.has(name)]
    else:
        given = [(name, index) for name, index in (("min", 1), ("max", 2)) if call.present(index)]
        known = all(call.scalar(index) is not None for _, index in given)
        bounds = [f"{name}={call.scalar(index) if known else call.arg(index)}" for name, index in given]
    return f"torch.clamp({', '.join([call.arg(0), *bounds])})" if bounds else call.arg(0)


def _is_inf(call: Call) -> str:
    negative, positive = call.node.integer("detect_negative", 1), call.node.integer("detect_positive", 1)
    if negative and positive:
        return f"torch.isinf({call.arg(0)})"
    if positive:
        return f"torch.isposinf({call.arg(0)})"
    if negative:
        return f"torch.isneginf({call.arg(0)})"
    return f"torch.zeros_like({call.arg(0)}, dtype=torch.bool)"


def _shift(call: Call) -> str:
    direction = call.choice("direction", "", ("LEFT", "RIGHT")).lower()
    return f"torch.bitwise_{direction}_shift({call.arg(0)}, {call.arg(1)})"


def _convert(call: Call) -> str:
    return _cast(call.arg(0), call.result().dtype)


_WIDER = {DType.UINT16: DType.INT32, DType.UINT32: DType.INT64, DType.UINT64: DType.INT64}
"""Where torch lacks arithmetic for an unsigned type: one that has it and holds (of 64 bits: wraps) the same numbers."""


def widened(emit: Emitter) -> Emitter:
    """Computes on unsigned integers, for which torch has hardly any arithmetic, in a wider type."""

    def emit_widened(call: Call) -> str:
        wider = {
            index: _WIDER[value.dtype]
            for index, value in enumerate(call.signature.operands)
            if value is not None and value.dtype in _WIDER
        }
        if not wider:
            return emit(call)
        codes = tuple(
            _cast(code, wider[index]) if code is not None and index in wider else code
            for index, code in enumerate(call.codes)
        )
        code = emit(Call(call.signature, codes))
        result = call.result().dtype
        return _cast(f"({code})", result) if result in _WIDER else code

    return emit_widened


def _each_widened(table: dict[str, Emitter]) -> dict[str, Emitter]:
    widen: Callable[[Emitter], Emitter] = widened
    return {name: widen(emit) for name, emit in table.items()}


_NUMERIC: dict[str, Emitter] = {
    "Add": infix("+"),
    "Sub": infix("-"),
    "Mul": infix("*"),
    "Div": _div,
    "Mod": _mod,
    "Pow": _pow,
    "Sum": infix("+"),
    "Mean": _mean,
    "Max": _extreme("torch.maximum", "min"),
    "Min": _extreme("torch.minimum", "max"),
    "Equal": infix("=="),
    "Greater": infix(">"),
    "GreaterOrEqual": infix(">="),
    "Less": infix("<"),
    "LessOrEqual": infix("<="),
    "BitShift": _shift,
    "BitwiseAnd": _tensors("torch.bitwise_and"),
    "BitwiseOr": _tensors("torch.bitwise_or"),
    "BitwiseXor": _tensors("torch.bitwise_xor"),
    "BitwiseNot": unary("torch.bitwise_not"),
}

ELEMENTWISE: dict[str, Emitter] = {
    **_each_widened(_NUMERIC),
    "And": infix("&"),
    "Or": infix("|"),
    "Xor": infix("^"),
    "Not": unary("torch.logical_not"),
    "IsNaN": unary("torch.isnan"),
    "IsInf": _is_inf,
    "Where": _where,
    "Clip": _clip,
    "Cast": _convert,
    "CastLike": _convert,
    "BitCast": lambda call: f"{call.arg(0)}.view({torch_dtype(call.result().dtype)})",
}
