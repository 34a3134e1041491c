"""Page about a schedule of blocks."""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.cli.drawing.block_picture import block_kinds, block_picture
from autopipe.cli.drawing.comparison import ScheduleResult, comparison_markup
from autopipe.cli.drawing.markup import markup_row, markup_table
from autopipe.cli.drawing.palette import stage_colour
from autopipe.cli.drawing.report import Report
from autopipe.cli.drawing.stage_graph import block_graph_svg
from autopipe.cli.figures import devices_text
from autopipe.ir.block_schedule import BlockSchedule


def block_report(schedule: BlockSchedule, title: str, subtitle: str, rivals: Sequence[ScheduleResult]) -> Report:
    """The page of a schedule of blocks. Without rivals nothing is compared."""
    graph = schedule.graph
    sections = [("Blocks", block_graph_svg(graph) + _blocks(schedule))]
    if rivals:
        table = comparison_markup(rivals, graph.memory, "{:g}".format, "{:g}".format)
        sections.append(("These blocks under every schedule", table))
    pictures = (("", block_picture(schedule, title)),)
    return Report(title, subtitle, _figures(schedule), pictures, tuple(sections))


def _figures(schedule: BlockSchedule) -> tuple[tuple[str, str], ...]:
    steady = schedule.steady_bubble_rate
    return (
        ("makespan", str(schedule.makespan)),
        ("period", "none" if schedule.period is None else str(schedule.period)),
        ("no less than", str(schedule.lower_bound)),
        ("gap", "proven optimal" if schedule.optimal else f"{schedule.gap:.1%}"),
        ("bubble in the repetend", "-" if steady is None else f"{steady:.1%}"),
        ("peak memory", str(max(schedule.peak_memory))),
        ("units", str(schedule.units)),
        ("devices", str(schedule.graph.devices)),
        ("search", f"{schedule.search_time_s:.2f} s"),
    )


def _blocks(schedule: BlockSchedule) -> str:
    blocks = schedule.graph.blocks
    offsets = schedule.repetend.offsets if schedule.repetend is not None else None
    rows = []
    for index, (block, (stage, phase, _)) in enumerate(zip(blocks, block_kinds(blocks), strict=True)):
        cells = (
            block.name,
            devices_text(block.devices),
            str(block.time),
            f"{block.memory:+d}" if block.memory else "0",
            ", ".join(blocks[other].name for other in block.after) or "-",
            "-" if offsets is None else str(offsets[index]),
        )
        rows.append(markup_row(cells, stage_colour(stage, phase)))
    return markup_table(("block", "devices", "time", "memory", "after", "unit in the repetend"), rows)
