"""Emission of casts, and of quantisation, from and to numbers of 8, 4 and 2 bits."""

from __future__ import annotations

from collections.abc import Callable

from autopipe.backends.torch.emission.call import PRECISIONS, Call, called, torch_dtype
from autopipe.ir.graph import DType


def cast(call: Call) -> str:
    """A cast between any two types."""
    node, source = call.node, call.operand(0).dtype
    code = f"operators.from_float4({call.arg(0)})" if source is DType.FLOAT4E2M1 else call.arg(0)
    saturates = bool(node.integer("saturate", 1))
    return cast_to(code, call.result().dtype, saturates, call.choice("round_mode", "up", ("up", "down", "nearest")))


def cast_to(code: str, dtype: DType, saturate: bool = True, rounding: str = "up") -> str:
    """The cast of `code` to a type."""
    kept = None if saturate else False
    if dtype is DType.FLOAT4E2M1:
        return f"operators.to_float4({code})"
    if dtype is DType.FLOAT8E8M0:
        return called("operators.to_exponent", code, None if rounding == "up" else repr(rounding), saturate=kept)
    if dtype.is_eighth:
        return called("operators.to_float8", code, torch_dtype(dtype), saturate=kept)
    if dtype.packed_bits:
        return called("operators.wrapped", code, dtype.packed_bits, dtype.held == "int8")
    return f"{code}.to({torch_dtype(dtype)})"


def quantize(call: Call) -> str:
    target = call.result().dtype
    if target is DType.FLOAT4E2M1 or target.is_eighth:
        ratio = _linear("scaled_down", call, call.args(2))
        return cast_to(ratio, target, bool(call.node.integer("saturate", 1)))
    limits = None
    if target.packed_bits:
        lowest = -(1 << target.packed_bits - 1) if target.held == "int8" else 0
        limits = lowest, lowest + (1 << target.packed_bits) - 1
    return _linear("quantize_linear", call, call.args(2), call.optional(2), call.dtype, limits=limits)


def dequantize(call: Call) -> str:
    wide: Callable[[str], str] = "operators.from_float4({})".format
    plain = call.operand(0).dtype is not DType.FLOAT4E2M1
    point = call.optional(2) if plain or not call.present(2) else wide(call.arg(2))
    return _linear(
        "dequantize_linear", call, call.arg(0) if plain else wide(call.arg(0)), call.arg(1), point, call.dtype
    )


def _linear(function: str, call: Call, *operands: object, **settings: object) -> str:
    """A call of the runtime's function with scales of this axis, in blocks or not."""
    node, precision = call.node, call.node.integer("precision")
    return called(
        f"operators.{function}",
        *operands,
        axis=node.integer("axis", 1) if call.operand(1).elements > 1 else None,
        block_size=node.integer("block_size") or None,
        precision=torch_dtype(PRECISIONS[precision]) if precision else None,
        **settings,
    )


def unpack(call: Call) -> str:
    dtype = call.result().dtype
    settings = dtype.packed_bits, dtype.held == "int8", call.result().shape
    return called("operators.unpack", call.arg(0), *settings)
