"""Where the samples of a batch are in every value and every iteration space of a graph.

The inputs' batch axes are followed through the nodes' iteration spaces, forwards to what is computed from them and
backwards to what meets them (a mask that an exporter expanded to the batch), dimensions merged by a Reshape included.
Both ways of cutting a batch start here: a micro-batch cuts it in time, a data-parallel replica in space.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopipe.ir.graph import Graph, Node
from autopipe.ir.ops import operator_of
from autopipe.ir.ops.spaces import Spaces
from autopipe.ir.remembered import GRAPHS, remembered
from autopipe.ir.space import AxisKind, Dimension, Space


@dataclass(frozen=True, slots=True, order=True)
class Samples:
    """Where samples are counted in one dimension, whose extent is outer · batch · inner, row-major.

    After a Reshape of (batch, sequence) into one dimension, `outer` is 1 and `inner` the sequence's extent.
    """

    dimension: int
    outer: int = 1
    inner: int = 1


@dataclass(frozen=True, slots=True)
class NodeSamples:
    """An axis of a node's iteration space that counts samples: its extent is outer · batch · inner."""

    axis: str
    outer: int
    inner: int
    kind: AxisKind


@dataclass(frozen=True, slots=True)
class BatchAxes:
    """Where samples are, for a whole graph."""

    batch: int
    """Samples of one evaluation; 0 where no input carries any."""
    nodes: tuple[tuple[NodeSamples, ...], ...]
    """By node, in the order of the space's axes."""
    values: dict[str, tuple[Samples, ...]]
    """By value, for those that carry samples."""

    def axis(self, node: int) -> str | None:
        """The axis by which a node is split over replicas: the first that may be cut, with samples outermost in it."""
        for found in self.nodes[node]:
            if found.outer == 1 and found.kind is not AxisKind.WHOLE:
                return found.axis
        return None

    def lost(self, graph: Graph, space: Space, node: int) -> str | None:
        """A value of this node that carries samples where no axis of its space counts them; None where all is well."""
        extents = space.extents()
        for name, tensor in _tensors(graph.nodes[node], space):
            for place in self.values.get(name, ()) if tensor is not None else ():
                if tensor is not None and _axis_at(tensor[place.dimension], place, extents, self.batch) is None:
                    return name
        return None

    def of(self, value: str) -> Samples | None:
        """Where a value's samples are (the first place, where two dimensions count them); None where nowhere."""
        found = self.values.get(value)
        return found[0] if found else None


@remembered(GRAPHS)
def batch_axes_of(graph: Graph) -> BatchAxes:
    """Follow the batch axes of `graph.batch_axes` through the graph.

    A node whose operator has no row is not looked through. A value of which the samples end up on both sides of a cut
    that is no multiple of a sample counts as carrying none.
    """
    extents = [graph.type_of(name).shape[axis] for name, axis in graph.batch_axes]
    batch = extents[0] if extents else 0
    values: dict[str, set[Samples]] = {name: {Samples(axis)} for name, axis in graph.batch_axes}
    nodes: list[tuple[NodeSamples, ...]] = [()] * len(graph.nodes)
    if batch <= 1:
        return BatchAxes(batch, tuple(nodes), _in_graph_order(values))
    spaces = Spaces(graph)
    fixed = {value.name for value in graph.inputs}
    consumers = graph.consumers()
    # Forwards in one go; only what is learnt backwards is visited again.
    waiting = list(range(len(graph.nodes) - 1, -1, -1))
    queued = set(waiting)
    while waiting:
        index = waiting.pop()
        queued.discard(index)
        node = graph.nodes[index]
        if operator_of(node) is None or not any(name in values for name in (*node.inputs, *node.outputs)):
            continue
        found = _node_samples(node, spaces[index], values, batch)
        if found == nodes[index]:
            continue
        nodes[index] = found
        for name, place in _places(node, spaces[index], found):
            if name in fixed or place in values.setdefault(name, set()):
                continue
            values[name].add(place)
            producer = graph.producer(name)
            touched = (*consumers.get(name, ()), *(() if producer is None else (producer,)))
            for other in touched:
                if other != index and other not in queued:
                    queued.add(other)
                    waiting.append(other)
    return BatchAxes(batch, tuple(nodes), _in_graph_order(values))


def _in_graph_order(values: dict[str, set[Samples]]) -> dict[str, tuple[Samples, ...]]:
    return {name: tuple(sorted(found)) for name, found in values.items() if found}


def _tensors(node: Node, space: Space) -> tuple[tuple[str, tuple[Dimension, ...] | None], ...]:
    """Every operand and result of a node with its notation."""
    return (*zip(node.inputs, space.operands, strict=True), *zip(node.outputs, space.results, strict=True))


def _node_samples(node: Node, space: Space, values: dict[str, set[Samples]], batch: int) -> tuple[NodeSamples, ...]:
    """The axes of a node's space that count samples, given what is known of its operands and results."""
    extents = space.extents()
    found: set[tuple[str, int, int]] = set()
    for name, tensor in _tensors(node, space):
        for place in values.get(name, ()) if tensor is not None else ():
            assert tensor is not None
            axis = _axis_at(tensor[place.dimension], place, extents, batch)
            if axis is not None:
                found.add(axis)
    return tuple(
        NodeSamples(axis.name, outer, inner, axis.kind)
        for axis in space.axes
        for name, outer, inner in sorted(found)
        if name == axis.name
    )


def _axis_at(dimension: Dimension, place: Samples, extents: dict[str, int], batch: int) -> tuple[str, int, int] | None:
    """The axis of a dimension in which the samples lie, with outer and inner extents inside that axis."""
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
    extents = space.extents()
    places: list[tuple[str, Samples]] = []
    for samples in found:
        for name, tensor in _tensors(node, space):
            for index, dimension in enumerate(tensor or ()):
                if name and samples.axis in dimension:
                    at = dimension.index(samples.axis)
                    outer = math.prod(extents[other] for other in dimension[:at]) * samples.outer
                    inner = math.prod(extents[other] for other in dimension[at + 1 :]) * samples.inner
                    places.append((name, Samples(index, outer, inner)))
    return places
