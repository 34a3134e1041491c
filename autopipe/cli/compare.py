"""`autopipe compare`: plans side by side, their figures, decisions, timelines and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopipe.cli.drawing.picture import MOST_DEVICES, one_of_each, plan_picture
from autopipe.cli.drawing.report import Report
from autopipe.cli.drawing.svg import escape, markup_table
from autopipe.cli.drawing.terminal import draw_memories, draw_timelines
from autopipe.cli.options import standard_options
from autopipe.cli.output import Output, bytes_text, devices_text, plain_table, seconds_text
from autopipe.cli.plan_folder import CONFIGURATION_FILE, open_prediction
from autopipe.cli.request import request_of
from autopipe.configs.configuration import load_configuration
from autopipe.ir.errors import AutopipeError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Split
from autopipe.ir.plan import Breakdown, Plan
from autopipe.ir.plan_file import plan_digest
from autopipe.ir.timeline import Timeline
from autopipe.passes.analysis.operators import SampleAxes, sample_axes
from autopipe.passes.pipeline import read_for
from autopipe.passes.placement.given import NodeEntry, NodeNames, degrees_of, entries_of, layer_globs, role_globs

_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("plans", metavar="DIR...", nargs=-1, required=True, type=_FILE)
@click.option("--html", metavar="FILE", type=_FILE, help="Write it as one page: timelines and memory on one axis.")
@standard_options
def compare(output: Output, plans: tuple[Path, ...], html: Path | None) -> None:
    """Show the plans in DIRs side by side: figures, what a step's time goes to, timelines and memory on one scale.

    Speed-ups, and what is decided differently, are against the first plan.

    \b
    Example:
      autopipe compare gpt.1f1b.plan gpt.gpipe.plan
      autopipe compare gpt.1f1b.plan gpt.gpipe.plan --html compared.html
    """
    from autopipe.cli.drawing.report import report_page
    from autopipe.cli.output import check_writable, write_texts
    from autopipe.ir.codec import encode

    if html is not None:
        check_writable(html)
    found = [ComparisonPlan.open(folder) for folder in plans]
    _warn_of_unlike(output, found)
    contrasts = PlanDiff.with_first(found)
    if html is not None:
        write_texts({html: report_page(compare_report(found, contrasts))})
    data = [
        {
            "plan": each.folder,
            "model": each.plan.model,
            "mode": each.plan.mode,
            "batch_size": each.plan.batch_size,
            "summary": encode(each.plan.summary),
            "breakdown": each.plan.breakdown,
            "speedup": speedup(found[0].plan, each.plan),
            "differences": contrast.form(),
        }
        for each, contrast in zip(found, contrasts, strict=True)
    ]
    shown = compare_screen(found, contrasts, output.width, output.coloured) if html is None else (f"page in {html}",)
    output.result({"plans": data, "html": html}, *shown)


def _warn_of_unlike(output: Output, found: list[ComparisonPlan]) -> None:
    for what, values in (
        ("models", {each.plan.model for each in found}),
        ("batches", {each.plan.batch_size for each in found}),
        ("modes", {each.plan.mode for each in found}),
    ):
        if len(values) > 1:
            output.warn(f"the plans are for different {what}: {', '.join(sorted(map(str, values)))}")


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """A plan, the folder it is in and the step that its predictions make."""

    folder: Path
    plan: Plan
    timeline: Timeline

    @staticmethod
    def open(folder: Path) -> ComparisonPlan:
        """The plan in `folder`; its model is not read. Raises as `open_prediction` does."""
        return ComparisonPlan(folder, *open_prediction(folder))


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """A figure of each plan, and which plans' are the best, where they differ and one is better than another."""

    name: str
    texts: tuple[str, ...]
    best: frozenset[int] = frozenset()


def speedup(first: Plan, plan: Plan) -> float | None:
    """How many samples a plan takes while the first takes one."""
    return plan.summary.samples_per_s / first.summary.samples_per_s if first.summary.samples_per_s else None


