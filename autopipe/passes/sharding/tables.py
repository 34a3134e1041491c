"""The search as a min-sum model: what each configuration of each node costs a step, and each pair of neighbours.

    tables = make_tables(problem, nodes, devices)
    answer = solve(tables.model)
    splits = tables.splits(answer.choice)

Variables of the model are the nodes, in order, then one for each value that several nodes read (`SharedValue`). Equal
nodes and equal pairs share their arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.problem import Problem
from autopipe.passes.sharding.configurations import Splits
from autopipe.passes.sharding.node_costs import (
    NO_OPTIONS,
    Costs,
    NodeClass,
    Prices,
    StageContext,
    StageOptions,
    more_bytes,
    node_class_costs,
    node_classes,
    passing_bytes,
    stage_context,
    times_run,
)
from autopipe.passes.sharding.reshard_tables import (
    Floats,
    ReshardTable,
    SharedValue,
    shared_parameter,
    shared_value,
)
from autopipe.passes.solvers.min_sum import Edge, MinSum


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """The model of a stage's nodes on a group of devices; variable i of it is `nodes[i]`, further ones are values."""

    nodes: tuple[int, ...]
    configurations: tuple[tuple[Splits, ...], ...]
    model: MinSum
    """Seconds of a step, and bytes on a device."""
    gradients: tuple[Floats, ...]
    """Of the model's costs, seconds to exchange gradients once a step."""
    backwards: tuple[Floats, ...]
    """Of the model's costs, seconds of one micro-batch's backward."""
    passing: tuple[NDArray[np.int64], ...]
    """For each node the bytes that come and go while it runs backward, which the model's memory leaves out."""

    kept_again: tuple[Edge, ...]
    """The bytes that a pair of nodes adds to the model's memory by keeping one value in different blocks."""

    def passing_at_most(self, most: int) -> Tables:
        """The same without configurations of nodes that need more than `most` bytes while they run.

        What is kept again counts, too: where memory does not matter, those edges would only be in the way.
        """
        known: dict[tuple[int, int], Floats] = {}
        costs = list(self.model.costs)
        for place, needs in enumerate(self.passing):
            key = id(costs[place]), id(needs)
            if key not in known:
                known[key] = np.where(needs > most, np.inf, costs[place])
            costs[place] = known[key]
        edges = (*self.model.edges, *self.kept_again)
        return replace(self, model=replace(self.model, costs=tuple(costs), edges=edges), kept_again=())

    def splits(self, choice: Sequence[int]) -> tuple[tuple[int, Splits], ...]:
        """The nodes that a choice splits, with their splits, as `Stage.splits` has them."""
        chosen = (each[number] for each, number in zip(self.configurations, choice, strict=False))
        return tuple((node, splits) for node, splits in zip(self.nodes, chosen, strict=True) if splits)


def make_tables(
    problem: Problem, nodes: Sequence[int], devices: tuple[int, ...], options: StageOptions = NO_OPTIONS
) -> Tables:
    """The model of `nodes` (ascending, all of them computed) on `devices`.

    Raises ConfigurationError where a device states no figure for a class of operators.
    """
    stage = stage_context(problem, nodes, devices, options)
    kinds = dict(zip(stage.nodes, node_classes(stage), strict=True))
    builder = _Builder(stage, kinds, ReshardTable(problem.cluster, devices), Prices(problem, devices))
    builder.add_nodes()
    for name in stage.readers:
        if stage.graph.parameter(name) is not None:
            if stage.is_shared_parameter(name):
                builder.add_parameter(name)
        elif stage.graph.producer(name) in builder.places:
            builder.add_value(name)
    return builder.tables()


