"""A random walk over choices: FlexFlow's search (Jia et al., "Beyond Data and Model Parallelism", 2018, section 6).

It proves nothing: it is here to be compared with.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.solvers.min_sum.model import Array, Assignment, MinSum, merged


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
    """The best choice met in `iterations` proposals, one node's random configuration each, from `start` on.

    A choice that costs more by d is taken with chance exp(-d / t), where t is `temperature` times what a node costs on
    average at the start. The walk ends early when half of its iterations brought nothing better. The last `followers`
    nodes are not proposed: they take what costs least whenever a neighbour changes. A choice over `memory_limit` is
    taken only where it needs less memory than the one before. No bound is known: the answer's is minus infinity.
    Raises InfeasibleError where the start is forbidden.
    """
    here = _walker(model, start, len(model.costs) - followers, math.inf if memory_limit is None else memory_limit)
    if here.cost == math.inf:
        raise InfeasibleError("a walk cannot begin with a choice that is forbidden")
    heat = temperature * here.cost / max(1, here.free)
    drawn = random.Random(seed)
    best, rank, improved = tuple(here.choice), here.rank, 0
    for iteration in range(iterations if here.free else 0):
        if iteration - improved > iterations / 2:
            break
        node = drawn.randrange(here.free)
        moved = here.step(node, drawn.randrange(len(model.costs[node])), heat, drawn.random())
        if moved and here.rank < rank:
            best, rank, improved = tuple(here.choice), here.rank, iteration
    memory = model.memory_of(best)
    return Assignment(best, model.cost_of(best), -math.inf, proven=False, memory=memory, fits=memory <= here.limit)


_Near = tuple[tuple[int, Array, Array | None], ...]
"""A node's neighbours, each with costs and memory by the node's own configuration and the neighbour's."""


@dataclass(slots=True)
class _Walker:
    """Where a walk stands, with what that costs; nodes from `free` on follow."""

    model: MinSum
    near: tuple[_Near, ...]
    choice: list[int]
    free: int
    limit: float
    cost: float = 0.0
    memory: float = 0.0

    @property
    def rank(self) -> tuple[bool, float]:
        """Less is better: what fits by its cost, what does not by its memory."""
        return (True, self.memory) if self.memory > self.limit else (False, self.cost)

    def step(self, node: int, proposed: int, heat: float, chance: float) -> bool:
        """Give a node the proposed configuration if `chance`, from 0 to 1, allows; whether it did."""
        if proposed == self.choice[node]:
            return False
        changed = self._changed(node, proposed)
        cost, memory = self._difference(changed)
        if self.memory + memory > self.limit:
            taken = memory < 0 and cost < math.inf
        else:
            taken = cost <= 0 or (heat > 0 and chance < math.exp(-cost / heat))
        if taken:
            for other, number in changed.items():
                self.choice[other] = number
            self.cost, self.memory = self.cost + cost, self.memory + memory
        return taken

    def follow(self, node: int, changed: dict[int, int]) -> int:
        """The cheapest configuration of a node, given those that the others have or change to."""
        total = self.model.costs[node]
        for other, costs, _ in self.near[node]:
            total = total + costs[:, changed.get(other, self.choice[other])]
        return int(total.argmin())

    def _changed(self, node: int, proposed: int) -> dict[int, int]:
        """The configurations of a node and of the followers beside it, once the node changes."""
        changed = {node: proposed}
        for other, _, _ in self.near[node]:
            if other >= self.free:
                changed[other] = self.follow(other, changed)
        return changed

    def _difference(self, changed: dict[int, int]) -> tuple[float, float]:
        """How much more the changed choice costs, and how many bytes more it needs."""
        cost = memory = 0.0
        for node, number in changed.items():
            before = self.choice[node]
            cost += float(self.model.costs[node][number] - self.model.costs[node][before])
            if self.model.memory is not None:
                memory += float(self.model.memory[node][number] - self.model.memory[node][before])
            for other, costs, bytes_ in self.near[node]:
                if other in changed and other < node:
                    continue  # Counted from the other end.
                was, now = (before, self.choice[other]), (number, changed.get(other, self.choice[other]))
                cost += float(costs[now] - costs[was])
                if bytes_ is not None:
                    memory += float(bytes_[now] - bytes_[was])
        return cost, memory


def _walker(model: MinSum, start: Sequence[int], free: int, limit: float) -> _Walker:
    """A walk at `start`, followers where it costs them least."""
    simple = merged(model)
    near: list[list[tuple[int, Array, Array | None]]] = [[] for _ in model.costs]
    for edge in simple.edges:
        near[edge.source].append((edge.target, edge.costs, edge.memory))
        near[edge.target].append((edge.source, edge.costs.T, None if edge.memory is None else edge.memory.T))
    found = _Walker(simple, tuple(map(tuple, near)), list(start), free, limit)
    for node in range(free, len(model.costs)):
        found.choice[node] = found.follow(node, {})
    found.cost, found.memory = float(model.cost_of(found.choice)), float(model.memory_of(found.choice))
    return found
