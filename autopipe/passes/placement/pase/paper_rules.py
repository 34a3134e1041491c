"""Conversion of an ONNX graph to the layers of the PaSE paper, by one rule per operator.

A rule is a function that adds ONNX node `index` to the layers of `builder`. Views are removed.
Pointwise operations are merged into the layer before them. Three projections that one attention
reads become one matmul, and stacked LSTMs of equal shape become one layer. An operator without a
rule becomes an elementwise layer over its iteration space.

Dimensions that a reshape merges remain separate axes. The location of a value stores which
dimensions of a layer's result form each dimension of the value, and a layer that reads the value
gets one axis per dimension of the result. So a matmul over merged attention heads has two summed
axes, as in the paper (`bhlk,hek->ble`), and a loss over flattened positions has a batch and a
position axis.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopipe.ir.graph import Graph
from autopipe.ir.ops import operator_of, space_of
from autopipe.ir.ops.linear_cross_entropy import WEIGHT_OPERAND
from autopipe.ir.placement import recomputed_nodes
from autopipe.ir.space import AxisKind
from autopipe.passes.placement.pase.paper_costs import (
    Axis,
    Cost,
    CrossEntropyCost,
    ElementwiseCost,
    Extents,
    FreeCost,
    Layer,
    LayerEdge,
    LayerGraph,
    LSTMCost,
    MatmulCost,
    NormCost,
    PoolingCost,
    ReductionCost,
    SoftmaxCost,
    Tensor,
    ValueLocation,
)

AxisNames = tuple[tuple[str, ...], ...]
"""For each dimension of a tensor: the names of the axes that index it, from the outermost to the
innermost; () if the dimension cannot be split.
"""

Indices = Mapping[str, tuple[int, ...]]
"""For each axis name: the positions of the layer's axes that it became. There are several if an
operand has the axis in several dimensions.
"""

Groups = tuple[tuple[int, ...], ...]
Operand = tuple[ValueLocation | None, AxisNames]
"""A value that a layer reads, as (location, axis names). A value without a location is free to
read: it has no edge and no cost.
"""


class LayerGraphBuilder:
    """Builds the layer graph of the paper node by node. `locations` contains the values that layers
    produce. All other values are free to read: they have no edges.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.locations: dict[str, ValueLocation] = {}
        self.layers: list[Layer] = []
        self.pointwise: Counter[int] = Counter()
        """Number of pointwise operations merged into each layer."""
        self._edges: dict[tuple[int, int], LayerEdge] = {}

    def shape_of(self, name: str) -> Extents:
        return self.graph.type_of(name).shape

    def add_layer(
        self,
        name: str,
        nodes: Sequence[int],
        axes: Mapping[str, int | Extents],
        operands: Iterable[Operand],
        results: Iterable[tuple[AxisNames, Extents]],
        cost: Callable[[Indices], Cost],
        unsplit: Iterable[str] = (),
        aliases: tuple[tuple[str, str], ...] = (),
        inside: int | None = None,
    ) -> tuple[ValueLocation, ...]:
        """Append a layer and the edges to it, and return the locations of its results.

        `axes` contains, by axis name and in the layer's order, the size of each axis, or a tuple of
        factors of the size. An axis becomes several axes if it has several factors, or if an
        operand has it in several dimensions. The axes in `unsplit` are not split. `results`
        contains (axis names, shape) pairs. `cost` returns the layer's cost, given the positions of
        its axes. `aliases` and `inside` are fields of `Layer`.
        """
        placed = [
            (location, axis_names) for location, axis_names in operands if location is not None
        ]
        factors = {
            axis_name: (size,) if isinstance(size, int) else size
            for axis_name, size in axes.items()
        }
        for location, axis_names in placed:
            extents = self.tensor_at(location).extents
            for dimension, group in zip(axis_names, location.groups, strict=True):
                if len(dimension) == 1 and len(group) > len(factors[dimension[0]]):
                    factors[dimension[0]] = tuple(extents[each] for each in group)
        layer_axes: list[Axis] = []
        indices: dict[str, tuple[int, ...]] = {}
        for axis_name, sizes in factors.items():
            indices[axis_name] = tuple(range(len(layer_axes), len(layer_axes) + len(sizes)))
            names = (
                [axis_name]
                if len(sizes) == 1
                else [f"{axis_name}{position}" for position in range(len(sizes))]
            )
            layer_axes += [
                Axis(each, size, axis_name in unsplit)
                for each, size in zip(names, sizes, strict=True)
            ]
        read = tuple(
            self._make_operand(location, axis_names, indices, layer_axes)
            for location, axis_names in placed
        )
        written = [
            _make_result(axis_names, shape, indices, layer_axes) for axis_names, shape in results
        ]
        tensors = tuple(tensor for tensor, _ in written)
        layer = Layer(
            tuple(layer_axes),
            read,
            tensors,
            cost(indices),
            False,
            name,
            tuple(nodes),
            aliases,
            inside,
        )
        index = self.append_layer(layer, [location for location, _ in placed])
        return tuple(
            ValueLocation(index, result, groups) for result, (_, groups) in enumerate(written)
        )

    def add_node_layer(
        self,
        index: int,
        axes: Mapping[str, int | Extents],
        results: Iterable[AxisNames | None],
        cost: Callable[[Indices], Cost],
        operands: Iterable[AxisNames | None] | None = None,
        unsplit: Iterable[str] = (),
        aliases: tuple[tuple[str, str], ...] = (),
    ) -> None:
        """Append the layer of ONNX node `index` with its edges, and store the locations of the
        node's results.

        `operands` contains the axis names of the node's first inputs; None for an input means that
        it has no edge. If `operands` is None, only the first input is read, with one dimension per
        axis. `results` contains the axis names of the node's first outputs; other outputs, and
        outputs for which it is None, get no location.
        """
        node = self.graph.nodes[index]
        inputs = zip(
            node.inputs, [_axis_per_dimension(axes)] if operands is None else operands, strict=False
        )
        read = [
            (self.locations.get(name), axis_names)
            for name, axis_names in inputs
            if name and axis_names is not None
        ]
        made = {
            name: axis_names
            for name, axis_names in zip(node.outputs, results, strict=False)
            if axis_names is not None
        }
        shapes = [(axis_names, self.shape_of(name)) for name, axis_names in made.items()]
        locations = self.add_layer(node.name, (index,), axes, read, shapes, cost, unsplit, aliases)
        self.locations.update(zip(made, locations, strict=True))

    def append_layer(self, layer: Layer, operands: Sequence[ValueLocation]) -> int:
        """Append a layer that reads `operands`, and return its number. If several operands come
        from one layer, only the edge of the last of them is stored.
        """
        index = len(self.layers)
        self.layers.append(layer)
        for operand, location in enumerate(operands):
            self._edges[location.layer, index] = LayerEdge(
                location.layer, index, location.result, operand
            )
        return index

    def merge_node(self, index: int, location: ValueLocation, **changes: Any) -> None:
        """Merge node `index` into the layer at `location`, where the node's results are then
        located. The node adds no cost, unless `changes` replaces the cost or other fields of the
        layer.
        """
        node = self.graph.nodes[index]
        layer = self.layers[location.layer]
        self.layers[location.layer] = replace(layer, nodes=(*layer.nodes, index), **changes)
        self.locations.update((name, location) for name in node.outputs if name)

    def tensor_at(self, location: ValueLocation) -> Tensor:
        """Return the result of a layer to which `location` refers."""
        return self.layers[location.layer].results[location.result]

    def build(self, cutoff: int) -> LayerGraph:
        """Return the layer graph of the nodes that were added."""
        edges = tuple(self._edges[pair] for pair in sorted(self._edges))
        return LayerGraph(tuple(self.layers), edges, dict(self.locations), cutoff)

    def _make_operand(
        self,
        location: ValueLocation,
        axis_names: AxisNames,
        indices: Indices,
        layer_axes: Sequence[Axis],
    ) -> Tensor:
        """Return the operand of a layer that reads the value at `location`. The operand has the
        dimensions of the result in which the value is located.

        `axis_names` contains, for each dimension of the value, the names of the layer's axes that
        index it. `indices` contains the positions of these axes in `layer_axes`.
        """
        source = self.tensor_at(location).extents
        axes: list[tuple[int, ...]] = [()] * len(source)
        for dimension, group in zip(axis_names, location.groups, strict=True):
            split_axes = tuple(axis for axis_name in dimension for axis in indices[axis_name])
            if len(group) == 1:
                axes[group[0]] = split_axes
            elif [source[each] for each in group] == [layer_axes[axis].size for axis in split_axes]:
                for each, axis in zip(group, split_axes, strict=True):
                    axes[each] = (axis,)
        return Tensor(source, tuple(axes))


