"""Lists of labels: for every choice of a scope, pairs of cost and memory that nothing beats.

Elimination of cost and memory at once: lists of labels in place of tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopipe.passes.solvers.min_sum.model import Array, MinSum, Number

SPREAD = 16
"""A join may form this many times the labels that a list may keep."""


@dataclass(frozen=True, slots=True, eq=False)
class ParetoFront:
    """Labels as columns of equal length."""

    at: dict[int, Array]
    """Of each node of the scope: its configuration."""
    cost: Array
    memory: Array
    reach: Array
    """No choice that a label is part of costs less, bytes at their price included."""
    rows: dict[int, Array]
    """By node that is eliminated below: the label of its list that this one is made of."""
    least: Number
    """Bytes that the nodes counted in `memory` need at least."""

    def __len__(self) -> int:
        return len(self.cost)

    def take(self, labels: Array) -> ParetoFront:
        """Some of the labels."""
        return ParetoFront(
            {node: column[labels] for node, column in self.at.items()},
            self.cost[labels],
            self.memory[labels],
            self.reach[labels],
            {node: column[labels] for node, column in self.rows.items()},
            self.least,
        )


@dataclass(slots=True)
class Sieve:
    """Keeps the labels that may still become the cheapest choice within the limit."""

    sizes: Sequence[int]
    """Of every node: its configurations."""
    limit: Number
    """Bytes that all nodes may need together."""
    least: Number
    """Bytes that all nodes need at least."""
    rate: float
    """Cost of a byte."""
    floors: Sequence[Array]
    """Of every node: no choice with this configuration costs less, bytes at their price included."""
    bound: float
    """No choice at all costs less, bytes at their price included."""
    room: int
    """Labels that a list may keep."""
    threshold: float
    """Only labels that reach this are dropped for their cost. It falls where lists would become too long."""
    formed: int = 0
    """Labels so far."""

    def join(self, one: ParetoFront, other: ParetoFront) -> ParetoFront:
        """All pairs of labels that agree on the nodes both know, and leave memory for the rest."""
        shared = [node for node in other.at if node in one.at]
        while True:
            one, other = (front.take(front.reach < self.threshold) for front in (one, other))
            mine, theirs = self._keys(one, shared), self._keys(other, shared)
            sort = np.argsort(theirs, kind="stable")
            start = np.searchsorted(theirs[sort], mine, "left")
            counts = np.searchsorted(theirs[sort], mine, "right") - start
            total = int(counts.sum())
            if total <= SPREAD * self.room:
                break
            self.threshold = float(np.median(np.concatenate([one.reach, other.reach])))
        self.formed += total
        left = np.repeat(np.arange(len(one)), counts)
        right = sort[np.arange(total) + np.repeat(start - np.cumsum(counts) + counts, counts)]
        least = one.least + other.least
        memory = one.memory[left] + other.memory[right]
        fits = memory <= self.limit - (self.least - least)
        first, second = one.take(left[fits]), other.take(right[fits])
        reach = np.maximum(first.reach, second.reach)
        cost = first.cost + second.cost
        return ParetoFront(second.at | first.at, cost, memory[fits], reach, first.rows | second.rows, least)

    def sift(self, front: ParetoFront, scope: Iterable[int]) -> ParetoFront:
        """Labels that may be part of the cheapest choice, of labels that make the same choice in the scope.

        Where two agree there, one can stand for the other. So a label goes if another costs and needs no more; and no
        choice with it can cost less than the least of its scope and its excess over the cheapest label.
        """
        groups, inverse = np.unique(self._keys(front, scope), return_inverse=True)
        value = front.cost + self.rate * front.memory
        cheapest = np.full(len(groups), np.inf)
        np.minimum.at(cheapest, inverse, value)
        floor = np.full(len(front), self.bound)
        for node in scope:
            np.maximum(floor, self.floors[node][front.at[node]], out=floor)
        reach = np.maximum(front.reach, floor + (value - cheapest[inverse]))
        labels = np.flatnonzero(reach < self.threshold)
        labels = labels[_unbeaten(inverse[labels], front.cost[labels], front.memory[labels])]
        if len(labels) > self.room:
            self.threshold = float(np.partition(reach[labels], self.room)[self.room])
            labels = labels[reach[labels] < self.threshold]
        kept = front.take(labels)
        return ParetoFront(kept.at, kept.cost, kept.memory, reach[labels], kept.rows, kept.least)

    def _keys(self, front: ParetoFront, scope: Iterable[int]) -> Array:
        """One number for every choice of the scope."""
        keys = np.zeros(len(front), np.int64)
        for node in scope:
            keys = keys * self.sizes[node] + front.at[node]
        return keys


def _unbeaten(groups: Array, cost: Array, memory: Array) -> Array:
    """Of each group: the labels than which no other costs and needs as little; one of equals."""
    sort = np.lexsort((cost, memory, groups))
    # Ranks of later groups lie below those of earlier ones, so that the running least begins anew with each.
    rank = np.unique(cost[sort], return_inverse=True)[1] - groups[sort] * len(sort)
    return sort[np.flatnonzero(np.r_[True, rank[1:] < np.minimum.accumulate(rank)[:-1]])] if len(sort) else sort


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
