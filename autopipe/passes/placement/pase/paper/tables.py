"""The paper's costs as tables: one vector a layer, one matrix an edge; what is equal is built once and shared."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from autopipe.passes.placement.pase.paper.configurations import Degrees
from autopipe.passes.placement.pase.paper.costs import WORD_OPERATIONS, Floats
from autopipe.passes.placement.pase.paper.edges import transfer
from autopipe.passes.placement.pase.paper.layers import Layer, LayerGraph


@dataclass(frozen=True, slots=True, eq=False)
class PaperTables:
    """Configurations and costs of a graph on `devices` devices: entry i of each belongs to layer or edge i."""

    graph: LayerGraph
    devices: int
    configurations: tuple[Degrees, ...]
    layer_costs: tuple[Floats, ...]
    edge_costs: tuple[Floats, ...]
    """[source configurations, target configurations] of each edge."""

    def cost(self, choice: tuple[int, ...]) -> float:
        """Cost of a strategy: `choice` is a configuration of each layer."""
        layers = sum(float(costs[chosen]) for costs, chosen in zip(self.layer_costs, choice, strict=True))
        return layers + sum(
            float(costs[choice[edge.source], choice[edge.target]])
            for edge, costs in zip(self.graph.edges, self.edge_costs, strict=True)
        )


def build_tables(graph: LayerGraph, devices: int, rate: float = WORD_OPERATIONS) -> PaperTables:
    """The tables of `graph` on `devices` devices; `rate` is r, operations in the time of a word."""
    kinds: dict[Layer, int] = {}
    kind_of = [kinds.setdefault(placed.layer, len(kinds)) for placed in graph.layers]
    degrees = [layer.configurations(devices, graph.cutoff) for layer in kinds]
    costs = [layer.costs(found, rate) for layer, found in zip(kinds, degrees, strict=True)]
    matrices: dict[Hashable, Floats] = {}
    edge_costs = []
    for edge in graph.edges:
        source, target = kind_of[edge.source], kind_of[edge.target]
        key = (source, edge.result, target, edge.operand)
        if key not in matrices:
            written = graph.layers[edge.source].layer.results[edge.result]
            read = graph.layers[edge.target].layer.operands[edge.operand]
            matrices[key] = transfer(
                written.extents, written.degrees(degrees[source]), read.degrees(degrees[target]), rate
            )
        edge_costs.append(matrices[key])
    return PaperTables(
        graph,
        devices,
        tuple(degrees[kind] for kind in kind_of),
        tuple(costs[kind] for kind in kind_of),
        tuple(edge_costs),
    )
