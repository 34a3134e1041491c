"""Decompositions of fused operators of ONNX Runtime (domains com.microsoft and com.microsoft.nchwc)
into the ONNX operators that they fuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import DType
from autopipe.passes.frontend.decompositions import nchwc
from autopipe.passes.frontend.decompositions.quantized import (
    move_channels_first,
    move_channels_last,
)
from autopipe.passes.frontend.rewriter import FileRewriter

DOMAIN = "com.microsoft"
HARD_SWISH_SINCE = 14
"""First opset in which ONNX has HardSwish."""
_ACTIVATION_PARAMETERS = {
    "Elu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "LeakyRelu": ("alpha",),
    "Selu": ("alpha", "gamma"),
    "ThresholdedRelu": ("alpha",),
}
"""By activation, the names of its attributes, in the order in which a fused operator lists their
values.
"""
_PLAIN_ACTIVATIONS = ("Relu", "Sigmoid", "Softplus", "Softsign", "Tanh")
"""Activations without attributes."""


def _decompose_fused_matmul(rewriter: FileRewriter) -> None:
    """Replace the attributes transBatchA and transBatchB of a FusedMatMul by Transposes. A factor
    with this attribute has the dimensions [rows, batch …, columns] and is transposed to [batch …,
    rows, columns]. A FusedMatMul without such a factor of three or more dimensions is kept.
    """
    node = rewriter.node
    is_moved = [
        bool(node.integer(flag)) and len(rewriter.shape(rewriter.required(index))) > 2
        for index, flag in enumerate(("transBatchA", "transBatchB"))
    ]
    if not any(is_moved):
        return
    factors = list(node.inputs)
    for index, name in enumerate(factors[:2]):
        if is_moved[index]:
            rank = len(rewriter.shape(name))
            factors[index] = rewriter.transpose(name, *range(1, rank - 1), 0, rank - 1)
    attributes = rewriter.attributes("transBatchA", "transBatchB")
    rewriter.add("FusedMatMul", factors, result=0, domain=DOMAIN, **attributes)


def _decompose_group_norm(rewriter: FileRewriter) -> None:
    """Decompose GroupNorm. Its channels come last unless channels_last=0; activation=1 means that
    SiLU follows.
    """
    _write_group_normalization(rewriter, rewriter.required(0))


def _decompose_skip_group_norm(rewriter: FileRewriter) -> None:
    """Decompose SkipGroupNorm: GroupNorm of the sum x + skip + bias, where the bias may be absent.
    Result 1 is the sum.
    """
    x = rewriter.required(0)
    skip = rewriter.required(3)
    is_last = rewriter.node.integer("channels_last", 1)
    window = [1] * (len(rewriter.shape(x)) - 2)
    given = rewriter.shape(skip)
    if len(given) == 2:
        shape = [given[0], *window, given[1]] if is_last else [*given, *window]
        skip = rewriter.reshape(skip, *shape)
    total = rewriter.add("Add", [x, skip])
    if bias := rewriter.operand(4):
        if not is_last:
            bias = rewriter.reshape(bias, *rewriter.shape(bias), *window)
        total = rewriter.add("Add", [total, bias])
    if rewriter.has_result(1):
        total = rewriter.add("Identity", [total], result=1)
    _write_group_normalization(rewriter, total)


def _write_group_normalization(rewriter: FileRewriter, x: str) -> None:
    """Write the group normalisation of the value `x`, followed by SiLU if the replaced node has
    activation=1, as result 0 of the replaced node.
    """
    node = rewriter.node
    is_last = node.integer("channels_last", 1)
    is_activated = node.integer("activation")
    x = move_channels_first(rewriter, x) if is_last else x
    x = rewriter.add(
        "GroupNormalization",
        [x, rewriter.required(1), rewriter.required(2)],
        result=None if is_last or is_activated else 0,
        num_groups=node.integer("groups"),
        epsilon=node.number("epsilon", 1e-5),
    )
    if is_activated:
        x = rewriter.add("QuickGelu", [x], result=None if is_last else 0, domain=DOMAIN, alpha=1.0)
    if is_last:
        move_channels_last(rewriter, x, result=0)


def _decompose_bias_split_gelu(rewriter: FileRewriter) -> None:
    """Decompose BiasSplitGelu: x + bias is divided along the last axis; the result is the first
    half times Gelu of the second half.
    """
    total = rewriter.add("Add", [rewriter.required(0), rewriter.required(1)])
    axis = len(rewriter.shape(total)) - 1
    half = rewriter.shape(total)[axis] // 2
    first, second = (rewriter.slice(total, {axis: (start, start + half)}) for start in (0, half))
    rewriter.add("Mul", [first, rewriter.add("Gelu", [second], domain=DOMAIN)], result=0)


def _decompose_bias_add(rewriter: FileRewriter) -> None:
    """Decompose BiasAdd: x + bias + skip."""
    total = rewriter.add("Add", [rewriter.required(0), rewriter.required(1)])
    rewriter.add("Add", [total, rewriter.required(2)], result=0)


def _decompose_nhwc_max_pool(rewriter: FileRewriter) -> None:
    """Decompose NhwcMaxPool: a MaxPool of images whose channels come last."""
    x = move_channels_first(rewriter, rewriter.required(0))
    pooled = rewriter.add("MaxPool", [x], **rewriter.attributes())
    move_channels_last(rewriter, pooled, result=0)


def _decompose_nhwc_conv(rewriter: FileRewriter) -> None:
    """Decompose NhwcConv, a convolution of images whose channels come last. The weight is [outputs,
    …, inputs], as ONNX Runtime's optimizer writes it, or [outputs, inputs, …], as the operator's
    description says.
    """
    x = rewriter.required(0)
    weight = rewriter.required(1)
    channels = rewriter.shape(x)[-1]
    x = move_channels_first(rewriter, x)
    if rewriter.shape(weight)[-1] * rewriter.node.integer("group", 1) == channels:
        weight = move_channels_first(rewriter, weight)
    operands = [x, weight, *rewriter.node.inputs[2:]]
    found = rewriter.add("Conv", operands, **rewriter.attributes())
    move_channels_last(rewriter, found, result=0)


def _write_activation(rewriter: FileRewriter, x: str, parameters: Sequence[float]) -> None:
    """Write result 0 of the replaced node: the activation of the value `x` that the node's
    attribute `activation` names, or `x` itself without the attribute. `parameters` are the values
    of the activation's attributes. Raises ModelError for an unknown activation.
    """
    activation = rewriter.node.text("activation")
    if activation == "Clip":
        low, high = parameters
        rewriter.clip(x, low, high, result=0)
    elif activation == "HardSwish" and rewriter.opset < HARD_SWISH_SINCE:
        gate = rewriter.add("HardSigmoid", [x], alpha=1 / 6, beta=0.5)
        rewriter.add("Mul", [x, gate], result=0)
    elif activation in ("HardSwish", *_PLAIN_ACTIVATIONS, *_ACTIVATION_PARAMETERS):
        names = _ACTIVATION_PARAMETERS.get(activation, ())
        attributes: dict[str, Any] = dict(zip(names, parameters, strict=False))
        rewriter.add(activation, [x], result=0, **attributes)
    elif activation:
        raise ModelError(f"activation {activation!r} is not supported", where=rewriter.where)
    else:
        rewriter.add("Identity", [x], result=0)


def _write_fused_convolution(
    rewriter: FileRewriter, weight: str, x: str, is_channels_last: bool = False
) -> None:
    """Write result 0 of the replaced node, a fused convolution: `x` convolved with `weight`, plus
    the bias (operand 2) and operand 3 if they are present, then the activation of the node.

    `x` has its channels first; with `is_channels_last`, the result and operand 3 have them last.
    """
    bias = [rewriter.operand(2)] if rewriter.operand(2) else []
    attributes = rewriter.attributes("activation", "activation_params")
    x = rewriter.add("Conv", [x, weight, *bias], **attributes)
    x = move_channels_last(rewriter, x) if is_channels_last else x
    if rewriter.operand(3):
        x = rewriter.add("Add", [x, rewriter.operand(3)])
    _write_activation(rewriter, x, rewriter.node.numbers("activation_params"))


def _decompose_fused_conv(rewriter: FileRewriter) -> None:
    """Decompose FusedConv: a convolution, plus operand 3 if it is present, and an activation."""
    _write_fused_convolution(rewriter, rewriter.required(1), rewriter.required(0))


def _decompose_nhwc_fused_conv(rewriter: FileRewriter) -> None:
    """Decompose NhwcFusedConv: FusedConv of images whose channels come last."""
    x = move_channels_first(rewriter, rewriter.required(0))
    _write_fused_convolution(rewriter, rewriter.required(1), x, is_channels_last=True)


def _decompose_nchwc_conv(rewriter: FileRewriter) -> None:
    """Decompose com.microsoft.nchwc's Conv, whose weight is stored in blocks of channels."""
    _write_fused_convolution(rewriter, nchwc.restore_weight_layout(rewriter), rewriter.required(0))


