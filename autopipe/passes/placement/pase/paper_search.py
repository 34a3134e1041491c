"""The best strategy in the search space of the PaSE paper under the costs of the paper, and its
conversion to a placement.

In the placement, a node is split like its layer, along the axes that both have. An axis that no
node has (the layers of stacked LSTMs, the stack of three projections) keeps its name in the paper,
so that code generation rejects the split with this name.
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
from autopipe.passes.placement.pase.paper_rules import make_layer_graph
from autopipe.passes.solvers.min_sum import Assignment, MinSum, solve


@dataclass(frozen=True, slots=True, eq=False)
class PaperStrategy:
    """A configuration of each layer: the number of parts of each of its axes, in order. Costs are
    in operations (`paper_costs`).
    """

    graph: LayerGraph
    degrees: tuple[tuple[int, ...], ...]
    cost: float
    bound: float
    """A lower bound on the cost of all strategies of the graph."""
    proven: bool

    def splits(self) -> dict[str, dict[str, int]]:
        """Return, by layer name and axis name, the number of parts, as in Table II of the paper."""
        return {
            layer.name: {
                axis.name: degree for axis, degree in zip(layer.axes, degrees, strict=True)
            }
            for layer, degrees in zip(self.graph.layers, self.degrees, strict=True)
        }


def find_strategy(
    tables: PaperTables, solver: Callable[[MinSum], Assignment] = solve
) -> PaperStrategy:
    """Return the strategy of minimum cost that `solver` finds."""
    assignment = solver(tables.model)
    chosen = zip(tables.configurations, assignment.choice, strict=True)
    degrees = tuple(tuple(configurations[row].tolist()) for configurations, row in chosen)
    return PaperStrategy(
        tables.graph, degrees, assignment.cost, assignment.bound, assignment.proven
    )


def make_paper_tables(problem: Problem) -> PaperTables:
    """Return the costs of the paper for a problem's graph on all devices of its cluster."""
    return build_tables(make_layer_graph(problem.graph), problem.cluster.size)


def paper_placement(problem: Problem, strategy: PaperStrategy) -> Placement:
    """Return a placement with one stage on all devices, in which each node is split like its layer.

    Raise InfeasibleError, with the name of a layer, if its number of parts does not divide the
    number of devices. The paper's model permits such splits, for instance 20 parts on 24 devices,
    but a placement does not.
    """
    layers = strategy.graph.layers
    count = problem.cluster.size
    splits: dict[int, list[Split]] = {}
    for index, (layer, degrees) in enumerate(zip(layers, strategy.degrees, strict=True)):
        parts = math.prod(degrees)
        if count % parts:
            raise InfeasibleError(
                f"the best strategy of the paper's model splits {layer.name} into "
                f"{parts} {plural(parts, 'part')}, which does not divide "
                f"{count} {plural(count, 'device')}",
                hint="use a power of two of devices, or set search_space: executable",
            )
        splits |= _layer_splits(problem.graph, strategy.graph, index, degrees)
    # A node that computes several layers has one set of splits, so splits of an intermediate layer
    # that differ from those of the node's result are added under the name of the layer.
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
    """Return, by node, the splits of the nodes of layer `index`. `degrees` contains the number of
    parts of each of its axes. Splits along axes that none of the nodes has are added to the first
    node.
    """
    layer = layers.layers[index]
    unassigned = {axis for axis, degree in enumerate(degrees) if degree > 1}
    found: dict[int, list[Split]] = {}
    for node in layer.nodes:
        node_splits = found[node] = []
        for name, axes in sorted(
            _node_axes(graph, layers, index, node).items(), key=lambda each: each[1]
        ):
            # A split of the merged axes is possible only if it divides the dimension that they form
            # into contiguous parts: all axes before the innermost split one must be split into
            # single elements.
            innermost_split = max(
                (position for position, axis in enumerate(axes) if degrees[axis] > 1), default=0
            )
            if all(degrees[axis] == layer.axes[axis].size for axis in axes[:innermost_split]):
                unassigned -= set(axes)
                if (degree := math.prod(degrees[axis] for axis in axes)) > 1:
                    node_splits.append(Split(name, degree))
    if layer.nodes:
        found[layer.nodes[0]] += (
            Split(layer.axes[axis].name, degrees[axis]) for axis in sorted(unassigned)
        )
    return found


def _node_axes(
    graph: Graph, layers: LayerGraph, index: int, node: int
) -> dict[str, tuple[int, ...]]:
    """Return, for axes of a node, the positions of the axes of layer `index` that form them, from
    the outermost to the innermost.

    They are inferred from the dimensions of tensors that the node and the layer have in common. If
    a dimension merges several axes of the node, it is used only if exactly one of them is larger
    than 1.
    """
    layer = layers.layers[index]
    operator = graph.nodes[node]
    space = space_of(graph, operator)
    sizes = space.axis_sizes()
    reading = {
        (edge.source, edge.result): edge.operand for edge in layers.edges if edge.target == index
    }
    outputs = list(zip(operator.outputs, space.results, strict=True))
    layer_axes: dict[str, tuple[int, ...]] = {}
    for index_of_tensor, (name, tensor) in enumerate(
        [*outputs, *zip(operator.inputs, space.operands, strict=True)]
    ):
        location = layers.locations.get(name)
        if tensor is None or location is None:
            continue
        if location.layer == index:
            axes = layer.results[location.result].axes
        elif index_of_tensor >= len(outputs) and (location.layer, location.result) in reading:
            axes = layer.operands[reading[location.layer, location.result]].axes
        else:
            continue
        for dimension, group in zip(tensor, location.groups, strict=True):
            long = [axis for axis in dimension if sizes[axis] > 1]
            split_axes = tuple(axis for each in group for axis in axes[each])
            if len(long) == 1 and split_axes:
                layer_axes.setdefault(long[0], split_axes)
    row = operator_of(operator)
    if row is not None and row.kind != "view":
        position = {axis.name: location for location, axis in enumerate(layer.axes)}
        for name, own in layer.aliases:
            if sizes.get(own) == layer.axes[position[name]].size:
                layer_axes.setdefault(own, (position[name],))
    return layer_axes
