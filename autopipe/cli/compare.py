"""`autopipe compare`: plans side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from autopipe.cli.options import standard_options
from autopipe.cli.output import Output

if TYPE_CHECKING:
    from autopipe.cli.compared import ComparedPlan

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
    from autopipe.cli.compare_screen import compare_screen
    from autopipe.cli.compared import ComparedPlan, speedup
    from autopipe.cli.differences import PlanDiff
    from autopipe.cli.drawing.compare_report import compare_report
    from autopipe.cli.drawing.report import report_page
    from autopipe.cli.files import check_writable, write_texts
    from autopipe.ir.plan_file import summary_form

    if html is not None:
        check_writable(html)
    found = [ComparedPlan.open(folder) for folder in plans]
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
            "summary": summary_form(each.plan.summary),
            "breakdown": each.plan.breakdown,
            "speedup": speedup(found[0].plan, each.plan),
            "differences": contrast.form(),
        }
        for each, contrast in zip(found, contrasts, strict=True)
    ]
    shown = compare_screen(found, contrasts, output.width, output.coloured) if html is None else (f"page in {html}",)
    output.result({"plans": data, "html": html}, *shown)


def _warn_of_unlike(output: Output, found: list[ComparedPlan]) -> None:
    for what, values in (
        ("models", {each.plan.model for each in found}),
        ("batches", {each.plan.batch_size for each in found}),
        ("modes", {each.plan.mode for each in found}),
    ):
        if len(values) > 1:
            output.warn(f"the plans are for different {what}: {', '.join(sorted(map(str, values)))}")
