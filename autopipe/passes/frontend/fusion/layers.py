"""Fusion of elementary operators into Gelu, LayerNormalization and RMSNormalization.

Gelu is x · ½ · (1 + erf(x / √2)), or its approximation by tanh (Hendrycks & Gimpel 2016, section
2). The normalizations are those of Ba et al. (2016) and Zhang & Sennrich (2019).
"""

from __future__ import annotations

import dataclasses
import math

from autopipe.ir.graph import Node
from autopipe.passes.frontend.fusion.view import View, is_near

ROOT_HALF = math.sqrt(0.5)
"""√½, in Gelu's term erf(√½ · x)."""
TANH_SCALE = math.sqrt(2 / math.pi)
"""√(2/π), in approximate Gelu's term tanh(√(2/π) · (x + 0.044715 x³))."""
CUBIC = 0.044715
"""Coefficient of x³ in approximate Gelu's term tanh(√(2/π) · (x + 0.044715 x³))."""


def fuse_gelu(view: View, node: Node) -> tuple[Node, ...] | None:
    """Match ½ · x · (1 + erf(…)) and ½ · x · (1 + tanh(…)), with factors in any order, which end at
    the Mul `node`. Return the Gelu node in its place; None if the pattern does not match.
    """
    coefficient, factors = view.split_factors(node.outputs[0])
    if len(factors) != 2 or not is_near(coefficient, 0.5):
        return None
    for x, gate in (factors, factors[::-1]):
        approximate = _match_gelu_kind(view, gate, x)
        if approximate and view.shape(x) == view.shape(node.outputs[0]):
            return (Node(node.name, "Gelu", (x,), node.outputs, (("approximate", approximate),)),)
    return None


def _match_gelu_kind(view: View, name: str, x: str) -> str:
    """Return Gelu's attribute `approximate` if the value `name` is Gelu's factor: `none` if it is 1
    + erf(x / √2), `tanh` if it is 1 + tanh(√(2/π) · (x + 0.044715 x³)), otherwise "".
    """
    value, one = view.split_addend(name)
    bend = view.producer_of(value, "Erf", "Tanh") if is_near(one, 1.0) else None
    if bend is None:
        return ""
    coefficient, factors = view.split_factors(bend.inputs[0])
    if bend.op == "Erf":
        return "none" if is_near(coefficient, ROOT_HALF) and factors == (x,) else ""
    return "tanh" if is_near(coefficient, TANH_SCALE) and _is_cubic(view, factors, x) else ""


def _is_cubic(view: View, factors: tuple[str, ...], x: str) -> bool:
    """True if the product of the values `factors` is x + 0.044715 x³, or x · (1 + 0.044715 x²)."""
    node = view.producer_of(factors[0], "Add") if len(factors) == 1 else None
    if node is not None and x in node.inputs:
        bend = node.inputs[node.inputs[0] == x]
        one = 1.0
        power = 3
    elif len(factors) == 2 and x in factors:
        (bend, one) = view.split_addend(factors[factors[0] == x])
        power = 2
    else:
        return False
    if not is_near(one, 1.0):
        return False
    coefficient, powers = view.split_factors(bend)
    return is_near(coefficient, CUBIC) and powers == (x,) * power


def fuse_normalization(view: View, node: Node) -> tuple[Node, ...] | None:
    """Match scale · x / √(mean(x²) + ε), which ends at the Mul `node`. Return an RMSNormalization
    of x, or, if x is y − mean(y), a LayerNormalization of y; None if the pattern does not match.
    """
    for scale, normal in (node.inputs, node.inputs[::-1]):
        found = _match_normalized(view, view.skip_casts(normal))
        if found is None:
            continue
        deviation, axis, epsilon = found
        centred = _match_centred(view, deviation, axis)
        op, x = (
            ("RMSNormalization", deviation) if centred is None else ("LayerNormalization", centred)
        )
        x = view.skip_casts(x)
        type_ = view.type_of(x)
        scales = view.type_of(scale)
        is_typed = (
            type_ == dataclasses.replace(view.type_of(node.outputs[0]), name=x)
            and scales.dtype is type_.dtype
        )
        if is_typed and scales.shape == type_.shape[axis:]:
            attributes = (("axis", axis - len(type_.shape)), ("epsilon", epsilon))
            return (Node(node.name, op, (x, scale), node.outputs, attributes),)
    return None


