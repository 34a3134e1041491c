"""Fusion of Swish, x · sigmoid(αx) (Ramachandran et al. 2017), and of gated units, act(gate) · up
(Shazeer, "GLU Variants Improve Transformer", 2020). Gate and up are two values, such as two matrix
products or the halves of one.
"""

from __future__ import annotations

from autopipe.ir.graph import Attribute, Node
from autopipe.passes.frontend.fusion.view import View, is_near

_DOMAIN = "autopipe"
"""Domain of gated units for which ONNX has no operator."""


def fuse_swish(view: View, node: Node) -> tuple[Node, ...] | None:
    """Match x · sigmoid(αx) with a constant α, which ends at the Mul `node`. Return the Swish node
    in its place; None if the pattern does not match.
    """
    for x, gate in (node.inputs, node.inputs[::-1]):
        sigmoid = view.producer_of(gate, "Sigmoid")
        if sigmoid is None:
            continue
        alpha = 1.0
        inner = sigmoid.inputs[0]
        if inner != x:
            alpha, inner = view.split_scale(inner)
        if inner == x and view.shape(x) == view.shape(node.outputs[0]):
            attributes = () if is_near(alpha, 1.0) else (("alpha", alpha),)
            return (Node(node.name, "Swish", (x,), node.outputs, attributes),)
    return None


def fuse_gated_unit(view: View, node: Node) -> tuple[Node, ...] | None:
    """Match act(gate) · up of equal shapes, which ends at the Mul `node`, if nothing else reads
    act(gate). Return the SwiGLU or GatedUnit in its place; None if the pattern does not match.
    """
    for active, up in (node.inputs, node.inputs[::-1]):
        found = _match_activation(view, active) if view.readers[active] == 1 else None
        if found is None or len({view.shape(each) for each in (found[0], up, node.outputs[0])}) > 1:
            continue
        gate, kind, attributes = found
        operands = (gate, up)
        if kind == "silu":
            return (Node(node.name, "SwiGLU", operands, node.outputs, attributes),)
        setting = (("activation", kind),)
        return (Node(node.name, "GatedUnit", operands, node.outputs, setting, _DOMAIN),)
    return None


def _match_activation(
    view: View, name: str
) -> tuple[str, str, tuple[tuple[str, Attribute], ...]] | None:
    """Return (operand, kind, attributes) of the activation that writes the value `name`; None if no
    known activation does.

    The kind is `silu` for Swish, `gelu` or `tanh` for the exact and the approximate Gelu, and
    `relu2` for the square of Relu.
    """
    node = view.producer_of(name, "Swish", "Gelu")
    if node is not None:
        kind = "silu"
        if node.op == "Gelu":
            kind = "tanh" if node.text("approximate") == "tanh" else "gelu"
        return node.inputs[0], kind, node.attributes
    coefficient, factors = view.split_factors(name)
    if len(factors) != 2 or factors[0] != factors[1] or coefficient != 1.0:
        return None
    relu = view.producer_of(factors[0], "Relu")
    return None if relu is None else (relu.inputs[0], "relu2", ())
