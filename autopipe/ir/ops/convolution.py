"""Convolutions. Of the plain one spatial axes can be split: devices read their neighbours' edges."""

from __future__ import annotations

import math

from autopipe.ir.ops.row import NotationLine, Operator, Signature
from autopipe.ir.ops.windows import window_of
from autopipe.ir.space import Space


def spatial(prefix: str, count: int) -> str:
    """Names of `count` spatial axes that stay whole."""
    return " ".join(f"{prefix}{axis}!" for axis in range(count))


def conv(signature: Signature) -> NotationLine:
    """`n (g c) *[o], (g m) c *k, (g m) -> n (g m) *o`, windows of the operand for each o.

    c adds up only without a bias, which would be added twice.
    """
    weight = signature.operand(1).shape
    groups = signature.operand(0).shape[1] // weight[1]
    rank = len(weight) - 2
    c = "c&" if signature.present(2) else "c+"
    bias = ", (g m)" if signature.present(2) else ""
    extents = signature.operand(0).shape[2:], signature.result().shape[2:]
    window = window_of(signature.node, weight[2:], *extents)
    read, written = zip(
        *(window.words(axis, *each) for axis, each in enumerate(zip(*extents, strict=True))), strict=True
    )
    return _grouped(
        f"n (g {c}) {' '.join(read)}, (g m) c {spatial('k', rank)}{bias} -> n (g m) {' '.join(written)}",
        groups,
        c=weight[1],
        m=weight[0] // groups,
    )


def conv_transpose(signature: Signature) -> NotationLine:
    """`n (g c) *i, (g c) m *k, (g m) -> n (g m) *o`."""
    weight = signature.operand(1).shape
    groups = signature.node.integer("group", 1)
    rank = len(weight) - 2
    c = "c&" if signature.present(2) else "c+"
    bias = ", (g m)" if signature.present(2) else ""
    return _grouped(
        f"n (g {c}) {spatial('i', rank)}, (g c) m {spatial('k', rank)}{bias} -> n (g m) {spatial('o', rank)}",
        groups,
        c=weight[0] // groups,
        m=weight[1],
    )


def conv_integer(signature: Signature) -> NotationLine:
    """As Conv, with zero points; channels are split only by batch and with one zero point for all."""
    groups, c, m = _quantized_channels(signature, 1)
    rank = len(signature.operand(1).shape) - 2
    points = "".join(", ?" if value is None else ", 1" if value.shape else ", " for value in signature.operands[2:])
    if len(signature.operands) > 3 and signature.operand(3).shape not in ((), (1,)):
        points = f"{points.rpartition(',')[0]}, (g m)"
    return _grouped(
        f"n (g c+) {spatial('i', rank)}, (g m) c {spatial('k', rank)}{points} -> n (g m) {spatial('o', rank)}",
        groups,
        c=c,
        m=m,
    )


def conv_quantized(signature: Signature) -> NotationLine:
    """QLinearConv: as Conv with bias; scale and zero point of the weights may be one a channel."""
    groups, c, m = _quantized_channels(signature, 3)
    rank = len(signature.operand(3).shape) - 2
    tensors = []
    for index, value in enumerate(signature.operands):
        if value is None:
            tensors.append("?")
        elif index == 0:
            tensors.append(f"n (g c) {spatial('i', rank)}")
        elif index == 3:
            tensors.append(f"(g m) c {spatial('k', rank)}")
        elif len(value.shape) == 1 and index in (4, 5, 8) and value.shape[0] == groups * m:
            tensors.append("(g m)")
        else:
            tensors.append(" ".join("1" for _ in value.shape))
    return _grouped(f"{', '.join(tensors)} -> n (g m) {spatial('o', rank)}", groups, c=c, m=m)


def deform_conv(signature: Signature) -> NotationLine:
    """`n c *i, m c *k, n *offset *o, m, n *mask *o -> n m *o`; m is split where there is one group."""
    weight = signature.operand(1).shape
    rank = len(weight) - 2
    single = signature.node.integer("group", 1) == 1
    m = "m" if single else "m!"
    others = [f"n q! {spatial('o', rank)}", m, f"n r! {spatial('o', rank)}"]
    tensors = [f"n c! {spatial('i', rank)}", f"{m} {'c!' if single else 'd!'} {spatial('k', rank)}"]
    for index, value in enumerate(signature.operands[2:]):
        tensors.append("?" if value is None else others[index])
    return NotationLine(f"{', '.join(tensors)} -> n {m} {spatial('o', rank)}")


def _grouped(text: str, groups: int, c: int, m: int) -> NotationLine:
    return NotationLine(text, (("g", groups), ("c", c), ("m", m)))


def _quantized_channels(signature: Signature, weight: int) -> tuple[int, int, int]:
    """Groups, input channels of a group, output channels of a group."""
    shape = signature.operand(weight).shape
    groups = signature.operand(0).shape[1] // shape[1]
    return groups, shape[1], shape[0] // groups


def _conv_flops(signature: Signature, space: Space) -> float:
    """Each element of the result sums over the weights of one output channel."""
    weight = signature.operand(3 if signature.node.op == "QLinearConv" else 1).shape
    return 2.0 * signature.result().elements * math.prod(weight[1:])


def _transpose_flops(signature: Signature, space: Space) -> float:
    """Each element of the operand is spread by the weights of one input channel."""
    return 2.0 * signature.operand(0).elements * math.prod(signature.operand(1).shape[1:])


CONVOLUTION = (
    Operator("Conv", conv, "convolution", _conv_flops, 2.0, keeps=("0", "1"), weights=(1,)),
    Operator("ConvTranspose", conv_transpose, "convolution", _transpose_flops, 2.0, keeps=("0", "1"), weights=(1,)),
    Operator("ConvInteger", conv_integer, "convolution", _conv_flops, differentiable=False),
    Operator("QLinearConv", conv_quantized, "convolution", _conv_flops, differentiable=False),
    Operator("DeformConv", deform_conv, "convolution", _conv_flops, 2.0, keeps=("*",), weights=(1,)),
)
