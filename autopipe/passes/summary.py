"""Create a `Plan` from a placement, a schedule and a simulated step, with the metrics that users
compare.
"""

from __future__ import annotations

from pathlib import Path

from autopipe.ir.errors import CodegenError
from autopipe.ir.graph import tokens_per_sample
from autopipe.ir.placement import Placement
from autopipe.ir.plan import LossScores, Plan, Summary
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Schedule, StageGraph
from autopipe.ir.timeline import Prediction, Timeline
from autopipe.passes.analysis.layer_ranges import model_parts
from autopipe.passes.cost.measured import cost_coverage
from autopipe.passes.degrees import plan_degrees
from autopipe.passes.lower.traffic import communication_bytes
from autopipe.passes.schedule.breakdown import breakdown
from autopipe.passes.schedule.limits import lower_bound, optimality


def finished_plan(
    model: Path,
    names: tuple[str, str],
    problem: Problem,
    placement: Placement,
    prediction: Prediction,
    schedule: Schedule,
    timeline: Timeline,
    search_time_s: tuple[tuple[str, float], ...],
    scores: LossScores | None,
    settled: tuple[str, ...] = (),
) -> Plan:
    """Return the plan of the file `model`.

    names: names of the strategy and of the scheduler.
    prediction, timeline: costs of the stages, and the simulated step.
    search_time_s: pairs (name of a strategy or scheduler, seconds of its search).
    scores: comparison of the two variants of the losses; None if there is only one.
    settled: names of the options of the strategy that the user left open and that follow from the
    parallel degrees of the plan.
    """
    cluster = problem.cluster
    graph = problem.graph
    batch_axes = dict(graph.batch_axes)
    peak_flops = timeline.end * problem.peak_flops
    bound = lower_bound(problem, placement, prediction)
    if schedule.proof is not None and schedule.period is None:
        bound = max(bound, schedule.proof.lower_bound)
    optimal, gap = optimality(schedule, timeline.end, bound)
    summary = Summary(
        *names,
        devices=cluster.size,
        stages=len(placement.stages),
        micro_batches=problem.micro_batches,
        micro_batch_size=problem.micro_batch_size,
        depth=StageGraph.of(problem, placement).depth,
        step_time_s=timeline.end,
        samples_per_s=problem.batch_size / timeline.end if timeline.end else 0.0,
        bubble_rate=timeline.bubble_rate,
        peak_memory_bytes=timeline.peak_memory,
        search_time_s=search_time_s,
        lower_bound_s=bound,
        optimal=optimal,
        gap=gap,
        communication_bytes=_communication_bytes(problem, placement),
        splits=placement.proof,
        costs=cost_coverage(problem),
        scores=scores,
        bound_holds_for="placement",
        degrees=plan_degrees(problem, placement, settled),
        tokens_per_sample=tokens_per_sample(
            (value, batch_axes.get(value.name)) for value in graph.inputs
        ),
        mfu=problem.step_flops / peak_flops if peak_flops else None,
    )
    return Plan(
        model=str(model),
        graph_digest=problem.graph.digest(),
        mode=problem.mode.value,
        batch_size=problem.batch_size,
        placement=placement,
        schedule=schedule,
        summary=summary,
        prediction=prediction,
        memory_limits=tuple(map(problem.memory_of, range(cluster.size))),
        device_names=tuple(device.name for device in cluster.devices) if cluster.groups else (),
        loss_division=problem.loss_division,
        breakdown=breakdown(problem, placement, schedule, prediction, timeline.end),
        stage_parts=tuple(model_parts(graph, stage.nodes) for stage in placement.stages),
    )


def _communication_bytes(
    problem: Problem, placement: Placement
) -> tuple[tuple[str, int], ...] | None:
    """Return pairs (kind of communication, bytes that it moves in a step); None if code generation
    does not support the placement.
    """
    loss = problem.loss if problem.train else None
    count = problem.micro_batches
    how = (problem.optimizer.shard, problem.precision)
    try:
        found = communication_bytes(
            problem.graph, placement, count, problem.cluster.size, loss, *how
        )
    except CodegenError:
        return None
    return tuple(found.items())
