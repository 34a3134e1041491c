"""Attention as the paper has it: one product for queries, keys and values, two products and a softmax between them.

Products: each becomes a tile of a matrix product over groups of axes.

Operators that the paper does not name: pointwise ones, views, and whatever else runs over an iteration space.

From an ONNX graph to the paper's: a small rewriting, by rules that know operators and no model by name.

Views drop out. Pointwise operations join what they follow. Three projections that one attention reads are one product,
and stacked LSTMs of equal shape one layer. What no rule knows runs elementwise over its own iteration space.

Layers of convolutional networks. The spatial axes of a convolution stay whole, as in the prototype.

Reshapes: most of them drop out; others are the paper's flattening to one dimension and back.

Stacked LSTMs: layers of equal shape, one after the other, are one layer with an axis for their number.

Layers that work along one axis of every row: softmax, losses, norms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autopipe.ir.graph import Graph, Node
from autopipe.ir.ops import operator_of, space_of
from autopipe.ir.placement import recomputed_nodes
from autopipe.ir.space import AxisKind, Space
from autopipe.passes.placement.pase.paper_costs import (
    Axis,
    Cost,
    CrossEntropy,
    Elementwise,
    Indices,
    Layer,
    LayerGraph,
    LayerGraphBuilder,
    Movement,
    Norm,
    Pattern,
    Place,
    PlacedLayer,
    Pooling,
    Product,
    Recurrent,
    Reduction,
    Softmax,
    Tensor,
    Words,
    regrouped,
)

RENAMINGS = frozenset({"Identity", "Cast", "CastLike", "BitCast"})
"""Operators that leave every element where it is and cost the paper nothing."""


def pointwise(draft: LayerGraphBuilder, index: int) -> None:
    """An operation on each element joins the layer that makes them; one that brings two layers together is a layer.

    A parameter or constant beside it has to be a vector or a scalar: a bias, a scale.
    """
    node, graph = draft.graph.nodes[index], draft.graph
    places = {draft.places[name] for name in node.inputs if name in draft.places}
    free = [graph.type_of(name).shape for name in node.inputs if name and name not in draft.places]
    small = all(sum(extent > 1 for extent in shape) <= 1 for shape in free)
    if len(places) != 1 or not small or not _same_shape(draft, node):
        by_space(draft, index)
        return
    (place,) = places
    if node.op in RENAMINGS:
        draft.absorb(place, index)
    else:
        draft.fuse(place, index, activates=not free)
    draft.places.update((name, place) for name in node.outputs if name)


def _same_shape(draft: LayerGraphBuilder, node: Node) -> bool:
    graph = draft.graph
    result = graph.type_of(node.outputs[0]).shape
    return all(graph.type_of(name).shape == result for name in node.inputs if name in draft.places)


def transpose(draft: LayerGraphBuilder, index: int) -> None:
    """A permutation of dimensions drops out."""
    node = draft.graph.nodes[index]
    place = draft.places[node.inputs[0]]
    rank = len(place.groups)
    order = node.integers("perm", tuple(range(rank - 1, -1, -1)))
    draft.absorb(place, index)
    groups = tuple(place.groups[axis] for axis in order)
    draft.places[node.outputs[0]] = Place(place.layer, place.result, groups)


def by_space(draft: LayerGraphBuilder, index: int) -> None:
    """A layer over the operator's own iteration space; only axes that every result has may be cut."""
    node, graph = draft.graph.nodes[index], draft.graph
    row = operator_of(node)
    assert row is not None, f"{node.op} has no row"
    if node.op in RENAMINGS and node.inputs[0] in draft.places:
        draft.absorb(draft.places[node.inputs[0]], index)
        draft.places[node.outputs[0]] = draft.places[node.inputs[0]]
        return
    space = space_of(graph, node)
    operands = [
        (draft.places.get(name), words)
        for name, words in zip(node.inputs, space.operands, strict=True)
        if name and words is not None
    ]
    results = [(name, words) for name, words in zip(node.outputs, space.results, strict=True) if words is not None]
    reduced = [
        axis.name for axis in space.axes if row.kind == "reduction" and axis.kind in (AxisKind.SUM, AxisKind.MEAN)
    ]

    def cost(indices: Indices) -> Cost:
        if row.kind == "reduction":
            return Reduction(tuple(axis for word in reduced for axis in indices[word]))
        return Movement() if row.kind in ("view", "memory") else Elementwise()

    pattern = Pattern(
        tuple((axis.name, axis.extent) for axis in space.axes),
        tuple((words, graph.type_of(name).shape) for name, words in results),
        cost,
        frozenset(a.name for a in space.axes if a.kind is not AxisKind.PARALLEL and a.name not in reduced),
    )
    places = draft.lay(node.name, (index,), operands, pattern)
    draft.places.update((name, place) for (name, _), place in zip(results, places, strict=True))


