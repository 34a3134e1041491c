"""Attention, softmax(scale · Q Kᵀ + mask) V (Vaswani et al. 2017, section 3.2.1), as torch's
exporters write it.

Scale on the scores or its root on each side, scores capped by tanh (Gemma 2, arXiv:2408.00118,
section 2), masks that are added or that choose, NaN rows of a fully masked softmax replaced by
zeros, key-value heads repeated for the query heads that share them (Ainslie et al. 2023), samples
and heads in one dimension or in more than two, a score of each head that takes part in the softmax
and has no value (Xiao et al. 2023).
"""

from __future__ import annotations

import math

import numpy as np

from autopipe.ir.graph import Attribute, Node
from autopipe.passes.frontend.fusion.scores import (
    Mask,
    Scores,
    Shape,
    keeps_rows,
    kind_of_mask,
    parts,
    scores_of,
)
from autopipe.passes.frontend.fusion.view import View

SINKS = 7
"""The operand of Attention that has a score for each head: see `ir.ops.attention`."""
SOFTMAX_SINCE = 13
"""The opset from which Softmax's default axis is the last."""


def attention(view: View, node: Node) -> tuple[Node, ...] | None:
    """A product of softmaxed scores and values, or of values and them, both transposed."""
    weights, value = node.inputs
    softmax = _softmax(view, weights)
    turned = False
    if (
        softmax is None
        and (transpose := view.made_by(value, "Transpose")) is not None
        and _swaps(transpose)
    ):
        weights, value, turned = transpose.inputs[0], weights, True
        softmax = _softmax(view, weights)
    if softmax is None or not _multiplies(view.shape(weights), view.shape(value), turned):
        return None
    name, sinks = _scores_and_sinks(view, softmax, view.shape(weights)[-1])
    scores = scores_of(view, name) if name else None
    if scores is None or view.type_of(scores.query).dtype is not view.type_of(value).dtype:
        return None
    lead = _lead(view, scores)
    return None if lead is None else _Writer(view, node, lead).written(scores, value, turned, sinks)


def _multiplies(weights: Shape, value: Shape, turned: bool) -> bool:
    """True if values have the samples and heads of probabilities, or one head for all."""
    lead = weights[:-2]
    own = value[:-2]
    return own == lead or (len(lead) == 2 and own == (lead[0], 1) and not turned)


def _softmax(view: View, name: str) -> Node | None:
    """The softmax over the last dimension that makes probabilities, which may have other dimensions
    before it.
    """
    name = view.uncast(name)
    node = view.made_by(name, "Reshape", "Squeeze", "Unsqueeze")
    if node is not None and keeps_rows(view, node):
        name = view.uncast(node.inputs[0])
    source, places = view.taken(name)
    name = view.uncast(source) if places == range(view.shape(source)[-1] - 1) else name
    softmax = view.made_by(_unguarded(view, name), "Softmax")
    rank = len(view.shape(name))
    axis = -1 if view.graph.opset >= SOFTMAX_SINCE else 1
    if softmax is None or rank < 3 or softmax.integer("axis", axis) not in (-1, rank - 1):
        return None
    return softmax


def _scores_and_sinks(view: View, softmax: Node, keys: int) -> tuple[str, str]:
    """The scores of `keys` that a softmax reads, less their largest or not, and a column behind
    them, "" where there is none; no scores where it reads others.
    """
    name = view.uncast(softmax.inputs[0])
    shifted = view.made_by(name, "Sub")
    largest = view.made_by(shifted.inputs[1], "ReduceMax") if shifted is not None else None
    if shifted is not None and largest is not None and largest.inputs[0] == shifted.inputs[0]:
        is_of_rows = view.shape(largest.outputs[0]) == (*view.shape(name)[:-1], 1)
        name = shifted.inputs[0] if is_of_rows else name
    if view.shape(name)[-1] == keys:
        return name, ""
    join = view.made_by(name, "Concat")
    if join is None or [view.shape(each)[-1] for each in join.inputs] != [keys, 1]:
        return "", ""
    return join.inputs[0], join.inputs[1]


