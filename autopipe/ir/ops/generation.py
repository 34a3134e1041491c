"""Operators that make tensors out of settings."""

from __future__ import annotations

from collections.abc import Callable

from autopipe.ir.ops.lines import names, opaque, spell, unindexed
from autopipe.ir.ops.row import NotationLine, Operator, Signature, no_flops, per_result


def _filled(signature: Signature) -> NotationLine:
    operands = [unindexed(value.shape) for value in signature.operands if value is not None]
    return spell(operands, [names(len(signature.result().shape))])


def _made(name: str, static: tuple[int, ...], cost: float = 0.0) -> Operator:
    """Numbers that depend on their place: not to be split."""
    flops: Callable[..., float] = per_result(cost) if cost else no_flops
    return Operator(name, opaque, "memory", flops, 0.0, static=static, differentiable=False)


GENERATION = (
    Operator("ConstantOfShape", _filled, "memory", backward=0.0, static=(0,), differentiable=False),
    _made("Constant", ()),
    _made("Range", (0, 1, 2)),
    _made("EyeLike", ()),
    _made("Shape", ()),
    _made("Size", ()),
    _made("HannWindow", (0,), 6.0),
    _made("HammingWindow", (0,), 6.0),
    _made("BlackmanWindow", (0,), 10.0),
    _made("MelWeightMatrix", (0, 1, 2, 3, 4), 6.0),
)
