"""`autopipe codegen`: from a plan folder to one program a device."""

from __future__ import annotations

from pathlib import Path

import click

from autopipe.cli.options import standard_options
from autopipe.cli.output import Output


@click.command()
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("-o", "--output", "folder", type=click.Path(path_type=Path), help="Where to write [PLAN/program].")
@standard_options
def codegen(output: Output, plan: Path, folder: Path | None) -> None:
    """Write the program of every rank for the plan in folder PLAN.

    \b
    Example:
      autopipe codegen gpt.plan
    """
    from autopipe.cli.generation import generate
    from autopipe.cli.plan_folder import open_plan

    target = folder or plan / "program"
    with output.progress("generating", total=2) as bar:
        planned = open_plan(plan)
        bar.advance(note="plan read")
        program = generate(planned, target)
        bar.advance(note="programs written")
    output.result(
        {"program": target, "ranks": program.world_size, "stages": len(program.stages)},
        f"{program.world_size} rank programs of {len(program.stages)} stages in {target}",
        f"next: autopipe launch {target}",
    )
