"""Attention spelt out: softmax(scale · Q Kᵀ + mask) V (Vaswani et al. 2017, section 3.2.1).

As both of torch's exporters write it: scale on the scores or its root on each side, NaN rows of a fully masked softmax
replaced by zeros, key-value heads repeated for the query heads that share them (Ainslie et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopipe.ir.graph import Attribute, Node, Value
from autopipe.passes.frontend.fuse.view import Replacement, View

SOFTMAX_SINCE = 13
"""The opset from which Softmax's default axis is the last."""
HIDDEN = -1e4
"""Below this an added mask hides a key as far as softmax is concerned, in half precision too."""
NOTHING = Replacement(())


@dataclass(frozen=True, slots=True)
class _Scores:
    """Argument of a softmax."""

    query: str
    key_transposed: str
    scale: float
    masks: tuple[str, ...]
    """Masks added to the scores."""
    causal: bool


def attention(view: View, node: Node) -> Replacement | None:
    """A product of softmaxed scores and values, four-dimensional: samples, heads, positions, features."""
    weights, value = node.inputs
    shapes = [view.type_of(name).shape for name in (weights, value, node.outputs[0])]
    if any(len(shape) != 4 for shape in shapes) or shapes[0][:2] != shapes[1][:2]:
        return None
    softmax = view.made_by(_unguarded(view, view.uncast(weights)), "Softmax")
    if softmax is None or softmax.integer("axis", -1 if view.graph.opset >= SOFTMAX_SINCE else 1) not in (-1, 3):
        return None
    scores = _scores(view, view.uncast(softmax.inputs[0]))
    if scores is None or view.type_of(scores.query).dtype is not view.type_of(value).dtype:
        return None
    key, key_scale, turned = _keys(view, scores, value, node)
    shared = [None if turned.nodes else _shared_head(view, name) for name in (key, value)]
    if shared[0] is not None and shared[1] is not None:
        key, value = shared[0], shared[1]
    masks = _sum(view, scores.masks, node)
    attributes: list[tuple[str, Attribute]] = [("scale", scores.scale * key_scale)]
    if scores.causal:
        attributes.append(("is_causal", 1))
    mask = masks.values[-1].name if masks.values else next(iter(scores.masks), "")
    operands = (scores.query, key, value, *([mask] if mask else []))
    fused = Node(node.name, "Attention", operands, node.outputs, tuple(sorted(attributes)))
    return Replacement((*turned.nodes, *masks.nodes, fused), (*turned.values, *masks.values))


def _keys(view: View, scores: _Scores, value: str, node: Node) -> tuple[str, float, Replacement]:
    """K with the number it is multiplied by, and the nodes that make it where only Kᵀ is at hand."""
    found = _key(view, scores.key_transposed)
    if found is not None:
        scale, key = view.scaled(found)
        shared = _shared_head(view, key) is not None and _shared_head(view, value) is not None
        if shared or len(view.type_of(key).shape) == 4:
            return key, scale, NOTHING
    type_ = view.type_of(scores.key_transposed)
    samples, heads, features, positions = type_.shape
    made = Value(f"{node.outputs[0]}_key", type_.dtype, (samples, heads, positions, features))
    source, order = scores.key_transposed, (0, 1, 3, 2)
    transpose = view.made_by(source, "Transpose")
    if transpose is not None:
        source, perm = transpose.inputs[0], transpose.integers("perm", (3, 2, 1, 0))
        order = (perm[0], perm[1], perm[3], perm[2])
    turn = Node(f"{node.name}/key", "Transpose", (source,), (made.name,), (("perm", order),))
    return made.name, 1.0, Replacement((turn,), (made,))


def _sum(view: View, masks: tuple[str, ...], node: Node) -> Replacement:
    """Nodes that add up several masks; nothing to do for one or none."""
    nodes: list[Node] = []
    values: list[Value] = []
    for number, mask in enumerate(masks[1:]):
        first = values[-1] if values else view.type_of(masks[0])
        shape = np.broadcast_shapes(first.shape, view.type_of(mask).shape)
        values.append(Value(f"{node.outputs[0]}_mask_{number}", first.dtype, shape))
        nodes.append(Node(f"{node.name}/mask_{number}", "Add", (first.name, mask), (values[-1].name,)))
    return Replacement(tuple(nodes), tuple(values))


def _unguarded(view: View, name: str) -> str:
    """The softmax within Where(IsNaN(softmax), 0, softmax)."""
    node = view.made_by(name, "Where")
    if node is None:
        return name
    test = view.made_by(node.inputs[0], "IsNaN")
    if test is None or test.inputs[0] != node.inputs[2] or view.scalar(node.inputs[1]) != 0.0:
        return name
    return node.inputs[2]


