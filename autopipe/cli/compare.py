"""`autopipe compare`: plans side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autopipe.cli.options import standard_options
from autopipe.cli.output import Output

if TYPE_CHECKING:
    from rich.table import Table

    from autopipe.ir.plan import Plan


@click.command()
@click.argument("plans", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path))
@standard_options
def compare(output: Output, plans: tuple[Path, ...]) -> None:
    """Show the plans in DIRs side by side, with each one's step time against the first's.

    \b
    Example:
      autopipe compare gpt.1f1b.plan gpt.gpipe.plan
    """
    from autopipe.cli.plan_folder import check_plan_folder
    from autopipe.ir.serial.plan_file import read_plan, summary_form

    found = []
    for folder in plans:
        check_plan_folder(folder)
        found.append(read_plan(folder))
    for what, values in (
        ("models", {plan.model for plan in found}),
        ("batches", {plan.batch_size for plan in found}),
        ("modes", {plan.mode for plan in found}),
    ):
        if len(values) > 1:
            output.warn(f"the plans are for different {what}: {', '.join(sorted(map(str, values)))}")
    first = found[0].summary.step_time_s
    data = [
        {
            "plan": folder,
            "model": plan.model,
            "mode": plan.mode,
            "batch_size": plan.batch_size,
            "summary": summary_form(plan.summary),
            "speedup": first / plan.summary.step_time_s if plan.summary.step_time_s else None,
        }
        for folder, plan in zip(plans, found, strict=True)
    ]
    output.result({"plans": data}, _table(plans, found))


def _table(folders: tuple[Path, ...], plans: list[Plan]) -> Table:
    from rich.table import Table
    from rich.text import Text

    from autopipe.cli.figures import bytes_text, seconds_text

    table = Table("", *map(str, folders), box=None, pad_edge=False)
    summaries = [plan.summary for plan in plans]
    first = summaries[0].step_time_s

    def row(name: str, texts: list[str], best: Callable[[], int] | None = None) -> None:
        marked = best() if best is not None and len(set(texts)) > 1 else None
        table.add_row(name, *(Text(text, "bold green" if place == marked else "") for place, text in enumerate(texts)))

    def least(values: list[float]) -> Callable[[], int]:
        return lambda: min(range(len(values)), key=values.__getitem__)

    row("strategy", [each.strategy for each in summaries])
    row("schedule", [each.schedule for each in summaries])
    row("devices", [str(each.devices) for each in summaries])
    row("stages", [str(each.stages) for each in summaries])
    row("depth", [str(each.depth) for each in summaries])
    row("micro-batches", [f"{each.micro_batches} of {each.micro_batch_size}" for each in summaries])
    times = [each.step_time_s for each in summaries]
    row("step", [seconds_text(time) for time in times], least(times))
    row("speed-up", [f"{first / time:.3f}" if time else "-" for time in times])
    rates = [each.samples_per_s for each in summaries]
    row("samples/s", [f"{rate:,.1f}" for rate in rates], least([-rate for rate in rates]))
    row("bubble", [f"{each.bubble_rate:.1%}" for each in summaries], least([each.bubble_rate for each in summaries]))
    peaks: list[float] = [max(each.peak_memory_bytes) for each in summaries]
    row("peak memory", [bytes_text(peak) for peak in peaks], least(peaks))
    row("at best", [seconds_text(each.lower_bound_s) for each in summaries])
    row("search", [seconds_text(sum(seconds for _, seconds in each.search_time_s)) for each in summaries])
    return table
