"""Pairwise min-sum models (nodes that choose a configuration each, and edges on which two choices
cost something), models made from models, the answer of a solver with its proof, and the budget of a
search.
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
"""Of int64 or float64. Float64 holds whole numbers below 2^53 exactly, and inf for what is
forbidden.
"""
Number: TypeAlias = int | float
Kept: TypeAlias = Sequence[Array]
"""Of every node: ascending indices of configurations."""
_Made = TypeVar("_Made")


class Once:
    """Results of functions of arrays; where layers repeat, equal ones are formed once and stay one
    object. An argument is known by `mark`: which object it is, or where it lies. All are held, so
    that their marks stay theirs.
    """

    def __init__(self, mark: Callable[[Any], Hashable] = id) -> None:
        self._mark = mark
        self._known: dict[Hashable, tuple[tuple[Any, ...], Any]] = {}

    def key(self, form: Callable[..., object], *arguments: object) -> Hashable:
        return form, *map(self._mark, arguments)

    def knows(self, form: Callable[..., object], *arguments: object) -> bool:
        return self.key(form, *arguments) in self._known

    def __call__(self, form: Callable[..., _Made], *arguments: object) -> _Made:
        key = self.key(form, *arguments)
        if key not in self._known:
            self._known[key] = arguments, form(*arguments)
        made: _Made = self._known[key][1]
        return made


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """Joint cost of two nodes' choices."""

    source: int
    target: int
    costs: Array
    """[configurations of source, configurations of target]"""
    memory: Array | None = None
    """Bytes, of the same shape, not negative; None is none."""

    @property
    def reversed(self) -> Edge:
        return Edge(
            self.target, self.source, self.costs.T, None if self.memory is None else self.memory.T
        )

    def formed(self, once: Once, form: Callable[..., Array], *arguments: object) -> Edge:
        """The same with what `form` makes of each of its arrays and these arguments."""
        memory = None if self.memory is None else once(form, self.memory, *arguments)
        return replace(self, costs=once(form, self.costs, *arguments), memory=memory)


@dataclass(frozen=True, slots=True, eq=False)
class MinSum:
    """Choose a configuration for every node so that the sum over nodes and edges is least. Arrays
    are only read. Where layers repeat, give the same array object to each: equal work is then done
    once. Several edges between two nodes add up, an edge from a node to itself counts its diagonal.
    """

    costs: tuple[Array, ...]
    """A vector for every node: what each of its configurations costs."""
    edges: tuple[Edge, ...] = ()
    memory: tuple[Array, ...] | None = None
    """A vector for every node: bytes of each of its configurations, not negative; None is none
    anywhere.
    """

    def __post_init__(self) -> None:
        """Raises AutopipeError where shapes do not belong together or a node has no
        configuration.
        """
        for node, costs in enumerate(self.costs):
            if costs.ndim != 1 or not len(costs):
                raise AutopipeError(
                    f"min-sum: node {node} needs a vector of costs, it has shape {costs.shape}"
                )
        if self.memory is not None and [a.shape for a in self.memory] != [
            a.shape for a in self.costs
        ]:
            raise AutopipeError(
                "min-sum: memory needs one vector for every node, each as long as the node's costs"
            )
        for edge in self.edges:
            shape = (len(self.costs[edge.source]), len(self.costs[edge.target]))
            for array in (edge.costs, edge.memory):
                if array is not None and array.shape != shape:
                    raise AutopipeError(
                        f"min-sum: edge {edge.source}-{edge.target} needs a matrix of shape "
                        f"{shape}, not {array.shape}"
                    )

    @property
    def node_memory(self) -> tuple[Array | None, ...]:
        """`memory`, None for every node where there is none."""
        return self.memory or (None,) * len(self.costs)

    @property
    def sizes(self) -> list[int]:
        return [len(costs) for costs in self.costs]

    def cost_of(self, choice: Sequence[int]) -> Number:
        """Cost of one configuration for every node: an int, exactly, where all costs are
        integers.
        """
        parts = [costs[x] for costs, x in zip(self.costs, choice, strict=True)]
        return _total(
            parts + [edge.costs[choice[edge.source], choice[edge.target]] for edge in self.edges]
        )

    def memory_of(self, choice: Sequence[int]) -> Number:
        known = ((edge, edge.memory) for edge in self.edges)
        parts = [
            memory[choice[edge.source], choice[edge.target]]
            for edge, memory in known
            if memory is not None
        ]
        if self.memory is not None:
            parts += [memory[x] for memory, x in zip(self.memory, choice, strict=True)]
        return _total(parts)

    def least_memory(self) -> list[Number]:
        return [0 if memory is None else memory.min().item() for memory in self.node_memory]

    def cells(self, sizes: Sequence[int]) -> int:
        """Pairs of configurations on all edges when the nodes have these numbers of them."""
        return sum(sizes[edge.source] * sizes[edge.target] for edge in self.edges)


