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
    broadcast_words,
    flops_per_result_element,
    mark_words,
    move_by_broadcast,
    move_first_by_broadcast,
    move_through_reshape,
    nonnegative_axis,
    replace_words,
    space_from_notation,
    space_from_words,
    space_with_changed_axes,
    unindexed_words,
    unsplittable_space,
)
from autopipe.ir.space import Space


def broadcast_space(signature: Signature) -> Space:
    """Return the iteration space `*x, *x -> *x` of an operator with broadcasting. Dimensions are
    aligned at the end. No axis indexes a dimension of an operand that is broadcast.
    """
    result = signature.result().shape
    words = axis_names(len(result), "x")
    read = [
        broadcast_words(value.shape if value else (), result, words) for value in signature.operands
    ]
    return space_from_words(signature, read, [words])


first_operand_space = space_from_notation("*x -> *x")
"""Function that returns the iteration space of an operator whose result has the shape of its first
operand. No axis indexes the other operands, which are settings or only state a type.
"""


def pointwise_operators(
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
            broadcast_space,
            "elementwise",
            flops_per_result_element(cost),
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


def _mask_operators(operators: str, *, compare: bool = False) -> list[Operator]:
    """Return one definition for each operator in `operators`, names separated by blanks. The
    operators are elementwise with Boolean results. `compare` is the field `Operator.comparison`.
    """
    return [
        replace(row, mask=True, comparison=compare)
        for row in pointwise_operators(operators, keeps=(), backward=0.0, flows=False)
    ]


def _variadic_flops(signature: Signature, space: object) -> float:
    """Return the FLOPs of an operator that combines any number of operands elementwise: one per
    element of the result and operand after the first.
    """
    return float(max(1, len(signature.operands) - 1) * signature.result().elements)


def prelu_space(signature: Signature) -> Space:
    """Return the iteration space of a PRelu. From opset 7 on, the slope broadcasts. Before opset 7,
    there is one slope per channel (axis 1), or one slope in all.
    """
    slope = signature.operand(1).shape
    if signature.opset >= 7:
        return broadcast_space(signature)
    words = axis_names(signature.rank, "x")
    channels = [words[1] if slope == signature.operand(0).shape[1:2] else "1"]
    return space_from_words(signature, [words, channels if slope else ""], [words])


def _move_through_where(
    signature: Signature, slot: int, result: int, array: Integers
) -> Integers | None:
    """Return `array`, one entry per element of operand 1 or 2 of a Where, broadcast to the shape of
    the result, or None for the condition (see `Move`).
    """
    return move_by_broadcast(signature, slot, result, array) if slot else None


ELEMENTWISE = (
    *pointwise_operators("Add Sub", keeps=(), linear="together", adds=True),
    *pointwise_operators("Mul", keeps=("0", "1"), linear="each"),
    *pointwise_operators("Div", keeps=("0", "1"), linear="first", finite_at=((1, 1),)),
    *pointwise_operators(
        "Mod", keeps=("0", "1"), finite_at=((1, 1),), moved=move_first_by_broadcast
    ),
    *pointwise_operators("Pow", 8.0, keeps=("0", "1"), finite_at=((0, 1), (1, 1))),
    Operator("Sum", broadcast_space, "elementwise", _variadic_flops, linear="together", adds=True),
    Operator("Mean", broadcast_space, "elementwise", _variadic_flops, linear="together"),
    *(
        Operator(
            name,
            broadcast_space,
            "elementwise",
            _variadic_flops,
            keeps=("*",),
            moved=move_by_broadcast,
        )
        for name in ("Max", "Min")
    ),
    *pointwise_operators("Where", linear="together", moved=_move_through_where),
    Operator(
        "Clip",
        first_operand_space,
        "elementwise",
        flops_per_result_element(2.0),
        keeps=("0",),
        moved=move_first_by_broadcast,
    ),
    *_mask_operators("Equal Greater GreaterOrEqual Less LessOrEqual", compare=True),
    *_mask_operators("And Or Xor Not IsNaN IsInf"),
    *pointwise_operators(
        "BitShift BitwiseAnd BitwiseOr BitwiseXor BitwiseNot", keeps=(), backward=0.0, flows=False
    ),
    Operator("Cast", broadcast_space, "elementwise", linear="together", moved=move_through_reshape),
    Operator("CastLike", first_operand_space, "elementwise"),
    Operator("BitCast", broadcast_space, "view", backward=0.0, differentiable=False),
    # StopGradient is the identity in forward, and passes no gradient in backward.
    Operator(
        "autopipe.StopGradient",
        broadcast_space,
        "view",
        backward=0.0,
        differentiable=False,
        same_elements=True,
    ),
)

ACTIVATION = (
    # The derivatives of Ceil, Floor, Round and Sign are zero, except at the steps of their values.
    # So their backward costs no FLOPs.
    *pointwise_operators("Ceil Floor Round Sign", keeps=(), backward=0.0),
    *pointwise_operators("Neg", keeps=(), linear="together"),
    *pointwise_operators("Abs", moved=move_through_reshape),
    *pointwise_operators("ThresholdedRelu"),
    *pointwise_operators("LeakyRelu Shrink", 2.0),
    Operator(
        "PRelu",
        prelu_space,
        "elementwise",
        flops_per_result_element(2.0),
        keeps=("0", "1"),
        layer_weights=(1,),
        scales_and_biases=(1,),
    ),
    *pointwise_operators("HardSigmoid Softsign", 3.0),
    *pointwise_operators("Log", 4.0, finite_at=((0, 1),)),
    *pointwise_operators("HardSwish Sin Cos", 4.0),
    *pointwise_operators("Sinh Cosh Asin Acos", 4.0, finite_at=((0, 0),)),
    *pointwise_operators("Atan Asinh", 4.0),
    *pointwise_operators("Acosh", 4.0, finite_at=((0, 2),)),
    *pointwise_operators("Atanh", 4.0, finite_at=((0, 0),)),
    *pointwise_operators("Elu Celu Selu Swish", 5.0),
    *pointwise_operators("Erf Gelu Softplus", 8.0),
    *pointwise_operators("Mish", 12.0),
    *pointwise_operators("Relu", keeps=(">0",)),
    *pointwise_operators("Reciprocal Sqrt", keeps=(">0",), finite_at=((0, 1),)),
    *pointwise_operators("Exp Tan", 4.0, keeps=(">0",), finite_at=((0, 0),)),
    *pointwise_operators("Sigmoid Tanh", 4.0, keeps=(">0",)),
    *(
        # The backward costs 2.2 times the FLOPs of the forward: it computes the activation again,
        # its derivative, and one multiplication per operand.
        Operator(
            name,
            broadcast_space,
            "elementwise",
            flops_per_result_element(6.0),
            2.2,
            ("0", "1"),
            kernels=2,
        )
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
        flops_per_result_element(cost),
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
    Operator(
        "autopipe.Bounded", broadcast_space, "elementwise", backward=0.0, differentiable=False
    ),
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
        flops_per_result_element(12.0),
        keeps=("0", "1"),
        interpolation="linear",
    ),
    Operator(
        "AffineGrid",
        space_from_notation("b 1 1, 1 -> b *1"),
        "memory",
        flops_per_result_element(6.0),
        static=(1,),
    ),
)


def linear_quantization_space(signature: Signature) -> Space:
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
        """Return the notation of a scale or zero point of shape `scale`. It is not used for scales
        of blocks that divide the quantized axis evenly.
        """
        if blocked:
            return replace_words(words, [axis])
        return [words[axis]] if len(scale) == 1 and scale != (1,) else unindexed_words(scale)

    others = [scales(value.shape) if value else [] for value in signature.operands[1:]]
    return space_from_words(
        signature, [mark_words(words, [axis] if blocked else [], "!"), *others], [words]
    )


def _unpack_space(signature: Signature) -> Space:
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
    Operator(
        "autopipe.Unpack",
        _unpack_space,
        "memory",
        flops_per_result_element(2.0),
        differentiable=False,
    ),
    Operator(
        "QuantizeLinear",
        linear_quantization_space,
        "elementwise",
        flops_per_result_element(4.0),
        differentiable=False,
    ),
    Operator(
        "DequantizeLinear",
        linear_quantization_space,
        "elementwise",
        flops_per_result_element(2.0),
        differentiable=False,
    ),
    Operator(
        "DynamicQuantizeLinear",
        space_from_notation("*d! -> *d, ,"),
        "reduction",
        flops_per_result_element(6.0),
        differentiable=False,
    ),
)