def _scores(view: View, name: str) -> _Scores | None:
    """Match scale · Q Kᵀ + masks before a softmax; recognised where their numbers are known."""
    masks: list[str] = []
    chosen = _chosen(view, name)
    name = chosen or name
    while (found := _product(view, name)) is None:
        node = view.made_by(name, "Add")
        if node is None:
            return None
        left, right = (view.uncast(each) for each in node.inputs)
        is_left = _product(view, left) is not None or view.made_by(left, "Add") is not None
        name = left if is_left else right
        masks.append(node.inputs[1] if is_left else node.inputs[0])
    scale, product = found
    query_scale, query = view.scaled(product.inputs[0])
    key_scale, key = view.scaled(product.inputs[1])
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
    return _Scores(query, key, scale * query_scale * key_scale, () if causal else tuple(telling), causal)


def _chosen(view: View, name: str) -> str | None:
    """The scores within Where(causal, scores, number that hides)."""
    node = view.made_by(name, "Where")
    hidden = view.scalar(node.inputs[2]) if node is not None else None
    if node is None or hidden is None or hidden > HIDDEN:
        return None
    if view.type_of(node.inputs[1]).shape != view.type_of(name).shape:
        return None
    return node.inputs[1] if _mask_kind(view, node.inputs[0]) == "causal" else None


def _product(view: View, name: str) -> tuple[float, Node] | None:
    """Coefficient and product of a value that is scale · Q Kᵀ."""
    scale, inner = view.scaled(name)
    node = view.made_by(inner, "MatMul")
    return None if node is None else (scale, node)


def _mask_kind(view: View, mask: str) -> str:
    """`blank` for a mask of zeros, `causal` for one that shows each position itself and those before it, else `other`.

    A mask is added, or chooses by true what is shown.

    Layers share their masks, and a mask of a long sequence is large: each is looked at once.
    """
    if mask not in view.masks:
        numbers = view.numbers(mask)
        if numbers is not None and numbers.dtype == np.bool_:
            numbers = np.where(numbers, np.float32(0), np.float32(-np.inf))
        blank = numbers is not None and not numbers.any()
        view.masks[mask] = "blank" if blank else "causal" if _is_causal(numbers) else "other"
    return view.masks[mask]


def _is_causal(mask: np.ndarray | None) -> bool:
    """True if a mask shows each position itself and those before it, and hides all others."""
    if mask is None or mask.ndim < 2 or mask.shape[-1] != mask.shape[-2] or mask.dtype.kind not in "fV":
        return False
    square = mask.reshape(-1, *mask.shape[-2:]).astype(np.float32, copy=False)
    shown = np.tri(mask.shape[-1], dtype=bool)
    hidden = square <= HIDDEN
    return bool(np.all((square == 0) == shown) and np.all(hidden != shown))


def _key(view: View, transposed: str) -> str | None:
    """K where a value is Kᵀ and K is at hand, perhaps not yet merged from (samples, heads, sharers, …)."""
    node = view.made_by(transposed, "Transpose")
    if node is not None:
        return node.inputs[0] if node.integers("perm") == (0, 1, 3, 2) else None
    merged = view.made_by(transposed, "Reshape")
    turned = view.made_by(merged.inputs[0], "Transpose") if merged is not None else None
    flat = view.made_by(turned.inputs[0], "Reshape") if turned is not None else None
    if turned is None or flat is None or turned.integers("perm") != (0, 2, 1):
        return None
    samples, heads, features, positions = view.type_of(transposed).shape
    if view.type_of(flat.outputs[0]).shape != (samples * heads, positions, features):
        return None
    source = view.type_of(flat.inputs[0]).shape
    regrouped = len(source) == 5 and (source[0], source[1] * source[2], *source[3:]) == (
        samples, heads, positions, features
    )  # fmt: skip
    return flat.inputs[0] if regrouped or source == (samples, heads, positions, features) else None


def _shared_head(view: View, name: str) -> str | None:
    """The keys or values of fewer heads that were repeated, head by head, to make `name`."""
    if len(view.type_of(name).shape) == 4:
        merged = view.made_by(name, "Reshape")
        if merged is None:
            return None
        samples, heads, *rest = view.type_of(name).shape
        name = merged.inputs[0]
        repeated = view.type_of(name).shape
        if len(repeated) != 5 or (repeated[0], repeated[1] * repeated[2], *repeated[3:]) != (samples, heads, *rest):
            return None
    expand = view.made_by(name, "Expand")
    apart = view.made_by(expand.inputs[0], "Unsqueeze", "Reshape") if expand is not None else None
    if expand is None or apart is None:
        return None
    samples, groups, _, *rest = view.type_of(name).shape
    middle, source = view.type_of(expand.inputs[0]).shape, view.type_of(apart.inputs[0]).shape
    if middle == (samples, groups, 1, *rest) and source == (samples, groups, *rest):
        return apart.inputs[0]
    return None