def fuse_normalization_bias(view: View, node: Node) -> tuple[Node, ...] | None:
    """Match LayerNormalization(x) + bias, which ends at the Add `node`. Return a LayerNormalization
    with that bias; None if the pattern does not match, if the LayerNormalization has a bias
    already, or if anything else reads it.
    """
    for normal, bias in (node.inputs, node.inputs[::-1]):
        made = view.producer_of(normal, "LayerNormalization")
        if made is None or len(made.inputs) != 2 or view.readers[normal] != 1:
            continue
        if view.shape(bias) == view.shape(made.inputs[1]) and view.graph.producer(bias) is None:
            return (Node(node.name, made.op, (*made.inputs, bias), node.outputs, made.attributes),)
    return None


def _match_normalized(view: View, name: str) -> tuple[str, int, float] | None:
    """Return (x, first axis, ε) if the value `name` is x / √(mean(x²) + ε) with the mean over the
    first axis and all later ones; otherwise None.
    """
    node = view.producer_of(name, "Mul", "Div")
    if node is None:
        return None
    if node.op == "Div":
        pairs = [(node.inputs[0], _match_root(view, node.inputs[1]))]
    else:
        pairs = [(x, _match_inverse_root(view, y)) for x, y in (node.inputs, node.inputs[::-1])]
    for x, square in pairs:
        value, epsilon = view.split_addend(square)
        mean = view.producer_of(value, "ReduceMean")
        if mean is not None and view.split_factors(mean.inputs[0]) == (1.0, (x, x)):
            axis = _first_mean_axis(view, mean)
            if axis is not None:
                return x, axis, epsilon
    return None


def _match_root(view: View, name: str) -> str:
    """Return the name of v if the value `name` is √v, otherwise ""."""
    root = view.producer_of(name, "Sqrt")
    return root.inputs[0] if root is not None else ""


def _match_inverse_root(view: View, name: str) -> str:
    """Return the name of v if the value `name` is 1 / √v, otherwise ""."""
    node = view.producer_of(name, "Reciprocal", "Div", "Pow")
    if node is None or (node.op == "Div" and view.scalar(node.inputs[0]) != 1.0):
        return ""
    if node.op == "Pow":
        return node.inputs[0] if view.scalar(node.inputs[1]) == -0.5 else ""
    return _match_root(view, node.inputs[-1])


def _match_centred(view: View, name: str, axis: int) -> str | None:
    """Return the name of x if the value `name` is x − mean(x), with the mean over `axis` and all
    later axes; otherwise None.
    """
    node = view.producer_of(name, "Sub")
    mean = view.producer_of(node.inputs[1], "ReduceMean") if node is not None else None
    if (
        node is None
        or mean is None
        or mean.inputs[0] != node.inputs[0]
        or _first_mean_axis(view, mean) != axis
    ):
        return None
    return node.inputs[0]


def _first_mean_axis(view: View, node: Node) -> int | None:
    """Return the first axis over which the ReduceMean `node` averages, if it averages over that
    axis and all later ones, and keeps dimensions; otherwise None.
    """
    rank = len(view.shape(node.inputs[0]))
    stated = view.array(node.inputs[1]) if len(node.inputs) > 1 else None
    axes = tuple(int(axis) for axis in stated) if stated is not None else node.integers("axes")
    found = sorted(axis % rank for axis in axes) if rank else []
    if not found or found != list(range(found[0], rank)) or not node.integer("keepdims", 1):
        return None
    return found[0]
