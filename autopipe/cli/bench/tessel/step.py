"""The step that a placement and a scheduler make, in the simulator."""

from __future__ import annotations

from dataclasses import replace

from autopipe.cli.bench.tessel.layer_memory import layer_memory, most_in_flight
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.stage_graph import StageGraph
from autopipe.passes.base import Scheduler
from autopipe.passes.cost.fit import device_memory, in_flight
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.schedule.predict import predict
from autopipe.passes.schedule.simulate import simulate


def step_seconds(problem: Problem, placement: Placement, scheduler: Scheduler) -> float:
    """Seconds of a step. Raises InfeasibleError where the scheduler does not apply or memory does not suffice."""
    placement.verify(problem.graph)
    scheduler.requires(problem, placement)
    schedule = scheduler.run(_limited(problem, placement) if problem.train else problem, placement)
    graph = StageGraph.of(problem, placement)
    if problem.train:
        room = problem.cluster.devices[0].memory_bytes
        used = max(layer_memory(problem, placement, most_in_flight(placement, schedule)))
        if used > room:
            raise InfeasibleError(f"out of memory: {used / 2**30:.1f} GiB of {room / 2**30:.1f}")
    return simulate(schedule, graph.stage_devices, predict(problem, placement)).end


def _limited(problem: Problem, placement: Placement) -> Problem:
    """The problem with a limit that says for stages recomputed whole what the devices' memory says for layers."""
    coarse = device_memory(problem, placement, stage_costs(problem, placement))
    fine = layer_memory(problem, placement, in_flight(problem, placement))
    spare = min(whole - layers for whole, layers in zip(coarse, fine, strict=True))
    return replace(problem, memory_limit=problem.cluster.devices[0].memory_bytes + spare)
