"""Schedules of a placement, with their simulated steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopipe.ir.errors import OutOfMemoryError
from autopipe.ir.schedule import Schedule
from autopipe.ir.timeline import Timeline
from autopipe.passes.cost.memory_check import without_16_bit_copies
from autopipe.passes.pipeline.placing import PredictedPlacement, predict_placement, run_strategy
from autopipe.passes.pipeline.request import Request, strategy_and_scheduler
from autopipe.passes.pipeline.runner import Runner
from autopipe.passes.registry import Scheduler
from autopipe.passes.schedule.limits import check_memory
from autopipe.passes.schedule.predict import predict
from autopipe.passes.schedule.simulate import simulate


@dataclass(frozen=True, slots=True)
class SimulatedSchedule:
    """A schedule of a placement, with a simulated step that fits the memory of all devices."""

    schedule: Schedule
    timeline: Timeline


def place_and_schedule(
    request: Request, runner: Runner
) -> tuple[PredictedPlacement, SimulatedSchedule]:
    """Return (placement, schedule) of a request that names strategy and scheduler. Raise the errors
    of `make_plan`.
    """
    strategy, scheduler = strategy_and_scheduler(request)
    placed = predict_placement(*run_strategy(request, strategy, runner), runner)
    return schedule_placed(placed, scheduler, runner)


def schedule_placed(
    placed: PredictedPlacement, scheduler: Scheduler, runner: Runner
) -> tuple[PredictedPlacement, SimulatedSchedule]:
    """Return (placed, scheduled): the placement, and its schedule with the simulated step.

    If memory does not suffice, the placement is changed so that stages that recompute keep no
    16-bit copies of their parameters. Raise InfeasibleError if the scheduler does not support the
    placement, or if memory does not suffice then either.
    """
    try:
        return placed, simulate_schedule(placed, run_scheduler(placed, scheduler, runner), runner)
    except OutOfMemoryError:
        if not any(stage.holds_copies for stage in placed.placement.stages):
            raise
    placement = without_16_bit_copies(placed.placement)
    prediction = runner.run("predict", lambda: predict(placed.problem, placement))
    placed = replace(placed, placement=placement, prediction=prediction)
    return placed, simulate_schedule(placed, run_scheduler(placed, scheduler, runner), runner)


def run_scheduler(placed: PredictedPlacement, scheduler: Scheduler, runner: Runner) -> Schedule:
    """Return the verified schedule that a scheduler creates. Raise InfeasibleError if it does not
    support the placement.
    """
    return runner.run(
        scheduler.name,
        lambda: scheduler.run(placed.problem, placed.placement),
        lambda: scheduler.requires(placed.problem, placed.placement),
        lambda result: result.verify(placed.graph, placed.problem.train),
    )


def simulate_schedule(
    placed: PredictedPlacement,
    schedule: Schedule,
    runner: Runner,
    known: tuple[SimulatedSchedule, ...] = (),
) -> SimulatedSchedule:
    """Return a schedule with its simulated step. If a schedule in `known` has the same tasks in the
    same order on each device, its step is used. Raise OutOfMemoryError if the memory of a device
    does not suffice.
    """
    same = next((each for each in known if each.schedule.has_orders_of(schedule)), None)
    if same is not None:
        return SimulatedSchedule(schedule, same.timeline)
    timeline = runner.run(
        "simulate", lambda: simulate(schedule, placed.graph.stage_devices, placed.prediction)
    )
    check_memory(placed.problem, placed.placement, timeline)
    return SimulatedSchedule(schedule, timeline)
