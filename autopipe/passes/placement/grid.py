"""The factorisation and the micro-batches under which a step is shortest.

The grid: the strategy and its options.

Lower bound and estimate of a factorisation, before any of its stages is made.

The factorisations of a cluster's devices into pipeline, data and tensor parallelism.

The problem on micro-batches of one size, and the placement of a factorisation there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.cluster import Cluster
from autopipe.ir.errors import REFUSALS, AutopipeError, ConfigurationError, InfeasibleError, ModelError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.constraints import ResolvedConstraint, required_sizes, resolved_constraints
from autopipe.passes.analysis.operators import SampleAxes, sample_axes
from autopipe.passes.analysis.stage_nodes import live_nodes
from autopipe.passes.batching import Division
from autopipe.passes.cost.measured import resized
from autopipe.passes.cost.memory import State, state_of, static_memory
from autopipe.passes.cost.memory_check import (
    check_operators,
    describe_kinds,
    device_memory,
    equal_device_runs,
    fitted,
    may_share,
    out_of_memory,
)
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.cost.stage_work import exchange_of_gradients
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.partition.chain_cut import cut_into_stages
from autopipe.passes.schedule.device_order import best_order
from autopipe.passes.schedule.limits import quick_step_seconds
from autopipe.passes.sharding.regions import (
    check_constraints_met,
    check_samples,
    settled_stages,
    visited,
    whole_group_splits,
    with_samples_split,
)


@dataclass(frozen=True, slots=True)
class Degrees:
    """`pipeline` groups of devices in a line, each of `data` replicas of `tensor` devices that share every layer.

    A replica's devices are neighbours. The replicas of a group are neighbours, too, so that the line goes along the
    slowest links; or, where `apart`, the groups of one replica are, so that only sums of gradients do.
    """

    pipeline: int
    data: int
    tensor: int
    apart: bool = False

    @property
    def width(self) -> int:
        """Devices of a group."""
        return self.data * self.tensor

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each group: replica by replica."""
        between, step = (self.tensor, self.pipeline * self.tensor) if self.apart else (self.width, self.tensor)
        return tuple(
            tuple(
                place * between + replica * step + device
                for replica in range(self.data)
                for device in range(self.tensor)
            )
            for place in range(self.pipeline)
        )

    def may_be_apart(self, cluster: Cluster) -> bool:
        """True if it makes a difference where replicas are."""
        return self.pipeline > 1 and self.data > 1 and cluster.node_count > 1

    def __str__(self) -> str:
        text = f"pipeline {self.pipeline} x data {self.data} x tensor {self.tensor}"
        return f"{text}, replicas apart" if self.apart else text


