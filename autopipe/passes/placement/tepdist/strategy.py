"""TePDist: the strategy, its options, and its outer search (Alibaba PAI, "TePDist", 2023).

The outer search has the factorisations of a cluster's devices into stages and the mesh of each, a
bound and an estimate of each before any of its splits are searched, and the micro-batches under
which it is tried.
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
from autopipe.ir.errors import REFUSALS, AutopipeError, ConfigurationError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.memo import once_each
from autopipe.ir.placement import Placement, Stage, stage_edges
from autopipe.ir.problem import Problem
from autopipe.ir.words import plural
from autopipe.passes.analysis.constraints import (
    ResolvedConstraint,
    required_sizes,
    resolved_constraints,
)
from autopipe.passes.batching import Division, climb, divisors
from autopipe.passes.cost.measured import resized
from autopipe.passes.cost.memory import state_of
from autopipe.passes.cost.memory_check import check_least, check_operators, equal_device_runs
from autopipe.passes.cost.roofline import Seconds, StepSeconds, accumulate_per_byte
from autopipe.passes.cost.stage_work import exchange_of_gradients
from autopipe.passes.partition.chain_cut import cut_into_stages
from autopipe.passes.partition.min_cut_ilp import divide
from autopipe.passes.placement.tepdist.intra_stage import IntraStageSearch
from autopipe.passes.placement.tepdist.levels import LEVELS, Level, LevelName
from autopipe.passes.schedule.device_order import best_order
from autopipe.passes.schedule.limits import busy_s, quick_step_seconds
from autopipe.passes.sharding.regions import (
    check_constraints_met,
    check_degrees,
    constrained_stages,
)

Group = tuple[int, ...]  # The devices of a stage, in the order in which splits count them.
Nodes = tuple[tuple[int, ...], ...]  # The nodes of each stage, ascending.


@dataclass(frozen=True, slots=True)
class Mesh:
    """The devices of each stage: what is split outermost, samples first, goes over the outer level
    of the mesh.
    """

    groups: tuple[Group, ...]
    name: str  # Stages and the levels of each one's mesh, such as `2 stages of 2 x 4 devices`.

    @property
    def stages(self) -> int:
        return len(self.groups)


def meshes(cluster: Cluster, stages: int | None = None) -> Iterator[Mesh]:
    """Every way to make equal groups of all devices, into `stages` stages where that is given.
    Groups are neighbours in the cluster, so that a stage's mesh lies in one node where it can. One
    of several whole nodes has two levels, and both orders of them: nodes outside, so that samples
    are shared among nodes and other axes within one, and the other way around. Where devices are of
    several kinds, groups are equal within each kind.
    """
    runs = equal_device_runs(cluster)
    # The widest groups first, so that few stages come first.
    for widths in itertools.product(*(divisors(len(run))[::-1] for run in runs)):
        count = sum(len(run) // width for run, width in zip(runs, widths, strict=True))
        if stages not in (None, count):
            continue
        ways = [_ways(cluster, run, width) for run, width in zip(runs, widths, strict=True)]
        for way in range(max(map(len, ways))):
            parts = [each[min(way, len(each) - 1)] for each in ways]
            names = " and ".join(
                (
                    f"{len(groups)} stage{'s' * (len(groups) > 1)} of {levels} "
                    f"device{'s' * (len(groups[0]) > 1)}"
                )
                for groups, levels in parts
            )
            yield Mesh(tuple(group for groups, _ in parts for group in groups), names)


def _ways(cluster: Cluster, run: range, width: int) -> list[tuple[tuple[Group, ...], str]]:
    """The ways to count the devices of equal groups of a run, along nodes, and across where it has
    whole ones; and the extents of each one's mesh, such as `2 x 4`.
    """
    groups = tuple(
        tuple(range(first, first + width)) for first in range(run.start, run.stop, width)
    )
    first, levels = cluster.part(run.start)
    of_node = levels[0].size
    nodes, rest = divmod(width, of_node)
    if nodes <= 1 or rest or of_node == 1 or cluster.part(run.stop - 1)[0] != first:
        return [(groups, str(width))]
    crossed = tuple(
        tuple(group[node * of_node + place] for place in range(of_node) for node in range(nodes))
        for group in groups
    )
    return [(groups, f"{nodes} x {of_node}"), (crossed, f"{of_node} x {nodes}")]


def constrained_meshes(
    cluster: Cluster, stages: int | None, resolved: Sequence[ResolvedConstraint]
) -> tuple[Mesh, ...]:
    """The meshes of `cluster`, into `stages` stages where that is given, that constraints leave.
    Where they ask for devices, each group asked for is a stage's, in the order asked for: in equal
    groups of all devices, or in stages of just these groups, which need not be equal. Raises
    ConfigurationError, naming a constraint, where no mesh has them.
    """
    found = tuple(meshes(cluster, stages))
    # By the stage that is asked for with them, else by their first node.
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
    with_them = dict.fromkeys(
        replace(mesh, groups=tuple(required.get(frozenset(group), group) for group in mesh.groups))
        for mesh in found
        if required.keys() <= set(map(frozenset, mesh.groups))
    )
    if with_them:
        return tuple(with_them)
    count = len(required)
    apart = sum(map(len, required)) == len(frozenset().union(*required))
    if stages in (None, count) and apart:
        return (Mesh(tuple(required.values()), f"{count} stage{'s' * (count > 1)} as asked for"),)
    constraint = next(each for each in resolved if each.devices is not None)
    many = f" with {stages} {plural(stages, 'stage')}" if stages else ""
    raise ConfigurationError(
        (
            f"{constraint} asks for devices {list(constraint.devices or ())}, which no stage can "
            f"have{many}"
        ),
        hint="stages have equal groups of neighbours, or just the groups asked for, if no two of "
        "them overlap; "
        "strategy manual follows any constraint",
    )


class Bounds:
    """Bounds and estimates of a mesh's step, for micro-batches of any size up to the problem's
    (`StepSeconds`).
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._seconds = StepSeconds(problem)
        self._state = state_of(
            problem, ((parameter.value.name, 1) for parameter in problem.graph.parameters)
        )

    def check_memory(self) -> None:
        """Raise InfeasibleError where parameters and their state, shared by all devices, are more
        than memory holds.
        """
        check_least(
            self.problem,
            (self._state.total - self._state.low_precision_bytes) // self.problem.cluster.size,
            [0],
            1,
        )

    def step_s(self, mesh: Mesh, micro_batches: int) -> float:
        """Seconds that no step can be shorter than: the fullest stage does a fair part of the work
        at least. Whatever stages weigh, that one takes as long as their weighted mean at least, and
        so does, node by node, where the node weighs least: the weights are the stages' speeds.
        """
        kinds = self._kinds(mesh)
        seconds = [self._node_s(groups[0], micro_batches) for groups in kinds]
        if len(kinds) == 1:
            return micro_batches * float(seconds[0].sum()) / mesh.stages
        totals = [float(each.sum()) for each in seconds]
        if 0.0 in totals:  # The graph only moves data.
            return 0.0
        speeds = [1 / total for total in totals]
        whole = sum(speed * len(groups) for speed, groups in zip(speeds, kinds, strict=True))
        least = np.minimum.reduce(
            [speed / whole * each for speed, each in zip(speeds, seconds, strict=True)]
        )
        return micro_batches * float(least.sum())

    def divided_s(self, mesh: Mesh, micro_batches: int, stages: Nodes) -> float:
        """The same where it is known which nodes a stage has: all of it in turn, as fast as its
        devices compute. Before its first task a micro-batch comes through the stages before it, and
        after its last goes back.
        """
        own = [
            float(self._node_s(group, micro_batches)[list(nodes)].sum())
            for group, nodes in zip(mesh.groups, stages, strict=True)
        ]
        before = [0.0] * len(own)
        for source, target in stage_edges(self.problem.graph, _unsplit(self.problem, mesh, stages)):
            before[target] = max(before[target], before[source] + own[source])
        return max(micro_batches * each + way for each, way in zip(own, before, strict=True))

    def estimate_s(self, mesh: Mesh, micro_batches: int) -> float:
        """Return the estimated seconds of a step if all stages take equally long.

        p stages in a row process m micro-batches in m + p - 1 times the seconds of one stage and
        one micro-batch. The estimate adds the accumulation of gradients, split evenly over the
        stages, and their all-reduce.
        """
        problem = self.problem
        kinds = self._kinds(mesh)
        totals = [float(self._node_s(groups[0], micro_batches).sum()) for groups in kinds]
        even = 0.0  # If the graph only moves data, its nodes take no time.
        if 0.0 not in totals:
            even = 1 / sum(len(groups) / total for groups, total in zip(kinds, totals, strict=True))
        share = self._state.gradient_bytes / mesh.stages
        end = 0.0
        for group, *_ in kinds:
            slowest = max(
                accumulate_per_byte(device) for device in problem.cluster.kinds_among(group)
            )
            gradients = exchange_of_gradients(problem, group).seconds(share)
            end = max(end, gradients + (micro_batches - 1) * slowest * share / len(group))
        return (micro_batches + mesh.stages - 1) * even + end

    def _kinds(self, mesh: Mesh) -> list[list[Group]]:
        """The groups with as many devices of the same kinds."""
        found: dict[Hashable, list[Group]] = {}
        for group in mesh.groups:
            found.setdefault((self.problem.cluster.kinds_among(group), len(group)), []).append(
                group
            )
        return list(found.values())

    def _node_s(self, group: Group, micro_batches: int) -> Seconds:
        """Seconds of one micro-batch for each node of the whole model, shared by such a group."""
        parts = len(group) * micro_batches // self.problem.micro_batches
        return self._seconds.of(self.problem.cluster.kinds_among(group), parts)


