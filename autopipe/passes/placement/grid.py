"""The grid of pipeline, data and tensor parallelism: the factorisation and the micro-batches with
the shortest step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Annotated, ClassVar

from autopipe.ir.cluster import Cluster
from autopipe.ir.codec import FormerKey
from autopipe.ir.errors import (
    REFUSALS,
    AutopipeError,
    ConfigurationError,
    InfeasibleError,
    OutOfMemoryError,
)
from autopipe.ir.graph import Graph
from autopipe.ir.memo import once_each
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.ir.words import plural
from autopipe.passes.analysis.constraints import required_sizes, resolved_constraints
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.batching import Division, climb
from autopipe.passes.cost.measured import resized
from autopipe.passes.cost.memory import state_of, static_memory
from autopipe.passes.cost.memory_check import (
    check_operators,
    describe_kinds,
    device_memory,
    equal_device_runs,
    fitted,
    may_share,
    out_of_memory,
)
from autopipe.passes.cost.roofline import StepSeconds
from autopipe.passes.cost.stage_work import exchange_of_gradients
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.partition.chain_cut import partition_chain
from autopipe.passes.schedule.device_order import best_order
from autopipe.passes.schedule.limits import quick_step, quick_step_seconds
from autopipe.passes.sharding.regions import (
    STYLE_MARK,
    StageStyle,
    check_constraints_met,
    check_samples,
    constrained_stages,
    devices_of_chain,
    graph_group_splits,
    with_samples_split,
)


@dataclass(frozen=True, slots=True)
class Degrees:
    """`pipeline` groups of devices in a line, each of `data` replicas of `tensor` devices that
    share every layer.

    A replica's devices are neighbours. The replicas of a group are neighbours, too, so that the
    line goes along the slowest links; or, where `apart`, the groups of one replica are, so that
    only sums of gradients do.
    """

    pipeline: int
    data: int
    tensor: int
    apart: bool = False

    @property
    def width(self) -> int:
        return self.data * self.tensor

    def __str__(self) -> str:
        return f"pipeline {self.pipeline}, data {self.data}, tensor {self.tensor}"

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each group: replica by replica."""
        between, step = (
            (self.tensor, self.pipeline * self.tensor) if self.apart else (self.width, self.tensor)
        )
        inside = [
            replica * step + device for replica in range(self.data) for device in range(self.tensor)
        ]
        return tuple(
            tuple(place * between + device for device in inside) for place in range(self.pipeline)
        )


