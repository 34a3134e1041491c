"""Limits of a simulated step: the memory there is, and the least time it could take.

A step of a placement, as it is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopipe.ir.errors import OutOfMemoryError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Schedule, StageGraph
from autopipe.ir.timeline import Prediction, Timeline
from autopipe.passes.cost.memory_check import size_text
from autopipe.passes.cost.stages import StageCost, step_seconds
from autopipe.passes.schedule.chain_step import Step, chain_step, is_chain
from autopipe.passes.schedule.predict import predicted, ticks_of
from autopipe.passes.schedule.published.one_f_one_b import order_kfkb
from autopipe.passes.schedule.simulate import simulate
from autopipe.passes.schedule.tessel.model import makespan_bound
from autopipe.passes.schedule.tessel.stage_blocks import stage_blocks

SAME = 1e-9
"""Relative difference of times that are equal but for the rounding of floats."""

_TICK_S = 1e-15
"""Seconds of a tick: small enough that rounding down to it is no more than rounding of floats."""


def check_memory(problem: Problem, placement: Placement, timeline: Timeline | Step) -> None:
    """Raise OutOfMemoryError, naming the device that misses its limit by most, its stages and by how much."""
    excess = {
        device: peak - problem.memory_of(device)
        for device, peak in enumerate(timeline.peak_memory)
        if peak > problem.memory_of(device)
    }
    if not excess:
        return
    device = max(excess, key=lambda each: (excess[each], -each))
    stages = [index for index, stage in enumerate(placement.stages) if device in stage.devices]
    named = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
    peak, limit, static = timeline.peak_memory[device], problem.memory_of(device), timeline.static_memory[device]
    others = f", and {len(excess) - 1} more devices exceed theirs" if len(excess) > 1 else ""
    raise OutOfMemoryError(
        f"{named} on device {device} would need {size_text(peak)} where {size_text(limit)} may be used: "
        f"{size_text(excess[device])} too much "
        f"({size_text(static)} are parameters, gradients, optimizer state and buffers){others}",
        hint="use smaller micro-batches, a schedule that keeps fewer of them, recomputation (--set recompute=full), "
        "more devices or a larger memory limit",
    )


def lower_bound(problem: Problem, placement: Placement, prediction: Prediction) -> float:
    """Seconds below which no schedule of this placement's work can be.

    The longest way of one micro-batch, and each device's computation between the earliest start and the least that
    follows; where backwards can be split, what follows is what their first halves need, and splitting costs nothing
    here, since whole ones do without. The update comes after.
    """
    stages = StageGraph.of(problem, placement)
    units = problem.micro_batches // stages.pipeline_count
    if not units:
        return 0.0
    free = replace(prediction, stages=tuple(replace(each, split_s=0.0) for each in prediction.stages))
    blocks = stage_blocks(stages, free, problem.train, _TICK_S, split=problem.train, up=False)
    return makespan_bound(blocks.graph, units) * _TICK_S + least_end(stages, prediction)


def least_end(stages: StageGraph, prediction: Prediction) -> float:
    """Seconds that a step takes at least after its last task: sums of gradients and the update."""
    ends: dict[int, float] = {}
    for devices, costs in zip(stages.stage_devices, prediction.stages, strict=True):
        for device in devices:
            ends[device] = ends.get(device, 0.0) + costs.gradient_s + costs.update_s
    return min(ends.values())


def quality(schedule: Schedule, step_s: float, bound_s: float) -> tuple[bool, float]:
    """True if the schedule is proven to be the best for its placement, and the share that lies above what is proven.

    Of a searched steady state the period counts, of any other schedule the step, against `bound_s`.
    """
    proof = schedule.proof
    if proof is not None and schedule.period is not None:
        value, bound, optimal = schedule.period, proof.lower_bound, proof.optimal
    else:
        value, bound, optimal = step_s, bound_s, proof is not None and proof.optimal
    gap = max(0.0, (value - bound) / value) if value else 0.0
    optimal = optimal or gap <= SAME
    return optimal, 0.0 if optimal else gap


def busy_s(costs: Sequence[StageCost], micro_batches: int) -> float:
    """Seconds that the busiest stage takes of a step: the step is no shorter."""
    return max(step_seconds(cost, micro_batches) for cost in costs)


def step_s(problem: Problem, placement: Placement, costs: Sequence[StageCost]) -> float:
    """Seconds of a step under 1F1B with stages of such costs, whatever memory says."""
    return _step(problem, placement, costs).end


def quick_step_seconds(problem: Problem, placement: Placement, costs: Sequence[StageCost]) -> float:
    """The same. Raises InfeasibleError where memory does not hold the placement."""
    step = _step(problem, placement, costs)
    check_memory(problem, placement, step)
    return step.end


def _step(problem: Problem, placement: Placement, costs: Sequence[StageCost]) -> Timeline | Step:
    graph, prediction = StageGraph.of(problem, placement), predicted(problem, placement, costs)
    if is_chain(graph, prediction):
        return chain_step(graph, prediction, problem.micro_batches, problem.train)
    ks = (1,) * len(placement.stages)
    schedule = order_kfkb(graph, problem.micro_batches, ks, problem.train, ticks_of(prediction.stages))
    return simulate(schedule, graph.stage_devices, prediction)