def multiply(draft: LayerGraphBuilder, index: int) -> None:
    """MatMul and Gemm over the axes of their own iteration space; columns that a reshape takes apart are axes each."""
    node = draft.graph.nodes[index]
    columns = divided_columns(draft.graph, index)
    _lay_product(draft, index, space_of(draft.graph, node), (("n", columns),) if columns else ())


def multiply_by_equation(draft: LayerGraphBuilder, index: int) -> None:
    """Einsum of two factors; other equations count elementwise."""
    node = draft.graph.nodes[index]
    if len(node.inputs) == 2:
        _lay_product(draft, index, space_of(draft.graph, node), ())
    else:
        by_space(draft, index)


def product_of(left: Words, right: Words, result: Words, indices: Indices, pointwise: int = 0) -> Cost:
    """The tile of a product whose factors and result are indexed by these axes."""
    first, second, written = ({word for words in tensor for word in words} for tensor in (left, right, result))

    def group(words: set[str]) -> tuple[int, ...]:
        return tuple(axis for word in indices if word in words for axis in indices[word])

    return Product(
        batch=group(first & second & written),
        rows=group((first & written) - second),
        columns=group((second & written) - first),
        summed=group((first | second) - written),
        pointwise=pointwise,
    )


def _lay_product(
    draft: LayerGraphBuilder, index: int, space: Space, divided: tuple[tuple[str, tuple[int, ...]], ...]
) -> None:
    node, graph = draft.graph.nodes[index], draft.graph
    left, right, result = space.operands[0], space.operands[1], space.results[0]
    assert left is not None and right is not None and result is not None
    order = [word for dimension in result for word in dimension]
    order += [axis.name for axis in space.axes if axis.name not in order]
    shape = graph.type_of(node.outputs[0]).shape
    places = [(draft.places.get(name), words) for name, words in zip(node.inputs, (left, right), strict=False)]
    pattern = Pattern(
        tuple((word, space.axis(word).extent) for word in order),
        ((result, shape),),
        lambda indices: product_of(left, right, result, indices),
        divided=divided,
    )
    (draft.places[node.outputs[0]],) = draft.lay(node.name, (index,), places, pattern)


def divided_columns(graph: Graph, index: int) -> tuple[int, ...]:
    """The extents that a reshape takes a product's columns apart into (heads); () where none does.

    A bias may stand between them.
    """
    name, consumers = graph.nodes[index].outputs[0], graph.consumers()
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
    """A lookup of rows of a table that is a parameter: a product with one-hot rows, which are free to read."""
    node, graph = draft.graph.nodes[index], draft.graph
    table, indices = (graph.type_of(name).shape for name in node.inputs[:2])
    if graph.parameter(node.inputs[0]) is None or len(table) != 2 or node.integer("axis") != 0:
        by_space(draft, index)
        return
    rows = tuple((f"i{position}",) for position in range(len(indices)))
    axes = (*((word[0], extent) for word, extent in zip(rows, indices, strict=True)), ("e", table[1]), ("v", table[0]))
    one_hot: Words = (*rows, ("v",))
    result: Words = (*rows, ("e",))
    pattern = Pattern(
        axes,
        ((result, (*indices, table[1])),),
        lambda found: product_of(one_hot, (("v",), ("e",)), result, found),
        aliases=(("v", "d0"),),
    )
    (draft.places[node.outputs[0]],) = draft.lay(node.name, (index,), (), pattern)


HEADS: Words = (("b",), ("h",), ("l",), ("k",))
KEYS: Words = (("b",), ("h",), ("m",), ("k",))
SCORES: Words = (("b",), ("h",), ("l",), ("m",))


@dataclass(frozen=True, slots=True)
class Projections:
    """The nodes between an attention and what its queries, keys and values are projected from.

    `sources` are those three values, each [batch, length, width].
    """

    nodes: tuple[int, ...]
    sources: tuple[str, str, str]