def factorisations(
    cluster: Cluster,
    pipeline: int | None = None,
    data: int | None = None,
    tensor: int | None = None,
) -> Iterator[Degrees]:
    """Every factorisation with the degrees that are given, replicas neighbours.

    Where `tensor` is open it is at most the devices of a node: what layers exchange, all
    micro-batches long, is more than other links carry (Narayanan et al., "Efficient Large-Scale
    Language Model Training on GPU Clusters Using Megatron-LM", 2021, section 3).
    """
    size = cluster.size
    for shared in [tensor] if tensor else range(1, min(size, cluster.devices_per_node) + 1):
        rest = 0 if size % shared else size // shared
        for count in [pipeline] if pipeline else range(1, rest + 1):
            if rest and rest % count == 0 and data in (None, rest // count):
                yield Degrees(count, rest // count, shared)


def place(
    problem: Problem,
    degrees: Degrees,
    stages_per_rank: int,
    style: StageStyle,
    opposite: bool = False,
) -> Placement:
    """The stages of a factorisation on the problem's micro-batches, recomputing where all are to.

    With `opposite`, a second pipeline has the same stages on the groups in reverse order. Raises
    InfeasibleError where replicas cannot share the samples, or the operators are too few.
    """
    check_samples(problem, degrees.data, "grid")
    groups = devices_of_chain(degrees.groups(), stages_per_rank, style)
    settled = (
        constrained_stages(resolved_constraints(problem), groups, "grid")
        if problem.constraints
        else {}
    )
    shared = graph_group_splits(problem.graph, degrees.data, degrees.tensor)
    if not shared and degrees.tensor > 1:
        raise InfeasibleError(
            f"{degrees.tensor} {plural(degrees.tensor, 'device')} can share no layer",
            where="strategy.tensor",
        )
    samples = sample_axes(problem.graph)
    stages = []
    for nodes, group in zip(
        partition_chain(problem, groups, settled, degrees.data), groups, strict=True
    ):
        own = {node: shared[node] for node in nodes if node in shared}
        splits = with_samples_split(samples, nodes, degrees.data, own)
        stages.append(Stage(nodes, group, problem.micro_batch_size, splits, problem.recomputes_all))
    if opposite:
        pairs = zip(stages, reversed(groups), strict=True)
        stages += [replace(stage, devices=group, pipeline=1) for stage, group in pairs]
    return Placement(tuple(stages))


_TASKS = 2**14
"""The most stages times micro-batches that are tried first: one sample at a time may mean tens of
thousands of micro-batches, whose step takes long to tell.
"""

_CLOSE = 1.1
"""By how much longer than the best, as a factor, a step may be predicted to be and is looked into
nevertheless.
"""


@dataclass(frozen=True, slots=True)
class GridTrial:
    """A placement that memory holds, and its step."""

    degrees: Degrees
    size: int
    placement: Placement
    step_s: float
    memory: tuple[tuple[int, int, int], ...]
    """Of each device, but equal ones once: bytes whatever the micro-batches, bytes that grow with
    them, the limit.
    """

    def fits(self, size: int) -> bool:
        """True if memory should hold the same with micro-batches of `size` samples."""
        return all(fixed + grows * size / self.size <= limit for fixed, grows, limit in self.memory)


class GridSearch:
    """One search: the best trial so far, and why others were refused. Each group has
    `stages_per_rank` stages per pipeline.
    """

    def __init__(
        self,
        problem: Problem,
        stages_per_rank: int,
        style: StageStyle,
        opposite: bool = False,
    ) -> None:
        self.problem = problem
        self.stages_per_rank = stages_per_rank
        self.style = style
        self.opposite = opposite
        self.best: GridTrial | None = None
        self.refused: list[AutopipeError] = []
        self.sized = once_each(partial(resized, problem))
        self._seconds = StepSeconds(problem)
        self._state = state_of(problem, ((each.value.name, 1) for each in problem.graph.parameters))
        self._tried: dict[tuple[Degrees, int], GridTrial | None] = {}

    def run(self, every: Sequence[Degrees], sizes: Sequence[int]) -> Placement:
        """The best of all factorisations on micro-batches of any of `sizes` samples, which ascend.

        First each with small micro-batches, but for those that memory cannot hold, and those whose
        estimate, which leaves out what layers exchange, is no shorter than the best step; then
        other sizes, where they promise most first; then the best with its replicas apart. Raises
        OutOfMemoryError, with the degrees that need least, if memory refused a candidate and none
        is left, otherwise the last reason.
        """
        found = []
        for degrees in every:
            estimates = {
                size: self._estimate_s(degrees, size) for size in sizes if size % degrees.data == 0
            }
            if estimates:
                found.append((min(estimates.values()), degrees, estimates))

        def seconds(degrees: Degrees, size: int) -> float:
            trial = self._try(degrees, size)
            return math.inf if trial is None else trial.step_s

        begun = []
        for least_s, degrees, estimates in sorted(found, key=itemgetter(0)):
            if least_s >= self._best_s() or not self._has_room(degrees):
                continue
            own = list(estimates)
            most = max(1, _TASKS // (degrees.pipeline * self.stages_per_rank))
            few = next((size for size in own if self.problem.batch_size <= most * size), own[-1])
            # Memory may hold the smallest where it refuses larger ones.
            first = self._try(degrees, few) or self._try(degrees, own[0])
            if first is not None:
                # Of the sizes that memory should hold the best, whose step is as much longer than
                # the first as estimates say.
                start = min(filter(first.fits, own), key=estimates.__getitem__, default=first.size)
                longer = (
                    estimates[start] / estimates[first.size] if estimates[first.size] else 1.0
                )  # Nothing to do.
                begun.append((first.step_s * longer, degrees, own, start))
        for promised_s, degrees, own, start in sorted(begun, key=itemgetter(0)):
            if promised_s <= _CLOSE * self._best_s():
                climb(own, own.index(start), partial(seconds, degrees))
        best = self.best
        if best is None and self.refused:
            raise self._refusal(every, sizes)
        if best is None:
            least = min((degrees.data for degrees in every), default=1)
            raise InfeasibleError(
                f"grid cannot split a micro-batch of {sizes[-1]} {plural(sizes[-1], 'sample')} "
                f"evenly over {least} {plural(least, 'replica')}",
                hint="choose a micro-batch size that is a multiple of the replicas, or other degrees",
            )
        if (
            best.degrees.pipeline > 1
            and best.degrees.data > 1
            and self.problem.cluster.node_count > 1
        ):
            self._try(replace(best.degrees, apart=True), best.size)
        assert self.best is not None
        return self.best.placement

    def _estimate_s(self, degrees: Degrees, size: int) -> float:
        """About what a step takes where stages are even: filled, drained, gradients summed.

        Of p groups in a line each waits for those before it: they take (m + p - 1) / p times what
        the whole model takes of one of m micro-batches; with v stages a group the p - 1 are v times
        shorter.
        """
        problem = self.problem
        work = self._seconds.of(
            problem.cluster.kinds, degrees.width * problem.micro_batch_size // size
        )
        rounds = (
            problem.batch_size / size + (degrees.pipeline - 1) / self.stages_per_rank
        ) / degrees.pipeline
        share = self._state.gradient_bytes / degrees.pipeline / degrees.tensor
        replicas = degrees.groups()[0][:: degrees.tensor]
        return rounds * float(work.sum()) + exchange_of_gradients(problem, replicas).seconds(share)

    def _has_room(self, degrees: Degrees) -> bool:
        """True if parameters and their state, in equal parts, fit the largest memory."""
        problem = self.problem
        least = self._state_bytes(degrees)
        device = max(range(problem.cluster.size), key=problem.memory_of)
        if least <= problem.memory_of(device):
            return True
        self.refused.append(
            out_of_memory(problem, [0], degrees.pipeline, device, least, detail=f"with {degrees}")
        )
        return False

    def _state_bytes(self, degrees: Degrees) -> int:
        """Bytes of parameters and their state on a device if all hold equally much: the fullest
        holds no less.
        """
        copies = degrees.data if self.problem.optimizer.shard else 1
        parts = degrees.pipeline * degrees.tensor // (2 if self.opposite else 1)
        return (
            self._state.total - self._state.optimizer_bytes + self._state.optimizer_bytes // copies
        ) // parts

    def _refusal(self, every: Sequence[Degrees], sizes: Sequence[int]) -> AutopipeError:
        """Return why there is no placement: if it is memory, the degrees that exceed it least.

        Peaks are those of 1F1B on the smallest micro-batches, with all stages recomputed if
        recomputation is open.
        """
        if not any(isinstance(error, OutOfMemoryError) for error in self.refused):
            return self.refused[-1]
        most = max(map(self.problem.memory_of, range(self.problem.cluster.size)))
        best: tuple[float, OutOfMemoryError] | None = None
        tried = sorted(every, key=self._state_bytes)
        for degrees in tried:
            size = next((size for size in sizes if size % degrees.data == 0), None)
            if size is None or (best is not None and self._state_bytes(degrees) - most >= best[0]):
                continue
            try:
                excess, error = self._excess(self.sized(size), degrees, tried)
            except REFUSALS:
                continue
            if best is None or excess < best[0]:
                best = excess, error
        return self.refused[-1] if best is None or best[0] <= 0 else best[1]

    def _excess(
        self, problem: Problem, degrees: Degrees, every: Sequence[Degrees]
    ) -> tuple[float, OutOfMemoryError]:
        """Return (excess, error): most bytes by which 1F1B exceeds a device's memory, and the error
        that says so.
        """
        if problem.train and problem.recompute == "auto":
            problem = replace(problem, recompute="full")
        placement = place(problem, degrees, self.stages_per_rank, self.style, self.opposite)
        # Peaks are reached when all stages are filled.
        count = min(problem.micro_batches, 4 * len(placement.stages))
        problem = replace(problem, micro_batches=count, batch_size=count * problem.micro_batch_size)
        peaks = quick_step(problem, placement, stage_costs(problem, placement)).peak_memory
        over = [peak - problem.memory_of(device) for device, peak in enumerate(peaks)]
        worst = max(range(len(over)), key=over.__getitem__)
        stages = [index for index, stage in enumerate(placement.stages) if worst in stage.devices]
        detail = f"with {degrees}, micro-batch size {problem.micro_batch_size}"
        if len(every) > 1:
            options = {
                name: sorted({getattr(each, name) for each in every})
                for name in ("pipeline", "data", "tensor")
            }
            texts = (f"{name} {'/'.join(map(str, found))}" for name, found in options.items())
            detail += f", the least of {len(every)} combinations of {', '.join(texts)}"
        need = peaks[worst]
        return over[worst], out_of_memory(
            problem, stages, len(placement.stages), worst, need, detail=detail
        )

    def _try(self, degrees: Degrees, size: int) -> GridTrial | None:
        """The placement on micro-batches of that size, tried once; None where there is none."""
        key = degrees, size
        if key not in self._tried:
            self._tried[key] = None
            try:
                found = self._tried[key] = self._trial(self.sized(size), degrees)
            except REFUSALS as error:
                self.refused.append(error)
            else:
                self.best = found if found.step_s < self._best_s() else self.best
        return self._tried[key]

    def _trial(self, problem: Problem, degrees: Degrees) -> GridTrial:
        placement = fitted(
            problem, place(problem, degrees, self.stages_per_rank, self.style, self.opposite)
        )
        costs = stage_costs(problem, placement)
        step_s = quick_step_seconds(problem, placement, costs)
        used = device_memory(problem, placement, costs)
        fixed = static_memory(problem, placement)
        limits = (problem.memory_of(device) for device in range(problem.cluster.size))
        memory = {
            (held, most - held, limit)
            for held, most, limit in zip(fixed, used, limits, strict=True)
        }
        return GridTrial(
            degrees, problem.micro_batch_size, placement, step_s, tuple(sorted(memory))
        )

    def _best_s(self) -> float:
        return math.inf if self.best is None else self.best.step_s


@dataclass(frozen=True, slots=True)
class Grid:
    """Multiplies pipeline, data and tensor parallelism, as experts run large models: the product is
    all devices.

    The operators, in a line, are cut into even stages. Inside a stage, replicas share the samples,
    and the devices of a replica share heads, columns and vocabulary (Narayanan et al., "Efficient
    Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021). Degrees that are
    open, and the size of micro-batches, are those with the shortest simulated step under 1F1B.
    """

    pipeline: int | None = None
    """Groups of devices in a line, each with a part of the layers."""
    data: int | None = None
    """Replicas in each group, which share samples."""
    tensor: int | None = None
    """Devices that share each layer; those of one node at most where it is open."""
    stages_per_rank: Annotated[int, FormerKey("chunks")] = 1
    """Number of stages of each group of devices; interleaved and V-shaped schedules need at least
    2.
    """
    style: Annotated[StageStyle, STYLE_MARK] = "loop"
    """Order in which consecutive stages visit the groups. `loop`: 0 1 2 0 1 2, for interleaved
    schedules. `v`: 0 1 2 2 1 0, for V-shaped schedules.
    """
    opposite: bool = False
    """True if a second pipeline, with copies of the parameters, passes the groups in the opposite
    direction, and micro-batches take both in turn, as schedules `chimera` and `dualpipe` want it.
    """

    name: ClassVar[str] = "grid"

    def division(self, graph: Graph) -> Division:
        return Division.OWN

    def requires(self, problem: Problem) -> None:
        """Raise ConfigurationError for options out of range or at odds, InfeasibleError for an
        empty model.
        """
        for option in ("pipeline", "data", "tensor", "stages_per_rank"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ConfigurationError(
                    f"{option} is {value}", hint="it must be at least 1", where="strategy"
                )
        if self.style == "v" and self.stages_per_rank < 2:
            raise ConfigurationError(
                f"style v needs stages_per_rank of at least 2, not {self.stages_per_rank}",
                hint="set strategy.stages_per_rank to 2",
                where="strategy.style",
            )
        if self.opposite:
            self._check_opposite(problem)
        devices = problem.cluster.size
        given = {
            name: value
            for name in ("pipeline", "data", "tensor")
            if (value := getattr(self, name)) is not None
        }
        product = math.prod(given.values())
        if devices % product or (len(given) == 3 and product != devices):
            named = " x ".join(f"{name} {value}" for name, value in given.items())
            wanted = "make" if len(given) == 3 else "divide"
            raise ConfigurationError(
                (
                    f"{named} is {product}, which does not {wanted} the {devices} "
                    f"{plural(devices, 'device')}"
                ),
                hint="leave one of pipeline, data and tensor open",
                where="strategy",
            )
        check_operators(problem)

    def _check_opposite(self, problem: Problem) -> None:
        """Raise ConfigurationError for what contradicts two pipelines in opposite directions."""
        if self.stages_per_rank > 1:
            raise ConfigurationError(
                f"opposite needs stages_per_rank 1, not {self.stages_per_rank}",
                hint="remove strategy.opposite or strategy.stages_per_rank",
                where="strategy.opposite",
            )
        if self.pipeline is not None and self.pipeline % 2:
            message = (
                "two pipelines in opposite directions need an even number of groups, and pipeline "
                f"is {self.pipeline}"
            )
            raise ConfigurationError(message, where="strategy.pipeline")
        if problem.constraints:
            hint = "strategy manual follows constraints for each of several pipelines"
            raise ConfigurationError(
                "with opposite, grid follows no constraints", hint, "strategy.opposite"
            )

    def run(self, problem: Problem) -> Placement:
        """The placement with the shortest step.

        Raises InfeasibleError where memory holds none, ConfigurationError for constraints that it
        does not fulfil.
        """
        return best_order(problem, self._placed)

    def _placed(self, problem: Problem) -> Placement:
        resolved = resolved_constraints(problem)
        degrees = tuple(factorisations(problem.cluster, self.pipeline, self.data, self.tensor))
        if self.opposite:
            degrees = tuple(each for each in degrees if each.pipeline % 2 == 0)
            if not degrees:
                raise InfeasibleError(
                    "two pipelines in opposite directions need an even number of groups"
                )
        if len(equal_device_runs(problem.cluster)) > 1:
            degrees = tuple(
                each
                for each in degrees
                if all(may_share(problem, group) for group in each.groups())
            )
            if not degrees:
                raise InfeasibleError(
                    "grid's groups are equal, and with these degrees one would have devices of "
                    "different kinds: "
                    f"{describe_kinds(problem.cluster, range(problem.cluster.size))}",
                    hint="set cluster.allow_mixed_stages to true, or take other degrees",
                )
        placement = GridSearch(problem, self.stages_per_rank, self.style, self.opposite).run(
            degrees, required_sizes(problem, resolved)
        )
        check_constraints_met(problem, placement, self.name)
        return placement
