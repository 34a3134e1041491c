"""A strategy of the paper as a placement: splits of the ONNX nodes, as far as an axis of the paper is one of theirs.

What is not keeps the paper's name (the layers of stacked LSTMs, the stack of three projections), which no node has:
generating code refuses it by that name.

The best strategy in the paper's space under the paper's costs, for any model.

Data parallelism in the paper's space: every layer cut along the axis that counts samples.

Paper mode from a problem to its answer: the graph, the tables, the solver.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopipe.ir.batch import batch_axes_of
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.ops import operator_of, space_of
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Problem
from autopipe.ir.space import Dimension, Space
from autopipe.passes.placement.pase.paper_costs import (
    WORD_OPERATIONS,
    Layer,
    LayerGraph,
    PaperTables,
    PlacedLayer,
    build_tables,
    transfer,
)
from autopipe.passes.placement.pase.paper_rules import layer_graph
from autopipe.passes.solvers.min_sum import Assignment, Edge, MinSum, solve


@dataclass(frozen=True, slots=True, eq=False)
class PaperStrategy:
    """A configuration of every layer."""

    graph: LayerGraph
    devices: int
    degrees: tuple[tuple[int, ...], ...]
    """Of each layer, the parts of its axes in order."""
    cost: float
    """Operations, what is exchanged counted as operations."""
    bound: float
    """Lower bound on every strategy."""
    proven: bool

    def splits(self) -> dict[str, dict[str, int]]:
        """Parts of each axis by its name, of each layer by its name, as the paper's Table II prints them."""
        return {
            placed.name: {axis.name: degree for axis, degree in zip(placed.layer.axes, degrees, strict=True)}
            for placed, degrees in zip(self.graph.layers, self.degrees, strict=True)
        }


def model_of(tables: PaperTables) -> MinSum:
    """The tables as solvers take them."""
    edges = zip(tables.graph.edges, tables.edge_costs, strict=True)
    return MinSum(tables.layer_costs, tuple(Edge(edge.source, edge.target, costs) for edge, costs in edges))


def find_strategy(tables: PaperTables, solver: Callable[[MinSum], Assignment] = solve) -> PaperStrategy:
    """The strategy of least cost, found by `solver`."""
    answer = solver(model_of(tables))
    chosen = zip(tables.configurations, answer.choice, strict=True)
    degrees = tuple(tuple(map(int, configurations[row])) for configurations, row in chosen)
    return PaperStrategy(tables.graph, tables.devices, degrees, answer.cost, answer.bound, answer.proven)


def cost_of(graph: LayerGraph, degrees: Sequence[tuple[int, ...]], rate: float = WORD_OPERATIONS) -> float:
    """Cost of a strategy, in the searched space or not."""
    rows = [np.array([each], dtype=np.int64) for each in degrees]
    total = sum(float(placed.layer.costs(row, rate)[0]) for placed, row in zip(graph.layers, rows, strict=True))
    for edge in graph.edges:
        written = graph.layers[edge.source].layer.results[edge.result]
        read = graph.layers[edge.target].layer.operands[edge.operand]
        total += float(
            transfer(written.extents, written.degrees(rows[edge.source]), read.degrees(rows[edge.target]), rate)[0, 0]
        )
    return total


def sample_axes(graph: Graph, layers: LayerGraph) -> tuple[int | None, ...]:
    """For each layer the axis that counts samples, None where it has none.

    Known where a layer's result is a value of the model; others have it from what they read.
    """
    found: list[int | None] = [None] * len(layers.layers)
    for name, places in batch_axes_of(graph).values.items():
        place = layers.places.get(name)
        if place is not None and found[place.layer] is None and place.groups[places[0].dimension]:
            outer = place.groups[places[0].dimension][0]
            axes = layers.layers[place.layer].layer.results[place.result].axes[outer]
            found[place.layer] = axes[0] if axes else None
    for edge in layers.edges:
        source, target = layers.layers[edge.source].layer, layers.layers[edge.target].layer
        if found[edge.target] is None and found[edge.source] is not None:
            written = source.results[edge.result].axes
            read = target.operands[edge.operand].axes
            cuts = [
                axes[0] for before, axes in zip(written, read, strict=True) if found[edge.source] in before and axes
            ]
            found[edge.target] = cuts[0] if cuts else None
    return tuple(found)


def data_parallel(graph: Graph, layers: LayerGraph, devices: int) -> tuple[tuple[int, ...], ...]:
    """Degrees of every layer's axes when as many as possible of `devices` share the samples."""
    return tuple(
        tuple(
            max(degree for degree in range(1, devices + 1) if axis.extent % degree == 0) if position == counted else 1
            for position, axis in enumerate(placed.layer.axes)
        )
        for placed, counted in zip(layers.layers, sample_axes(graph, layers), strict=True)
    )


def tables_of(problem: Problem, rate: float = WORD_OPERATIONS) -> PaperTables:
    """The paper's costs of a problem's graph on all devices of its cluster; `rate` is r, operations a word."""
    return build_tables(layer_graph(problem.graph), problem.cluster.size, rate)


def search(
    problem: Problem, solver: Callable[[MinSum], Assignment] = solve, rate: float = WORD_OPERATIONS
) -> PaperStrategy:
    """The best strategy in the paper's space; `placing.placement_of` makes a placement of it."""
    return find_strategy(tables_of(problem, rate), solver)


def data_parallel_cost(problem: Problem, rate: float = WORD_OPERATIONS) -> float:
    """Cost of data parallelism under the same model."""
    layers = layer_graph(problem.graph)
    return cost_of(layers, data_parallel(problem.graph, layers, problem.cluster.size), rate)