def _total(parts: list[Any]) -> Number:
    if all(isinstance(part, np.integer) for part in parts):
        return sum(int(part) for part in parts)
    return math.fsum(float(part) for part in parts)


def no_choice() -> InfeasibleError:
    return InfeasibleError(
        "every choice of configurations has a forbidden one, or a forbidden pair"
    )


def merged(model: MinSum) -> MinSum:
    """The same sums with at most one edge between two nodes, from the lower to the higher, and none
    from one to itself. Arrays that need no change stay the objects they are; what is changed
    equally is changed once.
    """
    once = Once()
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
            edge = replace(edge.formed(once, np.transpose), source=low, target=high)
        if known := pairs.get((low, high)):
            more = [each for each in (known.memory, edge.memory) if each is not None]
            both = once(np.add, *more) if len(more) == 2 else next(iter(more), None)
            edge = Edge(low, high, once(np.add, known.costs, edge.costs), both)
        pairs[low, high] = edge
    return MinSum(tuple(costs), tuple(pairs.values()), tuple(memory) or None)


def restricted(model: MinSum, kept: Kept) -> MinSum:
    """The model of what is kept; arrays that were shared and are restricted equally are shared
    again.
    """
    once = Once()
    shared: dict[bytes, Array] = {}
    some = [
        None if len(keep) == len(costs) else shared.setdefault(keep.tobytes(), keep)
        for keep, costs in zip(kept, model.costs, strict=True)
    ]

    def vectors(arrays: Sequence[Array]) -> tuple[Array, ...]:
        pairs = zip(arrays, some, strict=True)
        return tuple(array if keep is None else once(np.take, array, keep) for array, keep in pairs)

    def part(array: Array, rows: Array | None, columns: Array | None) -> Array:
        found = array if rows is None else array.take(rows, 0)
        return found if columns is None else found.take(columns, 1)

    edges = tuple(
        edge.formed(once, part, some[edge.source], some[edge.target]) for edge in model.edges
    )
    return MinSum(
        vectors(model.costs), edges, None if model.memory is None else vectors(model.memory)
    )


def conditioned(model: MinSum) -> MinSum:
    """A merged model whose nodes of one configuration have no edges: the others bear what those
    cost.
    """
    once = Once()
    costs = list(model.costs)
    memory = None if model.memory is None else list(model.memory)
    kept: list[Edge] = []

    def bear(vector: Array, array: Array) -> Array:
        total: Array = vector + array.reshape(-1)
        return total

    for edge in model.edges:
        if 1 not in edge.costs.shape:
            kept.append(edge)
            continue
        node = edge.source if edge.costs.shape[1] == 1 else edge.target
        costs[node] = once(bear, costs[node], edge.costs)
        if edge.memory is not None:
            memory = memory or [np.zeros(len(vector), np.int64) for vector in model.costs]
            memory[node] = once(bear, memory[node], edge.memory)
    return MinSum(tuple(costs), tuple(kept), None if memory is None else tuple(memory))


def priced(model: MinSum, rate: float) -> MinSum:
    """The model in which every byte costs `rate` on top (Lagrangian relaxation of a memory
    limit).
    """
    return _with_costs(
        model, lambda costs, memory: costs if memory is None else costs + rate * memory
    )


def memory_alone(model: MinSum) -> MinSum:
    """The model whose cost is the memory; what is forbidden stays so. Edges without a say are left
    out.
    """

    def needs(costs: Array, memory: Array | None) -> Array:
        forbidden = np.isinf(costs)
        bytes_ = np.zeros(costs.shape, np.int64) if memory is None else memory
        return np.where(forbidden, np.inf, bytes_) if forbidden.any() else bytes_

    found = _with_costs(model, needs)
    return replace(found, edges=tuple(edge for edge in found.edges if edge.costs.any()))


def _with_costs(model: MinSum, form: Callable[[Array, Array | None], Array]) -> MinSum:
    """The model whose costs are made of the costs and the memory of each node and edge."""
    once = Once()
    return replace(
        model,
        costs=tuple(once(form, *each) for each in zip(model.costs, model.node_memory, strict=True)),
        edges=tuple(
            replace(edge, costs=once(form, edge.costs, edge.memory)) for edge in model.edges
        ),
    )


