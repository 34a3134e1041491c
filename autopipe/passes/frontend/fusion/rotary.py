"""Rotary positions (Su et al., "RoFormer", 2021) as exporters write them: x · cos + turned x · sin,
or both results of each pair; of all numbers of a head or of the first ones, pairs half a head apart
or neighbours.
"""

from __future__ import annotations

from autopipe.ir.graph import Attribute, Node
from autopipe.passes.frontend.fusion.view import View

Angles = tuple[str, str]
"""Cosines and sines."""


def summed(view: View, node: Node) -> tuple[Node, ...] | None:
    """x · cos + turned x · sin, where a pair (a, b) is turned into (−b, a)."""
    products = [view.made_by(each, "Mul") for each in node.inputs]
    if products[0] is None or products[1] is None:
        return None
    for straight, crossed in ((products[0], products[1]), (products[1], products[0])):
        for turned, sines in (crossed.inputs, crossed.inputs[::-1]):
            x, interleaved = _source(view, turned)
            if x and x in straight.inputs:
                cosines = straight.inputs[straight.inputs[0] == x]
                attributes = ("interleaved",) if interleaved else ()
                return _rotary(view, node, x, (cosines, sines), attributes, view.shape(x)[-1])
    return None


def joined(view: View, node: Node) -> tuple[Node, ...] | None:
    """The halves of a turned head, its pairs neighbours before or not, or a part that is turned and
    the rest.
    """
    if len(node.inputs) != 2 or node.integer("axis") not in (
        -1,
        len(view.shape(node.outputs[0])) - 1,
    ):
        return None
    first, second = node.inputs
    x, angles, interleaved = _results(view, first, second)
    if x:
        attributes = ("interleaved", "apart") if interleaved else ()
        return _rotary(view, node, x, angles, attributes, view.shape(x)[-1] // 2)
    turned = view.writers.get(first)
    if (
        turned is None
        or (turned.op, turned.domain) != ("Rotary", "autopipe")
        or view.readers[first] != 1
    ):
        return None
    (x, places) = view.taken(turned.inputs[0])
    (other, rest) = view.taken(second)
    width = len(places)
    extent = view.shape(x)[-1]
    if turned.integer("rotary_embedding_dim") or x != other or x == second:
        return None
    if (places, rest) != (range(width), range(width, extent)) or view.shape(
        node.outputs[0]
    ) != view.shape(x):
        return None
    own = (*turned.attributes, ("rotary_embedding_dim", width))
    return (Node(node.name, "Rotary", (x, *turned.inputs[1:]), node.outputs, own, "autopipe"),)


def stacked(view: View, node: Node) -> tuple[Node, ...] | None:
    """The results of neighbours, put side by side again."""
    pair = _side_by_side(view, node.outputs[0])
    x, angles, interleaved = _results(view, *pair) if pair else ("", ("", ""), False)
    return (
        _rotary(view, node, x, angles, ("interleaved",), view.shape(x)[-1] // 2)
        if x and interleaved
        else None
    )


def _rotary(
    view: View, node: Node, x: str, angles: Angles, flags: tuple[str, ...], count: int
) -> tuple[Node, ...] | None:
    """A node that turns all of x by `count` angles a head."""
    result = view.type_of(node.outputs[0])
    types = {view.type_of(each).dtype for each in (x, *angles)}
    if (
        view.shape(x) != result.shape
        or types != {result.dtype}
        or any(view.shape(a)[-1:] != (count,) for a in angles)
    ):
        return None
    attributes: tuple[tuple[str, Attribute], ...] = tuple((flag, 1) for flag in flags)
    return (Node(node.name, "Rotary", (x, *angles), node.outputs, attributes, "autopipe"),)


def _source(view: View, turned: str) -> tuple[str, bool]:
    """x where a value is (−b, a) for each pair (a, b) of x, and True where pairs are neighbours; ""
    for others.
    """
    join = view.made_by(turned, "Concat")
    is_joined = join is not None and join.integer("axis") in (-1, len(view.shape(turned)) - 1)
    pair = join.inputs if join is not None and is_joined else _side_by_side(view, turned)
    negated = view.made_by(pair[0], "Neg") if len(pair) == 2 else None
    x, interleaved = view.halves(pair[1], negated.inputs[0]) if negated is not None else ("", False)
    return (x, interleaved) if interleaved != is_joined else ("", False)


def _side_by_side(view: View, name: str) -> tuple[str, ...]:
    """The two values whose numbers stand in turn along the last axis of a value; () for any
    other.
    """
    path = view.path(name, "Reshape", "Concat")
    if not path or len(path[1].inputs) != 2:
        return ()
    wide = view.shape(path[1].outputs[0])
    shape = view.shape(name)
    parts = [view.made_by(each, "Unsqueeze", "Reshape") for each in path[1].inputs]
    found = tuple(each.inputs[0] for each in parts if each is not None)
    half = (*shape[:-1], shape[-1] // 2) if shape else ()
    fits = wide == (*half, 2) and path[1].integer("axis") in (-1, len(half)) and len(found) == 2
    return found if fits and all(view.shape(each) == half for each in found) else ()


def _results(view: View, first: str, second: str) -> tuple[str, Angles, bool]:
    """x and the angles of which a · cos − b · sin and b · cos + a · sin are, and True where (a, b)
    are neighbours.
    """
    minus = view.made_by(first, "Sub")
    plus = view.made_by(second, "Add")
    products = [
        view.made_by(each, "Mul")
        for node in (minus, plus)
        if node is not None
        for each in node.inputs
    ]
    if len(products) == 4:
        left, right, *others = (
            set(each.inputs) if each is not None else set[str]() for each in products
        )
        for third, last in (others, others[::-1]):
            # left a · c, right b · s, third b · c, last a · s: each factor is in two products.
            shared = [left & last, right & third, left & third, right & last]
            if all(len(each) == 1 for each in shared):
                a, b, cosines, sines = (next(iter(each)) for each in shared)
                x, interleaved = view.halves(a, b)
                if x and view.shape(a) == view.shape(first):
                    return x, (cosines, sines), interleaved
    return "", ("", ""), False