def projections(graph: Graph) -> dict[int, Projections]:
    """Inputs of each attention, where they are three equal projections, by weights, of values of one shape."""
    readers = graph.consumers()
    found = {}
    for index, node in enumerate(graph.nodes):
        if node.op != "Attention" or len(graph.type_of(node.inputs[0]).shape) != 4 or any(node.outputs[1:]):
            continue
        traced = [_traced(graph, name, readers) for name in node.inputs[:3]]
        shapes = {graph.type_of(name).shape for name in node.inputs[:3]}
        sources = [each[1] for each in traced if each is not None]
        if len(sources) < 3 or len(shapes) > 1 or len({graph.type_of(name).shape for name in sources}) > 1:
            continue
        nodes = tuple(sorted(node for each in traced if each is not None for node in each[0]))
        if len(graph.type_of(sources[0]).shape) == 3:
            found[index] = Projections(nodes, (sources[0], sources[1], sources[2]))
    return found


def _traced(graph: Graph, name: str, readers: dict[str, tuple[int, ...]]) -> tuple[list[int], str] | None:
    """The chain of nodes from a product with a weight to `name`, each read by the next alone, and what it projects."""
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
    """The layers of an attention, with its projections where they are equal; masks are free and cost nothing."""
    node, graph = draft.graph.nodes[index], draft.graph
    queries, keys, values = (graph.type_of(name).shape for name in node.inputs[:3])
    if len(queries) != 4 or queries[:2] != keys[:2] or queries[3] != values[3] or any(node.outputs[1:]):
        by_space(draft, index)
        return
    if projected is None:
        operands = [draft.places.get(name) for name in node.inputs[:3]]
    else:
        operands = list(_project(draft, node.name, projected, queries))
    batch, heads, length, width = queries
    score_shape = (batch, heads, length, keys[2])
    axes = (("b", batch), ("h", heads), ("l", length))
    (scores,) = draft.lay(
        f"{node.name}/scores",
        (),
        ((operands[0], HEADS), (operands[1], KEYS)),
        Pattern(
            (*axes, ("m", keys[2]), ("k", width)),
            ((SCORES, score_shape),),
            lambda found: product_of(HEADS, KEYS, SCORES, found),
            inside=index,
        ),
    )
    (weights,) = draft.lay(
        f"{node.name}/softmax",
        (),
        ((scores, SCORES),),
        Pattern((*axes, ("m", keys[2])), ((SCORES, score_shape),), lambda found: Softmax(found["m"][0]), inside=index),
    )
    (draft.places[node.outputs[0]],) = draft.lay(
        node.name,
        (index,),
        ((weights, SCORES), (operands[2], KEYS)),
        Pattern(
            (*axes, ("k", width), ("m", keys[2])),
            ((HEADS, queries),),
            lambda found: product_of(SCORES, KEYS, HEADS, found),
        ),
    )


def _project(draft: LayerGraphBuilder, name: str, projected: Projections, shape: tuple[int, ...]) -> tuple[Place, ...]:
    """Queries, keys and values by one product: of one value with three weights, or of three values stacked."""
    batch, heads, length, width = shape
    inner = draft.graph.type_of(projected.sources[0]).shape[2]
    sources = [draft.places.get(each) for each in projected.sources]
    stack = (("s",), ("b",), ("l",), ("e",))
    read: Words = stack[1:]
    operand = sources[0]
    if len(set(projected.sources)) > 1:
        pattern = Pattern(
            (("s", 3), ("b", batch), ("l", length), ("e", inner)),
            ((stack, (3, batch, length, inner)),),
            lambda _: Movement(),
            whole=frozenset({"s"}),
        )
        (operand,) = draft.lay(f"{name}/stack", (), [(each, read) for each in sources], pattern)
        read = stack
    weight: Words = (("s",), ("h",), ("e",), ("k",))
    heads_of_three: Words = (("s",), *HEADS)
    axes = (("s", 3), ("b", batch), ("h", heads), ("l", length), ("k", width))
    stacked_shape = (3, *shape)
    (product,) = draft.lay(
        f"{name}/projections",
        projected.nodes,
        ((operand, read),),
        Pattern(
            (*axes, ("e", inner)),
            ((heads_of_three, stacked_shape),),
            lambda found: product_of(read, weight, heads_of_three, found),
            aliases=(("e", "k"),),
        ),
    )
    draft.places.update(_inside(draft.graph, projected, product))
    return draft.lay(
        f"{name}/unstack",
        (),
        ((product, heads_of_three),),
        Pattern(axes, ((HEADS, shape),) * 3, lambda _: Movement(), whole=frozenset({"s"})),
    )


