"""The search as a min-sum model: what each configuration of each node costs a step, and each pair of neighbours.

    tables = make_tables(problem, nodes, devices)
    answer = solve(tables.model)
    splits = tables.splits(answer.choice)

Variables of the model are the nodes, in order, then one for each value that several nodes read (see `hubs.py`). Equal
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
    NO_TERMS,
    Computing,
    Costs,
    NodeClass,
    Parameters,
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
    Changes,
    Collectives,
    Floats,
    ReshardTable,
    SharedValue,
    shared_parameter,
    shared_value,
)
from autopipe.passes.solvers.min_sum import Edge, MinSum


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """The model of a stage's nodes on a group of devices; variable i of it is `nodes[i]`, further ones are hubs."""

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
    problem: Problem, nodes: Sequence[int], devices: tuple[int, ...], terms: StageOptions = NO_TERMS
) -> Tables:
    """The model of `nodes` (ascending, all of them computed) on `devices`.

    Raises ConfigurationError where a device states no figure for a class of operators.
    """
    ground = stage_context(problem, nodes, devices, terms)
    kinds = node_classes(ground)
    changes = Changes(ReshardTable(problem.cluster, devices), Collectives(problem.cluster, devices))
    parameters = Parameters(problem, devices)
    builder = _Builder(ground, dict(zip(ground.nodes, kinds, strict=True)), changes, parameters)
    builder.add_nodes()
    for name in ground.readers:
        if ground.graph.parameter(name) is not None:
            builder.add_parameter(name)
        elif ground.graph.producer(name) in builder.places:
            builder.add_value(name)
    return builder.tables()


@dataclass(eq=False, slots=True)
class _Builder:
    """A model in the making; `shared` are arrays that equal nodes and edges have in common."""

    ground: StageContext
    kinds: dict[int, NodeClass]
    changes: Changes
    parameters: Parameters
    places: dict[int, int] = field(default_factory=dict)
    costs: list[Costs] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    shared: dict[Hashable, Any] = field(default_factory=dict)

    def add_nodes(self) -> None:
        """A variable for each node."""
        computing = Computing(self.ground.problem, self.ground.devices)
        for node, kind in self.kinds.items():
            self.places[node] = len(self.costs)
            self.costs.append(
                self._once(
                    ("node", id(kind)), partial(node_class_costs, kind, computing, self.parameters, self.changes)
                )
            )

    def add_parameter(self, name: str) -> None:
        """A variable for a parameter whose layout is not one node's choice."""
        ground = self.ground
        if not ground.is_shared_parameter(name):
            return
        shape = ground.graph.type_of(name).shape
        forms = [self.kinds[each.node].reads(each.position) for each in ground.readers[name]]
        hub = shared_parameter(forms, shape, only_whole=name in ground.terms.whole)
        held = self.parameters.holding(name, hub.layouts)
        costs = Costs(held.update_s + held.gradient_s, held.gradient_s, np.zeros(len(hub.layouts)), held.bytes)
        place = self._add_variable(costs)
        self._add_readers(place, name, hub)

    def add_value(self, name: str) -> None:
        """The edges of a computed value to its readers: one edge, or those of a variable between them."""
        ground, readers = self.ground, self.ground.readers[name]
        source = ground.graph.producer(name)
        assert source is not None, name
        position = ground.graph.nodes[source].outputs.index(name)
        size, given = ground.graph.type_of(name).bytes, name in ground.terms.given
        times = times_run(ground, name) * ground.problem.micro_batches
        ends = tuple((id(self.kinds[each.node]), each.position) for each in readers)
        key = ("value", id(self.kinds[source]), position, ends, size, given, times)
        left = self.kinds[source].leaves(position)
        wanted = [self.kinds[each.node].reads(each.position) for each in readers]
        if len(readers) == 1:
            change = self.changes.to_all if given else self.changes.to_reader
            (only,) = wanted
            matrix = self._once(key, lambda: change(left.layouts, only.layouts, size)[left.of][:, only.of] * times)
            self._add_edge(self.places[source], self.places[readers[0].node], matrix)
            return
        hub = self._once(key, lambda: shared_value(left, wanted, size, self.changes, given).times(times))
        place = self._add_variable(self._once(("free", len(hub.layouts)), partial(_free, len(hub.layouts))))
        self._add_edge(self.places[source], place, hub.from_source)
        self._add_readers(place, name, hub)

    def tables(self) -> Tables:
        """The collected tables."""
        seconds = tuple(each.seconds for each in self.costs)
        model = MinSum(seconds, tuple(self.edges), tuple(each.memory for each in self.costs))
        configurations = tuple(kind.configurations for kind in self.kinds.values())
        passing = (self._once(("passing", id(kind)), partial(passing_bytes, kind)) for kind in self.kinds.values())
        return Tables(
            nodes=self.ground.nodes,
            configurations=configurations,
            model=model,
            gradients=tuple(each.gradients for each in self.costs),
            backwards=tuple(each.backward for each in self.costs),
            passing=tuple(passing),
            kept_again=tuple(self._kept_again()),
        )

    def _kept_again(self) -> Iterator[Edge]:
        ground = self.ground
        micro_batches = 1 if ground.terms.recompute else ground.terms.in_flight
        for each in ground.kept_again:
            first, other = self.kinds[each.first], self.kinds[each.node]
            key = ("kept", id(first), each.by_first.dimensions, id(other), each.by_node.dimensions, each.by_node.bytes)
            memory = self._once(key, partial(more_bytes, first, each.by_first, other, each.by_node))
            if memory.any():
                nothing = self._once(("no seconds", memory.shape), partial(np.zeros, memory.shape))
                memory = self._once(("times", *key), partial(np.multiply, memory, micro_batches))
                yield Edge(self.places[each.first], self.places[each.node], nothing, memory)

    def _add_variable(self, costs: Costs) -> int:
        self.costs.append(costs)
        return len(self.costs) - 1

    def _add_readers(self, place: int, name: str, hub: SharedValue) -> None:
        for reader, matrix in zip(self.ground.readers[name], hub.to_readers, strict=True):
            self._add_edge(place, self.places[reader.node], matrix)

    def _add_edge(self, source: int, target: int, matrix: Floats) -> None:
        """An edge, if it costs anything."""
        if matrix.any():
            self.edges.append(Edge(source, target, matrix))

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]


def _free(count: int) -> Costs:
    """A variable of `count` choices that cost nothing by themselves."""
    nothing = np.zeros(count)
    return Costs(nothing, nothing, nothing, np.zeros(count, dtype=np.int64))
