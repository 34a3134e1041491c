"""Pairwise min-sum models, transformations of models, the result of a solver with its proof, and
the work budget of a search.

In a model, each node chooses one configuration. Nodes have a cost per configuration, and edges a
cost per pair of configurations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.errors import AutopipeError, InfeasibleError

Array: TypeAlias = NDArray[Any]
"""Array of int64 or float64. float64 represents integers below 2^53 exactly, and can contain inf
for forbidden configurations and pairs.
"""
Number: TypeAlias = int | float
KeptConfigurations: TypeAlias = Sequence[Array]
"""For each node, the ascending indices of the configurations to which a model is restricted."""
Result = TypeVar("Result")


class ResultCache:
    """Cache of the results of functions of arrays. Results for repeated layers, which share their
    arrays, are computed once and are one object.

    `mark` returns a key of an argument, by default its object identity. The cache stores all
    arguments, so that their keys stay unique.
    """

    def __init__(self, mark: Callable[[Any], Hashable] = id) -> None:
        self._mark = mark
        self._known: dict[Hashable, tuple[tuple[Any, ...], Any]] = {}

    def key(self, function: Callable[..., object], *arguments: object) -> Hashable:
        """Return the key of the call `function(*arguments)` in the cache."""
        return function, *map(self._mark, arguments)

    def knows(self, function: Callable[..., object], *arguments: object) -> bool:
        """True if the result of `function(*arguments)` is in the cache."""
        return self.key(function, *arguments) in self._known

    def __call__(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Return `function(*arguments)`, computed at the first call."""
        key = self.key(function, *arguments)
        if key not in self._known:
            self._known[key] = arguments, function(*arguments)
        made: Result = self._known[key][1]
        return made


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """Cost and memory of each pair of configurations of the nodes `source` and `target`."""

    source: int
    target: int
    costs: Array
    """Cost of each pair, of shape [configurations of source, configurations of target]."""
    memory: Array | None = None
    """Bytes of each pair, not negative, of the same shape as `costs`; None means 0."""

    @property
    def reversed(self) -> Edge:
        """The edge with source and target exchanged."""
        return Edge(
            self.target, self.source, self.costs.T, None if self.memory is None else self.memory.T
        )

    def map_arrays(
        self, once: ResultCache, function: Callable[..., Array], *arguments: object
    ) -> Edge:
        """Return the edge with each of its arrays replaced by `function(array, *arguments)`, which
        the cache `once` computes once per array.
        """
        memory = None if self.memory is None else once(function, self.memory, *arguments)
        return replace(self, costs=once(function, self.costs, *arguments), memory=memory)


@dataclass(frozen=True, slots=True, eq=False)
class MinSum:
    """Minimise the sum of the costs of all nodes and edges over the choices of one configuration
    per node.

    Arrays are only read. Use one array object for repeated layers: equal work is then done once.
    Several edges between two nodes add up. An edge from a node to itself counts with its diagonal.
    """

    costs: tuple[Array, ...]
    """Cost of each configuration, one vector per node."""
    edges: tuple[Edge, ...] = ()
    memory: tuple[Array, ...] | None = None
    """Bytes of each configuration, not negative, one vector per node; None means 0 for all
    nodes.
    """

    def __post_init__(self) -> None:
        """Raise AutopipeError if shapes do not match or a node has no configuration."""
        for node, costs in enumerate(self.costs):
            if costs.ndim != 1 or not len(costs):
                raise AutopipeError(
                    f"min-sum: the costs of node {node} have shape {costs.shape}, expected a "
                    "non-empty vector"
                )
        if self.memory is not None and [a.shape for a in self.memory] != [
            a.shape for a in self.costs
        ]:
            raise AutopipeError(
                "min-sum: memory must consist of one vector per node, of the same length as the "
                "costs of the node"
            )
        for edge in self.edges:
            shape = (len(self.costs[edge.source]), len(self.costs[edge.target]))
            for array in (edge.costs, edge.memory):
                if array is not None and array.shape != shape:
                    raise AutopipeError(
                        f"min-sum: a matrix of edge {edge.source}-{edge.target} has shape "
                        f"{array.shape}, expected {shape}"
                    )

    @property
    def node_memory(self) -> tuple[Array | None, ...]:
        """For each node, the vector of the bytes of its configurations; None for each node if
        `memory` is None.
        """
        return self.memory or (None,) * len(self.costs)

    @property
    def sizes(self) -> list[int]:
        """Number of configurations of each node."""
        return [len(costs) for costs in self.costs]

    def cost_of(self, choice: Sequence[int]) -> Number:
        """Return the cost of a choice, which contains one configuration per node. It is an exact
        int if all costs are integers.
        """
        parts = [costs[x] for costs, x in zip(self.costs, choice, strict=True)]
        return _exact_sum(
            parts + [edge.costs[choice[edge.source], choice[edge.target]] for edge in self.edges]
        )

    def memory_of(self, choice: Sequence[int]) -> Number:
        """Return the bytes of a choice, which contains one configuration per node."""
        known = ((edge, edge.memory) for edge in self.edges)
        parts = [
            memory[choice[edge.source], choice[edge.target]]
            for edge, memory in known
            if memory is not None
        ]
        if self.memory is not None:
            parts += [memory[x] for memory, x in zip(self.memory, choice, strict=True)]
        return _exact_sum(parts)

    def minimum_memory(self) -> list[Number]:
        """Return, for each node, the minimum of the bytes of its configurations, without the bytes
        of edges.
        """
        return [0 if memory is None else memory.min().item() for memory in self.node_memory]

    def cells(self, sizes: Sequence[int]) -> int:
        """Return the number of pairs of configurations of all edges if node i has `sizes[i]`
        configurations.
        """
        return sum(sizes[edge.source] * sizes[edge.target] for edge in self.edges)


