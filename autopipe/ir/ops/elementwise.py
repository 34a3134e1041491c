"""Operators that compute each element of the result from the elements at the same place, with broadcasting."""

from __future__ import annotations

from autopipe.ir.ops.lines import aligned, names, spell, unindexed
from autopipe.ir.ops.row import NotationLine, Operator, Signature, no_flops, per_result


def broadcast(signature: Signature) -> NotationLine:
    """`*x, *x -> *x`: trailing dimensions aligned, extent one (or absence) broadcasts."""
    result = signature.result().shape
    words = names(len(result), "x")
    operands = [None if value is None else aligned(value.shape, result, words) for value in signature.operands]
    return spell(operands, [None if value is None else words for value in signature.results])


def first_operand(signature: Signature) -> NotationLine:
    """`*x, 1 … -> *x`: operands after the first are settings, or types to take over."""
    words = names(len(signature.operand(0).shape), "x")
    rest = [None if value is None else unindexed(value.shape) for value in signature.operands[1:]]
    return spell([words, *rest], [None if value is None else words for value in signature.results])


def _row(name: str, cost: float = 1.0, keeps: tuple[str, ...] = ()) -> Operator:
    return Operator(name, broadcast, "elementwise", per_result(cost), 1.0, keeps)


def _flat(name: str, cost: float = 1.0) -> Operator:
    """An operator through which no gradient flows."""
    return Operator(name, broadcast, "elementwise", per_result(cost), 0.0, differentiable=False)


def _variadic_flops(signature: Signature, space: object) -> float:
    return float(max(1, len(signature.operands) - 1) * signature.result().elements)


ARITHMETIC = (
    _row("Add"),
    _row("Sub"),
    _row("Mul", keeps=("0", "1")),
    _row("Div", keeps=("0", "1")),
    _row("Pow", 8.0, keeps=("0", "1")),
    _row("Mod", keeps=("0", "1")),
    Operator("Sum", broadcast, "elementwise", _variadic_flops),
    Operator("Mean", broadcast, "elementwise", _variadic_flops),
    Operator("Max", broadcast, "elementwise", _variadic_flops, keeps=("*",)),
    Operator("Min", broadcast, "elementwise", _variadic_flops, keeps=("*",)),
    Operator("Where", broadcast, "elementwise", per_result(1.0), keeps=("0",)),
    Operator("Clip", first_operand, "elementwise", per_result(2.0), keeps=("0",)),
)

LOGIC = tuple(
    _flat(name)
    for name in (
        "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Xor", "Not", "IsNaN", "IsInf",
        "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot",
    )
)  # fmt: skip

CONVERSIONS = (
    Operator("Cast", broadcast, "elementwise", no_flops, 1.0),
    Operator("CastLike", first_operand, "elementwise", no_flops, 1.0),
    Operator("BitCast", broadcast, "view", no_flops, 0.0, differentiable=False),
)

ELEMENTWISE = (*ARITHMETIC, *LOGIC, *CONVERSIONS)