def _make_result(
    axis_names: AxisNames, shape: Extents, indices: Indices, layer_axes: Sequence[Axis]
) -> tuple[Tensor, Groups]:
    """Return (tensor, groups) for a result whose dimensions `axis_names` index.

    tensor: has one dimension per axis that indexes the result, and one for each dimension that no
    axis indexes.
    groups: for each dimension of the ONNX value, the dimensions of the tensor that it became.
    """
    dimensions: list[tuple[int, tuple[int, ...]]] = []
    groups: list[tuple[int, ...]] = []
    for dimension, size in zip(axis_names, shape, strict=True):
        split_axes: list[tuple[int, tuple[int, ...]]] = [
            (layer_axes[axis].size, (axis,))
            for axis_name in dimension
            for axis in indices[axis_name]
        ] or [(size, ())]
        groups.append(tuple(range(len(dimensions), len(dimensions) + len(split_axes))))
        dimensions += split_axes
    return Tensor(
        tuple(size for size, _ in dimensions), tuple(axes for _, axes in dimensions)
    ), tuple(groups)


def _axis_per_dimension(names: Iterable[str]) -> AxisNames:
    """Return axis names for a tensor with one dimension per name."""
    return tuple((name,) for name in names)


def group_dimensions(extents: Sequence[int], shape: Sequence[int]) -> Groups | None:
    """Return, for each dimension of `shape`, the positions in `extents` whose sizes multiply to its
    size, in order.

    Return None if a dimension of `extents` would have to be divided. Positions of size 1 are
    omitted.
    """
    remaining = [position for position, size in enumerate(extents) if size != 1]
    groups = []
    for size in shape:
        group: list[int] = []
        while math.prod(extents[each] for each in group) < size and remaining:
            group.append(remaining.pop(0))
        if math.prod(extents[each] for each in group) != size:
            return None
        groups.append(tuple(group))
    return tuple(groups)


