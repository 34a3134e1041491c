"""Decompositions of ONNX Runtime's quantised operators (domain com.microsoft) into standard ONNX
operators.

Elementwise operators, pools and softmax compute in floating point between DequantizeLinear and
QuantizeLinear. Matrix products of integers stay exact (MatMulInteger). ONNX Runtime's kernels
compute in these ways, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from autopipe.ir.graph import DType
from autopipe.passes.frontend.rewriter import FileRewriter

MASK_FILTER = -10000.0
"""Default of attribute `mask_filter_value`: the number that is added to the logits of hidden keys.
"""


def dequantize_operand(rewriter: FileRewriter, index: int) -> str:
    """Write operand `index` of the replaced node in floating point and return the result's name.
    The scale is operand `index + 1`; the zero point, which may be absent, is operand `index + 2`.
    """
    operands = [rewriter.operand(each) for each in (index, index + 1, index + 2)]
    return rewriter.add("DequantizeLinear", [each for each in operands if each])


def quantize_result(rewriter: FileRewriter, name: str, index: int) -> None:
    """Quantise the floating-point value `name`, which becomes result 0 of the replaced node. The
    scale is operand `index`; the zero point, which may be absent, is operand `index + 1`.
    """
    operands = [rewriter.operand(index), rewriter.operand(index + 1)]
    rewriter.add("QuantizeLinear", [name, *(each for each in operands if each)], result=0)


def move_channels_last(rewriter: FileRewriter, name: str, result: int | None = None) -> str:
    """Transpose the value `name` from [batch, channels, …] to [batch, …, channels] and return the
    result's name. If `result` is not None, the transposed value is result number `result` of the
    replaced node.
    """
    rank = len(rewriter.shape(name))
    return rewriter.transpose(name, 0, *range(2, rank), 1, result=result)


def move_channels_first(rewriter: FileRewriter, name: str) -> str:
    """Transpose the value `name` from [batch, …, channels] to [batch, channels, …] and return the
    result's name.
    """
    rank = len(rewriter.shape(name))
    return rewriter.transpose(name, 0, rank - 1, *range(1, rank - 1))


def _decompose_binary(op: str, rewriter: FileRewriter) -> None:
    """Decompose a quantised operator of two quantised operands: `op` between DequantizeLinear and
    QuantizeLinear.
    """
    found = rewriter.add(op, [dequantize_operand(rewriter, 0), dequantize_operand(rewriter, 3)])
    quantize_result(rewriter, found, 6)


def _decompose_unary(op: str, rewriter: FileRewriter) -> None:
    """Decompose a quantised operator of one quantised operand: `op` between DequantizeLinear and
    QuantizeLinear.
    """
    found = rewriter.add(op, [dequantize_operand(rewriter, 0)], **rewriter.attributes())
    quantize_result(rewriter, found, 3)


def _decompose_softmax(rewriter: FileRewriter) -> None:
    """Decompose QLinearSoftmax. Its attribute `opset` decides the meaning of `axis`: before opset
    13, the elements along all axes from `axis` on form one softmax.

    ONNX Runtime's kernel represents a probability of 1 by ⌊1 / scale⌋ quantisation steps, so the
    result is quantised with the scale 1 / ⌊1 / scale⌋. For a scale of 1 / 255 these are 254 steps,
    since its reciprocal in float32 is below 255.
    """
    node = rewriter.node
    shape = rewriter.shape(rewriter.required(0))
    x = dequantize_operand(rewriter, 0)
    if node.integer("opset") < 13:
        axis = node.integer("axis", 1) % max(len(shape), 1)
        matrix = rewriter.reshape(x, math.prod(shape[:axis]), math.prod(shape[axis:]))
        probabilities = rewriter.reshape(rewriter.add("Softmax", [matrix], axis=1), *shape)
    else:
        probabilities = rewriter.add("Softmax", [x], axis=node.integer("axis", -1))
    reciprocal = rewriter.add("Reciprocal", [rewriter.required(3)])
    scale = rewriter.add("Reciprocal", [rewriter.add("Floor", [reciprocal])])
    rewriter.add("QuantizeLinear", [probabilities, scale, rewriter.operand(4)], result=0)


def _decompose_concat(rewriter: FileRewriter) -> None:
    """Decompose QLinearConcat. Operands 0 and 1 are the scale and zero point of the result; then
    come the parts, each with its scale and zero point.
    """
    parts = [
        dequantize_operand(rewriter, index) for index in range(2, len(rewriter.node.inputs), 3)
    ]
    joined = rewriter.add("Concat", parts, axis=rewriter.node.integer("axis"))
    quantize_result(rewriter, joined, 0)


def _decompose_where(rewriter: FileRewriter) -> None:
    """Decompose QLinearWhere: a Where whose two sources and whose result are quantised."""
    operands = [
        rewriter.required(0),
        dequantize_operand(rewriter, 1),
        dequantize_operand(rewriter, 4),
    ]
    quantize_result(rewriter, rewriter.add("Where", operands), 7)


def _decompose_pool(op: str, rewriter: FileRewriter) -> None:
    """Decompose a quantised pool: `op` between DequantizeLinear and QuantizeLinear. Channels come
    last if the node has channels_last=1.
    """
    is_last = rewriter.node.integer("channels_last")
    x = dequantize_operand(rewriter, 0)
    x = move_channels_first(rewriter, x) if is_last else x
    pooled = rewriter.add(op, [x], **rewriter.attributes("channels_last"))
    pooled = move_channels_last(rewriter, pooled) if is_last else pooled
    quantize_result(rewriter, pooled, 3)


def _decompose_convolution(rewriter: FileRewriter) -> None:
    """Decompose com.microsoft's QLinearConv into ONNX's, with transposes if the node has
    channels_last=1.
    """
    attributes = rewriter.attributes("channels_last")
    x, *others = rewriter.node.inputs
    if not rewriter.node.integer("channels_last"):
        rewriter.add("QLinearConv", [x, *others], result=0, **attributes)
        return
    found = rewriter.add("QLinearConv", [move_channels_first(rewriter, x), *others], **attributes)
    move_channels_last(rewriter, found, result=0)


def _write_integer_matmul(rewriter: FileRewriter, left: str, right: str, *zero_points: str) -> str:
    """Write the exact int32 product of two matrices of 8-bit integers and return its name.
    `zero_points` are those of `left` and `right`, "" for an absent one.
    """
    return rewriter.add("MatMulInteger", [left, right, *zero_points])


def _write_scaled_product(
    rewriter: FileRewriter, product: str, scales: tuple[str, str], bias: str = ""
) -> None:
    """Write result 0 of the replaced node: float32(product) · scales[0] · scales[1] + bias.
    `product` is int32; `bias` may be "".
    """
    number = rewriter.cast(product, DType.FLOAT32)
    scale = rewriter.add("Mul", list(scales))
    scaled = rewriter.add("Mul", [number, scale], result=None if bias else 0)
    if bias:
        rewriter.add("Add", [scaled, bias], result=0)


def _decompose_matmul_integer_to_float(rewriter: FileRewriter) -> None:
    """Decompose MatMulIntegerToFloat: the exact product of two quantised matrices, scaled to
    float32, plus an optional bias.
    """
    a, b, a_scale, b_scale, a_zero, b_zero, bias = map(rewriter.operand, range(7))
    product = _write_integer_matmul(rewriter, a, b, a_zero, b_zero)
    _write_scaled_product(rewriter, product, (a_scale, b_scale), bias)


def _decompose_dynamic_quantize_matmul(rewriter: FileRewriter) -> None:
    """Decompose DynamicQuantizeMatMul: the first factor is float32 and is quantised here by the
    range of its values; the second factor is quantised in the file. The result is float32.
    """
    a, b, b_scale, b_zero, bias = map(rewriter.operand, range(5))
    quantized, a_scale, a_zero = _quantize_by_range(rewriter, a)
    product = _write_integer_matmul(rewriter, quantized, b, a_zero, b_zero)
    _write_scaled_product(rewriter, product, (a_scale, b_scale), bias)


def _quantize_by_range(rewriter: FileRewriter, x: str) -> tuple[str, str, str]:
    """Write the uint8 quantisation of the float32 value `x`, whose scale covers the range of its
    values. Return the names of the quantised value, the scale, and the zero point.
    """
    base = f"{rewriter.node.outputs[0]}/dynamicquantizelinear_{len(rewriter.nodes)}"
    names = base, f"{base}/scale", f"{base}/point"
    rewriter.add("DynamicQuantizeLinear", [x], results=names)
    return names


def _decompose_gemm(rewriter: FileRewriter) -> None:
    """Decompose QGemm: alpha times the product of two quantised matrices. The int32 bias (operand
    6) is added before scaling. The result is quantised if operand 7, its scale, is present;
    otherwise it is float32.
    """
    node = rewriter.node
    a, b = (
        rewriter.add("Transpose", [rewriter.required(index)], perm=(1, 0))
        if node.integer(flag)
        else rewriter.required(index)
        for index, flag in ((0, "transA"), (3, "transB"))
    )
    product = _write_integer_matmul(rewriter, a, b, rewriter.operand(2), rewriter.operand(5))
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


def _decompose_attention(rewriter: FileRewriter) -> None:
    """Decompose QAttention: one exact product of quantised matrices has queries, keys and values.
    Logits, masks and probabilities are float32.

    Result 1 is the stack of all keys and all values, cached ones included. Raises ModelError if the
    node sets `do_rotary` or `past_present_share_buffer`.
    """
    node = rewriter.node
    for flag in ("do_rotary", "past_present_share_buffer"):
        rewriter.require(not node.integer(flag), f"attribute {flag!r} is not supported")
    (batch, tokens, _) = rewriter.shape(rewriter.required(0))
    hidden = rewriter.shape(rewriter.required(1))[1] // 3
    heads = node.integer("num_heads")
    features = hidden // heads
    product = _write_integer_matmul(
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
    stacked = rewriter.transpose(
        merged, 2, 0, 3, 1, 4
    )  # Shape: [3, batch, heads, tokens, features].
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
    for mask in _attention_masks(rewriter, batch, tokens, keys):
        logits = rewriter.add("Add", [logits, mask])
    attended = rewriter.add("MatMul", [rewriter.add("Softmax", [logits], axis=-1), value])
    by_token = rewriter.transpose(attended, 0, 2, 1, 3)
    rewriter.reshape(by_token, batch, tokens, hidden, result=0)
    if rewriter.has_result(1):
        parts = [rewriter.reshape(each, 1, batch, heads, keys, features) for each in present]
        rewriter.add("Concat", parts, axis=0, result=1)


def _attention_masks(rewriter: FileRewriter, batch: int, tokens: int, keys: int) -> list[str]:
    """Return the names of the tensors to add to the logits [batch, heads, tokens, keys]: the
    padding mask of operand 5, if it is present, and the causal mask, if the node has
    unidirectional=1.

    Raises ValueError if operand 5 has an unsupported shape.
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