def _inside(graph: Graph, projected: Projections, product: Place) -> dict[str, Place]:
    """Where the values between a projection and its heads lie in the stacked product, [3, b, h, l, k]."""
    merged, apart = ((1,), (3,), (2, 4)), ((1,), (3,), (2,), (4,))
    found = {}
    for index in projected.nodes:
        node = graph.nodes[index]
        groups = merged if len(graph.type_of(node.outputs[0]).shape) == 3 else apart
        if node.op == "Transpose":
            groups = ((1,), (2,), (3,), (4,))
        found[node.outputs[0]] = Place(product.layer, product.result, groups)
    return found


SPATIAL = "hwd"
KERNEL = "rst"


def convolve(draft: LayerGraphBuilder, index: int) -> None:
    """Conv over (b, c, h, w, r, s, n): rows b h w, summed c r s, columns n."""
    node, graph = draft.graph.nodes[index], draft.graph
    weight, result = graph.type_of(node.inputs[1]).shape, graph.type_of(node.outputs[0]).shape
    rank = len(weight) - 2
    spatial, kernel = tuple(SPATIAL[:rank]), tuple(KERNEL[:rank])
    extents = (result[0], weight[1], *result[2:], *weight[2:], weight[0])
    channels = ("c",) if node.integer("group", 1) == 1 else ()
    places = draft.lay(
        node.name,
        (index,),
        ((draft.places.get(node.inputs[0]), (("b",), channels, *((),) * rank)),),
        Pattern(
            tuple(zip(("b", "c", *spatial, *kernel, "n"), extents, strict=True)),
            (((("b",), ("n",), *((),) * rank), result),),
            lambda found: Product(
                batch=(),
                rows=tuple(axis for word in ("b", *spatial) for axis in found[word]),
                columns=found["n"],
                summed=tuple(axis for word in ("c", *kernel) for axis in found[word]),
            ),
            whole=frozenset(spatial),
        ),
    )
    draft.places[node.outputs[0]] = places[0]


def pool(draft: LayerGraphBuilder, index: int) -> None:
    """A window moved over an image: every axis of the result may be cut."""
    node, graph = draft.graph.nodes[index], draft.graph
    source, result = graph.type_of(node.inputs[0]).shape, graph.type_of(node.outputs[0]).shape
    words: Words = tuple((word,) for word in ("b", "c", *SPATIAL[: len(result) - 2]))
    pattern = Pattern(
        tuple((word[0], extent) for word, extent in zip(words, result, strict=True)),
        ((words, result),),
        lambda _: Pooling(2, source, node.integers("kernel_shape")),
    )
    places = draft.lay(node.name, (index,), ((draft.places.get(node.inputs[0]), words),), pattern)
    draft.places[node.outputs[0]] = places[0]


def mean_image(draft: LayerGraphBuilder, index: int) -> None:
    """GlobalAveragePool: a mean over all spatial axes."""
    node, graph = draft.graph.nodes[index], draft.graph
    source, result = graph.type_of(node.inputs[0]).shape, graph.type_of(node.outputs[0]).shape
    words: Words = tuple((word,) for word in ("b", "c", *SPATIAL[: len(source) - 2]))
    pattern = Pattern(
        tuple((word[0], extent) for word, extent in zip(words, source, strict=True)),
        (((*words[:2], *((),) * (len(source) - 2)), result),),
        lambda _: Reduction(tuple(range(2, len(source)))),
    )
    places = draft.lay(node.name, (index,), ((draft.places.get(node.inputs[0]), words),), pattern)
    draft.places[node.outputs[0]] = places[0]


def batch_norm(draft: LayerGraphBuilder, index: int) -> None:
    """BatchNormalization: for the paper a norm over the batch, whatever statistics the model uses."""
    node, graph = draft.graph.nodes[index], draft.graph
    shape = graph.type_of(node.outputs[0]).shape
    words: Words = tuple((word,) for word in ("b", "c", *SPATIAL[: len(shape) - 2]))
    pattern = Pattern(
        tuple((word[0], extent) for word, extent in zip(words, shape, strict=True)),
        ((words, shape),),
        lambda found: Norm(found["b"][0]),
    )
    places = draft.lay(node.name, (index,), ((draft.places.get(node.inputs[0]), words),), pattern)
    draft.places[node.outputs[0]] = places[0]


