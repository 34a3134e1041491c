"""ONNX Runtime's own operators (domain com.microsoft) spelled with ONNX's, where that loses
nothing, while reading.

Spellings are read like any other part of the file: typed, folded, fused. Operators with a row of
their own are only given one form: biases apart, scales and zero points of blocks as matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import DType, Value
from autopipe.passes.frontend.contrib import blocked
from autopipe.passes.frontend.contrib.flex_attention import flex_attention
from autopipe.passes.frontend.contrib.quantized import QUANTIZED
from autopipe.passes.frontend.contrib.spelling import Spelling
from autopipe.passes.frontend.elements import NUMBERS

if TYPE_CHECKING:
    import onnx

DOMAIN = "com.microsoft"
Speller = Callable[[Spelling], None]


def _matmul_nbits(spelling: Spelling) -> None:
    """Scales and unpacked zero points as matrices, the bias added behind."""
    rows = spelling.shape(1)[0]
    operands = [spelling.operand(index) for index in range(5)]
    for index in (2, 3):
        if operands[index] and len(spelling.shape(index)) == 1:
            operands[index] = spelling.shaped(
                operands[index], rows, spelling.shape(index)[0] // max(rows, 1)
            )
    while not operands[-1]:
        operands.pop()
    bias = spelling.operand(5)
    product = f"{spelling.node.output[0]}/product" if bias else spelling.node.output[0]
    spelling.own(operands, [product])
    if bias:
        spelling.add("Add", product, bias, result=0)


_FP4 = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 0.5, 2 / 12, 0.25)
_NF4 = (
    *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)
"""The numbers of 4 bits by bitsandbytes' two types (Dettmers et al., "QLoRA", 2023); of the first a
bit is the sign.
"""


def _matmul_bnb4(spelling: Spelling) -> None:
    """Each byte looked up as two numbers, its upper half first; blocks of the flat weight times the
    largest of each.
    """
    if not spelling.integer("transB", 1):
        raise ModelError(
            "only a transposed weight is supported", where=f"MatMulBnb4 {spelling.node.name!r}"
        )
    numbers = np.array(
        _NF4 if spelling.integer("quant_type", 1) else (*_FP4, *(-each for each in _FP4)),
        np.float32,
    )
    pairs = np.stack([np.repeat(numbers, 16), np.tile(numbers, 16)], axis=1)
    table = spelling.shaped(
        spelling.add("Constant", value_floats=pairs.reshape(-1).tolist()), 256, 2
    )
    found = spelling.add(
        "Gather", table, spelling.add("Cast", spelling.operand(1), to=NUMBERS[DType.INT32])
    )
    kind = spelling.type(2).dtype
    found = found if kind is DType.FLOAT32 else spelling.add("Cast", found, to=NUMBERS[kind])
    found = spelling.add(
        "Mul",
        spelling.shaped(found, spelling.shape(2)[0], spelling.integer("block_size")),
        spelling.shaped(spelling.operand(2), -1, 1),
    )
    found = spelling.add(
        "Transpose",
        spelling.shaped(found, spelling.integer("N"), spelling.integer("K")),
        perm=[1, 0],
    )
    spelling.add("MatMul", spelling.operand(0), found, result=0)


def _gather_blocks(spelling: Spelling) -> None:
    """Rows of bytes have a row of their own; of elements with a type of 4 bits, or along other
    axes, slices are picked and become numbers.
    """
    shape = spelling.shape(0)
    places = spelling.shape(1)
    gathered, axis = (
        spelling.integer(name, default) % max(len(shape), 1)
        for name, default in (("gather_axis", 0), ("quantize_axis", 1))
    )
    if spelling.type(0).dtype is DType.UINT8:
        if (gathered, axis, len(shape)) != (0, 1, 2):
            raise ValueError("bytes are rows of a matrix")
        spelling.own(spelling.operands, spelling.node.output)
        return
    whole = NUMBERS[DType(spelling.type(0).dtype.held)]
    parts = []
    for place in (0, 2, 3):
        if name := spelling.operand(place):
            name = name if place == 2 else spelling.add("Cast", name, to=whole)
            parts.append(spelling.add("Gather", name, spelling.operand(1), axis=gathered))
    axis += (len(places) - 1) * (axis > gathered)
    block = spelling.integer("block_size", 128)
    spelling.add("DequantizeLinear", *parts, result=0, axis=axis, block_size=block)


def _fused_matmul(spelling: Spelling) -> None:
    """A factor's rows that stand in front of its batch are moved behind it."""
    factors = list(spelling.operands)
    for place, rank in enumerate(len(spelling.shape(each)) for each in (0, 1)):
        if spelling.integer(f"transBatch{'AB'[place]}") and rank > 2:
            factors[place] = spelling.add(
                "Transpose", factors[place], perm=[*range(1, rank - 1), 0, rank - 1]
            )
    if factors == list(spelling.operands):
        spelling.own(factors, spelling.node.output)
    else:
        kept = spelling.attributes("transBatchA", "transBatchB")
        spelling.add("FusedMatMul", *factors, result=0, domain=DOMAIN, **kept)


