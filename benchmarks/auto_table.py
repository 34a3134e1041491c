"""Cells of `auto_never_slower.py` as a page of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

Row = Mapping[str, Any]

SAME = 1e-9
"""Relative difference of steps that are equal but for the rounding of floats."""

HEAD = """\
# The plan chosen by itself against every single strategy

Small models of the zoo (their default sizes) in training, four samples a device a step, on every cluster preset with
4, 8, 16 and 32 devices; all steps are simulated. `best single` is the shortest step of all strategies with their
defaults, and of the shapes that named schedules want, under every schedule that takes them, each as planned by name:
what the search placed by a strategy as it is named is not placed again for that, but for the best, which is planned by
name once more. A schedule is searched where the bound on the placement's step is below the others' best. `ratio`
is its step over that of the chosen plan: below 1 the search has missed something. `of ideal` is linear speed-up at the
roofline, in the same micro-batches, over the step; it is small because such small models mostly launch kernels, which
does not get less with more devices. `mb` counts micro-batches.

    python benchmarks/auto_never_slower.py --log /tmp/auto-table.jsonl
    python benchmarks/auto_never_slower.py --log /tmp/auto-table.jsonl --table /tmp/auto-table.md
"""

COLUMNS = (
    "model",
    "preset",
    "devices",
    "chosen",
    "step",
    "best single",
    "its step",
    "ratio",
    "samples/s",
    "of ideal",
)


def written(rows: Sequence[Row], cells: int) -> str:
    """The page of the rows there are, of so many cells."""
    good = [row for row in rows if "failed" not in row]
    bad = [row for row in rows if "failed" in row]
    lines = [
        HEAD,
        *_summary(good, bad, cells),
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
    ]
    lines += map(_line, sorted(good, key=lambda row: (row["model"], row["preset"], row["devices"])))
    if bad:
        lines += ["", "Without an answer:", ""]
        lines += [
            f"- {row['model']} on {row['devices']} devices of {row['preset']}: {row['failed']}"
            for row in bad
        ]
    return "\n".join(lines) + "\n"


def _summary(good: Sequence[Row], bad: Sequence[Row], cells: int) -> Iterable[str]:
    text = f"{len(good)} of {cells} cells are computed, {len(bad)} have no answer."
    if good:
        ratios = [_ratio(row) for row in good]
        slower = sum(each < 1 - SAME for each in ratios)
        shorter = sum(each > 1 + SAME for each in ratios)
        text += (
            f" In {slower} cells the chosen plan is slower than the best single one, in {shorter} "
            f"it is faster (up to {max(ratios):.2f} times, median {median(ratios):.3f}), in the "
            f"others as fast. A search takes {median(row['search_s'] for row in good):.1f} s of "
            f"processor time (median; at most {max(row['search_s'] for row in good):.0f} s), a "
            f"whole cell {median(row['cell_s'] for row in good):.1f} s."
        )
        apart = sum(abs(row["single_again_s"] / row["single_step_s"] - 1) > SAME for row in good)
        text += (
            f" Planning once more with the best single one named gives another step in {apart} "
            "cells."
        )
    return [text]


def _line(row: Row) -> str:
    chosen = f"{row['strategy']}, {row['schedule']}, {row['micro_batches']} mb"
    single = f"{row['single_strategy']}, {row['single_schedule']}"
    ratio = _ratio(row)
    shown = f"{ratio:.3f}" if ratio >= 1 - SAME else f"**{ratio:.4f}**"
    steps = _milliseconds(row["step_s"]), single, _milliseconds(row["single_step_s"])
    rest = f"{row['samples_per_s']:,.0f} | {row['ideal_s'] / row['step_s']:.0%}"
    cells = (row["model"], row["preset"], row["devices"], chosen, *steps, shown, rest)
    return f"| {' | '.join(map(str, cells))} |"


def _ratio(row: Row) -> float:
    return float(row["single_step_s"] / row["step_s"])


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
