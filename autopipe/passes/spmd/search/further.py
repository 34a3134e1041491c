"""Stages that a strategy shares out by samples, split further where that makes a step shorter."""

from __future__ import annotations

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Schedule
from autopipe.passes.cost.resized import resized
from autopipe.passes.schedule.named.kfkb import KForwardsKBackwards
from autopipe.passes.schedule.predict import predict
from autopipe.passes.schedule.simulate import simulate
from autopipe.passes.spmd.search.exact import Exact
from autopipe.passes.spmd.search.stages import inside_of


def split_further(problem: Problem, placement: Placement) -> Placement:
    """`placement` with the splits of its stages of several devices found by the search for the best ones.

    Nodes, devices, micro-batches and recomputation stay, and so does a stage that memory holds no other splits of, or
    none with which it is busy for a shorter time and a step by kFkB (k = 1), as it is simulated, no longer.
    """
    sizes = {stage.micro_batch_size for stage in placement.stages}
    problem = resized(problem, max(sizes))
    own = {size: resized(problem, size) for size in sizes}
    schedule = KForwardsKBackwards().run(problem, placement)
    inside, solver = inside_of(problem, placement, {}), Exact(problem.time_limit)
    busy, step = _simulated(problem, placement, schedule)
    for index, stage in enumerate(placement.stages):
        if len(stage.devices) == 1:
            continue
        try:
            found = inside.split(placement, index, solver, own=own[stage.micro_batch_size]).placement
        except InfeasibleError:
            continue
        found_busy, found_step = _simulated(problem, found, schedule)
        if found_busy[index] < busy[index] and found_step <= step:
            placement, busy, step = found, found_busy, found_step
    return placement


def _simulated(problem: Problem, placement: Placement, schedule: Schedule) -> tuple[list[float], float]:
    """Seconds that each stage is busy with a round of micro-batches and a step's end, and seconds of a step."""
    prediction = predict(problem, placement)
    step = simulate(schedule, [stage.devices for stage in placement.stages], prediction).end
    rounds = (problem.batch_size // stage.micro_batch_size for stage in placement.stages)
    busy = [
        count * (each.forward_s + each.backward_s) + each.gradient_s + each.update_s
        for count, each in zip(rounds, prediction.stages, strict=True)
    ]
    return busy, step
