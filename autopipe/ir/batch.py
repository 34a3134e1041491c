"""Where the samples of a batch are in every value of a graph, and the graph of a smaller
micro-batch.

The inputs' batch axes are followed through the nodes' iteration spaces, forwards to what is
computed from them and backwards to what meets them (a mask that an exporter expanded to the batch),
dimensions merged by a Reshape included. Both ways of cutting a batch start here: a micro-batch cuts
it in time, a data-parallel replica in space.
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
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.ops import operator_of, spaces_of
from autopipe.ir.ops.loop import operand_ports
from autopipe.ir.space import AxisKind, Dimension, NotationError, Space
from autopipe.ir.words import plural


@dataclass(frozen=True, slots=True, order=True)
class Samples:
    """Where samples are counted in one dimension, whose extent is outer · batch · inner, row-major.
    After a Reshape of (batch, sequence) into one dimension, `outer` is 1 and `inner` the sequence's
    extent.
    """

    dimension: int
    outer: int = 1
    inner: int = 1


@dataclass(frozen=True, slots=True)
class NodeSamples:
    """An axis of a node's iteration space that counts samples: its extent is outer · batch ·
    inner.
    """

    axis: str
    outer: int
    inner: int
    kind: AxisKind


@dataclass(frozen=True, slots=True)
class BatchAxes:
    batch: int
    """Samples of one evaluation; 0 where no input carries any."""
    nodes: tuple[tuple[NodeSamples, ...], ...]
    """By node, in the order of the space's axes."""
    values: dict[str, tuple[Samples, ...]]
    """By value, for those that carry samples."""

    def axis(self, node: int) -> str | None:
        """The axis by which a node is split over replicas: the first that may be cut, with samples
        outermost in it.
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

    def lost(self, graph: Graph, space: Space, node: int) -> str | None:
        """A value of this node that carries samples where no axis of its space counts them; None
        where all is well.
        """
        extents = space.axis_sizes()
        samples = _samples_in(graph.nodes[node], space, self.values)
        return next(
            (
                name
                for name, words, place in samples
                if _axis_at(words, place, extents, self.batch) is None
            ),
            None,
        )

    def of(self, value: str) -> Samples | None:
        """Where a value's samples are (the first place, where two dimensions count them); None
        where nowhere.
        """
        found = self.values.get(value)
        return found[0] if found else None


@remembered(GRAPHS)
def batch_axes_of(graph: Graph) -> BatchAxes:
    """Follow the batch axes of `graph.batch_axes` through the graph. A node whose operator has no
    row is not looked through. A value of which the samples end up on both sides of a cut that is no
    multiple of a sample counts as carrying none.
    """
    extents = [graph.type_of(name).shape[axis] for name, axis in graph.batch_axes]
    batch = extents[0] if extents else 0
    values: dict[str, set[Samples]] = {name: {Samples(axis)} for name, axis in graph.batch_axes}
    nodes: list[tuple[NodeSamples, ...]] = [()] * len(graph.nodes)
    if batch <= 1:
        return BatchAxes(
            batch, tuple(nodes), {name: tuple(found) for name, found in values.items()}
        )
    spaces = spaces_of(graph)
    fixed = {value.name for value in graph.inputs}
    consumers = graph.consumers()
    # Forwards in one go; only what is learnt backwards is visited again.
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
        found = _node_samples(node, spaces(index), values, batch)
        if found == nodes[index]:
            continue
        nodes[index] = found
        for name, place in _places(node, spaces(index), found):
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


def _tensors(node: Node, space: Space) -> tuple[tuple[str, tuple[Dimension, ...] | None], ...]:
    return (
        *zip(node.inputs, space.operands, strict=True),
        *zip(node.outputs, space.results, strict=True),
    )


def _samples_in(
    node: Node, space: Space, values: Mapping[str, Iterable[Samples]]
) -> Iterator[tuple[str, Dimension, Samples]]:
    """The operands and results of a node that carry samples, the dimension that does, and where in
    it.
    """
    for name, tensor in _tensors(node, space):
        if tensor is not None:
            yield from ((name, tensor[place.dimension], place) for place in values.get(name, ()))


def _node_samples(
    node: Node, space: Space, values: dict[str, set[Samples]], batch: int
) -> tuple[NodeSamples, ...]:
    """The axes of a node's space that count samples, given what is known of its operands and
    results.
    """
    extents = space.axis_sizes()
    tensors = _samples_in(node, space, values)
    found = sorted(
        {
            axis
            for _, dimension, place in tensors
            if (axis := _axis_at(dimension, place, extents, batch))
        }
    )
    pairs = (
        (axis, outer, inner)
        for axis in space.axes
        for name, outer, inner in found
        if name == axis.name
    )
    return tuple(NodeSamples(axis.name, outer, inner, axis.kind) for axis, outer, inner in pairs)


def _axis_at(
    dimension: Dimension, place: Samples, extents: dict[str, int], batch: int
) -> tuple[str, int, int] | None:
    """The axis of a dimension in which the samples lie, with outer and inner extents inside that
    axis.
    """
    below = 1
    for name in reversed(dimension):
        extent = extents[name]
        span = place.inner * batch
        if place.inner % below == 0 and (below * extent) % span == 0 and extent > 1:
            return name, below * extent // span, place.inner // below
        below *= extent
    return None


def _places(node: Node, space: Space, found: tuple[NodeSamples, ...]) -> list[tuple[str, Samples]]:
    """Where the samples of these axes are in the node's operands and results."""
    extents = space.axis_sizes()
    places: list[tuple[str, Samples]] = []
    for samples, (name, tensor) in itertools.product(found, _tensors(node, space)):
        for index, dimension in enumerate(tensor or ()):
            if name and samples.axis in dimension:
                at = dimension.index(samples.axis)
                outer = math.prod(extents[other] for other in dimension[:at]) * samples.outer
                inner = math.prod(extents[other] for other in dimension[at + 1 :]) * samples.inner
                places.append((name, Samples(index, outer, inner)))
    return places


