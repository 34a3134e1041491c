"""Fusion of mixtures of experts (Shazeer et al., "Outrageously Large Neural Networks", 2017), as
torch's exporters write them.

Each expert is a gated unit between two matrix products. Exports either gather the weight matrices
of each token's experts, or compute all experts for all tokens and mask the results. The fused
operator computes only the chosen experts.

A router chooses k experts per token by TopK. `chosen` [tokens, k] has the numbers of the chosen
experts, `shares` [tokens, k] the factor of each chosen expert's result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from autopipe.ir.graph import Attribute, Node
from autopipe.passes.frontend.fusion.view import MAX_STEPS, PartialMixture, View
from autopipe.passes.frontend.rewriter import Rewriter

_RESHAPING = ("Reshape", "Squeeze", "Unsqueeze", "Flatten")
"""Operators that change only the shape of a value."""
_HALVES = 2
"""Value of ONNX Runtime's attribute `swiglu_fusion` if the first half of the first layer's result
are gates and the second half gated features.
"""
_INTERLEAVED = 1
"""Value of ONNX Runtime's attribute `swiglu_fusion` if gates and gated features alternate in the
first layer's result.
"""


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """A linear layer of an expert: `source` times the matrix weight[index], plus bias[index].
    `bias` is "" if there is none.
    """

    source: str
    weight: str
    """The matrices of all experts, stacked; or one matrix, if `index` is ""."""
    is_transposed: bool
    """True if matrices are stored as [inputs, outputs]; the fused operator Experts reads [outputs,
    inputs].
    """
    index: str
    """The value that has the number of the expert: one number for all rows, or one number per row.
    """
    bias: str = ""


@dataclass(frozen=True, slots=True)
class ExpertUnit:
    """An expert: its two linear layers, and the attributes of the gated unit, act(gates) · gated
    features, between them.

    If gates and gated features have separate matrices, `first` is the layer of the gates, and `up`
    the matrix of the gated features. Otherwise `first` computes both, and `up` is "".
    """

    first: ExpertLayer
    second: ExpertLayer
    attributes: tuple[tuple[str, Attribute], ...] = ()
    up: str = ""

    @property
    def common(self) -> tuple[object, ...]:
        """The values and settings that all experts of a mixture must share."""
        first = self.first
        second = self.second
        stacked = (
            ()
            if self.up
            else (
                first.weight,
                first.is_transposed,
                second.weight,
                second.is_transposed,
                self.attributes,
            )
        )
        return first.source, *stacked

    @property
    def matrices(self) -> tuple[str, ...]:
        """The names of the matrices of `first`, `up` and `second`."""
        return self.first.weight, self.up, self.second.weight


def fuse_gathered_experts(view: View, node: Node) -> tuple[Node, ...] | None:
    """Match a mixture of experts that gathers the matrices of each token's k experts. It ends at
    `node`, a ReduceSum over axis 1 of result · share [tokens, k, features]; a share is the factor
    of an expert's result. Return the nodes in place of `node`; None if the pattern does not match.
    """
    rank = len(view.shape(node.inputs[0]))
    axes = view.array(node.inputs[1]) if len(node.inputs) > 1 else None
    product = view.producer_of(_skip_reshapes(view, node.inputs[0]), "Mul")
    if (
        rank != 3
        or axes is None
        or axes.tolist() not in ([1], [-2])
        or node.integer("keepdims", 1)
        or product is None
    ):
        return None
    for result, share in (product.inputs, product.inputs[::-1]):
        unit = _match_unit(view, result, _match_gathered_layer)
        if unit is None or unit.first.index != unit.second.index:
            continue
        source = _find_repeated_rows(view, unit.first.source)
        shares = _find_source_of_shape(view, share, view.shape(unit.first.index))
        if (
            source
            and shares
            and _has_fitting_shapes(view, unit, source, unit.first.index, shares, node.outputs[0])
        ):
            return _make_mixture(view, node, unit, (source, unit.first.index, shares))
    return None


def fuse_masked_experts(view: View, node: Node) -> tuple[Node, ...] | None:
    """Match a mixture that computes every expert for all tokens. It is the sum over experts of
    result · share; a share is the factor of the expert's result, 0 for tokens that did not choose
    the expert.

    Each Add of the sum adds one expert, and `node` is one of these. At the Add of the last expert,
    return the nodes in its place; None at others and if the pattern does not match.
    """
    for before, name in (node.inputs, node.inputs[::-1]):
        term = _match_expert_term(view, name)
        if term is None:
            continue
        unit, chosen, shares, (vector, expert) = term
        common = (*unit.common, chosen, shares, vector)
        total = view.sums.pop(before, None) or PartialMixture(common, {})
        if (
            total.common != common
            or expert in total.experts
            or not (total.experts or view.is_zero(before))
        ):
            continue
        total.experts[expert] = unit.matrices
        view.sums[node.outputs[0]] = total
        read = unit.first.source, chosen, shares
        count = (
            _count_listed_experts(view, vector, chosen) if vector else _count_experts(view, chosen)
        )
        if len(total.experts) < count or not total.experts.keys() <= set(range(count)):
            return None
        if unit.up:
            return _make_listed_mixture(view, node, total.experts, read)
        return (
            _make_mixture(view, node, unit, read)
            if _has_fitting_shapes(view, unit, *read, node.outputs[0])
            else None
        )
    return None


def _count_experts(view: View, chosen: str) -> int:
    """Return the number of experts among which a TopK along the last axis chose `chosen`; 0 if
    `chosen` is not the second result of such a TopK.
    """
    writer = view.writers.get(chosen)
    if (
        writer is None
        or writer.op != "TopK"
        or writer.outputs[1] != chosen
        or writer.integer("axis", -1) not in (-1, 1)
    ):
        return 0
    return view.shape(writer.inputs[0])[-1]


def _make_listed_mixture(
    view: View, node: Node, experts: dict[int, tuple[str, ...]], read: tuple[str, str, str]
) -> tuple[Node, ...] | None:
    """Return the ListedExperts node of a mixture whose experts have separate matrices, which
    `experts` has by number; None if shapes or types differ between experts or do not fit. `read`
    has the names of the tokens, the numbers of the chosen experts, and the factors of their
    results.
    """
    tokens = view.shape(read[0])
    chosen = view.shape(read[1])
    names = [name for _, matrices in sorted(experts.items()) for name in matrices]
    gates, ups, downs = ({view.shape(name) for name in names[start::3]} for start in range(3))
    types = {view.type_of(name).dtype for name in (read[0], node.outputs[0], *names)}
    inner = next(iter(gates))[-1]
    fits = (
        gates == ups == {(tokens[-1], inner)} and downs == {(inner, tokens[-1])} and len(types) == 1
    )
    if (
        not fits
        or sorted(experts) != list(range(_count_experts(view, read[1])))
        or view.shape(node.outputs[0]) != tokens
    ):
        return None
    if (
        len(tokens) != 2
        or len(chosen) != 2
        or view.shape(read[2]) != chosen
        or chosen[0] != tokens[0]
    ):
        return None
    return (Node(node.name, "ListedExperts", (*read, *names), node.outputs, (), "autopipe"),)


def _make_mixture(
    view: View, node: Node, unit: ExpertUnit, read: tuple[str, str, str]
) -> tuple[Node, ...]:
    """Return the nodes of a mixture whose experts' matrices are stacked. Matrices that are stored
    as [experts, inputs, outputs] are transposed. `read` has the names of the tokens, the numbers of
    the chosen experts, and the factors of their results.
    """
    rewriter = Rewriter(view, node)
    operands = list(read)
    for layer in (unit.first, unit.second):
        weight = layer.weight
        if layer.is_transposed:
            experts, rows, columns = view.shape(weight)
            slot = len(operands)
            weight = rewriter.add(
                "Transpose",
                [weight],
                (experts, columns, rows),
                results=[f"{node.outputs[0]}_weight_{slot}"],
                name=f"{node.name}/weight_{slot}",
                perm=(0, 2, 1),
            )
        operands += [weight, layer.bias]
    operands = operands if operands[-1] else operands[:-1]
    mixture = Node(node.name, "Experts", tuple(operands), node.outputs, unit.attributes, "autopipe")
    return (*rewriter.nodes, mixture)


def _has_fitting_shapes(
    view: View, unit: ExpertUnit, source: str, chosen: str, shares: str, result: str
) -> bool:
    """True if the shapes of tokens (`source`), chosen experts, shares (the factors of their
    results), layers and result fit together, and tokens, matrices and result have one element type.
    """
    first, second = (
        (shape[0], shape[2], shape[1]) if layer.is_transposed else shape
        for layer, shape in ((each, view.shape(each.weight)) for each in (unit.first, unit.second))
    )
    tokens = view.shape(source)
    return (
        len(tokens) == len(view.shape(chosen)) == 2
        and tokens[0] == view.shape(chosen)[0]
        and first[0] == _count_experts(view, chosen)
        and view.shape(shares) == view.shape(chosen)
        and view.shape(result) == tokens
        and first == (first[0], 2 * second[2], tokens[1])
        and second[:2] == (first[0], tokens[1])
        and all(
            view.shape(layer.bias) == shape[:2]
            for layer, shape in ((unit.first, first), (unit.second, second))
            if layer.bias
        )
        and len(
            {
                view.type_of(name).dtype
                for name in (source, unit.first.weight, unit.second.weight, result)
            }
        )
        == 1
    )


def _skip_reshapes(view: View, name: str) -> str:
    """Return the name of the value that the nodes before `name` only reshape, which can be `name`
    itself. At most `MAX_STEPS` nodes are skipped.
    """
    for _ in range(MAX_STEPS):
        if (node := view.producer_of(name, *_RESHAPING)) is None:
            break
        name = node.inputs[0]
    return name


def _find_source_of_shape(view: View, name: str, shape: tuple[int, ...]) -> str:
    """Return the name of a value with the shape `shape` that is `name` or that is only reshaped to
    `name`; "" if there is none.
    """
    for _ in range(MAX_STEPS):
        if view.shape(name) == shape:
            return name
        if (node := view.producer_of(name, *_RESHAPING)) is None:
            break
        name = node.inputs[0]
    return ""


def _find_repeated_rows(view: View, name: str) -> str:
    """Return the name of the value [tokens, features] whose rows `name` repeats, each for the k
    experts of its token; "" if there is none.
    """
    path = view.producer_chain(_skip_reshapes(view, name), "Expand|Tile", "|".join(_RESHAPING))
    if not path:
        return ""
    source = path[1].inputs[0]
    wide = view.shape(path[0].outputs[0])
    shape = view.shape(source)
    is_repeated = (
        len(shape) == 2
        and view.shape(path[0].inputs[0]) == (shape[0], 1, shape[1])
        and wide[::2] == shape
    )
    return source if is_repeated else ""


def _match_unit(
    view: View, name: str, layer: Callable[[View, str], ExpertLayer | None]
) -> ExpertUnit | None:
    """Return the expert whose result is `name`: a SwiGLU between two layers. `layer` matches a
    layer by the name of its result. None if it does not match.
    """
    second = layer(view, name)
    node = (
        view.producer_of(_skip_reshapes(view, second.source), "SwiGLU")
        if second is not None
        else None
    )
    if second is None or node is None:
        return None
    gates, beta, limit = _match_swiglu_settings(view, node)
    source, is_interleaved = view.halved_source(*gates)
    first = layer(view, source) if source else None
    if first is None:
        return None
    alpha = node.number("alpha", 1.0)
    attributes: dict[str, Attribute] = {
        "activation_type": "swiglu",
        "swiglu_fusion": _INTERLEAVED if is_interleaved else _HALVES,
    }
    attributes |= {"activation_alpha": alpha} if alpha != 1.0 else {}
    attributes |= {"activation_beta": beta} if beta else {}
    attributes |= {"swiglu_limit": limit} if limit < math.inf else {}
    return ExpertUnit(first, second, tuple(sorted(attributes.items())))


def _match_swiglu_settings(view: View, node: Node) -> tuple[tuple[str, str], float, float]:
    """Return ((gates, gated), beta, limit) of a SwiGLU: the names of its gates and gated features,
    the number beta that is added to the gated features, and the limit to which they are clamped.

    Gates are at most `limit`, gated features between -`limit` and `limit`; `limit` is infinite if
    they are not clamped.
    """
    gate, up = node.inputs
    value, beta = view.split_addend(up)
    up, beta = (up, 0.0) if math.isnan(beta) else (value, beta)
    clips = [view.producer_of(each, "Clip") for each in (gate, up)]
    if clips[0] is None or clips[1] is None:
        return (gate, up), beta, math.inf
    (low, high), (lowest, highest) = (
        [view.scalar(each) if each else None for each in (*clip.inputs[1:], "", "")[:2]]
        for clip in clips
        if clip
    )
    if low is None and high is not None and high == highest and lowest == -high:
        return (clips[0].inputs[0], clips[1].inputs[0]), beta, high
    return (gate, up), beta, math.inf


def _match_gathered_layer(view: View, name: str) -> ExpertLayer | None:
    """Match a layer with result `name` that gathers one matrix per row, and perhaps one bias per
    row, by equal indices. None if it does not match.
    """
    bias = index = ""
    added = view.producer_of(_skip_reshapes(view, name), "Add")
    for left, right in (added.inputs, added.inputs[::-1]) if added is not None else ():
        bias, index = _match_gather(view, right, 2)
        if bias:
            name = left
            break
    product = view.producer_of(_skip_reshapes(view, name), "MatMul")
    for matrix, vector in (product.inputs, product.inputs[::-1]) if product is not None else ():
        weight, own = _match_gather(view, matrix, 3)
        if not weight or index not in ("", own) or product is None:
            continue
        is_transposed = matrix == product.inputs[1]
        (rows, *sides) = view.shape(matrix)
        if view.shape(vector) == ((rows, 1, sides[0]) if is_transposed else (rows, sides[1], 1)):
            return ExpertLayer(_skip_reshapes(view, vector), weight, is_transposed, own, bias)
    return None


def _match_gather(view: View, name: str, rank: int) -> tuple[str, str]:
    """Return (weight, indices) if the value `name` gathers slices of the parameter `weight`, which
    has `rank` dimensions, along its first axis; otherwise ("", "").
    """
    node = view.producer_of(name, "GatherND", "Gather")
    if node is None or node.integer("batch_dims") or node.integer("axis"):
        return "", ""
    weight, index = node.inputs
    if (
        view.graph.parameter(weight) is None
        or len(view.shape(weight)) != rank
        or len(view.shape(name)) != rank
    ):
        return "", ""
    return weight, _skip_reshapes(view, index)


def _match_indexed_layer(view: View, name: str) -> ExpertLayer | None:
    """Match a layer with result `name` that multiplies all rows by the matrix of one expert, which
    a scalar index selects. None if it does not match.
    """
    product = view.producer_of(name, "MatMul")
    if product is None:
        return None
    transpose = view.producer_of(product.inputs[1], "Transpose")
    matrix = view.producer_of(
        product.inputs[1] if transpose is None else transpose.inputs[0], "Gather"
    )
    if matrix is None or matrix.integer("axis") or view.graph.parameter(matrix.inputs[0]) is None:
        return None
    if len(view.shape(matrix.inputs[0])) != 3 or view.shape(matrix.inputs[1]):
        return None
    return ExpertLayer(product.inputs[0], matrix.inputs[0], transpose is None, matrix.inputs[1])


def _match_separate_unit(view: View, name: str) -> ExpertUnit | None:
    """Match an expert with result `name` whose three matrices are separate parameters: a SwiGLU of
    two products, and a third product. None if it does not match.
    """
    down = _match_product(view, name)
    node = view.producer_of(down.source, "SwiGLU") if down is not None else None
    gate, up = (
        (_match_product(view, each) for each in node.inputs) if node is not None else (None, None)
    )
    if (
        down is None
        or gate is None
        or up is None
        or node is None
        or node.number("alpha", 1.0) != 1.0
    ):
        return None
    gate, up = (
        dataclasses.replace(each, source=_find_earliest_of_shape(view, each.source))
        for each in (gate, up)
    )
    return ExpertUnit(gate, down, up=up.weight) if gate.source == up.source else None


def _find_earliest_of_shape(view: View, name: str) -> str:
    """Return the name of the earliest value that has the shape of `name` and is only reshaped to
    `name`.
    """
    shape = view.shape(name)
    found = name
    for _ in range(MAX_STEPS):
        node = view.producer_of(name, *_RESHAPING)
        if node is None:
            break
        name = node.inputs[0]
        found = name if view.shape(name) == shape else found
    return found


def _match_product(view: View, name: str) -> ExpertLayer | None:
    """Match a layer with result `name` that is a product with a parameter of two dimensions. None
    if it does not match.
    """
    node = view.producer_of(name, "MatMul")
    if (
        node is None
        or view.graph.parameter(node.inputs[1]) is None
        or len(view.shape(node.inputs[1])) != 2
    ):
        return None
    return ExpertLayer(node.inputs[0], node.inputs[1], False, "")


def _match_expert_term(
    view: View, name: str
) -> tuple[ExpertUnit, str, str, tuple[str, int]] | None:
    """Match one expert's term of the sum: Where(token chose the expert, result · share, 0). A share
    is the factor of an expert's result. Return (expert, chosen, shares, number of the expert as
    `_match_expert_number` returns it); None if it does not match. `chosen` names the numbers of the
    experts that each token chose.
    """
    node = view.producer_of(name, "Where")
    product = view.producer_of(node.inputs[1], "Mul") if node is not None else None
    if node is None or product is None or not view.is_zero(node.inputs[2]):
        return None
    unit = _match_unit(view, product.inputs[0], _match_indexed_layer) or _match_separate_unit(
        view, product.inputs[0]
    )
    total = view.producer_of(_skip_reshapes(view, product.inputs[1]), "ReduceSum")
    if unit is None or total is None or view.shape(product.inputs[1])[1:] != (1,):
        return None
    share = view.producer_of(total.inputs[0], "Where")
    if share is None or not view.is_zero(share.inputs[2]) or not _sums_over_choices(view, total):
        return None
    chosen, index = _match_choice_mask(view, share.inputs[0])
    shares = _find_transposed_source(view, share.inputs[1], view.shape(share.inputs[0]))
    expert = _match_expert_number(view, index) if chosen else None
    layers = () if unit.up else (unit.first, unit.second)
    if not shares or expert is None or (unit.up and expert[0]):
        return None
    if any(_match_expert_number(view, each.index) != expert for each in layers):
        return None
    if not _selects_any_choice(view, node.inputs[0], share.inputs[0]):
        return None
    return unit, chosen, shares, expert


def _sums_over_choices(view: View, node: Node) -> bool:
    """True if the ReduceSum `node` reduces the first of two axes: the k choices of each token."""
    axes = view.array(node.inputs[1]) if len(node.inputs) > 1 else None
    stated = tuple(axes.tolist()) if axes is not None else node.integers("axes")
    return stated in ((0,), (-2,)) and len(view.shape(node.inputs[0])) == 2


def _match_choice_mask(view: View, name: str) -> tuple[str, str]:
    """Return (chosen, index) if the value `name` is a mask [k, tokens] of the k experts that each
    token chose: it is true for choices of the expert whose number is the value `index`. `chosen`
    names the numbers of the chosen experts. Otherwise return ("", "").
    """
    path = view.producer_chain(name, "Cast", "Gather", "Transpose", "OneHot")
    if not path:
        return "", ""
    _, row, transpose, hot = path
    is_row = not view.shape(row.inputs[1]) and not row.integer("axis")
    return (
        (hot.inputs[0], row.inputs[1]) if is_row and _is_one_hot(view, transpose, hot) else ("", "")
    )


def _is_one_hot(view: View, transpose: Node, hot: Node) -> bool:
    """True if the OneHot `hot`, after `transpose`, is [experts, k, tokens], with 1 for chosen
    experts and 0 for others.
    """
    values = view.array(hot.inputs[2])
    is_hot = values is not None and values.tolist() == [0, 1] and hot.integer("axis", -1) in (-1, 2)
    return is_hot and transpose.integers("perm") == (2, 1, 0)


def _match_expert_number(view: View, index: str) -> tuple[str, int] | None:
    """Return the number of the expert that the value `index` has.

    ("", number) if it is a constant; (vector, i) if it is element i of `vector`, which a Split
    divides; otherwise None.
    """
    number = view.scalar(index)
    if number is not None:
        return "", int(number)
    name = _skip_reshapes(view, index)
    split = view.writers.get(name)
    if split is None or split.op != "Split" or split.domain or math.prod(view.shape(name)) != 1:
        return None
    return split.inputs[0], split.outputs.index(name)


def _count_listed_experts(view: View, vector: str, chosen: str) -> int:
    """Return the length of `vector` if it lists, in ascending order, the experts that at least one
    token chose; a huge number if it is something else.

    A traced loop has as many iterations as experts had tokens in the example input. For inputs that
    choose another number of experts, the file's result is undefined.
    """
    name = _skip_reshapes(view, vector)
    unknown = 1 << 62
    transpose = view.producer_of(name, "Transpose")
    if transpose is not None and 1 in view.shape(name) and len(view.shape(name)) == 2:
        name = _skip_reshapes(view, transpose.inputs[0])
    first = view.producer_of(name, "Gather")
    indices = view.array(first.inputs[1]) if first is not None else None
    order = view.writers.get(first.inputs[0]) if first is not None else None
    if (
        indices is None
        or order is None
        or order.op != "TopK"
        or order.outputs[1:] != (first and first.inputs[0],)
    ):
        return unknown
    path = view.producer_chain(
        order.inputs[0], "Add", "Mul", "Cast", "Not", "Greater", "ReduceSum", "Transpose", "OneHot"
    )
    shape = view.shape(order.inputs[0])
    if (
        not path
        or len(shape) != 1
        or order.integer("largest", 1)
        or indices.tolist() != list(range(indices.size))
    ):
        return unknown
    ranks = view.array(path[0].inputs[1])
    size = view.scalar(path[1].inputs[1])
    is_ranked = ranks is not None and ranks.tolist() == list(range(shape[0])) and size == shape[0]
    is_counted = view.scalar(path[4].inputs[1]) == 0 and not path[5].integer("keepdims", 1)
    is_chosen = path[7].inputs[0] == chosen and _is_one_hot(view, path[6], path[7])
    return indices.size if is_ranked and is_counted and is_chosen else unknown


def _find_transposed_source(view: View, name: str, shape: tuple[int, ...]) -> str:
    """Return the name of the value [tokens, k] whose transpose is `name`, which must have the shape
    `shape` = [k, tokens]; "" if there is none.
    """
    transpose = view.producer_of(_skip_reshapes(view, name), "Transpose")
    if transpose is None or view.shape(name) != shape:
        return ""
    perm = transpose.integers("perm")
    read = view.shape(transpose.inputs[0])
    is_transposed = (
        perm[:2] == (1, 0) and perm[2:] == tuple(range(2, len(read))) and read[:2] == shape[::-1]
    )
    return _find_source_of_shape(view, transpose.inputs[0], shape[::-1]) if is_transposed else ""


def _selects_any_choice(view: View, name: str, mask: str) -> bool:
    """True if the value `name` is true for those tokens for which any of the k rows of `mask` [k,
    tokens] is true.
    """
    path = view.producer_chain(_skip_reshapes(view, name), "Cast", "ReduceSum", "Cast")
    return bool(path) and path[2].inputs[0] == mask and _sums_over_choices(view, path[1])
