"""One placement under several schedules, side by side on a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopipe.cli.drawing.markup import escape, markup_table


@dataclass(frozen=True, slots=True)
class ScheduleResult:
    """Result of a schedule on the placement, or why it does not take it."""

    schedule: str
    time: float = 0.0
    """Length of a step, or of all units of blocks."""
    bubble_rate: float = 0.0
    peak_memory: tuple[int, ...] = ()
    """A device each; () where the schedule does not take the placement."""
    refusal: str = ""
    chosen: bool = False


def comparison_markup(
    rivals: Sequence[ScheduleResult],
    limits: Sequence[int | None],
    time_text: Callable[[float], str],
    memory_text: Callable[[float], str],
) -> str:
    """A row a schedule, the shortest first, the chosen one marked; at the end those that do not take the placement."""
    taken = sorted((rival for rival in rivals if rival.peak_memory), key=lambda rival: (rival.time, rival.schedule))
    chosen = next((rival.time for rival in taken if rival.chosen), None)
    slowest = max((rival.time for rival in taken), default=0.0)
    rows = []
    for rival in taken:
        width = round(160 * rival.time / slowest) if slowest else 0
        ratio = f"{rival.time / chosen:.3f}" if chosen else "-"
        over = any(limit is not None and peak > limit for peak, limit in zip(rival.peak_memory, limits, strict=True))
        memory = memory_text(max(rival.peak_memory)) + (", over the limit" if over else "")
        name = f"{rival.schedule} (chosen)" if rival.chosen else rival.schedule
        cells = (time_text(rival.time), ratio, f"{rival.bubble_rate:.1%}", memory)
        bar = f'<td class="share"><i style="width:{width}px"></i></td>'
        label = ' class="chosen"' if rival.chosen else ""
        others = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f"<tr{label}><td>{escape(name)}</td>{bar}{others}</tr>")
    for rival in rivals:
        if not rival.peak_memory:
            why = f'<td class="why" colspan="5">{escape(rival.refusal)}</td>'
            rows.append(f'<tr class="refused"><td>{escape(rival.schedule)}</td>{why}</tr>')
    return markup_table(("schedule", "", "time", "to the chosen", "bubble", "peak memory"), rows)
