"""Data parallelism in the paper's space: every layer cut along the axis that counts samples."""

from __future__ import annotations

from autopipe.ir.batch import batch_axes_of
from autopipe.ir.graph import Graph
from autopipe.passes.placement.pase.paper.layers import LayerGraph


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
