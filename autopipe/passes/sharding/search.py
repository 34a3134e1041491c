"""Splits inside stages whose nodes, devices and micro-batches are settled, as a min-sum model
(PaSE, equation 1):

    tables = make_tables(problem, nodes, devices)
    answer = solve(tables.model)
    splits = tables.splits(answer.choice)

Variables of the model are the nodes, in order, then one for each value that several nodes read
(`SharedValue`). Equal nodes and equal pairs share their arrays. Each stage is searched by itself;
its memory is counted as lowering will use it, and bounds on the bytes that come and go are
tightened until the answer fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, SplitProof, recomputed_nodes
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.analysis.stage_nodes import assign_nodes
from autopipe.passes.cost.measured import resized
from autopipe.passes.cost.memory_check import device_memory, in_flight, out_of_memory
from autopipe.passes.cost.stages import StageCost, stage_costs, step_seconds
from autopipe.passes.sharding.configurations import Integers, Splits
from autopipe.passes.sharding.node_costs import (
    NO_OPTIONS,
    Costs,
    NodeClass,
    StageContext,
    StageOptions,
    kept_bytes,
    node_classes,
)
from autopipe.passes.sharding.reshard_tables import (
    Floats,
    SharedValue,
    shared_parameter,
    shared_value,
)
from autopipe.passes.solvers.min_sum import Assignment, Edge, MinSum, solve
from autopipe.passes.solvers.min_sum.model import Once


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """The model of a stage's nodes on a group of devices; variable i of it is `nodes[i]`, further
    ones are values.
    """

    nodes: tuple[int, ...]
    configurations: tuple[tuple[Splits, ...], ...]
    model: MinSum
    """Seconds of a step, and bytes on a device."""
    gradients: tuple[Floats, ...]
    """Of the model's costs, seconds to exchange gradients once a step."""
    backwards: tuple[Floats, ...]
    """Of the model's costs, seconds of one micro-batch's backward."""
    passing: tuple[Integers, ...]
    """For each node the bytes that come and go while it runs backward, which the model's memory
    leaves out.
    """
    kept_again: tuple[Edge, ...]
    """The bytes that a pair of nodes adds to the model's memory by keeping one value in different
    blocks.
    """

    def passing_at_most(self, most: int) -> Tables:
        """The same without configurations of nodes that need more than `most` bytes while they run,
        and with what is kept again: where memory does not matter, those edges would only be in the
        way.
        """
        once = Once()

        def bounded(costs: Floats, needs: Integers) -> Floats:
            return np.where(needs > most, np.inf, costs)

        costs = [once(bounded, *each) for each in zip(self.model.costs, self.passing, strict=False)]
        costs += self.model.costs[len(costs) :]
        edges = (*self.model.edges, *self.kept_again)
        return replace(
            self, model=replace(self.model, costs=tuple(costs), edges=edges), kept_again=()
        )

    def splits(self, choice: Sequence[int]) -> tuple[tuple[int, Splits], ...]:
        """The nodes that a choice splits, with their splits, as `Stage.splits` has them."""
        chosen = (each[number] for each, number in zip(self.configurations, choice, strict=False))
        return tuple(
            (node, splits) for node, splits in zip(self.nodes, chosen, strict=True) if splits
        )


End = tuple[NodeClass, int]
"""A node's class, and the position of one of its operands or results."""


