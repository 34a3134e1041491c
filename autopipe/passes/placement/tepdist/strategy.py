"""Strategy `tepdist`: its options and its outer search (Alibaba PAI, "TePDist", 2023).

The outer search enumerates the divisions of a cluster's devices into stages, the mesh of each stage
(the order of its devices, in one or two dimensions), and the micro-batch sizes. A combination is
skipped if a lower bound on its step exceeds the best step so far. An estimate of the step
determines the order in which combinations are tried.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, ClassVar

import numpy as np

from autopipe.ir.cluster import Cluster
from autopipe.ir.codec import FormerKey
from autopipe.ir.errors import CANDIDATE_ERRORS, AutopipeError, ConfigurationError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.memo import memoize_all
from autopipe.ir.placement import Placement, Stage, stage_edges
from autopipe.ir.problem import Problem
from autopipe.ir.words import plural
from autopipe.passes.analysis.constraints import (
    ResolvedConstraint,
    required_micro_batch_sizes,
    resolve_constraints,
)
from autopipe.passes.batching import Division, divisors, hill_climb
from autopipe.passes.cost.measured import with_micro_batch_size
from autopipe.passes.cost.memory import parameter_state
from autopipe.passes.cost.memory_check import (
    check_memory_bound,
    check_operators,
    equal_device_ranges,
)
from autopipe.passes.cost.roofline import Seconds, StepSeconds, accumulate_seconds_per_byte
from autopipe.passes.cost.stage_work import gradient_reduction_cost
from autopipe.passes.partition.chain_cut import partition_chain
from autopipe.passes.partition.min_cut_ilp import partition_nodes
from autopipe.passes.placement.tepdist.intra_stage import IntraStageSearch
from autopipe.passes.placement.tepdist.levels import LEVELS, Level, LevelName
from autopipe.passes.schedule.device_order import best_group_order
from autopipe.passes.schedule.limits import busy_s, quick_step_seconds
from autopipe.passes.sharding.regions import (
    check_constraints_met,
    check_degrees,
    constrained_stages,
)

Group = tuple[int, ...]
"""The devices of a stage, in the order in which splits number them."""
Nodes = tuple[tuple[int, ...], ...]
"""For each stage: its nodes, ascending."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """The devices of each stage, in the order in which splits number them. The outermost split of a
    node, usually of its samples, divides the outer dimension of the stage's mesh.
    """

    groups: tuple[Group, ...]
    name: str
    """Text with the number of stages and the mesh of each, such as `2 stages of 2 x 4 devices`."""

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.groups)


def enumerate_meshes(cluster: Cluster, stages: int | None = None) -> Iterator[Mesh]:
    """Yield the divisions of all devices into equal groups, one group per stage. If `stages` is not
    None, only divisions into `stages` groups are yielded.

    The devices of a group are neighbours in the cluster, so a stage lies inside one node of the
    cluster if possible. A group that consists of several complete nodes has two meshes: with the
    nodes as the outer dimension (samples are split over nodes and other axes within a node), and
    with the devices of a node as the outer dimension. If the devices have several types, groups are
    equal within each type. Divisions into the largest groups come first.
    """
    runs = equal_device_ranges(cluster)
    # The widths of groups are in descending order, so that meshes with few stages come first.
    for widths in itertools.product(*(divisors(len(run))[::-1] for run in runs)):
        count = sum(len(run) // width for run, width in zip(runs, widths, strict=True))
        if stages not in (None, count):
            continue
        options_by_run = [
            _group_orders(cluster, run, width) for run, width in zip(runs, widths, strict=True)
        ]
        for option in range(max(map(len, options_by_run))):
            chosen = [each[min(option, len(each) - 1)] for each in options_by_run]
            name = " and ".join(
                (
                    f"{len(groups)} stage{'s' * (len(groups) > 1)} of {levels} "
                    f"device{'s' * (len(groups[0]) > 1)}"
                )
                for groups, levels in chosen
            )
            yield Mesh(tuple(group for groups, _ in chosen for group in groups), name)


def _group_orders(cluster: Cluster, run: range, width: int) -> list[tuple[tuple[Group, ...], str]]:
    """Return (groups, text) pairs for groups of `width` devices of the consecutive devices `run`.
    The text describes the mesh of a group, such as `2 x 4`.

    There are two pairs if a group consists of several complete nodes: one with devices in the order
    of nodes, and one with devices interleaved across nodes. Otherwise there is one pair.
    """
    groups = tuple(
        tuple(range(first, first + width)) for first in range(run.start, run.stop, width)
    )
    first, levels = cluster.part(run.start)
    per_node = levels[0].size
    nodes, remainder = divmod(width, per_node)
    if nodes <= 1 or remainder or per_node == 1 or cluster.part(run.stop - 1)[0] != first:
        return [(groups, str(width))]
    interleaved = tuple(
        tuple(group[node * per_node + index] for index in range(per_node) for node in range(nodes))
        for group in groups
    )
    return [(groups, f"{nodes} x {per_node}"), (interleaved, f"{per_node} x {nodes}")]


def constrained_meshes(
    cluster: Cluster, stages: int | None, resolved: Sequence[ResolvedConstraint]
) -> tuple[Mesh, ...]:
    """Return the meshes of `cluster` that satisfy the constraints on devices. If `stages` is not
    None, only meshes with `stages` stages are returned.

    Each group of devices that constraints require must be the group of a stage, and has the
    required order of devices. If no division into equal groups contains all required groups, the
    required groups themselves are the stages. Raise ConfigurationError, which names a constraint,
    if no mesh satisfies the constraints.
    """
    found = tuple(enumerate_meshes(cluster, stages))
    # The required groups are sorted by their required stage, or by their first node if no stage is
    # required.
    ranks: dict[frozenset[int], tuple[tuple[int, int], Group]] = {}
    for each in resolved:
        if each.devices is not None:
            stage = each.constraint.stage
            rank = (each.nodes[0], 0) if stage is None else (-1, stage)
            before, group = ranks.get(frozenset(each.devices), (rank, each.devices))
            ranks[frozenset(each.devices)] = min(before, rank), group
    required = {frozenset(group): group for _, group in sorted(ranks.values())}
    if not required:
        return found
    matching = dict.fromkeys(
        replace(mesh, groups=tuple(required.get(frozenset(group), group) for group in mesh.groups))
        for mesh in found
        if required.keys() <= set(map(frozenset, mesh.groups))
    )
    if matching:
        return tuple(matching)
    count = len(required)
    are_disjoint = sum(map(len, required)) == len(frozenset().union(*required))
    if stages in (None, count) and are_disjoint:
        return (Mesh(tuple(required.values()), f"{count} stage{'s' * (count > 1)} as required"),)
    constraint = next(each for each in resolved if each.devices is not None)
    with_stages = f" with {stages} {plural(stages, 'stage')}" if stages else ""
    raise ConfigurationError(
        (
            f"{constraint} requires devices {list(constraint.devices or ())}, but no partition "
            f"of the devices into stages has such a stage{with_stages}"
        ),
        hint="require equal groups of adjacent devices, or disjoint groups that cover all "
        "stages, or use strategy manual",
    )


class StepBounds:
    """Lower bounds and estimates of the seconds of a step with a mesh, for all micro-batch sizes up
    to the size of the problem (see `StepSeconds`).
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._seconds = StepSeconds(problem)
        self._state = parameter_state(
            problem, ((parameter.value.name, 1) for parameter in problem.graph.parameters)
        )

    def check_memory(self) -> None:
        """Raise InfeasibleError if parameters, gradients and optimizer state exceed the memory even
        if they are divided evenly among all devices.
        """
        check_memory_bound(
            self.problem,
            (self._state.total - self._state.low_precision_bytes) // self.problem.cluster.size,
            [0],
            1,
        )

    def minimum_step_s(self, mesh: Mesh, micro_batches: int) -> float:
        """Return a lower bound on the seconds of a step that holds for all partitions of the nodes
        into the mesh's stages.

        The slowest stage takes at least the weighted mean of all stages' times, for any weights.
        The weights are the stages' speeds, where speed = 1 / (seconds for the full model). For each
        node, the minimum of weight · seconds over the device types is counted:

            bound = micro_batches · sum over nodes of
                min over types (speed / total speed · seconds of the node)
        """
        groups_by_type = self._groups_by_type(mesh)
        seconds = [self._node_seconds(groups[0], micro_batches) for groups in groups_by_type]
        if len(groups_by_type) == 1:
            return micro_batches * float(seconds[0].sum()) / mesh.stages
        totals = [float(each.sum()) for each in seconds]
        # If a device type needs no time for any node, because the graph only moves data, its speed
        # would be infinite. The bound is then 0.
        if 0.0 in totals:
            return 0.0
        speeds = [1 / total for total in totals]
        total_speed = sum(
            speed * len(groups) for speed, groups in zip(speeds, groups_by_type, strict=True)
        )
        minimum = np.minimum.reduce(
            [speed / total_speed * each for speed, each in zip(speeds, seconds, strict=True)]
        )
        return micro_batches * float(minimum.sum())

    def minimum_step_of_partition_s(self, mesh: Mesh, micro_batches: int, stages: Nodes) -> float:
        """Return a lower bound on the seconds of a step for the given nodes of each stage.

        A stage computes all its micro-batches one after the other. Before its first task, one
        micro-batch passes forward through the stages before it, and after its last task, one
        micro-batch passes backward through them.
        """
        stage_seconds = [
            float(self._node_seconds(group, micro_batches)[list(nodes)].sum())
            for group, nodes in zip(mesh.groups, stages, strict=True)
        ]
        before = [0.0] * len(stage_seconds)
        for source, target in stage_edges(
            self.problem.graph, _unsplit_placement(self.problem, mesh, stages)
        ):
            before[target] = max(before[target], before[source] + stage_seconds[source])
        return max(
            micro_batches * each + path_seconds
            for each, path_seconds in zip(stage_seconds, before, strict=True)
        )

    def estimate_s(self, mesh: Mesh, micro_batches: int) -> float:
        """Return the estimated seconds of a step if all stages take equally long.

        p stages in a row process m micro-batches in m + p - 1 times the seconds of one stage for
        one micro-batch. The estimate adds the accumulation of gradients, divided evenly among the
        stages, and the gradient all-reduce.
        """
        problem = self.problem
        kinds = self._groups_by_type(mesh)
        totals = [float(self._node_seconds(groups[0], micro_batches).sum()) for groups in kinds]
        # This time stays 0 if the nodes need no time, as in a graph that only moves data.
        even = 0.0
        if 0.0 not in totals:
            even = 1 / sum(len(groups) / total for groups, total in zip(kinds, totals, strict=True))
        share = self._state.gradient_bytes / mesh.stages
        end = 0.0
        for group, *_ in kinds:
            slowest = max(
                accumulate_seconds_per_byte(device)
                for device in problem.cluster.device_types_among(group)
            )
            gradients = gradient_reduction_cost(problem, group).seconds(share)
            end = max(end, gradients + (micro_batches - 1) * slowest * share / len(group))
        return (micro_batches + mesh.stages - 1) * even + end

    def _groups_by_type(self, mesh: Mesh) -> list[list[Group]]:
        """Return the groups of the mesh in lists: all groups of a list have equal device types and
        equally many devices.
        """
        found: dict[Hashable, list[Group]] = {}
        for group in mesh.groups:
            found.setdefault(
                (self.problem.cluster.device_types_among(group), len(group)), []
            ).append(group)
        return list(found.values())

    def _node_seconds(self, group: Group, micro_batches: int) -> Seconds:
        """Return the seconds of each node of the full model for one micro-batch, if it is divided
        evenly among the devices of `group`.
        """
        parts = len(group) * micro_batches // self.problem.micro_batches
        return self._seconds.of(self.problem.cluster.device_types_among(group), parts)