def _decompose_fused_gemm(rewriter: FileRewriter) -> None:
    """Decompose FusedGemm: Gemm, then an activation."""
    node = rewriter.node
    parameters = ("activation_alpha", "activation_beta", "activation_gamma")
    operands = [name for name in node.inputs if name]
    x = rewriter.add("Gemm", operands, **rewriter.attributes("activation", *parameters))
    _write_activation(rewriter, x, [node.number(each) for each in parameters if node.has(each)])


def _decompose_embed_layer_normalization(
    rewriter: FileRewriter, is_quantized: bool = False
) -> None:
    """Decompose EmbedLayerNormalization and, if `is_quantized`, QEmbedLayerNormalization: the layer
    normalisation of the sum of word, position and segment embeddings.

    Result 1 is the number of tokens per sample for which the mask (operand 7) is 1, or 0 without a
    mask. Result 2 is the sum of the embeddings.
    """
    node = rewriter.node

    def dequantize(name: str, table: int) -> str:
        """Return the name of the floating-point form of the value `name`, which is operand `table`
        or consists of its rows. The scale of operand i is operand i + 6, its zero point operand i +
        11. If the node is not quantised, return `name`.
        """
        if not is_quantized:
            return name
        settings = [rewriter.operand(table + 6), rewriter.operand(table + 11)]
        return rewriter.add("DequantizeLinear", [name, *(each for each in settings if each)])

    tokens = rewriter.required(0)
    samples, length = rewriter.shape(tokens)
    words = dequantize(rewriter.add("Gather", [rewriter.required(2), tokens]), 2)
    if rewriter.operand(8) and not is_quantized:
        positions = rewriter.add("Gather", [rewriter.required(3), rewriter.operand(8)])
    else:
        positions = rewriter.slice(rewriter.required(3), {0: (0, length)})
    total = rewriter.add("Add", [words, dequantize(positions, 3)])
    if rewriter.operand(1):
        segments = rewriter.add("Gather", [rewriter.required(4), rewriter.operand(1)])
        total = rewriter.add("Add", [total, dequantize(segments, 4)])
    if rewriter.has_result(2):
        total = rewriter.add("Identity", [total], result=2)
    scale_and_bias = [dequantize(rewriter.required(index), index) for index in (5, 6)]
    rewriter.add(
        "LayerNormalization",
        [total, *scale_and_bias],
        result=0,
        epsilon=node.number("epsilon", 1e-12),
    )
    if rewriter.has_result(1) and rewriter.operand(7):
        axes = rewriter.integers(1)
        rewriter.add("ReduceSum", [rewriter.operand(7), axes], keepdims=0, result=1)
    elif rewriter.has_result(1):
        zeros = rewriter.cast(rewriter.integers(0), DType.INT32)
        rewriter.add("Expand", [zeros, rewriter.integers(samples)], result=1)


FUSED: dict[str, Callable[[FileRewriter], None]] = {
    "FusedMatMul": _decompose_fused_matmul,
    "GroupNorm": _decompose_group_norm,
    "SkipGroupNorm": _decompose_skip_group_norm,
    "BiasSplitGelu": _decompose_bias_split_gelu,
    "BiasAdd": _decompose_bias_add,
    "NhwcConv": _decompose_nhwc_conv,
    "NhwcMaxPool": _decompose_nhwc_max_pool,
    "NhwcFusedConv": _decompose_nhwc_fused_conv,
    "FusedConv": _decompose_fused_conv,
    "FusedGemm": _decompose_fused_gemm,
    "EmbedLayerNormalization": _decompose_embed_layer_normalization,
    "QEmbedLayerNormalization": partial(_decompose_embed_layer_normalization, is_quantized=True),
}
"""Decompositions of domain com.microsoft, by operator."""
NCHWC: dict[str, Callable[[FileRewriter], None]] = {"Conv": _decompose_nchwc_conv, **nchwc.NCHWC}
"""Decompositions of domain com.microsoft.nchwc, by operator."""
