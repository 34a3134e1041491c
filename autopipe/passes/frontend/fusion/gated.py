"""Swish, x · sigmoid(α x) (Ramachandran et al. 2017), and units that such an activation gates
(Shazeer, "GLU Variants Improve Transformer", 2020): act(gate) · up, of two products or the halves
of one.
"""

from __future__ import annotations

from autopipe.ir.graph import Attribute, Node
from autopipe.passes.frontend.fusion.view import View, near

_DOMAIN = "autopipe"
"""Of units that ONNX has no operator for."""


def swish(view: View, node: Node) -> tuple[Node, ...] | None:
    """A product of x and the sigmoid of x, or of x times a number."""
    for x, gate in (node.inputs, node.inputs[::-1]):
        sigmoid = view.made_by(gate, "Sigmoid")
        if sigmoid is None:
            continue
        alpha, inner = (1.0, x) if sigmoid.inputs[0] == x else view.scaled(sigmoid.inputs[0])
        if inner == x and view.shape(x) == view.shape(node.outputs[0]):
            attributes = () if near(alpha, 1.0) else (("alpha", alpha),)
            return (Node(node.name, "Swish", (x,), node.outputs, attributes),)
    return None


def gated(view: View, node: Node) -> tuple[Node, ...] | None:
    """A product of an activation, that nothing else reads, and another value of its shape."""
    for active, up in (node.inputs, node.inputs[::-1]):
        found = _activation(view, active) if view.readers[active] == 1 else None
        if found is None or len({view.shape(each) for each in (found[0], up, node.outputs[0])}) > 1:
            continue
        gate, name, attributes = found
        if name == "silu":
            return (Node(node.name, "SwiGLU", (gate, up), node.outputs, attributes),)
        return (
            Node(
                node.name, "GatedUnit", (gate, up), node.outputs, (("activation", name),), _DOMAIN
            ),
        )
    return None


def _activation(view: View, name: str) -> tuple[str, str, tuple[tuple[str, Attribute], ...]] | None:
    """Operand, kind and attributes of an activation: Swish, Gelu in both forms, or the square of
    Relu.
    """
    node = view.made_by(name, "Swish", "Gelu")
    if node is not None:
        kind = (
            "silu"
            if node.op == "Swish"
            else "tanh"
            if node.text("approximate") == "tanh"
            else "gelu"
        )
        return node.inputs[0], kind, node.attributes
    coefficient, factors = view.product(name)
    relu = (
        view.made_by(factors[0], "Relu") if len(factors) == 2 and factors[0] == factors[1] else None
    )
    return (relu.inputs[0], "relu2", ()) if relu is not None and coefficient == 1.0 else None