def _group_norm(spelling: Spelling, skips: bool = False) -> None:
    """Of channels that come last, and with SiLU behind, unless attributes say otherwise; perhaps of
    a sum.
    """
    x = spelling.operand(0)
    shape = spelling.shape(0)
    last = spelling.integer("channels_last", 1)
    results = len(spelling.node.output)
    if skips:
        skip = spelling.operand(3)
        given = spelling.shape(3)
        if len(given) == 2:
            middle = [1] * (len(shape) - 2)
            extents = [given[0], *middle, given[1]] if last else [*given, *middle]
            skip = spelling.shaped(skip, *extents)
        total = spelling.add("Add", x, skip)
        if bias := spelling.operand(4):
            total = spelling.add(
                "Add", total, bias if last else spelling.shaped(bias, -1, *[1] * (len(shape) - 2))
            )
        x = (
            spelling.add("Identity", total, result=1)
            if results > 1 and spelling.node.output[1]
            else total
        )
    if last:
        x = spelling.moved(x, len(shape), last=False)
    settings: dict[str, Any] = {
        "num_groups": spelling.integer("groups"),
        "epsilon": spelling.number("epsilon", 1e-5),
    }
    active = spelling.integer("activation")
    ends = last or active
    x = spelling.add(
        "GroupNormalization",
        x,
        spelling.operand(1),
        spelling.operand(2),
        result=None if ends else 0,
        **settings,
    )
    if active:
        x = spelling.add("QuickGelu", x, result=None if last else 0, domain=DOMAIN, alpha=1.0)
    if last:
        spelling.moved(x, len(shape), last=True, result=0)


def _bias_split_gelu(spelling: Spelling) -> None:
    """The first half of the sums times Gelu of the second."""
    half = spelling.shape(0)[-1] // 2
    total = spelling.add("Add", spelling.operand(0), spelling.operand(1))
    first, second = (
        spelling.sliced(total, start, start + half, len(spelling.shape(0)) - 1)
        for start in (0, half)
    )
    spelling.add("Mul", first, spelling.add("Gelu", second, domain=DOMAIN), result=0)


def _bias_add(spelling: Spelling) -> None:
    spelling.add(
        "Add",
        spelling.add("Add", spelling.operand(0), spelling.operand(1)),
        spelling.operand(2),
        result=0,
    )


def _channels_last(operator: str, spelling: Spelling) -> None:
    """An operator on images whose channels come last."""
    rank = len(spelling.shape(0))
    x = spelling.moved(spelling.operand(0), rank, last=False)
    found = spelling.add(operator, x, *spelling.operands[1:], **spelling.attributes())
    spelling.moved(found, rank, last=True, result=0)


def _convolved_last(spelling: Spelling) -> None:
    """A convolution of images whose channels come last, as they mostly do in its weight, too: ONNX
    Runtime's optimizer writes them so, though the operator's description has them second.
    """
    rank = len(spelling.shape(0))
    channels = spelling.shape(0)[-1]
    x = spelling.moved(spelling.operand(0), rank, last=False)
    weight = spelling.operand(1)
    if spelling.shape(1)[-1] * spelling.integer("group", 1) == channels:
        weight = spelling.moved(weight, rank, last=False)
    found = spelling.add("Conv", x, weight, *spelling.operands[2:], **spelling.attributes())
    spelling.moved(found, rank, last=True, result=0)


