"""`autopipe bench fidelity`: predicted against measured steps, memory and bytes, of all plans that are weighed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from autopipe.cli.options import standard_options
from autopipe.cli.output import Output

if TYPE_CHECKING:
    from autopipe.cli.bench.fidelity.outcome import Comparison

_MINUTES = 20.0


@click.command()
@click.option("--only", metavar="MODEL", multiple=True, help="Run this model alone (repeatable).")
@click.option("--ranks", metavar="N,…", default="4,8", show_default=True, help="Numbers of ranks.")
@click.option("--costs", type=click.Path(path_type=Path), metavar="FILE", help="Measured costs; measured anew without.")
@click.option(
    "--minutes",
    type=click.FloatRange(min=0),
    default=_MINUTES,
    show_default=True,
    help="About how long it takes; all candidates are run, however long that takes.",
)
@click.option("--write", type=click.Path(path_type=Path), metavar="FILE", help="Also write a page, with a picture.")
@standard_options
def fidelity(
    output: Output, only: tuple[str, ...], ranks: str, costs: Path | None, minutes: float, write: Path | None
) -> None:
    """Plan small models of the zoo, run every plan that was weighed on ranks of this machine, and hold what was
    predicted of its step, memory and bytes against that.

    Operators and exchanges are measured before. A candidate that fails stops no other; a page holds what is done so
    far.

    \b
    Example:
      autopipe bench fidelity --only gpt --ranks 4
      autopipe bench fidelity --write fidelity.md
    """
    import tempfile

    from autopipe.cli.bench.fidelity.comparing import compare, sessions
    from autopipe.cli.bench.fidelity.page import write_page
    from autopipe.cli.bench.fidelity.rows import rows, table, verdict
    from autopipe.cli.output import check_writable

    if write is not None:
        check_writable(write)
    found: list[Comparison] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="autopipe-fidelity-") as scratch:
        planned = sessions(only, ranks)
        with output.progress("bench fidelity", total=len(planned)) as bar:
            for comparison in compare(planned, costs, Path(scratch), began + 60 * minutes, output, bar):
                found.append(comparison)
                bar.advance()
                output.note(f"{comparison.name}: {verdict(comparison)}")
                if write is not None:
                    write_page(write, _command(only, ranks), found)
    data = {"rows": [row for each in found for row in rows(each)]}
    output.result(data, *(part for each in found for part in table(each)))


def _command(only: tuple[str, ...], ranks: str) -> str:
    words = [*(f"--only {name}" for name in only), *([f"--ranks {ranks}"] if ranks != "4,8" else [])]
    return " ".join(["autopipe bench fidelity", *words])