def _unguarded(view: View, name: str) -> str:
    """The softmax within Where(IsNaN(softmax), 0, softmax)."""
    node = view.made_by(name, "Where")
    test = view.made_by(node.inputs[0], "IsNaN") if node is not None else None
    if (
        node is None
        or test is None
        or test.inputs[0] != node.inputs[2]
        or view.scalar(node.inputs[1]) != 0.0
    ):
        return name
    return node.inputs[2]


def _lead(view: View, scores: Scores) -> tuple[int, int] | None:
    """Samples and heads: as scores have them anywhere, or queries before; else the first dimension
    and the others.
    """
    source = view.made_by(scores.query, "Reshape")
    shapes = [*scores.shapes, view.shape(source.inputs[0])] if source is not None else scores.shapes
    lead = scores.shapes[-1][:-2]
    tail = view.shape(scores.query)[-2:]
    for shape in shapes:
        if len(shape) == 4 and (shape[-2:] == tail or shape in scores.shapes):
            return shape[0], shape[1]
    found = lead[0], math.prod(lead[1:])
    return found if all(parts(shape[:-2], found) is not None for shape in scores.shapes) else None


def _swaps(transpose: Node) -> bool:
    """True if a Transpose exchanges the last two dimensions."""
    perm = transpose.integers("perm")
    return len(perm) > 2 and perm == (*range(len(perm) - 2), len(perm) - 1, len(perm) - 2)


def _may_hide_rows(view: View, mask: Mask) -> bool:
    """Return True if data may hide every key from one query by a number in place of the scores:
    then no gradient flows to the scores of that query, whereas it flows through a mask that is
    added.

    A mask that all queries share hides every key only in a sample without content.
    """
    if mask.low is None or math.isinf(mask.low) or view.known.array(mask.name) is not None:
        return False
    name = mask.name
    while (node := view.made_by(name, "Not", "Cast", "Expand")) is not None:
        name = node.inputs[0]
    return view.shape(name)[-2:-1] not in ((), (1,))