_PARAMETERS = {
    "Elu": ("alpha",), "HardSigmoid": ("alpha", "beta"), "LeakyRelu": ("alpha",), "Selu": ("alpha", "gamma"),
    "ThresholdedRelu": ("alpha",),
}  # fmt: skip
"""Activations that have parameters, in their order."""
_PLAIN = ("Relu", "Sigmoid", "Softplus", "Softsign", "Tanh")
_HARD_SWISH_SINCE = 14
"""The opset since which ONNX has HardSwish."""


def _activated(spelling: Spelling, x: str, parameters: list[float]) -> None:
    """Make the node's result by the activation that it names."""
    activation = spelling.text("activation")
    if activation == "Clip":
        low, high = parameters
        spelling.clipped(x, low, high, result=0)
    elif activation == "HardSwish" and spelling.opset < _HARD_SWISH_SINCE:
        spelling.add("Mul", x, spelling.add("HardSigmoid", x, alpha=1 / 6, beta=0.5), result=0)
    elif activation in ("HardSwish", *_PLAIN, *_PARAMETERS):
        named: dict[str, Any] = dict(zip(_PARAMETERS.get(activation, ()), parameters, strict=False))
        spelling.add(activation, x, result=0, **named)
    elif activation:
        raise ModelError(
            f"it has no activation {activation!r}",
            where=f"{spelling.node.op_type} {spelling.node.name!r}",
        )
    else:
        spelling.add("Identity", x, result=0)


def _fused_conv(spelling: Spelling, last: bool = False, weight: str = "") -> None:
    """A convolution, perhaps of another weight, perhaps something added, and an activation."""
    rank = len(spelling.shape(0))
    x = spelling.operand(0)
    x = spelling.moved(x, rank, last=False) if last else x
    bias = [spelling.operand(2)] if spelling.operand(2) else []
    attributes = spelling.attributes("activation", "activation_params")
    x = spelling.add("Conv", x, weight or spelling.operand(1), *bias, **attributes)
    x = spelling.moved(x, rank, last=True) if last else x
    if spelling.operand(3):
        x = spelling.add("Add", x, spelling.operand(3))
    _activated(spelling, x, list(spelling.attributes().get("activation_params", [])))


BLOCKED: dict[str, Speller] = {
    "Conv": lambda spelling: _fused_conv(spelling, weight=blocked.weight_by_channel(spelling)),
    **blocked.BLOCKED,
}
"""By operator of the domain of blocked channels."""


def _fused_gemm(spelling: Spelling) -> None:
    names = "activation", "activation_alpha", "activation_beta", "activation_gamma"
    x = spelling.add("Gemm", *filter(None, spelling.operands), **spelling.attributes(*names))
    given = spelling.attributes()
    _activated(spelling, x, [given[name] for name in names[1:] if name in given])


def _embedding(spelling: Spelling) -> None:
    """Rows of words, positions and segments added up and normalised; how many tokens the mask
    shows.
    """
    packed = spelling.node.op_type == "QEmbedLayerNormalization"

    def number(name: str, table: int) -> str:
        """A part of a table, or a vector, of bytes as numbers: scales of all follow from operand 8
        on, then points.
        """
        if not packed:
            return name
        return spelling.add(
            "DequantizeLinear", name, *filter(None, map(spelling.operand, (table + 6, table + 11)))
        )

    samples, length = spelling.shape(0)
    words = number(spelling.add("Gather", spelling.operand(2), spelling.operand(0)), 2)
    if spelling.operand(8) and not packed:
        places = spelling.add("Gather", spelling.operand(3), spelling.operand(8))
    else:
        places = spelling.sliced(spelling.operand(3), 0, length, 0)
    total = spelling.add("Add", words, number(places, 3))
    if spelling.operand(1):
        segments = spelling.add("Gather", spelling.operand(4), spelling.operand(1))
        total = spelling.add("Add", total, number(segments, 4))
    outputs = [*spelling.node.output, "", ""]
    epsilon = spelling.number("epsilon", 1e-12)
    if outputs[2]:
        total = spelling.add("Identity", total, result=2)
    vectors = (number(spelling.operand(index), index) for index in (5, 6))
    spelling.add("LayerNormalization", total, *vectors, result=0, epsilon=epsilon)
    if outputs[1] and spelling.operand(7):
        spelling.add("ReduceSum", spelling.operand(7), spelling.integers(1), keepdims=0, result=1)
    elif outputs[1]:
        zeros = spelling.add("Cast", spelling.integers(0), to=6)
        spelling.add("Expand", zeros, spelling.integers(samples), result=1)


