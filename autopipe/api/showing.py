"""Command `show`: open a plan or a schedule of blocks, compare its schedule with other schedules,
and lower it to the task graphs of its ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from autopipe.api.events import Events
from autopipe.api.plan_folder import open_plan, open_prediction
from autopipe.api.timeline_figure import Picture, block_picture, plan_picture
from autopipe.ir.block_schedule import (
    BlockSchedule,
    block_schedule_json,
    check_start_times,
    read_block_schedule,
)
from autopipe.ir.codec import encode
from autopipe.ir.errors import AutopipeError, ConfigurationError
from autopipe.ir.plan import Plan
from autopipe.ir.program import Program
from autopipe.ir.schedule import StageGraph
from autopipe.ir.timeline import Timeline
from autopipe.ir.words import plural
from autopipe.passes.lower.task_graph import TaskGraph, TaskSource
from autopipe.passes.registry import scheduler_class, scheduler_names
from autopipe.passes.schedule.csv_order import CsvOrder
from autopipe.passes.schedule.published.blocks import block_schedule_names, schedule_blocks
from autopipe.passes.schedule.simulate import simulate
from autopipe.passes.schedule.tessel.model import SearchOptions
from autopipe.passes.schedule.tessel.search import search

Outcome = tuple[float, float, tuple[int, ...]]
"""Results of a schedule: its length, its bubble rate, and the peak memory of each device."""


@dataclass(frozen=True, slots=True)
class ScheduleResult:
    """Result of a schedule for the placement or the blocks, or the reason why the schedule does
    not support them.
    """

    schedule: str
    time: float = 0.0
    """Length of a step, or of all micro-batches of a schedule of blocks."""
    bubble_rate: float = 0.0
    peak_memory: tuple[int, ...] = ()
    """Peak memory per device; () if the schedule does not support the placement."""
    refusal: str = ""
    """Reason why the schedule does not support the placement; "" if it does."""
    chosen: bool = False
    """True for the schedule of the plan or of the file."""


@dataclass(frozen=True, slots=True)
class PlanView:
    """A plan and a step simulated from its predictions."""

    folder: Path
    model: Path | None
    """ONNX file to use instead of the planned one, or None."""
    plan: Plan
    timeline: Timeline

    @property
    def picture(self) -> Picture:
        return plan_picture(self.plan, self.timeline)

    def schedule_results(self, events: Events) -> list[ScheduleResult]:
        """Return the results of the plan's schedule and of other schedules for its placement.

        The other schedules require the graph of the plan. If it cannot be read, warn and return [].
        """
        try:
            planned = open_plan(self.folder, self.model)
        except AutopipeError as error:
            events.warn(f"the page lacks other schedules: {error.message}", error.hint)
            return []
        problem = planned.problem
        placement = self.plan.placement
        graph = StageGraph.of(problem, placement)

        def outcome(timeline: Timeline) -> Outcome:
            return timeline.end, timeline.bubble_rate, timeline.peak_memory

        def run(name: str) -> Outcome:
            scheduler = scheduler_class(name)()
            scheduler.requires(problem, placement)
            schedule = scheduler.run(problem, placement)
            schedule.verify(graph, problem.train)
            return outcome(simulate(schedule, graph.stage_devices, self.plan.prediction))

        chosen = self.plan.summary.schedule
        # The schedule `csv` reads its orders from a file, which describes one placement only. So
        # the comparison omits it.
        names = [name for name in scheduler_names() if name not in (chosen, CsvOrder.name)]
        return _schedule_results(chosen, outcome(self.timeline), names, run, events)

    def data(self) -> dict[str, object]:
        """Return the data of `show --json`."""
        plan = self.plan
        parts = plan.stage_parts or ((),) * len(plan.placement.stages)
        stages = zip(plan.placement.stages, parts, plan.prediction.stages, strict=True)
        return {
            "plan": self.folder,
            "model": plan.model,
            "mode": plan.mode,
            "summary": encode(plan.summary),
            "static_memory_bytes": self.timeline.static_memory,
            "stages": [
                {
                    "devices": each.devices,
                    "nodes": len(each.nodes),
                    "layers": held,
                    "micro_batch_size": each.micro_batch_size,
                    "recompute": each.recompute,
                    "predicted": predicted,
                }
                for each, held, predicted in stages
            ],
            "tasks": [[str(task) for task in order] for order in plan.schedule.tasks],
        }


@dataclass(frozen=True, slots=True)
class BlockView:
    """A schedule of blocks."""

    file: Path
    schedule: BlockSchedule
    title: str

    @property
    def picture(self) -> Picture:
        return block_picture(self.schedule, self.title)

    def schedule_results(self, events: Events) -> list[ScheduleResult]:
        """Return the results of this schedule, of Tessel's search and of published schedules for
        its blocks.
        """
        graph = self.schedule.graph
        units = self.schedule.units

        def outcome(schedule: BlockSchedule) -> Outcome:
            bubble = 1.0 - sum(graph.loads) * units / (graph.devices * schedule.makespan)
            return schedule.makespan, bubble, schedule.peak_memory

        def run(name: str) -> Outcome:
            found = (
                search(graph, units, SearchOptions())
                if name == "tessel"
                else schedule_blocks(name, graph, units)
            )
            check_start_times(found)
            return outcome(found)

        names = ("tessel", *block_schedule_names())
        return _schedule_results("this one", outcome(self.schedule), names, run, events)

    def data(self) -> dict[str, object]:
        """Return the data of `show --json`."""
        return {"file": self.file, **block_schedule_json(self.schedule)}


def open_view(path: Path, model: Path | None = None) -> PlanView | BlockView:
    """Return the plan in the folder `path`, or the schedule of blocks in the file `path`. `model`
    is an ONNX file that replaces the planned one. Raises ConfigurationError if `path` is neither.
    """
    if not path.is_file():
        return PlanView(path, model, *open_prediction(path))
    try:
        with path.open("rb") as file:
            start = file.read(64).lstrip()[:1]
    except OSError as error:
        raise ConfigurationError(f"the file {path} cannot be read: {error.strerror}") from error
    # A file that does not start like JSON is neither a plan nor a schedule. It may be an ONNX
    # model, for example.
    if start != b"{":
        hint = "create a plan with autopipe plan, or a schedule with autopipe schedule -o FILE"
        raise ConfigurationError(f"{path} is neither a plan folder nor a schedule of blocks", hint)
    schedule = read_block_schedule(path)
    return BlockView(path, schedule, blocks_title(schedule, path.name))


def blocks_title(schedule: BlockSchedule, source: str) -> str:
    """Return the name of the file of a schedule of blocks, with its sizes."""
    graph = schedule.graph
    noun = "micro-batch"
    per_unit = ""
    if graph.micro_batches_per_unit > 1:
        noun = "micro-batch group"
        size = graph.micro_batches_per_unit
        per_unit = f" of {size} {plural(size, 'micro-batch')}"
    return (
        f"{source}: {len(graph.blocks)} {plural(len(graph.blocks), 'block')} on {graph.devices} "
        f"{plural(graph.devices, 'device')}, {schedule.units} "
        f"{plural(schedule.units, noun)}{per_unit}"
    )


def _schedule_results(
    chosen: str,
    outcome: Outcome,
    names: Sequence[str],
    run: Callable[[str], Outcome],
    events: Events,
) -> list[ScheduleResult]:
    """Return the result of the chosen schedule, and of each schedule in `names` with its default
    options, for the same placement or blocks.
    """
    found = [ScheduleResult(chosen, *outcome, chosen=True)]
    with events.progress("comparing schedules", total=len(names)) as bar:
        for name in names:
            bar.advance(0, note=name)
            try:
                found.append(ScheduleResult(name, *run(name)))
            except AutopipeError as error:
                found.append(
                    ScheduleResult(name, refusal=" ".join(str(error).partition("\n")[0].split()))
                )
            bar.advance()
    return found


@dataclass(frozen=True, slots=True)
class PlanTasks:
    """The program of a plan, and the source of the task graphs of its ranks."""

    program: Program
    source: TaskSource


def open_tasks(folder: Path, rank: int | None, model: Path | None = None) -> PlanTasks:
    """Return the program of the plan in `folder`. `model` is an ONNX file that replaces the planned
    one. Raises ConfigurationError if there is no plan, or if it has no rank `rank`.
    """
    from autopipe.api.codegen import lower_plan

    planned = open_plan(folder, model)
    plan = planned.plan
    problem = planned.problem
    devices = plan.schedule.devices
    if rank is not None and rank >= devices:
        raise ConfigurationError(
            f"rank {rank} does not exist", hint=f"use ranks 0 to {devices - 1} of the plan"
        )
    program = lower_plan(planned)
    source = TaskSource(program, problem.graph, plan.placement, plan.prediction.stages)
    return PlanTasks(program, source)


def task_graph_data(graph: TaskGraph) -> dict[str, object]:
    """Return the tasks of a rank as data of `show --tasks --json`. The `id` of a task is its
    position in the order of the rank.
    """
    tasks = []
    for place, node in enumerate(graph.nodes):
        facts = {field.name: getattr(node, field.name) for field in fields(node)}
        optional = {name: facts.pop(name) for name in ("messages", "group", "inside", "what")}
        known = {name: value for name, value in optional.items() if value not in ((), "", None)}
        tasks.append({"id": place, **facts, "memory_bytes": graph.memory_bytes[place], **known})
    return {
        "rank": graph.rank,
        "static_memory_bytes": graph.static_bytes,
        "peak_memory_bytes": graph.peak_bytes,
        "tasks": tasks,
        "loops": [
            {
                "section": each.section,
                "first": each.start,
                "tasks": each.end - each.start,
                "times": each.count,
            }
            for each in graph.loops
            if each.count > 1
        ],
    }
