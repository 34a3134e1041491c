"""Elimination of cost and memory at once: lists of labels in place of tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopipe.passes.solvers.min_sum.front import ParetoFront, Sieve
from autopipe.passes.solvers.min_sum.model import Array, MinSum, Number


def eliminate_within(
    model: MinSum, order: Sequence[int], sieve: Sieve, pairs: Sequence[Array]
) -> tuple[int, ...] | None:
    """The cheapest choice within the memory limit among those below the sieve's last threshold; None if there is none.

    Takes a merged model, and for each of its edges a matrix: no choice with that pair costs less.
    """
    position = {node: index for index, node in enumerate(order)}
    buckets: dict[int, list[ParetoFront]] = {node: [] for node in order}
    for node, least in enumerate(least_memory(model)):
        memory = None if model.memory is None else model.memory[node]
        buckets[node].append(_listed((node,), model.costs[node], memory, sieve.floors[node], sieve.threshold, least))
    for edge, floors in zip(model.edges, pairs, strict=True):
        ends = (edge.source, edge.target)
        front = _listed(ends, edge.costs, edge.memory, floors, sieve.threshold, 0)
        buckets[min(ends, key=position.__getitem__)].append(front)
    below: dict[int, ParetoFront] = {}
    nothing = np.zeros(1, np.int64)
    roots = ParetoFront({}, nothing, nothing, np.full(1, -np.inf), {}, 0)
    for node in order:
        front = buckets[node][0]
        for other in sorted(buckets[node][1:], key=len):
            front = sieve.join(front, other)
        scope = sorted((other for other in front.at if other != node), key=position.__getitem__)
        front = below[node] = sieve.sift(front, scope)
        left = replace(front, at={other: front.at[other] for other in scope}, rows={node: np.arange(len(front))})
        if scope:
            buckets[scope[0]].append(left)
        else:
            roots = sieve.sift(sieve.join(roots, left), ())
        if not len(front):
            return None
    return _traced(roots, below, len(order)) if len(roots) else None


def least_memory(model: MinSum) -> list[Number]:
    """Of every node: the least bytes of its configurations."""
    return [0] * len(model.costs) if model.memory is None else [memory.min().item() for memory in model.memory]


def _listed(
    ends: tuple[int, ...], costs: Array, memory: Array | None, floors: Array, threshold: float, least: Number
) -> ParetoFront:
    """Entries of a vector or matrix that are not forbidden, and below the threshold, as labels."""
    allowed = np.nonzero((floors < threshold) & np.isfinite(costs))
    cost = costs[allowed]
    needs = np.zeros(len(cost), np.int64) if memory is None else memory[allowed]
    return ParetoFront(dict(zip(ends, allowed, strict=True)), cost, needs, floors[allowed], {}, least)


def _traced(roots: ParetoFront, below: dict[int, ParetoFront], nodes: int) -> tuple[int, ...]:
    """The choice behind the cheapest label."""
    cheapest = int(np.argmin(roots.cost))
    chosen = [0] * nodes
    waiting = [(node, int(rows[cheapest])) for node, rows in roots.rows.items()]
    while waiting:
        node, label = waiting.pop()
        chosen[node] = int(below[node].at[node][label])
        waiting += [(other, int(rows[label])) for other, rows in below[node].rows.items()]
    return tuple(chosen)
