"""The placement strategy GraphPipe, with two refinements of the stages that its search finds: a
micro-batch size per stage, and splits inside stages.

Jeon et al., "GraphPipe: Improving Performance and Scalability of DNN Training with Graph Pipeline
Parallelism" (2024).
"""

from __future__ import annotations

import itertools
import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from autopipe.ir.errors import AutopipeError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.memo import memoize
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import StageGraph, depths_to_end
from autopipe.ir.words import plural
from autopipe.passes.analysis.constraints import required_splits, resolve_constraints
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.batching import Division
from autopipe.passes.cost.measured import with_micro_batch_size
from autopipe.passes.cost.memory_check import check_operators
from autopipe.passes.cost.roofline import mean_node_seconds
from autopipe.passes.cost.stages import stage_costs, step_seconds
from autopipe.passes.placement.graphpipe.micro_batch_search import MicroBatchSearch
from autopipe.passes.placement.graphpipe.series_parallel import (
    alternative_trees,
    decompose_series_parallel,
    make_units,
)
from autopipe.passes.schedule.device_order import best_group_order
from autopipe.passes.schedule.limits import quick_step, quick_step_seconds
from autopipe.passes.sharding.configurations import Splits
from autopipe.passes.sharding.regions import check_constraints_met
from autopipe.passes.sharding.search import ExactSolver, SplitProblem


@dataclass(frozen=True, slots=True)
class GraphPipe:
    """Partitions the series-parallel graph of the model into stages of about equal time. Stages on
    parallel branches run concurrently.
    """

    intra: Literal["data_parallel", "pase"] = "data_parallel"
    """How the devices of a stage divide its work: `data_parallel` divides the samples; `pase`
    searches a split of each operator.
    """

    per_stage_micro_batch: bool = False
    """True to search a micro-batch size for each stage, if this shortens the simulated step of
    schedule kFkB.
    """

    name: ClassVar[str] = "graphpipe"

    def division(self, graph: Graph) -> Division:
        """Return `Division.OWN`: the strategy chooses the micro-batch size."""
        return Division.OWN

    def requires(self, problem: Problem) -> None:
        """Raise InfeasibleError if the graph has no nodes."""
        check_operators(problem)

    def run(self, problem: Problem) -> Placement:
        """Return the placement with the minimum expected step time.

        A device that would not make the slowest stage faster remains unused. Raise InfeasibleError,
        with the minimum excess over the memory limit, if no partition fits the memory. Raise
        ConfigurationError for a constraint that the stages violate.
        """
        return best_group_order(problem, self._place, parts=False)

    def _place(self, problem: Problem) -> Placement:
        """Return the best placement for one order of the cluster's device groups: the order in
        `problem`. Raise as `run` does.
        """
        placement = _search_placement(problem)
        if isinstance(placement, InfeasibleError):
            raise placement
        if self.per_stage_micro_batch:
            placement = search_stage_micro_batches(problem, placement)
        if self.intra == "pase":
            placement = split_stages_by_pase(problem, placement)
        check_constraints_met(problem, placement, self.name)
        return placement


@memoize(2)
def _search_placement(problem: Problem) -> Placement | InfeasibleError:
    """Return the placement that the search over partitions finds, without a micro-batch size per
    stage and without splits inside stages. Return the error if no partition fits the memory.

    The error is returned instead of raised so that it is cached: finding it takes as long as
    finding a placement. The placement has a note for each region of the graph that is not
    series-parallel, with the number of its operators and the names of the first and last one.
    """
    graph = problem.graph
    units = make_units(graph)
    forward, backward = mean_node_seconds(problem)
    weights = [float((forward + backward)[list(nodes)].sum()) for nodes in units.nodes]
    tree, regions = decompose_series_parallel(units.needs, weights)
    trees = itertools.chain((tree,), alternative_trees(tree, units.needs, weights))
    try:
        best = MicroBatchSearch(problem, units, forward + backward).find_best_placement(trees)
    except InfeasibleError as error:
        return error
    parts = ([node for unit in region for node in units.nodes[unit]] for region in regions)
    notes = (
        f"{len(nodes)} {plural(len(nodes), 'operator')} from {graph.nodes[min(nodes)].name!r} "
        f"to {graph.nodes[max(nodes)].name!r} are not "
        "series-parallel: GraphPipe runs their parts in a fixed order"
        for nodes in parts
    )
    return replace(best, notes=tuple(notes))


_MAX_SWEEPS = 3
"""Maximum number of passes over all possible changes of micro-batch sizes."""


def search_stage_micro_batches(problem: Problem, placement: Placement) -> Placement:
    """Return `placement` with a micro-batch size for each stage (section 6 of the paper).

    The search is greedy. A change moves a set of stages to the next larger or smaller size that the
    problem permits. The set contains the stages of one depth (number of stages to the end of the
    pipeline), or also all stages of smaller depth, or also all stages of greater depth. A change is
    kept if it fits the memory and shortens the simulated step of the schedule kFkB with k = 1. The
    search ends when no change shortens the step, or after `_MAX_SWEEPS` passes. All sizes divide
    the largest size.
    """
    best = _kfkb_step_seconds(problem, placement)
    graph = StageGraph.of(
        with_micro_batch_size(problem, placement.stages[0].micro_batch_size), placement
    )
    depths = depths_to_end(len(placement.stages), graph.edges)
    together = dict.fromkeys(
        frozenset(stage for stage, own in enumerate(depths) if low <= own <= high)
        for depth in sorted(set(depths))
        for low, high in ((depth, depth), (1, depth), (depth, max(depths)))
    )
    for _ in range(_MAX_SWEEPS):
        before = best
        for indices, up in itertools.product(together, (False, True)):
            changed = _change_to_next_size(problem, placement, indices, up)
            if changed is not None and (step := _kfkb_step_seconds(problem, changed)) < best:
                placement = changed
                best = step
        if best == before:
            break
    return placement


