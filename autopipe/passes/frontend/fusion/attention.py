"""Attention, softmax(scale · Q Kᵀ + mask) V (Vaswani et al. 2017, section 3.2.1), as torch's exporters write it.

Scale on the scores or its root on each side, NaN rows of a fully masked softmax replaced by zeros, key-value heads
repeated for the query heads that share them (Ainslie et al. 2023).
"""

from __future__ import annotations

import math

import numpy as np

from autopipe.ir.graph import Attribute, Node, Value
from autopipe.passes.frontend.fusion.view import View
from autopipe.passes.frontend.tables import HIDDEN

SOFTMAX_SINCE = 13
"""The opset from which Softmax's default axis is the last."""


def attention(view: View, node: Node) -> tuple[Node, ...] | None:
    """A product of softmaxed scores and values, four-dimensional: samples, heads, positions, features."""
    weights, value = node.inputs
    shapes = [view.shape(name) for name in (weights, value, node.outputs[0])]
    if any(len(shape) != 4 for shape in shapes) or shapes[0][:2] != shapes[1][:2]:
        return None
    softmax = view.made_by(_unguarded(view, view.uncast(weights)), "Softmax")
    if softmax is None or softmax.integer("axis", -1 if view.graph.opset >= SOFTMAX_SINCE else 1) not in (-1, 3):
        return None
    scores = _scores(view, view.uncast(softmax.inputs[0]))
    if scores is None or view.type_of(scores[0]).dtype is not view.type_of(value).dtype:
        return None
    query, transposed, product_scale, added, causal = scores
    key, key_scale, turn = _keys(view, transposed, value, node)
    shared = [None if turn else _shared_head(view, name) for name in (key, value)]
    if shared[0] is not None and shared[1] is not None:
        key, value = shared[0], shared[1]
    mask, sums = _summed(view, added, node)
    attributes: list[tuple[str, Attribute]] = [("scale", product_scale * key_scale)]
    if causal:
        attributes.append(("is_causal", 1))
    operands = (query, key, value, *([mask] if mask else []))
    return (*turn, *sums, Node(node.name, "Attention", operands, node.outputs, tuple(sorted(attributes))))


def _keys(view: View, transposed: str, value: str, node: Node) -> tuple[str, float, tuple[Node, ...]]:
    """K with the number it is multiplied by, and the node that makes it where only Kᵀ is at hand."""
    found = _key(view, transposed)
    if found is not None:
        scale, key = view.scaled(found)
        shared = _shared_head(view, key) is not None and _shared_head(view, value) is not None
        if shared or len(view.shape(key)) == 4:
            return key, scale, ()
    type_, key = view.type_of(transposed), f"{node.outputs[0]}_key"
    samples, heads, features, positions = type_.shape
    view.made[key] = Value(key, type_.dtype, (samples, heads, positions, features))
    order = (0, 1, 3, 2)
    transpose = view.made_by(transposed, "Transpose")
    if transpose is not None:
        transposed, perm = transpose.inputs[0], transpose.integers("perm", (3, 2, 1, 0))
        order = (perm[0], perm[1], perm[3], perm[2])
    return key, 1.0, (Node(f"{node.name}/key", "Transpose", (transposed,), (key,), (("perm", order),)),)


def _summed(view: View, masks: tuple[str, ...], node: Node) -> tuple[str, list[Node]]:
    """The sum of several masks, "" where there are none, and the nodes that add them up."""
    total, nodes = next(iter(masks), ""), []
    for number, mask in enumerate(masks[1:]):
        name = f"{node.outputs[0]}_mask_{number}"
        shape = np.broadcast_shapes(view.shape(total), view.shape(mask))
        view.made[name] = Value(name, view.type_of(total).dtype, shape)
        nodes.append(Node(f"{node.name}/mask_{number}", "Add", (total, mask), (name,)))
        total = name
    return total, nodes


def _unguarded(view: View, name: str) -> str:
    """The softmax within Where(IsNaN(softmax), 0, softmax)."""
    node = view.made_by(name, "Where")
    test = view.made_by(node.inputs[0], "IsNaN") if node is not None else None
    if node is None or test is None or test.inputs[0] != node.inputs[2] or view.scalar(node.inputs[1]) != 0.0:
        return name
    return node.inputs[2]


