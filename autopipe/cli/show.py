"""`autopipe show`: the timeline and the memory of a plan, or of a schedule of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autopipe.cli.options import standard_options
from autopipe.cli.output import Output
from autopipe.ir.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autopipe.ir.plan import Plan
    from autopipe.ir.timeline import Timeline


@click.command()
@click.argument("plan", metavar="DIR|FILE", type=click.Path(path_type=Path))
@click.option("--html", metavar="FILE", type=click.Path(path_type=Path), help="Write a report as one page.")
@click.option("--trace", metavar="FILE", type=click.Path(path_type=Path), help="Write a Chrome trace (Perfetto).")
@click.option("--svg", metavar="FILE", type=click.Path(path_type=Path), help="Write the timeline as a picture.")
@standard_options
def show(output: Output, plan: Path, html: Path | None, trace: Path | None, svg: Path | None) -> None:
    """Show the timeline and the memory of the plan in DIR, or of the schedule.json FILE of blocks.

    A plan's model is not needed. In the timeline F3 is the forward of micro-batch 3, B3 its backward; 2F3 names the
    stage where a device has several.

    \b
    Example:
      autopipe show gpt.onnx.plan
      autopipe show gpt.onnx.plan --html report.html --trace trace.json
      autopipe show schedule.json --svg schedule.svg
    """
    from autopipe.cli.drawing.picture import plan_picture
    from autopipe.cli.drawing.report import report_page
    from autopipe.cli.drawing.svg import timeline_svg
    from autopipe.cli.drawing.trace import chrome_trace
    from autopipe.cli.files import write_texts
    from autopipe.cli.plan_folder import open_prediction

    if plan.is_file():
        _show_blocks(output, plan, {"--html": html, "--trace": trace}, svg)
        return
    found, timeline = open_prediction(plan)
    files = {kind: path for kind, path in (("html", html), ("trace", trace), ("svg", svg)) if path is not None}
    texts: dict[Path, str] = {}
    if html is not None:
        texts[html] = report_page(found, timeline)
    if trace is not None:
        texts[trace] = chrome_trace(timeline)
    if svg is not None:
        texts[svg] = timeline_svg(plan_picture(found, timeline))
    write_texts(texts)
    shown = [f"{kind} in {path}" for kind, path in files.items()] or _screen(found, timeline, output)
    output.result(_data(plan, found, timeline, files), *shown)


def _show_blocks(output: Output, file: Path, refused: dict[str, Path | None], svg: Path | None) -> None:
    """The same for a schedule of blocks."""
    from autopipe.cli.block_screen import block_screen, block_title
    from autopipe.cli.drawing.block_picture import block_picture
    from autopipe.cli.drawing.svg import timeline_svg
    from autopipe.cli.files import write_texts
    from autopipe.ir.serial.block_schedule_file import block_schedule_form, read_block_schedule

    for flag, path in refused.items():
        if path is not None:
            raise ConfigurationError(f"{flag} shows plans; {file} is a schedule of blocks", hint="use --svg")
    schedule = read_block_schedule(file)
    title = block_title(schedule, str(file))
    if svg is not None:
        write_texts({svg: timeline_svg(block_picture(schedule, title))})
    shown = [f"svg in {svg}"] if svg else block_screen(schedule, title, output.width, output.coloured)
    output.result({"file": file, **block_schedule_form(schedule), "files": {"svg": svg} if svg else {}}, *shown)


def _screen(plan: Plan, timeline: Timeline, output: Output) -> Iterator[RenderableType]:
    from autopipe.cli.drawing.picture import plan_picture
    from autopipe.cli.drawing.screen import draw_picture
    from autopipe.cli.plan_screen import prediction_line, stage_table

    summary = plan.summary
    yield (
        f"{plan.model}: {summary.strategy} with {summary.schedule}, {plan.mode}, {summary.devices} devices, "
        f"{summary.micro_batches} micro-batches of {summary.micro_batch_size}"
    )
    yield prediction_line(summary)
    yield ""
    yield from draw_picture(plan_picture(plan, timeline), output.stdout)
    yield ""
    yield stage_table(plan)


def _data(folder: Path, plan: Plan, timeline: Timeline, files: dict[str, Path]) -> dict[str, object]:
    from autopipe.ir.serial.plan_file import summary_form

    return {
        "plan": folder,
        "model": plan.model,
        "mode": plan.mode,
        "summary": summary_form(plan.summary),
        "static_memory_bytes": timeline.static_memory,
        "stages": [
            {"devices": stage.devices, "nodes": len(stage.nodes), "recompute": stage.recompute, "predicted": predicted}
            for stage, predicted in zip(plan.placement.stages, plan.prediction.stages, strict=True)
        ],
        "tasks": [[str(task) for task in order] for order in plan.schedule.tasks],
        "files": files,
    }