def _floats(spelling: Spelling, *shape: int, of: str) -> str:
    """An attribute's numbers, in a shape that they fill."""
    return spelling.shaped(spelling.add("Constant", value_floats=spelling.attributes()[of]), *shape)


def _scaler(spelling: Spelling) -> None:
    x = spelling.add("Cast", spelling.operand(0), to=NUMBERS[DType.FLOAT32])
    centred = spelling.add("Sub", x, _floats(spelling, -1, of="offset"))
    spelling.add("Mul", centred, _floats(spelling, -1, of="scale"), result=0)


def _picked_features(spelling: Spelling) -> None:
    """Elements along the last axis; of a vector as one row."""
    x = (
        spelling.operand(0)
        if len(spelling.shape(0)) > 1
        else spelling.shaped(spelling.operand(0), 1, -1)
    )
    spelling.add("Gather", x, spelling.shaped(spelling.operand(1), -1), axis=-1, result=0)


def _linear_regressor(spelling: Spelling) -> None:
    if spelling.text("post_transform", "NONE") != "NONE":
        raise ModelError(
            "no transformation is supported", where=f"LinearRegressor {spelling.node.name!r}"
        )
    x = spelling.add("Cast", spelling.operand(0), to=NUMBERS[DType.FLOAT32])
    weight = _floats(spelling, spelling.integer("targets", 1), -1, of="coefficients")
    operands = [
        x,
        weight,
        *(
            [_floats(spelling, -1, of="intercepts")]
            if "intercepts" in spelling.attributes()
            else []
        ),
    ]
    spelling.add("Gemm", *operands, transB=1, result=0)


CLASSICAL: dict[str, Speller] = {
    "ArrayFeatureExtractor": _picked_features,
    "LinearRegressor": _linear_regressor,
    "Scaler": _scaler,
}
"""By operator of the domain ai.onnx.ml: what stands around the networks that skl2onnx writes."""
SPELLERS: dict[str, Speller] = {
    "MatMulNBits": _matmul_nbits,
    "MatMulBnb4": _matmul_bnb4,
    "GatherBlockQuantized": _gather_blocks,
    "FusedMatMul": _fused_matmul,
    "GroupNorm": _group_norm,
    "SkipGroupNorm": partial(_group_norm, skips=True),
    "BiasSplitGelu": _bias_split_gelu,
    "BiasAdd": _bias_add,
    "NhwcConv": _convolved_last,
    "NhwcMaxPool": partial(_channels_last, "MaxPool"),
    "NhwcFusedConv": partial(_fused_conv, last=True),
    "FusedConv": _fused_conv,
    "FusedGemm": _fused_gemm,
    **dict.fromkeys(("EmbedLayerNormalization", "QEmbedLayerNormalization"), _embedding),
    **QUANTIZED,
}
"""By operator of the domain."""


def _speller(node: onnx.NodeProto) -> Speller | None:
    if node.domain == blocked.DOMAIN:
        return BLOCKED.get(node.op_type)
    if node.domain == "ai.onnx.ml":
        return CLASSICAL.get(node.op_type)
    if (node.domain, node.op_type) == ("ai.onnx.preview", "FlexAttention"):
        return flex_attention
    return SPELLERS.get(node.op_type) if node.domain == DOMAIN else None


def is_spelled(node: onnx.NodeProto) -> bool:
    """True if other nodes stand for this one, or it is given one form."""
    return _speller(node) is not None


def spelled_out(
    node: onnx.NodeProto, operands: tuple[str, ...], types: Mapping[str, Value], opset: int
) -> tuple[onnx.NodeProto, ...] | None:
    """The nodes that stand for this one; None where it stands for itself. Raises ModelError where
    its operands are not what the operator takes.
    """
    speller = _speller(node)
    if speller is None:
        return None
    spelling = Spelling(node, operands, types, opset)
    try:
        speller(spelling)
    except (ValueError, IndexError, KeyError) as error:
        shapes = ", ".join(str(types[name].shape) if name else "absent" for name in operands)
        raise ModelError(
            f"operands {shapes} do not fit", where=f"{node.op_type} {node.name!r}"
        ) from error
    return tuple(spelling.nodes)