Meaning = dict[str, tuple[int, ...]]
"""For an axis of a node, the axes of its layer that make it up, outer to inner."""


def placement_of(problem: Problem, strategy: PaperStrategy) -> Placement:
    """One stage on all devices, each node split as its layer is.

    Raises InfeasibleError, naming the layer, where its parts do not share out the devices: the paper's costs allow 20
    parts on 24 devices, a placement does not.
    """
    splits: dict[int, tuple[Split, ...]] = {}
    for index, degrees in enumerate(strategy.degrees):
        _check_parts(strategy.graph.layers[index], degrees, problem.cluster.size)
        splits.update(_splits_of(problem.graph, strategy.graph, index, degrees))
    for node, other in _inner_splits(strategy):
        splits[node] = (*splits[node], other)
    nodes = tuple(range(len(problem.graph.nodes)))
    devices = tuple(range(problem.cluster.size))
    cut = tuple(sorted((node, found) for node, found in splits.items() if found))
    return Placement((Stage(nodes, devices, problem.micro_batch_size, cut),))


def _check_parts(placed: PlacedLayer, degrees: Sequence[int], devices: int) -> None:
    parts = math.prod(degrees)
    if devices % parts:
        raise InfeasibleError(
            f"the best strategy of the paper's model cuts {placed.name} into {parts} parts, which do not share out "
            f"{devices} devices",
            hint="choose a power of two of devices, or search_space: executable",
        )


def _splits_of(graph: Graph, layers: LayerGraph, index: int, degrees: Sequence[int]) -> dict[int, tuple[Split, ...]]:
    """The splits of a layer's nodes; those that none of them can have go to the first."""
    placed = layers.layers[index]
    unknown = {axis for axis, degree in enumerate(degrees) if degree > 1}
    found = {}
    for node in placed.nodes:
        meaning = _meaning(graph, layers, index, node)
        named = {name: axes for name, axes in meaning.items() if _is_one_cut(placed.layer, axes, degrees)}
        unknown -= {axis for axes in named.values() for axis in axes}
        order = sorted(named.items(), key=lambda each: each[1])
        cuts = (Split(name, math.prod(degrees[axis] for axis in axes)) for name, axes in order)
        found[node] = tuple(split for split in cuts if split.degree > 1)
    if placed.nodes and unknown:
        first = placed.nodes[0]
        found[first] += tuple(Split(placed.layer.axes[axis].name, degrees[axis]) for axis in sorted(unknown))
    return found


def _inner_splits(strategy: PaperStrategy) -> Iterator[tuple[int, Split]]:
    """Splits inside of a node that differ from those of the layer that gives the node's result."""
    named = list(strategy.splits().values())
    outer = {node: index for index, placed in enumerate(strategy.graph.layers) for node in placed.nodes}
    for index, placed in enumerate(strategy.graph.layers):
        if placed.inside is None:
            continue
        given, part = named[outer[placed.inside]], placed.name.rpartition("/")[2]
        for axis, degree in named[index].items():
            if degree > 1 and given.get(axis) != degree:
                yield placed.inside, Split(f"{part}.{axis}", degree)


def _is_one_cut(layer: Layer, axes: tuple[int, ...], degrees: Sequence[int]) -> bool:
    """True if cutting all of `axes` cuts the dimension that they make up into contiguous pieces."""
    last = max((place for place, axis in enumerate(axes) if degrees[axis] > 1), default=0)
    return all(degrees[axis] == layer.axes[axis].extent for axis in axes[:last])


def _meaning(graph: Graph, layers: LayerGraph, index: int, node: int) -> Meaning:
    """Axes of a node by those of its layer, found by the dimensions of tensors that both know."""
    placed, space = layers.layers[index], space_of(graph, graph.nodes[node])
    meaning: Meaning = {}
    for name, tensor in zip(graph.nodes[node].outputs, space.results, strict=True):
        place = layers.places.get(name)
        if tensor is not None and place is not None and place.layer == index:
            axes = placed.layer.results[place.result].axes
            _match(space, tensor, place.groups, axes, meaning)
    reading = {(edge.source, edge.result): edge.operand for edge in layers.edges if edge.target == index}
    for name, tensor in zip(graph.nodes[node].inputs, space.operands, strict=True):
        place = layers.places.get(name)
        if tensor is None or place is None:
            continue
        if place.layer == index:
            _match(space, tensor, place.groups, placed.layer.results[place.result].axes, meaning)
        elif (place.layer, place.result) in reading:
            axes = placed.layer.operands[reading[place.layer, place.result]].axes
            _match(space, tensor, place.groups, axes, meaning)
    row = operator_of(graph.nodes[node])
    if row is not None and row.kind != "view":
        _add_aliases(placed, space, meaning)
    return meaning


def _match(
    space: Space,
    tensor: tuple[Dimension, ...],
    groups: tuple[tuple[int, ...], ...],
    axes: tuple[tuple[int, ...], ...],
    meaning: Meaning,
) -> None:
    """Add what a tensor's dimensions tell; of merged axes only one may be longer than one."""
    extents = space.extents()
    for dimension, group in zip(tensor, groups, strict=True):
        long = [name for name in dimension if extents[name] > 1]
        cuts = tuple(axis for each in group for axis in axes[each])
        if len(long) == 1 and cuts:
            meaning.setdefault(long[0], cuts)


def _add_aliases(placed: PlacedLayer, space: Space, meaning: Meaning) -> None:
    position = {axis.name: place for place, axis in enumerate(placed.layer.axes)}
    extents = space.extents()
    for name, own in placed.aliases:
        if own in extents and extents[own] == placed.layer.axes[position[name]].extent:
            meaning.setdefault(own, (position[name],))
