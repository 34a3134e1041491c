"""`autopipe show`: a plan's or a block schedule's timeline and memory, and the task graphs of a
plan's ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import click
from rich.console import RenderableType
from rich.table import Table

from autopipe.api.showing import (
    BlockView,
    PlanView,
    open_tasks,
    open_view,
    task_graph_data,
)
from autopipe.api.timeline_figure import Picture
from autopipe.api.timeline_files import chrome_trace, orders_csv, read_measured
from autopipe.cli.drawing.report import Report, block_report, plan_report, report_page
from autopipe.cli.drawing.svg import timeline_svg
from autopipe.cli.drawing.terminal import draw_memory, draw_timeline
from autopipe.cli.options import FORCE, MODEL, PATH, standard_options
from autopipe.cli.output import Output, plain_table
from autopipe.cli.plan_report import prediction_line, schedule_line, stage_table, traffic_line
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.output_kinds import (
    ORDER,
    PICTURE,
    REPORT,
    TRACE,
    OutputFile,
    plan_inputs,
    write_texts,
)
from autopipe.ir.placement import devices_text
from autopipe.ir.program import Program
from autopipe.ir.words import bytes_text, plural
from autopipe.passes.lower.task_graph import LoopedTasks, TaskGraph, TaskNode


@click.command()
@click.argument("plan", metavar="DIR|FILE", type=PATH)
@click.option(
    "--html",
    metavar="FILE",
    type=PATH,
    help="Write a report as one HTML page, with a comparison of schedules.",
)
@click.option("--trace", metavar="FILE", type=PATH, help="Write a Chrome trace (Perfetto).")
@click.option(
    "--measured",
    metavar="FILE",
    type=PATH,
    help="Add the measured tasks in FILE, written by launch --trace, to --trace.",
)
@click.option(
    "--csv",
    metavar="FILE",
    type=PATH,
    help="Write the order of tasks as a schedule CSV of PyTorch, one row per rank.",
)
@click.option("--svg", metavar="FILE", type=PATH, help="Write the timeline as an SVG figure.")
@click.option(
    "--tasks",
    is_flag=True,
    help="Show the tasks of each rank in a step; --json prints all of them.",
)
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    help="Rank whose tasks --tasks shows [0, with a table of all ranks].",
)
@FORCE
@MODEL
@standard_options
def show(
    output: Output,
    /,
    plan: Path,
    measured: Path | None,
    tasks: bool,
    rank: int | None,
    force: bool,
    model: Path | None,
    **targets: Path | None,
) -> None:
    """Show the timeline and the memory of the plan in DIR, or of the schedule of blocks in FILE.

    In the timeline, F3 is the forward of micro-batch 3 and B3 its backward. If backward is split,
    I3 computes the gradients of the inputs and W3 those of the weights. On a device with several
    stages, the stage comes first: 2F3. Lower case, f3, is a block that runs on several devices.
    --html, which compares schedules, and --tasks read the model of the plan.

    \b
    Example:
      autopipe show gpt.onnx.plan
      autopipe show gpt.onnx.plan --html report.html --trace trace.json
      autopipe show gpt.onnx.plan --tasks --rank 2
      autopipe show schedule.json --csv order.csv
    """
    if rank is not None and not tasks:
        raise click.UsageError("--rank requires --tasks")
    files = {
        kind: path
        for kind in ("html", "trace", "csv", "svg")
        if (path := targets[kind]) is not None
    }
    if measured is not None and "trace" not in files:
        raise ConfigurationError(
            "--measured requires --trace", hint="set the file to write with --trace FILE"
        )
    if tasks:
        if files:
            raise click.UsageError(f"--tasks writes no files: omit --{next(iter(files))}")
        show_tasks(output, plan, rank, model)
        return
    read = (*plan_inputs(plan), *(path for path in (measured, model) if path is not None))
    outputs = {
        kind: OutputFile(path, _FILE_KIND_BY_FLAG[kind], read, force)
        for kind, path in files.items()
    }
    for each in outputs.values():
        each.check()
    found = open_view(plan, model)
    writers = {
        "html": lambda: report_page(_view_report(found, output)),
        "trace": lambda: chrome_trace(
            found.picture, () if measured is None else read_measured(measured)
        ),
        "csv": lambda: orders_csv(found.picture),
        "svg": lambda: timeline_svg(found.picture),
    }
    write_texts({target: writers[kind]() for kind, target in outputs.items()})
    shown = [f"{kind} in {path}" for kind, path in files.items()] or _view_screen(found, output)
    (output.report if files else output.result)({**found.data(), "files": files}, *shown)


_FILE_KIND_BY_FLAG = {"html": REPORT, "trace": TRACE, "csv": ORDER, "svg": PICTURE}
"""Kinds of files by the flag that names the file."""


def plan_view_screen(view: PlanView, output: Output) -> Iterator[RenderableType]:
    """Yield the predictions, the timeline, the memory of the devices and the stages of a plan."""
    plan = view.plan
    summary = view.plan.summary
    yield (
        f"{plan.model}: {summary.strategy} with {summary.schedule}, {plan.mode}, "
        f"{summary.devices} {plural(summary.devices, 'device')}, "
        f"{summary.micro_batches} {plural(summary.micro_batches, 'micro-batch')} of "
        f"{summary.micro_batch_size}"
    )
    yield prediction_line(summary)
    yield traffic_line(summary)
    yield schedule_line(plan)
    yield from _draw_picture(view.picture, output)
    yield ""
    yield stage_table(plan)


def block_view_screen(view: BlockView, output: Output) -> Iterator[RenderableType]:
    """Yield the period and the makespan with their lower bounds, the bubble rate, the timeline,
    and the memory of the devices.
    """
    schedule = view.schedule
    yield view.title
    proof = (
        f"at least {schedule.lower_bound}, gap {schedule.gap:.1%}"
        if schedule.lower_bound
        else "no bound known"
    )
    proof = "optimal, proven" if schedule.optimal else proof
    period = "no steady state" if schedule.period is None else f"period {schedule.period}"
    if schedule.period is None or schedule.repetend is None:
        yield f"{period}; makespan {schedule.makespan} ({proof})"
    else:
        yield f"{period} ({proof}); makespan {schedule.makespan}"
    steady = schedule.steady_bubble_rate
    within = "" if steady is None else f"{steady:.1%} in the steady state, "
    busy = max(schedule.graph.loads) * schedule.units
    yield (
        f"bubble {within}{1 - busy / schedule.makespan:.1%} in all; search "
        f"{schedule.search_time_s:.2f} s"
    )
    yield from _draw_picture(view.picture, output)


def _view_report(view: PlanView | BlockView, output: Output) -> Report:
    """Return the HTML report of a plan or of a schedule of blocks."""
    results = view.schedule_results(output)
    if isinstance(view, PlanView):
        return plan_report(view.plan, view.timeline, results)
    return block_report(view.schedule, view.title, str(view.file), results)


def _view_screen(view: PlanView | BlockView, output: Output) -> Iterator[RenderableType]:
    if isinstance(view, PlanView):
        return plan_view_screen(view, output)
    return block_view_screen(view, output)


def _draw_picture(picture: Picture, output: Output) -> Iterator[RenderableType]:
    yield ""
    yield from draw_timeline(picture, output.width, output.coloured)
    yield ""
    yield from draw_memory(picture, output.width, output.coloured)


def show_tasks(output: Output, folder: Path, rank: int | None, model: Path | None) -> None:
    """Print a table of the ranks and the tasks of rank 0, or the tasks of `rank`, of the plan in
    `folder`. `model` is an ONNX file that replaces the planned one, or None.
    """
    tasks = open_tasks(folder, rank, model)
    program = tasks.program
    source = tasks.source
    if output.as_json:
        ranks = range(program.world_size) if rank is None else (rank,)
        output.result(
            {"plan": folder, "ranks": [task_graph_data(source.graph(each)) for each in ranks]}
        )
        return
    screen = list(task_screen(source.graph(rank or 0), _buffers_text(program, rank or 0)))
    if rank is None and program.world_size > 1:
        table = rank_table(
            [source.graph(each) for each in selected_ranks(program.world_size)], program.world_size
        )
        screen = [table, "", *screen]
    output.result({}, *screen)


_MAX_TASK_ROWS = 48
"""Maximum number of tasks listed per sequence or loop."""
_MAX_LISTED_NAMES = 3
_MAX_LISTED_RANKS = 16
_COMPUTING_OPCODES = ("forward", "backward", "backward_input", "backward_weight")
_TaskRow = tuple[str, ...]
_TASK_TABLE_HEADS = ("task", "does", "bytes", "memory", "after", "frees")
_RIGHT_ALIGNED_HEADS = ("bytes", "memory")


def selected_ranks(count: int) -> tuple[int, ...]:
    """Return the ranks that the table of ranks lists. If there are many, these are the first and
    the last ones.
    """
    half = _MAX_LISTED_RANKS // 2
    return (
        tuple(range(count))
        if count <= _MAX_LISTED_RANKS
        else (*range(half), *range(count - half, count))
    )


def rank_table(graphs: Sequence[TaskGraph], count: int) -> Table:
    table = plain_table(
        "rank", "stages", "tasks", "sends", "receives", "exchanges", "sums", "memory", right=2
    )
    for position, graph in enumerate(graphs):
        if len(graphs) < count and position == len(graphs) // 2:
            table.add_row("...")
        stages = sorted({node.stage for node in graph.nodes if node.stage is not None})
        computed = sum(node.kind in _COMPUTING_OPCODES for node in graph.nodes)
        sizes = (
            sum(node.bytes for node in graph.nodes if node.kind in kinds)
            for kinds in (("send",), ("receive",), ("collective",), ("reduce", "gather"))
        )
        texts = (bytes_text(size) if size else "-" for size in sizes)
        table.add_row(
            str(graph.rank),
            devices_text(stages) or "-",
            str(computed),
            *texts,
            bytes_text(graph.peak_bytes),
        )
    return table


def task_screen(graph: TaskGraph, buffers: str) -> Iterator[RenderableType]:
    """Yield the table of the tasks of one rank. `buffers` describes the memory for messages."""
    held = bytes_text(graph.static_bytes)
    peak = bytes_text(graph.peak_bytes)
    yield (
        f"rank {graph.rank}: {len(graph.nodes):,} {plural(len(graph.nodes), 'task')} "
        f"a step; {held} all through it, at most {peak}{buffers}"
    )
    yield ""
    freed: dict[int, list[str]] = {}
    for node in graph.nodes:
        if node.kind == "free":
            freed.setdefault(node.after[0], []).append(node.what)
    rows: list[_TaskRow] = [_TASK_TABLE_HEADS]
    for (section, _), several in groupby(
        graph.loops, key=lambda each: (each.section, each.count > 1 and each.start)
    ):
        stretches = tuple(several)
        found = [row for each in stretches for row in _task_rows(graph, each, freed)]
        if len(found) > _MAX_TASK_ROWS:
            half = _MAX_TASK_ROWS // 2
            more = f"{len(found) - 2 * half:,} more, which --json has"
            found = [*found[:half], ("  ...", more, "", "", "", ""), *found[-half:]]
        if found:
            rows += [(_section_title(section, stretches[0]),), *found]
    # A row with a single cell is a title. It is printed as a separate line, so the column widths
    # ignore it.
    widths = [
        max(map(len, column)) for column in zip(*(row for row in rows if len(row) > 1), strict=True)
    ]
    for row in rows:
        cells = zip(row, widths, _TASK_TABLE_HEADS, strict=False)
        line = (
            f"{cell:>{width}}" if head in _RIGHT_ALIGNED_HEADS else f"{cell:<{width}}"
            for cell, width, head in cells
        )
        yield "  ".join(line).rstrip()


def _section_title(section: str, stretch: LoopedTasks) -> str:
    if stretch.count == 1:
        return section
    several = "micro-batch" if stretch.stride == 1 else "micro-batches"
    further = "" if stretch.stride is None else f", each time {stretch.stride} {several} further"
    return f"{section}, {stretch.count} times{further}; the first time:"


def _task_rows(
    graph: TaskGraph, stretch: LoopedTasks, freed: Mapping[int, Sequence[str]]
) -> Iterator[_TaskRow]:
    """Yield one row per task of the loop `stretch`, preceded by the collectives inside it. The
    memory is the amount in use during a computation, or after any other task. In a loop, the values
    of the first and the last iteration are shown.
    """
    inside: list[TaskNode] = []
    for place in range(stretch.start, stretch.end):
        node = graph.nodes[place]
        if node.kind == "collective":
            inside.append(node)
        elif node.kind != "free":
            yield from _collective_rows(inside)
            inside = []
            moved = bytes_text(node.bytes) if node.bytes else ""
            times = dict.fromkeys(
                (
                    graph.memory_bytes[place],
                    graph.memory_bytes[stretch.last + place - stretch.start],
                )
            )
            memory = " … ".join(map(bytes_text, times))
            after = [graph.nodes[other].name for other in node.after]
            if node.kind == "receive":
                # A receive waits for the tasks of other ranks that send its messages.
                after = list(dict.fromkeys(each.task for each in node.messages))
            yield (
                f"  {node.name}",
                _action_text(node),
                moved,
                memory,
                _names_text(after),
                _names_text(freed.get(place, ())),
            )
    yield from _collective_rows(inside)


def _collective_rows(nodes: list[TaskNode]) -> Iterator[_TaskRow]:
    """Yield the collectives of one task. Those of the same kind and group share a row."""
    found: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for node in nodes:
        found.setdefault((node.what.partition(" ")[0], node.group), []).append(node.bytes)
    for (kind, group), sizes in found.items():
        times = f"{len(sizes)} × " if len(sizes) > 1 else ""
        does = f"{times}{kind.replace('_', '-')} over ranks {devices_text(group)}"
        yield ("", f"  {does}", bytes_text(sum(sizes)), "", "", "")


def _action_text(node: TaskNode) -> str:
    match node.kind:
        case "send" | "receive":
            ranks = sorted({each.peer for each in node.messages})
            channels = sorted({each.channel for each in node.messages})
            peers = f"{plural(len(ranks), 'rank')} {devices_text(ranks)}"
            way = "send to" if node.kind == "send" else "receive from"
            return f"{way} {peers}, {plural(len(channels), 'channel')} {devices_text(channels)}"
        case "accumulate":
            return "add up gradients"
        case "reduce":
            kind = "reduce-scatter" if node.what else "all-reduce"
            return f"{kind} of gradients over ranks {devices_text(node.group)}"
        case "update":
            return "update of parameters"
        case "gather":
            return f"all-gather of parameters over ranks {devices_text(node.group)}"
    return node.kind.replace("_", " ")


def _names_text(names: Sequence[str]) -> str:
    if len(names) <= _MAX_LISTED_NAMES:
        return ", ".join(names)
    return (
        f"{', '.join(names[: _MAX_LISTED_NAMES - 1])} and {len(names) - _MAX_LISTED_NAMES + 1} more"
    )


def _buffers_text(program: Program, rank: int) -> str:
    sizes = {
        piece.channel: piece.bytes
        for code in program.ranks
        for wired in code.stages
        for piece in wired.sends
    }
    found = [
        (each.buffers, sizes[each.number]) for each in program.channels if each.target_rank == rank
    ]
    found += [
        (each.gradient_buffers, sizes[each.number])
        for each in program.channels
        if each.source_rank == rank
    ]
    buffers = sum(count for count, _ in found)
    total = sum(count * size for count, size in found)
    return (
        f"; {buffers} buffers of {bytes_text(total)} in all for messages that come"
        if buffers
        else ""
    )