def _exact_sum(parts: list[Any]) -> Number:
    """Return the sum of NumPy numbers: an exact int if all are integers, otherwise a correctly
    rounded float.
    """
    if all(isinstance(part, np.integer) for part in parts):
        return sum(int(part) for part in parts)
    return math.fsum(float(part) for part in parts)


def all_forbidden_error() -> InfeasibleError:
    """Return the error for a model in which every choice is forbidden."""
    return InfeasibleError(
        "every choice contains a forbidden configuration or a forbidden pair of configurations"
    )


def merge_edges(model: MinSum) -> MinSum:
    """Return a merged model, in which each choice has the cost and memory that it has in `model`.

    A merged model has at most one edge between two nodes, from the lower to the higher index, and
    no edge from a node to itself. Unchanged arrays stay the same objects, and equal changes are
    computed once.
    """
    once = ResultCache()
    costs = list(model.costs)
    memory = list(model.memory or ())
    if (
        any(edge.memory is not None and edge.source == edge.target for edge in model.edges)
        and not memory
    ):
        memory = [np.zeros(len(vector), np.int64) for vector in costs]
    pairs: dict[tuple[int, int], Edge] = {}
    for edge in model.edges:
        low, high = sorted((edge.source, edge.target))
        if low == high:
            costs[low] = costs[low] + np.diagonal(edge.costs)
            if edge.memory is not None:
                memory[low] = memory[low] + np.diagonal(edge.memory)
            continue
        if edge.source != low:
            edge = replace(edge.map_arrays(once, np.transpose), source=low, target=high)
        if known := pairs.get((low, high)):
            memories = [each for each in (known.memory, edge.memory) if each is not None]
            both = once(np.add, *memories) if len(memories) == 2 else next(iter(memories), None)
            edge = Edge(low, high, once(np.add, known.costs, edge.costs), both)
        pairs[low, high] = edge
    return MinSum(tuple(costs), tuple(pairs.values()), tuple(memory) or None)


def restrict(model: MinSum, kept: KeptConfigurations) -> MinSum:
    """Return the model with only the configurations `kept` of each node. Arrays that are one object
    in `model` and are restricted equally are one object in the result.
    """
    once = ResultCache()
    shared: dict[bytes, Array] = {}
    indices = [
        None if len(keep) == len(costs) else shared.setdefault(keep.tobytes(), keep)
        for keep, costs in zip(kept, model.costs, strict=True)
    ]

    def restricted_vectors(arrays: Sequence[Array]) -> tuple[Array, ...]:
        """Return the vector of each node, restricted to the node's kept configurations."""
        pairs = zip(arrays, indices, strict=True)
        return tuple(array if keep is None else once(np.take, array, keep) for array, keep in pairs)

    def restricted_matrix(array: Array, rows: Array | None, columns: Array | None) -> Array:
        """Return these rows and columns of a matrix; None means all."""
        found = array if rows is None else array.take(rows, 0)
        return found if columns is None else found.take(columns, 1)

    edges = tuple(
        edge.map_arrays(once, restricted_matrix, indices[edge.source], indices[edge.target])
        for edge in model.edges
    )
    return MinSum(
        restricted_vectors(model.costs),
        edges,
        None if model.memory is None else restricted_vectors(model.memory),
    )