def _unsplit_placement(problem: Problem, mesh: Mesh, stages: Nodes) -> Placement:
    """Return a placement in which each stage has the given nodes and the devices of the mesh, and
    no node is split.
    """
    size = problem.micro_batch_size
    again = problem.recomputes_all
    groups = zip(stages, mesh.groups, strict=True)
    return Placement(tuple(Stage(nodes, group, size, recompute=again) for nodes, group in groups))


_PATIENCE_S = 10.0
"""Maximum seconds for one integer program without a time limit. For comparison, 96 layers in 16
stages take 3 seconds on an idle CPU core.
"""


@dataclass(frozen=True, slots=True)
class MeshTrial:
    """The result of trying one mesh with one number of micro-batches per step."""

    mesh: Mesh
    micro_batches: int
    step_s: float = math.inf
    """Seconds of a step; infinite if no placement was found."""
    placement: Placement | None = None
    least_s: float = 0.0
    """If the trial was skipped because of a lower bound on the seconds of a step: this bound;
    otherwise 0.
    """
    late: bool = False
    """True if the trial was skipped because the time limit was reached."""
    refused: AutopipeError | None = None
    """The error if there is no placement; None otherwise, and for skipped trials."""


@dataclass(eq=False)
class OuterSearch:
    """One outer search: its trials and the best of them."""

    problem: Problem
    solver: Level
    imbalance_tolerance: float
    end: float | None = None
    """The time (`time.monotonic`) at which the search stops if a placement was found; None for no
    limit.
    """
    trials: list[MeshTrial] = field(default_factory=list)
    best: MeshTrial | None = None
    undivided: dict[str, str] = field(default_factory=dict)
    """By the name of a mesh: why one of the two partition methods gave no partition; '' if both
    did.
    """

    def __post_init__(self) -> None:
        self.bounds = StepBounds(self.problem)
        self.in_micro_batches = memoize_all(self._make_intra_stage_search)
        self._even: dict[Hashable, Nodes | InfeasibleError] = {}

    def _make_intra_stage_search(self, count: int) -> IntraStageSearch:
        """Return the search for splits on `count` micro-batches per step."""
        return IntraStageSearch(
            with_micro_batch_size(self.problem, self.problem.batch_size // count), self.solver
        )

    def run(self, meshes: Iterable[Mesh], sizes: Iterable[int]) -> MeshTrial:
        """Return the best trial over all `meshes` and micro-batches of `sizes` samples. Raise the
        error that explains best why there is no placement.
        """
        self.bounds.check_memory()
        counts = sorted(self.problem.batch_size // size for size in sizes)
        estimates = {
            mesh: [self.bounds.estimate_s(mesh, count) for count in counts] for mesh in meshes
        }
        for mesh, seconds in sorted(estimates.items(), key=lambda item: min(item[1])):
            hill_climb(counts, seconds.index(min(seconds)), partial(self._try_mesh, mesh))
        if self.best is None:
            # No mesh led to a placement. An InfeasibleError is the most useful reason; without one,
            # raise the error of the mesh with the shortest estimate.
            refusals = [each.refused for each in self.trials if each.refused is not None]
            if self.problem.known_s < math.inf:
                refusals.append(
                    InfeasibleError(
                        "tepdist found no step shorter than the known step of "
                        f"{self.problem.known_s:.6g} s"
                    )
                )
            assert refusals, "there is a placement, or a reason against each"
            raise next(
                (each for each in refusals if isinstance(each, InfeasibleError)), refusals[0]
            )
        return self.best

    def _try_mesh(self, mesh: Mesh, count: int) -> float | None:
        """Try one mesh with `count` micro-batches, store the trial, and return the seconds of its
        best step for the function `hill_climb`.

        Return None if the trial is infeasible, because smaller micro-batches may still fit into
        memory. Return infinity if the mesh cannot improve on the best step.
        """
        bound = self.bounds.minimum_step_s(mesh, count)
        late = self.best is not None and self.end is not None and time.monotonic() > self.end
        if late or bound >= self._best_step_s():
            found = MeshTrial(mesh, count, least_s=bound, late=late)
        else:
            try:
                inside = self.in_micro_batches(count)
                placed = [
                    self._best_trial(inside, mesh, count, stages)
                    for stages in self._node_partitions(inside, mesh)
                ]
                found = min(placed, key=lambda each: (each.step_s, each.refused is not None))
            except CANDIDATE_ERRORS as error:
                found = MeshTrial(mesh, count, refused=error)
        self.trials.append(found)
        if found.placement is not None and found.step_s < self._best_step_s():
            self.best = found
        return None if isinstance(found.refused, InfeasibleError) else found.step_s

    def _node_partitions(self, inside: IntraStageSearch, mesh: Mesh) -> Iterable[Nodes]:
        """Return the distinct partitions of the nodes into the mesh's stages, by two methods: along
        a chain, and by an integer program. Raise the error of the first method if both fail.
        """
        found: dict[Nodes, None] = {}
        refused: dict[str, InfeasibleError] = {}
        fixed_stages = constrained_stages(inside.resolved, mesh.groups, "this number of stages")
        for method in (partition_chain, self._balanced_stages):
            try:
                found[method(inside.problem, mesh.groups, fixed_stages)] = None
            except InfeasibleError as error:
                refused[error.message] = error
        self.undivided.setdefault(mesh.name, "; ".join(refused))
        if not found:
            raise next(iter(refused.values()))
        return found

    def _balanced_stages(
        self, problem: Problem, groups: Sequence[Group], fixed_stages: dict[int, int]
    ) -> Nodes:
        """Return the nodes of balanced stages with the fewest bytes between stages, by an integer
        program. Results are cached by number of stages and `fixed_stages`, because the batch size
        does not matter.

        Raise InfeasibleError if the imbalance tolerance permits no partition; the message contains
        the minimum tolerance that does. Raise it also for stages on different device types.
        """
        if len({problem.cluster.devices[group[0]] for group in groups}) > 1:
            raise InfeasibleError(
                "the integer program balances stages on devices of one type, but the stages "
                "have devices of different types"
            )
        if len(groups) == 1:
            return (tuple(range(len(problem.graph.nodes))),)
        key = len(groups), tuple(sorted(fixed_stages.items()))
        if key not in self._even:
            limit = (
                _PATIENCE_S if problem.time_limit is None else min(_PATIENCE_S, problem.time_limit)
            )
            try:
                self._even[key] = partition_nodes(
                    problem, len(groups), self.imbalance_tolerance, fixed_stages, limit
                ).nodes
            except InfeasibleError as error:
                self._even[key] = error
        found = self._even[key]
        if isinstance(found, InfeasibleError):
            raise found
        return found

    def _best_trial(
        self, inside: IntraStageSearch, mesh: Mesh, count: int, stages: Nodes
    ) -> MeshTrial:
        """Return the trial with the best placement whose stages have the given nodes. Raise
        ConfigurationError for required splits that the devices of a stage cannot execute.
        """
        problem = inside.problem
        known_s = self._best_step_s()
        bound = self.bounds.minimum_step_of_partition_s(mesh, count, stages)
        if bound >= known_s:
            return MeshTrial(mesh, count, least_s=bound)
        skeleton = _unsplit_placement(problem, mesh, stages)
        check_degrees(problem, inside.required, skeleton)
        found = list[MeshTrial]()
        refused = None
        try:
            for each in inside.search_placements(skeleton, known_s):
                if busy_s(each.costs, problem.micro_batches) >= known_s:
                    continue
                try:
                    seconds = quick_step_seconds(problem, each.placement, each.costs)
                    found.append(MeshTrial(mesh, count, seconds, each.placement))
                except InfeasibleError as error:
                    refused = error
        except InfeasibleError as error:
            return MeshTrial(mesh, count, refused=error)
        no_placement = MeshTrial(mesh, count, refused=refused, least_s=0.0 if refused else known_s)
        return min(found, key=lambda each: each.step_s, default=no_placement)

    def _best_step_s(self) -> float:
        """Return the seconds of the best step so far, or the known step of the problem if there is
        none.
        """
        return self.problem.known_s if self.best is None else self.best.step_s


def search_notes(outer: OuterSearch, best: MeshTrial) -> tuple[str, ...]:
    """Return one line of text per mesh, the fastest mesh first: its step, or why it has none."""
    by_mesh: dict[str, list[MeshTrial]] = {}
    for each in sorted(outer.trials, key=lambda each: each.step_s):
        by_mesh.setdefault(each.mesh.name, []).append(each)
    notes = tuple(f"{name}: {_result_text(trials, best)}" for name, trials in by_mesh.items())
    reason = outer.undivided.get(best.mesh.name)
    return (
        (*notes, f"the operators were partitioned as a chain only: {reason}") if reason else notes
    )


def _result_text(trials: list[MeshTrial], best: MeshTrial) -> str:
    """Return the text about one mesh: the step of its fastest trial, which is the first of
    `trials`, or the reason why no trial has a step.
    """
    fastest = trials[0]
    step = (
        f"{_time_text(fastest.step_s)} with {fastest.micro_batches} "
        f"micro-batch{'es' * (fastest.micro_batches > 1)}"
    )
    if fastest is best:
        return f"{step}, the best of {len(trials)} {plural(len(trials), 'trial')}"
    if math.isfinite(fastest.step_s):
        return f"{step}, {fastest.step_s / best.step_s:.2f} times the best" if best.step_s else step
    refused = next((each.refused for each in trials if each.refused), None)
    beaten = [each for each in trials if each.least_s]
    if beaten or refused is None:
        # If the nodes of the graph need no time, all lower bounds are 0, so no trial is in
        # `beaten`. All trials then count.
        beaten = beaten or trials
        why = ", skipped because time was up" if any(each.late for each in beaten) else ""
        return f"at least {_time_text(min(each.least_s for each in beaten))}{why}"
    return str(refused).partition("\n")[0]


def _time_text(seconds: float) -> str:
    """Return a time as text, in seconds from 1 s on and otherwise in milliseconds."""
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"


@dataclass(frozen=True, slots=True)
class TePDist:
    """Search all divisions of the devices into stages with a mesh each, and the splits of all
    operators inside the stages.

    The number of micro-batches is searched too if it is not given. The placement with the shortest
    simulated step under schedule 1F1B is returned.
    """

    level: LevelName = "O2"
    """Search for splits inside a stage. `O2`: segments between critical operators (operators that
    separate the graph), combined by dynamic programming. `O3`: one integer program over all cones,
    in which cheap operators are contracted into their neighbours. `O4`: one integer program over
    all operators.
    """
    stages: int | None = None
    """Number of pipeline stages, with equal groups of devices. Default: all possible numbers are
    tried.
    """
    imbalance_tolerance: Annotated[float, FormerKey("unbalance")] = 0.08
    """Maximum fraction by which a stage's computation may exceed the mean of all stages, in the
    partition by the integer program, which minimises the bytes between stages. The alternative
    partition along a chain of operators, which minimises the slowest stage, has no such limit.
    """

    name: ClassVar[str] = "tepdist"

    def division(self, graph: Graph) -> Division:
        """Return `Division.OWN`: the strategy chooses the micro-batch size."""
        return Division.OWN

    def requires(self, problem: Problem) -> None:
        """Raise ConfigurationError for options that are out of range, and InfeasibleError for a
        model without operators.
        """
        if self.imbalance_tolerance < 0:
            raise ConfigurationError(
                f"imbalance_tolerance is {self.imbalance_tolerance}, expected at least 0",
                hint="set strategy.imbalance_tolerance to a fraction, such as 0.08",
                where="strategy",
            )
        if self.stages is not None:
            # Constraints may require groups of devices that are not equal. Numbers of stages other
            # than `counts`, which assumes equal groups, are possible then.
            has_device_constraints = any(constraint.devices for constraint in problem.constraints)
            counts = sorted({mesh.stages for mesh in enumerate_meshes(problem.cluster)})
            if self.stages < 1 or (self.stages not in counts and not has_device_constraints):
                raise ConfigurationError(
                    f"stages is {self.stages}, but {problem.cluster.size} "
                    f"{plural(problem.cluster.size, 'device')} cannot be divided into "
                    f"{self.stages} equal groups",
                    hint=f"set strategy.stages to one of {', '.join(map(str, counts))}",
                    where="strategy.stages",
                )
        check_operators(problem)

    def run(self, problem: Problem) -> Placement:
        """Return the placement with the shortest simulated step. Raise InfeasibleError if no
        placement fits into memory, and ConfigurationError for constraints that cannot be satisfied.
        """
        found = best_group_order(problem, self._place)
        count = len(found.stages)
        # If only some device types are used, the number of stages may not be a valid value of
        # option `stages`.
        is_option = any(mesh.stages == count for mesh in enumerate_meshes(problem.cluster))
        return (
            replace(found, options=(("stages", count),))
            if self.stages is None and is_option
            else found
        )

    def _place(self, problem: Problem) -> Placement:
        """Return the best placement for one order of the cluster's device groups: the order in
        `problem`. Raise as `run` does.
        """
        resolved = resolve_constraints(problem, own_sizes=True)
        found = constrained_meshes(problem.cluster, self.stages, resolved)
        if not found:
            raise InfeasibleError(
                f"the devices cannot be divided into {self.stages} equal "
                f"{plural(self.stages or 0, 'group')}, one per stage"
            )
        end = None if problem.time_limit is None else time.monotonic() + problem.time_limit
        outer = OuterSearch(
            problem,
            LEVELS[self.level](problem.time_limit, problem.solver),
            self.imbalance_tolerance,
            end,
        )
        best = outer.run(found, required_micro_batch_sizes(problem, resolved))
        assert best.placement is not None
        inside = outer.in_micro_batches(best.micro_batches)
        check_constraints_met(inside.problem, best.placement, self.name)
        proof = inside.split_proof(best.placement) if len(best.placement.stages) == 1 else None
        return replace(best.placement, proof=proof, notes=search_notes(outer, best))