def _unsplit(problem: Problem, mesh: Mesh, stages: Nodes) -> Placement:
    """The stages of a mesh with their nodes."""
    size = problem.micro_batch_size
    again = problem.recomputes_all
    groups = zip(stages, mesh.groups, strict=True)
    return Placement(tuple(Stage(nodes, group, size, recompute=again) for nodes, group in groups))


_PATIENCE_S = 10.0
"""For one integer program, where there is no time limit: one of 96 layers in 16 stages takes three
on an idle core.
"""


@dataclass(frozen=True, slots=True)
class MeshTrial:
    """Result of a factorisation with one number of micro-batches."""

    mesh: Mesh
    micro_batches: int
    step_s: float = math.inf  # Seconds of a step; infinite where no placement was found.
    placement: Placement | None = None
    least_s: float = 0.0
    """Seconds that no step can be shorter than, where it was looked into no further."""
    late: bool = False  # True if that was for want of time.
    refused: AutopipeError | None = None  # Reason why it has no step.


@dataclass(eq=False)
class Outer:
    """One outer search: what it has looked into, and the best of that."""

    problem: Problem
    solver: Level
    unbalance: float
    end: float | None = None  # When to stop, by `time.monotonic`, once there is a placement.
    trials: list[MeshTrial] = field(default_factory=list)
    best: MeshTrial | None = None
    undivided: dict[str, str] = field(default_factory=dict)
    """By a factorisation's name why not all ways to divide the nodes were possible; empty where
    they were.
    """

    def __post_init__(self) -> None:
        self.bounds = Bounds(self.problem)
        self.in_micro_batches = once_each(self._in_micro_batches)
        self._even: dict[Hashable, Nodes | InfeasibleError] = {}

    def _in_micro_batches(self, count: int) -> IntraStageSearch:
        return IntraStageSearch(
            resized(self.problem, self.problem.batch_size // count), self.solver
        )

    def run(self, meshes: Iterable[Mesh], sizes: Iterable[int]) -> MeshTrial:
        """The best of all `meshes` on micro-batches of `sizes` samples. Raises the reason against
        the most promising of them where none has a placement.
        """
        self.bounds.check_memory()
        counts = sorted(self.problem.batch_size // size for size in sizes)
        estimates = {
            mesh: [self.bounds.estimate_s(mesh, count) for count in counts] for mesh in meshes
        }
        for mesh, seconds in sorted(estimates.items(), key=lambda item: min(item[1])):
            climb(counts, seconds.index(min(seconds)), partial(self._try, mesh))
        if self.best is None:
            # Memory, if it is that somewhere, else what is said of the most promising.
            refusals = [each.refused for each in self.trials if each.refused is not None]
            if self.problem.known_s < math.inf:
                refusals.append(
                    InfeasibleError(f"no step is shorter than {self.problem.known_s:.6g} s")
                )
            assert refusals, "there is a placement, or a reason against each"
            raise next(
                (each for each in refusals if isinstance(each, InfeasibleError)), refusals[0]
            )
        return self.best

    def _try(self, mesh: Mesh, count: int) -> float | None:
        """Seconds of the best placement's step, as `climb` wants them: smaller micro-batches may
        fit into memory where larger ones do not. Infinite where the rest of the search has nothing
        to gain.
        """
        least = self.bounds.step_s(mesh, count)
        late = self.best is not None and self.end is not None and time.monotonic() > self.end
        if late or least >= self._known_s():
            found = MeshTrial(mesh, count, least_s=least, late=late)
        else:
            try:
                inside = self.in_micro_batches(count)
                divided = [
                    self._placed(inside, mesh, count, stages)
                    for stages in self._divided(inside, mesh)
                ]
                found = min(divided, key=lambda each: (each.step_s, each.refused is not None))
            except REFUSALS as error:
                found = MeshTrial(mesh, count, refused=error)
        self.trials.append(found)
        if found.placement is not None and found.step_s < self._known_s():
            self.best = found
        return None if isinstance(found.refused, InfeasibleError) else found.step_s

    def _divided(self, inside: IntraStageSearch, mesh: Mesh) -> Iterable[Nodes]:
        """The divisions that there are, each once. Raises the first one's reason where there is
        none.
        """
        found: dict[Nodes, None] = {}
        refused: dict[str, InfeasibleError] = {}
        settled = constrained_stages(inside.resolved, mesh.groups, "this number of stages")
        for division in (cut_into_stages, self._evenly):
            try:
                found[division(inside.problem, mesh.groups, settled)] = None
            except InfeasibleError as error:
                refused[error.message] = error
        self.undivided.setdefault(mesh.name, "; ".join(refused))
        if not found:
            raise next(iter(refused.values()))
        return found

    def _evenly(self, problem: Problem, groups: Sequence[Group], settled: dict[int, int]) -> Nodes:
        """Even stages between which the fewest bytes cross, once for each number of stages: samples
        do not change it. Raises InfeasibleError where `unbalance` allows none, with the least that
        does.
        """
        if len({problem.cluster.devices[group[0]] for group in groups}) > 1:
            raise InfeasibleError(
                "the integer program makes stages even, and their devices are of different kinds"
            )
        if len(groups) == 1:
            return (tuple(range(len(problem.graph.nodes))),)
        key = len(groups), tuple(sorted(settled.items()))
        if key not in self._even:
            limit = (
                _PATIENCE_S if problem.time_limit is None else min(_PATIENCE_S, problem.time_limit)
            )
            try:
                self._even[key] = divide(problem, len(groups), self.unbalance, settled, limit).nodes
            except InfeasibleError as error:
                self._even[key] = error
        found = self._even[key]
        if isinstance(found, InfeasibleError):
            raise found
        return found

    def _placed(self, inside: IntraStageSearch, mesh: Mesh, count: int, stages: Nodes) -> MeshTrial:
        """The best placement of stages as divided. Raises ConfigurationError for splits that are
        asked for and that a stage's devices cannot have.
        """
        problem = inside.problem
        known_s = self._known_s()
        least = self.bounds.divided_s(mesh, count, stages)
        if least >= known_s:
            return MeshTrial(mesh, count, least_s=least)
        skeleton = _unsplit(problem, mesh, stages)
        check_degrees(problem, inside.required, skeleton)
        found = list[MeshTrial]()
        refused = None
        try:
            for each in inside.placements(skeleton, known_s):
                if busy_s(each.costs, problem.micro_batches) >= known_s:
                    continue
                try:
                    seconds = quick_step_seconds(problem, each.placement, each.costs)
                    found.append(MeshTrial(mesh, count, seconds, each.placement))
                except InfeasibleError as error:
                    refused = error
        except InfeasibleError as error:
            return MeshTrial(mesh, count, refused=error)
        nothing = MeshTrial(mesh, count, refused=refused, least_s=0.0 if refused else known_s)
        return min(found, key=lambda each: each.step_s, default=nothing)

    def _known_s(self) -> float:
        return self.problem.known_s if self.best is None else self.best.step_s


def search_notes(outer: Outer, best: MeshTrial) -> tuple[str, ...]:
    """A line a factorisation, the best first: its step, or what speaks against it."""
    by_mesh: dict[str, list[MeshTrial]] = {}
    for each in sorted(outer.trials, key=lambda each: each.step_s):
        by_mesh.setdefault(each.mesh.name, []).append(each)
    notes = tuple(f"{name}: {_told(trials, best)}" for name, trials in by_mesh.items())
    reason = outer.undivided.get(best.mesh.name)
    return (*notes, f"the operators were divided in one line: {reason}") if reason else notes


def _told(trials: list[MeshTrial], best: MeshTrial) -> str:
    """Return the step of the fastest trial, which is the first one, or the reason why no trial has
    a step.
    """
    fastest = trials[0]
    step = (
        f"{_ms(fastest.step_s)} with {fastest.micro_batches} "
        f"micro-batch{'es' * (fastest.micro_batches > 1)}"
    )
    if fastest is best:
        return f"{step}, the best of {len(trials)} tried"
    if math.isfinite(fastest.step_s):
        return f"{step}, {fastest.step_s / best.step_s:.2f} times that" if best.step_s else step
    refused = next((each.refused for each in trials if each.refused), None)
    beaten = [each for each in trials if each.least_s]
    if beaten or refused is None:
        beaten = beaten or trials  # If no work takes time, each bound is 0.
        why = ", left out as time was up" if any(each.late for each in beaten) else ""
        return f"{_ms(min(each.least_s for each in beaten))} at least{why}"
    return str(refused).partition("\n")[0]


def _ms(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"


@dataclass(frozen=True, slots=True)
class TePDist:
    """Tries every way to share the devices among stages and the mesh of each, and splits every
    operator inside.

    The number of micro-batches is chosen, too, where it is open. What is best is what a step under
    1F1B, as it is simulated, takes least with.
    """

    level: LevelName = "O2"
    """How splits are searched inside a stage. `O2`: segments between critical operators, then the
    whole stage by dynamic programming. `O3`: all cones in one integer programme. `O4`: all
    operators in one.
    """
    stages: int | None = None
    """Pipeline stages, of equal groups of devices; all numbers that divide the devices are tried
    where it is open.
    """
    imbalance_tolerance: Annotated[float, FormerKey("unbalance")] = 0.08
    """Maximum compute time of a stage above the mean, as a fraction of the mean, in the partition
    that an integer program makes with the minimum bytes between stages. The contiguous partition
    with the fastest slowest stage, which is tried too, has no such limit.
    """

    name: ClassVar[str] = "tepdist"

    def division(self, graph: Graph) -> Division:
        return Division.OWN

    def requires(self, problem: Problem) -> None:
        """Raise ConfigurationError for options out of range, InfeasibleError for an empty model."""
        if self.imbalance_tolerance < 0:
            raise ConfigurationError(
                f"imbalance_tolerance is {self.imbalance_tolerance}",
                hint="set a fraction of at least 0, such as 0.08",
                where="strategy",
            )
        if self.stages is not None:
            # Groups of devices that constraints ask for need not be equal.
            asked = any(constraint.devices for constraint in problem.constraints)
            counts = sorted({mesh.stages for mesh in meshes(problem.cluster)})
            if self.stages < 1 or (self.stages not in counts and not asked):
                raise ConfigurationError(
                    f"stages is {self.stages}, and {problem.cluster.size} "
                    f"{plural(problem.cluster.size, 'device')} cannot be shared equally by so many",
                    hint=f"one of {', '.join(map(str, counts))}",
                    where="strategy.stages",
                )
        check_operators(problem)

    def run(self, problem: Problem) -> Placement:
        """The placement with the least simulated step. Raises InfeasibleError where memory holds
        none, ConfigurationError for constraints that cannot be followed.
        """
        found = best_order(problem, self._placed)
        count = len(found.stages)
        # Only some kinds of devices may have a stage, and then the option can have no such value.
        is_option = any(mesh.stages == count for mesh in meshes(problem.cluster))
        return (
            replace(found, options=(("stages", count),))
            if self.stages is None and is_option
            else found
        )

    def _placed(self, problem: Problem) -> Placement:
        resolved = resolved_constraints(problem, own_sizes=True)
        found = constrained_meshes(problem.cluster, self.stages, resolved)
        if not found:
            raise InfeasibleError(
                f"no equal groups of these devices make {self.stages} "
                f"{plural(self.stages or 0, 'stage')}"
            )
        end = None if problem.time_limit is None else time.monotonic() + problem.time_limit
        outer = Outer(
            problem,
            LEVELS[self.level](problem.time_limit, problem.solver),
            self.imbalance_tolerance,
            end,
        )
        best = outer.run(found, required_sizes(problem, resolved))
        assert best.placement is not None
        inside = outer.in_micro_batches(best.micro_batches)
        check_constraints_met(inside.problem, best.placement, self.name)
        proof = inside.proof(best.placement) if len(best.placement.stages) == 1 else None
        return replace(best.placement, proof=proof, notes=search_notes(outer, best))