OUT: Words = (("s",), (), ("b",), ("n",))
"""Indices of an LSTM's first result: step, direction, batch, unit."""


def recur(draft: LayerGraphBuilder, index: int) -> None:
    """LSTM over (l, s, b, n, k), steps whole; one that reads another of its own shape joins it as one more layer."""
    node, graph = draft.graph.nodes[index], draft.graph
    if not node.outputs[0] or node.integer("layout") != 0:
        by_space(draft, index)
        return
    steps, directions, batch, units = graph.type_of(node.outputs[0]).shape
    inputs = graph.type_of(node.inputs[0]).shape[-1]
    if directions != 1:
        by_space(draft, index)
        return
    place = draft.places.get(node.inputs[0])
    if place is not None and _joins(draft, place, inputs, units):
        layer = draft.layers[place.layer].layer
        stacked = replace(layer.axes[0], extent=layer.axes[0].extent + 1)
        draft.replace(place.layer, replace(layer, axes=(stacked, *layer.axes[1:])), index)
        _stand(draft, node, Place(place.layer, 0, ((0,), (1,), (2,), (3,))))
        return
    pattern = Pattern(
        (("l", 1), ("s", steps), ("b", batch), ("n", units), ("k", inputs)),
        ((OUT, (steps, 1, batch, units)),),
        lambda _: Recurrent(),
        whole=frozenset({"s"}),
    )
    places = draft.lay(node.name, (index,), ((place, (("s",), ("b",), ("k",))),), pattern)
    _stand(draft, node, places[0])


def _stand(draft: LayerGraphBuilder, node: Node, place: Place) -> None:
    """Let `place` stand for an LSTM's results: its states are the last step of its first one."""
    last = Place(place.layer, place.result, place.groups[1:])
    draft.places.update((name, last) for name in node.outputs[1:] if name)
    draft.places[node.outputs[0]] = place


def _joins(draft: LayerGraphBuilder, place: Place, inputs: int, units: int) -> bool:
    """True if what is read is the whole result, as it was written, of an LSTM of as many units."""
    layer = draft.layers[place.layer].layer
    read = tuple(dimension for group in place.groups for dimension in group if dimension != 1)
    return isinstance(layer.cost, Recurrent) and read == (0, 2, 3) and inputs == units == layer.extents[3]


def reshape(draft: LayerGraphBuilder, index: int) -> None:
    """Reshape, Flatten, Squeeze and Unsqueeze.

    What only adds or drops dimensions of extent one, puts the rows of a matrix one after the other, or merges axes of a
    product (heads) drops out. Anything else has to flatten the tensor first.
    """
    node = draft.graph.nodes[index]
    place = draft.places[node.inputs[0]]
    shape = draft.graph.type_of(node.outputs[0]).shape
    groups = _dropped_out(draft, place, shape)
    if groups is not None:
        draft.absorb(place, index)
        draft.places[node.outputs[0]] = Place(place.layer, place.result, groups)
    else:
        draft.places[node.outputs[0]] = _flattened(draft, index, place, shape)


def _dropped_out(draft: LayerGraphBuilder, place: Place, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...] | None:
    """Dimensions that make up each dimension of `shape`, where the reshape is no more than that."""
    order = [dimension for group in place.groups for dimension in group]
    extents = draft.tensor(place).extents
    groups = regrouped([extents[dimension] for dimension in order], shape)
    if groups is None:
        return None
    merged = [group for group in groups if len(group) > 1]
    only_rows = all(group != groups[-1] for group in merged)
    if merged and not only_rows and not isinstance(draft.layers[place.layer].layer.cost, Product):
        return None
    return tuple(tuple(order[position] for position in group) for group in groups)


