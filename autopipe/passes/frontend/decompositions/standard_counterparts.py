"""Decompositions of operators of ONNX Runtime (domain com.microsoft) that standard ONNX has under
an equal name.
"""

from __future__ import annotations

from autopipe.ir.graph import DType
from autopipe.passes.frontend.rewriter import FileRewriter


def decompose_linear_attention(rewriter: FileRewriter) -> None:
    """Replace com.microsoft's LinearAttention by ONNX's. Raises ModelError unless `state_window` is
    0 or absent.
    """
    _require_defaults(rewriter, state_window=0)
    value = rewriter.shape(rewriter.required(2))
    groups = rewriter.node.integer("kv_num_heads")
    key_features = rewriter.shape(rewriter.required(1))[2] // groups
    value_features = value[2] // groups
    output = (*value[:2], rewriter.node.integer("q_num_heads") * value_features)
    _write_standard_operator(rewriter, output, (value[0], groups, key_features, value_features))


def decompose_causal_convolution(rewriter: FileRewriter) -> None:
    """Replace com.microsoft's CausalConvWithState by ONNX's. Raises ModelError for attribute values
    that ONNX's operator does not have.
    """
    _require_defaults(rewriter, state_window=0, channels_last=0, dilation=1, ndim=1)
    shape = rewriter.shape(rewriter.required(0))
    weight = rewriter.shape(rewriter.required(1))
    _write_standard_operator(rewriter, shape, (*shape[:2], weight[2] - 1))


def decompose_dequantize_linear(rewriter: FileRewriter) -> None:
    """Replace com.microsoft's DequantizeLinear by ONNX's of opset `NEWEST`, because that of the
    file's opset may lack the element types.
    """
    dtype = rewriter.type_of(rewriter.required(1)).dtype
    _write_standard_operator(rewriter, rewriter.shape(rewriter.required(0)), dtype=dtype)


def decompose_quantize_linear(rewriter: FileRewriter) -> None:
    """Replace com.microsoft's QuantizeLinear by ONNX's of opset `NEWEST`, because that of the
    file's opset may lack the element types.
    """
    zero_point = rewriter.operand(2)
    dtype = rewriter.type_of(zero_point).dtype if zero_point else DType.UINT8
    _write_standard_operator(rewriter, rewriter.shape(rewriter.required(0)), dtype=dtype)


def _write_standard_operator(
    rewriter: FileRewriter, *shapes: tuple[int, ...], dtype: DType | None = None
) -> None:
    """Write the standard ONNX operator that has the name of the replaced node's operator, with
    equal operands and attributes. `shapes` has the shape of each result; `dtype` is the element
    type of all, by default that of operand 0.
    """
    node = rewriter.node
    rewriter.add(node.op, node.inputs, *shapes, dtype=dtype, **rewriter.attributes())
    for index, name in enumerate(rewriter.nodes[-1].outputs):
        rewriter.set_result(index, name)


def _require_defaults(rewriter: FileRewriter, **defaults: int) -> None:
    """Raise ModelError if the replaced node sets one of these integer attributes to another value
    than the one given here.
    """
    for name, default in defaults.items():
        actual = rewriter.node.integer(name, default)
        rewriter.require(
            actual == default, f"{name}={actual} is not supported, only {name}={default}"
        )