def figure_rows(plans: Sequence[Plan]) -> Iterator[ComparisonRow]:
    """Decisions and predictions of the plans, a row each; per device too where numbers of devices differ."""
    summaries = [plan.summary for plan in plans]
    yield ComparisonRow("strategy", tuple(each.strategy for each in summaries))
    yield ComparisonRow("schedule", tuple(each.schedule for each in summaries))
    yield ComparisonRow("devices", tuple(str(each.devices) for each in summaries))
    yield ComparisonRow("stages", tuple(str(each.stages) for each in summaries))
    yield ComparisonRow("depth", tuple(str(each.depth) for each in summaries))
    yield ComparisonRow(
        "micro-batches", tuple(f"{each.micro_batches} of {each.micro_batch_size}" for each in summaries)
    )
    times = [each.step_time_s for each in summaries]
    equal = len({plan.batch_size for plan in plans}) == 1
    yield _row("step", times, seconds_text, times if equal else None)
    ratios = [speedup(plans[0], plan) for plan in plans]
    yield ComparisonRow("speed-up", tuple("-" if ratio is None else f"{ratio:.3f}" for ratio in ratios))
    rates = [each.samples_per_s for each in summaries]
    yield _row("samples/s", rates, "{:,.1f}".format, [-rate for rate in rates])
    if len({each.devices for each in summaries}) > 1:
        shares = [each.samples_per_s / each.devices for each in summaries]
        yield _row("samples/s a device", shares, "{:,.1f}".format, [-share for share in shares])
    bubbles = [each.bubble_rate for each in summaries]
    yield _row("bubble", bubbles, "{:.1%}".format, bubbles)
    peaks = [float(max(each.peak_memory_bytes)) for each in summaries]
    yield _row("peak memory", peaks, bytes_text, peaks)
    yield ComparisonRow("exchanged", tuple(_exchanged(plan) for plan in plans))
    yield ComparisonRow("at best", tuple(seconds_text(each.lower_bound_s) for each in summaries))
    searches = [sum(seconds for _, seconds in each.search_time_s) for each in summaries]
    yield ComparisonRow("search", tuple(map(seconds_text, searches)))


def breakdown_rows(plans: Sequence[Plan]) -> Iterator[ComparisonRow]:
    """Seconds of a step by what they go to, on average over the devices; nothing where no plan says."""
    parts = [None if plan.breakdown is None else dict(parts_of(plan.breakdown)) for plan in plans]
    if not any(parts):
        return
    for name in PARTS:
        values = [None if each is None else each[name] for each in parts]
        if any(value is not None and abs(value) >= _LEAST_S for value in values):
            yield ComparisonRow(name, tuple(map(_part_text, values)))


_LEAST_S = 5e-10
"""Less than this is what rounding leaves."""

PARTS = tuple(field.name.removesuffix("_s") for field in dataclasses.fields(Breakdown))
"""Parts of a step's seconds, the ideal first."""


def parts_of(breakdown: Breakdown) -> tuple[tuple[str, float], ...]:
    """Seconds by name, in the order of `PARTS`; their sum is the step."""
    return tuple((name, getattr(breakdown, f"{name}_s")) for name in PARTS)


