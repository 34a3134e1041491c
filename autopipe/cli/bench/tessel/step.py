"""The step that a placement and a scheduler make, in the simulator."""

from __future__ import annotations

from dataclasses import replace

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import StageGraph
from autopipe.passes.registry import Scheduler
from autopipe.passes.schedule.predict import predict
from autopipe.passes.schedule.simulate import simulate
from autopipe.passes.schedule.tessel.scheduler import Tessel


def step_seconds(problem: Problem, placement: Placement, scheduler: Scheduler) -> float:
    """Seconds of a step. Raises InfeasibleError where the scheduler does not apply or memory does not suffice."""
    placement.verify(problem.graph)
    scheduler.requires(problem, placement)
    prediction = predict(problem, placement)
    if isinstance(scheduler, Tessel):  # The one that asks for memory.
        schedule = scheduler.run_with(replace(problem, memory_limit=None), placement, prediction)
    else:
        schedule = scheduler.run(problem, placement)
    step = simulate(schedule, StageGraph.of(problem, placement).stage_devices, prediction)
    used, room = max(step.peak_memory), problem.cluster.devices[0].memory_bytes
    if used > room:
        raise InfeasibleError(f"out of memory: {used / 2**30:.1f} GiB of {room / 2**30:.1f}")
    return step.end