def _scores(view: View, name: str) -> tuple[str, str, float, tuple[str, ...], bool] | None:
    """Q, Kᵀ, scale, masks and whether they are causal of scale · Q Kᵀ + masks before a softmax.

    Masks are recognised where their numbers are known; none are left where they are causal.
    """
    masks: list[str] = []
    chosen = _chosen(view, name)
    name = chosen or name
    while (product := _product(view, name)) is None:
        node = view.made_by(name, "Add")
        if node is None:
            return None
        left, right = (view.uncast(each) for each in node.inputs)
        is_left = _product(view, left) is not None or view.made_by(left, "Add") is not None
        name = left if is_left else right
        masks.append(node.inputs[1] if is_left else node.inputs[0])
    scale, operands = product
    (query_scale, query), (key_scale, key) = map(view.scaled, operands)
    types = [view.type_of(each) for each in (query, key)]
    if any(len(each.shape) != 4 for each in types) or types[0].shape[:2] != types[1].shape[:2]:
        return None
    added = [view.type_of(mask) for mask in masks]
    if any(mask.dtype is not types[0].dtype or len(mask.shape) < 2 for mask in added):
        return None
    telling = [mask for mask in masks if _mask_kind(view, mask) != "blank"]
    if chosen and telling:
        return None
    causal = bool(chosen) or (len(telling) == 1 and _mask_kind(view, telling[0]) == "causal")
    return query, key, scale * query_scale * key_scale, () if causal else tuple(telling), causal


def _chosen(view: View, name: str) -> str | None:
    """The scores within Where(causal, scores, number that hides)."""
    node = view.made_by(name, "Where")
    hidden = view.scalar(node.inputs[2]) if node is not None else None
    if node is None or hidden is None or hidden > HIDDEN or view.shape(node.inputs[1]) != view.shape(name):
        return None
    return node.inputs[1] if _mask_kind(view, node.inputs[0]) == "causal" else None


def _product(view: View, name: str) -> tuple[float, tuple[str, ...]] | None:
    """Coefficient and operands of a value that is scale · Q Kᵀ."""
    scale, inner = view.scaled(name)
    node = view.made_by(inner, "MatMul")
    return None if node is None else (scale, node.inputs)


def _mask_kind(view: View, mask: str) -> str:
    """`blank` for a mask of zeros, `causal` for one that shows each position itself and those before it, else `other`.

    A mask is added, or chooses by true what is shown. Layers share their masks, and a mask of a long sequence is
    large: each is looked at once.
    """
    if mask not in view.masks:
        numbers = view.known.array(mask)
        if numbers is not None and numbers.dtype == np.bool_:
            numbers = np.where(numbers, np.float32(0), np.float32(-np.inf))
        blank = numbers is not None and not numbers.any()
        view.masks[mask] = "blank" if blank else "causal" if _is_causal(numbers) else "other"
    return view.masks[mask]


def _is_causal(mask: np.ndarray | None) -> bool:
    if mask is None or mask.ndim < 2 or mask.shape[-1] != mask.shape[-2] or mask.dtype.kind not in "fV":
        return False
    square = mask.reshape(-1, *mask.shape[-2:]).astype(np.float32, copy=False)
    shown = np.tri(mask.shape[-1], dtype=bool)
    return bool(np.all((square == 0) == shown) and np.all((square <= HIDDEN) != shown))


def _key(view: View, transposed: str) -> str | None:
    """K where a value is Kᵀ and K is at hand, perhaps not yet merged from (samples, heads, sharers, …)."""
    node = view.made_by(transposed, "Transpose")
    if node is not None:
        return node.inputs[0] if node.integers("perm") == (0, 1, 3, 2) else None
    path = view.path(transposed, "Reshape", "Transpose", "Reshape")
    if not path or path[1].integers("perm") != (0, 2, 1):
        return None
    samples, heads, features, positions = view.shape(transposed)
    if view.shape(path[1].inputs[0]) != (samples * heads, positions, features):
        return None
    source = view.shape(path[2].inputs[0])
    return path[2].inputs[0] if (samples, heads, positions, features) in (source, _merged_heads(source)) else None


def _merged_heads(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape (samples, heads, sharers, …) with one dimension of heads · sharers."""
    return (*shape[:1], math.prod(shape[1:3]), *shape[3:])


def _shared_head(view: View, name: str) -> str | None:
    """The keys or values of fewer heads that were repeated, head by head, to make `name`."""
    if len(view.shape(name)) == 4:
        merged = view.made_by(name, "Reshape")
        if merged is None or _merged_heads(view.shape(merged.inputs[0])) != view.shape(name):
            return None
        name = merged.inputs[0]
    path = view.path(name, "Expand", "Unsqueeze|Reshape")
    if not path:
        return None
    samples, groups, _, *rest = view.shape(name)
    middle, source = (view.shape(each.inputs[0]) for each in path)
    is_repeated = middle == (samples, groups, 1, *rest) and source == (samples, groups, *rest)
    return path[1].inputs[0] if is_repeated else None
