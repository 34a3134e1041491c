"""GraphPipe: the strategy, and what it settles once the stages stand: micro-batches and splits of
their own.

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
from autopipe.ir.memo import remembered
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import StageGraph, depths_to_end
from autopipe.ir.words import plural
from autopipe.passes.analysis.constraints import required_splits, resolved_constraints
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.batching import Division
from autopipe.passes.cost.measured import resized
from autopipe.passes.cost.memory_check import check_operators
from autopipe.passes.cost.roofline import mean_seconds
from autopipe.passes.cost.stages import stage_costs, step_seconds
from autopipe.passes.placement.graphpipe.micro_batch_search import MicroBatchSearch
from autopipe.passes.placement.graphpipe.series_parallel import decompose, make_units, other_orders
from autopipe.passes.schedule.device_order import best_order
from autopipe.passes.schedule.limits import quick_step, quick_step_seconds
from autopipe.passes.sharding.configurations import Splits
from autopipe.passes.sharding.regions import check_constraints_met
from autopipe.passes.sharding.search import Exact, SplitProblem


@dataclass(frozen=True, slots=True)
class GraphPipe:
    """Cuts the model's series-parallel graph into stages that take equally long, branches beside
    one another.
    """

    intra: Literal["data_parallel", "pase"] = "data_parallel"
    """How the devices of a stage share its work: by samples, or as the search for splits makes a
    step shorter.
    """

    per_stage_micro_batch: bool = False
    """True if stages get micro-batches of their own sizes where a step by kFkB is shorter with
    them.
    """

    name: ClassVar[str] = "graphpipe"

    def division(self, graph: Graph) -> Division:
        """It chooses the size of micro-batches."""
        return Division.OWN

    def requires(self, problem: Problem) -> None:
        """Raise InfeasibleError where there is nothing to place."""
        check_operators(problem)

    def run(self, problem: Problem) -> Placement:
        """The placement with the least expected step time. It uses all devices that make the
        slowest stage faster; others have no stage. Raises InfeasibleError where memory holds no
        stages, saying by how much those that need least exceed it, ConfigurationError for a
        constraint that the stages do not fulfil.
        """
        return best_order(problem, self._placed, parts=False)

    def _placed(self, problem: Problem) -> Placement:
        """The placement with the cluster's devices in the order in which they are."""
        placement = _in_stages(problem)
        if isinstance(placement, InfeasibleError):
            raise placement
        if self.per_stage_micro_batch:
            placement = with_own_sizes(problem, placement)
        if self.intra == "pase":
            placement = split_further(problem, placement)
        check_constraints_met(problem, placement, self.name)
        return placement


@remembered(2)
def _in_stages(problem: Problem) -> Placement | InfeasibleError:
    """The stages with which all forms begin, or why there are none, which takes as long to find. A
    note says of each region that is not series-parallel how large it is, and where it begins and
    ends.
    """
    graph = problem.graph
    units = make_units(graph)
    forward, backward = mean_seconds(problem)
    weights = [float((forward + backward)[list(nodes)].sum()) for nodes in units.nodes]
    tree, regions = decompose(units.needs, weights)
    trees = itertools.chain((tree,), other_orders(tree, units.needs, weights))
    try:
        best = MicroBatchSearch(problem, units, forward + backward).best(trees)
    except InfeasibleError as error:
        return error
    parts = ([node for unit in region for node in units.nodes[unit]] for region in regions)
    notes = (
        f"{len(nodes)} {plural(len(nodes), 'operator')} from {graph.nodes[min(nodes)].name!r} "
        f"to {graph.nodes[max(nodes)].name!r} are not "
        "series-parallel: they count as one block, whose parts run in a fixed order"
        for nodes in parts
    )
    return replace(best, notes=tuple(notes))


_SWEEPS = 3  # How often all changes are tried, at most.


