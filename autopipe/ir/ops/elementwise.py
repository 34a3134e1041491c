"""Definitions of elementwise operators with broadcasting: arithmetic, activations and logic.

The module also contains smaller families: random numbers, quantization, generated tensors, spectra,
and sampling of images. Iteration spaces are written in the notation of `autopipe.ir.space`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from autopipe.ir.ops.operator import (
    Integers,
    Move,
    Operator,
    Signature,
    axis_names,
    broadcast_to_result,
    broadcast_words,
    first_broadcast,
    mark_words,
    nonnegative_axis,
    per_result,
    replace_words,
    reshaped,
    space_from_notation,
    space_from_words,
    space_with_changed_axes,
    unindexed_words,
    unsplittable_space,
)
from autopipe.ir.space import Space


def broadcast(signature: Signature) -> Space:
    """Return the iteration space `*x, *x -> *x` of an operator with broadcasting. Dimensions are
    aligned at the end. No axis indexes a dimension of an operand that is broadcast.
    """
    result = signature.result().shape
    words = axis_names(len(result), "x")
    read = [
        broadcast_words(value.shape if value else (), result, words) for value in signature.operands
    ]
    return space_from_words(signature, read, [words])


first_operand = space_from_notation("*x -> *x")
"""Function that returns the iteration space of an operator whose result has the shape of its first
operand. No axis indexes the other operands, which are settings or only state a type.
"""


def pointwise(
    operators: str,
    cost: float = 1.0,
    keeps: tuple[str, ...] = ("0",),
    *,
    backward: float = 1.0,
    flows: bool = True,
    linear: str = "",
    finite_at: tuple[tuple[int, int], ...] = (),
    moved: Move | None = None,
    adds: bool = False,
) -> list[Operator]:
    """Return one definition for each operator in `operators`, names separated by blanks. The
    operators are elementwise, with `cost` FLOPs per element of the result. The other parameters are
    fields of `Operator`: `flows` is `differentiable`.
    """
    return [
        Operator(
            name,
            broadcast,
            "elementwise",
            per_result(cost),
            backward,
            keeps,
            differentiable=flows,
            linear=linear,
            finite_at=finite_at,
            moved=moved,
            adds=adds,
        )
        for name in operators.split()
    ]


def _masks(operators: str, *, compare: bool = False) -> list[Operator]:
    """Return one definition for each operator in `operators`, names separated by blanks. The
    operators are elementwise with Boolean results. `compare` is the field `Operator.comparison`.
    """
    return [
        replace(row, mask=True, comparison=compare)
        for row in pointwise(operators, keeps=(), backward=0.0, flows=False)
    ]


def _variadic_flops(signature: Signature, space: object) -> float:
    """Return the FLOPs of an operator that combines any number of operands elementwise: one per
    element of the result and operand after the first.
    """
    return float(max(1, len(signature.operands) - 1) * signature.result().elements)


def per_channel(signature: Signature) -> Space:
    """Return the iteration space of a PRelu. From opset 7 on, the slope broadcasts. Before opset 7,
    there is one slope per channel (axis 1), or one slope in all.
    """
    slope = signature.operand(1).shape
    if signature.opset >= 7:
        return broadcast(signature)
    words = axis_names(signature.rank, "x")
    channels = [words[1] if slope == signature.operand(0).shape[1:2] else "1"]
    return space_from_words(signature, [words, channels if slope else ""], [words])


def _chosen(signature: Signature, slot: int, result: int, array: Integers) -> Integers | None:
    """Return the elements of operand 1 or 2 of a Where at their positions in the result, or None
    for the condition (see `Move`).
    """
    return broadcast_to_result(signature, slot, result, array) if slot else None


ELEMENTWISE = (
    *pointwise("Add Sub", keeps=(), linear="together", adds=True),
    *pointwise("Mul", keeps=("0", "1"), linear="each"),
    *pointwise("Div", keeps=("0", "1"), linear="first", finite_at=((1, 1),)),
    *pointwise("Mod", keeps=("0", "1"), finite_at=((1, 1),), moved=first_broadcast),
    *pointwise("Pow", 8.0, keeps=("0", "1"), finite_at=((0, 1), (1, 1))),
    Operator("Sum", broadcast, "elementwise", _variadic_flops, linear="together", adds=True),
    Operator("Mean", broadcast, "elementwise", _variadic_flops, linear="together"),
    *(
        Operator(
            name,
            broadcast,
            "elementwise",
            _variadic_flops,
            keeps=("*",),
            moved=broadcast_to_result,
        )
        for name in ("Max", "Min")
    ),
    *pointwise("Where", linear="together", moved=_chosen),
    Operator(
        "Clip",
        first_operand,
        "elementwise",
        per_result(2.0),
        keeps=("0",),
        moved=first_broadcast,
    ),
    *_masks("Equal Greater GreaterOrEqual Less LessOrEqual", compare=True),
    *_masks("And Or Xor Not IsNaN IsInf"),
    *pointwise(
        "BitShift BitwiseAnd BitwiseOr BitwiseXor BitwiseNot", keeps=(), backward=0.0, flows=False
    ),
    Operator("Cast", broadcast, "elementwise", linear="together", moved=reshaped),
    Operator("CastLike", first_operand, "elementwise"),
    Operator("BitCast", broadcast, "view", backward=0.0, differentiable=False),
    # StopGradient is the identity in forward, and passes no gradient in backward.
    Operator(
        "autopipe.StopGradient",
        broadcast,
        "view",
        backward=0.0,
        differentiable=False,
        same_elements=True,
    ),
)

ACTIVATION = (
    # The derivatives of these operators are zero, except at the steps of their values.
    *pointwise("Ceil Floor Round Sign", keeps=(), backward=0.0),
    *pointwise("Neg", keeps=(), linear="together"),
    *pointwise("Abs", moved=reshaped),
    *pointwise("ThresholdedRelu"),
    *pointwise("LeakyRelu Shrink", 2.0),
    Operator(
        "PRelu",
        per_channel,
        "elementwise",
        per_result(2.0),
        keeps=("0", "1"),
        layer_weights=(1,),
        scales_and_biases=(1,),
    ),
    *pointwise("HardSigmoid Softsign", 3.0),
    *pointwise("Log", 4.0, finite_at=((0, 1),)),
    *pointwise("HardSwish Sin Cos", 4.0),
    *pointwise("Sinh Cosh Asin Acos", 4.0, finite_at=((0, 0),)),
    *pointwise("Atan Asinh", 4.0),
    *pointwise("Acosh", 4.0, finite_at=((0, 2),)),
    *pointwise("Atanh", 4.0, finite_at=((0, 0),)),
    *pointwise("Elu Celu Selu Swish", 5.0),
    *pointwise("Erf Gelu Softplus", 8.0),
    *pointwise("Mish", 12.0),
    *pointwise("Relu", keeps=(">0",)),
    *pointwise("Reciprocal Sqrt", keeps=(">0",), finite_at=((0, 1),)),
    *pointwise("Exp Tan", 4.0, keeps=(">0",), finite_at=((0, 0),)),
    *pointwise("Sigmoid Tanh", 4.0, keeps=(">0",)),
    *(
        # The factor 2.2 of backward: it computes the activation again, its derivative, and one
        # multiplication per operand.
        Operator(name, broadcast, "elementwise", per_result(6.0), 2.2, ("0", "1"), kernels=2)
        for name in ("SwiGLU", "autopipe.GatedUnit")
    ),
)


def _generator_operator(
    name: str, static: tuple[int, ...] = (), cost: float = 0.0, sizes: tuple[int, ...] = ()
) -> Operator:
    """Return the definition of an operator that creates a tensor whose elements depend on their
    index. It cannot be split. `cost` is the number of FLOPs per element; `static` and `sizes` are
    fields of `Operator`.
    """
    return Operator(
        name,
        unsplittable_space,
        "memory",
        per_result(cost),
        0.0,
        static=static,
        differentiable=False,
        sizes=sizes,
    )


GENERATION = (
    Operator(
        "ConstantOfShape",
        space_from_notation("-> *d"),
        "memory",
        backward=0.0,
        static=(0,),
        shaping=(0,),
        sizes=(0,),
        differentiable=False,
    ),
    *map(_generator_operator, ("Constant", "EyeLike", "Shape", "Size")),
    Operator("autopipe.Bounded", broadcast, "elementwise", backward=0.0, differentiable=False),
    _generator_operator("Range", (0, 1, 2), sizes=(0, 1, 2)),
    _generator_operator("HannWindow", (0,), 6.0),
    _generator_operator("HammingWindow", (0,), 6.0),
    _generator_operator("BlackmanWindow", (0,), 10.0),
    _generator_operator("MelWeightMatrix", (0, 1, 2, 3, 4), 6.0),
)


SAMPLING = (
    Operator(
        "GridSample",
        space_from_notation("b c *1, b *p 1 -> b c *p"),
        "memory",
        per_result(12.0),
        keeps=("0", "1"),
        interpolation="linear",
    ),
    Operator(
        "AffineGrid",
        space_from_notation("b 1 1, 1 -> b *1"),
        "memory",
        per_result(6.0),
        static=(1,),
    ),
)


def linear_quantization(signature: Signature) -> Space:
    """Return the iteration space `*x, scale, zero point -> *x` of a linear quantization.

    There is one scale per tensor, per index of the dimension `axis`, or per block of elements along
    `axis`. A block cannot be split.
    """
    words = signature.words
    axis = signature.axis(1)
    blocked = signature.node.integer("block_size")
    if blocked and signature.operand(0).shape[axis] == blocked * signature.operand(1).shape[axis]:
        blocks = replace_words(words, [axis], f"({words[axis]} j!)")
        others = [words if value and value.shape else [] for value in signature.operands[1:]]
        return space_from_words(signature, [blocks, *others], [blocks], j=blocked)

    def scales(scale: tuple[int, ...]) -> list[str]:
        """Return the words of a scale or zero point of shape `scale`, if scales do not have blocks
        that divide the axis.
        """
        if blocked:
            return replace_words(words, [axis])
        return [words[axis]] if len(scale) == 1 and scale != (1,) else unindexed_words(scale)

    others = [scales(value.shape) if value else [] for value in signature.operands[1:]]
    return space_from_words(
        signature, [mark_words(words, [axis] if blocked else [], "!"), *others], [words]
    )


def _unpack(signature: Signature) -> Space:
    """Return the iteration space `*d n -> *d (n p)` of `autopipe.Unpack`, with n bytes of p
    elements. The operator cannot be split if the elements of a row do not fill all bytes.
    """
    words = signature.words
    shape = signature.result().shape
    per = 8 // (signature.result().dtype.packed_bits or 8)
    if (
        shape[:-1] != signature.operand(0).shape[:-1]
        or shape[-1] != per * signature.operand(0).shape[-1]
    ):
        return unsplittable_space(signature)
    return space_from_words(signature, [words], [[*words[:-1], f"({words[-1]} p!)"]], p=per)


QUANTIZATION = (
    Operator("autopipe.Unpack", _unpack, "memory", per_result(2.0), differentiable=False),
    Operator(
        "QuantizeLinear", linear_quantization, "elementwise", per_result(4.0), differentiable=False
    ),
    Operator(
        "DequantizeLinear",
        linear_quantization,
        "elementwise",
        per_result(2.0),
        differentiable=False,
    ),
    Operator(
        "DynamicQuantizeLinear",
        space_from_notation("*d! -> *d, ,"),
        "reduction",
        per_result(6.0),
        differentiable=False,
    ),
)


def transformed_axis(signature: Signature) -> int:
    """Return the axis of a DFT, counted from the front. It is an attribute before opset 20, and a
    constant operand from opset 20 on.
    """
    if signature.opset < 20:
        return signature.axis(1)
    array = signature.constant(2)
    return nonnegative_axis(-2 if array is None else int(array.reshape(())), signature.rank)


def _transform_flops(signature: Signature, space: Space) -> float:
    """Return the FLOPs of a DFT or STFT, 5 n log2 n per transform of n points, or of a Det, 2/3 n³
    for the LU factorization.
    """
    if signature.node.op == "Det":
        return 2 / 3 * signature.operand(0).shape[-1] * signature.operand(0).elements
    axis = 2 if signature.node.op == "STFT" else transformed_axis(signature)
    return 2.5 * signature.result().elements * math.log2(max(signature.result().shape[axis], 2))


def _det(signature: Signature) -> Space:
    if signature.rank < 3:
        return unsplittable_space(signature)
    last = [signature.rank - 2, signature.rank - 1]
    return space_from_words(
        signature, [mark_words(signature.words, last, "!")], [signature.words[:-2]]
    )


def _dft(signature: Signature) -> Space:
    return space_with_changed_axes(signature, [transformed_axis(signature), signature.rank - 1])


SPECTRAL = (
    Operator("DFT", _dft, "elementwise", _transform_flops, static=(1, 2)),
    Operator(
        "STFT",
        space_from_notation("d0 *1 -> d0 1 1 1"),
        "elementwise",
        _transform_flops,
        keeps=("2",),
        static=(1, 3),
    ),
    Operator("Det", _det, "elementwise", _transform_flops, keeps=("0", ">0")),
)

# Regions (r) can be split, because they are independent. Images (n) cannot, because each region may
# be in any image.
_ROI_ALIGN = space_from_notation("n! c i0! i1!, r 1, r -> r c o0! o1!")
_ROI_POOL = space_from_notation("n! c i0! i1!, r 1 -> r c o0! o1!")


def _suppression_flops(signature: Signature, space: Space) -> float:
    """Return the FLOPs of a non-maximum suppression, which compares each selected box with all
    boxes.
    """
    rows = (
        math.prod(signature.result().shape[:-1] or (1,))
        if signature.node.domain
        else signature.result().shape[0]
    )
    most = signature.result().shape[-1] if signature.node.domain else 1
    return 16.0 * rows * most * signature.operand(1).shape[-1]


REGIONS = (
    Operator(
        "RoiAlign",
        _ROI_ALIGN,
        "memory",
        per_result(16.0),
        2.0,
        keeps=("0", "1", "2"),
        interpolation="avg",
    ),
    Operator("MaxRoiPool", _ROI_POOL, "memory", per_result(16.0), 2.0, keeps=("0", "1", ">0")),
    Operator(
        "NonMaxSuppression",
        unsplittable_space,
        "elementwise",
        _suppression_flops,
        static=(2,),
        differentiable=False,
    ),
    # autopipe's operator returns, per image and class, the indices of the selected boxes, padded
    # with -1 to a fixed number.
    Operator(
        "autopipe.NonMaxSuppression",
        space_from_notation("b 1 1, b c 1 -> b c 1"),
        "elementwise",
        _suppression_flops,
        differentiable=False,
    ),
)

_FLOPS_PER_RANDOM_VALUE = 25.0
"""FLOPs per random number. The generator Philox computes four numbers in ten rounds."""


def _random_operator(
    name: str, notation: Callable[[Signature], Space], cost: float, kind: str = "elementwise"
) -> Operator:
    """Return the definition of an operator that generates random numbers. `cost` is the number of
    FLOPs per result element in addition to the generation of the number.
    """
    return Operator(
        name,
        notation,
        kind,
        per_result(_FLOPS_PER_RANDOM_VALUE + cost),
        random=True,
        differentiable=False,
    )


def may_drop_elements(signature: Signature) -> bool:
    """Return True if a Dropout node may drop elements.

    Before opset 7, the attribute `is_test` decides. In opsets 7 to 11, Dropout is the identity.
    From opset 12 on, the third operand decides: Dropout is the identity if this operand is absent
    or constantly false.
    """
    if signature.opset < 7:
        return not signature.node.integer("is_test")
    if not signature.present(2):
        return False
    training = signature.constant(2)
    return training is None or bool(training.any())


RANDOM = (
    replace(
        _random_operator("Dropout", first_operand, 2),
        backward=2 / (_FLOPS_PER_RANDOM_VALUE + 2),
        keeps=("mask",),
        static=(1, 2),
        computable=(1, 2),
        differentiable=True,
    ),
    _random_operator("Bernoulli", first_operand, 2),
    _random_operator("RandomUniform", space_from_notation("-> *x"), 2),
    _random_operator("RandomUniformLike", first_operand, 2),
    _random_operator("RandomNormal", space_from_notation("-> *x"), 30),
    _random_operator("RandomNormalLike", first_operand, 30),
    _random_operator("Multinomial", space_from_notation("b c! -> b 1"), 0, "reduction"),
)

OPERATOR_DEFINITIONS = (
    *ELEMENTWISE,
    *ACTIVATION,
    *GENERATION,
    *SAMPLING,
    *QUANTIZATION,
    *SPECTRAL,
    *REGIONS,
    *RANDOM,
)
