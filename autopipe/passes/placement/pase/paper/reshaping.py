"""Reshapes: most of them drop out; others are the paper's flattening to one dimension and back."""

from __future__ import annotations

import math

from autopipe.passes.placement.pase.paper.costs import Movement, Product
from autopipe.passes.placement.pase.paper.drafting import LayerGraphBuilder, regrouped
from autopipe.passes.placement.pase.paper.layers import Axis, Layer, Place, PlacedLayer, Tensor


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
