"""Search for the splits inside stages whose nodes, devices and micro-batch sizes are fixed.

The search is the min-sum problem of PaSE (Elango, IPDPS 2021, equation 1): minimise the sum of node
costs t_l and of costs t_x of layout changes over all choices of one configuration per node. A
configuration is one way to split a node over the devices of its stage.

    tables = make_tables(problem, nodes, devices)
    assignment = solve(tables.model)
    splits = tables.splits(assignment.choice)

The variables of the model are the nodes, in order, and then one variable for each value that
several nodes read (`SharedValue`). Equal nodes and equal edges share their arrays.

Each stage is searched separately. The cost model then computes the memory of the placement with
these splits. If it exceeds the limit, the search is repeated with bounds on the temporary memory of
nodes (see `SplitProblem`).
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
from autopipe.passes.cost.measured import with_micro_batch_size
from autopipe.passes.cost.memory_check import (
    device_memory,
    micro_batches_in_flight,
    out_of_memory_error,
)
from autopipe.passes.cost.stages import StageCost, stage_costs, step_seconds
from autopipe.passes.sharding.configurations import Integers, Splits
from autopipe.passes.sharding.node_costs import (
    NO_OPTIONS,
    NodeClass,
    StageContext,
    StageOptions,
    VariableCosts,
    node_classes,
    saved_bytes_by_configuration,
)
from autopipe.passes.sharding.reshard_tables import (
    Floats,
    SharedValue,
    shared_parameter,
    shared_value,
)
from autopipe.passes.solvers.min_sum import Assignment, Edge, MinSum, solve
from autopipe.passes.solvers.min_sum.model import ResultCache


@dataclass(frozen=True, slots=True, eq=False)
class SplitTables:
    """The min-sum model of the splits of a stage's nodes on a group of devices. Variable i is the
    configuration of `nodes[i]`; the variables after the nodes are layouts of values that several
    nodes read.
    """

    nodes: tuple[int, ...]
    configurations: tuple[tuple[Splits, ...], ...]
    """For each node: its configurations, in the order of the choices of its variable."""
    model: MinSum
    """The model. Its costs are seconds per step, and its memory is bytes on a device."""
    gradients: tuple[Floats, ...]
    """For each variable and choice: the part of the model's cost in which gradients are
    all-reduced, in seconds per step.
    """
    backwards: tuple[Floats, ...]
    """For each variable and choice: the seconds of the backward of one micro-batch."""
    passing: tuple[Integers, ...]
    """For each node and configuration: the bytes of temporary memory while the node's backward
    runs. They are not part of the model's memory.
    """
    kept_again: tuple[Edge, ...]
    """For each pair of nodes that save shards of one tensor: the bytes that the second node saves
    beyond those of the first, per pair of configurations. They are not part of the model's memory.
    """

    def passing_at_most(self, most: int) -> SplitTables:
        """Return the tables for a search with limited memory. Configurations that need more than
        `most` bytes of temporary memory are forbidden: their cost is infinite.

        The edges of `kept_again`, with bytes of tensors that two nodes save, become part of the
        model. They are not part of it before, because they would slow down a search without a
        memory limit and not change its result.
        """
        once = ResultCache()

        def forbid_above_limit(costs: Floats, needs: Integers) -> Floats:
            """Return the costs with infinity for choices that need more than `most` bytes."""
            return np.where(needs > most, np.inf, costs)

        costs = [
            once(forbid_above_limit, *each)
            for each in zip(self.model.costs, self.passing, strict=False)
        ]
        costs += self.model.costs[len(costs) :]
        edges = (*self.model.edges, *self.kept_again)
        return replace(
            self, model=replace(self.model, costs=tuple(costs), edges=edges), kept_again=()
        )

    def splits(self, choice: Sequence[int]) -> tuple[tuple[int, Splits], ...]:
        """Return pairs (node, splits), as in `Stage.splits`, for a choice of all variables of the
        model. Nodes that are not split are omitted.
        """
        chosen = (each[number] for each, number in zip(self.configurations, choice, strict=False))
        return tuple(
            (node, splits) for node, splits in zip(self.nodes, chosen, strict=True) if splits
        )


End = tuple[NodeClass, int]
"""One end of an edge of the model: (class of equal nodes, position of the operand or result of the
node to which the edge belongs).
"""


def make_split_tables(
    problem: Problem,
    nodes: Sequence[int],
    devices: tuple[int, ...],
    options: StageOptions = NO_OPTIONS,
) -> SplitTables:
    """Return the model of the splits of a stage that computes `nodes` on `devices`.

    `nodes` are in ascending order. Equal nodes share one array of costs, and so do equal edges.
    Raise ConfigurationError if a device type lacks a rate for a class of operators.
    """
    stage = StageContext(problem, nodes, devices, options)
    graph = stage.graph
    classes = node_classes(stage)
    variable_of = {node: variable for variable, node in enumerate(classes)}
    costs_of = cache(NodeClass.costs)
    passing_of = cache(NodeClass.temporary_bytes)
    costs = [costs_of(node_class) for node_class in classes.values()]
    edges: list[Edge] = []

    @cache
    def change_seconds(source: End, reader: End, size: int, given: bool, times: int) -> Floats:
        """Return the seconds per step of the layout changes of a value with one reader, of shape
        [configurations of the source, configurations of the reader].
        """
        produced = source[0].leaves(source[1])
        wanted = reader[0].reads(reader[1])
        change = stage.reshard.to_all if given else stage.reshard.to_reader
        return (
            change(produced.layouts, wanted.layouts, size)[produced.layout_of][:, wanted.layout_of]
            * times
        )

    @cache
    def shared_variable(
        source: End, readers: tuple[End, ...], size: int, given: bool, times: int
    ) -> SharedValue:
        """Return the variable of a value with several readers; equal values get one object."""
        wanted = [node_class.reads(position) for node_class, position in readers]
        return shared_value(source[0].leaves(source[1]), wanted, size, stage.reshard, given, times)

    @cache
    def zero_costs(layouts: int) -> VariableCosts:
        """Return costs of 0 for each of `layouts` choices."""
        zeros = np.zeros(layouts)
        return VariableCosts(zeros, zeros, zeros, np.zeros(layouts, dtype=np.int64))

    def connect(source: int, target: int, matrix: Floats) -> None:
        """Add an edge between two variables, unless all its costs are 0."""
        if matrix.any():
            edges.append(Edge(source, target, matrix))

    for name, uses in stage.readers.items():
        source = graph.producer(name)
        readers = tuple((classes[node], position) for node, position in uses)
        if graph.parameter(name) is not None and stage.is_shared_parameter(name):
            wanted = [node_class.reads(position) for node_class, position in readers]
            value = shared_parameter(
                wanted, graph.type_of(name).shape, only_whole=name in options.whole
            )
            gradient_s, update_s, held = stage.parameter_costs(name, value.layouts)
            costs.append(
                VariableCosts(update_s + gradient_s, gradient_s, np.zeros(len(value.layouts)), held)
            )
        elif source is not None and source in classes:
            produced = classes[source], graph.nodes[source].outputs.index(name)
            times = stage.layout_change_count(name) * problem.micro_batches
            size = graph.type_of(name).elements * stage.widths[name]
            given = name in options.given
            if len(readers) == 1:
                connect(
                    variable_of[source],
                    variable_of[uses[0][0]],
                    change_seconds(produced, readers[0], size, given, times),
                )
                continue
            value = shared_variable(produced, readers, size, given, times)
            connect(variable_of[source], len(costs), value.from_source)
            costs.append(zero_costs(len(value.layouts)))
        else:
            continue
        for (reader, _), matrix in zip(uses, value.to_readers, strict=True):
            connect(len(costs) - 1, variable_of[reader], matrix)
    seconds = tuple(each.seconds for each in costs)
    memory = tuple(each.memory for each in costs)
    return SplitTables(
        nodes=stage.nodes,
        configurations=tuple(node_class.configurations for node_class in classes.values()),
        model=MinSum(seconds, tuple(edges), memory),
        gradients=tuple(each.gradients for each in costs),
        backwards=tuple(each.backward for each in costs),
        passing=tuple(map(passing_of, classes.values())),
        kept_again=_additional_saved_bytes(stage, classes, variable_of),
    )


def _additional_saved_bytes(
    stage: StageContext, classes: dict[int, NodeClass], variable_of: dict[int, int]
) -> tuple[Edge, ...]:
    """Return edges with the additional bytes of tensors that two nodes save, per pair of
    configurations of the nodes.

    The memory of the first node contains its own shard. If the shard of the other node is larger,
    the difference is additional memory. Edges without additional bytes are omitted.
    """
    found: list[Edge] = []
    known: dict[Hashable, Integers] = {}
    zeros: Callable[[tuple[int, ...]], Floats] = cache(np.zeros)
    for first, by_first, node, by_node in stage.kept_again:
        first_class = classes[first]
        node_class = classes[node]
        key = first_class, by_first.dimensions, node_class, by_node.dimensions, by_node.bytes
        if key not in known:
            bytes_at_node = saved_bytes_by_configuration([by_node], node_class.mesh_positions)
            bytes_at_first = saved_bytes_by_configuration([by_first], first_class.mesh_positions)
            known[key] = (
                np.maximum(bytes_at_node[None, :] - bytes_at_first[:, None], 0)
                * stage.kept_micro_batches
            )
        if known[key].any():
            found.append(
                Edge(variable_of[first], variable_of[node], zeros(known[key].shape), known[key])
            )
    return tuple(found)


Solver = Callable[[SplitTables, float | None], Assignment]
"""A function from (tables, memory limit in bytes or None for no limit) to the choice of all
variables that it finds, with a bound.
"""

_BOUNDS = 8
"""Maximum number of bounds on temporary memory that are tried if memory is insufficient."""
_MINIMUM_STEP = 0.01
"""Minimum difference between two bounds on temporary memory, as a fraction of a device's memory."""
_ROUNDS = 3
"""Maximum number of searches per bound on temporary memory. After a search whose placement exceeds
the memory, the next one has a limit that is smaller by the excess.
"""