def _flattened(draft: LayerGraphBuilder, index: int, place: Place, shape: tuple[int, ...]) -> Place:
    """The tensor flattened and given its new dimensions, cut into contiguous pieces on both sides."""
    name, source = draft.graph.nodes[index].name, draft.tensor(place).extents
    order = [dimension for group in place.groups for dimension in group]
    axis_of = {dimension: position for position, dimension in enumerate(order)}
    before = tuple(Axis(f"d{position}", source[dimension]) for position, dimension in enumerate(order))
    read = tuple((axis_of[dimension],) if dimension in axis_of else () for dimension in range(len(source)))
    flat = Tensor((math.prod(shape),), (tuple(range(len(before))),))
    ravel = Layer(before, (Tensor(source, read),), (flat,), Movement(), contiguous=True)
    first = draft.append(PlacedLayer(f"{name}/ravel", ravel, ()), (place,))
    after = tuple(Axis(f"d{position}", extent) for position, extent in enumerate(shape))
    each = tuple((position,) for position in range(len(shape)))
    flat = Tensor((math.prod(shape),), (tuple(range(len(after))),))
    unravel = Layer(after, (flat,), (Tensor(shape, each),), Movement(), contiguous=True)
    last = draft.append(PlacedLayer(name, unravel, (index,)), (Place(first, 0, ((0,),)),))
    return Place(last, 0, each)


def softmax(draft: LayerGraphBuilder, index: int) -> None:
    """Softmax over its axis."""
    node = draft.graph.nodes[index]
    _lay_rows(draft, index, node.integer("axis", -1), Softmax)


def normalise(draft: LayerGraphBuilder, index: int) -> None:
    """LayerNormalization: the paper's norm over the last axis."""
    _lay_rows(draft, index, -1, Norm)


def classify(draft: LayerGraphBuilder, index: int) -> None:
    """SoftmaxCrossEntropyLoss over the classes, dimension 1; nothing reads its result."""
    _lay_rows(draft, index, 1, CrossEntropy)


def _lay_rows(draft: LayerGraphBuilder, index: int, axis: int, kind: Callable[[int], Cost]) -> None:
    """A layer over every axis of the first operand, with special costs along one."""
    node, graph = draft.graph.nodes[index], draft.graph
    shape, result = graph.type_of(node.inputs[0]).shape, graph.type_of(node.outputs[0]).shape
    words: Words = tuple((f"d{position}",) for position in range(len(shape)))
    along = words[axis][0]
    written: Words = words if result == shape else ((),) * len(result)
    pattern = Pattern(
        tuple((word[0], extent) for word, extent in zip(words, shape, strict=True)),
        ((written, result),),
        lambda found: kind(found[along][-1]),
    )
    places = draft.lay(node.name, (index,), ((draft.places.get(node.inputs[0]), words),), pattern)
    draft.places[node.outputs[0]] = places[0]


RULES: Mapping[str, Callable[[LayerGraphBuilder, int], None]] = {
    "AveragePool": pool,
    "BatchNormalization": batch_norm,
    "Conv": convolve,
    "Einsum": multiply_by_equation,
    "Flatten": reshape,
    "Gather": embed,
    "Gemm": multiply,
    "GlobalAveragePool": mean_image,
    "LSTM": recur,
    "LayerNormalization": normalise,
    "LogSoftmax": softmax,
    "MatMul": multiply,
    "MaxPool": pool,
    "RMSNormalization": normalise,
    "Reshape": reshape,
    "Softmax": softmax,
    "SoftmaxCrossEntropyLoss": classify,
    "Squeeze": reshape,
    "Transpose": transpose,
    "Unsqueeze": reshape,
}
"""The rules for operators that the paper knows."""


def layer_graph(graph: Graph) -> LayerGraph:
    """The paper's graph of a model on one batch.

    Values that depend on no parameter and on no costly operator (inputs, masks, positions), and parameters, are free to
    read: they have no edges.
    """
    draft = LayerGraphBuilder(graph)
    attentions = projections(graph)
    absorbed = {node for each in attentions.values() for node in each.nodes}
    skipped = recomputed_nodes(graph) | absorbed | _of_weights(graph)
    for index, node in enumerate(graph.nodes):
        if index in skipped:
            continue
        row = operator_of(node)
        if node.op == "Attention":
            attend(draft, index, attentions.get(index))
        elif node.op in RULES:
            RULES[node.op](draft, index)
        elif row is not None and row.kind == "elementwise":
            pointwise(draft, index)
        else:
            by_space(draft, index)
    convolutional = any(node.op == "Conv" for node in graph.nodes)
    return draft.finished(4 if convolutional else 1)


def _of_weights(graph: Graph) -> frozenset[int]:
    """Nodes that read nothing but parameters, constants and what such nodes write."""
    data = {value.name for value in graph.inputs}
    found = set()
    for index, node in enumerate(graph.nodes):
        if any(name in data for name in node.inputs):
            data.update(node.outputs)
        else:
            found.add(index)
    return frozenset(found)
