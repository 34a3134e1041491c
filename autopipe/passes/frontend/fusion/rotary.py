"""Fusion of rotary position embeddings (Su et al., "RoFormer", 2021), as exporters write them.

Each pair (a, b) of a head's features is rotated to (a · cos − b · sin, b · cos + a · sin). Exports
contain x · cos + rotated(x) · sin with rotated pairs (−b, a), or compute both results separately
and join them. The features of a pair are half a head apart, or they are neighbours (`interleaved`).
Only the first features of a head may be rotated.
"""

from __future__ import annotations

from autopipe.ir.graph import Attribute, Node
from autopipe.passes.frontend.fusion.view import View

Angles = tuple[str, str]
"""Names of the cosines and of the sines."""


def fuse_rotary_sum(view: View, node: Node) -> tuple[Node, ...] | None:
    """Match x · cos + rotated(x) · sin, which ends at the Add `node`; rotated(x) replaces each pair
    (a, b) of features by (−b, a). Return the Rotary node in its place; None if the pattern does not
    match.
    """
    products = [view.producer_of(each, "Mul") for each in node.inputs]
    if products[0] is None or products[1] is None:
        return None
    for straight, crossed in ((products[0], products[1]), (products[1], products[0])):
        for rotated, sines in (crossed.inputs, crossed.inputs[::-1]):
            x, interleaved = _match_quarter_turn(view, rotated)
            if x and x in straight.inputs:
                cosines = straight.inputs[straight.inputs[0] == x]
                attributes = ("interleaved",) if interleaved else ()
                return _make_rotary(view, node, x, (cosines, sines), attributes, view.shape(x)[-1])
    return None


def fuse_rotary_concat(view: View, node: Node) -> tuple[Node, ...] | None:
    """Match a rotary embedding that ends at the Concat `node`: of both results of all pairs of
    features, or of rotated first features and the other features of a head. Return the Rotary node
    in its place; None if the pattern does not match.
    """
    if len(node.inputs) != 2 or node.integer("axis") not in (
        -1,
        len(view.shape(node.outputs[0])) - 1,
    ):
        return None
    first, second = node.inputs
    x, angles, interleaved = _match_rotated_pair(view, first, second)
    if x:
        attributes = ("interleaved", "apart") if interleaved else ()
        return _make_rotary(view, node, x, angles, attributes, view.shape(x)[-1] // 2)
    rotated = view.writers.get(first)
    if (
        rotated is None
        or (rotated.op, rotated.domain) != ("Rotary", "autopipe")
        or view.readers[first] != 1
    ):
        return None
    (x, indices) = view.slice_source(rotated.inputs[0])
    (other, rest) = view.slice_source(second)
    width = len(indices)
    size = view.shape(x)[-1]
    if rotated.integer("rotary_embedding_dim") or x != other or x == second:
        return None
    if (indices, rest) != (range(width), range(width, size)) or view.shape(
        node.outputs[0]
    ) != view.shape(x):
        return None
    own = (*rotated.attributes, ("rotary_embedding_dim", width))
    return (Node(node.name, "Rotary", (x, *rotated.inputs[1:]), node.outputs, own, "autopipe"),)


def fuse_rotary_reshape(view: View, node: Node) -> tuple[Node, ...] | None:
    """Match a rotary embedding that ends at the Reshape `node`, which interleaves both results of
    neighbouring features. Return the Rotary node in its place; None if the pattern does not match.
    """
    pair = _match_interleaved(view, node.outputs[0])
    x, angles, interleaved = _match_rotated_pair(view, *pair) if pair else ("", ("", ""), False)
    return (
        _make_rotary(view, node, x, angles, ("interleaved",), view.shape(x)[-1] // 2)
        if x and interleaved
        else None
    )


def _make_rotary(
    view: View, node: Node, x: str, angles: Angles, flags: tuple[str, ...], count: int
) -> tuple[Node, ...] | None:
    """Return a Rotary node that rotates all features of x by `angles`, in place of `node`; None if
    shapes or types do not fit. `flags` are the attributes that are 1; `count` is the expected last
    size of cosines and sines.
    """
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


def _match_quarter_turn(view: View, rotated: str) -> tuple[str, bool]:
    """Return (x, interleaved) if the value `rotated` has (−b, a), a rotation by a quarter turn, for
    each pair (a, b) of features of x; otherwise ("", False). `interleaved` is true if the features
    of a pair are neighbours.
    """
    join = view.producer_of(rotated, "Concat")
    is_joined = join is not None and join.integer("axis") in (-1, len(view.shape(rotated)) - 1)
    pair = join.inputs if join is not None and is_joined else _match_interleaved(view, rotated)
    negated = view.producer_of(pair[0], "Neg") if len(pair) == 2 else None
    x, interleaved = (
        view.halved_source(pair[1], negated.inputs[0]) if negated is not None else ("", False)
    )
    return (x, interleaved) if interleaved != is_joined else ("", False)


def _match_interleaved(view: View, name: str) -> tuple[str, ...]:
    """Return the names of the two values whose elements alternate along the last axis of the value
    `name`; () if there are no such values.
    """
    path = view.producer_chain(name, "Reshape", "Concat")
    if not path or len(path[1].inputs) != 2:
        return ()
    wide = view.shape(path[1].outputs[0])
    shape = view.shape(name)
    parts = [view.producer_of(each, "Unsqueeze", "Reshape") for each in path[1].inputs]
    found = tuple(each.inputs[0] for each in parts if each is not None)
    half = (*shape[:-1], shape[-1] // 2) if shape else ()
    fits = wide == (*half, 2) and path[1].integer("axis") in (-1, len(half)) and len(found) == 2
    return found if fits and all(view.shape(each) == half for each in found) else ()


def _match_rotated_pair(view: View, first: str, second: str) -> tuple[str, Angles, bool]:
    """Return (x, angles, interleaved) if the values `first` and `second` are a · cos − b · sin and
    b · cos + a · sin for the pairs (a, b) of features of x; x is "" otherwise. `interleaved` is
    true if the features of a pair are neighbours.
    """
    minus = view.producer_of(first, "Sub")
    plus = view.producer_of(second, "Add")
    products = [
        view.producer_of(each, "Mul")
        for node in (minus, plus)
        if node is not None
        for each in node.inputs
    ]
    if len(products) == 4:
        left, right, *others = (
            set(each.inputs) if each is not None else set[str]() for each in products
        )
        for third, last in (others, others[::-1]):
            # The products are left = a · cos, right = b · sin, third = b · cos, last = a · sin.
            # Each of a, b, cos and sin is therefore the operand that two of the products share.
            shared = [left & last, right & third, left & third, right & last]
            if all(len(each) == 1 for each in shared):
                a, b, cosines, sines = (next(iter(each)) for each in shared)
                x, interleaved = view.halved_source(a, b)
                if x and view.shape(a) == view.shape(first):
                    return x, (cosines, sines), interleaved
    return "", ("", ""), False