def make_tables(
    problem: Problem,
    nodes: Sequence[int],
    devices: tuple[int, ...],
    options: StageOptions = NO_OPTIONS,
) -> Tables:
    """The model of `nodes` (ascending, all of them computed) on `devices`. Equal nodes and equal
    edges have one array. Raises ConfigurationError where a device states no figure for a class of
    operators.
    """
    stage = StageContext(problem, nodes, devices, options)
    graph = stage.graph
    kinds = node_classes(stage)
    places = {node: place for place, node in enumerate(kinds)}
    costs_of = cache(NodeClass.costs)
    passing_of = cache(NodeClass.passing_bytes)
    costs = [costs_of(kind) for kind in kinds.values()]
    edges: list[Edge] = []

    @cache
    def changes(source: End, reader: End, size: int, given: bool, times: int) -> Floats:
        left = source[0].leaves(source[1])
        wanted = reader[0].reads(reader[1])
        change = stage.reshard.to_all if given else stage.reshard.to_reader
        return (
            change(left.layouts, wanted.layouts, size)[left.layout_of][:, wanted.layout_of] * times
        )

    @cache
    def shared(
        source: End, readers: tuple[End, ...], size: int, given: bool, times: int
    ) -> SharedValue:
        wanted = [kind.reads(position) for kind, position in readers]
        return shared_value(source[0].leaves(source[1]), wanted, size, stage.reshard, given, times)

    @cache
    def free(layouts: int) -> Costs:
        nothing = np.zeros(layouts)
        return Costs(nothing, nothing, nothing, np.zeros(layouts, dtype=np.int64))

    def connect(source: int, target: int, matrix: Floats) -> None:
        if matrix.any():
            edges.append(Edge(source, target, matrix))

    for name, uses in stage.readers.items():
        source = graph.producer(name)
        readers = tuple((kinds[node], position) for node, position in uses)
        if graph.parameter(name) is not None and stage.is_shared_parameter(name):
            wanted = [kind.reads(position) for kind, position in readers]
            value = shared_parameter(
                wanted, graph.type_of(name).shape, only_whole=name in options.whole
            )
            gradient_s, update_s, held = stage.holding(name, value.layouts)
            costs.append(
                Costs(update_s + gradient_s, gradient_s, np.zeros(len(value.layouts)), held)
            )
        elif source is not None and source in kinds:
            left = kinds[source], graph.nodes[source].outputs.index(name)
            times = stage.times_run(name) * problem.micro_batches
            size = graph.type_of(name).elements * stage.widths[name]
            given = name in options.given
            if len(readers) == 1:
                connect(
                    places[source],
                    places[uses[0][0]],
                    changes(left, readers[0], size, given, times),
                )
                continue
            value = shared(left, readers, size, given, times)
            connect(places[source], len(costs), value.from_source)
            costs.append(free(len(value.layouts)))
        else:
            continue
        for (reader, _), matrix in zip(uses, value.to_readers, strict=True):
            connect(len(costs) - 1, places[reader], matrix)
    seconds = tuple(each.seconds for each in costs)
    memory = tuple(each.memory for each in costs)
    return Tables(
        nodes=stage.nodes,
        configurations=tuple(kind.configurations for kind in kinds.values()),
        model=MinSum(seconds, tuple(edges), memory),
        gradients=tuple(each.gradients for each in costs),
        backwards=tuple(each.backward for each in costs),
        passing=tuple(map(passing_of, kinds.values())),
        kept_again=_kept_again(stage, kinds, places),
    )


def _kept_again(
    stage: StageContext, kinds: dict[int, NodeClass], places: dict[int, int]
) -> tuple[Edge, ...]:
    """By how much the block that a node keeps exceeds that of the first node that keeps the same
    value.
    """
    found: list[Edge] = []
    known: dict[Hashable, Integers] = {}
    zeros: Callable[[tuple[int, ...]], Floats] = cache(np.zeros)
    for first, by_first, node, by_node in stage.kept_again:
        one = kinds[first]
        other = kinds[node]
        key = one, by_first.dimensions, other, by_node.dimensions, by_node.bytes
        if key not in known:
            own = kept_bytes([by_node], other.mesh_positions)
            before = kept_bytes([by_first], one.mesh_positions)
            known[key] = np.maximum(own[None, :] - before[:, None], 0) * stage.kept_micro_batches
        if known[key].any():
            found.append(Edge(places[first], places[node], zeros(known[key].shape), known[key]))
    return tuple(found)


Solver = Callable[[Tables, float | None], Assignment]
"""Answers tables, within a number of bytes where one is given."""

_BOUNDS = 8
"""The most bounds on what comes and goes that are tried where memory is short."""
_APART = 0.01
"""Of a device's memory: by how much bounds differ at least, to be worth a search each."""
_ROUNDS = 3
"""How often the limit is corrected by what an answer really takes beyond what the model says."""


@dataclass(frozen=True, slots=True)
class FittedPlacement:
    """A placement with the splits of the stage in question, what is proven of them, and what
    lowering makes of them.
    """

    placement: Placement
    proof: SplitProof
    cost: StageCost
    excess: int
    """By how much the fullest of the stage's devices, `worst`, is over its limit."""
    worst: int


