"""One placement under every schedule that takes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from autopipe.cli.drawing.comparison import ScheduleResult
from autopipe.cli.output import Output
from autopipe.ir.block_schedule import BlockSchedule, check_blocks
from autopipe.ir.errors import AutopipeError
from autopipe.ir.plan import Plan
from autopipe.ir.schedule import StageGraph
from autopipe.ir.timeline import Timeline
from autopipe.passes.pipeline import PlanResult
from autopipe.passes.registry import scheduler_class, scheduler_names
from autopipe.passes.schedule.csv_order import CsvOrder
from autopipe.passes.schedule.published.blocks import block_schedule_names, schedule_blocks
from autopipe.passes.schedule.simulate import simulate
from autopipe.passes.schedule.tessel.model import SearchOptions
from autopipe.passes.schedule.tessel.search import search


def compare_plan_schedules(plan: Plan, timeline: Timeline, planned: PlanResult, output: Output) -> list[ScheduleResult]:
    """The plan's placement under each registered scheduler with its default options, by the plan's own predictions."""
    chosen = plan.summary.schedule
    rivals = [ScheduleResult(chosen, timeline.end, timeline.bubble_rate, timeline.peak_memory, chosen=True)]
    # csv follows a file that somebody names: there is nothing to compare.
    names = [name for name in scheduler_names() if name not in (chosen, CsvOrder.name)]
    with output.progress("comparing schedules", total=len(names)) as bar:
        for name in names:
            bar.advance(0, note=name)
            rivals.append(_rival(name, partial(_stepped, name, plan, planned)))
            bar.advance()
    return rivals


def _stepped(name: str, plan: Plan, planned: PlanResult) -> ScheduleResult:
    problem, placement = planned.problem, plan.placement
    scheduler = scheduler_class(name)()
    scheduler.requires(problem, placement)
    schedule = scheduler.run(problem, placement)
    graph = StageGraph.of(problem, placement)
    schedule.verify(graph, problem.train)
    timeline = simulate(schedule, graph.stage_devices, plan.prediction)
    return ScheduleResult(name, timeline.end, timeline.bubble_rate, timeline.peak_memory)


def compare_block_schedules(schedule: BlockSchedule, output: Output) -> list[ScheduleResult]:
    """The blocks under each named schedule and the search, beside the schedule at hand, which has no name."""
    names = ("tessel", *block_schedule_names())
    rivals = [_blocks("this one", schedule, chosen=True)]
    with output.progress("comparing schedules", total=len(names)) as bar:
        for name in names:
            bar.advance(0, note=name)
            rivals.append(_rival(name, partial(_scheduled, name, schedule)))
            bar.advance()
    return rivals


def _scheduled(name: str, schedule: BlockSchedule) -> ScheduleResult:
    graph, units = schedule.graph, schedule.units
    found = search(graph, units, SearchOptions()) if name == "tessel" else schedule_blocks(name, graph, units)
    check_blocks(found)
    return _blocks(name, found)


def _blocks(name: str, schedule: BlockSchedule, chosen: bool = False) -> ScheduleResult:
    busy = sum(schedule.graph.loads) * schedule.units
    bubble = 1.0 - busy / (schedule.graph.devices * schedule.makespan)
    return ScheduleResult(name, schedule.makespan, bubble, schedule.peak_memory, chosen=chosen)


def _rival(name: str, run: Callable[[], ScheduleResult]) -> ScheduleResult:
    try:
        return run()
    except AutopipeError as error:
        return ScheduleResult(name, refusal=" ".join(str(error).partition("\n")[0].split()))
