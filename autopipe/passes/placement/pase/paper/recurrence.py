"""Stacked LSTMs: layers of equal shape, one after the other, are one layer with an axis for their number."""

from __future__ import annotations

from dataclasses import replace

from autopipe.ir.graph import Node
from autopipe.passes.placement.pase.paper.costs import Recurrent
from autopipe.passes.placement.pase.paper.drafting import LayerGraphBuilder, Pattern, Words
from autopipe.passes.placement.pase.paper.generic import by_space
from autopipe.passes.placement.pase.paper.layers import Place

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
