"""The outer search: the factorisations of a cluster's devices into stages and the mesh of each, a bound and an estimate
of each before any of its splits are searched, and the micro-batches under which its step is shortest.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Cluster, Device
from autopipe.ir.errors import REFUSALS, AutopipeError, ConfigurationError, InfeasibleError, ModelError
from autopipe.ir.placement import Placement, Stage, stage_edges
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.constraints import ResolvedConstraint, required_splits, resolved_constraints
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.analysis.stage_nodes import live_nodes
from autopipe.passes.batching import divisors
from autopipe.passes.cost.measured import resized
from autopipe.passes.cost.memory import state_of
from autopipe.passes.cost.memory_check import equal_device_runs, out_of_memory
from autopipe.passes.cost.roofline import accumulate_per_byte, node_seconds
from autopipe.passes.cost.stage_work import exchange_of_gradients
from autopipe.passes.partition.chain_cut import cut_into_stages
from autopipe.passes.partition.min_cut_ilp import divide
from autopipe.passes.placement.tepdist.intra_stage import IntraStageSearch
from autopipe.passes.placement.tepdist.levels import Level
from autopipe.passes.schedule.limits import busy_s, quick_step_seconds
from autopipe.passes.sharding.configurations import Splits
from autopipe.passes.sharding.regions import check_degrees, settled_stages


@dataclass(frozen=True, slots=True)
class Mesh:
    """The devices of each stage, in the order in which splits count them: what is split outermost, samples first, goes
    over the outer level of the mesh."""

    groups: tuple[tuple[int, ...], ...]
    name: str
    """Stages and the levels of each one's mesh, such as `2 stages of 2 x 4 devices`."""

    @property
    def stages(self) -> int:
        return len(self.groups)