def dft_axis(signature: Signature) -> int:
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
    axis = 2 if signature.node.op == "STFT" else dft_axis(signature)
    return 2.5 * signature.result().elements * math.log2(max(signature.result().shape[axis], 2))


def _det_space(signature: Signature) -> Space:
    """Return the iteration space of a Det. The two dimensions of each matrix cannot be split."""
    if signature.rank < 3:
        return unsplittable_space(signature)
    last = [signature.rank - 2, signature.rank - 1]
    return space_from_words(
        signature, [mark_words(signature.words, last, "!")], [signature.words[:-2]]
    )


def _dft_space(signature: Signature) -> Space:
    """Return the iteration space of a DFT. The transformed dimension, and the last one with real
    and imaginary parts, have no axes.
    """
    return space_with_changed_axes(signature, [dft_axis(signature), signature.rank - 1])


SPECTRAL = (
    Operator("DFT", _dft_space, "elementwise", _transform_flops, static=(1, 2)),
    Operator(
        "STFT",
        space_from_notation("d0 *1 -> d0 1 1 1"),
        "elementwise",
        _transform_flops,
        keeps=("2",),
        static=(1, 3),
    ),
    Operator("Det", _det_space, "elementwise", _transform_flops, keeps=("0", ">0")),
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
        flops_per_result_element(16.0),
        2.0,
        keeps=("0", "1", "2"),
        interpolation="avg",
    ),
    Operator(
        "MaxRoiPool",
        _ROI_POOL,
        "memory",
        flops_per_result_element(16.0),
        2.0,
        keeps=("0", "1", ">0"),
    ),
    Operator(
        "NonMaxSuppression",
        unsplittable_space,
        "elementwise",
        _suppression_flops,
        static=(2,),
        differentiable=False,
    ),
    # The results of this operator have fixed shapes, unlike ONNX's NonMaxSuppression: per image and
    # class, the indices of the selected boxes, padded with -1.
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
        flops_per_result_element(_FLOPS_PER_RANDOM_VALUE + cost),
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
        _random_operator("Dropout", first_operand_space, 2),
        backward=2 / (_FLOPS_PER_RANDOM_VALUE + 2),
        keeps=("mask",),
        static=(1, 2),
        computable=(1, 2),
        differentiable=True,
    ),
    _random_operator("Bernoulli", first_operand_space, 2),
    _random_operator("RandomUniform", space_from_notation("-> *x"), 2),
    _random_operator("RandomUniformLike", first_operand_space, 2),
    _random_operator("RandomNormal", space_from_notation("-> *x"), 30),
    _random_operator("RandomNormalLike", first_operand_space, 30),
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