def factorisations(
    cluster: Cluster, pipeline: int | None = None, data: int | None = None, tensor: int | None = None
) -> Iterator[Degrees]:
    """Every factorisation with the degrees that are given, replicas neighbours.

    Where `tensor` is open it is at most the devices of a node: what layers exchange, all micro-batches long, is more
    than other links carry (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", 2021, section 3).
    """
    size = cluster.size
    for shared in [tensor] if tensor else range(1, min(size, cluster.devices_per_node) + 1):
        if size % shared:
            continue
        rest = size // shared
        for count in [pipeline] if pipeline else range(1, rest + 1):
            if rest % count or data not in (None, rest // count):
                continue
            yield Degrees(count, rest // count, shared)


@dataclass(frozen=True, slots=True, eq=False)
class Bounds:
    """Bounds for micro-batches of any size up to the problem's.

    A part of the samples is counted as that part of the work, parameters read included, and a launch: never too much.
    """

    problem: Problem
    chunks: int
    """Stages of each group."""
    is_live: NDArray[np.bool_]
    """True if a step runs a node."""
    state: State
    """Of all parameters, on one device."""
    _seconds: dict[int, float] = field(default_factory=dict)

    @staticmethod
    def of(problem: Problem, chunks: int) -> Bounds:
        """The bounds of a problem, for `chunks` stages a group."""
        is_live = np.isin(np.arange(len(problem.graph.nodes)), live_nodes(problem.graph, problem.wanted))
        state = state_of(problem, ((each.value.name, 1) for each in problem.graph.parameters))
        return Bounds(problem, chunks, is_live, state)

    def check_memory(self, degrees: Degrees) -> None:
        """Raise InfeasibleError where parameters and their state, shared out equally, are more than memory holds."""
        problem, state = self.problem, self.state
        copies = degrees.data if problem.optimizer.shard else 1
        parts = degrees.pipeline * degrees.tensor
        least = (state.parameter_bytes + state.gradient_bytes + state.optimizer_bytes // copies) // parts
        device = max(range(problem.cluster.size), key=problem.memory_of)
        if least > problem.memory_of(device):
            raise out_of_memory(problem, [0], degrees.pipeline, device, least, least=True)

    def estimate_s(self, degrees: Degrees, size: int) -> float:
        """About what a step takes where stages are even: filled, drained, gradients summed.

        Of p groups in a line each waits for those before it: they take (m + p - 1) / p times what the whole model takes
        of one of m micro-batches; with v stages a group the p - 1 are v times shorter.
        """
        filling = (degrees.pipeline - 1) / self.chunks
        rounds = (self.problem.batch_size / size + filling) / degrees.pipeline
        share = self.state.gradient_bytes / degrees.pipeline / degrees.tensor
        replicas = degrees.groups()[0][:: degrees.tensor]
        return rounds * self._work_s(degrees, size) + exchange_of_gradients(self.problem, replicas).seconds(share)

    def _work_s(self, degrees: Degrees, size: int) -> float:
        """Seconds of one micro-batch through the whole model, every node shared by a group's devices."""
        problem = self.problem
        parts = degrees.width * problem.micro_batch_size // size
        if parts not in self._seconds:
            again = problem.train and problem.recompute == "full"
            kinds = []
            for device in dict.fromkeys(problem.cluster.devices):
                forward, backward = node_seconds(problem.work, device, problem.precision, 1.0 / parts)
                kinds.append(forward * (1 + again) + (backward if problem.train else 0.0))
            self._seconds[parts] = float(np.where(self.is_live, np.minimum.reduce(kinds), 0.0).sum())
        return self._seconds[parts]


Nodes = tuple[tuple[int, ...], ...]
"""The nodes of each stage, ascending."""


@dataclass(frozen=True, slots=True, eq=False)
class SizedProblem:
    """Facts on micro-batches of one size."""

    problem: Problem
    samples: SampleAxes
    resolved: tuple[ResolvedConstraint, ...]

    @staticmethod
    def of(problem: Problem, size: int) -> SizedProblem:
        """Raises ConfigurationError or ModelError where there can be no micro-batches of `size` samples."""
        own = resized(problem, size)
        return SizedProblem(own, sample_axes(own.graph), resolved_constraints(own))

    def placement(self, degrees: Degrees, chunks: int, wave: bool) -> Placement:
        """The stages of a factorisation, recomputing where all are to.

        Raises InfeasibleError where replicas cannot share the samples, or the operators are too few.
        """
        problem = self.problem
        check_samples(problem, degrees.data, "grid")
        groups = visited(degrees.groups(), chunks, wave)
        settled = settled_stages(self.resolved, groups, "grid") if self.resolved else {}
        again = problem.train and problem.recompute == "full"
        shared = self._shared_by(degrees)
        stages = []
        for nodes, group in zip(cut_into_stages(problem, groups, settled, degrees.data), groups, strict=True):
            own = {node: shared[node] for node in nodes if node in shared}
            splits = with_samples_split(self.samples, nodes, degrees.data, own)
            stages.append(Stage(nodes, group, problem.micro_batch_size, splits, again))
        return Placement(tuple(stages))

    def _shared_by(self, degrees: Degrees) -> dict[int, tuple[Split, ...]]:
        """The splits of the nodes that a replica's devices share."""
        found = whole_group_splits(self.problem.graph, degrees.data, degrees.tensor)
        if not found and degrees.tensor > 1:
            raise InfeasibleError(f"{degrees.tensor} devices can share no layer", where="strategy.tensor")
        return found


_TASKS = 2**14
"""The most stages times micro-batches that are tried first: one sample at a time may mean tens of thousands of
micro-batches, whose step takes long to tell."""

_CLOSE = 1.1
"""By how much longer than the best, as a factor, a step may be predicted to be and is looked into nevertheless."""


@dataclass(frozen=True, slots=True)
class GridTrial:
    """A placement that memory holds, and its step."""

    degrees: Degrees
    size: int
    placement: Placement
    step_s: float
    memory: tuple[tuple[int, int, int], ...]
    """Of each device, but equal ones once: bytes whatever the micro-batches, bytes that grow with them, the limit."""

    def fits(self, size: int) -> bool:
        """True if memory should hold the same with micro-batches of `size` samples."""
        return all(fixed + grows * size / self.size <= limit for fixed, grows, limit in self.memory)


@dataclass(frozen=True, slots=True)
class Factorisation:
    """A factorisation with the sizes of micro-batches that it may have, ascending, and an estimate of the step with
    each."""

    degrees: Degrees
    sizes: tuple[int, ...]
    estimates: tuple[float, ...]
    soon: int
    """The size to be tried first: the smallest that does not make too many tasks."""

    def promise(self, first: GridTrial) -> tuple[int, float]:
        """Of the sizes that memory should hold the place of the best, and its step: as much longer than that of the
        size which was tried first as estimates say."""
        tried = self.sizes.index(first.size)
        places = [place for place, size in enumerate(self.sizes) if first.fits(size)]
        best = min(places, key=self.estimates.__getitem__, default=tried)
        return best, first.step_s * self.estimates[best] / self.estimates[tried]


def _walk_of(bounds: Bounds, degrees: Degrees, sizes: Sequence[int]) -> Factorisation | None:
    """None where no size can be shared by the replicas."""
    own = tuple(size for size in sizes if size % degrees.data == 0)
    if not own:
        return None
    most = max(1, _TASKS // (degrees.pipeline * bounds.chunks))
    soon = next((size for size in own if bounds.problem.batch_size <= most * size), own[-1])
    return Factorisation(degrees, own, tuple(bounds.estimate_s(degrees, size) for size in own), soon)


@dataclass(slots=True, eq=False)
class GridSearch:
    """One search: the best trial so far, and the problem on micro-batches of the sizes that were looked into."""

    problem: Problem
    chunks: int
    wave: bool
    best: GridTrial | None = None
    refused: list[AutopipeError] = field(default_factory=list)
    _sized: dict[int, SizedProblem | AutopipeError] = field(default_factory=dict)
    _trials: dict[tuple[Degrees, int], GridTrial | None] = field(default_factory=dict)

    def run(self, every: Sequence[Degrees], sizes: Sequence[int]) -> Placement:
        """The best of all factorisations on micro-batches of any of `sizes` samples.

        First each with small micro-batches, but for those that memory cannot hold, and those whose estimate, which
        leaves out what layers exchange, is no shorter than the best step; then other sizes, where they promise most
        first; then the best with its replicas apart. Raises a reason where there is no placement.
        """
        bounds = Bounds.of(self.problem, self.chunks)
        walks = {degrees: _walk_of(bounds, degrees, sizes) for degrees in every}
        begun = []
        for walk in sorted(filter(None, walks.values()), key=lambda each: min(each.estimates)):
            if min(walk.estimates) < self._best_s() and self._has_room(bounds, walk.degrees):
                # Memory may hold the smallest where it refuses larger ones.
                first = self._try(walk.degrees, walk.soon) or self._try(walk.degrees, walk.sizes[0])
                if first is not None:
                    begun.append((walk, *walk.promise(first)))
        for walk, start, promised_s in sorted(begun, key=lambda each: each[2]):
            if promised_s <= _CLOSE * self._best_s():
                self._go(walk, start)
        if self.best is None:
            raise self._reason(every, sizes)
        if self.best.degrees.may_be_apart(self.problem.cluster):
            self._try(replace(self.best.degrees, apart=True), self.best.size)
        return self.best.placement

    def _go(self, walk: Factorisation, start: int) -> None:
        """Try micro-batches of the size that promises most, and larger and smaller ones as long as that helps."""
        middle = self._try(walk.degrees, walk.sizes[start])
        for places in (range(start + 1, len(walk.sizes)), range(start - 1, -1, -1)):
            last = middle
            for place in places:
                last = self._shorter(walk.degrees, walk.sizes[place], last)
                if last is None:
                    break

    def _has_room(self, bounds: Bounds, degrees: Degrees) -> bool:
        """True if memory may hold the parameters and their state."""
        try:
            bounds.check_memory(degrees)
        except InfeasibleError as error:
            self.refused.append(error)
            return False
        return True

    def _shorter(self, degrees: Degrees, size: int, last: GridTrial | None) -> GridTrial | None:
        """The trial of another size where it is shorter than the last one."""
        found = self._try(degrees, size)
        return found if found and (last is None or found.step_s < last.step_s) else None

    def _try(self, degrees: Degrees, size: int) -> GridTrial | None:
        """The placement on micro-batches of that size, tried once; None where there is none."""
        key = degrees, size
        if key not in self._trials:
            self._trials[key] = None
            try:
                found = self._trials[key] = self._trial(self._of(size), degrees)
            except REFUSALS as error:
                self.refused.append(error)
            else:
                self.best = found if found.step_s < self._best_s() else self.best
        return self._trials[key]

    def _trial(self, sized: SizedProblem, degrees: Degrees) -> GridTrial:
        problem = sized.problem
        placement = fitted(problem, sized.placement(degrees, self.chunks, self.wave))
        costs = stage_costs(problem, placement)
        step_s = quick_step_seconds(problem, placement, costs)
        used, fixed = device_memory(problem, placement, costs), static_memory(problem, placement)
        limits = (problem.memory_of(device) for device in range(problem.cluster.size))
        memory = {(held, most - held, limit) for held, most, limit in zip(fixed, used, limits, strict=True)}
        return GridTrial(degrees, problem.micro_batch_size, placement, step_s, tuple(sorted(memory)))

    def _best_s(self) -> float:
        return math.inf if self.best is None else self.best.step_s

    def _of(self, size: int) -> SizedProblem:
        if size not in self._sized:
            try:
                self._sized[size] = SizedProblem.of(self.problem, size)
            except (ConfigurationError, ModelError) as error:
                self._sized[size] = error
        found = self._sized[size]
        if isinstance(found, AutopipeError):
            raise found
        return found

    def _reason(self, every: Sequence[Degrees], sizes: Sequence[int]) -> AutopipeError:
        """Why there is no placement: what is said of the last candidate, which shares memory the most mostly."""
        if self.refused:
            return self.refused[-1]
        least = min((degrees.data for degrees in every), default=1)
        return InfeasibleError(
            f"grid cannot share a micro-batch of {sizes[-1]} samples equally among {least} replicas",
            hint="choose a micro-batch size that the replicas divide, or other degrees",
        )


@dataclass(frozen=True, slots=True)
class Grid:
    """Multiplies pipeline, data and tensor parallelism, as experts run large models: the product is all devices.

    The operators, in a line, are cut into even stages. Inside a stage, replicas share the samples, and the devices of
    a replica share heads, columns and vocabulary (Narayanan et al., "Efficient Large-Scale Language Model Training on
    GPU Clusters Using Megatron-LM", 2021). Degrees that are open, and the size of micro-batches, are those with
    the shortest simulated step under 1F1B.
    """

    pipeline: int | None = None
    """Groups of devices in a line, each with a part of the layers."""
    data: int | None = None
    """Replicas in each group, which share samples."""
    tensor: int | None = None
    """Devices that share each layer; those of one node at most where it is open."""
    chunks: int = 1
    """Stages of each group, which the line passes again and again, as interleaved schedules want it."""
    wave: bool = False
    """True if it passes the groups back and forth instead, as V-shaped schedules want it."""

    name: ClassVar[str] = "grid"

    def division(self, graph: Graph) -> Division:
        """It chooses the size of micro-batches."""
        return Division.OWN

    def requires(self, problem: Problem) -> None:
        """Raise ConfigurationError for options out of range or at odds, InfeasibleError for an empty model."""
        for option in ("pipeline", "data", "tensor", "chunks"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ConfigurationError(f"{option} is {value}", hint="it must be at least 1", where="strategy")
        if self.wave and self.chunks < 2:
            raise ConfigurationError("wave is for chunks: 2 or more", hint="set chunks to 2", where="strategy.wave")
        self._check_product(problem.cluster.size)
        check_operators(problem)

    def _check_product(self, devices: int) -> None:
        given = {name: value for name in ("pipeline", "data", "tensor") if (value := getattr(self, name)) is not None}
        product = math.prod(given.values())
        if devices % product or (len(given) == 3 and product != devices):
            named = " x ".join(f"{name} {value}" for name, value in given.items())
            wanted = "make" if len(given) == 3 else "divide"
            raise ConfigurationError(
                f"{named} is {product}, which does not {wanted} the {devices} devices",
                hint="leave one of pipeline, data and tensor open",
                where="strategy",
            )

    def run(self, problem: Problem) -> Placement:
        """The placement with the shortest step.

        Raises InfeasibleError where memory holds none, ConfigurationError for constraints that it does not fulfil.
        """
        return best_order(problem, self._placed)

    def _placed(self, problem: Problem) -> Placement:
        resolved = resolved_constraints(problem)
        degrees = tuple(factorisations(problem.cluster, self.pipeline, self.data, self.tensor))
        if len(equal_device_runs(problem.cluster)) > 1:
            degrees = tuple(each for each in degrees if all(may_share(problem, group) for group in each.groups()))
            if not degrees:
                raise InfeasibleError(
                    "grid's groups are equal, and with these degrees one would have devices of different kinds: "
                    f"{describe_kinds(problem.cluster, range(problem.cluster.size))}",
                    hint="set cluster.straddle to true, or take other degrees",
                )
        placement = GridSearch(problem, self.chunks, self.wave).run(degrees, required_sizes(problem, resolved))
        check_constraints_met(problem, placement, self.name)
        return placement