def absorb_fixed_nodes(model: MinSum) -> MinSum:
    """Return the model without the edges of nodes that have a single configuration. The costs and
    memory of each of these edges are added to those of the node at its other end. The model must be
    a result of `merge_edges` (at most one edge between two nodes).
    """
    once = ResultCache()
    costs = list(model.costs)
    memory = None if model.memory is None else list(model.memory)
    kept: list[Edge] = []

    def add_flat(vector: Array, array: Array) -> Array:
        total: Array = vector + array.reshape(-1)
        return total

    for edge in model.edges:
        if 1 not in edge.costs.shape:
            kept.append(edge)
            continue
        node = edge.source if edge.costs.shape[1] == 1 else edge.target
        costs[node] = once(add_flat, costs[node], edge.costs)
        if edge.memory is not None:
            memory = memory or [np.zeros(len(vector), np.int64) for vector in model.costs]
            memory[node] = once(add_flat, memory[node], edge.memory)
    return MinSum(tuple(costs), tuple(kept), None if memory is None else tuple(memory))


def add_memory_cost(model: MinSum, rate: float) -> MinSum:
    """Return the model whose costs are those of `model` plus `rate` times the bytes of memory.
    `rate` is the Lagrange multiplier of a memory limit, in cost per byte.
    """
    return _with_costs(
        model, lambda costs, memory: costs if memory is None else costs + rate * memory
    )


def memory_as_cost(model: MinSum) -> MinSum:
    """Return the model whose cost is the memory of `model`. Forbidden configurations and pairs stay
    forbidden. Edges whose costs are all 0 are removed.
    """

    def memory_or_inf(costs: Array, memory: Array | None) -> Array:
        """Return the bytes of a node or edge, with inf at forbidden entries."""
        forbidden = np.isinf(costs)
        memory_bytes = np.zeros(costs.shape, np.int64) if memory is None else memory
        return np.where(forbidden, np.inf, memory_bytes) if forbidden.any() else memory_bytes

    found = _with_costs(model, memory_or_inf)
    return replace(found, edges=tuple(edge for edge in found.edges if edge.costs.any()))


def _with_costs(model: MinSum, function: Callable[[Array, Array | None], Array]) -> MinSum:
    """Return the model with the costs of each node and edge replaced by `function(costs, memory)`,
    computed once per pair of arrays.
    """
    once = ResultCache()
    return replace(
        model,
        costs=tuple(
            once(function, *each) for each in zip(model.costs, model.node_memory, strict=True)
        ),
        edges=tuple(
            replace(edge, costs=once(function, edge.costs, edge.memory)) for edge in model.edges
        ),
    )


@dataclass(frozen=True, slots=True)
class Assignment:
    """Result of a solver: a choice of one configuration per node, and a lower bound."""

    choice: tuple[int, ...]
    """Index of the configuration of each node."""
    cost: Number
    """Cost of the choice: an exact int if all costs are integers."""
    bound: Number
    """Lower bound of the cost of all choices within the memory limit or, without a memory limit, of
    all choices.
    """
    proven: bool
    """True if no choice within the memory limit costs less. If `fits` is False: True if no choice
    needs less memory.
    """
    memory: Number = 0
    """Bytes of the choice."""
    fits: bool = True
    """True if the memory is within the limit. If False, the choice has the smallest memory that was
    found.
    """

    @property
    def gap(self) -> float:
        """Maximum fraction of the cost by which the cost exceeds the minimum; 0 if the choice is
        proven optimal.
        """
        if self.proven or self.cost == self.bound:
            return 0.0
        return float(self.cost - self.bound) / abs(self.cost) if self.cost else float("inf")


def reported_bound(lower_bound: float, cost: Number, proven: bool) -> Number:
    """Return the lower bound to report for a choice with this cost: `cost` if it is proven optimal,
    otherwise `lower_bound`, rounded up if costs are integers.
    """
    if proven:
        return cost
    return (
        math.ceil(lower_bound)
        if isinstance(cost, int) and math.isfinite(lower_bound)
        else lower_bound
    )


def with_recomputed_cost(result: Assignment, model: MinSum) -> Assignment:
    """Return the result with the cost and memory that its choice has in `model`. The solver
    computed them in a transformed model, whose rounding errors differ.
    """
    cost = model.cost_of(result.choice)
    bound = cost if result.proven and result.fits else result.bound
    return replace(result, cost=cost, bound=bound, memory=model.memory_of(result.choice))