@dataclass(frozen=True, slots=True)
class FittedPlacement:
    """A placement with new splits of one stage, the proven lower bound of the cost of such splits,
    and the cost and memory of the stage according to the cost model.
    """

    placement: Placement
    proof: SplitProof
    cost: StageCost
    excess: int
    """Bytes by which device `worst` exceeds its memory. This device of the stage has the largest
    excess. Negative or 0 if all devices of the stage fit.
    """
    worst: int


class SplitProblem:
    """The search for the splits of the stages of a placement: the nodes and options of each stage.
    Nodes in `fixed` keep the splits given there.
    """

    def __init__(self, problem: Problem, placement: Placement, fixed: Mapping[int, Splits]) -> None:
        graph = problem.graph
        self.problem = problem
        self.plans = assign_nodes(graph, placement, problem.wanted)
        computed = [{node for node, _ in plan.nodes} for plan in self.plans]
        unsplit: Splits = ()
        # Each stage that reads a cheap node, for example a mask, computes the node itself. These
        # nodes stay unsplit, because splits of a node refer to the devices of one stage only.
        recomputed = {
            node: (unsplit,)
            for node in recomputed_nodes(graph)
            if sum(node in each for each in computed) > 1
        }
        read_parameters = [
            {name for node in each for name in graph.nodes[node].inputs if graph.parameter(name)}
            for each in computed
        ]
        read_by_several = frozenset(
            name
            for names in read_parameters
            for name in names
            if sum(name in each for each in read_parameters) > 1
        )
        allowed: dict[int, tuple[Splits, ...]] = {
            **recomputed,
            **{node: (splits,) for node, splits in fixed.items()},
        }
        self.options = tuple(
            StageOptions(
                allowed, frozenset(plan.outputs), read_by_several, stage_in_flight, stage.recompute
            )
            for stage, plan, stage_in_flight in zip(
                placement.stages,
                self.plans,
                micro_batches_in_flight(problem, placement),
                strict=True,
            )
        )

    def split(
        self,
        placement: Placement,
        index: int,
        solver: Solver,
        overlap: bool = False,
        resized_problem: Problem | None = None,
    ) -> FittedPlacement:
        """Return `placement` with the fastest splits of stage `index` that `solver` finds and that
        fit into memory, or with the stage split by samples only if that is faster.

        The split by samples is not tried if some nodes of the stage may not use all configurations.
        `overlap` is True if the gradient all-reduce overlaps with the backward of the last
        micro-batch. `resized_problem` is the problem at the stage's micro-batch size; if None, it
        is computed. Raise OutOfMemoryError, with the smallest excess, if no splits that were tried
        fit into memory. Errors of `solver` pass through.
        """
        stage = placement.stages[index]
        options = self.options[index]
        resized_problem = resized_problem or with_micro_batch_size(
            self.problem, stage.micro_batch_size
        )
        tables = make_split_tables(
            resized_problem, [node for node, _ in self.plans[index].nodes], stage.devices, options
        )
        micro_batches = self.problem.batch_size // stage.micro_batch_size

        def seconds(fitted: FittedPlacement) -> float:
            """Return the seconds that the stage is busy in a step."""
            return step_seconds(fitted.cost, micro_batches, overlap)

        trials = self._placements_within_memory(placement, index, tables, solver)
        fitting = [each for each in trials if each.excess <= 0]
        if not fitting:
            closest = min(trials, key=lambda each: each.excess)
            need = self.problem.memory_of(closest.worst) + closest.excess
            raise out_of_memory_error(
                self.problem, [index], len(placement.stages), closest.worst, need, least=True
            )
        best = min(fitting, key=seconds)
        # The solver proves that a solution is optimal among the solutions that satisfy its bound on
        # temporary memory. Only the first search is without a bound, so only its lower bound is
        # valid for all splits.
        bound = trials[0].proof.lower_bound
        best = replace(
            best, proof=SplitProof(best.proof.cost, bound, best is trials[0] and best.proof.optimal)
        )
        if any(node in options.allowed for node in stage.nodes):
            return best
        # The model ignores the latency of the gradient all-reduce and counts some layout changes
        # more than one time. Data parallelism, a choice of the model, can therefore be faster than
        # the model predicts. Compare it by its actual cost.
        by_samples = self._split_by_samples(resized_problem.graph, best, index)
        if by_samples is None or by_samples.excess > 0 or seconds(by_samples) >= seconds(best):
            return best
        return replace(
            by_samples,
            proof=SplitProof(max(seconds(by_samples), bound), bound, seconds(by_samples) <= bound),
        )

    def _placements_within_memory(
        self, placement: Placement, index: int, tables: SplitTables, solver: Solver
    ) -> list[FittedPlacement]:
        """Return one or more placements: `placement` with the splits of stage `index` that `solver`
        finds without a memory limit and, if these do not fit into memory, with the splits that it
        finds under several bounds on temporary memory.

        Temporary memory is the maximum over the nodes, which a sum of costs cannot express. So
        several bounds on it are tried in descending order. Under each bound, configurations that
        need more are forbidden, and the rest of the memory limits the sum of all other bytes. The
        search ends before a bound that is close to the previous one (`_MINIMUM_STEP`) if the last
        splits fit.
        """

        def with_measured_memory(assignment: Assignment) -> FittedPlacement:
            """Return the placement with the splits of `assignment`, and its cost and memory."""
            proof = SplitProof(float(assignment.cost), float(assignment.bound), assignment.proven)
            return self._with_splits(placement, index, tables.splits(assignment.choice), proof)

        fastest = solver(tables, None)
        trials = [with_measured_memory(fastest)]
        limit = min(map(self.problem.memory_of, placement.stages[index].devices))
        previous = limit
        for bound in (
            _temporary_memory_bounds(tables, fastest, limit) if trials[0].excess > 0 else ()
        ):
            if trials[-1].excess <= 0 and previous - bound < _MINIMUM_STEP * limit:
                break
            previous = bound
            # Bytes that the model does not count, for example communication buffers. Each round
            # adds to this number the bytes by which its result exceeds the memory, and then
            # searches again.
            unmodelled = 0
            bounded = tables.passing_at_most(bound)
            for _ in range(_ROUNDS):
                try:
                    assignment = solver(bounded, limit - bound - unmodelled)
                except InfeasibleError:
                    break
                trials.append(with_measured_memory(assignment))
                if trials[-1].excess <= 0 or not assignment.fits:
                    break
                unmodelled += trials[-1].excess
        return trials

    def _split_by_samples(
        self, graph: Graph, fitted: FittedPlacement, index: int
    ) -> FittedPlacement | None:
        """Return the placement of `fitted` with stage `index` split by samples only, or None if the
        samples of a node cannot be divided evenly among the stage's devices.

        `graph` is the graph at the stage's micro-batch size.
        """
        stage = fitted.placement.stages[index]
        samples = sample_axes(graph)
        if any(not samples.can_divide(node, len(stage.devices)) for node in stage.nodes):
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
        """Return `placement` with `splits` as the splits of stage `index`, with `proof`, and with
        its cost and memory according to the cost model.
        """
        stages = list(placement.stages)
        stages[index] = replace(stages[index], splits=splits)
        found = replace(placement, stages=tuple(stages))
        costs = stage_costs(self.problem, found)
        used = device_memory(self.problem, found, costs)
        excess = (
            (used[device] - self.problem.memory_of(device), device)
            for device in stages[index].devices
        )
        return FittedPlacement(found, proof, costs[index], *max(excess))


