"""Operators that the paper does not name: pointwise ones, views, and whatever else runs over an iteration space."""

from __future__ import annotations

from autopipe.ir.graph import Node
from autopipe.ir.ops import operator_of, space_of
from autopipe.ir.space import AxisKind
from autopipe.passes.placement.pase.paper.costs import Cost, Elementwise, Movement, Reduction
from autopipe.passes.placement.pase.paper.drafting import Indices, LayerGraphBuilder, Pattern
from autopipe.passes.placement.pase.paper.layers import Place

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
