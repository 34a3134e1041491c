"""Mixtures of experts (Shazeer et al., "Outrageously Large Neural Networks", 2017) as torch's
exporters write them.

Either each token's experts are looked up in the stacked weights, a matrix a token, or every expert
computes every token and a mask chooses. In both each expert is a gated unit between two products.
Put together, only chosen experts compute.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from autopipe.ir.graph import Attribute, Node, Value
from autopipe.passes.frontend.fusion.view import MOST_STEPS, MaskedSum, View

_RESHAPING = ("Reshape", "Squeeze", "Unsqueeze", "Flatten")
_HALVES = 2
_IN_TURN = 1
"""How rows of a first layer are gates and what they gate, as ONNX Runtime's `swiglu_fusion` counts.
"""


@dataclass(frozen=True, slots=True)
class Layer:
    """A product with an expert's matrix, of stacked `weight`, and what is multiplied; the matrix is
    transposed where `turned`.
    """

    source: str
    weight: str
    turned: bool
    index: str
    bias: str = ""


@dataclass(frozen=True, slots=True)
class Unit:
    """The two layers of an expert, and the attributes of what lies between. Of an expert with
    matrices of its own `first` has the gate's, and `up` that of what it gates.
    """

    first: Layer
    second: Layer
    attributes: tuple[tuple[str, Attribute], ...] = ()
    up: str = ""

    @property
    def common(self) -> tuple[object, ...]:
        """Everything that all experts of a mixture share."""
        first = self.first
        second = self.second
        stacked = (
            ()
            if self.up
            else (first.weight, first.turned, second.weight, second.turned, self.attributes)
        )
        return first.source, *stacked

    @property
    def matrices(self) -> tuple[str, ...]:
        return self.first.weight, self.up, self.second.weight


def looked_up(view: View, node: Node) -> tuple[Node, ...] | None:
    """A sum over each token's experts of their results times their shares: [tokens, k, features]
    along axis 1.
    """
    rank = len(view.shape(node.inputs[0]))
    axes = view.known.array(node.inputs[1]) if len(node.inputs) > 1 else None
    product = view.made_by(_flat(view, node.inputs[0]), "Mul")
    if (
        rank != 3
        or axes is None
        or axes.tolist() not in ([1], [-2])
        or node.integer("keepdims", 1)
        or product is None
    ):
        return None
    for result, share in (product.inputs, product.inputs[::-1]):
        unit = _unit(view, result, _of_each)
        if unit is None or unit.first.index != unit.second.index:
            continue
        source = _repeated(view, unit.first.source)
        shares = _shaped(view, share, view.shape(unit.first.index))
        if (
            source
            and shares
            and _fits(view, unit, source, unit.first.index, shares, node.outputs[0])
        ):
            return _mixture(view, node, unit, (source, unit.first.index, shares))
    return None


def masked(view: View, node: Node) -> tuple[Node, ...] | None:
    """A sum over all experts of their results for all tokens, 0 where an expert was not chosen."""
    for before, name in (node.inputs, node.inputs[::-1]):
        term = _term(view, name)
        if term is None:
            continue
        unit, chosen, shares, (vector, expert) = term
        common = (*unit.common, chosen, shares, vector)
        total = view.sums.pop(before, None) or MaskedSum(common, {})
        if (
            total.common != common
            or expert in total.experts
            or not (total.experts or view.zeros(before))
        ):
            continue
        total.experts[expert] = unit.matrices
        view.sums[node.outputs[0]] = total
        read = unit.first.source, chosen, shares
        count = _hit(view, vector, chosen) if vector else _count(view, chosen)
        if len(total.experts) < count or not total.experts.keys() <= set(range(count)):
            return None
        if unit.up:
            return _listed(view, node, total.experts, read)
        return (
            _mixture(view, node, unit, read) if _fits(view, unit, *read, node.outputs[0]) else None
        )
    return None


def _count(view: View, chosen: str) -> int:
    """How many experts a router has whose TopK chose `chosen` of them along the last axis; 0 for
    anything else.
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


