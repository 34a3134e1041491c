"""Exact variable elimination: FindBestStrategy (PaSE, section III-B), a whole table at a time.

Eliminating a node adds up all factors that know it and takes the least over its configurations; what is left is a
factor over its dependent set. Backwards, each node's best configuration follows from those of its dependent set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopipe.ir.errors import AutopipeError, InfeasibleError
from autopipe.passes.solvers.min_sum.answer import Assignment, counted
from autopipe.passes.solvers.min_sum.blocks import blocks
from autopipe.passes.solvers.min_sum.model import Array, MinSum, merged
from autopipe.passes.solvers.min_sum.ordering import Neighbours, neighbours, sequence
from autopipe.passes.solvers.min_sum.restriction import conditioned

MAX_BYTES = 2 << 30
"""Of all tables together."""


class TableTooLargeError(AutopipeError):
    """The tables of an elimination would need more memory than they may."""


@dataclass(frozen=True, slots=True)
class Size:
    """Work and memory of an elimination."""

    entries: int
    """Of all tables: 8 bytes each, held until the end."""
    work: int
    """Sums that are compared."""


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """A table over some nodes."""

    scope: tuple[int, ...]
    """In the order in which they are eliminated."""
    table: Array


def size(around: Neighbours, configurations: Sequence[int], order: Sequence[int]) -> Size:
    """Work and memory of eliminating nodes of these numbers of configurations in this order."""
    rest = [set(near) for near in around]
    entries = work = 0
    for node in order:
        joined = rest[node]
        table = math.prod(configurations[other] for other in joined)
        entries += table
        work += table * configurations[node]
        for other in joined:
            rest[other] |= joined
            rest[other] -= {node, other}
    return Size(entries, work)


def eliminate(model: MinSum, ordering: str = "generate_seq", max_bytes: int = MAX_BYTES) -> Assignment:
    """The best choice, by eliminating nodes in an ordering of `ordering.ORDERINGS`. Memory is not limited.

    Raises TableTooLargeError before anything is computed where all tables need more than `max_bytes`; InfeasibleError
    where every choice is forbidden; ConfigurationError for an unknown ordering.
    """
    simple = conditioned(merged(model))
    return counted(eliminate_in(simple, sequence(simple, ordering), max_bytes), model)


def eliminate_in(model: MinSum, order: tuple[int, ...], max_bytes: int = MAX_BYTES) -> Assignment:
    """The best choice of a merged model, by eliminating its nodes in this order; raises as `eliminate` does."""
    needed = 8 * size(neighbours(model), [len(costs) for costs in model.costs], order).entries
    if needed > max_bytes:
        # Of hundreds of operators the number is too large for a float.
        asked = f"{needed / 2**30:.3g}" if needed < 2**1000 else f"2^{needed.bit_length() - 31} or more"
        raise TableTooLargeError(
            f"elimination needs {asked} GiB of tables, more than the {max_bytes / 2**30:.3g} GiB allowed; "
            "another ordering or the default solver may need less"
        )
    position = {node: index for index, node in enumerate(order)}
    buckets: dict[int, list[Factor]] = {node: [Factor((node,), model.costs[node])] for node in order}
    for edge in model.edges:
        if position[edge.source] < position[edge.target]:
            buckets[edge.source].append(Factor((edge.source, edge.target), edge.costs))
        else:
            buckets[edge.target].append(Factor((edge.target, edge.source), edge.costs.T))
    known: dict[tuple[object, ...], Array] = {}
    for node in order:
        scope = tuple(sorted({n for f in buckets[node] for n in f.scope if n != node}, key=position.__getitem__))
        if scope:
            buckets[scope[0]].append(Factor(scope, _least(buckets[node], node, scope, known)))
    choice = _choose(buckets, order)
    cost = model.cost_of(choice)
    if math.isinf(cost):
        raise InfeasibleError("every choice of configurations has a forbidden one, or a forbidden pair")
    return Assignment(choice, cost, cost, proven=True, memory=model.memory_of(choice))


def _choose(buckets: dict[int, list[Factor]], order: tuple[int, ...]) -> tuple[int, ...]:
    """Every node's best configuration, those of its dependent set being chosen before it."""
    chosen: dict[int, int] = {}
    for node in reversed(order):
        sums = np.sum([_given(factor, chosen) for factor in buckets[node]], axis=0)
        chosen[node] = int(np.argmin(sums))
    return tuple(chosen[node] for node in range(len(order)))


def _given(factor: Factor, chosen: dict[int, int]) -> Array:
    """The factor over its first node alone, the others being chosen."""
    table = factor.table
    for other in reversed(factor.scope[1:]):
        table = table[..., chosen[other]]
    return table


def _least(factors: list[Factor], node: int, scope: tuple[int, ...], known: dict[tuple[object, ...], Array]) -> Array:
    """The least sum of the factors over the node's configurations, a table over `scope`; equal sums are formed once.

    `known` tells tables apart by where they lie: all of them are held until the end.
    """
    axes = {other: axis for axis, other in enumerate((node, *scope))}
    tables = [_spread(factor, axes) for factor in factors]
    key = tuple(sorted(place(table) for table in tables))
    if key not in known:
        known[key] = summed_least(tables)
    return known[key]


def _spread(factor: Factor, axes: dict[int, int]) -> Array:
    """The factor's table with an axis for each of `axes`, of length 1 where it does not know the node."""
    shape = [1] * len(axes)
    for other, length in zip(factor.scope, factor.table.shape, strict=True):
        shape[axes[other]] = length
    return factor.table.reshape(shape)


def place(table: Array) -> tuple[object, ...]:
    """Where an array lies: no two that differ have the same, as long as both are held."""
    return table.ctypes.data, table.shape, table.strides, table.dtype.char


def summed_least(tables: list[Array]) -> Array:
    """The least over the first axis of the sum of tables that are broadcast against each other."""
    shape = np.broadcast_shapes(*(table.shape for table in tables))
    tables = sorted(tables, key=lambda table: table.size)
    least = np.empty(shape[1:], np.result_type(*tables))
    inner = math.prod(shape[2:])
    for block in blocks(shape[1], inner):
        best = least[block]
        for rows in blocks(shape[0], inner * (block.stop - block.start)):
            total = _part(tables[0], rows, block)
            for table in tables[1:]:
                total = total + _part(table, rows, block)
            if rows.start == 0:
                np.min(total, axis=0, out=best)
            else:
                np.minimum(best, total.min(axis=0) if len(total) > 1 else total[0], out=best)
    return least


def _part(table: Array, rows: slice, block: slice) -> Array:
    """Some indices of the first two axes, where the table has them."""
    return table[rows if table.shape[0] > 1 else slice(None), block if table.shape[1] > 1 else slice(None)]
