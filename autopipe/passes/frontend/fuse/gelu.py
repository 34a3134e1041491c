"""Gelu spelt out: x · ½ · (1 + erf(x / √2)), and its approximation by tanh (Hendrycks & Gimpel 2016, section 2)."""

from __future__ import annotations

import math

from autopipe.ir.graph import Node
from autopipe.passes.frontend.fuse.view import Replacement, View, near

ROOT_HALF = math.sqrt(0.5)
TANH_SCALE = math.sqrt(2 / math.pi)
CUBIC = 0.044715


def gelu(view: View, node: Node) -> Replacement | None:
    """A product of ½, x and 1 + erf or tanh of x, in any order."""
    product = view.product(node.outputs[0])
    if len(product.factors) != 2 or not near(product.coefficient, 0.5):
        return None
    for x, gate in (product.factors, product.factors[::-1]):
        approximate = _gate(view, gate, x)
        if approximate and view.type_of(x).shape == view.type_of(node.outputs[0]).shape:
            return Replacement((Node(node.name, "Gelu", (x,), node.outputs, (("approximate", approximate),)),))
    return None


def _gate(view: View, name: str, x: str) -> str:
    """`none` for 1 + erf(x / √2), `tanh` for its approximation, "" for anything else."""
    found = view.sum_with(name)
    if found is None or not near(found[1], 1.0):
        return ""
    bend = view.made_by(found[0], "Erf", "Tanh")
    if bend is None:
        return ""
    argument = view.product(bend.inputs[0])
    if bend.op == "Erf":
        return "none" if near(argument.coefficient, ROOT_HALF) and argument.factors == (x,) else ""
    return "tanh" if near(argument.coefficient, TANH_SCALE) and _is_cubic(view, argument.factors, x) else ""


def _is_cubic(view: View, factors: tuple[str, ...], x: str) -> bool:
    """True if a product of factors is x + 0.044715 x³, or x (1 + 0.044715 x²)."""
    if len(factors) == 1:
        node = view.made_by(factors[0], "Add")
        if node is None or x not in node.inputs:
            return False
        cubic = view.product(node.inputs[1] if node.inputs[0] == x else node.inputs[0])
        return near(cubic.coefficient, CUBIC) and cubic.factors == (x, x, x)
    if len(factors) == 2 and x in factors:
        found = view.sum_with(factors[1] if factors[0] == x else factors[0])
        if found is None or not near(found[1], 1.0):
            return False
        square = view.product(found[0])
        return near(square.coefficient, CUBIC) and square.factors == (x, x)
    return False
