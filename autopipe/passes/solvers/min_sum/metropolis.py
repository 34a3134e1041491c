"""A random walk over choices: FlexFlow's search (Jia et al., "Beyond Data and Model Parallelism",
2018, section 6).

It proves nothing: it is here to be compared with.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.solvers.min_sum.model import Assignment, Edge, MinSum, merged


def walk(
    model: MinSum,
    start: Sequence[int],
    *,
    iterations: int,
    temperature: float,
    seed: int = 0,
    followers: int = 0,
    memory_limit: float | None = None,
) -> Assignment:
    """The best choice met in `iterations` proposals, one node's random configuration each, from
    `start` on.

    A choice that costs more by d is taken with chance exp(-d / t), where t is `temperature` times
    what a node costs on average at the start. The walk ends early when half of its iterations
    brought nothing better. The last `followers` nodes are not proposed: they take what costs least
    whenever a neighbour changes. A choice over `memory_limit` is taken only where it needs less
    memory than the one before. No bound is known: the answer's is minus infinity. Raises
    InfeasibleError where the start is forbidden.
    """
    here = _Walker(
        model,
        start,
        len(model.costs) - followers,
        math.inf if memory_limit is None else memory_limit,
    )
    if here.cost == math.inf:
        raise InfeasibleError("a walk cannot begin with a choice that is forbidden")
    heat = temperature * here.cost / max(1, here.free)
    drawn = random.Random(seed)
    best = tuple(here.choice)
    rank = here.rank
    improved = 0
    for iteration in range(iterations if here.free else 0):
        if iteration - improved > iterations / 2:
            break
        node = drawn.randrange(here.free)
        moved = here.step(node, drawn.randrange(len(model.costs[node])), heat, drawn.random())
        if moved and here.rank < rank:
            best = tuple(here.choice)
            rank = here.rank
            improved = iteration
    memory = model.memory_of(best)
    return Assignment(
        best, model.cost_of(best), -math.inf, proven=False, memory=memory, fits=memory <= here.limit
    )


class _Walker:
    """Where a walk stands, with what that costs; nodes from `free` on follow."""

    def __init__(self, model: MinSum, start: Sequence[int], free: int, limit: float) -> None:
        self.model = merged(model)
        self.choice = list(start)
        self.free = free
        self.limit = limit
        self.around: list[list[Edge]] = [[] for _ in model.costs]
        """Of every node: its edges, each from it."""
        for edge in self.model.edges:
            self.around[edge.source].append(edge)
            self.around[edge.target].append(edge.reversed)
        for node in range(free, len(model.costs)):
            self.choice[node] = self._follow(node, {})
        self.cost, self.memory = (
            float(model.cost_of(self.choice)),
            float(model.memory_of(self.choice)),
        )

    @property
    def rank(self) -> tuple[bool, float]:
        """Less is better: what fits by its cost, what does not by its memory."""
        return (True, self.memory) if self.memory > self.limit else (False, self.cost)

    def step(self, node: int, proposed: int, heat: float, chance: float) -> bool:
        """Give a node the proposed configuration if `chance`, from 0 to 1, allows; whether it
        did.
        """
        if proposed == self.choice[node]:
            return False
        changed = {node: proposed}
        for edge in self.around[node]:
            if edge.target >= self.free:
                changed[edge.target] = self._follow(edge.target, changed)
        cost, memory = self._difference(changed)
        if self.memory + memory > self.limit:
            taken = memory < 0 and cost < math.inf
        else:
            taken = cost <= 0 or (heat > 0 and chance < math.exp(-cost / heat))
        if taken:
            for other, number in changed.items():
                self.choice[other] = number
            self.cost = self.cost + cost
            self.memory = self.memory + memory
        return taken

    def _follow(self, node: int, changed: dict[int, int]) -> int:
        """The cheapest configuration of a node, given those that the others have or change to."""
        total = self.model.costs[node]
        for edge in self.around[node]:
            total = total + edge.costs[:, changed.get(edge.target, self.choice[edge.target])]
        return int(total.argmin())

    def _difference(self, changed: dict[int, int]) -> tuple[float, float]:
        """How much more the changed choice costs, and how many bytes more it needs."""
        cost = memory = 0.0
        for node, number in changed.items():
            before = self.choice[node]
            cost += float(self.model.costs[node][number] - self.model.costs[node][before])
            if self.model.memory is not None:
                memory += float(self.model.memory[node][number] - self.model.memory[node][before])
            for edge in self.around[node]:
                if edge.target in changed and edge.target < node:
                    continue  # Counted from the other end.
                there = self.choice[edge.target]
                was = (before, there)
                now = (number, changed.get(edge.target, there))
                cost += float(edge.costs[now] - edge.costs[was])
                if edge.memory is not None:
                    memory += float(edge.memory[now] - edge.memory[was])
        return cost, memory
