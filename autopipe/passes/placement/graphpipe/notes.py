"""Notes of a plan on the parts of a model that are not series-parallel."""

from __future__ import annotations

from autopipe.ir.graph import Graph
from autopipe.passes.placement.graphpipe.units import Units


def region_notes(graph: Graph, units: Units, regions: tuple[tuple[int, ...], ...]) -> tuple[str, ...]:
    """A line for each region: how large it is, and where it begins and ends."""
    return tuple(_note(graph, [node for unit in region for node in units.nodes[unit]]) for region in regions)


def _note(graph: Graph, nodes: list[int]) -> str:
    first, last = (graph.nodes[node].name for node in (min(nodes), max(nodes)))
    return (
        f"{len(nodes)} operators from {first!r} to {last!r} are not series-parallel: they count as one block, whose "
        "parts run in a fixed order"
    )