# The rules in this section are for operators that the paper does not mention: pointwise operators,
# views, and all operators for which this module defines no other rule.

RENAMINGS = frozenset({"Identity", "Cast", "CastLike", "BitCast"})
"""Operators that leave all elements at their positions, and cost nothing in the paper."""


def merge_pointwise(builder: LayerGraphBuilder, index: int) -> None:
    """Merge a pointwise operator into the layer that produces its operand.

    The operator becomes a layer itself in three cases: it reads the results of several layers; it
    broadcasts its operand; or it reads a parameter or constant with more than one dimension larger
    than 1. A bias or a scale is merged.
    """
    node = builder.graph.nodes[index]
    computed = [name for name in node.inputs if name in builder.locations]
    parameter_shapes = [
        builder.shape_of(name) for name in node.inputs if name and name not in builder.locations
    ]
    are_vectors = all(sum(size > 1 for size in shape) <= 1 for shape in parameter_shapes)
    result = builder.shape_of(node.outputs[0])
    locations = {builder.locations[name] for name in computed}
    if (
        len(locations) != 1
        or not are_vectors
        or any(builder.shape_of(name) != result for name in computed)
    ):
        add_by_space(builder, index)
        return
    (location,) = locations
    layer = builder.layers[location.layer]
    if node.op in RENAMINGS:
        builder.merge_node(index, location)
        return
    # The cost counts pointwise operations up to the last activation. A bias or scale after the last
    # activation is free.
    builder.pointwise[location.layer] += 1
    cost = layer.cost
    if not parameter_shapes and isinstance(cost, MatmulCost | ElementwiseCost):
        cost = replace(cost, pointwise=builder.pointwise[location.layer])
    builder.merge_node(index, location, cost=cost)


def merge_transpose(builder: LayerGraphBuilder, index: int) -> None:
    """Merge a permutation of dimensions into the layer that produces its operand."""
    node = builder.graph.nodes[index]
    location = builder.locations[node.inputs[0]]
    order = node.integers("perm", tuple(range(len(location.groups)))[::-1])
    builder.merge_node(
        index, replace(location, groups=tuple(location.groups[axis] for axis in order))
    )


