"""Micro-batches of stages' own sizes, where a step is shorter with them (Jeon et al., "GraphPipe", section 6)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from autopipe.ir.errors import AutopipeError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import StageGraph, depths_to_end
from autopipe.passes.cost.measured import resized
from autopipe.passes.placement.graphpipe.check import check_schedule
from autopipe.passes.schedule.predict import predict, ticks_of
from autopipe.passes.schedule.published.one_f_one_b import order_kfkb
from autopipe.passes.schedule.simulate import simulate

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