def _decompose_lstm(rewriter: FileRewriter) -> None:
    """Decompose DynamicQuantizeLSTM into an LSTM with dequantised weights. ONNX Runtime also
    quantises the inputs of each product; the decomposition does not.
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
    "QLinearAdd": partial(_decompose_binary, "Add"),
    "QLinearMul": partial(_decompose_binary, "Mul"),
    "QLinearSigmoid": partial(_decompose_unary, "Sigmoid"),
    "QLinearLeakyRelu": partial(_decompose_unary, "LeakyRelu"),
    "QLinearReduceMean": partial(_decompose_unary, "ReduceMean"),
    "QLinearSoftmax": _decompose_softmax,
    "QLinearConcat": _decompose_concat,
    "QLinearWhere": _decompose_where,
    "QLinearGlobalAveragePool": partial(_decompose_pool, "GlobalAveragePool"),
    "QLinearAveragePool": partial(_decompose_pool, "AveragePool"),
    "QLinearConv": _decompose_convolution,
    "QGemm": _decompose_gemm,
    "MatMulIntegerToFloat": _decompose_matmul_integer_to_float,
    "DynamicQuantizeMatMul": _decompose_dynamic_quantize_matmul,
    "DynamicQuantizeLSTM": _decompose_lstm,
    "QAttention": _decompose_attention,
}
"""Decompositions of quantised operators of domain com.microsoft, by operator."""