def add_by_space(builder: LayerGraphBuilder, index: int) -> None:
    """Add a layer over the operator's iteration space. Only axes that index all results, and the
    reduced axes of a reduction, can be split.
    """
    node = builder.graph.nodes[index]
    row = operator_of(node)
    assert row is not None, f"{node.op} has no row"
    if node.op in RENAMINGS and node.inputs[0] in builder.locations:
        builder.merge_node(index, builder.locations[node.inputs[0]])
        return
    space = space_of(builder.graph, node)
    sums = (AxisKind.SUM, AxisKind.MEAN)
    reduced = [axis.name for axis in space.axes if row.kind == "reduction" and axis.kind in sums]
    unsplit = {
        a.name for a in space.axes if a.kind is not AxisKind.PARALLEL and a.name not in reduced
    }

    def cost(indices: Indices) -> Cost:
        if row.kind == "reduction":
            return ReductionCost(
                tuple(axis for axis_name in reduced for axis in indices[axis_name])
            )
        return FreeCost() if row.kind in ("view", "memory") else ElementwiseCost()

    builder.add_node_layer(index, space.axis_sizes(), space.results, cost, space.operands, unsplit)


def add_reshape(builder: LayerGraphBuilder, index: int) -> None:
    """Add a Reshape, Flatten, Squeeze or Unsqueeze.

    The operator is merged into the layer before it if it only adds or removes dimensions of size 1,
    merges dimensions other than the last one, or merges axes of a matmul (attention heads). Any
    other reshape becomes two layers: one flattens the tensor, which must be split into contiguous
    parts, and one restores dimensions.
    """
    node = builder.graph.nodes[index]
    location = builder.locations[node.inputs[0]]
    shape = builder.shape_of(node.outputs[0])
    source = builder.tensor_at(location).extents
    order = [dimension for group in location.groups for dimension in group]
    extents = [source[dimension] for dimension in order]
    groups = group_dimensions(extents, shape)
    if groups is not None:
        only_rows = all(group != groups[-1] for group in groups if len(group) > 1)
        if only_rows or isinstance(builder.layers[location.layer].cost, MatmulCost):
            merged = tuple(tuple(order[position] for position in group) for group in groups)
            builder.merge_node(index, replace(location, groups=merged))
            return
    source_axes, target_axes = (
        tuple(Axis(f"d{position}", size) for position, size in enumerate(each))
        for each in (extents, shape)
    )
    read = tuple((order.index(each),) if each in order else () for each in range(len(source)))
    written = tuple((position,) for position in range(len(shape)))
    flat, unflattened = (
        Tensor((math.prod(shape),), (tuple(range(len(axes))),))
        for axes in (source_axes, target_axes)
    )
    ravel = Layer(
        source_axes, (Tensor(source, read),), (flat,), FreeCost(), True, f"{node.name}/ravel"
    )
    unravel = Layer(
        target_axes,
        (unflattened,),
        (Tensor(shape, written),),
        FreeCost(),
        True,
        node.name,
        (index,),
    )
    first = builder.append_layer(ravel, (location,))
    builder.locations[node.outputs[0]] = ValueLocation(
        builder.append_layer(unravel, (ValueLocation(first, 0, ((0,),)),)), 0, written
    )


# The rules in this section are for matmuls.


def matmul_cost_of(
    left: AxisNames, right: AxisNames, result: AxisNames
) -> Callable[[Indices], Cost]:
    """Return a function that returns the cost of a matmul, given the positions of its axes. `left`,
    `right` and `result` are the axis names of its operands and its result.
    """
    first, second, written = (
        {axis_name for axis_names in tensor for axis_name in axis_names}
        for tensor in (left, right, result)
    )
    groups = (
        first & second & written,
        (first & written) - second,
        (second & written) - first,
        (first | second) - written,
    )

    def cost(indices: Indices) -> Cost:
        """Return the cost of the matmul whose axes have these positions."""
        batch, rows, columns, summed = (
            tuple(
                axis
                for axis_name in indices
                if axis_name in axis_names
                for axis in indices[axis_name]
            )
            for axis_names in groups
        )
        return MatmulCost(batch, rows, columns, summed)

    return cost


