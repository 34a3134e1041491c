"""GraphPipe: the strategy and its options.

Micro-batches of stages' own sizes, where a step is shorter with them (Jeon et al., "GraphPipe", section 6).

Notes of a plan on the parts of a model that are not series-parallel.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from autopipe.ir.errors import AutopipeError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.memo import remembered
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import StageGraph, depths_to_end
from autopipe.passes.batching import Division
from autopipe.passes.cost.measured import resized
from autopipe.passes.cost.memory_check import check_operators
from autopipe.passes.cost.roofline import mean_seconds
from autopipe.passes.placement.graphpipe.estimate import check_schedule, check_stages
from autopipe.passes.placement.graphpipe.intra_stage import split_further
from autopipe.passes.placement.graphpipe.micro_batch_search import MicroBatchSearch
from autopipe.passes.placement.graphpipe.series_parallel import Units, decompose, make_units, other_orders
from autopipe.passes.schedule.device_order import best_order
from autopipe.passes.schedule.predict import predict, ticks_of
from autopipe.passes.schedule.published.one_f_one_b import order_kfkb
from autopipe.passes.schedule.simulate import simulate
from autopipe.passes.sharding.regions import check_constraints_met


def region_notes(graph: Graph, units: Units, regions: tuple[tuple[int, ...], ...]) -> tuple[str, ...]:
    """A line for each region: how large it is, and where it begins and ends."""
    return tuple(_note(graph, [node for unit in region for node in units.nodes[unit]]) for region in regions)


def _note(graph: Graph, nodes: list[int]) -> str:
    first, last = (graph.nodes[node].name for node in (min(nodes), max(nodes)))
    return (
        f"{len(nodes)} operators from {first!r} to {last!r} are not series-parallel: they count as one block, whose "
        "parts run in a fixed order"
    )


_SWEEPS = 3
"""How often all changes are tried, at most."""


def with_own_sizes(problem: Problem, placement: Placement) -> Placement:
    """`placement`, whose stages have micro-batches of one size, with larger and smaller ones where that is faster.

    Stages equally far from the end change together, alone or with all before or behind them, by one step through the
    sizes that the problem allows; what shortens the step by kFkB (k = 1), as it is simulated, and fits into memory
    stays, until nothing does any more. Sizes divide the largest.
    """
    trial = _Trial(problem)
    best = trial.step(placement)
    graph = StageGraph.of(resized(problem, placement.stages[0].micro_batch_size), placement)
    depths = depths_to_end(len(placement.stages), graph.edges)
    for _ in range(_SWEEPS):
        before = best
        for together in _sets(depths):
            for up in (False, True):
                changed = _changed(problem, placement, together, up)
                step = None if changed is None else trial.step(changed)
                if changed is not None and step is not None and (best is None or step < best):
                    placement, best = changed, step
        if best == before:
            break
    return placement


def _sets(depths: tuple[int, ...]) -> Iterator[frozenset[int]]:
    """The stages of each distance from the end, of at most it, and of at least it; each set once."""
    found: dict[frozenset[int], None] = {}
    for depth in sorted(set(depths)):
        for low, high in ((depth, depth), (1, depth), (depth, max(depths))):
            found[frozenset(stage for stage, own in enumerate(depths) if low <= own <= high)] = None
    return iter(found)


def _changed(problem: Problem, placement: Placement, together: frozenset[int], up: bool) -> Placement | None:
    """The placement with the next larger or smaller micro-batches in some stages; None where there are none."""
    stages = list(placement.stages)
    for index in together:
        stage = stages[index]
        sizes = [
            size
            for size in problem.micro_batch_sizes
            if size % len(stage.devices) == 0
            and (size > stage.micro_batch_size) == up
            and size != stage.micro_batch_size
        ]
        if not sizes:
            return None
        stages[index] = replace(stage, micro_batch_size=min(sizes) if up else max(sizes))
    largest = max(stage.micro_batch_size for stage in stages)
    if any(largest % stage.micro_batch_size for stage in stages):
        return None
    return replace(placement, stages=tuple(stages))


@dataclass(frozen=True, slots=True)
class _Trial:
    """Steps of placements, each as it is simulated."""

    problem: Problem
    _resized: dict[int, Problem] = field(default_factory=dict)

    def step(self, placement: Placement) -> float | None:
        """Seconds; None where memory does not hold it, or the model's values cannot be shared out so."""
        try:
            problem = self._of(max(stage.micro_batch_size for stage in placement.stages))
            graph, prediction = StageGraph.of(problem, placement), predict(problem, placement)
            ks = (1,) * len(placement.stages)
            schedule = order_kfkb(graph, problem.micro_batches, ks, problem.train, ticks_of(prediction.stages))
            check_schedule(schedule)
            timeline = simulate(schedule, graph.stage_devices, prediction)
        except AutopipeError:
            return None
        fits = all(peak <= problem.memory_of(device) for device, peak in enumerate(timeline.peak_memory))
        return timeline.end if fits else None

    def _of(self, size: int) -> Problem:
        if size not in self._resized:
            self._resized[size] = resized(self.problem, size)
        return self._resized[size]


@dataclass(frozen=True, slots=True)
class GraphPipe:
    """Cuts the model's series-parallel graph into stages that take equally long, branches beside one another."""

    intra: Literal["data_parallel", "pase"] = "data_parallel"
    """How the devices of a stage share its work: by samples, or as the search for splits makes a step shorter."""

    per_stage_micro_batch: bool = False
    """True if stages get micro-batches of their own sizes where a step by kFkB is shorter with them."""

    name: ClassVar[str] = "graphpipe"

    def division(self, graph: Graph) -> Division:
        """It chooses the size of micro-batches."""
        return Division.OWN

    def requires(self, problem: Problem) -> None:
        """Raise InfeasibleError where there is nothing to place."""
        check_operators(problem)

    def run(self, problem: Problem) -> Placement:
        """The placement with the least expected step time.

        It uses all devices that make the slowest stage faster; others have no stage. Raises InfeasibleError where
        memory holds no stages, saying by how much those that need least exceed it, ConfigurationError for a constraint
        that the stages do not fulfil.
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
    """The stages with which all forms begin, or why there are none, which takes as long to find."""
    units = make_units(problem.graph)
    forward, backward = mean_seconds(problem)
    weights = [float((forward + backward)[list(nodes)].sum()) for nodes in units.nodes]
    found = decompose(units.needs, weights)
    trees = itertools.chain((found.tree,), other_orders(found.tree, units.needs, weights))
    try:
        best = MicroBatchSearch(problem, units, forward + backward).best(trees)
    except InfeasibleError as error:
        return error
    placement = replace(best, notes=region_notes(problem.graph, units, found.regions))
    check_stages(problem.graph, placement)
    return placement