def _change_to_next_size(
    problem: Problem, placement: Placement, indices: frozenset[int], up: bool
) -> Placement | None:
    """Return the placement in which the stages `indices` have the next larger (`up`) or next
    smaller micro-batch size. Return None if a stage has no such size, or if a size would not divide
    the largest one.
    """
    stages = list(placement.stages)
    for index in indices:
        stage = stages[index]
        own = stage.micro_batch_size
        sizes = [
            size
            for size in problem.micro_batch_sizes
            if size % len(stage.devices) == 0 and size != own
        ]
        next_size = min((size for size in sizes if size > own), default=None)
        if not up:
            next_size = max((size for size in sizes if size < own), default=None)
        if next_size is None:
            return None
        stages[index] = replace(stage, micro_batch_size=next_size)
    largest = max(stage.micro_batch_size for stage in stages)
    fits = all(largest % stage.micro_batch_size == 0 for stage in stages)
    return replace(placement, stages=tuple(stages)) if fits else None


def _kfkb_step_seconds(problem: Problem, placement: Placement) -> float:
    """Return the seconds of a step under kFkB with k = 1. Return infinity if memory does not
    suffice or if values cannot be divided into micro-batches of these sizes.
    """
    try:
        problem = with_micro_batch_size(
            problem, max(stage.micro_batch_size for stage in placement.stages)
        )
        return quick_step_seconds(problem, placement, stage_costs(problem, placement))
    except AutopipeError:
        return math.inf


def split_stages_by_pase(problem: Problem, placement: Placement) -> Placement:
    """Return `placement` in which stages have the splits of PaSE's search, if these splits shorten
    the step.

    The choice between the splits of the search and those of `placement` is made for each stage by a
    simulated step under kFkB with k = 1, because neighbouring stages with different splits have to
    send more. The step does not become longer, except for stages with required splits, which always
    get the splits of the search. Nodes, devices, micro-batch sizes and recomputation do not change.
    Stages must not share devices. Raise ConfigurationError for constraints that cannot be
    satisfied.
    """
    problem = with_micro_batch_size(
        problem, max(stage.micro_batch_size for stage in placement.stages)
    )
    required = _required_splits(problem, placement)
    inside = SplitProblem(problem, placement, required)
    solver = ExactSolver(problem.time_limit)
    fixed: dict[int, Stage] = {}
    found: dict[int, Stage] = {}
    for index, stage in enumerate(placement.stages):
        if len(stage.devices) > 1:
            with suppress(InfeasibleError):
                best = inside.split(placement, index, solver).placement.stages[index]
                if best != stage:
                    is_free = required.keys().isdisjoint(stage.nodes)
                    (found if is_free else fixed)[index] = best
    placement = _replace_stages(placement, fixed)
    if not found:
        return placement

    def measure(placement: Placement) -> tuple[float, list[float]]:
        """Return (seconds of the simulated step, seconds for which the devices of each stage are
        busy).
        """
        costs = stage_costs(problem, placement)
        counts = (problem.batch_size // stage.micro_batch_size for stage in placement.stages)
        return quick_step(problem, placement, costs).end, list(map(step_seconds, costs, counts))

    def improve(placement: Placement, others: dict[int, Stage]) -> tuple[float, Placement]:
        """Return (seconds of a step, placement) after replacing stages of `placement`, one after
        the other.

        A stage is replaced by its counterpart in `others` if the step becomes shorter, or if the
        step stays equal and the stage's devices are busy for a shorter time.
        """
        step, busy = measure(placement)
        for index, other in others.items():
            changed = _replace_stages(placement, {index: other})
            changed_step, changed_busy = measure(changed)
            if (changed_step, changed_busy[index]) < (step, busy[index]):
                placement = changed
                step = changed_step
                busy = changed_busy
        return step, placement

    own = {index: placement.stages[index] for index in found}
    both = improve(placement, found), improve(_replace_stages(placement, found), own)
    return min(both, key=lambda each: each[0])[1]


def _replace_stages(placement: Placement, others: dict[int, Stage]) -> Placement:
    """Return the placement in which the stages with the indices of `others` are replaced."""
    stages = (others.get(index, stage) for index, stage in enumerate(placement.stages))
    return replace(placement, stages=tuple(stages))


def _required_splits(problem: Problem, placement: Placement) -> dict[int, Splits]:
    """Return, by node, the splits that constraints require. Nodes are omitted if the number of
    parts does not divide the number of devices of their stage.
    """
    resolved = resolve_constraints(problem)
    found = dict[int, Splits]()
    for stage in placement.stages if resolved else ():
        samples = sample_axes(with_micro_batch_size(problem, stage.micro_batch_size).graph)
        for node, splits in required_splits(resolved, samples).items():
            if (
                node in stage.nodes
                and len(stage.devices) % math.prod(split.degree for split in splits) == 0
            ):
                found[node] = splits
    return found