@dataclass(frozen=True, slots=True)
class Assignment:
    """A choice for every node, and how far from the best it can be."""

    choice: tuple[int, ...]
    cost: Number
    """An int, exactly, where all costs are integers."""
    bound: Number
    """No choice (within the memory limit, if there is one) costs less."""
    proven: bool
    """Nothing is better: no choice that fits costs less; where `fits` is false, no choice needs
    less memory.
    """
    memory: Number = 0
    fits: bool = True
    """True if the memory is within the limit. If not, the choice is the one of least memory that
    was found.
    """

    @property
    def gap(self) -> float:
        """By how much the cost may exceed the best, as a share of the cost; 0 where it is proven to
        be the best.
        """
        if self.proven or self.cost == self.bound:
            return 0.0
        return float(self.cost - self.bound) / abs(self.cost) if self.cost else float("inf")


def bound_of(least: float, cost: Number, proven: bool) -> Number:
    """Lower bound to report for a choice of that cost when nothing costs less than `least`, but for
    rounding.
    """
    if proven:
        return cost
    return math.ceil(least) if isinstance(cost, int) and math.isfinite(least) else least


def counted(answer: Assignment, model: MinSum) -> Assignment:
    """The answer with cost and memory of its choice in the model as it was given, which may round
    them otherwise.
    """
    cost = model.cost_of(answer.choice)
    bound = cost if answer.proven and answer.fits else answer.bound
    return replace(answer, cost=cost, bound=bound, memory=model.memory_of(answer.choice))


PER_SECOND = 4e8
"""Sums compared in a second of a time limit; machines of 2024 do twice as many."""
CALLS = 5000
"""Sums that could be compared in the time that it takes to begin with an edge or a node."""
PATIENCE_S = 60.0
"""Of work, where no time limit is given; the clock is not looked at then."""


class Budget:
    """Rest of a time limit: sums to be compared, so that equal requests give equal answers. The
    clock only ends what a slow machine cannot do in time.
    """

    def __init__(self, seconds: float | None, patience: float = PATIENCE_S) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._work = (patience if seconds is None else seconds) * PER_SECOND
        self._whole: Budget | None = None
        self._spent = 0.0

    @property
    def left(self) -> float:
        """Sums that may still be compared; 0 when the time is over."""
        if self._end is not None and time.monotonic() > self._end:
            return 0.0
        return max(0.0, self._work - self._spent)

    def spend(self, sums: float) -> None:
        self._spent += sums
        if self._whole is not None:
            self._whole.spend(sums)

    def share(self, part: float) -> Budget:
        """A part of what is left, spent from this as well."""
        budget = Budget(None)
        budget._end = self._end
        budget._work = part * self.left
        budget._whole = self
        return budget


ENTRIES = 1 << 15


def blocks(length: int, width: int) -> Iterator[slice]:
    """Ranges of indices, each of as many as have ENTRIES entries (a core's cache) when each index
    has `width`.
    """
    step = max(1, ENTRIES // max(1, width))
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def everything(model: MinSum) -> list[Array]:
    """All configurations of every node."""
    return [np.arange(size) for size in model.sizes]


def chosen(kept: Kept, positions: Sequence[int]) -> tuple[int, ...]:
    """The configurations at these positions among what is kept."""
    return tuple(int(keep[x]) for keep, x in zip(kept, positions, strict=True))


class Support:
    """Which pairs of configurations are allowed in a model."""

    def __init__(self, model: MinSum) -> None:
        finite: dict[int, Array] = {}
        for array in (*model.costs, *(edge.costs for edge in model.edges)):
            if array.dtype.kind == "f" and id(array) not in finite:
                finite[id(array)] = np.isfinite(array)
        some = {mark: allowed for mark, allowed in finite.items() if not allowed.all()}
        self._nodes = [
            (node, some[id(costs)]) for node, costs in enumerate(model.costs) if id(costs) in some
        ]
        self._edges = [
            (edge.source, edge.target, some[id(edge.costs)])
            for edge in model.edges
            if id(edge.costs) in some
        ]

    def of(self, kept: Kept) -> list[Array]:
        """Of what is kept: configurations that are not forbidden and have one such beside them at
        every neighbour. Raises InfeasibleError where a node has none left.
        """
        left = list(kept)
        for node, finite in self._nodes:
            left[node] = left[node][finite[left[node]]]
        changed = True
        while changed:
            changed = False
            for source, target, finite in self._edges:
                allowed = finite[np.ix_(left[source], left[target])]
                for node, beside in ((source, allowed.any(axis=1)), (target, allowed.any(axis=0))):
                    if not beside.all():
                        left[node] = left[node][beside]
                        changed = True
        if not all(len(keep) for keep in left):
            raise no_choice()
        return left
