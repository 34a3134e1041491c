"""Strategy `grid`: a product of pipeline, data and tensor parallelism. It searches the degrees of
parallelism and the micro-batch size with the shortest step.
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
    CANDIDATE_ERRORS,
    AutopipeError,
    ConfigurationError,
    InfeasibleError,
    OutOfMemoryError,
)
from autopipe.ir.graph import Graph
from autopipe.ir.memo import memoize_all
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.ir.words import plural
from autopipe.passes.analysis.constraints import required_micro_batch_sizes, resolve_constraints
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.batching import Division, hill_climb
from autopipe.passes.cost.measured import with_micro_batch_size
from autopipe.passes.cost.memory import parameter_state, static_memory
from autopipe.passes.cost.memory_check import (
    check_operators,
    describe_device_types,
    device_memory,
    equal_device_ranges,
    may_share_stage,
    out_of_memory_error,
    with_required_recomputation,
)
from autopipe.passes.cost.roofline import StepSeconds
from autopipe.passes.cost.stage_work import gradient_reduction_cost
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.partition.chain_cut import partition_chain
from autopipe.passes.schedule.device_order import best_group_order
from autopipe.passes.schedule.limits import quick_step, quick_step_seconds
from autopipe.passes.sharding.regions import (
    STYLE_MARK,
    StageStyle,
    check_constraints_met,
    check_samples_divide,
    constrained_stages,
    graph_megatron_splits,
    stage_groups,
    with_sample_splits,
)


@dataclass(frozen=True, slots=True)
class Degrees:
    """The degrees of parallelism of a grid: `pipeline` groups of devices form a chain. Each group
    has `data` replicas, and the `tensor` devices of a replica split each layer.

    The devices of a replica are neighbours. If `apart` is false, the replicas of a group are
    neighbours too, so the slowest links carry pipeline communication. If `apart` is true, the
    replicas with the same number in all groups are neighbours, so the slowest links carry only
    gradient all-reduces.
    """

    pipeline: int
    data: int
    tensor: int
    apart: bool = False

    @property
    def group_size(self) -> int:
        """Number of devices of a group."""
        return self.data * self.tensor

    def __str__(self) -> str:
        return f"pipeline {self.pipeline}, data {self.data}, tensor {self.tensor}"

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the devices of each group, one replica after the other."""
        group_stride, replica_stride = (
            (self.tensor, self.pipeline * self.tensor)
            if self.apart
            else (self.group_size, self.tensor)
        )
        inside = [
            replica * replica_stride + device
            for replica in range(self.data)
            for device in range(self.tensor)
        ]
        return tuple(
            tuple(group * group_stride + device for device in inside)
            for group in range(self.pipeline)
        )


