"""Fusion of attention, softmax(scale · Q Kᵀ + mask) V (Vaswani et al. 2017, section 3.2.1), as
torch's exporters write it.

Variants that match:

- the scale on the scores, or its root on Q and K;
- scores capped by tanh (Gemma 2, arXiv:2408.00118, section 2);
- masks that are added, and masks that select scores (Where);
- rows of NaN, from a softmax over hidden keys only, replaced by zeros;
- key-value heads repeated for the query heads that share them (Ainslie et al. 2023);
- samples and heads in one dimension, or in more than two;
- an attention sink: one extra score per head that takes part in the softmax and has no value (Xiao
  et al. 2023).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from autopipe.ir.graph import Node
from autopipe.passes.frontend.fusion.scores import (
    Mask,
    Scores,
    Shape,
    changes_only_leading_axes,
    count_sizes_of_samples,
    kind_of_mask,
    match_scores,
)
from autopipe.passes.frontend.fusion.view import View
from autopipe.passes.frontend.rewriter import Rewriter

SINK_OPERAND = 7
"""Index of the operand of operator Attention that has one extra score per head, the attention sink.
"""
SOFTMAX_LAST_AXIS_SINCE = 13
"""First opset in which the default axis of Softmax is the last one."""


def fuse_attention(view: View, node: Node) -> tuple[Node, ...] | None:
    """Match attention that ends at the MatMul `node`: P · V with probabilities P = softmax(scores),
    or the transpose Vᵀ · Pᵀ. Return the nodes in place of `node`; None if the pattern does not
    match.
    """
    weights, value = node.inputs
    is_transposed = False
    softmax = _find_softmax(view, weights)
    transpose = view.producer_of(value, "Transpose")
    if softmax is None and transpose is not None and _swaps_last_axes(transpose):
        value = weights
        weights = transpose.inputs[0]
        is_transposed = True
        softmax = _find_softmax(view, weights)
    if softmax is None or not _has_matching_heads(
        view.shape(weights), view.shape(value), is_transposed
    ):
        return None
    name, sinks = _match_scores_and_sinks(view, softmax, view.shape(weights)[-1])
    scores = match_scores(view, name) if name else None
    if scores is None or view.type_of(scores.query).dtype is not view.type_of(value).dtype:
        return None
    lead = _count_samples_and_heads(view, scores)
    if lead is None:
        return None
    return _AttentionWriter(view, node, lead).write(scores, value, is_transposed, sinks)


def _has_matching_heads(weights: Shape, value: Shape, is_transposed: bool) -> bool:
    """True if the values V have the samples and heads (leading dimensions) of the probabilities P.
    V may have one head for all heads of P unless the matmul is Vᵀ · Pᵀ (`is_transposed`). The
    arguments are the shapes of P and V.
    """
    lead = weights[:-2]
    own = value[:-2]
    return own == lead or (len(lead) == 2 and own == (lead[0], 1) and not is_transposed)


def _find_softmax(view: View, name: str) -> Node | None:
    """Return the softmax over the last axis that computes the probabilities `name`; None if there
    is none.

    Between the softmax and `name` may be casts, a guard against NaN, a Reshape of the leading
    dimensions, and a Slice that removes the probability of an attention sink.
    """
    name = view.skip_casts(name)
    node = view.producer_of(name, "Reshape", "Squeeze", "Unsqueeze")
    if node is not None and changes_only_leading_axes(view, node):
        name = view.skip_casts(node.inputs[0])
    source, indices = view.slice_source(name)
    if indices == range(view.shape(source)[-1] - 1):
        name = view.skip_casts(source)
    softmax = view.producer_of(_skip_nan_guard(view, name), "Softmax")
    rank = len(view.shape(name))
    default_axis = -1 if view.graph.opset >= SOFTMAX_LAST_AXIS_SINCE else 1
    if softmax is None or rank < 3 or softmax.integer("axis", default_axis) not in (-1, rank - 1):
        return None
    return softmax


def _match_scores_and_sinks(view: View, softmax: Node, keys: int) -> tuple[str, str]:
    """Return (scores, sinks) of the operand of a softmax: the name of the scores of the `keys`
    keys, and the name of the column concatenated after them, which has the attention sinks (extra
    scores of keys without values). `sinks` is "" if there is none; both are "" if the operand is
    something else.

    If the softmax reads scores minus their maximum per row, the scores themselves are returned.
    """
    name = view.skip_casts(softmax.inputs[0])
    shifted = view.producer_of(name, "Sub")
    largest = view.producer_of(shifted.inputs[1], "ReduceMax") if shifted is not None else None
    if shifted is not None and largest is not None and largest.inputs[0] == shifted.inputs[0]:
        is_per_row = view.shape(largest.outputs[0]) == (*view.shape(name)[:-1], 1)
        name = shifted.inputs[0] if is_per_row else name
    if view.shape(name)[-1] == keys:
        return name, ""
    join = view.producer_of(name, "Concat")
    if join is None or [view.shape(each)[-1] for each in join.inputs] != [keys, 1]:
        return "", ""
    return join.inputs[0], join.inputs[1]


def _skip_nan_guard(view: View, name: str) -> str:
    """Return x if the value `name` is Where(IsNaN(x), 0, x); otherwise `name`."""
    node = view.producer_of(name, "Where")
    test = view.producer_of(node.inputs[0], "IsNaN") if node is not None else None
    if (
        node is None
        or test is None
        or test.inputs[0] != node.inputs[2]
        or view.scalar(node.inputs[1]) != 0.0
    ):
        return name
    return node.inputs[2]


def _count_samples_and_heads(view: View, scores: Scores) -> tuple[int, int] | None:
    """Return the numbers of samples and heads.

    They are the first two sizes of a tensor with four dimensions: of the scores between the softmax
    and the product Q Kᵀ, or of the queries before a Reshape. Without such a tensor, the first
    dimension counts samples, and the product of the other leading sizes is the number of heads;
    None if this contradicts a shape of the scores.
    """
    source = view.producer_of(scores.query, "Reshape")
    shapes = [*scores.shapes, view.shape(source.inputs[0])] if source is not None else scores.shapes
    lead = scores.shapes[-1][:-2]
    tail = view.shape(scores.query)[-2:]
    for shape in shapes:
        if len(shape) == 4 and (shape[-2:] == tail or shape in scores.shapes):
            return shape[0], shape[1]
    found = lead[0], math.prod(lead[1:])
    return (
        found
        if all(count_sizes_of_samples(shape[:-2], found) is not None for shape in scores.shapes)
        else None
    )


def _swaps_last_axes(transpose: Node) -> bool:
    """True if a Transpose of at least three axes exchanges the last two and keeps the others."""
    perm = transpose.integers("perm")
    return len(perm) > 2 and perm == (*range(len(perm) - 2), len(perm) - 1, len(perm) - 2)


def _may_hide_all_keys(view: View, mask: Mask) -> bool:
    """True if a mask that selects scores may hide all keys from a query, depending on data.

    Such a mask cannot become a mask that is added: no gradient flows to scores that a number
    replaces, whereas gradients flow through a sum. A mask that is equal for all queries is
    accepted: it hides all keys only in a sample that is all padding.
    """
    if mask.low is None or math.isinf(mask.low) or view.array(mask.name) is not None:
        return False
    name = mask.name
    while (node := view.producer_of(name, "Not", "Cast", "Expand")) is not None:
        name = node.inputs[0]
    return view.shape(name)[-2:-1] not in ((), (1,))


class _AttentionWriter:
    """Writes the Attention node for one matched pattern, and the nodes that give its operands four
    dimensions: samples, heads, positions, features.
    """

    def __init__(self, view: View, node: Node, lead: tuple[int, int]) -> None:
        """`node` is the product of probabilities and values, which is replaced. `lead` is (samples,
        heads).
        """
        self.view = view
        self.node = node
        self.lead = lead
        """Numbers of samples and of heads."""
        self.rewriter = Rewriter(view, node)

    def write(
        self, scores: Scores, value: str, is_transposed: bool, sinks: str
    ) -> tuple[Node, ...] | None:
        """Return the nodes in place of the product of probabilities and values; None if an operand
        cannot be brought into the shape [samples, heads, positions, features], or if a mask may
        hide all keys from a query.

        `sinks` names the column of attention sinks (extra scores of keys without values), "" if
        there is none. With `is_transposed`, `value` and the result have their last two axes
        exchanged.
        """
        view = self.view
        masks = [
            (mask, kind) for mask in scores.masks if (kind := kind_of_mask(view, mask)) != "blank"
        ]
        if any(kind == "other" and _may_hide_all_keys(view, mask) for mask, kind in masks):
            return None
        causal = masks[0][1] if len(masks) == 1 and masks[0][1] not in ("some", "other") else ""
        value = self.transpose_last_axes(value, "value") if is_transposed else value
        key, key_scale = self.recover_keys(scores.transposed, value)
        value = self.reshape_by_head(value, "value")
        query = self.reshape_by_head(scores.query, "query")
        shared_key, shared_value = (_find_unrepeated_heads(view, name) for name in (key, value))
        if shared_key is not None and shared_value is not None:
            key = shared_key
            value = shared_value
        elif view.shape(key)[:2] != view.shape(value)[:2]:
            return None
        attributes: dict[str, Any] = {"scale": scores.scale * key_scale}
        if scores.softcap:
            attributes["softcap"] = scores.softcap
        operands = [query, key, value]
        if causal:
            attributes["is_causal"] = 1
            if causal != "causal":
                attributes["left_window_size"] = int(causal)
        elif masks:
            added = [self.write_added_mask(mask) for mask, _ in masks]
            if None in added:
                return None
            operands.append(self.write_sum([each for each in added if each]))
        if sinks:
            sink = self.sink_per_head(sinks)
            if not sink:
                return None
            operands += [""] * (SINK_OPERAND - len(operands)) + [sink]
        self.write_result(operands, attributes, is_transposed)
        return tuple(self.rewriter.nodes)

    def write_result(
        self, operands: list[str], attributes: dict[str, Any], is_transposed: bool
    ) -> None:
        """Write the Attention node, and the nodes that give its result the shape of the replaced
        product. With `is_transposed`, its last two axes are exchanged.
        """
        view = self.view
        node = self.node
        shape = (*self.lead, view.shape(operands[0])[2], view.shape(operands[2])[3])
        target = view.shape(node.outputs[0])
        steps = [("Transpose", _swap_last_sizes(shape))] if is_transposed else []
        if shape[:2] != target[:-2]:
            steps.append(("Reshape", target))
        result = view.unique_name(f"{node.outputs[0]}_heads") if steps else node.outputs[0]
        name = self.rewriter.add(
            "Attention", operands, shape, results=[result], name=node.name, **attributes
        )
        for number, (operator, step_shape) in enumerate(steps):
            is_last = number == len(steps) - 1
            result = node.outputs[0] if is_last else ""
            name = self.write_shape_change(operator, name, "result", step_shape, result)

    def write_node(
        self, op: str, operands: list[str], shape: Shape, role: str, result: str = ""
    ) -> str:
        """Write a node whose result has the shape `shape` and the element type of its last operand.
        Return the name of the result: `result`, or a new name that contains `role`. The node's name
        also contains `role`.
        """
        return self.rewriter.add(
            op,
            operands,
            shape,
            dtype=self.view.type_of(operands[-1]).dtype,
            results=[result or self.view.unique_name(f"{self.node.outputs[0]}_{role}")],
            name=f"{self.node.name}/{role}_{len(self.rewriter.nodes)}",
        )

    def write_shape_change(
        self, op: str, name: str, role: str, shape: Shape, result: str = "", perm: Shape = ()
    ) -> str:
        """Write a Reshape, Expand or Transpose (`op`) of the value `name`; the result has the shape
        `shape`. Return the name of the result: `result`, or a new name that contains `role`. A
        Transpose without `perm` exchanges the last two axes.
        """
        operands = [name]
        attributes: dict[str, Any] = {}
        if op == "Transpose":
            rank = len(shape)
            attributes["perm"] = perm or (*range(rank - 2), rank - 1, rank - 2)
        result = result or self.view.unique_name(f"{self.node.outputs[0]}_{role}")
        if op != "Transpose":
            operands.append(self.view.shape_constant(shape))
        return self.rewriter.add(
            op,
            operands,
            shape,
            results=[result],
            name=f"{self.node.name}/{role}_{len(self.rewriter.nodes)}",
            **attributes,
        )

    def reshape_by_head(self, name: str, role: str) -> str:
        """Return the name of the value `name` as [samples, heads, positions, features]. If the
        value is the Reshape of a tensor of that shape, return that tensor.
        """
        view = self.view
        shape = view.shape(name)
        if len(shape) == 4 and shape[:2] in (self.lead, (self.lead[0], 1)):
            return name
        target = (*self.lead, *shape[-2:])
        source = view.producer_of(name, "Reshape")
        if source is not None and view.shape(source.inputs[0]) == target:
            return source.inputs[0]
        return self.write_shape_change("Reshape", name, role, target)

    def transpose_last_axes(self, name: str, role: str) -> str:
        """Return the name of the value `name` with its last two axes exchanged. If the value is the
        result of a Transpose, one Transpose replaces both, or none if they cancel out.
        """
        view = self.view
        order = tuple(range(len(view.shape(name))))
        shape = _swap_last_sizes(view.shape(name))
        transpose = view.producer_of(name, "Transpose")
        perm = order
        if transpose is not None:
            name = transpose.inputs[0]
            perm = transpose.integers("perm", order[::-1])
        perm = (*perm[:-2], perm[-1], perm[-2])
        if perm == order:
            return name
        return self.write_shape_change("Transpose", name, role, shape, perm=perm)

    def recover_keys(self, transposed: str, value: str) -> tuple[str, float]:
        """Return (K, c) for the value `transposed` = c · Kᵀ: the name of K and a number.

        K is [samples, heads, positions, features]. If K and V (`value`) both repeat each head for
        the query heads that share it, K may also be [samples, heads, sharers, positions, features],
        where sharers counts the query heads that share a key head.
        """
        view = self.view
        found = _find_keys_before_transpose(view, transposed)
        if found is not None:
            scale, key = view.split_scale(found)
            is_repeated = (
                _find_unrepeated_heads(view, key) is not None
                and _find_unrepeated_heads(view, value) is not None
            )
            shape = view.shape(key)
            has_heads = len(shape) == 4 and shape[:2] in (self.lead, (self.lead[0], 1))
            if is_repeated or has_heads:
                return key, scale
        if view.producer_of(transposed, "Reshape") is not None:
            return self.transpose_last_axes(self.reshape_by_head(transposed, "key"), "key"), 1.0
        scale, key = view.split_scale(self.transpose_last_axes(transposed, "key"))
        return self.reshape_by_head(key, "key"), scale

    def write_added_mask(self, mask: Mask) -> str | None:
        """Return the name of the tensor that `mask` adds to scores [samples, heads, queries, keys];
        None if the mask cannot be broadcast to samples and heads.
        """
        view = self.view
        name = mask.name
        if mask.low is not None:
            dtype = view.type_of(self.node.outputs[0]).dtype
            ends = [view.number_constant(each, dtype) for each in (0.0, mask.low)]
            choices = ends if mask.shown else ends[::-1]
            name = self.write_node("Where", [name, *choices], view.shape(name), "mask")
        elif mask.factor != 1.0:
            factor = view.number_constant(mask.factor, view.type_of(name).dtype)
            name = self.write_node("Mul", [name, factor], view.shape(name), "mask")
        return self.reshape_mask_by_head(name, mask.scores[:-2])

    def sink_per_head(self, column: str) -> str:
        """Return the name of the vector [heads] that the `column` of scores repeats for all samples
        and queries: the attention sinks, extra scores of keys without values. "" if the column is
        something else.
        """
        view = self.view
        name = column
        # The axis of `name` that counts heads. The loop traces this axis back through the producers
        # of the column.
        axis = 1
        heads = self.lead[1]
        if view.shape(column)[:-2] != self.lead:
            return ""
        while axis >= 0 and view.shape(name)[axis : axis + 1] == (heads,):
            shape = view.shape(name)
            if math.prod(shape) == heads:
                reshape = view.producer_of(name, "Reshape", "Unsqueeze")
                if reshape is not None and view.shape(reshape.inputs[0]) == (heads,):
                    name = reshape.inputs[0]
                if view.shape(name) == (heads,):
                    return name
                return self.write_shape_change("Reshape", name, "sinks", (heads,))
            node = view.producer_of(name, "Expand", "Transpose", "Gather")
            if node is None:
                break
            source = view.shape(node.inputs[0])
            if node.op == "Transpose":
                axis = node.integers("perm", tuple(reversed(range(len(shape)))))[axis]
            else:
                axis -= len(shape) - len(source)
                if node.op == "Gather" and (axis < 1 or node.integer("axis") or source[0] != 1):
                    # A Gather along axis 0 repeats values for all samples only if its operand
                    # consists of one row. Any other Gather ends the trace.
                    break
            name = node.inputs[0]
        return ""

    def reshape_mask_by_head(self, name: str, lead: Shape) -> str | None:
        """Return the name of the mask `name`, which broadcasts to [`lead` ..., queries, keys], as a
        mask that broadcasts to [samples, heads, queries, keys]; None if the dimensions of `lead`
        cannot be grouped into samples and heads.
        """
        shape = self.view.shape(name)
        own = (1,) * (len(lead) + 2 - len(shape)) + shape[:-2]
        if lead == self.lead or set(own) <= {1}:
            if len(shape) <= 4:
                return name
            return self.write_shape_change("Reshape", name, "mask", (1, 1, *shape[-2:]))
        if own == lead:
            return self.reshape_mask(name, (*self.lead, *shape[-2:]))
        count = count_sizes_of_samples(lead, self.lead)
        if count is None:
            return None
        # A Reshape can merge the dimensions of samples, or of heads, only if the mask is broadcast
        # over all of them or over none. A mask that is broadcast over only some of them is
        # therefore expanded first.
        groups = [(own[:count], lead[:count]), (own[count:], lead[count:])]
        expanded = [held if set(held) <= {1} else full for held, full in groups]
        target = (*expanded[0], *expanded[1])
        if target != own:
            name = self.write_shape_change("Expand", name, "mask", (*target, *shape[-2:]))
        merged = (math.prod(expanded[0]), math.prod(expanded[1]), *shape[-2:])
        return self.reshape_mask(name, merged)

    def reshape_mask(self, name: str, target: Shape) -> str:
        """Return the name of the mask `name` in the shape `target`. If the mask is the Reshape of a
        tensor of that shape, return that tensor.
        """
        source = self.view.producer_of(name, "Reshape")
        if source is not None and self.view.shape(source.inputs[0]) == target:
            return source.inputs[0]
        return self.write_shape_change("Reshape", name, "mask", target)

    def write_sum(self, masks: list[str]) -> str:
        """Write the sum of the masks, which broadcast to each other, and return its name."""
        total = masks[0]
        for mask in masks[1:]:
            shape = np.broadcast_shapes(self.view.shape(total), self.view.shape(mask))
            total = self.write_node("Add", [total, mask], shape, "mask")
        return total


def _swap_last_sizes(shape: Shape) -> Shape:
    """Return the shape with its last two sizes exchanged."""
    return (*shape[:-2], shape[-1], shape[-2])


def _find_keys_before_transpose(view: View, transposed: str) -> str | None:
    """Return the name of K if `transposed` is Kᵀ [samples, heads, features, positions] and K is a
    value of the graph; otherwise None.

    K may be [samples, heads, sharers, positions, features], where sharers counts the query heads
    that share a key head; a Reshape then merges heads and sharers.
    """
    node = view.producer_of(transposed, "Transpose")
    if node is not None:
        return node.inputs[0] if node.integers("perm") == (0, 1, 3, 2) else None
    path = view.producer_chain(transposed, "Reshape", "Transpose", "Reshape")
    if not path or path[1].integers("perm") != (0, 2, 1) or len(view.shape(transposed)) != 4:
        return None
    samples, heads, features, positions = view.shape(transposed)
    if view.shape(path[1].inputs[0]) != (samples * heads, positions, features):
        return None
    source = view.shape(path[2].inputs[0])
    is_keys = (samples, heads, positions, features) in (source, _merge_head_sizes(source))
    return path[2].inputs[0] if is_keys else None


def _merge_head_sizes(shape: Shape) -> Shape:
    """Return the shape (samples, heads, sharers, …) with its second and third size replaced by
    their product; sharers counts the query heads that share a key head.
    """
    return (*shape[:1], math.prod(shape[1:3]), *shape[3:])


def _find_unrepeated_heads(view: View, name: str) -> str | None:
    """Return the name of the keys or values with fewer heads from which `name` is made by repeating
    each head for the query heads that share it; None if `name` is not made so.
    """
    if len(view.shape(name)) == 4:
        merged = view.producer_of(name, "Reshape")
        if merged is None or _merge_head_sizes(view.shape(merged.inputs[0])) != view.shape(name):
            return None
        name = merged.inputs[0]
    path = view.producer_chain(name, "Expand", "Unsqueeze|Reshape")
    if not path:
        return None
    samples, groups, _, *rest = view.shape(name)
    middle, source = (view.shape(each.inputs[0]) for each in path)
    is_repeated = middle == (samples, groups, 1, *rest) and source == (samples, groups, *rest)
    return path[1].inputs[0] if is_repeated else None
