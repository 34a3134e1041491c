"""Critical nodes: variables of the heaviest path through which every other way leads, too.

On the heaviest path a node has no freedom: its rank is the same as soon and as late as possible. Where another way
leads past it, as a residual does past a product, what is before and behind it would still know of one another; so only
those are critical that part the graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from autopipe.passes.placement.tepdist.cones import least_costs
from autopipe.passes.solvers.min_sum import MinSum
from autopipe.passes.solvers.min_sum.elimination import Neighbours
from autopipe.passes.solvers.min_sum.model import Array


def ranks(model: MinSum) -> Array:
    """As soon as possible: how many others at most come before a variable on a way to it, of [variables]."""
    users: list[list[int]] = [[] for _ in model.costs]
    operands = np.zeros(len(model.costs), dtype=np.int64)
    for edge in model.edges:
        users[edge.source].append(edge.target)
        operands[edge.target] += 1
    found = np.zeros_like(operands)
    ready = np.flatnonzero(operands == 0).tolist()
    while ready:
        source = ready.pop()
        for user in users[source]:
            found[user] = max(found[user], found[source] + 1)
            operands[user] -= 1
            if operands[user] == 0:
                ready.append(user)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class RankedVariables:
    """A model's variables from low to high rank, and what each takes."""

    order: tuple[int, ...]
    behind: tuple[tuple[int, ...], ...]
    """Of every variable: its neighbours of lower rank, ascending."""
    weight: Array
    """Seconds of each at least."""

    @staticmethod
    def of(model: MinSum, around: Neighbours, rank: Array) -> RankedVariables:
        """The ways of a model whose edges lead from lower to higher `rank`."""
        ranked = rank.tolist()
        behind = (
            sorted(other for other in near if ranked[other] < own) for near, own in zip(around, ranked, strict=True)
        )
        weight = np.where(np.isfinite(least := least_costs(model)), least, 0.0)
        return RankedVariables(tuple(np.argsort(rank, kind="stable").tolist()), tuple(map(tuple, behind)), weight)


def heaviest_path(ways: RankedVariables, without: Set[int]) -> tuple[int, ...]:
    """The variables that take most together of any way from low to high rank, none of them in `without`."""
    total = ways.weight.tolist()
    for variable in without:
        total[variable] = -math.inf
    before = [-1] * len(total)
    for variable in ways.order:
        heaviest, most = -1, -math.inf
        for other in ways.behind[variable]:
            if total[other] > most:
                heaviest, most = other, total[other]
        if heaviest >= 0 and variable not in without:
            before[variable] = heaviest
            total[variable] += most
    path = [max(range(len(total)), key=total.__getitem__)]
    while before[path[-1]] >= 0:
        path.append(before[path[-1]])
    return tuple(reversed(path))


def parting(path: Sequence[int], around: Neighbours, without: Set[int]) -> tuple[int, ...]:
    """Of a path's variables those that no way leads past but through `without`."""
    place = {variable: number for number, variable in enumerate(path)}
    jumps = np.zeros(len(path) + 1, dtype=np.int64)
    for ends in _ways(place, around, without):
        first, last = min(ends), max(ends)
        if last > first + 1:
            jumps[first + 1] += 1
            jumps[last] -= 1
    return tuple(variable for variable, passing in zip(path, np.cumsum(jumps), strict=False) if not passing)


def _ways(place: dict[int, int], around: Neighbours, without: Set[int]) -> list[set[int]]:
    """The places of a path that are joined by one edge, or by variables beside it."""
    found = [{place[one], place[other]} for one in place for other in around[one] if other in place]
    for part in parts(around, place.keys() | without):
        ends = {place[other] for variable in part for other in around[variable] if other in place}
        found += [ends] if ends else []
    return found


def parts(around: Neighbours, without: Set[int]) -> list[tuple[int, ...]]:
    """The connected parts of what is left of a graph without some variables, each ascending."""
    seen = set(without)
    found = []
    for start in range(len(around)):
        if start in seen:
            continue
        seen.add(start)
        part = [start]
        for variable in part:
            new = around[variable] - seen
            seen |= new
            part += new
        found.append(tuple(sorted(part)))
    return found
