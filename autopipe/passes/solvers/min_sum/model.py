"""Pairwise min-sum models: nodes that choose a configuration each, and edges on which two choices cost something."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.errors import AutopipeError

Array: TypeAlias = NDArray[Any]
"""Of int64 or float64. Float64 holds whole numbers below 2^53 exactly, and inf for what is forbidden."""
Number: TypeAlias = int | float


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """Joint cost of two nodes' choices."""

    source: int
    target: int
    costs: Array
    """[configurations of source, configurations of target]"""
    memory: Array | None = None
    """Bytes, of the same shape, not negative; None is none."""


@dataclass(frozen=True, slots=True, eq=False)
class MinSum:
    """Choose a configuration for every node so that the sum over nodes and edges is least.

    Arrays are only read. Where layers repeat, give the same array object to each: equal work is then done once.
    Several edges between two nodes add up, an edge from a node to itself counts its diagonal.
    """

    costs: tuple[Array, ...]
    """A vector for every node: what each of its configurations costs."""
    edges: tuple[Edge, ...] = ()
    memory: tuple[Array, ...] | None = None
    """A vector for every node: bytes of each of its configurations, not negative; None is none anywhere."""

    def __post_init__(self) -> None:
        """Raises AutopipeError where shapes do not belong together or a node has no configuration."""
        for node, costs in enumerate(self.costs):
            if costs.ndim != 1 or not len(costs):
                raise AutopipeError(f"min-sum: node {node} needs a vector of costs, it has shape {costs.shape}")
        if self.memory is not None and [a.shape for a in self.memory] != [a.shape for a in self.costs]:
            raise AutopipeError("min-sum: memory needs one vector for every node, each as long as the node's costs")
        for edge in self.edges:
            shape = (self.configurations(edge.source), self.configurations(edge.target))
            for array in (edge.costs, edge.memory):
                if array is not None and array.shape != shape:
                    raise AutopipeError(
                        f"min-sum: edge {edge.source}-{edge.target} needs a matrix of shape {shape}, not {array.shape}"
                    )

    def configurations(self, node: int) -> int:
        """How many configurations a node has."""
        return len(self.costs[node])

    def cost_of(self, choice: Sequence[int]) -> Number:
        """Cost of one configuration for every node: an int, exactly, where all costs are integers."""
        return _total(
            [costs[x] for costs, x in zip(self.costs, choice, strict=True)]
            + [edge.costs[choice[edge.source], choice[edge.target]] for edge in self.edges]
        )

    def memory_of(self, choice: Sequence[int]) -> Number:
        """Bytes of one configuration for every node."""
        parts = [
            edge.memory[choice[edge.source], choice[edge.target]] for edge in self.edges if edge.memory is not None
        ]
        if self.memory is not None:
            parts += [memory[x] for memory, x in zip(self.memory, choice, strict=True)]
        return _total(parts)


def _total(parts: list[Any]) -> Number:
    if all(isinstance(part, np.integer) for part in parts):
        return sum(int(part) for part in parts)
    return math.fsum(float(part) for part in parts)


def merged(model: MinSum) -> MinSum:
    """The same sums with at most one edge between two nodes, from the lower to the higher, and none from one to itself.

    Arrays that need no change stay the objects they are; what is changed equally is changed once.
    """
    costs, memory = list(model.costs), list(model.memory or ())
    arrays: dict[tuple[object, ...], Array] = {}

    def turned(array: Array) -> Array:
        return arrays.setdefault((id(array),), array.T)

    def added(one: Array, other: Array) -> Array:
        key = (id(one), id(other))
        if key not in arrays:
            arrays[key] = one + other
        return arrays[key]

    def added_memory(one: Array | None, other: Array | None) -> Array | None:
        return added(one, other) if one is not None and other is not None else (other if one is None else one)

    if any(edge.memory is not None and edge.source == edge.target for edge in model.edges) and not memory:
        memory = [np.zeros(len(vector), np.int64) for vector in costs]
    pairs: dict[tuple[int, int], Edge] = {}
    for edge in model.edges:
        low, high = sorted((edge.source, edge.target))
        if low == high:
            costs[low] = costs[low] + np.diagonal(edge.costs)
            if edge.memory is not None:
                memory[low] = memory[low] + np.diagonal(edge.memory)
            continue
        if edge.source != low:
            edge = Edge(low, high, turned(edge.costs), None if edge.memory is None else turned(edge.memory))
        if (low, high) in pairs:
            known = pairs[low, high]
            edge = Edge(low, high, added(known.costs, edge.costs), added_memory(known.memory, edge.memory))
        pairs[low, high] = edge
    return MinSum(tuple(costs), tuple(pairs.values()), tuple(memory) or None)
