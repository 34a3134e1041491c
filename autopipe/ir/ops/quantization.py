"""Between floats and quantised integers."""

from __future__ import annotations

from autopipe.ir.ops.lines import marked, names, positive, spell, unindexed
from autopipe.ir.ops.row import NotationLine, Operator, Signature, per_result


def linear(signature: Signature) -> NotationLine:
    """`*x, scale, zero point -> *x`: one scale for all, one a slice of `axis`, or one a block along it (kept whole)."""
    shape = signature.operand(0).shape
    words = names(len(shape))
    axis = positive(signature.node.integer("axis", 1), len(shape))
    blocked = signature.node.integer("block_size")

    def scales(scale: tuple[int, ...]) -> list[str]:
        if blocked:
            return [*words[:axis], "1", *words[axis + 1 :]]
        return [words[axis]] if len(scale) == 1 and scale != (1,) else unindexed(scale)

    first = marked(words, [axis] if blocked else [], "!")
    others = [None if value is None else scales(value.shape) for value in signature.operands[1:]]
    return spell([first, *others], [words])


def _dynamic(signature: Signature) -> NotationLine:
    words = [f"{word}!" for word in names(len(signature.operand(0).shape))]
    return spell([words], [words, [], []])


QUANTIZATION = (
    Operator("QuantizeLinear", linear, "elementwise", per_result(4.0), differentiable=False),
    Operator("DequantizeLinear", linear, "elementwise", per_result(2.0), differentiable=False),
    Operator("DynamicQuantizeLinear", _dynamic, "reduction", per_result(6.0), differentiable=False),
)
