"""Fourier transforms and determinants."""

from __future__ import annotations

import math

from autopipe.ir.ops.lines import marked, names, opaque, positive, replaced, spell, unindexed
from autopipe.ir.ops.row import NotationLine, Operator, Signature
from autopipe.ir.space import Space


def transformed_axis(signature: Signature) -> int:
    """The axis of DFT: an attribute before opset 20, then a static operand; counted from the front."""
    rank = len(signature.operand(0).shape)
    if signature.opset < 20:
        return positive(signature.node.integer("axis", 1), rank)
    array = signature.constant(2)
    return positive(-2 if array is None else int(array.reshape(())), rank)


def _dft(signature: Signature) -> NotationLine:
    axis = transformed_axis(signature)
    rank = len(signature.operand(0).shape)
    words = replaced(names(rank), [axis, rank - 1])
    rest = [None if value is None else unindexed(value.shape) for value in signature.operands[1:]]
    return spell([words, *rest], [words])


def _dft_flops(signature: Signature, space: Space) -> float:
    """The usual count for a fast transform of n points: 5 n log2 n."""
    extent = max(signature.result().shape[transformed_axis(signature)], 2)
    return 2.5 * signature.result().elements * math.log2(extent)


def _stft(signature: Signature) -> NotationLine:
    rest = [None if value is None else unindexed(value.shape) for value in signature.operands[1:]]
    signal = names(1) + unindexed(signature.operand(0).shape[1:])
    return spell([signal, *rest], [["d0", "1", "1", "1"]])


def _stft_flops(signature: Signature, space: Space) -> float:
    return 2.5 * signature.result().elements * math.log2(max(signature.result().shape[2], 2))


def _det(signature: Signature) -> NotationLine:
    rank = len(signature.operand(0).shape)
    words = names(rank)
    if rank < 3:
        return opaque(signature)
    return spell([marked(words, [rank - 2, rank - 1], "!")], [words[:-2]])


def _det_flops(signature: Signature, space: Space) -> float:
    """LU factorisation: two thirds of n³ for each matrix."""
    return 2 / 3 * signature.operand(0).shape[-1] * signature.operand(0).elements


SPECTRAL = (
    Operator("DFT", _dft, "elementwise", _dft_flops, static=(1, 2)),
    Operator("STFT", _stft, "elementwise", _stft_flops, keeps=("2",), static=(1, 3)),
    Operator("Det", _det, "elementwise", _det_flops, keeps=("0", ">0")),
)
