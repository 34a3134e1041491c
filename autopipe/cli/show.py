"""`autopipe show`: the timeline and the memory of a plan, or of a schedule of blocks, beside other schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import RenderableType

from autopipe.cli.drawing.picture import Picture, block_picture, plan_picture
from autopipe.cli.drawing.report import Report, ScheduleResult, block_report, plan_report
from autopipe.cli.drawing.terminal import draw_memory, draw_timeline
from autopipe.cli.options import PATH, standard_options
from autopipe.cli.output import Output
from autopipe.cli.plan_folder import open_plan, open_prediction
from autopipe.cli.plan_text import prediction_line, schedule_line, stage_table, traffic_line
from autopipe.ir.block_schedule import BlockSchedule, block_schedule_form, check_blocks, read_block_schedule
from autopipe.ir.codec import encode
from autopipe.ir.errors import AutopipeError, ConfigurationError
from autopipe.ir.plan import Plan
from autopipe.ir.schedule import StageGraph
from autopipe.ir.timeline import Timeline
from autopipe.passes.registry import scheduler_class, scheduler_names
from autopipe.passes.schedule.csv_order import CsvOrder
from autopipe.passes.schedule.published.blocks import block_schedule_names, schedule_blocks
from autopipe.passes.schedule.simulate import simulate
from autopipe.passes.schedule.tessel.model import SearchOptions
from autopipe.passes.schedule.tessel.search import search


@click.command()
@click.argument("plan", metavar="DIR|FILE", type=PATH)
@click.option("--html", metavar="FILE", type=PATH, help="Write a report as one page, compared with other schedules.")
@click.option("--trace", metavar="FILE", type=PATH, help="Write a Chrome trace (Perfetto).")
@click.option("--measured", metavar="FILE", type=PATH, help="Put what launch --trace wrote into --trace, too.")
@click.option("--csv", metavar="FILE", type=PATH, help="Write the order in PyTorch's schedule CSV: a row a rank.")
@click.option("--svg", metavar="FILE", type=PATH, help="Write the timeline as a picture.")
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
    from autopipe.cli.tasks import show_tasks

    if rank is not None and not tasks:
        raise click.UsageError("--rank goes with --tasks")
    if measured is not None and trace is None:
        raise ConfigurationError("--measured goes with --trace", hint="name the file to write with --trace FILE")
    given = (("html", html), ("trace", trace), ("csv", csv), ("svg", svg))
    files = {kind: path for kind, path in given if path is not None}
    if tasks:
        if files:
            raise click.UsageError(f"--tasks is shown here: leave out --{next(iter(files))}")
        show_tasks(output, plan, rank)
        return
    for path in files.values():
        check_writable(path)
    found = _opened(plan)
    writers = {
        "html": lambda: report_page(found.report(output)),
        "trace": lambda: chrome_trace(found.picture, () if measured is None else read_measured(measured)),
        "csv": lambda: orders_csv(found.picture),
        "svg": lambda: timeline_svg(found.picture),
    }
    write_texts({path: writers[kind]() for kind, path in files.items()})
    shown = [f"{kind} in {path}" for kind, path in files.items()] or found.screen(output)
    output.result({**found.data(), "files": files}, *shown)


def _opened(path: Path) -> PlanView | BlockView:
    """The plan of a folder, or the schedule of blocks of a file. Raises ConfigurationError."""
    if not path.is_file():
        return PlanView(path, *open_prediction(path))
    try:
        with path.open("rb") as file:
            start = file.read(64).lstrip()[:1]
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    if start != b"{":  # A model, say.
        hint = "autopipe plan makes the one, autopipe schedule -o FILE the other"
        raise ConfigurationError(f"{path} is neither the folder of a plan nor a schedule of blocks", hint)
    schedule = read_block_schedule(path)
    return BlockView(path, schedule, blocks_title(schedule, path.name))


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
        try:
            planned = open_plan(self.folder)
        except AutopipeError as error:
            output.warn(f"no other schedules on the page: {error.message}", error.hint)
            return plan_report(self.plan, self.timeline, ())
        problem, placement = planned.problem, self.plan.placement
        graph = StageGraph.of(problem, placement)

        def result(name: str) -> ScheduleResult:
            scheduler = scheduler_class(name)()
            scheduler.requires(problem, placement)
            schedule = scheduler.run(problem, placement)
            schedule.verify(graph, problem.train)
            return _plan_result(name, simulate(schedule, graph.stage_devices, self.plan.prediction))

        chosen = self.plan.summary.schedule
        # csv follows a file that somebody names: there is nothing to compare.
        names = [name for name in scheduler_names() if name not in (chosen, CsvOrder.name)]
        own = _plan_result(chosen, self.timeline, chosen=True)
        return plan_report(self.plan, self.timeline, _schedule_results(own, names, result, output))

    def screen(self, output: Output) -> Iterator[RenderableType]:
        plan, summary = self.plan, self.plan.summary
        yield (
            f"{plan.model}: {summary.strategy} with {summary.schedule}, {plan.mode}, {summary.devices} devices, "
            f"{summary.micro_batches} micro-batches of {summary.micro_batch_size}"
        )
        yield prediction_line(summary)
        yield traffic_line(summary)
        yield schedule_line(plan)
        yield from _drawn(self.picture, output)
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
    """A schedule of blocks, the file that it is from, and what it is called."""

    file: Path
    schedule: BlockSchedule
    title: str

    @property
    def picture(self) -> Picture:
        return block_picture(self.schedule, self.title)

    def report(self, output: Output) -> Report:
        graph, units = self.schedule.graph, self.schedule.units

        def result(name: str) -> ScheduleResult:
            found = search(graph, units, SearchOptions()) if name == "tessel" else schedule_blocks(name, graph, units)
            check_blocks(found)
            return _block_result(name, found)

        own = _block_result("this one", self.schedule, chosen=True)
        results = _schedule_results(own, ("tessel", *block_schedule_names()), result, output)
        return block_report(self.schedule, self.title, str(self.file), results)

    def screen(self, output: Output) -> Iterator[RenderableType]:
        return block_screen(self.schedule, self.title, output)

    def data(self) -> dict[str, object]:
        """The schedule as its file has it."""
        return {"file": self.file, **block_schedule_form(self.schedule)}


def _drawn(picture: Picture, output: Output) -> Iterator[RenderableType]:
    yield ""
    yield from draw_timeline(picture, output.width, output.coloured)
    yield ""
    yield from draw_memory(picture, output.width, output.coloured)


def blocks_title(schedule: BlockSchedule, source: str) -> str:
    """The blocks, and where they are from."""
    graph = schedule.graph
    per_unit = f" of {graph.micro_batches_per_unit} micro-batches" if graph.micro_batches_per_unit > 1 else ""
    return f"{source}: {len(graph.blocks)} blocks on {graph.devices} devices, {schedule.units} units{per_unit}"


def block_screen(schedule: BlockSchedule, title: str, output: Output) -> Iterator[RenderableType]:
    """Period and makespan, each with what is proven of it, the bubble, the timeline and the memory, a device each."""
    yield title
    proof = f"at least {schedule.lower_bound}, gap {schedule.gap:.1%}" if schedule.lower_bound else "no bound known"
    proof = "optimal, proven" if schedule.optimal else proof
    if schedule.period is None:
        yield f"no steady state; makespan {schedule.makespan} ({proof})"
    elif schedule.repetend is None:
        yield f"period {schedule.period}; makespan {schedule.makespan} ({proof})"
    else:
        yield f"period {schedule.period} ({proof}); makespan {schedule.makespan}"
    steady = schedule.steady_bubble_rate
    within = "" if steady is None else f"{steady:.1%} in the steady state, "
    busy = max(schedule.graph.loads) * schedule.units
    yield f"bubble {within}{1 - busy / schedule.makespan:.1%} in all; search {schedule.search_time_s:.2f} s"
    yield from _drawn(block_picture(schedule, title), output)


def _plan_result(name: str, timeline: Timeline, chosen: bool = False) -> ScheduleResult:
    return ScheduleResult(name, timeline.end, timeline.bubble_rate, timeline.peak_memory, chosen=chosen)


def _block_result(name: str, schedule: BlockSchedule, chosen: bool = False) -> ScheduleResult:
    busy = sum(schedule.graph.loads) * schedule.units
    bubble = 1.0 - busy / (schedule.graph.devices * schedule.makespan)
    return ScheduleResult(name, schedule.makespan, bubble, schedule.peak_memory, chosen=chosen)


def _schedule_results(
    own: ScheduleResult, names: Sequence[str], result: Callable[[str], ScheduleResult], output: Output
) -> list[ScheduleResult]:
    """The schedule at hand, and that of each of `names` for the same placement or blocks with its default options."""
    found = [own]
    with output.progress("comparing schedules", total=len(names)) as bar:
        for name in names:
            bar.advance(0, note=name)
            try:
                found.append(result(name))
            except AutopipeError as error:
                found.append(ScheduleResult(name, refusal=" ".join(str(error).partition("\n")[0].split())))
            bar.advance()
    return found
