"""The best strategy in the PaSE paper's space under its costs, and that strategy as a placement.

A node is split as its layer is, as far as an axis of the paper is one of the node's. What is not
keeps the paper's name (the layers of stacked LSTMs, the stack of three projections), which no node
has: generating code refuses it by that name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.ops import operator_of, space_of
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Problem
from autopipe.ir.words import plural
from autopipe.passes.placement.pase.paper_costs import LayerGraph, PaperTables, build_tables
from autopipe.passes.placement.pase.paper_rules import layer_graph
from autopipe.passes.solvers.min_sum import Assignment, MinSum, solve


@dataclass(frozen=True, slots=True, eq=False)
class PaperStrategy:
    """A configuration of every layer: the parts of its axes in order. Costs are operations."""

    graph: LayerGraph
    degrees: tuple[tuple[int, ...], ...]
    cost: float
    bound: float
    """No strategy costs less."""
    proven: bool

    def splits(self) -> dict[str, dict[str, int]]:
        """Parts of each axis by its name, of each layer by its name, as the paper's Table II prints
        them.
        """
        return {
            layer.name: {
                axis.name: degree for axis, degree in zip(layer.axes, degrees, strict=True)
            }
            for layer, degrees in zip(self.graph.layers, self.degrees, strict=True)
        }


def find_strategy(
    tables: PaperTables, solver: Callable[[MinSum], Assignment] = solve
) -> PaperStrategy:
    """The strategy of least cost, found by `solver`."""
    answer = solver(tables.model)
    chosen = zip(tables.configurations, answer.choice, strict=True)
    degrees = tuple(tuple(configurations[row].tolist()) for configurations, row in chosen)
    return PaperStrategy(tables.graph, degrees, answer.cost, answer.bound, answer.proven)


def tables_of(problem: Problem) -> PaperTables:
    """The paper's costs of a problem's graph on all devices of its cluster."""
    return build_tables(layer_graph(problem.graph), problem.cluster.size)


def placement_of(problem: Problem, strategy: PaperStrategy) -> Placement:
    """One stage on all devices, each node split as its layer is.

    Raises InfeasibleError, naming the layer, where its parts do not share out the devices: the
    paper's costs allow 20 parts on 24 devices, a placement does not.
    """
    layers = strategy.graph.layers
    count = problem.cluster.size
    splits: dict[int, list[Split]] = {}
    for index, (layer, degrees) in enumerate(zip(layers, strategy.degrees, strict=True)):
        parts = math.prod(degrees)
        if count % parts:
            raise InfeasibleError(
                f"the best strategy of the paper's model cuts {layer.name} into "
                f"{parts} {plural(parts, 'part')}, which do not share out "
                f"{count} {plural(count, 'device')}",
                hint="choose a power of two of devices, or search_space: executable",
            )
        splits |= _layer_splits(problem.graph, strategy.graph, index, degrees)
    # Splits inside of a node that differ from those of the layer that gives the node's result.
    named = strategy.splits()
    outer = {node: layer.name for layer in layers for node in layer.nodes}
    for layer in layers:
        if layer.inside is not None:
            given = named[outer[layer.inside]]
            part = layer.name.rpartition("/")[2]
            cuts = {
                axis: degree
                for axis, degree in named[layer.name].items()
                if degree not in (1, given.get(axis))
            }
            splits[layer.inside] += (
                Split(f"{part}.{axis}", degree) for axis, degree in cuts.items()
            )
    nodes = tuple(range(len(problem.graph.nodes)))
    cut = tuple((node, tuple(found)) for node, found in sorted(splits.items()) if found)
    return Placement((Stage(nodes, tuple(range(count)), problem.micro_batch_size, cut),))


def _layer_splits(
    graph: Graph, layers: LayerGraph, index: int, degrees: Sequence[int]
) -> dict[int, list[Split]]:
    """The splits of a layer's nodes; those that none of them can have go to the first."""
    layer = layers.layers[index]
    unknown = {axis for axis, degree in enumerate(degrees) if degree > 1}
    found: dict[int, list[Split]] = {}
    for node in layer.nodes:
        own = found[node] = []
        for name, axes in sorted(
            _node_axes(graph, layers, index, node).items(), key=lambda each: each[1]
        ):
            # Cutting all of `axes` must cut the dimension that they make up into contiguous pieces.
            last = max((place for place, axis in enumerate(axes) if degrees[axis] > 1), default=0)
            if all(degrees[axis] == layer.axes[axis].extent for axis in axes[:last]):
                unknown -= set(axes)
                if (degree := math.prod(degrees[axis] for axis in axes)) > 1:
                    own.append(Split(name, degree))
    if layer.nodes:
        found[layer.nodes[0]] += (
            Split(layer.axes[axis].name, degrees[axis]) for axis in sorted(unknown)
        )
    return found


def _node_axes(
    graph: Graph, layers: LayerGraph, index: int, node: int
) -> dict[str, tuple[int, ...]]:
    """For axes of a node those of its layer that make them up, outer to inner.

    They are found by the dimensions of tensors that both know: of axes merged in one, only one may
    be longer than one.
    """
    layer = layers.layers[index]
    operator = graph.nodes[node]
    space = space_of(graph, operator)
    extents = space.axis_sizes()
    reading = {
        (edge.source, edge.result): edge.operand for edge in layers.edges if edge.target == index
    }
    outputs = list(zip(operator.outputs, space.results, strict=True))
    known: dict[str, tuple[int, ...]] = {}
    for number, (name, tensor) in enumerate(
        [*outputs, *zip(operator.inputs, space.operands, strict=True)]
    ):
        place = layers.places.get(name)
        if tensor is None or place is None:
            continue
        if place.layer == index:
            axes = layer.results[place.result].axes
        elif number >= len(outputs) and (place.layer, place.result) in reading:
            axes = layer.operands[reading[place.layer, place.result]].axes
        else:
            continue
        for dimension, group in zip(tensor, place.groups, strict=True):
            long = [axis for axis in dimension if extents[axis] > 1]
            cuts = tuple(axis for each in group for axis in axes[each])
            if len(long) == 1 and cuts:
                known.setdefault(long[0], cuts)
    row = operator_of(operator)
    if row is not None and row.kind != "view":
        position = {axis.name: place for place, axis in enumerate(layer.axes)}
        for name, own in layer.aliases:
            if extents.get(own) == layer.axes[position[name]].extent:
                known.setdefault(own, (position[name],))
    return known
