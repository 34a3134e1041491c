"""Memory as a cost: what a byte is worth, and least memory alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from autopipe.passes.solvers.min_sum.model import Array, MinSum


def priced(model: MinSum, rate: float) -> MinSum:
    """The model in which every byte costs `rate` on top (Lagrangian relaxation of a memory limit)."""
    known: dict[tuple[int, int], Array] = {}

    def both(costs: Array, memory: Array | None) -> Array:
        if memory is None:
            return costs
        key = (id(costs), id(memory))
        if key not in known:
            known[key] = costs + rate * memory
        return known[key]

    memory = model.memory or (None,) * len(model.costs)
    return replace(
        model,
        costs=tuple(both(costs, needs) for costs, needs in zip(model.costs, memory, strict=True)),
        edges=tuple(replace(edge, costs=both(edge.costs, edge.memory)) for edge in model.edges),
    )


def memory_alone(model: MinSum) -> MinSum:
    """The model whose cost is the memory; what is forbidden stays so. Edges without a say are left out."""
    known: dict[tuple[int, int], Array] = {}

    def needs(costs: Array, memory: Array | None) -> Array:
        key = (id(costs), id(memory))
        if key not in known:
            forbidden = np.isinf(costs)
            bytes_ = np.zeros(costs.shape, np.int64) if memory is None else memory
            known[key] = np.where(forbidden, np.inf, bytes_) if forbidden.any() else bytes_
        return known[key]

    memory = model.memory or (None,) * len(model.costs)
    edges = tuple(replace(edge, costs=needs(edge.costs, edge.memory)) for edge in model.edges)
    return replace(
        model,
        costs=tuple(needs(costs, bytes_) for costs, bytes_ in zip(model.costs, memory, strict=True)),
        edges=tuple(edge for edge in edges if edge.costs.any()),
    )