def _listed(
    view: View, node: Node, experts: dict[int, tuple[str, ...]], read: tuple[str, str, str]
) -> tuple[Node, ...] | None:
    """Of experts with matrices of their own, all of one shape."""
    tokens = view.shape(read[0])
    chosen = view.shape(read[1])
    names = [name for _, matrices in sorted(experts.items()) for name in matrices]
    gates, ups, downs = ({view.shape(name) for name in names[place::3]} for place in range(3))
    types = {view.type_of(name).dtype for name in (read[0], node.outputs[0], *names)}
    inner = next(iter(gates))[-1]
    fits = (
        gates == ups == {(tokens[-1], inner)} and downs == {(inner, tokens[-1])} and len(types) == 1
    )
    if (
        not fits
        or sorted(experts) != list(range(_count(view, read[1])))
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


def _mixture(view: View, node: Node, unit: Unit, read: tuple[str, str, str]) -> tuple[Node, ...]:
    nodes = []
    operands = list(read)
    for layer in (unit.first, unit.second):
        weight = layer.weight
        if layer.turned:
            type_ = view.type_of(layer.weight)
            weight = f"{node.outputs[0]}_weight_{len(operands)}"
            shape = (type_.shape[0], type_.shape[2], type_.shape[1])
            view.made[weight] = Value(weight, type_.dtype, shape)
            perm = (("perm", (0, 2, 1)),)
            nodes.append(
                Node(
                    f"{node.name}/weight_{len(operands)}",
                    "Transpose",
                    (layer.weight,),
                    (weight,),
                    perm,
                )
            )
        operands += [weight, layer.bias]
    operands = operands if operands[-1] else operands[:-1]
    return (
        *nodes,
        Node(node.name, "Experts", tuple(operands), node.outputs, unit.attributes, "autopipe"),
    )


def _fits(view: View, unit: Unit, source: str, chosen: str, shares: str, result: str) -> bool:
    """True if tokens, what a TopK chose for them, and layers have shapes that go together, and one
    type.
    """
    first, second = (
        (shape[0], shape[2], shape[1]) if layer.turned else shape
        for layer, shape in ((each, view.shape(each.weight)) for each in (unit.first, unit.second))
    )
    tokens = view.shape(source)
    return (
        len(tokens) == len(view.shape(chosen)) == 2
        and tokens[0] == view.shape(chosen)[0]
        and first[0] == _count(view, chosen)
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


def _flat(view: View, name: str) -> str:
    """The value of which `name` has the elements in the same order."""
    for _ in range(MOST_STEPS):
        if (node := view.made_by(name, *_RESHAPING)) is None:
            break
        name = node.inputs[0]
    return name


def _shaped(view: View, name: str, shape: tuple[int, ...]) -> str:
    """The value of this shape that has the elements of `name` in the same order, "" where there is
    none.
    """
    for _ in range(MOST_STEPS):
        if view.shape(name) == shape:
            return name
        if (node := view.made_by(name, *_RESHAPING)) is None:
            break
        name = node.inputs[0]
    return ""


def _repeated(view: View, name: str) -> str:
    """[tokens, features] where each row is repeated for the token's experts, else ""."""
    path = view.path(_flat(view, name), "Expand|Tile", "|".join(_RESHAPING))
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


def _unit(view: View, name: str, layer: Callable[[View, str], Layer | None]) -> Unit | None:
    """A gated unit of Swish between two layers."""
    second = layer(view, name)
    node = view.made_by(_flat(view, second.source), "SwiGLU") if second is not None else None
    if second is None or node is None:
        return None
    gates, beta, limit = _settings(view, node)
    source, in_turn = view.halves(*gates)
    first = layer(view, source) if source else None
    if first is None:
        return None
    alpha = node.number("alpha", 1.0)
    attributes: dict[str, Attribute] = {
        "activation_type": "swiglu",
        "swiglu_fusion": _IN_TURN if in_turn else _HALVES,
    }
    attributes |= {"activation_alpha": alpha} if alpha != 1.0 else {}
    attributes |= {"activation_beta": beta} if beta else {}
    attributes |= {"swiglu_limit": limit} if limit < math.inf else {}
    return Unit(first, second, tuple(sorted(attributes.items())))


def _settings(view: View, node: Node) -> tuple[tuple[str, str], float, float]:
    """Gates and what they gate, what is added to the latter, and the number that clamps gates from
    above and the others on both sides.
    """
    gate, up = node.inputs
    value, beta = view.sum_with(up)
    up, beta = (up, 0.0) if math.isnan(beta) else (value, beta)
    clips = [view.made_by(each, "Clip") for each in (gate, up)]
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


def _of_each(view: View, name: str) -> Layer | None:
    """A product of each row with the matrix that a number of its own looks up, and a bias looked up
    alike.
    """
    bias = index = ""
    added = view.made_by(_flat(view, name), "Add")
    for left, right in (added.inputs, added.inputs[::-1]) if added is not None else ():
        bias, index = _row_of(view, right, 2)
        if bias:
            name = left
            break
    product = view.made_by(_flat(view, name), "MatMul")
    for matrix, vector in (product.inputs, product.inputs[::-1]) if product is not None else ():
        weight, own = _row_of(view, matrix, 3)
        if not weight or index not in ("", own) or product is None:
            continue
        turned = matrix == product.inputs[1]
        (rows, *sides) = view.shape(matrix)
        if view.shape(vector) == ((rows, 1, sides[0]) if turned else (rows, sides[1], 1)):
            return Layer(_flat(view, vector), weight, turned, own, bias)
    return None


def _row_of(view: View, name: str, rank: int) -> tuple[str, str]:
    """A parameter of `rank` and the numbers by which its rows are looked up; ("", "") for anything
    else.
    """
    node = view.made_by(name, "GatherND", "Gather")
    if node is None or node.integer("batch_dims") or node.integer("axis"):
        return "", ""
    weight, index = node.inputs
    if (
        view.graph.parameter(weight) is None
        or len(view.shape(weight)) != rank
        or len(view.shape(name)) != rank
    ):
        return "", ""
    return weight, _flat(view, index)


def _of_one(view: View, name: str) -> Layer | None:
    """A product of all rows with the matrix of one expert, whose number is known."""
    product = view.made_by(name, "MatMul")
    if product is None:
        return None
    transpose = view.made_by(product.inputs[1], "Transpose")
    matrix = view.made_by(product.inputs[1] if transpose is None else transpose.inputs[0], "Gather")
    if matrix is None or matrix.integer("axis") or view.graph.parameter(matrix.inputs[0]) is None:
        return None
    if len(view.shape(matrix.inputs[0])) != 3 or view.shape(matrix.inputs[1]):
        return None
    return Layer(product.inputs[0], matrix.inputs[0], transpose is None, matrix.inputs[1])


def _own(view: View, name: str) -> Unit | None:
    """A gated unit of Swish whose matrices are an expert's own."""
    down = _product(view, name)
    node = view.made_by(down.source, "SwiGLU") if down is not None else None
    gate, up = (_product(view, each) for each in node.inputs) if node is not None else (None, None)
    if (
        down is None
        or gate is None
        or up is None
        or node is None
        or node.number("alpha", 1.0) != 1.0
    ):
        return None
    gate, up = (
        dataclasses.replace(each, source=_unturned(view, each.source)) for each in (gate, up)
    )
    return Unit(gate, down, up=up.weight) if gate.source == up.source else None


def _unturned(view: View, name: str) -> str:
    """The first value of this shape that has the elements of `name` in the same order."""
    shape = view.shape(name)
    found = name
    for _ in range(MOST_STEPS):
        node = view.made_by(name, *_RESHAPING)
        if node is None:
            break
        name = node.inputs[0]
        found = name if view.shape(name) == shape else found
    return found


def _product(view: View, name: str) -> Layer | None:
    """A product with a parameter that is a matrix."""
    node = view.made_by(name, "MatMul")
    if (
        node is None
        or view.graph.parameter(node.inputs[1]) is None
        or len(view.shape(node.inputs[1])) != 2
    ):
        return None
    return Layer(node.inputs[0], node.inputs[1], False, "")


def _term(view: View, name: str) -> tuple[Unit, str, str, tuple[str, int]] | None:
    """A chosen expert's unit, what is chosen, the shares, and the expert's place (see `_place`), of
    the results of one expert times its share of each token, 0 for tokens that did not choose it.
    """
    node = view.made_by(name, "Where")
    product = view.made_by(node.inputs[1], "Mul") if node is not None else None
    if node is None or product is None or not view.zeros(node.inputs[2]):
        return None
    unit = _unit(view, product.inputs[0], _of_one) or _own(view, product.inputs[0])
    total = view.made_by(_flat(view, product.inputs[1]), "ReduceSum")
    if unit is None or total is None or view.shape(product.inputs[1])[1:] != (1,):
        return None
    share = view.made_by(total.inputs[0], "Where")
    if share is None or not view.zeros(share.inputs[2]) or not _by_slots(view, total):
        return None
    chosen, index = _choice(view, share.inputs[0])
    shares = _turned(view, share.inputs[1], view.shape(share.inputs[0]))
    place = _place(view, index) if chosen else None
    layers = () if unit.up else (unit.first, unit.second)
    if not shares or place is None or (unit.up and place[0]):
        return None
    if any(_place(view, each.index) != place for each in layers):
        return None
    if not _any(view, node.inputs[0], share.inputs[0]):
        return None
    return unit, chosen, shares, place


def _by_slots(view: View, node: Node) -> bool:
    """True for a sum along the first of two axes."""
    axes = view.known.array(node.inputs[1]) if len(node.inputs) > 1 else None
    stated = tuple(axes.tolist()) if axes is not None else node.integers("axes")
    return stated in ((0,), (-2,)) and len(view.shape(node.inputs[0])) == 2


def _choice(view: View, name: str) -> tuple[str, str]:
    """The chosen experts, [tokens, k], and the name of an expert's number, of a mask [k, tokens]
    where it was chosen; "" for anything else.
    """
    path = view.path(name, "Cast", "Gather", "Transpose", "OneHot")
    if not path:
        return "", ""
    _, row, transpose, hot = path
    is_row = not view.shape(row.inputs[1]) and not row.integer("axis")
    return (hot.inputs[0], row.inputs[1]) if is_row and _is_hot(view, transpose, hot) else ("", "")


def _is_hot(view: View, transpose: Node, hot: Node) -> bool:
    """True for ones where an expert was chosen, [experts, k, tokens]."""
    values = view.known.array(hot.inputs[2])
    is_hot = values is not None and values.tolist() == [0, 1] and hot.integer("axis", -1) in (-1, 2)
    return is_hot and transpose.integers("perm") == (2, 1, 0)


def _place(view: View, index: str) -> tuple[str, int] | None:
    """ "" and an expert's number where it is known, else a vector that a Split takes apart and the
    place in it.
    """
    number = view.scalar(index)
    if number is not None:
        return "", int(number)
    name = _flat(view, index)
    split = view.writers.get(name)
    if split is None or split.op != "Split" or split.domain or math.prod(view.shape(name)) != 1:
        return None
    return split.inputs[0], split.outputs.index(name)


def _hit(view: View, vector: str, chosen: str) -> int:
    """How many numbers a vector has that are those of experts with tokens, in order; a large number
    for anything else.

    A traced loop runs over as many as its example had. Where there are others the file is not
    defined.
    """
    name = _flat(view, vector)
    unknown = 1 << 62
    turned = view.made_by(name, "Transpose")
    if turned is not None and 1 in view.shape(name) and len(view.shape(name)) == 2:
        name = _flat(view, turned.inputs[0])
    first = view.made_by(name, "Gather")
    places = view.known.array(first.inputs[1]) if first is not None else None
    order = view.writers.get(first.inputs[0]) if first is not None else None
    if (
        places is None
        or order is None
        or order.op != "TopK"
        or order.outputs[1:] != (first and first.inputs[0],)
    ):
        return unknown
    path = view.path(
        order.inputs[0], "Add", "Mul", "Cast", "Not", "Greater", "ReduceSum", "Transpose", "OneHot"
    )
    shape = view.shape(order.inputs[0])
    if (
        not path
        or len(shape) != 1
        or order.integer("largest", 1)
        or places.tolist() != list(range(places.size))
    ):
        return unknown
    ranks = view.known.array(path[0].inputs[1])
    extent = view.scalar(path[1].inputs[1])
    is_ranked = ranks is not None and ranks.tolist() == list(range(shape[0])) and extent == shape[0]
    is_counted = view.scalar(path[4].inputs[1]) == 0 and not path[5].integer("keepdims", 1)
    is_chosen = path[7].inputs[0] == chosen and _is_hot(view, path[6], path[7])
    return places.size if is_ranked and is_counted and is_chosen else unknown


def _turned(view: View, name: str, shape: tuple[int, ...]) -> str:
    """[tokens, k] of which a value of `shape` [k, tokens] is the transpose, else ""."""
    transpose = view.made_by(_flat(view, name), "Transpose")
    if transpose is None or view.shape(name) != shape:
        return ""
    perm = transpose.integers("perm")
    read = view.shape(transpose.inputs[0])
    is_turned = (
        perm[:2] == (1, 0) and perm[2:] == tuple(range(2, len(read))) and read[:2] == shape[::-1]
    )
    return _shaped(view, transpose.inputs[0], shape[::-1]) if is_turned else ""


def _any(view: View, name: str, mask: str) -> bool:
    """True if a mask of tokens is where any of the slots of `mask` [k, tokens] chose."""
    path = view.path(_flat(view, name), "Cast", "ReduceSum", "Cast")
    return bool(path) and path[2].inputs[0] == mask and _by_slots(view, path[1])
