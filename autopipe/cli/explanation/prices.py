"""Prices of other choices, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from autopipe.cli.explanation.weighed import over_text
from autopipe.cli.figures import bytes_text, seconds_text
from autopipe.passes.explain import EditPrice


def price_table(prices: Sequence[EditPrice], chosen_s: float) -> Table:
    """A row a change: its step, how much longer than the chosen one, and the most memory on any device."""
    table = Table("what else", "step", "longer", "memory", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for each in prices:
        if each.step_s is None:
            table.add_row(f"{each.what}: {each.refused}")
        else:
            told = seconds_text(each.step_s), over_text(each.step_s, chosen_s), bytes_text(each.peak_memory_bytes or 0)
            table.add_row(each.what, *told)
    return table


def price_forms(prices: Sequence[EditPrice], chosen_s: float) -> list[dict[str, object]]:
    """The same for a program."""
    return [
        {
            "what": each.what,
            "step_time_s": each.step_s,
            "longer_s": None if each.step_s is None else each.step_s - chosen_s,
            "peak_memory_bytes": each.peak_memory_bytes,
            "refused": each.refused,
        }
        for each in prices
    ]