class SplitProblem:
    """Nodes and options of each stage of a placement, for the search for its splits; those of
    `fixed` nodes stay.
    """

    def __init__(self, problem: Problem, placement: Placement, fixed: Mapping[int, Splits]) -> None:
        graph = problem.graph
        self.problem = problem
        self.plans = assign_nodes(graph, placement, problem.wanted)
        computed = [{node for node, _ in plan.nodes} for plan in self.plans]
        whole: Splits = ()
        # What several stages compute for themselves is cheap; splits of one group mean nothing on
        # another.
        shared = {
            node: (whole,)
            for node in recomputed_nodes(graph)
            if sum(node in each for each in computed) > 1
        }
        read = [
            {n for node in each for n in graph.nodes[node].inputs if graph.parameter(n)}
            for each in computed
        ]
        torn = frozenset(
            name for names in read for name in names if sum(name in each for each in read) > 1
        )
        allowed: dict[int, tuple[Splits, ...]] = {
            **shared,
            **{node: (splits,) for node, splits in fixed.items()},
        }
        self.options = tuple(
            StageOptions(allowed, frozenset(plan.outputs), torn, kept, stage.recompute)
            for stage, plan, kept in zip(
                placement.stages, self.plans, in_flight(problem, placement), strict=True
            )
        )

    def split(
        self,
        placement: Placement,
        index: int,
        solver: Solver,
        overlap: bool = False,
        own: Problem | None = None,
    ) -> FittedPlacement:
        """`placement` with stage `index` split as `solver` finds it best, or by its samples where
        that is faster. `overlap` says whether `solver` counts the exchange of gradients as hidden
        by the last micro-batch's backward; `own` is the problem on the stage's micro-batches, where
        that is known. Raises InfeasibleError, with the least excess, where nothing fits into
        memory, and what `solver` raises.
        """
        stage = placement.stages[index]
        options = self.options[index]
        own = own or resized(self.problem, stage.micro_batch_size)
        tables = make_tables(
            own, [node for node, _ in self.plans[index].nodes], stage.devices, options
        )
        count = self.problem.batch_size // stage.micro_batch_size

        def seconds(fitted: FittedPlacement) -> float:
            return step_seconds(fitted.cost, count, overlap)

        trials = self._trials(placement, index, tables, solver)
        fitting = [each for each in trials if each.excess <= 0]
        if not fitting:
            least = min(trials, key=lambda each: each.excess)
            need = self.problem.memory_of(least.worst) + least.excess
            raise out_of_memory(
                self.problem, [index], len(placement.stages), least.worst, need, least=True
            )
        best = min(fitting, key=seconds)
        # Under a bound on what comes and goes an answer is proven for that bound alone.
        bound = trials[0].proof.lower_bound
        best = replace(
            best, proof=SplitProof(best.proof.cost, bound, best is trials[0] and best.proof.optimal)
        )
        if any(node in options.allowed for node in stage.nodes):
            return best
        # The model counts no latency of gradients' exchange and more than one way of some values,
        # so that data parallelism, which is among its choices, can be better than it says.
        other = self._by_samples(own.graph, best, index)
        if other is None or other.excess > 0 or seconds(other) >= seconds(best):
            return best
        return replace(
            other, proof=SplitProof(max(seconds(other), bound), bound, seconds(other) <= bound)
        )

    def _trials(
        self, placement: Placement, index: int, tables: Tables, solver: Solver
    ) -> list[FittedPlacement]:
        """`placement` with the best splits of stage `index`, and where its devices do not hold
        those, with others. What comes and goes is the most that one node needs while it runs. So
        several bounds on that are tried: under each, configurations that need more are forbidden,
        and what remains is for the sum of what stays.
        """

        def measured(answer: Assignment) -> FittedPlacement:
            proof = SplitProof(float(answer.cost), float(answer.bound), answer.proven)
            return self._with_splits(placement, index, tables.splits(answer.choice), proof)

        fastest = solver(tables, None)
        trials = [measured(fastest)]
        room = min(map(self.problem.memory_of, placement.stages[index].devices))
        before = room
        for most in _bounds_on_passing(tables, fastest, room) if trials[0].excess > 0 else ():
            if trials[-1].excess <= 0 and before - most < _APART * room:
                break
            before = most
            # What the model does not know: values that several nodes keep in different blocks,
            # buffers of messages.
            unknown = 0
            bounded = tables.passing_at_most(most)
            for _ in range(_ROUNDS):
                try:
                    answer = solver(bounded, room - most - unknown)
                except InfeasibleError:
                    break
                trials.append(measured(answer))
                if trials[-1].excess <= 0 or not answer.fits:
                    break
                unknown += trials[-1].excess
        return trials

    def _by_samples(
        self, graph: Graph, fitted: FittedPlacement, index: int
    ) -> FittedPlacement | None:
        """A stage with nothing but its samples shared; `graph` is the model on its
        micro-batches.
        """
        stage = fitted.placement.stages[index]
        samples = sample_axes(graph)
        if any(not samples.divides(node, len(stage.devices)) for node in stage.nodes):
            return None
        splits = samples.splits(stage.nodes, len(stage.devices))
        return self._with_splits(fitted.placement, index, splits, fitted.proof)

    def _with_splits(
        self,
        placement: Placement,
        index: int,
        splits: tuple[tuple[int, Splits], ...],
        proof: SplitProof,
    ) -> FittedPlacement:
        """The placement with these splits of a stage, and what it takes whatever the model said."""
        stages = list(placement.stages)
        stages[index] = replace(stages[index], splits=splits)
        found = replace(placement, stages=tuple(stages))
        costs = stage_costs(self.problem, found)
        used = device_memory(self.problem, found, costs)
        over = (
            (used[device] - self.problem.memory_of(device), device)
            for device in stages[index].devices
        )
        return FittedPlacement(found, proof, costs[index], *max(over))


