"""`autopipe show`: the timeline and the memory of a plan, or of a schedule of blocks, beside other schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click
from rich.console import RenderableType

from autopipe.cli.drawing.picture import Picture, block_picture, plan_picture
from autopipe.cli.drawing.report import ScheduleResult
from autopipe.cli.drawing.terminal import draw_memory, draw_timeline
from autopipe.cli.options import standard_options
from autopipe.cli.output import Output
from autopipe.cli.plan_folder import open_plan, open_prediction
from autopipe.cli.plan_text import prediction_line, schedule_line, stage_table, traffic_line
from autopipe.ir.block_schedule import BlockSchedule, block_schedule_form, check_blocks, read_block_schedule
from autopipe.ir.codec import encode
from autopipe.ir.errors import AutopipeError, ConfigurationError
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

if TYPE_CHECKING:
    from autopipe.cli.drawing.report import Report


_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("plan", metavar="DIR|FILE", type=_FILE)
@click.option("--html", metavar="FILE", type=_FILE, help="Write a report as one page, compared with other schedules.")
@click.option("--trace", metavar="FILE", type=_FILE, help="Write a Chrome trace (Perfetto).")
@click.option("--measured", metavar="FILE", type=_FILE, help="Put what launch --trace wrote into --trace, too.")
@click.option("--csv", metavar="FILE", type=_FILE, help="Write the order in PyTorch's schedule CSV: a row a rank.")
@click.option("--svg", metavar="FILE", type=_FILE, help="Write the timeline as a picture.")
@click.option("--tasks", is_flag=True, help="Show what each rank does in a step, task by task; --json has all of it.")
@click.option("--rank", type=click.IntRange(min=0), help="The rank whose --tasks are shown [0, with a table of all].")
@standard_options
def show(
    output: Output,
    plan: Path,
    html: Path | None,
    trace: Path | None,
    measured: Path | None,
    csv: Path | None,
    svg: Path | None,
    tasks: bool,
    rank: int | None,
) -> None:
    """Show the timeline and the memory of the plan in DIR, or of FILE, a schedule of blocks.

    In the timeline F3 is the forward of micro-batch 3, B3 its backward, I3 and W3 the halves of a split one; 2F3 names
    the stage where a device has several, f3 a block on several devices. A plan's model is needed for --html, to compare
    schedules, and for --tasks.

    \b
    Example:
      autopipe show gpt.onnx.plan
      autopipe show gpt.onnx.plan --html report.html --trace trace.json
      autopipe show gpt.onnx.plan --tasks --rank 2
      autopipe show schedule.json --csv order.csv
    """
    from autopipe.cli.drawing.report import report_page
    from autopipe.cli.drawing.svg import timeline_svg
    from autopipe.cli.drawing.trace import chrome_trace, orders_csv, read_measured
    from autopipe.cli.output import check_writable, write_texts
    from autopipe.cli.tasks import TaskView

    if rank is not None and not tasks:
        raise click.UsageError("--rank goes with --tasks")
    if measured is not None and trace is None:
        raise ConfigurationError("--measured goes with --trace", hint="name the file to write with --trace FILE")
    given = (("html", html), ("trace", trace), ("csv", csv), ("svg", svg))
    files = {kind: path for kind, path in given if path is not None}
    if tasks:
        if files:
            raise click.UsageError(f"--tasks is shown here: leave out --{next(iter(files))}")
        graphs = TaskView.open(plan, rank)
        output.result(graphs.data() if output.as_json else {}, *graphs.screen())
        return
    for path in files.values():
        check_writable(path)
    found = open_view(plan)
    writers = {
        "html": lambda: report_page(found.report(output)),
        "trace": lambda: chrome_trace(found.picture, () if measured is None else read_measured(measured)),
        "csv": lambda: orders_csv(found.picture),
        "svg": lambda: timeline_svg(found.picture),
    }
    write_texts({path: writers[kind]() for kind, path in files.items()})
    shown = [f"{kind} in {path}" for kind, path in files.items()] or found.screen(output)
    output.result({**found.data(), "files": files}, *shown)


def block_screen(schedule: BlockSchedule, title: str, width: int, colour: bool) -> Iterator[RenderableType]:
    """How good it is, its timeline and its memory, a device each."""
    picture = block_picture(schedule, title)
    yield title
    yield from _quality(schedule)
    yield ""
    yield from draw_timeline(picture, width, colour)
    yield ""
    yield from draw_memory(picture, width, colour)


def block_title(schedule: BlockSchedule, source: str) -> str:
    """Title: the blocks and their file."""
    graph = schedule.graph
    per_unit = f" of {graph.micro_batches_per_unit} micro-batches" if graph.micro_batches_per_unit > 1 else ""
    return f"{source}: {len(graph.blocks)} blocks on {graph.devices} devices, {schedule.units} units{per_unit}"


def _quality(schedule: BlockSchedule) -> Iterator[str]:
    """Period and makespan, each with what is proven of it, and the bubble."""
    if schedule.period is None:
        yield f"no steady state; makespan {schedule.makespan} ({_proof(schedule)})"
    elif schedule.repetend is None:
        yield f"period {schedule.period}; makespan {schedule.makespan} ({_proof(schedule)})"
    else:
        yield f"period {schedule.period} ({_proof(schedule)}); makespan {schedule.makespan}"
    steady = schedule.steady_bubble_rate
    within = "" if steady is None else f"{steady:.1%} in the steady state, "
    busy = max(schedule.graph.loads) * schedule.units
    yield f"bubble {within}{1 - busy / schedule.makespan:.1%} in all; search {schedule.search_time_s:.2f} s"


def _proof(schedule: BlockSchedule) -> str:
    """How good the figure before it is proven to be."""
    if schedule.optimal:
        return "optimal, proven"
    return f"at least {schedule.lower_bound}, gap {schedule.gap:.1%}" if schedule.lower_bound else "no bound known"


class View(Protocol):
    """Something to draw."""

    @property
    def picture(self) -> Picture:
        """Its timeline and memory."""

    def report(self, output: Output) -> Report:
        """Its page; compared with every other schedule, which may take a while."""

    def screen(self, output: Output) -> Iterator[RenderableType]:
        """Lines for the terminal."""

    def data(self) -> dict[str, object]:
        """The same for a program."""


def open_view(path: Path) -> View:
    """The plan of a folder, or the schedule of blocks of a file. Raises ConfigurationError."""
    if path.is_file():
        _check_json(path)
        return BlockView(path, read_block_schedule(path))
    return PlanView(path, *open_prediction(path))


def _check_json(path: Path) -> None:
    """Raise ConfigurationError for a file that cannot be a schedule, such as a model."""
    try:
        with path.open("rb") as file:
            start = file.read(64).lstrip()[:1]
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    if start != b"{":
        hint = "autopipe plan makes the one, autopipe schedule -o FILE the other"
        raise ConfigurationError(f"{path} is neither the folder of a plan nor a schedule of blocks", hint)


@dataclass(frozen=True, slots=True)
class PlanView:
    """A plan and the step that its predictions make."""

    folder: Path
    plan: Plan
    timeline: Timeline

    @property
    def picture(self) -> Picture:
        return plan_picture(self.plan, self.timeline)

    def report(self, output: Output) -> Report:
        """Its page. Other schedules need the model; where it is gone or changed, a warning says so."""
        from autopipe.cli.drawing.report import plan_report

        try:
            planned = open_plan(self.folder)
        except AutopipeError as error:
            output.warn(f"no other schedules on the page: {error.message}", error.hint)
            return plan_report(self.plan, self.timeline, ())
        return plan_report(self.plan, self.timeline, compare_plan_schedules(self.plan, self.timeline, planned, output))

    def screen(self, output: Output) -> Iterator[RenderableType]:
        """The decisions, the timeline, the memory, the stages."""
        plan, summary, picture = self.plan, self.plan.summary, self.picture
        yield (
            f"{plan.model}: {summary.strategy} with {summary.schedule}, {plan.mode}, {summary.devices} devices, "
            f"{summary.micro_batches} micro-batches of {summary.micro_batch_size}"
        )
        yield prediction_line(summary)
        yield traffic_line(summary)
        yield schedule_line(plan)
        yield ""
        yield from draw_timeline(picture, output.width, output.coloured)
        yield ""
        yield from draw_memory(picture, output.width, output.coloured)
        yield ""
        yield stage_table(plan)

    def data(self) -> dict[str, object]:
        plan = self.plan
        stages = zip(plan.placement.stages, plan.prediction.stages, strict=True)
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
                    "micro_batch_size": each.micro_batch_size,
                    "recompute": each.recompute,
                    "predicted": predicted,
                }
                for each, predicted in stages
            ],
            "tasks": [[str(task) for task in order] for order in plan.schedule.tasks],
        }


@dataclass(frozen=True, slots=True)
class BlockView:
    """A schedule of blocks and the file that it is from."""

    file: Path
    schedule: BlockSchedule

    @property
    def picture(self) -> Picture:
        return block_picture(self.schedule, self._title)

    @property
    def _title(self) -> str:
        return block_title(self.schedule, self.file.name)

    def report(self, output: Output) -> Report:
        from autopipe.cli.drawing.report import block_report

        return block_report(self.schedule, self._title, str(self.file), compare_block_schedules(self.schedule, output))

    def screen(self, output: Output) -> Iterator[RenderableType]:
        """How good it is, the timeline, the memory."""
        return block_screen(self.schedule, self._title, output.width, output.coloured)

    def data(self) -> dict[str, object]:
        """The schedule as its file has it."""
        return {"file": self.file, **block_schedule_form(self.schedule)}


def compare_plan_schedules(plan: Plan, timeline: Timeline, planned: PlanResult, output: Output) -> list[ScheduleResult]:
    """The plan's placement under each registered scheduler with its default options, by the plan's own predictions."""
    chosen = plan.summary.schedule
    rivals = [ScheduleResult(chosen, timeline.end, timeline.bubble_rate, timeline.peak_memory, chosen=True)]
    # csv follows a file that somebody names: there is nothing to compare.
    names = [name for name in scheduler_names() if name not in (chosen, CsvOrder.name)]
    with output.progress("comparing schedules", total=len(names)) as bar:
        for name in names:
            bar.advance(0, note=name)
            rivals.append(_schedule_row(name, partial(_stepped, name, plan, planned)))
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
            rivals.append(_schedule_row(name, partial(_scheduled, name, schedule)))
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


def _schedule_row(name: str, run: Callable[[], ScheduleResult]) -> ScheduleResult:
    try:
        return run()
    except AutopipeError as error:
        return ScheduleResult(name, refusal=" ".join(str(error).partition("\n")[0].split()))
