"""`autopipe show`: the timeline and the memory of a plan, or of a schedule of blocks."""

from __future__ import annotations

from pathlib import Path

import click

from autopipe.cli.options import standard_options
from autopipe.cli.output import Output
from autopipe.ir.errors import ConfigurationError

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
    from autopipe.cli.drawing.measured import read_measured
    from autopipe.cli.drawing.orders import orders_csv
    from autopipe.cli.drawing.report import report_page
    from autopipe.cli.drawing.svg import timeline_svg
    from autopipe.cli.drawing.trace import chrome_trace
    from autopipe.cli.files import check_writable, write_texts
    from autopipe.cli.shown import open_view
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
