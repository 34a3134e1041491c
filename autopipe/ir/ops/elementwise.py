"""Operators that compute each element from those at the same place, with broadcasting: arithmetic, activations, logic.

Beside them small families: random numbers, quantisation, tensors made of settings, spectra, samples of images.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from autopipe.ir.ops.operator import (
    NotationLine,
    Operator,
    Signature,
    aligned,
    marked,
    names,
    no_flops,
    notated,
    opaque,
    per_result,
    positive,
    replaced,
    spell,
    unindexed,
)
from autopipe.ir.space import Space


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


def _activation_row(name: str, cost: float = 1.0, keeps: tuple[str, ...] = ("0",)) -> Operator:
    return Operator(name, broadcast, "elementwise", per_result(cost), 1.0, keeps)


def _step(name: str) -> Operator:
    """A function whose derivative is zero wherever it has one."""
    return Operator(name, broadcast, "elementwise", per_result(1.0), 0.0)


def per_channel(signature: Signature) -> NotationLine:
    """PRelu's slope: broadcasts from opset 7 on; before, one a channel (axis 1) or one for all."""
    slope = signature.operand(1).shape
    if signature.opset >= 7:
        return broadcast(signature)
    words = names(len(signature.operand(0).shape), "x")
    channels = [words[1] if slope == signature.operand(0).shape[1:2] else "1"]
    return spell([words, channels if slope else []], [words])


ACTIVATION = (
    _activation_row("Abs"),
    _activation_row("Neg", keeps=()),
    _activation_row("Reciprocal", keeps=(">0",)),
    _activation_row("Sqrt", keeps=(">0",)),
    _activation_row("Exp", 4.0, keeps=(">0",)),
    _activation_row("Log", 4.0),
    *(
        _activation_row(name, 4.0)
        for name in ("Sin", "Cos", "Sinh", "Cosh", "Asin", "Acos", "Atan", "Asinh", "Acosh", "Atanh")
    ),
    _activation_row("Tan", 4.0, keeps=(">0",)),
    _activation_row("Erf", 8.0),
    *(_step(name) for name in ("Ceil", "Floor", "Round", "Sign")),
    _activation_row("Relu", keeps=(">0",)),
    _activation_row("Sigmoid", 4.0, keeps=(">0",)),
    _activation_row("Tanh", 4.0, keeps=(">0",)),
    _activation_row("Gelu", 8.0),
    _activation_row("HardSigmoid", 3.0),
    _activation_row("HardSwish", 4.0),
    _activation_row("LeakyRelu", 2.0),
    Operator("PRelu", per_channel, "elementwise", per_result(2.0), 1.0, keeps=("0", "1")),
    _activation_row("Elu", 5.0),
    _activation_row("Celu", 5.0),
    _activation_row("Selu", 5.0),
    _activation_row("ThresholdedRelu"),
    _activation_row("Shrink", 2.0),
    _activation_row("Softplus", 8.0),
    _activation_row("Softsign", 3.0),
    _activation_row("Mish", 12.0),
    _activation_row("Swish", 5.0),
    _activation_row("SwiGLU", 6.0, keeps=("0", "1", ">0")),  # the gate after Swish is as large as the result
)


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


def _grid_sample(signature: Signature) -> NotationLine:
    rank = len(signature.operand(0).shape)
    points = names(rank - 2, "p")
    return spell([["b", "c", *["1"] * (rank - 2)], ["b", *points, "1"]], [["b", "c", *points]])


def _affine_grid(signature: Signature) -> NotationLine:
    rank = len(signature.result().shape)
    return spell([["b", "1", "1"], ["1"]], [["b", *["1"] * (rank - 1)]])


SAMPLING = (
    Operator("GridSample", _grid_sample, "memory", per_result(12.0), keeps=("0", "1")),
    Operator("AffineGrid", _affine_grid, "memory", per_result(6.0), static=(1,)),
)


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


REGIONS = (
    Operator(
        "RoiAlign",
        notated("n! c i0! i1!, r 1, r -> r c o0! o1!"),
        "memory",
        per_result(16.0),
        2.0,
        keeps=("0", "1", "2"),
    ),
)
"""Regions are independent of one another; the images they lie in are looked up."""


_DRAW = 25.0
"""Operations that a number takes: ten rounds of Philox make four."""


def _randomness_made(signature: Signature) -> NotationLine:
    return spell([], [names(len(signature.result().shape), "x")])


def is_active(signature: Signature) -> bool:
    """True if a use of Dropout may drop anything.

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
    Operator(
        "RandomUniform", _randomness_made, "elementwise", per_result(_DRAW + 2), random=True, differentiable=False
    ),
    Operator(
        "RandomUniformLike", first_operand, "elementwise", per_result(_DRAW + 2), random=True, differentiable=False
    ),
    Operator(
        "RandomNormal", _randomness_made, "elementwise", per_result(_DRAW + 30), random=True, differentiable=False
    ),
    Operator(
        "RandomNormalLike", first_operand, "elementwise", per_result(_DRAW + 30), random=True, differentiable=False
    ),
    Operator("Multinomial", notated("b c! -> b 1"), "reduction", per_result(_DRAW), random=True, differentiable=False),
)
