"""Operators that draw numbers: each belongs to its place in the whole result, so that any split draws the same."""

from __future__ import annotations

from autopipe.ir.ops.elementwise import first_operand
from autopipe.ir.ops.lines import names, spell
from autopipe.ir.ops.row import NotationLine, Operator, Signature, notated, per_result

_DRAW = 25.0
"""Operations that a number takes: ten rounds of Philox make four."""


def _made(signature: Signature) -> NotationLine:
    return spell([], [names(len(signature.result().shape), "x")])


def is_active(signature: Signature) -> bool:
    """Whether a use of Dropout may drop anything.

    Its third operand says so; of opsets 7 to 11 it is for inference alone, before those an attribute tells.
    """
    if signature.opset < 7:
        return not signature.node.integer("is_test")
    if not signature.present(2):
        return False
    training = signature.constant(2)
    return training is None or bool(training.any())


RANDOM = (
    Operator(
        "Dropout",
        first_operand,
        "elementwise",
        per_result(_DRAW + 2),
        2 / (_DRAW + 2),
        keeps=("mask",),
        static=(1, 2),
        random=True,
    ),
    Operator("Bernoulli", first_operand, "elementwise", per_result(_DRAW + 2), random=True, differentiable=False),
    Operator("RandomUniform", _made, "elementwise", per_result(_DRAW + 2), random=True, differentiable=False),
    Operator(
        "RandomUniformLike", first_operand, "elementwise", per_result(_DRAW + 2), random=True, differentiable=False
    ),
    Operator("RandomNormal", _made, "elementwise", per_result(_DRAW + 30), random=True, differentiable=False),
    Operator(
        "RandomNormalLike", first_operand, "elementwise", per_result(_DRAW + 30), random=True, differentiable=False
    ),
    Operator("Multinomial", notated("b c! -> b 1"), "reduction", per_result(_DRAW), random=True, differentiable=False),
)