TARGETS = frozenset({"Reshape", "Expand"})
"""Operators whose second operand is the result's shape."""
_EXPORT = "export with a symbolic batch dimension, or with a batch of one micro-batch"


@remembered(GRAPHS)
def rebatched(graph: Graph, size: int) -> Graph:
    """The graph of one evaluation on `size` samples, made from that on a multiple of it; nodes keep
    their indices. Every dimension that counts samples shrinks in proportion, merged ones included.
    Raises ConfigurationError where `size` does not divide the graph's batch, ModelError where a
    constant differs from sample to sample or a parameter counts samples: then micro-batches are not
    alike.
    """
    axes = batch_axes_of(graph)
    if axes.batch == size:
        return graph
    if not graph.batch_axes or size <= 0 or axes.batch % size:
        raise ConfigurationError(
            f"micro-batches of {size} cannot be made of the {axes.batch} "
            f"{plural(axes.batch, 'sample')} that the model's shapes are fixed to",
            hint=f"choose a divisor of {axes.batch}, or export with a symbolic batch dimension",
        )
    for parameter in graph.parameters:
        if parameter.value.name in axes.values:
            message = (
                f"parameter {parameter.value.name!r} has an entry for each of "
                f"the {axes.batch} {plural(axes.batch, 'sample')}"
            )
            raise ModelError(message, "export with a batch of one micro-batch")
    spaces = spaces_of(graph)
    for index, node in enumerate(graph.nodes):
        if (
            operator_of(node) is not None
            and (lost := axes.lost(graph, spaces(index), index)) is not None
        ):
            message = (
                f"{node.op} does not keep the samples of {lost!r} apart, so the batch cannot shrink"
            )
            raise ModelError(message, _EXPORT, repr(node.name))
    shrunk = {}
    for name, places in axes.values.items():
        value = graph.type_of(name)
        shape = list(value.shape)
        for place in places:  # A dimension may count samples twice.
            shape[place.dimension] = shape[place.dimension] // axes.batch * size
        shrunk[name] = Value(name, value.dtype, tuple(shape))

    def resized(value: Value) -> Value:
        return shrunk.get(value.name, value)

    constants, nodes = _targets(graph, shrunk)
    nodes = tuple(
        node if node.body is None else _with_body(graph, node, axes, size) for node in nodes
    )
    result = dataclasses.replace(
        graph,
        inputs=tuple(map(resized, graph.inputs)),
        constants=tuple(_sliced(constant, axes, size) for constant in constants),
        nodes=nodes,
        values=tuple(map(resized, graph.values)),
    )
    _check(result)
    return result


def _with_body(graph: Graph, node: Node, axes: BatchAxes, size: int) -> Node:
    """A loop whose body is that of `size` samples."""
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
                raise ModelError(message, _EXPORT, repr(node.name))
            places.append(place)
    if not places:
        return node
    return dataclasses.replace(
        node, body=rebatched(dataclasses.replace(node.body, batch_axes=tuple(places)), size)
    )


def _targets(graph: Graph, shrunk: dict[str, Value]) -> tuple[list[Constant], tuple[Node, ...]]:
    """Constants and nodes, with new constants for the shapes that nodes give their results."""
    constants = list(graph.constants)
    nodes = []
    taken = set[str]()
    for node in graph.nodes:
        result = shrunk.get(node.outputs[0])
        if node.op not in TARGETS or node.domain or result is None:
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


def _sliced(constant: Constant, axes: BatchAxes, size: int) -> Constant:
    """A constant with the rows of the first `size` samples, which must be those of all others
    too.
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
            raise ModelError(f"{message}: micro-batches would not be alike", _EXPORT)
        kept = np.moveaxis(samples[:size], 0, len(before) + 1)
        array = np.ascontiguousarray(
            kept.reshape(*before, place.outer * size * place.inner, *after)
        )
    if array is constant.array:
        return constant
    return Constant(Value(constant.value.name, constant.value.dtype, array.shape), array)


def _check(graph: Graph) -> None:
    """Raise ModelError where a node does not fit the smaller shapes."""
    spaces = spaces_of(graph)
    for index, node in enumerate(graph.nodes):
        if operator_of(node) is None:
            raise ModelError(
                f"{node.op} is not supported, so the batch cannot shrink", where=repr(node.name)
            )
        try:
            spaces(index)
        except NotationError as error:
            message = f"{node.op} cannot run on a smaller batch than it was exported with"
            raise ModelError(
                message, "export with a symbolic batch dimension", repr(node.name)
            ) from error
