"""From an ONNX graph to the layers of the PaSE paper: a rewriting by rules that know operators and
no model by name.

Views drop out. Pointwise operations join what they follow. Three projections that one attention
reads are one product, and stacked LSTMs of equal shape one layer. What no rule knows runs
elementwise over its own iteration space.

Dimensions that a reshape has merged stay apart: a value remembers which dimensions of a layer's
result make up each of its own, and a layer that reads it gets an axis for each of them. So a
product over merged heads has two summed axes, as the paper writes it (`bhlk,hek->ble`), and a loss
over flattened positions still knows batch and position.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopipe.ir.graph import Graph
from autopipe.ir.ops import operator_of, space_of
from autopipe.ir.ops.linear_cross_entropy import WEIGHT
from autopipe.ir.placement import recomputed_nodes
from autopipe.ir.space import AxisKind
from autopipe.passes.placement.pase.paper_costs import (
    Axis,
    Cost,
    CrossEntropy,
    Elementwise,
    Extents,
    Layer,
    LayerEdge,
    LayerGraph,
    Movement,
    Norm,
    Place,
    Pooling,
    Product,
    Recurrent,
    Reduction,
    Softmax,
    Tensor,
)

Words = tuple[tuple[str, ...], ...]
"""For each dimension of a tensor, the names of the axes that index it, outer to inner; () where
none may cut it.
"""

Indices = Mapping[str, tuple[int, ...]]
"""For each named axis, the layer's axes that it became: several where what is read has it in
several dimensions.
"""

Groups = tuple[tuple[int, ...], ...]
Operand = tuple[Place | None, Words]
"""A value that a layer reads: free, without an edge, where it has no place."""


class LayerGraphBuilder:
    """The paper's graph while it grows. `places` holds the values that layers make; all others are
    free to read.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.places: dict[str, Place] = {}
        self.layers: list[Layer] = []
        self.pointwise: Counter[int] = Counter()
        """Pointwise operations that each layer stands for."""
        self._edges: dict[tuple[int, int], LayerEdge] = {}

    def shape_of(self, name: str) -> Extents:
        return self.graph.type_of(name).shape

    def lay(
        self,
        name: str,
        nodes: Sequence[int],
        axes: Mapping[str, int | Extents],
        operands: Iterable[Operand],
        results: Iterable[tuple[Words, Extents]],
        cost: Callable[[Indices], Cost],
        whole: Iterable[str] = (),
        aliases: tuple[tuple[str, str], ...] = (),
        inside: int | None = None,
    ) -> tuple[Place, ...]:
        """Append a layer and the edges to it; the places of its results.

        `axes` are extents by name, in the layer's order, or the factors of an extent. Each is taken
        apart as finely as it says or an operand has it; those in `whole` are not cut. `results` are
        words and shapes.
        """
        placed = [(place, words) for place, words in operands if place is not None]
        factors = {
            word: (extent,) if isinstance(extent, int) else extent for word, extent in axes.items()
        }
        for place, words in placed:
            extents = self.tensor(place).extents
            for dimension, group in zip(words, place.groups, strict=True):
                if len(dimension) == 1 and len(group) > len(factors[dimension[0]]):
                    factors[dimension[0]] = tuple(extents[each] for each in group)
        own: list[Axis] = []
        indices: dict[str, tuple[int, ...]] = {}
        for word, parts in factors.items():
            indices[word] = tuple(range(len(own), len(own) + len(parts)))
            names = (
                [word]
                if len(parts) == 1
                else [f"{word}{position}" for position in range(len(parts))]
            )
            own += [
                Axis(each, extent, word in whole) for each, extent in zip(names, parts, strict=True)
            ]
        read = tuple(self._operand(place, words, indices, own) for place, words in placed)
        written = [_result(words, shape, indices, own) for words, shape in results]
        tensors = tuple(tensor for tensor, _ in written)
        layer = Layer(
            tuple(own), read, tensors, cost(indices), False, name, tuple(nodes), aliases, inside
        )
        index = self.append(layer, [place for place, _ in placed])
        return tuple(Place(index, result, groups) for result, (_, groups) in enumerate(written))

    def lay_node(
        self,
        index: int,
        axes: Mapping[str, int | Extents],
        results: Iterable[Words | None],
        cost: Callable[[Indices], Cost],
        operands: Iterable[Words | None] | None = None,
        whole: Iterable[str] = (),
        aliases: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """Append the layer of a node, and the edges to it from its first operands; its first
        results lie there.

        Where nothing is said of operands there is one, with a dimension for each axis.
        """
        node = self.graph.nodes[index]
        inputs = zip(node.inputs, [_each(axes)] if operands is None else operands, strict=False)
        read = [
            (self.places.get(name), words) for name, words in inputs if name and words is not None
        ]
        made = {
            name: words
            for name, words in zip(node.outputs, results, strict=False)
            if words is not None
        }
        shapes = [(words, self.shape_of(name)) for name, words in made.items()]
        places = self.lay(node.name, (index,), axes, read, shapes, cost, whole, aliases)
        self.places.update(zip(made, places, strict=True))

    def append(self, layer: Layer, operands: Sequence[Place]) -> int:
        """Append a layer that reads `operands`; its index. Of several edges from one layer, the
        last stands for all.
        """
        index = len(self.layers)
        self.layers.append(layer)
        for operand, place in enumerate(operands):
            self._edges[place.layer, index] = LayerEdge(place.layer, index, place.result, operand)
        return index

    def absorb(self, index: int, place: Place, **changes: Any) -> None:
        """Let the layer at `place` stand for a node too, whose results lie there: it costs nothing
        but `changes`.
        """
        node = self.graph.nodes[index]
        layer = self.layers[place.layer]
        self.layers[place.layer] = replace(layer, nodes=(*layer.nodes, index), **changes)
        self.places.update((name, place) for name in node.outputs if name)

    def tensor(self, place: Place) -> Tensor:
        return self.layers[place.layer].results[place.result]

    def finished(self, cutoff: int) -> LayerGraph:
        edges = tuple(self._edges[pair] for pair in sorted(self._edges))
        return LayerGraph(tuple(self.layers), edges, dict(self.places), cutoff)

    def _operand(self, place: Place, words: Words, indices: Indices, own: Sequence[Axis]) -> Tensor:
        """Operand of the layer, by the dimensions of the result that it comes from."""
        source = self.tensor(place).extents
        axes: list[tuple[int, ...]] = [()] * len(source)
        for dimension, group in zip(words, place.groups, strict=True):
            cuts = tuple(axis for word in dimension for axis in indices[word])
            if len(group) == 1:
                axes[group[0]] = cuts
            elif [source[each] for each in group] == [own[axis].extent for axis in cuts]:
                for each, axis in zip(group, cuts, strict=True):
                    axes[each] = (axis,)
        return Tensor(source, tuple(axes))


def _result(
    words: Words, shape: Extents, indices: Indices, own: Sequence[Axis]
) -> tuple[Tensor, Groups]:
    """A result with a dimension for each axis that indexes it, and one for each dimension that none
    does.

    And for each dimension as words have it those that it became.
    """
    found: list[tuple[int, tuple[int, ...]]] = []
    groups: list[tuple[int, ...]] = []
    for dimension, extent in zip(words, shape, strict=True):
        cuts: list[tuple[int, tuple[int, ...]]] = [
            (own[axis].extent, (axis,)) for word in dimension for axis in indices[word]
        ] or [(extent, ())]
        groups.append(tuple(range(len(found), len(found) + len(cuts))))
        found += cuts
    return Tensor(tuple(extent for extent, _ in found), tuple(axes for _, axes in found)), tuple(
        groups
    )


def _each(names: Iterable[str]) -> Words:
    """A dimension for each axis."""
    return tuple((name,) for name in names)


def regrouped(extents: Sequence[int], shape: Sequence[int]) -> Groups | None:
    """Positions in `extents` that make up each dimension of `shape`, in order; None where one would
    have to be cut.

    Positions of extent 1 are left out.
    """
    rest = [position for position, extent in enumerate(extents) if extent != 1]
    groups = []
    for wanted in shape:
        group: list[int] = []
        while math.prod(extents[each] for each in group) < wanted and rest:
            group.append(rest.pop(0))
        if math.prod(extents[each] for each in group) != wanted:
            return None
        groups.append(tuple(group))
    return tuple(groups)


# Operators that the paper does not name: pointwise ones, views, and whatever else runs over an
# iteration space.

RENAMINGS = frozenset({"Identity", "Cast", "CastLike", "BitCast"})
"""Operators that leave every element where it is and cost the paper nothing."""


def pointwise(draft: LayerGraphBuilder, index: int) -> None:
    """An operation on each element joins the layer that makes them; one that brings two layers
    together is a layer.

    A parameter or constant beside it has to be a vector or a scalar: a bias, a scale.
    """
    node = draft.graph.nodes[index]
    read = [name for name in node.inputs if name in draft.places]
    free = [draft.shape_of(name) for name in node.inputs if name and name not in draft.places]
    small = all(sum(extent > 1 for extent in shape) <= 1 for shape in free)
    result = draft.shape_of(node.outputs[0])
    places = {draft.places[name] for name in read}
    if len(places) != 1 or not small or any(draft.shape_of(name) != result for name in read):
        by_space(draft, index)
        return
    (place,) = places
    layer = draft.layers[place.layer]
    if node.op in RENAMINGS:
        draft.absorb(index, place)
        return
    # Products and elementwise layers count operations up to the last activation: a bias or scale
    # alone belongs to them.
    draft.pointwise[place.layer] += 1
    cost = layer.cost
    if not free and isinstance(cost, Product | Elementwise):
        cost = replace(cost, pointwise=draft.pointwise[place.layer])
    draft.absorb(index, place, cost=cost)


def transpose(draft: LayerGraphBuilder, index: int) -> None:
    """A permutation of dimensions drops out."""
    node = draft.graph.nodes[index]
    place = draft.places[node.inputs[0]]
    order = node.integers("perm", tuple(range(len(place.groups)))[::-1])
    draft.absorb(index, replace(place, groups=tuple(place.groups[axis] for axis in order)))


def by_space(draft: LayerGraphBuilder, index: int) -> None:
    """A layer over the operator's own iteration space; only axes that every result has may be
    cut.
    """
    node = draft.graph.nodes[index]
    row = operator_of(node)
    assert row is not None, f"{node.op} has no row"
    if node.op in RENAMINGS and node.inputs[0] in draft.places:
        draft.absorb(index, draft.places[node.inputs[0]])
        return
    space = space_of(draft.graph, node)
    sums = (AxisKind.SUM, AxisKind.MEAN)
    reduced = [axis.name for axis in space.axes if row.kind == "reduction" and axis.kind in sums]
    whole = {
        a.name for a in space.axes if a.kind is not AxisKind.PARALLEL and a.name not in reduced
    }

    def cost(indices: Indices) -> Cost:
        if row.kind == "reduction":
            return Reduction(tuple(axis for word in reduced for axis in indices[word]))
        return Movement() if row.kind in ("view", "memory") else Elementwise()

    draft.lay_node(index, space.axis_sizes(), space.results, cost, space.operands, whole)


def reshape(draft: LayerGraphBuilder, index: int) -> None:
    """Reshape, Flatten, Squeeze and Unsqueeze.

    What only adds or drops dimensions of extent one, puts the rows of a matrix one after the other,
    or merges axes of a product (heads) drops out. Anything else has to flatten the tensor first,
    cut into contiguous pieces on both sides.
    """
    node = draft.graph.nodes[index]
    place = draft.places[node.inputs[0]]
    shape = draft.shape_of(node.outputs[0])
    source = draft.tensor(place).extents
    order = [dimension for group in place.groups for dimension in group]
    extents = [source[dimension] for dimension in order]
    groups = regrouped(extents, shape)
    if groups is not None:
        only_rows = all(group != groups[-1] for group in groups if len(group) > 1)
        if only_rows or isinstance(draft.layers[place.layer].cost, Product):
            merged = tuple(tuple(order[position] for position in group) for group in groups)
            draft.absorb(index, replace(place, groups=merged))
            return
    before, after = (
        tuple(Axis(f"d{position}", extent) for position, extent in enumerate(each))
        for each in (extents, shape)
    )
    read = tuple((order.index(each),) if each in order else () for each in range(len(source)))
    written = tuple((position,) for position in range(len(shape)))
    flat, opened = (
        Tensor((math.prod(shape),), (tuple(range(len(axes))),)) for axes in (before, after)
    )
    ravel = Layer(before, (Tensor(source, read),), (flat,), Movement(), True, f"{node.name}/ravel")
    unravel = Layer(
        after, (opened,), (Tensor(shape, written),), Movement(), True, node.name, (index,)
    )
    first = draft.append(ravel, (place,))
    draft.places[node.outputs[0]] = Place(
        draft.append(unravel, (Place(first, 0, ((0,),)),)), 0, written
    )


# Products: each becomes a tile of a matrix product over groups of axes.


def product_of(left: Words, right: Words, result: Words) -> Callable[[Indices], Cost]:
    """The tile of a product whose factors and result are indexed by these axes."""
    first, second, written = (
        {word for words in tensor for word in words} for tensor in (left, right, result)
    )
    groups = (
        first & second & written,
        (first & written) - second,
        (second & written) - first,
        (first | second) - written,
    )

    def cost(indices: Indices) -> Cost:
        batch, rows, columns, summed = (
            tuple(axis for word in indices if word in words for axis in indices[word])
            for words in groups
        )
        return Product(batch, rows, columns, summed)

    return cost


def multiply(draft: LayerGraphBuilder, index: int) -> None:
    """Products over the axes of their own iteration space; an einsum of other than two factors
    counts elementwise.

    Columns that a reshape takes apart are axes each.
    """
    node = draft.graph.nodes[index]
    if node.op == "Einsum" and len(node.inputs) != 2:
        by_space(draft, index)
        return
    space = space_of(draft.graph, node)
    left = space.operands[0]
    right = space.operands[1]
    result = space.results[0]
    assert left is not None and right is not None and result is not None
    order = dict.fromkeys(
        [*(word for dimension in result for word in dimension), *space.axis_sizes()]
    )
    axes: dict[str, int | Extents] = {word: space.axis(word).size for word in order}
    if node.op != "Einsum" and (columns := divided_columns(draft.graph, index)):
        axes["n"] = columns
    draft.lay_node(index, axes, [result], product_of(left, right, result), (left, right))


def divided_columns(graph: Graph, index: int) -> Extents:
    """The extents that a reshape takes a product's columns apart into (heads); () where none does.

    A bias may stand between them.
    """
    name = graph.nodes[index].outputs[0]
    consumers = graph.consumers()
    for _ in range(2):
        readers = consumers.get(name, ())
        if len(readers) != 1:
            return ()
        reader = graph.nodes[readers[0]]
        shape = graph.type_of(name).shape
        if reader.op == "Add" and any(graph.parameter(each) is not None for each in reader.inputs):
            name = reader.outputs[0]
            continue
        divided = graph.type_of(reader.outputs[0]).shape
        lead = len(shape) - 1
        if reader.op == "Reshape" and len(divided) > len(shape) and divided[:lead] == shape[:lead]:
            return divided[lead:]
    return ()


def embed(draft: LayerGraphBuilder, index: int) -> None:
    """A lookup of rows of a table that is a parameter: a product with one-hot rows, which are free
    to read.
    """
    node = draft.graph.nodes[index]
    table, indices = (draft.shape_of(name) for name in node.inputs[:2])
    if (
        draft.graph.parameter(node.inputs[0]) is None
        or len(table) != 2
        or node.integer("axis") != 0
    ):
        by_space(draft, index)
        return
    rows = {f"i{position}": extent for position, extent in enumerate(indices)}
    result = _each([*rows, "e"])
    cost = product_of(_each([*rows, "v"]), _each("ve"), result)
    draft.lay_node(
        index, {**rows, "e": table[1], "v": table[0]}, [result], cost, (), aliases=(("v", "d0"),)
    )


# Attention as the paper has it: one product for queries, keys and values, two products and a
# softmax between them.

HEADS, KEYS, SCORES = map(_each, ("bhlk", "bhmk", "bhlm"))


Projections = tuple[tuple[int, ...], tuple[str, ...]]
"""The nodes between an attention and what its queries, keys and values are projected from; and
those three values, each [batch, length, width].
"""


def projections(graph: Graph) -> dict[int, Projections]:
    """Inputs of each attention, where they are three equal projections, by weights, of values of
    one shape.
    """
    readers = graph.consumers()
    found: dict[int, Projections] = {}
    for index, node in enumerate(graph.nodes):
        if (
            node.op != "Attention"
            or len(graph.type_of(node.inputs[0]).shape) != 4
            or any(node.outputs[1:])
        ):
            continue
        traced = [
            each for name in node.inputs[:3] if (each := _traced(graph, name, readers)) is not None
        ]
        sources = tuple(source for _, source in traced)
        shapes = {graph.type_of(name).shape for name in sources}
        equal = len({graph.type_of(name).shape for name in node.inputs[:3]}) == len(shapes) == 1
        if len(traced) == 3 and equal and len(shapes.pop()) == 3:
            found[index] = tuple(sorted(node for nodes, _ in traced for node in nodes)), sources
    return found


def _traced(
    graph: Graph, name: str, readers: dict[str, tuple[int, ...]]
) -> tuple[list[int], str] | None:
    """The chain of nodes from a product with a weight to `name`, each read by the next alone, and
    what it projects.
    """
    nodes: list[int] = []
    for _ in range(4):
        producer = graph.producer(name)
        if producer is None or len(readers.get(name, ())) != 1:
            return None
        node = graph.nodes[producer]
        nodes.append(producer)
        if node.op == "MatMul" and graph.parameter(node.inputs[1]) is not None:
            return nodes, node.inputs[0]
        data = [each for each in node.inputs if graph.parameter(each) is None]
        if node.op not in ("Add", "Transpose", "Reshape") or (node.op == "Add" and len(data) != 1):
            return None
        name = data[0]
    return None


def attend(draft: LayerGraphBuilder, index: int, projected: Projections | None) -> None:
    """The layers of an attention, with its projections where they are equal; masks are free and
    cost nothing.
    """
    node = draft.graph.nodes[index]
    queries, keys, values = (draft.shape_of(name) for name in node.inputs[:3])
    if (
        len(queries) != 4
        or queries[:2] != keys[:2]
        or queries[3] != values[3]
        or any(node.outputs[1:])
    ):
        by_space(draft, index)
        return
    if projected is None:
        read = tuple(draft.places.get(name) for name in node.inputs[:3])
    else:
        read = _project(draft, node.name, projected, queries)
    extents = dict(zip("bhlk", queries, strict=True)) | {"m": keys[2]}

    def lay(
        part: str,
        order: str,
        operands: Sequence[Operand],
        result: Words,
        cost: Callable[[Indices], Cost],
    ) -> Place:
        axes = {axis: extents[axis] for axis in order}
        results = [(result, tuple(extents[axis] for (axis,) in result))]
        nodes, inside = ((), index) if part else ((index,), None)
        return draft.lay(f"{node.name}{part}", nodes, axes, operands, results, cost, inside=inside)[
            0
        ]

    first = product_of(HEADS, KEYS, SCORES)
    second = product_of(SCORES, KEYS, HEADS)
    scores = lay("/scores", "bhlmk", ((read[0], HEADS), (read[1], KEYS)), SCORES, first)
    weights = lay(
        "/softmax", "bhlm", ((scores, SCORES),), SCORES, lambda found: Softmax(found["m"][0])
    )
    draft.places[node.outputs[0]] = lay(
        "", "bhlkm", ((weights, SCORES), (read[2], KEYS)), HEADS, second
    )


def _project(
    draft: LayerGraphBuilder, name: str, projected: Projections, shape: Extents
) -> tuple[Place, ...]:
    """Queries, keys and values by one product: of one value with three weights, or of three values
    stacked.
    """
    batch, heads, length, width = shape
    nodes, names = projected
    inner = draft.shape_of(names[0])[2]
    sources = [draft.places.get(each) for each in names]
    read = _each("ble")
    operand = sources[0]
    if len(set(names)) > 1:
        axes = {"s": 3, "b": batch, "l": length, "e": inner}
        operands = [(each, read) for each in sources]
        read = _each("sble")
        results = [(read, (3, batch, length, inner))]
        (operand,) = draft.lay(
            f"{name}/stack", (), axes, operands, results, lambda _: Movement(), whole="s"
        )
    axes = {"s": 3, "b": batch, "h": heads, "l": length, "k": width}
    stacked = _each("sbhlk")
    (product,) = draft.lay(
        f"{name}/projections",
        nodes,
        axes | {"e": inner},
        ((operand, read),),
        [(stacked, (3, *shape))],
        product_of(read, _each("shek"), stacked),
        aliases=(("e", "k"),),
    )
    # Between a projection and its heads, values lie in the stacked product, [3, b, h, l, k], heads
    # merged or apart.
    for index in nodes:
        node = draft.graph.nodes[index]
        groups: Groups = (
            ((1,), (3,), (2, 4))
            if len(draft.shape_of(node.outputs[0])) == 3
            else ((1,), (3,), (2,), (4,))
        )
        if node.op == "Transpose":
            groups = ((1,), (2,), (3,), (4,))
        draft.places[node.outputs[0]] = replace(product, groups=groups)
    three = [(HEADS, shape)] * 3
    return draft.lay(
        f"{name}/unstack", (), axes, ((product, stacked),), three, lambda _: Movement(), whole="s"
    )


# Convolutional networks. The spatial axes of a convolution stay whole, as in the prototype.

SPATIAL = "hwd"
KERNEL = "rst"


def convolve(draft: LayerGraphBuilder, index: int) -> None:
    """Conv over (b, c, h, w, r, s, n): rows b h w, summed c r s, columns n."""
    node = draft.graph.nodes[index]
    weight, result = (draft.shape_of(name) for name in (node.inputs[1], node.outputs[0]))
    rank = len(weight) - 2
    spatial = SPATIAL[:rank]
    kernel = KERNEL[:rank]
    extents = (result[0], weight[1], *result[2:], *weight[2:], weight[0])
    axes = dict(zip(f"bc{spatial}{kernel}n", extents, strict=True))
    channels = ("c",) if node.integer("group", 1) == 1 else ()
    uncut: Words = ((),) * rank
    cost = product_of(_each(f"b{spatial}c{kernel}"), _each(f"c{kernel}n"), _each(f"b{spatial}n"))
    draft.lay_node(
        index, axes, [(("b",), ("n",), *uncut)], cost, [(("b",), channels, *uncut)], whole=spatial
    )


def over_image(draft: LayerGraphBuilder, index: int) -> None:
    """A window moved over an image, of whose result every axis may be cut; a batch normalisation;
    or a spatial mean.

    A batch normalisation is for the paper a norm over the batch, whatever statistics the model
    uses.
    """
    node = draft.graph.nodes[index]
    source = draft.shape_of(node.inputs[0])
    result = draft.shape_of(node.outputs[0])
    spatial = tuple(range(2, len(source)))

    def cost(found: Indices) -> Cost:
        match node.op:
            case "BatchNormalization":
                return Norm(found["b"][0])
            case "GlobalAveragePool":
                return Reduction(spatial)
        return Pooling(2, source, node.integers("kernel_shape"))

    averaged = node.op == "GlobalAveragePool"
    axes = dict(zip(f"bc{SPATIAL}", source if averaged else result, strict=False))
    written: Words = (("b",), ("c",), *((),) * len(spatial)) if averaged else _each(axes)
    draft.lay_node(index, axes, [written], cost)


# Layers that work along one axis of every row, and stacked LSTMs.

ALONG: Mapping[str, tuple[int, Callable[[int], Cost]]] = {
    "LayerNormalization": (-1, Norm),
    "RMSNormalization": (-1, Norm),
    "SoftmaxCrossEntropyLoss": (1, CrossEntropy),
}
"""The axis and the cost along it of operators other than softmaxes, which say themselves."""


def along_rows(draft: LayerGraphBuilder, index: int) -> None:
    """Softmax over its axis, the paper's norm over the last one, or a loss over the classes
    (nothing reads its result).

    A layer over every axis of the first operand, with special costs along one.
    """
    node = draft.graph.nodes[index]
    axis, kind = ALONG.get(node.op) or (node.integer("axis", -1), Softmax)
    shape = draft.shape_of(node.inputs[0])
    result = draft.shape_of(node.outputs[0])
    axes = {f"d{position}": extent for position, extent in enumerate(shape)}
    special = list(axes)[axis]
    written: Words = _each(axes) if result == shape else ((),) * len(result)
    draft.lay_node(index, axes, [written], lambda found: kind(found[special][-1]))


def project_classes(draft: LayerGraphBuilder, index: int) -> None:
    """A product and the loss over its columns, two layers."""
    node = draft.graph.nodes[index]
    space = space_of(draft.graph, node)
    x = space.operands[0]
    labels = space.operands[1]
    weight = space.operands[WEIGHT]
    assert x is not None and labels is not None and weight is not None
    scores: Words = (*labels, ("c",))
    axes = {word: space.axis(word).size for (word,) in scores}
    product = product_of(x, weight, scores)
    read = ((draft.places.get(node.inputs[0]), x),)
    made = [(scores, tuple(axes.values()))]
    summed: dict[str, int | Extents] = {**axes, "k": space.axis("k").size}
    (place,) = draft.lay(f"{node.name}/scores", (), summed, read, made, product, inside=index)
    result = draft.shape_of(node.outputs[0])
    written: list[tuple[Words, Extents]] = [(((),) * len(result), result)]
    (draft.places[node.outputs[0]],) = draft.lay(
        node.name,
        (index,),
        axes,
        ((place, scores),),
        written,
        lambda found: CrossEntropy(found["c"][-1]),
    )


def recur(draft: LayerGraphBuilder, index: int) -> None:
    """LSTM over (l, s, b, n, k), steps whole; one that reads another of its own shape joins it as
    one more layer.
    """
    node = draft.graph.nodes[index]
    if (
        not node.outputs[0]
        or node.integer("layout") != 0
        or draft.shape_of(node.outputs[0])[1] != 1
    ):
        by_space(draft, index)
        return
    steps, _, batch, units = draft.shape_of(node.outputs[0])
    inputs = draft.shape_of(node.inputs[0])[-1]
    place = draft.places.get(node.inputs[0])
    if place is not None and _joins(draft, place, inputs, units):
        first, *others = draft.layers[place.layer].axes
        axes = (replace(first, extent=first.extent + 1), *others)
        draft.absorb(index, Place(place.layer, 0, ((0,), (1,), (2,), (3,))), axes=axes)
    else:
        extents = {"l": 1, "s": steps, "b": batch, "n": units, "k": inputs}
        written: Words = (("s",), (), ("b",), ("n",))
        draft.lay_node(index, extents, [written], lambda _: Recurrent(), [_each("sbk")], whole="s")
    # The states are the last step of the result.
    place = draft.places[node.outputs[0]]
    last = replace(place, groups=place.groups[1:])
    draft.places.update((name, last) for name in node.outputs[1:] if name)


def _joins(draft: LayerGraphBuilder, place: Place, inputs: int, units: int) -> bool:
    """True if what is read is the whole result, as it was written, of an LSTM of as many units."""
    layer = draft.layers[place.layer]
    read = tuple(dimension for group in place.groups for dimension in group if dimension != 1)
    return (
        isinstance(layer.cost, Recurrent)
        and read == (0, 2, 3)
        and inputs == units == layer.extents[3]
    )


RULES: Mapping[str, Callable[[LayerGraphBuilder, int], None]] = {
    "AveragePool": over_image,
    "BatchNormalization": over_image,
    "Conv": convolve,
    "Einsum": multiply,
    "Flatten": reshape,
    "Gather": embed,
    "Gemm": multiply,
    "GlobalAveragePool": over_image,
    "LSTM": recur,
    "LayerNormalization": along_rows,
    "LinearCrossEntropy": project_classes,
    "LogSoftmax": along_rows,
    "MatMul": multiply,
    "MaxPool": over_image,
    "RMSNormalization": along_rows,
    "Reshape": reshape,
    "Softmax": along_rows,
    "SoftmaxCrossEntropyLoss": along_rows,
    "Squeeze": reshape,
    "Transpose": transpose,
    "Unsqueeze": reshape,
}
"""The rules for operators that the paper knows."""


def layer_graph(graph: Graph) -> LayerGraph:
    """The paper's graph of a model on one batch.

    Values that depend on no parameter and on no costly operator (inputs, masks, positions), and
    parameters, are free to read: they have no edges. So is what is computed of parameters and
    constants alone.
    """
    draft = LayerGraphBuilder(graph)
    attentions = projections(graph)
    skipped = recomputed_nodes(graph).union(*(nodes for nodes, _ in attentions.values()))
    data = {value.name for value in graph.inputs}
    for index, node in enumerate(graph.nodes):
        if data.isdisjoint(node.inputs):
            continue
        data.update(node.outputs)
        if index in skipped:
            continue
        row = operator_of(node)
        if node.op == "Attention":
            attend(draft, index, attentions.get(index))
        else:
            other = pointwise if row is not None and row.kind == "elementwise" else by_space
            RULES.get(node.op, other)(draft, index)
    return draft.finished(4 if any(node.op == "Conv" for node in graph.nodes) else 1)
