"""One screen about a schedule of blocks."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType

from autopipe.cli.drawing.block_picture import block_picture
from autopipe.cli.drawing.sparkline import draw_memory
from autopipe.cli.drawing.terminal import draw_timeline
from autopipe.ir.block_schedule import BlockSchedule


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
