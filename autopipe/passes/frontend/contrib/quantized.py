"""Quantised operators of ONNX Runtime's domain spelled with ONNX's: what lies between is computed
in floating point, as its kernels do, and products of whole numbers exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from autopipe.ir.errors import ModelError
from autopipe.passes.frontend.contrib.spelling import Spelling

_FLOAT = 1


def _pair(operator: str, spelling: Spelling) -> None:
    found = spelling.add(operator, spelling.dequantized(0), spelling.dequantized(3))
    spelling.quantize(found, 6)


def _single(operator: str, spelling: Spelling, *left_out: str) -> None:
    found = spelling.add(operator, spelling.dequantized(0), **spelling.attributes(*left_out))
    spelling.quantize(found, 3)


def _softmax(spelling: Spelling) -> None:
    """Before opset 13 over all axes from `axis` on. A share is counted in whole steps of which 1
    has ⌊1 / scale⌋, as by the kernel's tables: 254 for the usual scale, 1 / 255 in single
    precision.
    """
    shape = spelling.shape(0)
    x = spelling.dequantized(0)
    if spelling.integer("opset") < 13:
        axis = spelling.integer("axis", 1) % max(len(shape), 1)
        x = spelling.shaped(x, math.prod(shape[:axis]), math.prod(shape[axis:]))
        found = spelling.shaped(spelling.add("Softmax", x, axis=1), *shape)
    else:
        found = spelling.add("Softmax", x, axis=spelling.integer("axis", -1))
    steps = spelling.add("Floor", spelling.add("Reciprocal", spelling.operand(3)))
    point = filter(None, [spelling.operand(4)])
    spelling.add("QuantizeLinear", found, spelling.add("Reciprocal", steps), *point, result=0)


def _concat(spelling: Spelling) -> None:
    parts = [spelling.dequantized(index) for index in range(2, len(spelling.operands), 3)]
    spelling.quantize(spelling.add("Concat", *parts, axis=spelling.integer("axis")), 0)


def _where(spelling: Spelling) -> None:
    found = spelling.add(
        "Where", spelling.operand(0), spelling.dequantized(1), spelling.dequantized(4)
    )
    spelling.quantize(found, 7)


def _pool(operator: str, spelling: Spelling) -> None:
    last = spelling.integer("channels_last")
    rank = len(spelling.shape(0))
    x = spelling.dequantized(0)
    x = spelling.moved(x, rank, last=False) if last else x
    found = spelling.add(operator, x, **spelling.attributes("channels_last"))
    found = spelling.moved(found, rank, last=True) if last else found
    spelling.quantize(found, 3)


def _conv(spelling: Spelling) -> None:
    last = spelling.integer("channels_last")
    rank = len(spelling.shape(0))
    x = spelling.operand(0)
    attributes = spelling.attributes("channels_last")
    x = spelling.moved(x, rank, last=False) if last else x
    found = spelling.add(
        "QLinearConv", x, *spelling.operands[1:], result=None if last else 0, **attributes
    )
    if last:
        spelling.moved(found, rank, last=True, result=0)


def _product(spelling: Spelling, operands: tuple[str, ...], points: tuple[str, str]) -> str:
    """The product of whole numbers."""
    given = [*operands, *points]
    while not given[-1]:
        given.pop()
    return spelling.add("MatMulInteger", *given)


def _scaled(spelling: Spelling, product: str, scales: tuple[str, str], bias: str = "") -> None:
    """Make the node's result of a product, two scales and a bias."""
    number = spelling.add("Cast", product, to=_FLOAT)
    scale = spelling.add("Mul", *scales)
    scaled = spelling.add("Mul", number, scale, result=None if bias else 0)
    if bias:
        spelling.add("Add", scaled, bias, result=0)


def _product_to_float(spelling: Spelling) -> None:
    a, b, a_scale, b_scale, a_point, b_point, bias = map(spelling.operand, range(7))
    _scaled(spelling, _product(spelling, (a, b), (a_point, b_point)), (a_scale, b_scale), bias)


