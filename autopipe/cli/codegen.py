"""`autopipe codegen`: write one PyTorch program per rank of a plan."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from autopipe.api.codegen import codegen as write_program
from autopipe.backends.torch.codegen.stage import Style
from autopipe.cli.options import FORCE, MODEL, PATH, standard_options
from autopipe.cli.output import Output
from autopipe.ir.words import plural


def _parse_ranks(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> tuple[int, ...]:
    """Return the ranks in a text such as `0,17`, () for None."""
    try:
        return () if text is None else tuple(map(int, text.split(",")))
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is no list of numbers like 0,17", param_hint="--ranks"
        ) from None


@click.command()
@click.argument("plan", type=PATH)
@click.option("-o", "--output", "folder", type=PATH, help="Folder of the program [PLAN/program].")
@MODEL
@click.option(
    "--ranks",
    metavar="R,R,...",
    callback=_parse_ranks,
    help="Write only these ranks, for inspection and dry runs.",
)
@click.option(
    "--style",
    type=click.Choice(["flat", "layers"]),
    default="layers",
    show_default=True,
    help="Form of the stage files: one line per operator, or one function per repeated layer.",
)
@FORCE
@standard_options
def codegen(
    output: Output,
    plan: Path,
    folder: Path | None,
    model: Path | None,
    ranks: tuple[int, ...],
    style: Style,
    force: bool,
) -> None:
    """Write the program of every rank for the plan in folder PLAN.

    \b
    Example:
      autopipe codegen gpt.plan
      autopipe codegen gpt.plan --style flat
      autopipe codegen llama.plan --ranks 0,17,4095
    """
    made = write_program(
        plan, folder, model=model, ranks=ranks, style=style, force=force, events=output
    )
    program = made.program
    words = ["autopipe", "launch", str(made.folder)]
    if made.ranks:
        words += ["--dry-run", "--device", "meta", "--rank", str(made.ranks[0])]
    count = f"{len(made.ranks)} of {program.world_size}" if made.ranks else f"{program.world_size}"
    output.report(
        {
            "program": made.folder,
            "ranks": program.world_size,
            "written": made.ranks or None,
            "stages": len(program.stages),
        },
        f"{count} rank {plural(program.world_size, 'program')} of {len(program.stages)} "
        f"{plural(len(program.stages), 'stage')} in {made.folder}",
        f"next: {shlex.join(words)}",
    )
