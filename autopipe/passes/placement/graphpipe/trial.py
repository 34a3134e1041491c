"""A step of a placement as the simulator sees it: what the search's own prices are held against."""

from __future__ import annotations

from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import StageGraph
from autopipe.passes.placement.graphpipe.check import check_schedule
from autopipe.passes.schedule.predict import predict, ticks_of
from autopipe.passes.schedule.published.one_f_one_b import order_1f1b
from autopipe.passes.schedule.simulate import simulate

_PERIODS = 3
"""Micro-batches, times the stages' depth, after which a step goes on as it did."""


def trial(problem: Problem, placement: Placement) -> tuple[float, float]:
    """Seconds of a step under 1F1B, and the share of its memory that the fullest device needs.

    `problem` is that of the placement's micro-batches.
    Of many micro-batches the first are simulated; the others take as long as the last of those.
    """
    graph = StageGraph.of(problem, placement)
    prediction = predict(problem, placement)
    ticks = ticks_of(prediction.stages)
    ends = []
    most = 0.0
    count = problem.micro_batches
    enough = _PERIODS * graph.depth + 2
    for micro_batches in (count,) if count <= enough + graph.depth else (enough, enough + graph.depth):
        schedule = order_1f1b(graph, micro_batches, problem.train, ticks)
        check_schedule(schedule)
        timeline = simulate(schedule, graph.stage_devices, prediction)
        ends.append(timeline.end)
        shares = [peak / problem.memory_of(device) for device, peak in enumerate(timeline.peak_memory)]
        most = max(most, *shares)
    if len(ends) == 1:
        return ends[0], most
    return ends[1] + (ends[1] - ends[0]) / graph.depth * (count - enough - graph.depth), most