class _Writer:
    """The nodes of one attention: `Attention` on four dimensions, and what its operands are made
    of.
    """

    def __init__(self, view: View, node: Node, lead: tuple[int, int]) -> None:
        self.view = view
        self.node = node
        self.lead = lead
        self.nodes = list[Node]()

    def written(
        self, scores: Scores, value: str, turned: bool, sinks: str
    ) -> tuple[Node, ...] | None:
        view = self.view
        masks = [
            (mask, shown) for mask in scores.masks if (shown := kind_of_mask(view, mask)) != "blank"
        ]
        if any(shown == "other" and _may_hide_rows(view, mask) for mask, shown in masks):
            return None
        causal = masks[0][1] if len(masks) == 1 and masks[0][1] not in ("some", "other") else ""
        value = self.turned(value, "value") if turned else value
        key, key_scale = self.keys(scores.transposed, value)
        value = self.headed(value, "value")
        query = self.headed(scores.query, "query")
        shared = [_shared_head(view, name) for name in (key, value)]
        if shared[0] is not None and shared[1] is not None:
            key = shared[0]
            value = shared[1]
        elif view.shape(key)[:2] != view.shape(value)[:2]:
            return None
        attributes: list[tuple[str, Attribute]] = [("scale", scores.scale * key_scale)]
        if scores.softcap:
            attributes.append(("softcap", scores.softcap))
        operands = [query, key, value]
        if causal:
            attributes.append(("is_causal", 1))
            attributes += [("left_window_size", int(causal))] if causal != "causal" else []
        elif masks:
            added = [self.added(mask) for mask, _ in masks]
            if None in added:
                return None
            operands.append(self.summed([each for each in added if each]))
        if sinks:
            found = self.sinks(sinks)
            if not found:
                return None
            operands += [""] * (SINKS - len(operands)) + [found]
        return self.ended(operands, tuple(sorted(attributes)), turned)

    def ended(
        self, operands: list[str], attributes: tuple[tuple[str, Attribute], ...], turned: bool
    ) -> tuple[Node, ...]:
        """All nodes, the last of which writes what the product wrote."""
        view = self.view
        node = self.node
        result = self.node.outputs[0]
        shape = (*self.lead, view.shape(operands[0])[2], view.shape(operands[2])[3])
        steps = [("Transpose", _swapped(shape))] if turned else []
        if shape[:2] != view.shape(result)[:-2]:
            steps.append(("Reshape", view.shape(result)))
        name = (
            view.add(f"{result}_heads", view.type_of(operands[0]).dtype, shape) if steps else result
        )
        self.nodes.append(Node(node.name, "Attention", tuple(operands), (name,), attributes))
        for number, (operator, made) in enumerate(steps):
            last = number == len(steps) - 1
            name = self.step(operator, name, "result", made, result if last else "")
        return tuple(self.nodes)

    def step(
        self, operator: str, name: str, what: str, shape: Shape, result: str = "", perm: Shape = ()
    ) -> str:
        """The result of a new Reshape, Expand or Transpose (of the last two dimensions, where
        `perm` is not given).
        """
        view = self.view
        node = self.node
        result = result or view.add(f"{node.outputs[0]}_{what}", view.type_of(name).dtype, shape)
        label = f"{node.name}/{what}_{len(self.nodes)}"
        if operator == "Transpose":
            rank = len(shape)
            perm = perm or (*range(rank - 2), rank - 1, rank - 2)
            self.nodes.append(Node(label, operator, (name,), (result,), (("perm", perm),)))
        else:
            self.nodes.append(Node(label, operator, (name, view.shape_constant(shape)), (result,)))
        return result

    def headed(self, name: str, what: str) -> str:
        """A value as samples, heads, positions, features, before it was reshaped where that is how
        it was.
        """
        view = self.view
        shape = self.view.shape(name)
        if len(shape) == 4 and shape[:2] in (self.lead, (self.lead[0], 1)):
            return name
        wanted = (*self.lead, *shape[-2:])
        source = view.made_by(name, "Reshape")
        if source is not None and view.shape(source.inputs[0]) == wanted:
            return source.inputs[0]
        return self.step("Reshape", name, what, wanted)

    def turned(self, name: str, what: str) -> str:
        """A value with the last two dimensions exchanged, as it was before where it was
        transposed.
        """
        view = self.view
        perm = tuple(range(len(self.view.shape(name))))
        shape = _swapped(self.view.shape(name))
        transpose = view.made_by(name, "Transpose")
        if transpose is not None:
            name = transpose.inputs[0]
            perm = transpose.integers("perm", perm[::-1])
        perm = (*perm[:-2], perm[-1], perm[-2])
        return (
            name
            if perm == tuple(range(len(perm)))
            else self.step("Transpose", name, what, shape, perm=perm)
        )

    def keys(self, transposed: str, value: str) -> tuple[str, float]:
        """K, and the number it is multiplied by."""
        view = self.view
        found = _key(view, transposed)
        if found is not None:
            scale, key = view.scaled(found)
            shared = _shared_head(view, key) is not None and _shared_head(view, value) is not None
            if shared or (
                len(view.shape(key)) == 4 and view.shape(key)[:2] in (self.lead, (self.lead[0], 1))
            ):
                return key, scale
        if view.made_by(transposed, "Reshape") is not None:
            return self.turned(self.headed(transposed, "key"), "key"), 1.0
        scale, key = view.scaled(self.turned(transposed, "key"))
        return self.headed(key, "key"), scale

    def added(self, mask: Mask) -> str | None:
        """A mask as it is added to scores of four dimensions; None where it does not go with
        samples and heads.
        """
        view = self.view
        name = mask.name
        if mask.low is not None:
            dtype = view.type_of(self.node.outputs[0]).dtype
            ends = [view.number_constant(each, dtype) for each in (0.0, mask.low)]
            name = self.made(
                "Where", (name, *(ends if mask.shown else ends[::-1])), view.shape(name), "mask"
            )
        elif mask.factor != 1.0:
            factor = view.number_constant(mask.factor, view.type_of(name).dtype)
            name = self.made("Mul", (name, factor), view.shape(name), "mask")
        return self.spread(name, mask.scores[:-2])

    def sinks(self, column: str) -> str:
        """The number of each head that a column repeats for all samples and queries; "" where it is
        no such one.
        """
        view = self.view
        name = column
        axis = 1
        heads = self.lead[1]
        if view.shape(column)[:-2] != self.lead:
            return ""
        while axis >= 0 and view.shape(name)[axis : axis + 1] == (heads,):
            shape = view.shape(name)
            if math.prod(shape) == heads:
                made = view.made_by(name, "Reshape", "Unsqueeze")
                name = (
                    made.inputs[0]
                    if made is not None and view.shape(made.inputs[0]) == (heads,)
                    else name
                )
                return (
                    name
                    if view.shape(name) == (heads,)
                    else self.step("Reshape", name, "sinks", (heads,))
                )
            node = view.made_by(name, "Expand", "Transpose", "Gather")
            if node is None:
                break
            source = view.shape(node.inputs[0])
            if node.op == "Transpose":
                axis = node.integers("perm", tuple(reversed(range(len(shape)))))[axis]
            else:
                axis -= len(shape) - len(source)
                if node.op == "Gather" and (axis < 1 or node.integer("axis") or source[0] != 1):
                    break  # Else it repeats the only row.
            name = node.inputs[0]
        return ""

    def made(self, operator: str, operands: tuple[str, ...], shape: Shape, what: str) -> str:
        """The result of a new node, of the type of its last operand."""
        result = self.view.add(
            f"{self.node.outputs[0]}_{what}", self.view.type_of(operands[-1]).dtype, shape
        )
        self.nodes.append(
            Node(f"{self.node.name}/{what}_{len(self.nodes)}", operator, operands, (result,))
        )
        return result

    def spread(self, name: str, scores: Shape) -> str | None:
        """A mask of scores that have these dimensions before the last two, as one of samples and
        heads.
        """
        shape = self.view.shape(name)
        own = (1,) * (len(scores) + 2 - len(shape)) + shape[:-2]
        count = parts(scores, self.lead)
        if scores == self.lead or set(own) <= {1}:
            return (
                name if len(shape) <= 4 else self.step("Reshape", name, "mask", (1, 1, *shape[-2:]))
            )
        if own == scores:
            return self.headed_mask(name, (*self.lead, *shape[-2:]))
        if count is None:
            return None
        groups = [(own[:count], scores[:count]), (own[count:], scores[count:])]
        full = [group if set(group) <= {1} else whole for group, whole in groups]
        whole = (*full[0], *full[1])
        if whole != own:
            name = self.step("Expand", name, "mask", (*whole, *shape[-2:]))
        return self.headed_mask(name, (math.prod(full[0]), math.prod(full[1]), *shape[-2:]))

    def headed_mask(self, name: str, wanted: Shape) -> str:
        source = self.view.made_by(name, "Reshape")
        if source is not None and self.view.shape(source.inputs[0]) == wanted:
            return source.inputs[0]
        return self.step("Reshape", name, "mask", wanted)

    def summed(self, masks: list[str]) -> str:
        """The sum of masks."""
        total = masks[0]
        for mask in masks[1:]:
            shape = np.broadcast_shapes(self.view.shape(total), self.view.shape(mask))
            total = self.made("Add", (total, mask), shape, "mask")
        return total


def _swapped(shape: Shape) -> Shape:
    return (*shape[:-2], shape[-1], shape[-2])


def _key(view: View, transposed: str) -> str | None:
    """K where a value of four dimensions is Kᵀ and K is at hand, perhaps not yet merged from
    (samples, heads, sharers, …).
    """
    node = view.made_by(transposed, "Transpose")
    if node is not None:
        return node.inputs[0] if node.integers("perm") == (0, 1, 3, 2) else None
    path = view.path(transposed, "Reshape", "Transpose", "Reshape")
    if not path or path[1].integers("perm") != (0, 2, 1) or len(view.shape(transposed)) != 4:
        return None
    samples, heads, features, positions = view.shape(transposed)
    if view.shape(path[1].inputs[0]) != (samples * heads, positions, features):
        return None
    source = view.shape(path[2].inputs[0])
    return (
        path[2].inputs[0]
        if (samples, heads, positions, features) in (source, _merged_heads(source))
        else None
    )


def _merged_heads(shape: Shape) -> Shape:
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