def add_matmul(builder: LayerGraphBuilder, index: int) -> None:
    """Add a matmul over the axes of the operator's iteration space.

    If a following reshape divides the columns (into attention heads), they become several axes. An
    einsum with one operand or more than two is added by `add_by_space`.
    """
    node = builder.graph.nodes[index]
    if node.op == "Einsum" and len(node.inputs) != 2:
        add_by_space(builder, index)
        return
    space = space_of(builder.graph, node)
    left = space.operands[0]
    right = space.operands[1]
    result = space.results[0]
    assert left is not None and right is not None and result is not None
    order = dict.fromkeys(
        [*(axis_name for dimension in result for axis_name in dimension), *space.axis_sizes()]
    )
    axes: dict[str, int | Extents] = {axis_name: space.axis(axis_name).size for axis_name in order}
    if node.op != "Einsum" and (columns := column_factors(builder.graph, index)):
        axes["n"] = columns
    builder.add_node_layer(
        index, axes, [result], matmul_cost_of(left, right, result), (left, right)
    )


def column_factors(graph: Graph, index: int) -> Extents:
    """Return the sizes into which a reshape that follows a matmul divides its columns, or () if
    there is no such reshape. The addition of a bias may come between the two.
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


def add_embedding(builder: LayerGraphBuilder, index: int) -> None:
    """Add a gather of rows of a parameter as a matmul with one-hot rows, which are free to read.
    Any other gather is added by `add_by_space`.
    """
    node = builder.graph.nodes[index]
    table, indices = (builder.shape_of(name) for name in node.inputs[:2])
    if (
        builder.graph.parameter(node.inputs[0]) is None
        or len(table) != 2
        or node.integer("axis") != 0
    ):
        add_by_space(builder, index)
        return
    rows = {f"i{position}": size for position, size in enumerate(indices)}
    result = _axis_per_dimension([*rows, "e"])
    cost = matmul_cost_of(_axis_per_dimension([*rows, "v"]), _axis_per_dimension("ve"), result)
    builder.add_node_layer(
        index, {**rows, "e": table[1], "v": table[0]}, [result], cost, (), aliases=(("v", "d0"),)
    )


# The rules in this section are for attention. As in the paper, attention consists of one matmul for
# queries, keys and values, two more matmuls, and a softmax between these two.

HEADS, KEYS, SCORES = map(_axis_per_dimension, ("bhlk", "bhmk", "bhlm"))


Projections = tuple[tuple[int, ...], tuple[str, ...]]
"""(nodes, values) of an attention: the nodes that project queries, keys and values, and the three
values that are projected, each of shape [batch, length, width].
"""


def find_projections(graph: Graph) -> dict[int, Projections]:
    """Return, by attention node, the projections of its queries, keys and values. Only attentions
    are included whose three projections have equal shapes and project values of one shape.
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
            each
            for name in node.inputs[:3]
            if (each := _trace_projection(graph, name, readers)) is not None
        ]
        sources = tuple(source for _, source in traced)
        shapes = {graph.type_of(name).shape for name in sources}
        equal = len({graph.type_of(name).shape for name in node.inputs[:3]}) == len(shapes) == 1
        if len(traced) == 3 and equal and len(shapes.pop()) == 3:
            found[index] = tuple(sorted(node for nodes, _ in traced for node in nodes)), sources
    return found


