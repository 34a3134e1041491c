"""ONNX Runtime's quantised operators (domain com.microsoft), written with ONNX's.

Elementwise operators, pools and softmax compute in floating point between DequantizeLinear and
QuantizeLinear; matrix products of integers stay exact (MatMulInteger). ONNX Runtime's kernels do
both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from autopipe.ir.graph import DType
from autopipe.passes.frontend.rewriter import FileRewriter

MASK_FILTER = -10000.0
"""Default of attribute `mask_filter_value`."""


def dequantized(rewriter: FileRewriter, index: int) -> str:
    """Return operand `index` in floating point. The next two operands are its scale and its zero
    point, which may be absent.
    """
    operands = [rewriter.operand(each) for each in (index, index + 1, index + 2)]
    return rewriter.add("DequantizeLinear", [each for each in operands if each])


def quantize_result(rewriter: FileRewriter, name: str, index: int) -> None:
    """Make the quantised value `name` the result of the node. Operands `index` and `index + 1` are
    the scale and the zero point, which may be absent.
    """
    operands = [rewriter.operand(index), rewriter.operand(index + 1)]
    rewriter.add("QuantizeLinear", [name, *(each for each in operands if each)], result=0)


def channels_last(rewriter: FileRewriter, name: str, result: int | None = None) -> str:
    """Return [batch, channels, …] as [batch, …, channels]."""
    rank = len(rewriter.shape(name))
    return rewriter.transpose(name, 0, *range(2, rank), 1, result=result)


def channels_first(rewriter: FileRewriter, name: str) -> str:
    """Return [batch, …, channels] as [batch, channels, …]."""
    rank = len(rewriter.shape(name))
    return rewriter.transpose(name, 0, rank - 1, *range(1, rank - 1))


def _binary(op: str, rewriter: FileRewriter) -> None:
    """Decompose an operator of two quantised operands."""
    found = rewriter.add(op, [dequantized(rewriter, 0), dequantized(rewriter, 3)])
    quantize_result(rewriter, found, 6)


def _unary(op: str, rewriter: FileRewriter) -> None:
    """Decompose an operator of one quantised operand."""
    found = rewriter.add(op, [dequantized(rewriter, 0)], **rewriter.attributes())
    quantize_result(rewriter, found, 3)


def _softmax(rewriter: FileRewriter) -> None:
    """Decompose QLinearSoftmax. Attribute `opset` gives the meaning of `axis`: before opset 13, all
    axes from `axis` on form one softmax.

    As in the kernel's tables, a probability of 1 is ⌊1 / scale⌋ quantisation steps: 254 for a scale
    of 1 / 255, whose reciprocal in float32 is below 255.
    """
    node = rewriter.node
    shape = rewriter.shape(rewriter.required(0))
    x = dequantized(rewriter, 0)
    if node.integer("opset") < 13:
        axis = node.integer("axis", 1) % max(len(shape), 1)
        matrix = rewriter.reshape(x, math.prod(shape[:axis]), math.prod(shape[axis:]))
        probabilities = rewriter.reshape(rewriter.add("Softmax", [matrix], axis=1), *shape)
    else:
        probabilities = rewriter.add("Softmax", [x], axis=node.integer("axis", -1))
    reciprocal = rewriter.add("Reciprocal", [rewriter.required(3)])
    scale = rewriter.add("Reciprocal", [rewriter.add("Floor", [reciprocal])])
    rewriter.add("QuantizeLinear", [probabilities, scale, rewriter.operand(4)], result=0)


def _concat(rewriter: FileRewriter) -> None:
    """Decompose QLinearConcat. The scale and zero point of the result precede the operands."""
    parts = [dequantized(rewriter, index) for index in range(2, len(rewriter.node.inputs), 3)]
    joined = rewriter.add("Concat", parts, axis=rewriter.node.integer("axis"))
    quantize_result(rewriter, joined, 0)


def _where(rewriter: FileRewriter) -> None:
    operands = [rewriter.required(0), dequantized(rewriter, 1), dequantized(rewriter, 4)]
    quantize_result(rewriter, rewriter.add("Where", operands), 7)


def _pool(op: str, rewriter: FileRewriter) -> None:
    is_last = rewriter.node.integer("channels_last")
    x = dequantized(rewriter, 0)
    x = channels_first(rewriter, x) if is_last else x
    pooled = rewriter.add(op, [x], **rewriter.attributes("channels_last"))
    pooled = channels_last(rewriter, pooled) if is_last else pooled
    quantize_result(rewriter, pooled, 3)


def _convolution(rewriter: FileRewriter) -> None:
    """Decompose com.microsoft's QLinearConv: ONNX's, on channels that may come last."""
    attributes = rewriter.attributes("channels_last")
    x, *others = rewriter.node.inputs
    if not rewriter.node.integer("channels_last"):
        rewriter.add("QLinearConv", [x, *others], result=0, **attributes)
        return
    found = rewriter.add("QLinearConv", [channels_first(rewriter, x), *others], **attributes)
    channels_last(rewriter, found, result=0)


def _integer_product(rewriter: FileRewriter, left: str, right: str, *zero_points: str) -> str:
    """Return the int32 product of two integer matrices. A zero point may be absent ("")."""
    return rewriter.add("MatMulInteger", [left, right, *zero_points])


def _scale_product(
    rewriter: FileRewriter, product: str, scales: tuple[str, str], bias: str = ""
) -> None:
    """Make the node's result of an int32 product: float32(product) · scales[0] · scales[1] +
    bias.
    """
    number = rewriter.cast(product, DType.FLOAT32)
    scale = rewriter.add("Mul", list(scales))
    scaled = rewriter.add("Mul", [number, scale], result=None if bias else 0)
    if bias:
        rewriter.add("Add", [scaled, bias], result=0)


def _product_to_float(rewriter: FileRewriter) -> None:
    """Decompose MatMulIntegerToFloat."""
    a, b, a_scale, b_scale, a_zero, b_zero, bias = map(rewriter.operand, range(7))
    product = _integer_product(rewriter, a, b, a_zero, b_zero)
    _scale_product(rewriter, product, (a_scale, b_scale), bias)


def _dynamic_product(rewriter: FileRewriter) -> None:
    """Decompose DynamicQuantizeMatMul: the first factor is quantised by the range of its values."""
    a, b, b_scale, b_zero, bias = map(rewriter.operand, range(5))
    quantized, a_scale, a_zero = _quantize_by_range(rewriter, a)
    product = _integer_product(rewriter, quantized, b, a_zero, b_zero)
    _scale_product(rewriter, product, (a_scale, b_scale), bias)


def _quantize_by_range(rewriter: FileRewriter, x: str) -> tuple[str, str, str]:
    """Return a value as uint8, the scale, and the zero point."""
    base = f"{rewriter.node.outputs[0]}/dynamicquantizelinear_{len(rewriter.nodes)}"
    names = base, f"{base}/scale", f"{base}/point"
    rewriter.add("DynamicQuantizeLinear", [x], results=names)
    return names


def _gemm(rewriter: FileRewriter) -> None:
    """Decompose QGemm. The int32 bias is added before scaling; the result is quantised if operand 7
    gives its scale.
    """
    node = rewriter.node
    a, b = (
        rewriter.add("Transpose", [rewriter.required(index)], perm=(1, 0))
        if node.integer(flag)
        else rewriter.required(index)
        for index, flag in ((0, "transA"), (3, "transB"))
    )
    product = _integer_product(rewriter, a, b, rewriter.operand(2), rewriter.operand(5))
    if rewriter.operand(6):
        product = rewriter.add("Add", [product, rewriter.operand(6)])
    number = rewriter.cast(product, DType.FLOAT32)
    scale = rewriter.add("Mul", [rewriter.required(1), rewriter.required(4)])
    if (alpha := node.number("alpha", 1.0)) != 1.0:
        scale = rewriter.add("Mul", [scale, rewriter.number(alpha, DType.FLOAT32)])
    is_quantized = bool(rewriter.operand(7))
    scaled = rewriter.add("Mul", [number, scale], result=None if is_quantized else 0)
    if is_quantized:
        quantize_result(rewriter, scaled, 7)


def _attention(rewriter: FileRewriter) -> None:
    """Decompose QAttention: queries, keys and values are one product of integers; logits, masks and
    probabilities are float32.
    """
    node = rewriter.node
    for flag in ("do_rotary", "past_present_share_buffer"):
        rewriter.require(not node.integer(flag), f"attribute {flag!r} is not supported")
    (batch, tokens, _) = rewriter.shape(rewriter.required(0))
    hidden = rewriter.shape(rewriter.required(1))[1] // 3
    heads = node.integer("num_heads")
    features = hidden // heads
    product = _integer_product(
        rewriter,
        rewriter.required(0),
        rewriter.required(1),
        rewriter.operand(6),
        rewriter.operand(7),
    )
    scale = rewriter.add("Mul", [rewriter.required(3), rewriter.required(4)])
    merged = rewriter.add("Mul", [rewriter.cast(product, DType.FLOAT32), scale])
    merged = rewriter.add("Add", [merged, rewriter.required(2)])
    merged = rewriter.reshape(merged, batch, tokens, 3, heads, features)
    stacked = rewriter.transpose(merged, 2, 0, 3, 1, 4)  # [3, batch, heads, tokens, features]
    query, *present = (
        rewriter.add("Gather", [stacked, rewriter.integer(part)], axis=0) for part in range(3)
    )
    past = rewriter.operand(8)
    past_tokens = rewriter.shape(past)[3] if past else 0
    if past_tokens:
        present = [
            rewriter.concat(2, rewriter.add("Gather", [past, rewriter.integer(part)], axis=0), each)
            for part, each in enumerate(present)
        ]
    key, value = present
    keys = past_tokens + tokens
    factor = rewriter.number(node.number("scale") or features**-0.5, DType.FLOAT32)
    logits = rewriter.add("MatMul", [query, rewriter.transpose(key, 0, 1, 3, 2)])
    logits = rewriter.add("Mul", [logits, factor])
    for mask in _masks(rewriter, batch, tokens, keys):
        logits = rewriter.add("Add", [logits, mask])
    attended = rewriter.add("MatMul", [rewriter.add("Softmax", [logits], axis=-1), value])
    by_token = rewriter.transpose(attended, 0, 2, 1, 3)
    rewriter.reshape(by_token, batch, tokens, hidden, result=0)
    if rewriter.has_result(1):
        parts = [rewriter.reshape(each, 1, batch, heads, keys, features) for each in present]
        rewriter.add("Concat", parts, axis=0, result=1)


def _masks(rewriter: FileRewriter, batch: int, tokens: int, keys: int) -> list[str]:
    """Return the tensors to add to the logits [batch, heads, tokens, keys]: the padding mask of
    operand 5 and the causal mask, if the node has them.
    """
    node = rewriter.node
    hidden = rewriter.number(node.number("mask_filter_value", MASK_FILTER), DType.FLOAT32)
    zero = rewriter.number(0.0, DType.FLOAT32)
    key_positions = rewriter.range(0, keys)
    found = []
    if mask := rewriter.operand(5):
        shape = rewriter.shape(mask)
        if shape == (batch,):
            lengths = rewriter.cast(rewriter.reshape(mask, batch, 1, 1, 1), DType.INT64)
            visible = rewriter.add("Less", [key_positions, lengths])
        elif len(shape) in (2, 3) and shape[-1] == keys:
            rows = 1 if len(shape) == 2 else tokens
            visible = rewriter.cast(rewriter.reshape(mask, batch, 1, rows, keys), DType.BOOL)
        else:
            raise ValueError(f"the attention mask has the unsupported shape {list(shape)}")
        found.append(rewriter.select(visible, zero, hidden))
    if node.integer("unidirectional"):
        query_positions = rewriter.range(keys - tokens, keys, tokens, 1)
        later = rewriter.add("Less", [query_positions, key_positions])
        found.append(rewriter.select(later, hidden, zero))
    return found


def _lstm(rewriter: FileRewriter) -> None:
    """Decompose DynamicQuantizeLSTM. The weights are dequantised; unlike in ONNX Runtime, the
    inputs are not quantised.
    """
    operands = [rewriter.operand(index) for index in range(8)]
    for index, scale_index in ((1, 8), (2, 10)):
        scale = rewriter.required(scale_index)
        zero_point = rewriter.cast(rewriter.required(scale_index + 1), DType.FLOAT32)
        directions, *rows = rewriter.shape(scale)
        shape = (directions, 1, rows[0] if rows else 1)
        zero_point = rewriter.reshape(zero_point, *shape)
        factor = rewriter.reshape(scale, *shape)
        number = rewriter.add("Sub", [rewriter.cast(operands[index], DType.FLOAT32), zero_point])
        number = rewriter.add("Mul", [number, factor])
        operands[index] = rewriter.add("Transpose", [number], perm=(0, 2, 1))
    rewriter.add("LSTM", operands, results=rewriter.node.outputs, **rewriter.attributes())


QUANTIZED: dict[str, Callable[[FileRewriter], None]] = {
    "QLinearAdd": partial(_binary, "Add"),
    "QLinearMul": partial(_binary, "Mul"),
    "QLinearSigmoid": partial(_unary, "Sigmoid"),
    "QLinearLeakyRelu": partial(_unary, "LeakyRelu"),
    "QLinearReduceMean": partial(_unary, "ReduceMean"),
    "QLinearSoftmax": _softmax,
    "QLinearConcat": _concat,
    "QLinearWhere": _where,
    "QLinearGlobalAveragePool": partial(_pool, "GlobalAveragePool"),
    "QLinearAveragePool": partial(_pool, "AveragePool"),
    "QLinearConv": _convolution,
    "QGemm": _gemm,
    "MatMulIntegerToFloat": _product_to_float,
    "DynamicQuantizeMatMul": _dynamic_product,
    "DynamicQuantizeLSTM": _lstm,
    "QAttention": _attention,
}
"""Decompositions by operator of com.microsoft."""
