"""Lists of labels: pairs of cost and memory for every choice of a scope, those that nothing beats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autopipe.passes.solvers.min_sum.model import Array, Number


class TooManyLabelsError(Exception):
    """More labels would be formed than are wanted."""


@dataclass(frozen=True, slots=True)
class Filter:
    """Which labels may still become what is sought."""

    limit: Number
    """Bytes that all nodes may need together."""
    least: Number
    """Bytes that all nodes need at least."""
    rate: float
    """What a byte costs in the bound."""
    slack: float
    """How much more than the bound a choice may cost, bytes included."""
    labels: float
    """How many may be formed."""


@dataclass(frozen=True, slots=True, eq=False)
class Front:
    """Labels as columns of equal length."""

    at: dict[int, Array]
    """Of each node of the scope: its configuration."""
    cost: Array
    memory: Array
    rows: dict[int, Array]
    """By node that is eliminated below: the label of its list that this one is made of."""
    least: Number
    """Bytes that the nodes counted in `memory` need at least."""

    def __len__(self) -> int:
        return len(self.cost)

    def take(self, labels: Array) -> Front:
        """Some of the labels."""
        return Front(
            {node: column[labels] for node, column in self.at.items()},
            self.cost[labels],
            self.memory[labels],
            {node: column[labels] for node, column in self.rows.items()},
            self.least,
        )


def join(one: Front, other: Front, sizes: Sequence[int], wanted: Filter, formed: int) -> Front:
    """All pairs of labels that agree on the nodes both know.

    Raises TooManyLabelsError where, after so many `formed`, these are more than wanted.
    """
    shared = [node for node in other.at if node in one.at]
    mine, theirs = _keys(one, shared, sizes), _keys(other, shared, sizes)
    sort = np.argsort(theirs, kind="stable")
    theirs = theirs[sort]
    start = np.searchsorted(theirs, mine, "left")
    counts = np.searchsorted(theirs, mine, "right") - start
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    if formed + total > wanted.labels:
        raise TooManyLabelsError
    left = np.repeat(np.arange(len(one)), counts)
    right = sort[np.arange(total) + np.repeat(start - ends + counts, counts)]
    least = one.least + other.least
    memory = one.memory[left] + other.memory[right]
    fits = memory <= wanted.limit - (wanted.least - least)
    left, right = left[fits], right[fits]
    first, second = one.take(left), other.take(right)
    return Front(second.at | first.at, first.cost + second.cost, memory[fits], first.rows | second.rows, least)


def best_of(front: Front, scope: Iterable[int], sizes: Sequence[int], wanted: Filter) -> Array:
    """The labels that may be part of what is sought, of those that make the same choice in the scope.

    A label goes where another costs and needs no more, and where it exceeds the least of its scope by more than the
    slack: with that least in its place, what it is part of would cost less than the bound allows.
    """
    keys = _keys(front, scope, sizes)
    value = front.cost + wanted.rate * front.memory
    sort = np.lexsort((front.cost, front.memory, keys))
    keys, value = keys[sort], value[sort]
    begins = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
    group = np.repeat(np.arange(len(begins)), np.diff(np.r_[begins, len(keys)]))
    close = value - np.minimum.reduceat(value, begins)[group] <= wanted.slack
    sort, group = sort[close], group[close]
    # Ranks of later groups lie below those of earlier ones, so that the running least begins anew with each.
    rank = np.unique(front.cost[sort], return_inverse=True)[1] - group * len(sort)
    cheaper = np.r_[True, rank[1:] < np.minimum.accumulate(rank)[:-1]]
    return sort[cheaper]


def _keys(front: Front, scope: Iterable[int], sizes: Sequence[int]) -> Array:
    """One number for every choice of the scope."""
    keys = np.zeros(len(front), np.int64)
    for node in scope:
        keys = keys * sizes[node] + front.at[node]
    return keys