def _trace_projection(
    graph: Graph, name: str, readers: dict[str, tuple[int, ...]]
) -> tuple[list[int], str] | None:
    """Return (nodes, source): the chain of nodes from a matmul with a weight to value `name`, and
    the value that the matmul projects.

    Each value in the chain must have one reader. Return None if there is no such chain of at most
    four nodes.
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


def add_attention(builder: LayerGraphBuilder, index: int, projected: Projections | None) -> None:
    """Add the layers of an attention. `projected` contains its projections, or is None if they are
    separate layers.

    Masks are free to read and cost nothing. An attention with other operand shapes than those of
    the paper is added by `add_by_space`.
    """
    node = builder.graph.nodes[index]
    queries, keys, values = (builder.shape_of(name) for name in node.inputs[:3])
    if (
        len(queries) != 4
        or queries[:2] != keys[:2]
        or queries[3] != values[3]
        or any(node.outputs[1:])
    ):
        add_by_space(builder, index)
        return
    if projected is None:
        read = tuple(builder.locations.get(name) for name in node.inputs[:3])
    else:
        read = _add_projections(builder, node.name, projected, queries)
    extents = dict(zip("bhlk", queries, strict=True)) | {"m": keys[2]}

    def add_layer(
        part: str,
        order: str,
        operands: Sequence[Operand],
        result: AxisNames,
        cost: Callable[[Indices], Cost],
    ) -> ValueLocation:
        """Append a layer of the attention over the axes in `order`, and return the location of its
        result. `part` is appended to the node's name; the layer with an empty `part` produces the
        node's result.
        """
        axes = {axis: extents[axis] for axis in order}
        results = [(result, tuple(extents[axis] for (axis,) in result))]
        nodes, inside = ((), index) if part else ((index,), None)
        return builder.add_layer(
            f"{node.name}{part}", nodes, axes, operands, results, cost, inside=inside
        )[0]

    first = matmul_cost_of(HEADS, KEYS, SCORES)
    second = matmul_cost_of(SCORES, KEYS, HEADS)
    scores = add_layer("/scores", "bhlmk", ((read[0], HEADS), (read[1], KEYS)), SCORES, first)
    weights = add_layer(
        "/softmax", "bhlm", ((scores, SCORES),), SCORES, lambda found: SoftmaxCost(found["m"][0])
    )
    builder.locations[node.outputs[0]] = add_layer(
        "", "bhlkm", ((weights, SCORES), (read[2], KEYS)), HEADS, second
    )


def _add_projections(
    builder: LayerGraphBuilder, name: str, projected: Projections, shape: Extents
) -> tuple[ValueLocation, ...]:
    """Add one matmul that computes queries, keys and values of `shape`, and return their locations.

    The matmul multiplies one value by three weights, or three stacked values by one weight each.
    """
    batch, heads, length, width = shape
    nodes, names = projected
    inner = builder.shape_of(names[0])[2]
    sources = [builder.locations.get(each) for each in names]
    read = _axis_per_dimension("ble")
    operand = sources[0]
    if len(set(names)) > 1:
        axes = {"s": 3, "b": batch, "l": length, "e": inner}
        operands = [(each, read) for each in sources]
        read = _axis_per_dimension("sble")
        results = [(read, (3, batch, length, inner))]
        (operand,) = builder.add_layer(
            f"{name}/stack", (), axes, operands, results, lambda _: FreeCost(), unsplit="s"
        )
    axes = {"s": 3, "b": batch, "h": heads, "l": length, "k": width}
    stacked = _axis_per_dimension("sbhlk")
    (product,) = builder.add_layer(
        f"{name}/projections",
        nodes,
        axes | {"e": inner},
        ((operand, read),),
        [(stacked, (3, *shape))],
        matmul_cost_of(read, _axis_per_dimension("shek"), stacked),
        aliases=(("e", "k"),),
    )
    # Values between a projection and the attention are slices of the result of the stacked matmul.
    # Its shape [3, b, h, l, k] is (projection, batch, head, position, element); merged heads
    # combine h and k.
    for index in nodes:
        node = builder.graph.nodes[index]
        groups: Groups = (
            ((1,), (3,), (2, 4))
            if len(builder.shape_of(node.outputs[0])) == 3
            else ((1,), (3,), (2,), (4,))
        )
        if node.op == "Transpose":
            groups = ((1,), (2,), (3,), (4,))
        builder.locations[node.outputs[0]] = replace(product, groups=groups)
    three = [(HEADS, shape)] * 3
    return builder.add_layer(
        f"{name}/unstack", (), axes, ((product, stacked),), three, lambda _: FreeCost(), unsplit="s"
    )


# The rules in this section are for convolutional networks. As in the prototype of PaSE's authors,
# the spatial axes of a convolution are not split.

SPATIAL = "hwd"
KERNEL = "rst"


def add_convolution(builder: LayerGraphBuilder, index: int) -> None:
    """Add a convolution as a matmul. For an image its axes are (b, c, h, w, r, s, n): batch b,
    input channels c, image h w, kernel r s, output channels n. The rows are b h w, the summed
    elements c r s, and the columns n.
    """
    node = builder.graph.nodes[index]
    weight, result = (builder.shape_of(name) for name in (node.inputs[1], node.outputs[0]))
    rank = len(weight) - 2
    spatial = SPATIAL[:rank]
    kernel = KERNEL[:rank]
    extents = (result[0], weight[1], *result[2:], *weight[2:], weight[0])
    axes = dict(zip(f"bc{spatial}{kernel}n", extents, strict=True))
    channels = ("c",) if node.integer("group", 1) == 1 else ()
    uncut: AxisNames = ((),) * rank
    cost = matmul_cost_of(
        _axis_per_dimension(f"b{spatial}c{kernel}"),
        _axis_per_dimension(f"c{kernel}n"),
        _axis_per_dimension(f"b{spatial}n"),
    )
    builder.add_node_layer(
        index, axes, [(("b",), ("n",), *uncut)], cost, [(("b",), channels, *uncut)], unsplit=spatial
    )


def add_pooling_or_batch_norm(builder: LayerGraphBuilder, index: int) -> None:
    """Add a pooling, a batch normalisation, or a mean over all spatial positions.

    All axes of a pooling's result can be split. Batch normalisation is modelled as a normalisation
    over the batch, as in the paper, even if the model uses stored statistics.
    """
    node = builder.graph.nodes[index]
    source = builder.shape_of(node.inputs[0])
    result = builder.shape_of(node.outputs[0])
    spatial = tuple(range(2, len(source)))

    def cost(found: Indices) -> Cost:
        """Return the cost of the operator whose axes have these positions."""
        match node.op:
            case "BatchNormalization":
                return NormCost(found["b"][0])
            case "GlobalAveragePool":
                return ReductionCost(spatial)
        return PoolingCost(2, source, node.integers("kernel_shape"))

    is_mean = node.op == "GlobalAveragePool"
    axes = dict(zip(f"bc{SPATIAL}", source if is_mean else result, strict=False))
    written: AxisNames = (
        (("b",), ("c",), *((),) * len(spatial)) if is_mean else _axis_per_dimension(axes)
    )
    builder.add_node_layer(index, axes, [written], cost)


# The rules in this section are for layers that operate along one axis, and for stacked LSTMs.

AXIS_AND_COST: Mapping[str, tuple[int, Callable[[int], Cost]]] = {
    "LayerNormalization": (-1, NormCost),
    "RMSNormalization": (-1, NormCost),
    "SoftmaxCrossEntropyLoss": (1, CrossEntropyCost),
}
"""By operator: the axis along which it operates, and its cost. Softmaxes are not listed, because
their axis is an attribute.
"""


def add_softmax_norm_or_loss(builder: LayerGraphBuilder, index: int) -> None:
    """Add a softmax over its axis, a norm over the last axis, or a loss over the classes.

    The layer has all axes of the first operand. The result of a loss has no dimension that can be
    split.
    """
    node = builder.graph.nodes[index]
    axis, kind = AXIS_AND_COST.get(node.op) or (node.integer("axis", -1), SoftmaxCost)
    shape = builder.shape_of(node.inputs[0])
    result = builder.shape_of(node.outputs[0])
    axes = {f"d{position}": size for position, size in enumerate(shape)}
    special = list(axes)[axis]
    written: AxisNames = _axis_per_dimension(axes) if result == shape else ((),) * len(result)
    builder.add_node_layer(index, axes, [written], lambda found: kind(found[special][-1]))


def add_linear_cross_entropy(builder: LayerGraphBuilder, index: int) -> None:
    """Add a fused projection and loss (LinearCrossEntropy) as two layers: a matmul, and a
    cross-entropy over the columns of its result.
    """
    node = builder.graph.nodes[index]
    space = space_of(builder.graph, node)
    x = space.operands[0]
    labels = space.operands[1]
    weight = space.operands[WEIGHT_OPERAND]
    assert x is not None and labels is not None and weight is not None
    logits: AxisNames = (*labels, ("c",))
    axes = {axis_name: space.axis(axis_name).size for (axis_name,) in logits}
    product = matmul_cost_of(x, weight, logits)
    read = ((builder.locations.get(node.inputs[0]), x),)
    made = [(logits, tuple(axes.values()))]
    summed: dict[str, int | Extents] = {**axes, "k": space.axis("k").size}
    (location,) = builder.add_layer(
        f"{node.name}/scores", (), summed, read, made, product, inside=index
    )
    result = builder.shape_of(node.outputs[0])
    written: list[tuple[AxisNames, Extents]] = [(((),) * len(result), result)]
    (builder.locations[node.outputs[0]],) = builder.add_layer(
        node.name,
        (index,),
        axes,
        ((location, logits),),
        written,
        lambda found: CrossEntropyCost(found["c"][-1]),
    )


def add_lstm(builder: LayerGraphBuilder, index: int) -> None:
    """Add an LSTM with axes (l, s, b, n, k): layers, steps, batch, output units and input units.
    Steps are not split. An LSTM that reads the result of an equal LSTM is merged into its layer,
    whose first axis becomes larger by 1.
    """
    node = builder.graph.nodes[index]
    if (
        not node.outputs[0]
        or node.integer("layout") != 0
        or builder.shape_of(node.outputs[0])[1] != 1
    ):
        add_by_space(builder, index)
        return
    steps, _, batch, units = builder.shape_of(node.outputs[0])
    inputs = builder.shape_of(node.inputs[0])[-1]
    location = builder.locations.get(node.inputs[0])
    if location is not None and _extends_lstm(builder, location, inputs, units):
        first, *others = builder.layers[location.layer].axes
        axes = (replace(first, size=first.size + 1), *others)
        builder.merge_node(
            index, ValueLocation(location.layer, 0, ((0,), (1,), (2,), (3,))), axes=axes
        )
    else:
        extents = {"l": 1, "s": steps, "b": batch, "n": units, "k": inputs}
        written: AxisNames = (("s",), (), ("b",), ("n",))
        builder.add_node_layer(
            index,
            extents,
            [written],
            lambda _: LSTMCost(),
            [_axis_per_dimension("sbk")],
            unsplit="s",
        )
    # The other results of the LSTM are its final states. They are located in the last step of the
    # first result, so their location omits the axis of steps.
    location = builder.locations[node.outputs[0]]
    last = replace(location, groups=location.groups[1:])
    builder.locations.update((name, last) for name in node.outputs[1:] if name)


def _extends_lstm(
    builder: LayerGraphBuilder, location: ValueLocation, inputs: int, units: int
) -> bool:
    """True if an LSTM with `inputs` input units and `units` output units can become a further layer
    of the LSTM layer at `location`.

    This holds if the LSTM reads the complete result at `location`, and if the two numbers and the
    number of output units there are equal.
    """
    layer = builder.layers[location.layer]
    read = tuple(dimension for group in location.groups for dimension in group if dimension != 1)
    return (
        isinstance(layer.cost, LSTMCost)
        and read == (0, 2, 3)
        and inputs == units == layer.extents[3]
    )


RULES: Mapping[str, Callable[[LayerGraphBuilder, int], None]] = {
    "AveragePool": add_pooling_or_batch_norm,
    "BatchNormalization": add_pooling_or_batch_norm,
    "Conv": add_convolution,
    "Einsum": add_matmul,
    "Flatten": add_reshape,
    "Gather": add_embedding,
    "Gemm": add_matmul,
    "GlobalAveragePool": add_pooling_or_batch_norm,
    "LSTM": add_lstm,
    "LayerNormalization": add_softmax_norm_or_loss,
    "LinearCrossEntropy": add_linear_cross_entropy,
    "LogSoftmax": add_softmax_norm_or_loss,
    "MatMul": add_matmul,
    "MaxPool": add_pooling_or_batch_norm,
    "RMSNormalization": add_softmax_norm_or_loss,
    "Reshape": add_reshape,
    "Softmax": add_softmax_norm_or_loss,
    "SoftmaxCrossEntropyLoss": add_softmax_norm_or_loss,
    "Squeeze": add_reshape,
    "Transpose": merge_transpose,
    "Unsqueeze": add_reshape,
}
"""The rules by operator."""


def make_layer_graph(graph: Graph) -> LayerGraph:
    """Return the layer graph of the paper for one batch of a model.

    Some values are free to read, which means that they have no edges: inputs, parameters, values
    computed only from parameters and constants, and results of nodes that stages recompute
    (`recomputed_nodes`, such as masks and positions). Nodes that compute such values do not become
    layers.
    """
    builder = LayerGraphBuilder(graph)
    attentions = find_projections(graph)
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
            add_attention(builder, index, attentions.get(index))
        else:
            other = (
                merge_pointwise if row is not None and row.kind == "elementwise" else add_by_space
            )
            RULES.get(node.op, other)(builder, index)
    return builder.build(4 if any(node.op == "Conv" for node in graph.nodes) else 1)