SUMS_PER_SECOND = 4e8
"""Work that a search may do per second of its time limit, in sums that are formed and compared.
Machines of 2024 do twice as many per second.
"""
CALL_OVERHEAD = 5000
"""Time to process an edge or a node, apart from its sums, as an equivalent number of sums."""
DEFAULT_WORK_S = 60.0
"""Work of a search without a time limit, in seconds of `SUMS_PER_SECOND`. The clock is not used
then.
"""


class Budget:
    """Remaining work of a search, in sums that are formed and compared. A limit on work instead of
    time makes results reproducible. If there is a time limit, the clock ends a search that a slow
    machine does not finish in time.

    seconds: time limit; None is no limit.
    patience: seconds of work without a time limit.
    """

    def __init__(self, seconds: float | None, patience: float = DEFAULT_WORK_S) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._work = (patience if seconds is None else seconds) * SUMS_PER_SECOND
        self._parent: Budget | None = None
        self._spent = 0.0

    @property
    def left(self) -> float:
        """Number of sums that may still be formed and compared; 0 if the time is over."""
        if self._end is not None and time.monotonic() > self._end:
            return 0.0
        return max(0.0, self._work - self._spent)

    def spend(self, sums: float) -> None:
        """Subtract `sums` sums of work from this budget and from the budgets of which it is a
        part.
        """
        self._spent += sums
        if self._parent is not None:
            self._parent.spend(sums)

    def fraction_of_rest(self, fraction: float) -> Budget:
        """Return a budget with the fraction `fraction` of the remaining work. Work that is
        subtracted from it is also subtracted from this budget.
        """
        budget = Budget(None)
        budget._end = self._end
        budget._work = fraction * self.left
        budget._parent = self
        return budget


BLOCK_ENTRIES = 1 << 15
"""Number of array entries that are processed at once, so that they fit in the cache of a CPU core.
"""


def index_blocks(length: int, width: int) -> Iterator[slice]:
    """Yield consecutive slices that together cover the indices from 0 to `length` - 1. If there are
    `width` array entries per index, a slice has at most `BLOCK_ENTRIES` entries, but at least one
    index.
    """
    step = max(1, BLOCK_ENTRIES // max(1, width))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def all_configurations(model: MinSum) -> list[Array]:
    """Return, for each node, the indices of all its configurations."""
    return [np.arange(size) for size in model.sizes]


def configurations_at(kept: KeptConfigurations, positions: Sequence[int]) -> tuple[int, ...]:
    """Return, for each node, the index of its configuration. `positions` contains the position of
    this index in the node's entry of `kept`.
    """
    return tuple(int(keep[x]) for keep, x in zip(kept, positions, strict=True))


class AllowedConfigurations:
    """The forbidden configurations and pairs of a model, from which the allowed configurations
    follow.
    """

    def __init__(self, model: MinSum) -> None:
        finite: dict[int, Array] = {}
        for array in (*model.costs, *(edge.costs for edge in model.edges)):
            if array.dtype.kind == "f" and id(array) not in finite:
                finite[id(array)] = np.isfinite(array)
        with_forbidden = {mark: allowed for mark, allowed in finite.items() if not allowed.all()}
        self._nodes = [
            (node, with_forbidden[id(costs)])
            for node, costs in enumerate(model.costs)
            if id(costs) in with_forbidden
        ]
        self._edges = [
            (edge.source, edge.target, with_forbidden[id(edge.costs)])
            for edge in model.edges
            if id(edge.costs) in with_forbidden
        ]

    def allowed_in(self, kept: KeptConfigurations) -> list[Array]:
        """Return the configurations of `kept` that are not forbidden and that have, for each
        neighbour, an allowed pair with one of the neighbour's remaining configurations (arc
        consistency). Raise InfeasibleError if a node has no configuration left.
        """
        remaining = list(kept)
        for node, finite in self._nodes:
            remaining[node] = remaining[node][finite[remaining[node]]]
        changed = True
        while changed:
            changed = False
            for source, target, finite in self._edges:
                allowed = finite[np.ix_(remaining[source], remaining[target])]
                for node, has_pair in (
                    (source, allowed.any(axis=1)),
                    (target, allowed.any(axis=0)),
                ):
                    if not has_pair.all():
                        remaining[node] = remaining[node][has_pair]
                        changed = True
        if not all(len(keep) for keep in remaining):
            raise all_forbidden_error()
        return remaining
