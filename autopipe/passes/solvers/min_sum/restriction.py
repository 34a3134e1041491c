"""Models in which nodes keep only some of their configurations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.solvers.min_sum.model import Array, Edge, MinSum

Kept: TypeAlias = Sequence[Array]
"""Of every node: ascending indices of configurations."""


def everything(model: MinSum) -> list[Array]:
    """All configurations of every node."""
    return [np.arange(len(costs)) for costs in model.costs]


def chosen(kept: Kept, positions: Sequence[int]) -> tuple[int, ...]:
    """The configurations at these positions among what is kept."""
    return tuple(int(keep[x]) for keep, x in zip(kept, positions, strict=True))


def restricted(model: MinSum, kept: Kept) -> MinSum:
    """The model of what is kept; arrays that were shared and are restricted equally are shared again."""
    known: dict[tuple[object, ...], Array] = {}
    marks = [None if len(keep) == model.configurations(node) else keep.tobytes() for node, keep in enumerate(kept)]

    def vector(array: Array, node: int) -> Array:
        if marks[node] is None:
            return array
        key = (id(array), marks[node])
        if key not in known:
            known[key] = array[kept[node]]
        return known[key]

    def matrix(array: Array, source: int, target: int) -> Array:
        if marks[source] is None and marks[target] is None:
            return array
        key = (id(array), marks[source], marks[target])
        if key not in known:
            known[key] = array.take(kept[source], 0).take(kept[target], 1)
        return known[key]

    return MinSum(
        tuple(vector(costs, node) for node, costs in enumerate(model.costs)),
        tuple(
            Edge(
                edge.source,
                edge.target,
                matrix(edge.costs, edge.source, edge.target),
                None if edge.memory is None else matrix(edge.memory, edge.source, edge.target),
            )
            for edge in model.edges
        ),
        None if model.memory is None else tuple(vector(memory, node) for node, memory in enumerate(model.memory)),
    )


class Support:
    """Which pairs of configurations are allowed in a model."""

    def __init__(self, model: MinSum) -> None:
        finite: dict[int, Array] = {}
        for array in (*model.costs, *(edge.costs for edge in model.edges)):
            if array.dtype.kind == "f" and id(array) not in finite:
                finite[id(array)] = np.isfinite(array)
        some = {mark: allowed for mark, allowed in finite.items() if not allowed.all()}
        self._nodes = [(node, some[id(costs)]) for node, costs in enumerate(model.costs) if id(costs) in some]
        self._edges = [
            (edge.source, edge.target, some[id(edge.costs)]) for edge in model.edges if id(edge.costs) in some
        ]

    def of(self, kept: Kept) -> list[Array]:
        """Of what is kept: configurations that are not forbidden and have one such beside them at every neighbour.

        Raises InfeasibleError where a node has none left.
        """
        left = list(kept)
        for node, finite in self._nodes:
            left[node] = left[node][finite[left[node]]]
        changed = True
        while changed:
            changed = False
            for source, target, finite in self._edges:
                allowed = finite[np.ix_(left[source], left[target])]
                for node, beside in ((source, allowed.any(axis=1)), (target, allowed.any(axis=0))):
                    if not beside.all():
                        left[node] = left[node][beside]
                        changed = True
        if not all(len(keep) for keep in left):
            raise InfeasibleError("every choice of configurations has a forbidden one, or a forbidden pair")
        return left


def conditioned(model: MinSum) -> MinSum:
    """A merged model whose nodes of one configuration have no edges: the others bear what those cost."""
    costs = list(model.costs)
    memory = None if model.memory is None else list(model.memory)
    sums: dict[tuple[int, int], tuple[Array, Array]] = {}
    kept: list[Edge] = []

    def bear(vectors: list[Array], node: int, array: Array) -> None:
        key = (id(vectors[node]), id(array))
        if key not in sums:
            sums[key] = vectors[node], vectors[node] + array.reshape(-1)
        vectors[node] = sums[key][1]

    for edge in model.edges:
        if 1 not in edge.costs.shape:
            kept.append(edge)
            continue
        node = edge.source if edge.costs.shape[1] == 1 else edge.target
        bear(costs, node, edge.costs)
        if edge.memory is not None:
            memory = memory or [np.zeros(len(vector), np.int64) for vector in model.costs]
            bear(memory, node, edge.memory)
    return MinSum(tuple(costs), tuple(kept), None if memory is None else tuple(memory))