def _dynamic_product(spelling: Spelling) -> None:
    a, b, scale, point, bias = map(spelling.operand, range(5))
    whole, a_scale, a_point = _dynamically(spelling, a)
    _scaled(spelling, _product(spelling, (whole, b), (a_point, point)), (a_scale, scale), bias)


def _dynamically(spelling: Spelling, x: str) -> tuple[str, str, str]:
    """A value in bytes, with the scale and zero point of its range."""
    whole = spelling.add("DynamicQuantizeLinear", x)
    names = whole, f"{whole}/scale", f"{whole}/point"
    spelling.nodes[-1].output.extend(names[1:])
    return names


def _gemm(spelling: Spelling) -> None:
    """The bias, of whole numbers, is added before scaling."""
    a, b = (
        spelling.add("Transpose", spelling.operand(index), perm=[1, 0])
        if spelling.integer(name)
        else spelling.operand(index)
        for index, name in ((0, "transA"), (3, "transB"))
    )
    product = _product(spelling, (a, b), (spelling.operand(2), spelling.operand(5)))
    if spelling.operand(6):
        product = spelling.add("Add", product, spelling.operand(6))
    number = spelling.add("Cast", product, to=_FLOAT)
    scale = spelling.add("Mul", spelling.operand(1), spelling.operand(4))
    if (alpha := spelling.number("alpha", 1.0)) != 1.0:
        scale = spelling.add("Mul", scale, spelling.add("Constant", value_float=alpha))
    found = spelling.add("Mul", number, scale, result=None if spelling.operand(7) else 0)
    if spelling.operand(7):
        spelling.quantize(found, 7)