def _part_text(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return seconds_text(seconds) if abs(seconds) >= _LEAST_S else "0"


def _row(
    name: str, values: Sequence[float], text: Callable[[float], str], order: Sequence[float] | None
) -> ComparisonRow:
    """A row whose best is the least by `order`, and all that read the same."""
    texts = tuple(map(text, values))
    if order is None or len(set(texts)) == 1:
        return ComparisonRow(name, texts)
    least = texts[min(range(len(order)), key=order.__getitem__)]
    return ComparisonRow(name, texts, frozenset(place for place, each in enumerate(texts) if each == least))


def _exchanged(plan: Plan) -> str:
    moved = plan.summary.communication_bytes
    return "unknown" if moved is None else bytes_text(sum(size for _, size in moved))


_MOST_LINES = 6
"""Lines for each kind of decision; what concerns most nodes comes first."""
_MOST_ENTRIES = 3


@dataclass(frozen=True, slots=True)
class Change:
    """Nodes of which one plan says `before` and the other `after`."""

    before: str
    after: str
    nodes: tuple[int, ...]
    entries: tuple[NodeEntry, ...]
    """Short names of the nodes."""

    def __str__(self) -> str:
        named = [f"{each[0]} to {each[1]}" if isinstance(each, tuple) else str(each) for each in self.entries]
        shown = ", ".join(named[:_MOST_ENTRIES]) + (", ..." if len(named) > _MOST_ENTRIES else "")
        return f"{self.before} → {self.after}: {_nodes_text(len(self.nodes))} ({shown})"


@dataclass(frozen=True, slots=True)
class Difference:
    """One kind of decision that two plans make differently, with the changes of most nodes first."""

    what: str
    """`devices`, `splits` or `recompute`."""
    changes: tuple[Change, ...]

    @property
    def count(self) -> int:
        return sum(len(change.nodes) for change in self.changes)

    @property
    def lines(self) -> Iterator[str]:
        """Lines for the terminal: the largest changes, and how many more there are."""
        yield f"{self.what} of {_nodes_text(self.count)}"
        yield from (f"  {change}" for change in self.changes[:_MOST_LINES])
        rest = self.changes[_MOST_LINES:]
        if rest:
            ways = f"{len(rest)} other ways" if len(rest) > 1 else "another way"
            yield f"  {_nodes_text(sum(len(change.nodes) for change in rest))} in {ways}"


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """Decisions of a plan that differ from those of the plan it is compared with."""

    same: bool
    """True if the decisions and their predictions are equal."""
    known: bool
    """True if their nodes can be compared: both models are there, and have the same nodes."""
    orders: bool
    """True if tasks are in another order, though stages are equal."""
    differences: tuple[Difference, ...] = ()

    @staticmethod
    def with_first(plans: Sequence[ComparisonPlan]) -> tuple[PlanDiff, ...]:
        """How each plan differs from the first; their models are read, each once, where there is more than one."""
        graphs: dict[tuple[str, str], Graph | None] = {}
        for each in plans if len(plans) > 1 else ():
            key = each.plan.model, each.plan.graph_digest
            if key not in graphs:
                graphs[key] = _graph_of(each.folder, each.plan)
        first = plans[0].plan
        return tuple(
            _plan_diff(first, each.plan, *(graphs.get((plan.model, plan.graph_digest)) for plan in (first, each.plan)))
            for each in plans
        )

    @property
    def lines(self) -> Iterator[str]:
        if self.same:
            yield "the same decisions"
        elif not self.known:
            yield "nodes cannot be compared: a model is not at its place, has changed, or is another"
        elif not self.differences:
            yield "the same placement" + (", tasks in another order" if self.orders else "")
        for difference in self.differences:
            yield from difference.lines

    def form(self) -> dict[str, object]:
        kinds = {
            each.what: [
                {"before": change.before, "after": change.after, "nodes": len(change.nodes), "named": change.entries}
                for change in each.changes
            ]
            for each in self.differences
        }
        return {"same": self.same, "known": self.known, **kinds}


def _plan_diff(first: Plan, plan: Plan, before: Graph | None, after: Graph | None) -> PlanDiff:
    orders = plan.schedule.tasks != first.schedule.tasks
    if plan_digest(plan) == plan_digest(first):
        return PlanDiff(True, True, False)
    if before is None or after is None or NodeNames(before).names != NodeNames(after).names:
        return PlanDiff(False, False, orders)
    return PlanDiff(False, True, orders, tuple(differences(before, first.placement, plan.placement)))


def _graph_of(folder: Path, plan: Plan) -> Graph | None:
    """The graph of the plan in `folder`; None where its model is gone or has changed."""
    try:
        configuration = replace(load_configuration(folder / CONFIGURATION_FILE), costs="roofline")
        request = request_of(configuration, Path(plan.model))
        graph = read_for(request, plan.summary.micro_batch_size).graph
    except (AutopipeError, OSError):
        return None
    return graph if graph.digest() == plan.graph_digest else None


def differences(graph: Graph, before: Placement, after: Placement) -> Iterator[Difference]:
    """Differences of two placements by node of `graph`: where it runs, how it is split, and whether it is computed
    again.
    """
    names = NodeNames(graph)
    samples = sample_axes(graph)
    one, other = _NodeDecisions(samples, before), _NodeDecisions(samples, after)
    yield from _grouped("devices", names, one.devices, other.devices, layer_globs)
    yield from _grouped("splits", names, one.splits, other.splits, role_globs)
    yield from _grouped("recompute", names, one.recompute, other.recompute, layer_globs)


class _NodeDecisions:
    """Decisions of a placement for each node, as texts; of several pipelines, of each of them."""

    def __init__(self, samples: SampleAxes, placement: Placement) -> None:
        self._samples = samples
        self._stages = [
            {node: stage for stage in placement.stages if stage.pipeline == pipeline for node in stage.nodes}
            for pipeline in range(placement.pipelines)
        ]

    def devices(self, node: int) -> str:
        return " and ".join(devices_text(stages[node].devices) for stages in self._stages)

    def splits(self, node: int) -> str:
        return " and ".join(self._split_text(node, stages[node].splits_of(node)) for stages in self._stages)

    def recompute(self, node: int) -> str:
        return " and ".join("yes" if stages[node].recompute else "no" for stages in self._stages)

    def _split_text(self, node: int, splits: tuple[Split, ...]) -> str:
        return " ".join(f"{axis}:{degree}" for axis, degree in degrees_of(self._samples, node, splits)) or "none"


def _grouped(
    what: str,
    names: NodeNames,
    one: Callable[[int], str],
    other: Callable[[int], str],
    globs: Callable[[NodeNames, list[int]], Iterator[str]],
) -> Iterator[Difference]:
    everywhere = range(len(names.names))
    found: dict[tuple[str, str], list[int]] = {}
    for node in everywhere:
        if one(node) != other(node):
            found.setdefault((one(node), other(node)), []).append(node)
    if found:
        largest = sorted(found.items(), key=lambda each: (-len(each[1]), each[1]))
        yield Difference(
            what,
            tuple(
                Change(*pair, tuple(nodes), entries_of(names, nodes, everywhere, set(nodes), globs(names, nodes)))
                for pair, nodes in largest
            ),
        )


def _nodes_text(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"


def compare_screen(
    plans: Sequence[ComparisonPlan], contrasts: Sequence[PlanDiff], width: int, colour: bool
) -> Iterator[RenderableType]:
    """Figures, what a step's time goes to, what is decided differently, timelines and memory."""
    folders = [each.folder for each in plans]
    yield _table("", folders, figure_rows([each.plan for each in plans]))
    parts = list(breakdown_rows([each.plan for each in plans]))
    if parts:
        yield ""
        yield _table("step, by what it goes to", folders, parts)
    for each, contrast in zip(plans[1:], contrasts[1:], strict=True):
        yield ""
        yield f"{each.folder} against {plans[0].folder}:"
        yield from (f"  {line}" for line in contrast.lines)
    steps = [(str(each.folder), one_of_each(plan_picture(each.plan, each.timeline))) for each in plans]
    yield ""
    yield from draw_timelines(steps, width, colour)
    yield ""
    yield from draw_memories(steps, width, colour)


def _table(head: str, folders: Sequence[Path], rows: Iterable[ComparisonRow]) -> Table:
    table = plain_table(head, *map(str, folders))
    for row in rows:
        cells = (Text(text, "bold green" if place in row.best else "") for place, text in enumerate(row.texts))
        table.add_row(row.name, *cells)
    return table


_HUES = (213, 4, 30, 138, 174, 96, 330, 53, 246, 290, 15, 195)
"""Hues of the parts of a step, in their order."""


def compare_report(plans: Sequence[ComparisonPlan], contrasts: Sequence[PlanDiff]) -> Report:
    """Steps and memory on one axis of time, figures, what a step's time goes to, and what is decided otherwise."""
    names = [str(each.folder) for each in plans]
    bare = [each.plan for each in plans]
    sections = [("Figures", _compare_report_table(names, figure_rows(bare)))]
    parts = list(breakdown_rows(bare))
    if parts:
        sections.append(
            (
                "What a step's time goes to, on average over the devices",
                _bars(plans) + _compare_report_table(names, parts),
            )
        )
    if len(plans) > 1:
        sections.append((f"Decided otherwise than in {names[0]}", "".join(_contrasts(plans, contrasts))))
    subtitle = ", ".join(dict.fromkeys(plan.model for plan in bare))
    if any(plan.summary.devices > MOST_DEVICES for plan in bare):
        subtitle += "; of devices with the same tasks one is drawn"
    return Report(
        title=f"{len(plans)} plans compared",
        subtitle=subtitle,
        figures=tuple((name, seconds_text(plan.summary.step_time_s)) for name, plan in zip(names, bare, strict=True)),
        pictures=tuple(
            (name, one_of_each(plan_picture(each.plan, each.timeline))) for name, each in zip(names, plans, strict=True)
        ),
        sections=tuple(sections),
    )


def _compare_report_table(names: Sequence[str], rows: Iterable[ComparisonRow]) -> str:
    """A row a figure, the best marked."""
    marked = []
    for row in rows:
        cells = (
            f'<td class="best">{escape(text)}</td>' if place in row.best else f"<td>{escape(text)}</td>"
            for place, text in enumerate(row.texts)
        )
        marked.append(f"<tr><td>{escape(row.name)}</td>{''.join(cells)}</tr>")
    return f'<div class="compared">{markup_table(("", *names), marked)}</div>'


def _bars(plans: Sequence[ComparisonPlan]) -> str:
    """Each step as a bar of its parts, all on one scale, and what the colours are."""
    longest = max(each.plan.summary.step_time_s for each in plans)
    lines, shown = [], set()
    for each in plans:
        if each.plan.breakdown is None:
            continue
        pieces = []
        for name, seconds in parts_of(each.plan.breakdown):
            if seconds > 0 and longest:
                shown.add(name)
                title = escape(f"{name}: {seconds_text(seconds)}")
                width = 100 * seconds / longest
                pieces.append(f'<i title="{title}" style="width:{width:.3f}%;background:{_colour(name)}"></i>')
        lines.append(f"<div>{escape(str(each.folder))}</div><div>{''.join(pieces)}</div>")
    legend = "".join(
        f'<span><i style="background:{_colour(name)}"></i>{escape(name)}</span>' for name in PARTS if name in shown
    )
    return f'<div class="parts">{"".join(lines)}</div><p class="legend">{legend}</p>'


def _contrasts(plans: Sequence[ComparisonPlan], contrasts: Sequence[PlanDiff]) -> Iterator[str]:
    for each, contrast in zip(plans[1:], contrasts[1:], strict=True):
        lines = "\n".join(contrast.lines)
        yield f"<h3>{escape(str(each.folder))}</h3><pre>{escape(lines)}</pre>"


def _colour(part: str) -> str:
    return f"hsl({_HUES[PARTS.index(part) % len(_HUES)]} 60% 55%)"