def meshes(cluster: Cluster, stages: int | None = None) -> Iterator[Mesh]:
    """Every way to make equal groups of all devices, into `stages` stages where that is given.

    Groups are neighbours in the cluster, so that a stage's mesh lies in one node where it can. One of several whole
    nodes has two levels, and both orders of them: nodes outside, so that samples are shared among nodes and other axes
    within one, and the other way around. Where devices are of several kinds, groups are equal within each kind.
    """
    runs = equal_device_runs(cluster)
    # The widest groups first, so that few stages come first.
    for widths in itertools.product(*(divisors(len(run))[::-1] for run in runs)):
        count = sum(len(run) // width for run, width in zip(runs, widths, strict=True))
        if stages not in (None, count):
            continue
        ways = [_ways(cluster, run, width) for run, width in zip(runs, widths, strict=True)]
        yield _mesh([way[0] for way in ways])
        if any(len(way) > 1 for way in ways):
            yield _mesh([way[-1] for way in ways])


_Groups = tuple[tuple[int, ...], ...]


def _ways(cluster: Cluster, run: range, width: int) -> list[tuple[_Groups, str]]:
    """The ways to count the devices of equal groups of a run, along nodes, and across where it has whole ones; and the
    extents of each one's mesh, such as `2 x 4`.
    """
    groups = tuple(tuple(range(first, first + width)) for first in range(run.start, run.stop, width))
    first, levels = cluster.part(run.start)
    of_node = levels[0].size
    nodes, rest = divmod(width, of_node)
    if nodes <= 1 or rest or of_node == 1 or cluster.part(run.stop - 1)[0] != first:
        return [(groups, str(width))]
    crossed = tuple(
        tuple(group[node * of_node + place] for place in range(of_node) for node in range(nodes)) for group in groups
    )
    return [(groups, f"{nodes} x {of_node}"), (crossed, f"{of_node} x {nodes}")]


def _mesh(parts: Sequence[tuple[_Groups, str]]) -> Mesh:
    names = " and ".join(
        f"{len(groups)} stage{'s' * (len(groups) > 1)} of {levels} device{'s' * (len(groups[0]) > 1)}"
        for groups, levels in parts
    )
    return Mesh(tuple(group for groups, _ in parts for group in groups), names)


def constrained_meshes(
    cluster: Cluster, stages: int | None, resolved: Sequence[ResolvedConstraint]
) -> tuple[Mesh, ...]:
    """The meshes of `cluster`, into `stages` stages where that is given, that constraints leave.

    Where they ask for devices, each group asked for is a stage's, in the order asked for: in equal groups of all
    devices, or in stages of just these groups, which need not be equal. Raises ConfigurationError, naming a constraint,
    where no mesh has them.
    """
    found = tuple(meshes(cluster, stages))
    asked = _groups(resolved)
    if not asked:
        return found
    by_members = {frozenset(group): group for group in asked}
    with_them = [
        replace(mesh, groups=tuple(by_members.get(frozenset(group), group) for group in mesh.groups))
        for mesh in found
        if by_members.keys() <= set(map(frozenset, mesh.groups))
    ]
    if not with_them and stages in (None, len(asked)):
        of_them = Mesh(tuple(asked), f"{len(asked)} stage{'s' if len(asked) > 1 else ''} as asked for")
        with_them = [of_them] if sum(map(len, asked)) == len({device for group in asked for device in group}) else []
    if with_them:
        return tuple(dict.fromkeys(with_them))
    constraint = next(each for each in resolved if each.devices is not None)
    many = f" with {stages} stages" if stages else ""
    raise ConfigurationError(
        f"{constraint} asks for devices {list(constraint.devices or ())}, which no stage can have{many}",
        hint="stages have equal groups of neighbours, or just the groups asked for, if no two of them overlap; "
        "strategy manual follows any constraint",
    )


def _groups(resolved: Sequence[ResolvedConstraint]) -> list[tuple[int, ...]]:
    """The groups of devices, each once, by the stage that is asked for with them, else by their first node."""
    ranks: dict[frozenset[int], tuple[tuple[int, int], tuple[int, ...]]] = {}
    for each in resolved:
        if each.devices is not None:
            stage = each.constraint.stage
            rank = (each.nodes[0], 0) if stage is None else (-1, stage)
            members = frozenset(each.devices)
            before, group = ranks.get(members, (rank, each.devices))
            ranks[members] = min(before, rank), group
    return [group for _, group in sorted(ranks.values())]


Nodes = tuple[tuple[int, ...], ...]
"""The nodes of each stage, ascending."""

Divide = Callable[[Problem, Mesh, dict[int, int]], Nodes]
"""Divides a problem's nodes among the stages of a mesh, some nodes in stages that are asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class SizedProblem:
    """Facts on micro-batches of one size."""

    problem: Problem
    resolved: tuple[ResolvedConstraint, ...]
    required: dict[int, Splits]
    """The splits that constraints ask for, by node."""
    insides: IntraStageSearch

    @staticmethod
    def of(problem: Problem, size: int, solver: Level) -> SizedProblem:
        """The problem on micro-batches of `size` samples.

        Raises ConfigurationError or ModelError where there can be none, and for constraints that cannot be followed.
        """
        own = resized(problem, size)
        resolved = resolved_constraints(own)
        required = required_splits(resolved, sample_axes(own.graph)) if resolved else {}
        return SizedProblem(own, resolved, required, IntraStageSearch.of(own, solver))

    def stages(self, mesh: Mesh, divide: Divide) -> Nodes:
        """The nodes of each stage. Raises ConfigurationError for constraints that the mesh cannot follow."""
        return divide(self.problem, mesh, settled_stages(self.resolved, mesh.groups, "this number of stages"))

    def placements(self, mesh: Mesh, stages: Nodes, limit_s: float) -> list[tuple[float, Placement]]:
        """Seconds of a step and the placement, for each way to split the stages that memory holds.

        Those are left out whose stages alone are busy for `limit_s`.

        Raises ConfigurationError for splits that are asked for and that a stage's devices cannot have, InfeasibleError
        where memory holds none, with the least excess.
        """
        again = self.problem.train and self.problem.recompute == "full"
        skeleton = Placement(
            tuple(
                Stage(nodes, group, self.problem.micro_batch_size, recompute=again)
                for nodes, group in zip(stages, mesh.groups, strict=True)
            )
        )
        check_degrees(self.problem, self.required, skeleton)
        found, refused = [], None
        for each in self.insides.placements(skeleton, self.required, limit_s):
            if busy_s(each.costs, self.problem.micro_batches) >= limit_s:
                continue
            try:
                found.append((quick_step_seconds(self.problem, each.placement, each.costs), each.placement))
            except InfeasibleError as error:
                refused = error
        if not found and refused is not None:
            raise refused
        return found


_Floats = NDArray[np.float64]

_Kind = tuple[tuple[Device, ...], int]
"""Signature of a group of devices: their kinds, and how many they are."""


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """Bounds for micro-batches of any size up to the problem's.

    A part of the samples is counted as that part of the work, parameters read included, and a launch: never too much.
    """

    problem: Problem
    is_live: NDArray[np.bool_]
    """True if a step runs a node."""
    _seconds: dict[tuple[_Kind, int], _Floats] = field(default_factory=dict)

    @staticmethod
    def of(problem: Problem) -> Bounds:
        live = live_nodes(problem.graph, problem.wanted)
        return Bounds(problem, np.isin(np.arange(len(problem.graph.nodes)), live))

    def step_s(self, mesh: Mesh, micro_batches: int) -> float:
        """Seconds that no step can be shorter than: the fullest stage does a fair part of the work at least.

        Whatever stages weigh, that one takes as long as their weighted mean at least, and so does, node by node, where
        the node weighs least: the weights are the stages' speeds.
        """
        kinds = self._kinds(mesh)
        if len(kinds) == 1:
            (kind,) = kinds
            return micro_batches * self._work_s(kind, micro_batches) / mesh.stages
        seconds = [self._node_s(kind, micro_batches) for kind in kinds]
        speeds = [1 / float(each.sum()) for each in seconds]
        whole = sum(speed * count for speed, count in zip(speeds, map(len, kinds.values()), strict=True))
        least = np.minimum.reduce([speed / whole * each for speed, each in zip(speeds, seconds, strict=True)])
        return micro_batches * float(least.sum())

    def divided_s(self, mesh: Mesh, micro_batches: int, stages: Sequence[Sequence[int]]) -> float:
        """The same where it is known which nodes a stage has: all of it in turn, as fast as its devices compute.

        Before its first task a micro-batch comes through the stages before it, and after its last goes back.
        """
        problem = self.problem
        groups = zip(stages, mesh.groups, strict=True)
        placement = Placement(tuple(Stage(tuple(nodes), group, problem.micro_batch_size) for nodes, group in groups))
        kinds = map(self._kind, mesh.groups)
        own = [
            float(self._node_s(kind, micro_batches)[list(nodes)].sum())
            for kind, nodes in zip(kinds, stages, strict=True)
        ]
        before = [0.0] * len(own)
        for source, target in stage_edges(problem.graph, placement):
            before[target] = max(before[target], before[source] + own[source])
        return max(micro_batches * each + way for each, way in zip(own, before, strict=True))

    def estimate_s(self, mesh: Mesh, micro_batches: int) -> float:
        """About what a step takes where stages are even: filled, drained, gradients added up and summed by samples.

        Of stages in a row that take equally long each waits for those before it: p of them take m + p - 1 times what
        each takes of one of m micro-batches.
        """
        kinds = self._kinds(mesh)
        even = 1 / sum(len(groups) / self._work_s(kind, micro_batches) for kind, groups in kinds.items())
        names = ((parameter.value.name, 1) for parameter in self.problem.graph.parameters)
        share = state_of(self.problem, names).gradient_bytes / mesh.stages
        end = max(self._end_s(groups[0], micro_batches, share) for groups in kinds.values())
        return (micro_batches + mesh.stages - 1) * even + end

    def _end_s(self, group: Sequence[int], micro_batches: int, share: float) -> float:
        """Seconds of adding up `share` bytes of gradients, split evenly, and of summing them by samples, whole."""
        slowest = max(accumulate_per_byte(device) for device in self.problem.cluster.kinds_among(group))
        gradients = exchange_of_gradients(self.problem, group).seconds(share)
        return gradients + (micro_batches - 1) * slowest * share / len(group)

    def check_memory(self) -> None:
        """Raise InfeasibleError where parameters and their state, shared by all devices, are more than memory holds."""
        problem = self.problem
        names = [parameter.value.name for parameter in problem.graph.parameters]
        least = state_of(problem, ((name, 1) for name in names)).total // problem.cluster.size
        device = max(range(problem.cluster.size), key=problem.memory_of)
        if least > problem.memory_of(device):
            raise out_of_memory(problem, [0], 1, device, least, least=True)

    def _kinds(self, mesh: Mesh) -> dict[_Kind, list[tuple[int, ...]]]:
        """The groups of each kind."""
        found: dict[_Kind, list[tuple[int, ...]]] = {}
        for group in mesh.groups:
            found.setdefault(self._kind(group), []).append(group)
        return found

    def _kind(self, group: Sequence[int]) -> _Kind:
        return self.problem.cluster.kinds_among(group), len(group)

    def _work_s(self, kind: _Kind, micro_batches: int) -> float:
        """Seconds of one micro-batch through the whole model, every node shared by such a group."""
        return float(self._node_s(kind, micro_batches).sum())

    def _node_s(self, kind: _Kind, micro_batches: int) -> _Floats:
        """The same of each node, on the fastest device of the group."""
        problem, (devices, width) = self.problem, kind
        parts = width * micro_batches // problem.micro_batches
        if (kind, parts) not in self._seconds:
            again = problem.train and problem.recompute == "full"
            each = []
            for device in devices:
                forward, backward = node_seconds(problem.work, device, problem.precision, 1.0 / parts)
                each.append(forward * (1 + again) + (backward if problem.train else 0.0))
            self._seconds[kind, parts] = np.where(self.is_live, np.minimum.reduce(each), 0.0)
        return self._seconds[kind, parts]


@dataclass(frozen=True, slots=True)
class MeshTrial:
    """Result of a factorisation with one number of micro-batches."""

    mesh: Mesh
    micro_batches: int
    step_s: float = math.inf
    """Seconds of a step; infinite where no placement was found."""
    placement: Placement | None = None
    least_s: float = 0.0
    """Seconds that no step can be shorter than, where it was looked into no further."""
    late: bool = False
    """True if that was for want of time."""
    refused: AutopipeError | None = None
    """Reason why it has no step."""


@dataclass(slots=True, eq=False)
class Outer:
    """One outer search: what it has tried, and the best of that."""

    bounds: Bounds
    solver: Level
    divisions: Sequence[Divide]
    """Ways to divide the nodes among stages, each of which is tried."""
    end: float | None = None
    """When to stop, by `time.monotonic`, once there is a placement."""
    tried: list[MeshTrial] = field(default_factory=list)
    best: MeshTrial | None = None
    undivided: dict[str, str] = field(default_factory=dict)
    """By a factorisation's name why not all ways to divide the nodes were possible; empty where they were."""
    _sized: dict[int, SizedProblem | AutopipeError] = field(default_factory=dict)

    def run(self, meshes: Iterable[Mesh], sizes: Iterable[int]) -> MeshTrial:
        """The best of all `meshes` on micro-batches of `sizes` samples.

        Raises the reason against the most promising of them where none has a placement.
        """
        counts = sorted(self.bounds.problem.batch_size // size for size in sizes)
        estimates = {mesh: [self.bounds.estimate_s(mesh, count) for count in counts] for mesh in meshes}
        for mesh in sorted(estimates, key=lambda each: min(estimates[each])):
            self._walk(mesh, counts, estimates[mesh])
        if self.best is None:
            raise self._reason()
        return self.best

    def _walk(self, mesh: Mesh, counts: Sequence[int], estimates: Sequence[float]) -> None:
        """Try numbers of micro-batches from the most promising one on, up and then down, as long as that helps."""
        start = min(range(len(counts)), key=estimates.__getitem__)
        first = last = self._try(mesh, counts[start])
        for count in counts[start + 1 :]:
            found = self._try(mesh, count)
            # Smaller micro-batches may fit into memory where larger ones do not.
            if found.step_s >= last.step_s and last.refused is None:
                break
            last = found
        last = first
        for count in () if isinstance(first.refused, InfeasibleError) else counts[:start][::-1]:
            found = self._try(mesh, count)
            if found.step_s >= last.step_s:
                break
            last = found

    def _try(self, mesh: Mesh, count: int) -> MeshTrial:
        try:
            found = self._answer(mesh, count)
        except REFUSALS as error:
            found = MeshTrial(mesh, count, refused=error)
        self.tried.append(found)
        if found.placement is not None and found.step_s < self._known_s():
            self.best = found
        return found

    def _answer(self, mesh: Mesh, count: int) -> MeshTrial:
        """The best placement, or why it is not worth looking for."""
        least = self.bounds.step_s(mesh, count)
        late = self.best is not None and self.end is not None and time.monotonic() > self.end
        if late or least >= self._known_s():
            return MeshTrial(mesh, count, least_s=least, late=late)
        sized = self.of(count)
        found = [self._placed(sized, mesh, count, stages) for stages in self._divided(sized, mesh)]
        return min(found, key=lambda each: (each.step_s, each.refused is not None))

    def _placed(self, sized: SizedProblem, mesh: Mesh, count: int, stages: Nodes) -> MeshTrial:
        """The best placement of stages as divided."""
        least = self.bounds.divided_s(mesh, count, stages)
        if least >= self._known_s():
            return MeshTrial(mesh, count, least_s=least)
        try:
            found = sized.placements(mesh, stages, self._known_s())
        except InfeasibleError as error:
            return MeshTrial(mesh, count, refused=error)
        step_s, placement = min(found, key=lambda each: each[0], default=(math.inf, None))
        return MeshTrial(mesh, count, step_s, placement, 0.0 if found else self._known_s())

    def _divided(self, sized: SizedProblem, mesh: Mesh) -> Iterable[Nodes]:
        """The divisions that there are, each once. Raises the first one's reason where there is none."""
        found: dict[Nodes, None] = {}
        refused: dict[str, InfeasibleError] = {}
        for division in self.divisions:
            try:
                found[sized.stages(mesh, division)] = None
            except InfeasibleError as error:
                refused[error.message] = error
        self.undivided.setdefault(mesh.name, "; ".join(refused))
        if not found:
            raise next(iter(refused.values()))
        return found

    def _known_s(self) -> float:
        return self.bounds.problem.known_s if self.best is None else self.best.step_s

    def of(self, count: int) -> SizedProblem:
        """The problem in `count` micro-batches. Raises ConfigurationError or ModelError where there is none."""
        if count not in self._sized:
            try:
                self._sized[count] = SizedProblem.of(
                    self.bounds.problem, self.bounds.problem.batch_size // count, self.solver
                )
            except (ConfigurationError, ModelError) as error:
                self._sized[count] = error
        found = self._sized[count]
        if isinstance(found, AutopipeError):
            raise found
        return found

    def _reason(self) -> AutopipeError:
        """Why there is no placement: memory, if it is that somewhere, else what is said of the most promising."""
        refusals = [each.refused for each in self.tried if each.refused is not None]
        if self.bounds.problem.known_s < math.inf:
            refusals.append(InfeasibleError(f"no step is shorter than {self.bounds.problem.known_s:.6g} s"))
        assert refusals, "there is a placement, or a reason against each"
        return next((each for each in refusals if isinstance(each, InfeasibleError)), refusals[0])


_PATIENCE_S = 10.0
"""For one integer program, where there is no time limit: one of 96 layers in 16 stages takes three on an idle core."""


def linear_cut(problem: Problem, mesh: Mesh, settled: dict[int, int]) -> Nodes:
    """The stages of the operators in one line, the slowest as fast as it can be."""
    return cut_into_stages(problem, mesh.groups, settled)


@dataclass(frozen=True, slots=True, eq=False)
class LeastCrossing:
    """Even stages between which the fewest bytes cross, once for each number of stages: samples do not change it."""

    unbalance: float
    time_limit: float | None
    _known: dict[Hashable, Nodes | InfeasibleError] = field(default_factory=dict)

    def __call__(self, problem: Problem, mesh: Mesh, settled: dict[int, int]) -> Nodes:
        """The nodes of each stage. Raises InfeasibleError where the limit allows none, with the least that does."""
        if len({problem.cluster.devices[group[0]] for group in mesh.groups}) > 1:
            raise InfeasibleError("the integer program makes stages even, and their devices are of different kinds")
        key = mesh.stages, tuple(sorted(settled.items()))
        if key not in self._known:
            try:
                self._known[key] = self._divided(problem, mesh, settled)
            except InfeasibleError as error:
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, InfeasibleError):
            raise found
        return found

    def _divided(self, problem: Problem, mesh: Mesh, settled: dict[int, int]) -> Nodes:
        if mesh.stages == 1:
            return (tuple(range(len(problem.graph.nodes))),)
        limit = _PATIENCE_S if self.time_limit is None else min(_PATIENCE_S, self.time_limit)
        return divide(problem, mesh.stages, self.unbalance, settled, limit).nodes
