"""A step of a placement, as it is simulated."""

from __future__ import annotations

from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.stage_graph import StageGraph
from autopipe.passes.cost.fit import out_of_memory
from autopipe.passes.schedule.named.kfkb import order_kfkb
from autopipe.passes.schedule.predict import predict, ticks_of
from autopipe.passes.schedule.simulate import simulate


def simulated_s(problem: Problem, placement: Placement) -> float:
    """Seconds of a step under 1F1B. Raises InfeasibleError where memory does not hold it."""
    graph, prediction = StageGraph.of(problem, placement), predict(problem, placement)
    ks = (1,) * len(placement.stages)
    schedule = order_kfkb(graph, problem.micro_batches, ks, problem.train, ticks_of(prediction.stages))
    timeline = simulate(schedule, graph.stage_devices, prediction)
    excess = [peak - problem.memory_of(device) for device, peak in enumerate(timeline.peak_memory)]
    device = max(range(len(excess)), key=excess.__getitem__)
    if excess[device] > 0:
        stages = [number for number, stage in enumerate(placement.stages) if device in stage.devices]
        raise out_of_memory(problem, stages, len(ks), device, timeline.peak_memory[device])
    return timeline.end
