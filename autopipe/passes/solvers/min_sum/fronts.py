"""Elimination of cost and memory at once: lists of labels in place of tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopipe.passes.solvers.min_sum.front import Filter, Front, best_of, join
from autopipe.passes.solvers.min_sum.model import Array, MinSum


def eliminate_within(model: MinSum, order: Sequence[int], wanted: Filter) -> tuple[tuple[int, ...] | None, int]:
    """The cheapest choice within the memory limit among those within the slack, None if there is none; labels formed.

    Takes a merged model. Raises TooManyLabelsError where more are formed than are wanted.
    """
    sizes = [len(costs) for costs in model.costs]
    position = {node: index for index, node in enumerate(order)}
    buckets: dict[int, list[Front]] = {node: [] for node in order}
    for node, least in enumerate(least_memory(model)):
        memory = None if model.memory is None else model.memory[node]
        buckets[node].append(_listed(model.costs[node], memory, (node,), least))
    for edge in model.edges:
        ends = (edge.source, edge.target)
        buckets[min(ends, key=position.__getitem__)].append(_listed(edge.costs, edge.memory, ends, 0))
    below: dict[int, Front] = {}
    formed = 0
    roots = Front({}, np.zeros(1, np.int64), np.zeros(1, np.int64), {}, 0)
    for node in order:
        front = buckets[node][0]
        for other in sorted(buckets[node][1:], key=len):
            front = join(front, other, sizes, wanted, formed)
            formed += len(front)
        scope = sorted((other for other in front.at if other != node), key=position.__getitem__)
        if not len(front):
            return None, formed
        front = below[node] = front.take(best_of(front, scope, sizes, wanted))
        left = replace(front, at={other: front.at[other] for other in scope}, rows={node: np.arange(len(front))})
        if scope:
            buckets[scope[0]].append(left)
        else:
            roots = join(roots, left, sizes, wanted, formed)
            formed += len(roots)
            if not len(roots):
                return None, formed
            roots = roots.take(best_of(roots, (), sizes, wanted))
    return _traced(roots, below, len(order)), formed


def least_memory(model: MinSum) -> list[int | float]:
    """Of every node: the least bytes of its configurations."""
    return [0] * len(model.costs) if model.memory is None else [memory.min().item() for memory in model.memory]


def _listed(costs: Array, memory: Array | None, ends: tuple[int, ...], least: int | float) -> Front:
    """What is not forbidden of a vector or matrix, as labels."""
    allowed = np.nonzero(np.isfinite(costs))
    cost = costs[allowed]
    needs = np.zeros(len(cost), np.int64) if memory is None else memory[allowed]
    return Front(dict(zip(ends, allowed, strict=True)), cost, needs, {}, least)


def _traced(roots: Front, below: dict[int, Front], nodes: int) -> tuple[int, ...]:
    """The choice behind the cheapest label."""
    cheapest = int(np.argmin(roots.cost))
    chosen = [0] * nodes
    waiting = [(node, int(rows[cheapest])) for node, rows in roots.rows.items()]
    while waiting:
        node, label = waiting.pop()
        chosen[node] = int(below[node].at[node][label])
        waiting += [(other, int(rows[label])) for other, rows in below[node].rows.items()]
    return tuple(chosen)
