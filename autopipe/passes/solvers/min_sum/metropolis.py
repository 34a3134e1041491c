"""Random walk over the choices of a min-sum model by the Metropolis algorithm, the search of
FlexFlow (Jia et al., "Beyond Data and Model Parallelism for Deep Neural Networks", 2018, section
6). It proves no bound and serves as a baseline.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.solvers.min_sum.model import Assignment, Edge, MinSum, merge_edges


def random_walk(
    model: MinSum,
    start: Sequence[int],
    *,
    iterations: int,
    temperature: float,
    seed: int = 0,
    followers: int = 0,
    memory_limit: float | None = None,
) -> Assignment:
    """Return the best choice of a random walk that begins with the choice `start` and makes up to
    `iterations` proposals. A proposal is a random configuration of one random node.

    The last `followers` nodes get no proposals: each takes its cheapest configuration at the start,
    and again when a proposal changes a neighbour. A proposal that raises the cost by d is accepted
    with probability exp(-d / t). Here t is `temperature` times the cost at the start divided by the
    number of nodes that get proposals. A proposal that exceeds `memory_limit` bytes is accepted
    only if it needs less memory than the current choice. The walk ends early if half of
    `iterations` pass without a better choice.

    The lower bound of the result is minus infinity. Raise InfeasibleError if `start` is forbidden.
    """
    walker = _Walker(
        model,
        start,
        len(model.costs) - followers,
        math.inf if memory_limit is None else memory_limit,
    )
    if walker.cost == math.inf:
        raise InfeasibleError("the initial assignment of the random walk is forbidden")
    scale = temperature * walker.cost / max(1, walker.free)
    generator = random.Random(seed)
    best = tuple(walker.choice)
    rank = walker.rank
    improved = 0
    for iteration in range(iterations if walker.free else 0):
        if iteration - improved > iterations / 2:
            break
        node = generator.randrange(walker.free)
        moved = walker.step(
            node, generator.randrange(len(model.costs[node])), scale, generator.random()
        )
        if moved and walker.rank < rank:
            best = tuple(walker.choice)
            rank = walker.rank
            improved = iteration
    memory = model.memory_of(best)
    return Assignment(
        best,
        model.cost_of(best),
        -math.inf,
        proven=False,
        memory=memory,
        fits=memory <= walker.limit,
    )


class _Walker:
    """The current choice of a walk, with its cost and its memory in bytes. Nodes with indices from
    `free` on are followers, which get no proposals.
    """

    def __init__(self, model: MinSum, start: Sequence[int], free: int, limit: float) -> None:
        self.model = merge_edges(model)
        self.choice = list(start)
        self.free = free
        self.limit = limit
        self.around: list[list[Edge]] = [[] for _ in model.costs]
        """For each node, its edges, turned so that the node is the source."""
        for edge in self.model.edges:
            self.around[edge.source].append(edge)
            self.around[edge.target].append(edge.reversed)
        for node in range(free, len(model.costs)):
            self.choice[node] = self._cheapest(node, {})
        self.cost = float(model.cost_of(self.choice))
        self.memory = float(model.memory_of(self.choice))

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key of the current choice; smaller is better. Choices within the memory limit come
        first, by cost; then other choices, by memory.
        """
        return (True, self.memory) if self.memory > self.limit else (False, self.cost)

    def step(self, node: int, proposed: int, scale: float, chance: float) -> bool:
        """Accept or reject configuration `proposed` for `node`. If it is accepted, change the
        current choice and return True; otherwise return False.

        `scale` is the t of `random_walk`, a cost. `chance` is a random number from 0 to 1.
        """
        if proposed == self.choice[node]:
            return False
        changed = {node: proposed}
        for edge in self.around[node]:
            if edge.target >= self.free:
                changed[edge.target] = self._cheapest(edge.target, changed)
        cost, memory = self._difference(changed)
        if self.memory + memory > self.limit:
            accepted = memory < 0 and cost < math.inf
        else:
            accepted = cost <= 0 or (scale > 0 and chance < math.exp(-cost / scale))
        if accepted:
            for other, configuration in changed.items():
                self.choice[other] = configuration
            self.cost = self.cost + cost
            self.memory = self.memory + memory
        return accepted

    def _cheapest(self, node: int, changed: dict[int, int]) -> int:
        """Return the cheapest configuration of `node` if all other nodes have their configurations
        in `changed` or, without an entry, in the current choice.
        """
        total = self.model.costs[node]
        for edge in self.around[node]:
            total = total + edge.costs[:, changed.get(edge.target, self.choice[edge.target])]
        return int(total.argmin())

    def _difference(self, changed: dict[int, int]) -> tuple[float, float]:
        """Return (cost, bytes) by which the current choice would increase if the nodes in `changed`
        had the configurations given there.
        """
        cost = memory = 0.0
        for node, configuration in changed.items():
            before = self.choice[node]
            cost += float(self.model.costs[node][configuration] - self.model.costs[node][before])
            if self.model.memory is not None:
                memory += float(
                    self.model.memory[node][configuration] - self.model.memory[node][before]
                )
            for edge in self.around[node]:
                if edge.target in changed and edge.target < node:
                    # An edge between two changed nodes is counted once, at the node with the lower
                    # index.
                    continue
                current = self.choice[edge.target]
                old_pair = (before, current)
                new_pair = (configuration, changed.get(edge.target, current))
                cost += float(edge.costs[new_pair] - edge.costs[old_pair])
                if edge.memory is not None:
                    memory += float(edge.memory[new_pair] - edge.memory[old_pair])
        return cost, memory