def _temporary_memory_bounds(tables: SplitTables, assignment: Assignment, limit: int) -> list[int]:
    """Return at most `_BOUNDS` bounds on temporary memory, in descending order of bytes. The first
    bound is the temporary memory of `assignment`, and the last one the minimum over all choices.

    The temporary memory of a choice is the maximum over its nodes (`tables.passing`). The bounds
    are evenly spaced entries of the sorted values in `tables.passing`. If their mean difference
    would be less than `_MINIMUM_STEP` of the memory limit `limit`, in bytes, fewer bounds are
    returned.
    """
    lowest = max(int(each.min()) for each in tables.passing)
    highest = max(
        int(each[number]) for each, number in zip(tables.passing, assignment.choice, strict=False)
    )
    candidates = np.unique(
        np.concatenate(list({id(each): each for each in tables.passing}.values()))
    )
    candidates = candidates[(candidates >= lowest) & (candidates <= highest)]
    count = min(_BOUNDS, 2 + int((highest - lowest) / (_MINIMUM_STEP * limit)))
    chosen = np.unique(np.linspace(0, len(candidates) - 1, count).round().astype(int))
    found: list[int] = candidates[chosen][::-1].tolist()
    return found


def split_stages(
    problem: Problem,
    placement: Placement,
    fixed: Mapping[int, Splits],
    solver: Solver,
    overlap: bool = False,
) -> Placement:
    """Return `placement` with the best splits of each stage that `solver` finds, searched stage by
    stage. The proof of the result contains the sums of the costs and of the lower bounds of the
    stages.

    Nodes in `fixed` keep the splits given there. `overlap` is True if the gradient all-reduce
    overlaps with the last backward. Raise OutOfMemoryError, with the smallest excess, if a stage
    does not fit into memory. Errors of `solver` pass through.
    """
    split_problem = SplitProblem(problem, placement, fixed)
    proof = SplitProof(0.0, 0.0, optimal=True)
    for index in range(len(placement.stages)):
        best = split_problem.split(placement, index, solver, overlap)
        placement = best.placement
        stage_proof = best.proof
        proof = SplitProof(
            proof.cost + stage_proof.cost,
            proof.lower_bound + stage_proof.lower_bound,
            proof.optimal and stage_proof.optimal,
        )
    return replace(placement, proof=proof)


_PATIENCE_S = 2.0
"""Work of one search within a memory limit if the user sets no time limit, in seconds.

Several limits are tried, so the value is short. Five times this value shortens the step of an
80-layer Llama on 64 devices by only 0.1%.
"""


class ExactSolver:
    """Exact solver of tables: branch and bound with a dual bound, pruning, and elimination of the
    remaining variables (`solvers/min_sum`).

    `time_limit` is in seconds, counted from the construction of this object; None is no limit. A
    search within a memory limit uses half of the remaining time, because further searches follow.
    """

    def __init__(self, time_limit: float | None) -> None:
        self._end = None if time_limit is None else time.monotonic() + time_limit

    def __call__(self, tables: SplitTables, limit: float | None) -> Assignment:
        return self.solved(tables.model, limit)

    def solved(self, model: MinSum, limit: float | None) -> Assignment:
        """Return the cheapest choice of `model` whose memory is at most `limit` bytes; None is no
        limit. If the time ends first, return the best choice found, with its bound.
        """
        remaining = None if self._end is None else max(0.01, self._end - time.monotonic())
        if limit is None:
            return solve(model, None, remaining)
        return solve(model, limit, None if remaining is None else remaining / 2, _PATIENCE_S)