def with_own_sizes(problem: Problem, placement: Placement) -> Placement:
    """`placement`, whose stages have micro-batches of one size, with larger and smaller ones where
    that is faster. Section 6 of the paper. Stages equally far from the end change together, alone
    or with all before or behind them, by one step through the sizes that the problem allows; what
    shortens the step by kFkB (k = 1), as it is simulated, and fits into memory stays, until nothing
    does any more. Sizes divide the largest.
    """
    best = _step_by_kfkb(problem, placement)
    graph = StageGraph.of(resized(problem, placement.stages[0].micro_batch_size), placement)
    depths = depths_to_end(len(placement.stages), graph.edges)
    together = dict.fromkeys(
        frozenset(stage for stage, own in enumerate(depths) if low <= own <= high)
        for depth in sorted(set(depths))
        for low, high in ((depth, depth), (1, depth), (depth, max(depths)))
    )
    for _ in range(_SWEEPS):
        before = best
        for indices, up in itertools.product(together, (False, True)):
            changed = _with_next_size(problem, placement, indices, up)
            if changed is not None and (step := _step_by_kfkb(problem, changed)) < best:
                placement = changed
                best = step
        if best == before:
            break
    return placement


def _with_next_size(
    problem: Problem, placement: Placement, indices: frozenset[int], up: bool
) -> Placement | None:
    """The placement with the next larger or smaller micro-batches in some stages; None where there
    are none.
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


def _step_by_kfkb(problem: Problem, placement: Placement) -> float:
    """Seconds of a step; infinite where memory does not hold it, or the model's values cannot be
    shared out so.
    """
    try:
        problem = resized(problem, max(stage.micro_batch_size for stage in placement.stages))
        return quick_step_seconds(problem, placement, stage_costs(problem, placement))
    except AutopipeError:
        return math.inf


def split_further(problem: Problem, placement: Placement) -> Placement:
    """`placement` with its stages of several devices split as the search finds it best, or as they
    are. Which of the two is better for each follows from a step by kFkB (k = 1), as it is
    simulated: neighbours that are split differently have more to send. The step is never longer
    than it was, but for stages in which constraints ask for splits. Nodes, devices, micro-batches
    and recomputation stay. No two stages may share a device. Raises ConfigurationError for
    constraints that cannot be followed.
    """
    problem = resized(problem, max(stage.micro_batch_size for stage in placement.stages))
    required = _required_splits(problem, placement)
    inside = SplitProblem(problem, placement, required)
    solver = Exact(problem.time_limit)
    settled: dict[int, Stage] = {}
    found: dict[int, Stage] = {}
    for index, stage in enumerate(placement.stages):
        if len(stage.devices) > 1:
            with suppress(InfeasibleError):
                best = inside.split(placement, index, solver).placement.stages[index]
                if best != stage:
                    (found if required.keys().isdisjoint(stage.nodes) else settled)[index] = best
    placement = _with_stages(placement, settled)
    if not found:
        return placement

    def measured(placement: Placement) -> tuple[float, list[float]]:
        """Seconds of a step, and those in which each stage's devices are busy."""
        costs = stage_costs(problem, placement)
        counts = (problem.batch_size // stage.micro_batch_size for stage in placement.stages)
        return quick_step(problem, placement, costs).end, list(map(step_seconds, costs, counts))

    def improved(placement: Placement, others: dict[int, Stage]) -> tuple[float, Placement]:
        """Seconds of a step, and the placement with each stage in turn as in `others` if that is no
        worse for the step and its devices are busy for a shorter time, or if the step is shorter.
        """
        step, busy = measured(placement)
        for index, other in others.items():
            changed = _with_stages(placement, {index: other})
            changed_step, changed_busy = measured(changed)
            if (changed_step, changed_busy[index]) < (step, busy[index]):
                placement = changed
                step = changed_step
                busy = changed_busy
        return step, placement

    own = {index: placement.stages[index] for index in found}
    both = improved(placement, found), improved(_with_stages(placement, found), own)
    return min(both, key=lambda each: each[0])[1]


def _with_stages(placement: Placement, others: dict[int, Stage]) -> Placement:
    """The placement with some of its stages replaced."""
    stages = (others.get(index, stage) for index, stage in enumerate(placement.stages))
    return replace(placement, stages=tuple(stages))


def _required_splits(problem: Problem, placement: Placement) -> dict[int, Splits]:
    """The splits that constraints ask for and the devices of a node's stage can have, by node."""
    resolved = resolved_constraints(problem)
    found = dict[int, Splits]()
    for stage in placement.stages if resolved else ():
        samples = sample_axes(resized(problem, stage.micro_batch_size).graph)
        for node, splits in required_splits(resolved, samples).items():
            if (
                node in stage.nodes
                and len(stage.devices) % math.prod(split.degree for split in splits) == 0
            ):
                found[node] = splits
    return found