def _attention(spelling: Spelling) -> None:
    """Queries, keys and values of one product of whole numbers; scores, masks and probabilities in
    floating point.
    """
    node = spelling.node
    unread = [name for name in ("do_rotary", "past_present_share_buffer") if spelling.integer(name)]
    if unread:
        raise ModelError(
            f"attribute {unread[0]!r} is not supported", where=f"{node.op_type} {node.name!r}"
        )
    (samples, length, _) = spelling.shape(0)
    width = spelling.shape(1)[1] // 3
    heads = spelling.integer("num_heads")
    points = spelling.operand(6), spelling.operand(7)
    product = _product(spelling, (spelling.operand(0), spelling.operand(1)), points)
    scale = spelling.add("Mul", spelling.operand(3), spelling.operand(4))
    merged = spelling.add("Mul", spelling.add("Cast", product, to=_FLOAT), scale)
    merged = spelling.shaped(
        spelling.add("Add", merged, spelling.operand(2)), samples, length, 3, heads, width // heads
    )
    turned = spelling.add(
        "Transpose", merged, perm=[2, 0, 3, 1, 4]
    )  # [3, samples, heads, length, width of a head]
    query, *held = (
        spelling.add("Gather", turned, spelling.add("Constant", value_int=part), axis=0)
        for part in range(3)
    )
    before = spelling.shape(8)[3] if spelling.operand(8) else 0
    if before:
        held = [
            spelling.add(
                "Concat",
                spelling.add(
                    "Gather", spelling.operand(8), spelling.add("Constant", value_int=part), axis=0
                ),
                each,
                axis=2,
            )
            for part, each in enumerate(held)
        ]
    key, value = held
    factor = spelling.add(
        "Constant", value_float=spelling.number("scale", 0.0) or (width // heads) ** -0.5
    )
    scores = spelling.add("MatMul", query, spelling.add("Transpose", key, perm=[0, 1, 3, 2]))
    scores = spelling.add("Mul", scores, factor)
    for mask in _masks(spelling, samples, length, before + length):
        scores = spelling.add("Add", scores, mask)
    seen = spelling.add("MatMul", spelling.add("Softmax", scores, axis=-1), value)
    joined = spelling.add("Transpose", seen, perm=[0, 2, 1, 3])
    spelling.add("Reshape", joined, spelling.integers(samples, length, width), result=0)
    if len(node.output) > 1 and node.output[1]:
        parts = [
            spelling.shaped(each, 1, samples, heads, before + length, width // heads)
            for each in held
        ]
        spelling.add("Concat", *parts, axis=0, result=1)


def _masks(spelling: Spelling, samples: int, length: int, keys: int) -> list[str]:
    """The tensors that are added to scores [samples, heads, length, keys]."""
    hidden = spelling.add("Constant", value_float=spelling.number("mask_filter_value", -10000.0))
    zero = spelling.add("Constant", value_float=0.0)
    places = _counted(spelling, keys)
    found = []
    if spelling.operand(5):
        shape = spelling.shape(5)
        mask = spelling.operand(5)
        if shape == (samples,):
            shown = spelling.add(
                "Less", places, spelling.add("Cast", spelling.shaped(mask, samples, 1, 1, 1), to=7)
            )
        elif len(shape) in (2, 3) and shape[-1] == keys:
            ones = spelling.shaped(mask, samples, 1, *([1] if len(shape) == 2 else [length]), keys)
            shown = spelling.add("Cast", ones, to=9)
        else:
            raise ValueError("a mask of another kind")
        found.append(spelling.add("Where", shown, zero, hidden))
    if spelling.integer("unidirectional"):
        own = spelling.add(
            "Add",
            spelling.shaped(_counted(spelling, length), length, 1),
            spelling.integers(keys - length),
        )
        later = spelling.add("Less", own, places)
        found.append(spelling.add("Where", later, hidden, zero))
    return found


def _counted(spelling: Spelling, count: int) -> str:
    """The whole numbers from 0."""
    return spelling.add(
        "Range", *(spelling.add("Constant", value_int=number) for number in (0, count, 1))
    )


def _lstm(spelling: Spelling) -> None:
    """Weights become numbers; what the layer reads is not rounded to bytes first."""
    names = [spelling.operand(index) for index in range(8)]
    for index, scale in ((1, 8), (2, 10)):
        per_row = len(spelling.shape(scale)) == 2
        vectors = [
            spelling.add("Cast", spelling.operand(scale + 1), to=_FLOAT),
            spelling.operand(scale),
        ]
        shape = spelling.shape(scale)[0], 1, spelling.shape(scale)[1] if per_row else 1
        point, factor = (spelling.shaped(each, *shape) for each in vectors)
        number = spelling.add("Sub", spelling.add("Cast", names[index], to=_FLOAT), point)
        names[index] = spelling.add(
            "Transpose", spelling.add("Mul", number, factor), perm=[0, 2, 1]
        )
    while not names[-1]:
        names.pop()
    spelling.add("LSTM", *names, result=0, **spelling.attributes())
    del spelling.nodes[-1].output[:]
    spelling.nodes[-1].output.extend(spelling.node.output)


QUANTIZED: dict[str, Callable[[Spelling], None]] = {
    "QLinearAdd": partial(_pair, "Add"),
    "QLinearMul": partial(_pair, "Mul"),
    "QLinearSigmoid": partial(_single, "Sigmoid"),
    "QLinearLeakyRelu": partial(_single, "LeakyRelu"),
    "QLinearReduceMean": partial(_single, "ReduceMean"),
    "QLinearSoftmax": _softmax,
    "QLinearConcat": _concat,
    "QLinearWhere": _where,
    "QLinearGlobalAveragePool": partial(_pool, "GlobalAveragePool"),
    "QLinearAveragePool": partial(_pool, "AveragePool"),
    "QLinearConv": _conv,
    "QGemm": _gemm,
    "MatMulIntegerToFloat": _product_to_float,
    "DynamicQuantizeMatMul": _dynamic_product,
    "DynamicQuantizeLSTM": _lstm,
    "QAttention": _attention,
}