def _bounds_on_passing(tables: Tables, answer: Assignment, room: int) -> list[int]:
    """From what an answer needs down to what every choice does: all that some configuration needs,
    well apart.
    """
    least = max(int(each.min()) for each in tables.passing)
    most = max(
        int(each[number]) for each, number in zip(tables.passing, answer.choice, strict=False)
    )
    between = np.unique(np.concatenate(list({id(each): each for each in tables.passing}.values())))
    between = between[(between >= least) & (between <= most)]
    count = min(_BOUNDS, 2 + int((most - least) / (_APART * room)))
    chosen = np.unique(np.linspace(0, len(between) - 1, count).round().astype(int))
    found: list[int] = between[chosen][::-1].tolist()
    return found


def split_stages(
    problem: Problem,
    placement: Placement,
    fixed: Mapping[int, Splits],
    solver: Solver,
    overlap: bool = False,
) -> Placement:
    """`placement` with every stage split so, and what is proven of that: what all stages cost
    together. Raises InfeasibleError where memory does not hold any placement, with the least
    excess, and what `solver` raises.
    """
    inside = SplitProblem(problem, placement, fixed)
    proof = SplitProof(0.0, 0.0, optimal=True)
    for index in range(len(placement.stages)):
        best = inside.split(placement, index, solver, overlap)
        placement = best.placement
        own = best.proof
        proof = SplitProof(
            proof.cost + own.cost,
            proof.lower_bound + own.lower_bound,
            proof.optimal and own.optimal,
        )
    return replace(placement, proof=proof)


_PATIENCE_S = 2.0
"""Of work within a memory limit, where there is no time limit: several limits are tried, and for a
Llama of 80 layers on 64 devices five times the work finds steps shorter by a thousandth.
"""


class Exact:
    """Answers tables by a dual bound, pruning, and elimination of what is left; within memory where
    that is asked for. Of `time_limit` seconds, counted from now on, a search within memory takes
    half of what is left: others follow.
    """

    def __init__(self, time_limit: float | None) -> None:
        self._end = None if time_limit is None else time.monotonic() + time_limit

    def __call__(self, tables: Tables, limit: float | None) -> Assignment:
        return self.solved(tables.model, limit)

    def solved(self, model: MinSum, limit: float | None) -> Assignment:
        left = None if self._end is None else max(0.01, self._end - time.monotonic())
        if limit is None:
            return solve(model, None, left)
        return solve(model, limit, None if left is None else left / 2, _PATIENCE_S)
