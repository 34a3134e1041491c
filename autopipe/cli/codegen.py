"""`autopipe codegen`: from a plan folder to one program a device."""

from __future__ import annotations

from pathlib import Path

import click

from autopipe.cli.options import standard_options
from autopipe.cli.output import Output


@click.command()
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("-o", "--output", "folder", type=click.Path(path_type=Path), help="Where to write [PLAN/program].")
@click.option("--ranks", metavar="R,R,...", help="Write these ranks alone, for looking at and for dry runs.")
@standard_options
def codegen(output: Output, plan: Path, folder: Path | None, ranks: str | None) -> None:
    """Write the program of every rank for the plan in folder PLAN.

    \b
    Example:
      autopipe codegen gpt.plan
      autopipe codegen llama.plan --ranks 0,17,4095
    """
    from autopipe.cli.generation import generate
    from autopipe.cli.plan_folder import open_plan

    target, only = folder or plan / "program", _numbers(ranks)
    with output.progress("generating", total=2) as bar:
        planned = open_plan(plan)
        bar.advance(note="plan read")
        program = generate(planned, target, only)
        bar.advance(note="programs written")
    some = f"{len(only)} of {program.world_size}" if only else f"{program.world_size}"
    output.result(
        {"program": target, "ranks": program.world_size, "written": only or None, "stages": len(program.stages)},
        f"{some} rank programs of {len(program.stages)} stages in {target}",
        f"next: autopipe launch {target}" + (f" --dry-run --device meta --rank {only[0]}" if only else ""),
    )


def _numbers(text: str | None) -> tuple[int, ...]:
    """The ranks that are asked for, each once; () where all are."""
    try:
        return tuple(dict.fromkeys(map(int, text.split(",")))) if text is not None else ()
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of numbers like 0,17", param_hint="--ranks") from None