@dataclass(eq=False, slots=True)
class _Builder:
    """A model in the making; `shared` are arrays that equal nodes and edges have in common."""

    stage: StageContext
    kinds: dict[int, NodeClass]
    reshard: ReshardTable
    prices: Prices
    places: dict[int, int] = field(default_factory=dict)
    costs: list[Costs] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    shared: dict[Hashable, Any] = field(default_factory=dict)

    def add_nodes(self) -> None:
        for node, kind in self.kinds.items():
            self.places[node] = len(self.costs)
            make = partial(node_class_costs, kind, self.prices, self.reshard)
            self.costs.append(self._once(("node", id(kind)), make))

    def add_parameter(self, name: str) -> None:
        """A variable for a parameter whose layout is not one node's choice."""
        shape = self.stage.graph.type_of(name).shape
        wanted = [self.kinds[each.node].reads(each.position) for each in self.stage.readers[name]]
        value = shared_parameter(wanted, shape, only_whole=name in self.stage.options.whole)
        held = self.prices.holding(name, value.layouts)
        backward = np.zeros(len(value.layouts))
        self._add_shared(name, value, Costs(held.update_s + held.gradient_s, held.gradient_s, backward, held.bytes))

    def add_value(self, name: str) -> None:
        """The edges of a computed value to its readers: one edge, or those of a variable between them."""
        stage, readers = self.stage, self.stage.readers[name]
        source = stage.graph.producer(name)
        assert source is not None, name
        position = stage.graph.nodes[source].outputs.index(name)
        size, given = stage.graph.type_of(name).bytes, name in stage.options.given
        times = times_run(stage, name) * stage.problem.micro_batches
        ends = tuple((id(self.kinds[each.node]), each.position) for each in readers)
        key = ("value", id(self.kinds[source]), position, ends, size, given, times)
        left = self.kinds[source].leaves(position)
        wanted = [self.kinds[each.node].reads(each.position) for each in readers]
        if len(readers) == 1:
            change = self.reshard.to_all if given else self.reshard.to_reader
            (only,) = wanted
            matrix = self._once(key, lambda: change(left.layouts, only.layouts, size)[left.of][:, only.of] * times)
            self._add_edge(self.places[source], self.places[readers[0].node], matrix)
            return
        value = self._once(key, lambda: shared_value(left, wanted, size, self.reshard, given).times(times))
        count = len(value.layouts)
        nothing = np.zeros(count)
        free = self._once(("free", count), lambda: Costs(nothing, nothing, nothing, np.zeros(count, dtype=np.int64)))
        self._add_edge(self.places[source], len(self.costs), value.from_source)
        self._add_shared(name, value, free)

    def tables(self) -> Tables:
        passing = (self._once(("passing", id(kind)), partial(passing_bytes, kind)) for kind in self.kinds.values())
        return Tables(
            nodes=self.stage.nodes,
            configurations=tuple(kind.configurations for kind in self.kinds.values()),
            model=MinSum(
                tuple(each.seconds for each in self.costs),
                tuple(self.edges),
                tuple(each.memory for each in self.costs),
            ),
            gradients=tuple(each.gradients for each in self.costs),
            backwards=tuple(each.backward for each in self.costs),
            passing=tuple(passing),
            kept_again=tuple(self._kept_again()),
        )

    def _kept_again(self) -> Iterator[Edge]:
        stage = self.stage
        micro_batches = 1 if stage.options.recompute else stage.options.in_flight
        for each in stage.kept_again:
            first, other = self.kinds[each.first], self.kinds[each.node]
            key = ("kept", id(first), each.by_first.dimensions, id(other), each.by_node.dimensions, each.by_node.bytes)
            memory = self._once(key, partial(more_bytes, first, each.by_first, other, each.by_node))
            if memory.any():
                nothing = self._once(("no seconds", memory.shape), partial(np.zeros, memory.shape))
                memory = self._once(("times", *key), partial(np.multiply, memory, micro_batches))
                yield Edge(self.places[each.first], self.places[each.node], nothing, memory)

    def _add_shared(self, name: str, value: SharedValue, costs: Costs) -> None:
        place = len(self.costs)
        self.costs.append(costs)
        for reader, matrix in zip(self.stage.readers[name], value.to_readers, strict=True):
            self._add_edge(place, self.places[reader.node], matrix)

    def _add_edge(self, source: int, target: int, matrix: Floats) -> None:
        if matrix.any():
            self.edges.append(Edge(source, target, matrix))

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]
