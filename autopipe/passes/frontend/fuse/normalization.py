"""LayerNormalization and RMSNormalization spelt out (Ba et al. 2016; Zhang & Sennrich 2019)."""

from __future__ import annotations

import dataclasses

from autopipe.ir.graph import Node
from autopipe.passes.frontend.fuse.view import Replacement, View


def normalization(view: View, node: Node) -> Replacement | None:
    """A product of a scale and x / √(mean x² + ε), x less its mean for LayerNormalization."""
    for scale, normal in (node.inputs, node.inputs[::-1]):
        found = _normal(view, view.uncast(normal))
        if found is None:
            continue
        deviation, axis, epsilon = found
        source = view.uncast(deviation)
        centred = _centred(view, deviation, axis)
        result, scales = view.type_of(node.outputs[0]), view.type_of(scale)
        for x, op in ((source, "RMSNormalization"), (centred and view.uncast(centred), "LayerNormalization")):
            if x is None or (op == "RMSNormalization") != (centred is None):
                continue
            type_ = view.type_of(x)
            if type_ != dataclasses.replace(result, name=type_.name) or scales.dtype != type_.dtype:
                continue
            if scales.shape == type_.shape[axis:]:
                attributes = (("axis", axis - len(type_.shape)), ("epsilon", epsilon))
                return Replacement((Node(node.name, op, (x, scale), node.outputs, attributes),))
    return None


def offset(view: View, node: Node) -> Replacement | None:
    """A LayerNormalization without offset, and the offset added to it."""
    for normal, bias in (node.inputs, node.inputs[::-1]):
        made = view.made_by(normal, "LayerNormalization")
        if made is None or len(made.inputs) != 2 or view.readers[normal] != 1:
            continue
        if view.type_of(bias).shape == view.type_of(made.inputs[1]).shape and view.graph.producer(bias) is None:
            return Replacement((Node(node.name, made.op, (*made.inputs, bias), node.outputs, made.attributes),))
    return None


def _normal(view: View, name: str) -> tuple[str, int, float] | None:
    """x, first axis and ε of a value that is x / √(mean x² + ε)."""
    node = view.made_by(name, "Mul", "Div")
    if node is None:
        return None
    if node.op == "Div":
        root = view.made_by(node.inputs[1], "Sqrt")
        pairs = [(node.inputs[0], root.inputs[0])] if root is not None else []
    else:
        inverse = [(x, _inverse_root(view, y)) for x, y in (node.inputs, node.inputs[::-1])]
        pairs = [(x, inside) for x, inside in inverse if inside is not None]
    for x, inside in pairs:
        found = view.sum_with(inside)
        if found is None:
            continue
        axis = _mean_square(view, found[0], x)
        if axis is not None:
            return x, axis, found[1]
    return None


def _inverse_root(view: View, name: str) -> str | None:
    """v where a value is 1 / √v."""
    node = view.made_by(name, "Reciprocal", "Div", "Pow")
    if node is None:
        return None
    if node.op == "Pow":
        return node.inputs[0] if view.scalar(node.inputs[1]) == -0.5 else None
    if node.op == "Div" and view.scalar(node.inputs[0]) != 1.0:
        return None
    root = view.made_by(node.inputs[-1], "Sqrt")
    return root.inputs[0] if root is not None else None


def _mean_square(view: View, name: str, x: str) -> int | None:
    """The first axis over which a value is the mean of x²."""
    node = view.made_by(name, "ReduceMean")
    if node is None:
        return None
    square = view.product(node.inputs[0])
    if square.coefficient != 1.0 or square.factors != (x, x):
        return None
    return _trailing(view, node)


def _centred(view: View, name: str, axis: int) -> str | None:
    """x where a value is x − mean x over the dimensions from `axis` on."""
    node = view.made_by(name, "Sub")
    mean = view.made_by(node.inputs[1], "ReduceMean") if node is not None else None
    if node is None or mean is None or mean.inputs[0] != node.inputs[0] or _trailing(view, mean) != axis:
        return None
    return node.inputs[0]


def _trailing(view: View, node: Node) -> int | None:
    """The first axis of a ReduceMean over all dimensions from there on that keeps them."""
    rank = len(view.type_of(node.inputs[0]).shape)
    stated = view.numbers(node.inputs[1]) if len(node.inputs) > 1 else None
    axes = tuple(int(axis) for axis in stated) if stated is not None else node.integers("axes")
    found = sorted(axis % rank for axis in axes) if rank else []
    if not found or found != list(range(found[0], rank)) or not node.integer("keepdims", 1):
        return None
    return found[0]
