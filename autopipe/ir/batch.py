"""Batch dimensions of all values of a graph, and conversion of the graph to a smaller micro-batch.

The batch dimensions of the inputs are propagated through the iteration spaces of the nodes: forward
to results, and backward to other operands, such as a mask that an exporter expanded to the batch.
This includes the batch inside dimensions that a Reshape merged. Micro-batches and data-parallel
replicas both divide the batch dimensions that this module finds.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from autopipe.ir.errors import ConfigurationError, ModelError
from autopipe.ir.graph import Constant, Graph, Node, Value
from autopipe.ir.memo import MAX_CACHED_GRAPHS, memoize
from autopipe.ir.ops import operator_of, spaces_of
from autopipe.ir.ops.loop import operand_ports
from autopipe.ir.space import AxisKind, Dimension, NotationError, Space
from autopipe.ir.words import plural


@dataclass(frozen=True, slots=True, order=True)
class BatchDimension:
    """A dimension of a value that contains the batch. Its size is outer · batch · inner, in
    row-major order: after a Reshape of (batch, sequence) to one dimension, `outer` is 1 and `inner`
    is the sequence length. `dimension` is its index.
    """

    dimension: int
    outer: int = 1
    inner: int = 1


@dataclass(frozen=True, slots=True)
class BatchAxis:
    """An axis of a node's iteration space that contains the batch. Its size is outer · batch ·
    inner, in row-major order. `kind` says how the operator behaves if the axis is split.
    """

    axis: str
    outer: int
    inner: int
    kind: AxisKind


@dataclass(frozen=True, slots=True)
class BatchAxes:
    """The batch dimensions of all values of a graph, and the batch axes of all nodes."""

    batch: int
    """Samples of one forward pass; 0 if no input has a batch dimension."""
    nodes: tuple[tuple[BatchAxis, ...], ...]
    """For each node, the axes that contain the batch, in the order of the axes of its iteration
    space.
    """
    values: dict[str, tuple[BatchDimension, ...]]
    """Batch dimensions by the name of the value. Values without a batch dimension are missing."""

    def axis(self, node: int) -> str | None:
        """Return the name of the axis along which replicas split a node: the first axis that
        contains the batch as its outermost part (`outer` is 1) and that can be split. Return None
        if there is none.
        """
        own = self.nodes[node]
        return next(
            (
                each.axis
                for each in own
                if each.outer == 1 and each.kind is not AxisKind.UNSPLITTABLE
            ),
            None,
        )

    def value_without_batch_axis(self, graph: Graph, space: Space, node: int) -> str | None:
        """Return the name of an operand or result whose batch is not contained in one axis of the
        node's iteration space `space`. Return None if there is none.
        """
        extents = space.axis_sizes()
        samples = _batch_dimensions_of_node(graph.nodes[node], space, self.values)
        return next(
            (
                name
                for name, words, place in samples
                if _axis_containing_batch(words, place, extents, self.batch) is None
            ),
            None,
        )

    def of(self, value: str) -> BatchDimension | None:
        """Return the first batch dimension of the value called `value`, or None if it has none."""
        found = self.values.get(value)
        return found[0] if found else None


@memoize(MAX_CACHED_GRAPHS)
def batch_axes_of(graph: Graph) -> BatchAxes:
    """Return the batch dimensions of all values and nodes, propagated from `graph.batch_axes`.
    Nodes with unsupported operators stop the propagation.
    """
    extents = [graph.type_of(name).shape[axis] for name, axis in graph.batch_axes]
    batch = extents[0] if extents else 0
    values: dict[str, set[BatchDimension]] = {
        name: {BatchDimension(axis)} for name, axis in graph.batch_axes
    }
    nodes: list[tuple[BatchAxis, ...]] = [()] * len(graph.nodes)
    if batch <= 1:
        return BatchAxes(
            batch, tuple(nodes), {name: tuple(found) for name, found in values.items()}
        )
    spaces = spaces_of(graph)
    fixed = {value.name for value in graph.inputs}
    consumers = graph.consumers()
    # Each node is visited in order. A node is visited again if backward propagation has changed the
    # batch axes of its values.
    waiting = list(range(len(graph.nodes) - 1, -1, -1))
    queued = set(waiting)
    while waiting:
        index = waiting.pop()
        queued.discard(index)
        node = graph.nodes[index]
        if operator_of(node) is None or not any(
            name in values for name in (*node.inputs, *node.outputs)
        ):
            continue
        found = _infer_batch_axes(node, spaces(index), values, batch)
        if found == nodes[index]:
            continue
        nodes[index] = found
        for name, place in _batch_dimensions_from_axes(node, spaces(index), found):
            if name in fixed or place in values.setdefault(name, set()):
                continue
            values[name].add(place)
            for other in (*consumers.get(name, ()), graph.producer(name)):
                if other is not None and other != index and other not in queued:
                    queued.add(other)
                    waiting.append(other)
    return BatchAxes(
        batch, tuple(nodes), {name: tuple(sorted(found)) for name, found in values.items() if found}
    )


def _tensors_and_dimensions(
    node: Node, space: Space
) -> tuple[tuple[str, tuple[Dimension, ...] | None], ...]:
    """Return (value name, dimensions) for each operand and result of a node. A dimension is the
    tuple of its axes; the dimensions of an absent tensor are None.
    """
    return (
        *zip(node.inputs, space.operands, strict=True),
        *zip(node.outputs, space.results, strict=True),
    )


def _batch_dimensions_of_node(
    node: Node, space: Space, values: Mapping[str, Iterable[BatchDimension]]
) -> Iterator[tuple[str, Dimension, BatchDimension]]:
    """Yield (value name, axes of the dimension, batch dimension) for each known batch dimension of
    a node's operands and results.
    """
    for name, tensor in _tensors_and_dimensions(node, space):
        if tensor is not None:
            yield from ((name, tensor[place.dimension], place) for place in values.get(name, ()))


def _infer_batch_axes(
    node: Node, space: Space, values: dict[str, set[BatchDimension]], batch: int
) -> tuple[BatchAxis, ...]:
    """Return the axes of a node's iteration space that contain the batch, given the known batch
    dimensions `values` of all values.
    """
    extents = space.axis_sizes()
    tensors = _batch_dimensions_of_node(node, space, values)
    found = sorted(
        {
            axis
            for _, dimension, place in tensors
            if (axis := _axis_containing_batch(dimension, place, extents, batch))
        }
    )
    pairs = (
        (axis, outer, inner)
        for axis in space.axes
        for name, outer, inner in found
        if name == axis.name
    )
    return tuple(BatchAxis(axis.name, outer, inner, axis.kind) for axis, outer, inner in pairs)


def _axis_containing_batch(
    dimension: Dimension, place: BatchDimension, extents: dict[str, int], batch: int
) -> tuple[str, int, int] | None:
    """Return (axis, outer, inner) for the one axis of `dimension` that contains the batch: the size
    of the axis is outer · batch · inner. Return None if no single axis contains it. `place` states
    the position of the batch in the dimension, and `extents` contains the size of each axis.
    """
    below = 1
    for name in reversed(dimension):
        extent = extents[name]
        span = place.inner * batch
        if place.inner % below == 0 and (below * extent) % span == 0 and extent > 1:
            return name, below * extent // span, place.inner // below
        below *= extent
    return None


def _batch_dimensions_from_axes(
    node: Node, space: Space, found: tuple[BatchAxis, ...]
) -> list[tuple[str, BatchDimension]]:
    """Return (value name, batch dimension) for each batch dimension of a node's operands and
    results that follows from its batch axes `found`.
    """
    extents = space.axis_sizes()
    places: list[tuple[str, BatchDimension]] = []
    for samples, (name, tensor) in itertools.product(found, _tensors_and_dimensions(node, space)):
        for index, dimension in enumerate(tensor or ()):
            if name and samples.axis in dimension:
                at = dimension.index(samples.axis)
                outer = math.prod(extents[other] for other in dimension[:at]) * samples.outer
                inner = math.prod(extents[other] for other in dimension[at + 1 :]) * samples.inner
                places.append((name, BatchDimension(index, outer, inner)))
    return places


SHAPE_OPERAND_OPERATORS = frozenset({"Reshape", "Expand"})
"""Operators whose operand 1 is the shape of the result."""
_EXPORT_HINT = (
    "export the model with a symbolic batch dimension, or with a batch of one micro-batch"
)


@memoize(MAX_CACHED_GRAPHS)
def resize_batch(graph: Graph, size: int) -> Graph:
    """Return the graph with a batch of `size` samples. Nodes keep their indices. Each dimension
    that contains the batch becomes smaller in proportion.

    Raise ConfigurationError if `size` does not divide the batch of the graph. Raise ModelError if
    the samples cannot be separated: a constant differs between samples, a parameter has a batch
    dimension, or an operator has no axis for the batch.
    """
    axes = batch_axes_of(graph)
    if axes.batch == size:
        return graph
    if not graph.batch_axes or size <= 0 or axes.batch % size:
        raise ConfigurationError(
            f"micro-batches of {size} {plural(size, 'sample')} do not divide the batch of "
            f"{axes.batch} {plural(axes.batch, 'sample')} that the model's shapes fix",
            hint=f"choose a divisor of {axes.batch}, or export with a symbolic batch dimension",
        )
    for parameter in graph.parameters:
        if parameter.value.name in axes.values:
            message = (
                f"parameter {parameter.value.name!r} has one entry for each of the {axes.batch} "
                f"{plural(axes.batch, 'sample')} of the batch, which is not supported"
            )
            raise ModelError(message, "export the model with a batch of one micro-batch")
    spaces = spaces_of(graph)
    for index, node in enumerate(graph.nodes):
        if (
            operator_of(node) is not None
            and (lost := axes.value_without_batch_axis(graph, spaces(index), index)) is not None
        ):
            message = (
                f"{node.op} does not keep the samples of {lost!r} apart, so the batch cannot shrink"
            )
            raise ModelError(message, _EXPORT_HINT, repr(node.name))
    shrunk = {}
    for name, places in axes.values.items():
        value = graph.type_of(name)
        shape = list(value.shape)
        for place in places:
            # A dimension that contains the batch twice has two entries, so the loop resizes it
            # twice.
            shape[place.dimension] = shape[place.dimension] // axes.batch * size
        shrunk[name] = Value(name, value.dtype, tuple(shape))

    def resize_value(value: Value) -> Value:
        """Return a value with its new shape."""
        return shrunk.get(value.name, value)

    constants, nodes = _resize_shape_operands(graph, shrunk)
    nodes = tuple(
        node if node.body is None else _resize_loop_body(graph, node, axes, size) for node in nodes
    )
    result = dataclasses.replace(
        graph,
        inputs=tuple(map(resize_value, graph.inputs)),
        constants=tuple(_slice_constant(constant, axes, size) for constant in constants),
        nodes=nodes,
        values=tuple(map(resize_value, graph.values)),
    )
    _check_operator_shapes(result)
    return result


def _resize_loop_body(graph: Graph, node: Node, axes: BatchAxes, size: int) -> Node:
    """Return a loop node whose body computes `size` samples. Raise ModelError if an iteration does
    not have a part of all samples.
    """
    assert node.body is not None
    given = {value.name for value in node.body.inputs}
    places = []
    for name, port in zip(node.inputs, operand_ports(node), strict=True):
        inner = port.places(len(graph.type_of(name).shape))
        for samples in axes.values.get(name, ()) if port.name in given else ():
            place = inner[samples.dimension]
            if place is None or (samples.outer, samples.inner) != (1, 1):
                message = (
                    f"its runs do not each have a part of all samples of {name!r}, so the batch "
                    "cannot shrink"
                )
                raise ModelError(message, _EXPORT_HINT, repr(node.name))
            places.append(place)
    if not places:
        return node
    return dataclasses.replace(
        node, body=resize_batch(dataclasses.replace(node.body, batch_axes=tuple(places)), size)
    )


def _resize_shape_operands(
    graph: Graph, shrunk: dict[str, Value]
) -> tuple[list[Constant], tuple[Node, ...]]:
    """Return (constants, nodes) of the graph with new constants as shape operands of the operators
    in `SHAPE_OPERAND_OPERATORS`. `shrunk` has the values with new shapes by name. Constants that no
    node reads any more are removed.
    """
    constants = list(graph.constants)
    nodes = []
    taken = set[str]()
    for node in graph.nodes:
        result = shrunk.get(node.outputs[0])
        if node.op not in SHAPE_OPERAND_OPERATORS or node.domain or result is None:
            nodes.append(node)
            continue
        name = f"{node.outputs[0]}_shape"
        while graph.has(name) or name in taken:
            name += "_"
        taken.add(name)
        array = np.asarray(result.shape, dtype=np.int64)
        constants.append(
            Constant(Value(name, graph.type_of(node.inputs[1]).dtype, array.shape), array)
        )
        nodes.append(dataclasses.replace(node, inputs=(node.inputs[0], name)))
    read = {name for node in nodes for name in node.inputs} | set(graph.outputs)
    return [constant for constant in constants if constant.value.name in read], tuple(nodes)


def _slice_constant(constant: Constant, axes: BatchAxes, size: int) -> Constant:
    """Return a constant with the data of its first `size` samples. Raise ModelError if the data
    differ between samples.
    """
    array = constant.array
    for place in axes.values.get(constant.value.name, ()):
        extents = array.shape
        before = extents[: place.dimension]
        after = extents[place.dimension + 1 :]
        apart = array.reshape(*before, place.outer, axes.batch, place.inner, *after)
        samples = np.moveaxis(apart, len(before) + 1, 0)
        if any(each.tobytes() != samples[0].tobytes() for each in samples[1:]):
            message = f"constant {constant.value.name!r} differs from sample to sample"
            raise ModelError(
                f"{message}, so micro-batches would compute different results", _EXPORT_HINT
            )
        kept = np.moveaxis(samples[:size], 0, len(before) + 1)
        array = np.ascontiguousarray(
            kept.reshape(*before, place.outer * size * place.inner, *after)
        )
    if array is constant.array:
        return constant
    return Constant(Value(constant.value.name, constant.value.dtype, array.shape), array)


def _check_operator_shapes(graph: Graph) -> None:
    """Raise ModelError if an operator of the resized graph is not supported or does not support the
    new shapes.
    """
    spaces = spaces_of(graph)
    for index, node in enumerate(graph.nodes):
        if operator_of(node) is None:
            raise ModelError(
                f"operator {node.op} is not supported, so the batch cannot be reduced to a "
                "micro-batch",
                where=repr(node.name),
            )
        try:
            spaces(index)
        except NotationError as error:
            message = f"operator {node.op} does not support a smaller batch than the exported batch"
            raise ModelError(
                message, "export the model with a symbolic batch dimension", repr(node.name)
            ) from error