def factorisations(
    cluster: Cluster,
    pipeline: int | None = None,
    data: int | None = None,
    tensor: int | None = None,
) -> Iterator[Degrees]:
    """Yield all degrees of parallelism whose product is the number of devices. Degrees that are
    given stay fixed. The replicas of a group are neighbours (`Degrees.apart` is false).

    If `tensor` is None, it is at most the number of devices of a node: links between nodes are too
    slow for the communication of tensor parallelism (Narayanan et al., "Efficient Large-Scale
    Language Model Training on GPU Clusters Using Megatron-LM", 2021, section 3).
    """
    size = cluster.size
    for tensor_degree in [tensor] if tensor else range(1, min(size, cluster.devices_per_node) + 1):
        remaining = 0 if size % tensor_degree else size // tensor_degree
        for pipeline_degree in [pipeline] if pipeline else range(1, remaining + 1):
            if (
                remaining
                and remaining % pipeline_degree == 0
                and data in (None, remaining // pipeline_degree)
            ):
                yield Degrees(pipeline_degree, remaining // pipeline_degree, tensor_degree)


def place_grid(
    problem: Problem,
    degrees: Degrees,
    stages_per_rank: int,
    style: StageStyle,
    opposite: bool = False,
) -> Placement:
    """Return the placement with these degrees of parallelism, for the problem's micro-batch size.
    All stages recompute their forward if the problem requires it, and otherwise none does.

    Each group has `stages_per_rank` stages, in the order `style` (see `Grid.style`). With
    `opposite`, a second pipeline has the same stages on the groups in reverse order. Raise
    InfeasibleError if the replicas cannot split the samples evenly, if no layer can be split over
    `degrees.tensor` devices, or if there are fewer operators than stages.
    """
    check_samples_divide(problem, degrees.data, "grid")
    groups = stage_groups(degrees.groups(), stages_per_rank, style)
    fixed_stages = (
        constrained_stages(resolve_constraints(problem), groups, "grid")
        if problem.constraints
        else {}
    )
    tensor_splits = graph_megatron_splits(problem.graph, degrees.data, degrees.tensor)
    if not tensor_splits and degrees.tensor > 1:
        raise InfeasibleError(
            f"strategy.tensor is {degrees.tensor}, but no layer can be split over "
            f"{degrees.tensor} {plural(degrees.tensor, 'device')}",
            hint="set another tensor degree",
            where="strategy.tensor",
        )
    samples = sample_axes(problem.graph)
    stages = []
    for nodes, group in zip(
        partition_chain(problem, groups, fixed_stages, degrees.data), groups, strict=True
    ):
        own = {node: tensor_splits[node] for node in nodes if node in tensor_splits}
        splits = with_sample_splits(samples, nodes, degrees.data, own)
        stages.append(Stage(nodes, group, problem.micro_batch_size, splits, problem.recomputes_all))
    if opposite:
        pairs = zip(stages, reversed(groups), strict=True)
        stages += [replace(stage, devices=group, pipeline=1) for stage, group in pairs]
    return Placement(tuple(stages))


_TASKS = 2**14
"""Maximum number of stages times micro-batches in the first trial of each combination of degrees of
parallelism. A step with more tasks, such as one with micro-batches of a single sample, takes long
to simulate.
"""

_CLOSE = 1.1
"""Maximum ratio of the predicted step with some degrees of parallelism to the best step, for which
further micro-batch sizes are tried.
"""


@dataclass(frozen=True, slots=True)
class GridTrial:
    """A placement that fits into memory with micro-batches of `size` samples, and the seconds of
    its step.
    """

    degrees: Degrees
    size: int
    placement: Placement
    step_s: float
    memory: tuple[tuple[int, int, int], ...]
    """For each device: fixed bytes, bytes that grow linearly with the micro-batch size, and memory
    limit in bytes. Equal triples occur once.
    """

    def fits(self, size: int) -> bool:
        """True if the placement is predicted to fit into memory with micro-batches of `size`
        samples.
        """
        return all(
            fixed + variable * size / self.size <= limit for fixed, variable, limit in self.memory
        )


class GridSearch:
    """One search over degrees of parallelism and micro-batch sizes: the best trial so far, and the
    errors of infeasible candidates.

    `stages_per_rank`, `style` and `opposite` are the options of `Grid`.
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
        self.sized = memoize_all(partial(with_micro_batch_size, problem))
        self._seconds = StepSeconds(problem)
        self._state = parameter_state(
            problem, ((each.value.name, 1) for each in problem.graph.parameters)
        )
        self._tried: dict[tuple[Degrees, int], GridTrial | None] = {}

    def run(self, every: Sequence[Degrees], sizes: Sequence[int]) -> Placement:
        """Return the best placement over the degrees of parallelism in `every` and the micro-batch
        sizes in `sizes`, which are ascending.

        1. Candidates are tried in order of their estimated step, first with small micro-batches. A
           candidate is skipped if parameters and optimizer state exceed the memory, or if its
           estimate, which ignores tensor-parallel communication, is not below the best step.
        2. For candidates with a predicted step of at most `_CLOSE` times the best step, further
           sizes are searched.
        3. In a cluster of several nodes, the best candidate is also tried with `Degrees.apart`:
           then the replicas with the same number in all groups are neighbours.

        If no placement is found and memory is a reason, raise the OutOfMemoryError of the degrees
        that exceed the memory the least; otherwise raise the last error.
        """
        found = []
        for degrees in every:
            estimates = {
                size: self._estimate_s(degrees, size) for size in sizes if size % degrees.data == 0
            }
            if estimates:
                found.append((min(estimates.values()), degrees, estimates))

        def step_seconds(degrees: Degrees, size: int) -> float:
            """Return the seconds of a step of a trial; infinite if it is infeasible."""
            trial = self._cached_trial(degrees, size)
            return math.inf if trial is None else trial.step_s

        started = []
        for least_s, degrees, estimates in sorted(found, key=itemgetter(0)):
            if least_s >= self._best_step_s() or not self._state_fits(degrees):
                continue
            degree_sizes = list(estimates)
            most = max(1, _TASKS // (degrees.pipeline * self.stages_per_rank))
            large_enough = next(
                (size for size in degree_sizes if self.problem.batch_size <= most * size),
                degree_sizes[-1],
            )
            # Prefer the micro-batch size with few enough tasks for a fast trial. If these
            # micro-batches exceed the memory, the smallest micro-batches may still fit, so they are
            # tried next.
            first = self._cached_trial(degrees, large_enough) or self._cached_trial(
                degrees, degree_sizes[0]
            )
            if first is not None:
                # Start the search with the size that has the shortest estimate among the sizes that
                # are predicted to fit. The step with this size is predicted from the first trial by
                # the ratio of the estimates.
                start = min(
                    filter(first.fits, degree_sizes), key=estimates.__getitem__, default=first.size
                )
                ratio = estimates[start] / estimates[first.size] if estimates[first.size] else 1.0
                started.append((first.step_s * ratio, degrees, degree_sizes, start))
        for promised_s, degrees, degree_sizes, start in sorted(started, key=itemgetter(0)):
            if promised_s <= _CLOSE * self._best_step_s():
                hill_climb(degree_sizes, degree_sizes.index(start), partial(step_seconds, degrees))
        best = self.best
        if best is None and self.refused:
            raise self._error_to_raise(every, sizes)
        if best is None:
            smallest = min((degrees.data for degrees in every), default=1)
            raise InfeasibleError(
                f"grid cannot split a micro-batch of {sizes[-1]} {plural(sizes[-1], 'sample')} "
                f"evenly over {smallest} {plural(smallest, 'replica')}",
                hint="set a micro-batch size that is a multiple of the replicas, or other degrees",
            )
        if (
            best.degrees.pipeline > 1
            and best.degrees.data > 1
            and self.problem.cluster.node_count > 1
        ):
            self._cached_trial(replace(best.degrees, apart=True), best.size)
        assert self.best is not None
        return self.best.placement

    def _estimate_s(self, degrees: Degrees, size: int) -> float:
        """Return the estimated seconds of a step, including warm-up, cool-down and gradient
        all-reduce, if all stages take equally long.

        With p groups, m micro-batches, v stages per group and t = seconds of the full model for one
        micro-batch on one group:

            estimate = (m + (p - 1) / v) / p · t  +  gradient all-reduce
        """
        problem = self.problem
        work = self._seconds.of(
            problem.cluster.kinds, degrees.group_size * problem.micro_batch_size // size
        )
        rounds = (
            problem.batch_size / size + (degrees.pipeline - 1) / self.stages_per_rank
        ) / degrees.pipeline
        share = self._state.gradient_bytes / degrees.pipeline / degrees.tensor
        replicas = degrees.groups()[0][:: degrees.tensor]
        return rounds * float(work.sum()) + gradient_reduction_cost(problem, replicas).seconds(
            share
        )

    def _state_fits(self, degrees: Degrees) -> bool:
        """Return True if parameters, gradients and optimizer state, divided evenly among the
        devices, fit into the largest memory of a device. Otherwise append an OutOfMemoryError to
        `refused` and return False.
        """
        problem = self.problem
        least = self._state_bytes(degrees)
        device = max(range(problem.cluster.size), key=problem.memory_of)
        if least <= problem.memory_of(device):
            return True
        self.refused.append(
            out_of_memory_error(
                problem, [0], degrees.pipeline, device, least, detail=f"with {degrees}"
            )
        )
        return False

    def _state_bytes(self, degrees: Degrees) -> int:
        """Return the bytes of parameters, gradients and optimizer state per device if they are
        divided evenly. This is a lower bound on the bytes of the fullest device.
        """
        copies = degrees.data if self.problem.optimizer.shard else 1
        parts = degrees.pipeline * degrees.tensor // (2 if self.opposite else 1)
        return (
            self._state.total - self._state.optimizer_bytes + self._state.optimizer_bytes // copies
        ) // parts

    def _error_to_raise(self, every: Sequence[Degrees], sizes: Sequence[int]) -> AutopipeError:
        """Return the error to raise if there is no placement. If memory is a reason, it is the
        error of the degrees that exceed the memory the least.

        Memory peaks are computed under schedule 1F1B with the smallest micro-batches, with
        recomputation in all stages if it is permitted.
        """
        if not any(isinstance(error, OutOfMemoryError) for error in self.refused):
            return self.refused[-1]
        largest_memory = max(map(self.problem.memory_of, range(self.problem.cluster.size)))
        best: tuple[float, OutOfMemoryError] | None = None
        tried = sorted(every, key=self._state_bytes)
        for degrees in tried:
            size = next((size for size in sizes if size % degrees.data == 0), None)
            if size is None or (
                best is not None and self._state_bytes(degrees) - largest_memory >= best[0]
            ):
                continue
            try:
                excess, error = self._memory_excess(self.sized(size), degrees, tried)
            except CANDIDATE_ERRORS:
                continue
            if best is None or excess < best[0]:
                best = excess, error
        return self.refused[-1] if best is None or best[0] <= 0 else best[1]

    def _memory_excess(
        self, problem: Problem, degrees: Degrees, every: Sequence[Degrees]
    ) -> tuple[float, OutOfMemoryError]:
        """Return (bytes, error) for a placement under 1F1B: the bytes by which it exceeds the
        memory of the fullest device, and the error that states them. `every` contains all degrees
        that were tried; the message lists them.
        """
        if problem.train and problem.recompute == "auto":
            problem = replace(problem, recompute="full")
        placement = place_grid(problem, degrees, self.stages_per_rank, self.style, self.opposite)
        # The memory in use peaks once all stages are busy. Four micro-batches per stage reach this
        # peak, so the step is simulated for at most this number of micro-batches.
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
            detail += f", the minimum of {len(every)} combinations of {', '.join(texts)}"
        need = peaks[worst]
        return over[worst], out_of_memory_error(
            problem, stages, len(placement.stages), worst, need, detail=detail
        )

    def _cached_trial(self, degrees: Degrees, size: int) -> GridTrial | None:
        """Return the trial with these degrees and micro-batches of `size` samples, or None if it is
        infeasible. Trials are cached.
        """
        key = degrees, size
        if key not in self._tried:
            self._tried[key] = None
            try:
                found = self._tried[key] = self._run_trial(self.sized(size), degrees)
            except CANDIDATE_ERRORS as error:
                self.refused.append(error)
            else:
                self.best = found if found.step_s < self._best_step_s() else self.best
        return self._tried[key]

    def _run_trial(self, problem: Problem, degrees: Degrees) -> GridTrial:
        """Return a new trial with these degrees on the problem's micro-batches. Raise an error if
        it is infeasible.
        """
        placement = with_required_recomputation(
            problem, place_grid(problem, degrees, self.stages_per_rank, self.style, self.opposite)
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

    def _best_step_s(self) -> float:
        """Return the seconds of the best step so far; infinite if there is none."""
        return math.inf if self.best is None else self.best.step_s


@dataclass(frozen=True, slots=True)
class Grid:
    """Combine pipeline, data and tensor parallelism, as experts do for large models. The product of
    the three degrees is the number of devices.

    The operators, in topological order, are partitioned into stages that take equally long. Inside
    a stage, the replicas split the samples, and the devices of a replica split attention heads,
    columns and vocabulary (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
    Clusters Using Megatron-LM", 2021). Degrees and a micro-batch size that are not given are chosen
    for the shortest simulated step under schedule 1F1B.
    """

    pipeline: int | None = None
    """Number of groups of devices, which form the pipeline. Default: searched."""
    data: int | None = None
    """Number of replicas in each group, which split the samples. Default: searched."""
    tensor: int | None = None
    """Number of devices in each replica, which split each layer. Default: searched, up to the
    devices of one node.
    """
    stages_per_rank: Annotated[int, FormerKey("chunks")] = 1
    """Number of stages of each group of devices. Interleaved and V-shaped schedules need at least
    2.
    """
    style: Annotated[StageStyle, STYLE_MARK] = "loop"
    """Order in which consecutive stages visit the groups. With three groups, `loop` is 0 1 2 0 1 2,
    for interleaved schedules, and `v` is 0 1 2 2 1 0, for V-shaped schedules.
    """
    opposite: bool = False
    """Add a second pipeline, with copies of the parameters, through the groups in the opposite
    direction. Micro-batches alternate between both. Schedules `chimera` and `dualpipe` require
    this.
    """

    name: ClassVar[str] = "grid"

    def division(self, graph: Graph) -> Division:
        """Return `Division.OWN`: the strategy chooses the micro-batch size."""
        return Division.OWN

    def requires(self, problem: Problem) -> None:
        """Raise ConfigurationError for options that are out of range or contradict each other, and
        InfeasibleError for a model without operators.
        """
        for option in ("pipeline", "data", "tensor", "stages_per_rank"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ConfigurationError(
                    f"{option} is {value}, expected at least 1",
                    hint=f"set strategy.{option} to at least 1",
                    where="strategy",
                )
        if self.style == "v" and self.stages_per_rank < 2:
            raise ConfigurationError(
                "style v requires stages_per_rank of at least 2, but stages_per_rank is "
                f"{self.stages_per_rank}",
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
                hint="remove one of pipeline, data and tensor, which is then searched",
                where="strategy",
            )
        check_operators(problem)

    def _check_opposite(self, problem: Problem) -> None:
        """Raise ConfigurationError if other options or the constraints are incompatible with option
        `opposite`.
        """
        if self.stages_per_rank > 1:
            raise ConfigurationError(
                "opposite requires stages_per_rank 1, but stages_per_rank is "
                f"{self.stages_per_rank}",
                hint="remove strategy.opposite or strategy.stages_per_rank",
                where="strategy.opposite",
            )
        if self.pipeline is not None and self.pipeline % 2:
            message = (
                "two pipelines in opposite directions require an even pipeline degree, but "
                f"pipeline is {self.pipeline}"
            )
            raise ConfigurationError(message, where="strategy.pipeline")
        if problem.constraints:
            hint = "use strategy manual, which supports constraints for several pipelines"
            raise ConfigurationError(
                "grid does not support constraints together with opposite",
                hint,
                "strategy.opposite",
            )

    def run(self, problem: Problem) -> Placement:
        """Return the placement with the shortest simulated step. Raise InfeasibleError if no
        placement fits into memory, and ConfigurationError for violated constraints.
        """
        return best_group_order(problem, self._place)

    def _place(self, problem: Problem) -> Placement:
        """Return the best placement for one order of the cluster's device groups: the order in
        `problem`. Raise as `run` does.
        """
        resolved = resolve_constraints(problem)
        degrees = tuple(factorisations(problem.cluster, self.pipeline, self.data, self.tensor))
        if self.opposite:
            degrees = tuple(each for each in degrees if each.pipeline % 2 == 0)
            if not degrees:
                raise InfeasibleError(
                    "two pipelines in opposite directions require an even pipeline degree, but "
                    "every possible degree is odd"
                )
        if len(equal_device_ranges(problem.cluster)) > 1:
            degrees = tuple(
                each
                for each in degrees
                if all(may_share_stage(problem, group) for group in each.groups())
            )
            if not degrees:
                raise InfeasibleError(
                    "grid forms equal device groups, but with these degrees a group has devices "
                    "of different types: "
                    f"{describe_device_types(problem.cluster, range(problem.cluster.size))}",
                    hint="set cluster.allow_mixed_stages to true, or set other degrees",
                )
        placement = GridSearch(problem, self.stages_per_rank, self.style, self.opposite).run(
            degrees, required_micro_batch_sizes(problem, resolved)
        )
        check_constraints_met(problem, placement, self.name)
        return placement
