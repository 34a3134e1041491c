"""The best strategy in the paper's space under the paper's costs, for any model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autopipe.passes.placement.pase.paper.costs import WORD_OPERATIONS
from autopipe.passes.placement.pase.paper.edges import transfer
from autopipe.passes.placement.pase.paper.layers import LayerGraph
from autopipe.passes.placement.pase.paper.tables import PaperTables
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
