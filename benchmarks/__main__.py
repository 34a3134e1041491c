"""`python -m benchmarks NAME`: papers' tables and figures, theirs and ours side by side;
predictions beside runs.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from autopipe.cli.main import main
from autopipe.cli.options import PATH, standard_options, stepwise_options
from autopipe.cli.output import Output
from benchmarks.table import run_cases

if TYPE_CHECKING:
    from benchmarks.weighed_plans import Comparison

PROGRAM: Final = "python -m benchmarks"
PAPERS: Final = {
    "auto": "all four papers' main cases, with no strategy named,",
    "graphpipe": "the GraphPipe paper",
    "pase": "the PaSE paper",
    "tepdist": "the TePDist paper",
    "tessel": "the Tessel paper",
}
"""A module of this package, whose `cases()` lists its parts -> what they compute again."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def benchmarks() -> None:
    """Compute the tables and figures of a paper again, or run all plans and hold predictions
    against that.

    \b
    Example:
      python -m benchmarks tessel --only m/4
      python -m benchmarks fidelity --only gpt --ranks 4
    """


def paper_command(name: str) -> click.Command:
    """The command that runs the cases of a paper."""

    @click.command(
        name,
        help=f"""Compute the tables and figures of {PAPERS[name]} again.

    Search times are measured here and now; bubbles, periods and memory are computed; speed-ups come from the
    simulator. The note of every row says which.

    \b
    Example:
      python -m benchmarks {name}
      python -m benchmarks {name} --json
    """,
    )
    @click.option(
        "--only",
        metavar="CASE",
        multiple=True,
        help="Run this case alone (repeatable); a beginning takes all cases that begin so.",
    )
    @standard_options
    def paper(output: Output, only: tuple[str, ...]) -> None:
        run_cases(name, importlib.import_module(f"benchmarks.{name}").cases(), only, output)

    return paper


@benchmarks.command()
@click.option("--only", metavar="MODEL", multiple=True, help="Run this model alone (repeatable).")
@click.option("--ranks", metavar="N,…", default="4,8", show_default=True, help="Numbers of ranks.")
@click.option(
    "--costs",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Measured costs; measured anew without.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0),
    default=20.0,
    show_default=True,
    help="About how long it takes; all candidates are run, however long that takes.",
)
@click.option(
    "--write",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also write a page, with a picture.",
)
@standard_options
def fidelity(
    output: Output,
    only: tuple[str, ...],
    ranks: str,
    costs: Path | None,
    minutes: float,
    write: Path | None,
) -> None:
    """Plan small models of the zoo, run every plan that was weighed on ranks of this machine, and
    hold what was predicted of its step, memory and bytes against that.

    Operators and exchanges are measured before. A candidate that fails stops no other; a page holds
    what is done so far.

    \b
    Example:
      python -m benchmarks fidelity --only gpt --ranks 4
      python -m benchmarks fidelity --write fidelity.md
    """
    import tempfile

    from autopipe.ir.output_kinds import check_writable
    from benchmarks.weighed_plans import compare, rows, sessions, table, verdict, write_page

    if write is not None:
        check_writable(write)
    words = [
        *(f"--only {name}" for name in only),
        *([f"--ranks {ranks}"] if ranks != "4,8" else []),
    ]
    found: list[Comparison] = []
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="autopipe-fidelity-") as scratch:
        planned = sessions(only, ranks)
        with output.progress("fidelity", total=len(planned)) as bar:
            for comparison in compare(planned, costs, Path(scratch), end, output, bar):
                found.append(comparison)
                bar.advance()
                output.note(f"{comparison.name}: {verdict(comparison)}")
                if write is not None:
                    write_page(write, " ".join([PROGRAM, "fidelity", *words]), found)
    data = {"rows": [row for each in found for row in rows(each)]}
    output.result(data, *(part for each in found for part in table(each)))


@benchmarks.command()
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    default=9.0,
    show_default=True,
    help="Time for all rows.",
)
@click.option(
    "--prepare",
    type=PATH,
    metavar="DIR",
    help="Make models, plans and programs in DIR, and measure nothing.",
)
@click.option(
    "--prepared", type=PATH, metavar="DIR", help="Read what --prepare made [made before the rows]."
)
@click.option("--only", metavar="GROUP", multiple=True, help="Run this group alone (repeatable).")
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    default="cuda",
    show_default=True,
    help="Where to run.",
)
@click.option("--tiny", is_flag=True, help="Smallest sizes: checks that it runs, measures nothing.")
@click.option(
    "--write",
    type=PATH,
    metavar="FILE",
    default="cuda.json",
    show_default=True,
    help="File of the results, row by row.",
)
@stepwise_options
def cuda(
    output: Output,
    minutes: float,
    prepare: Path | None,
    prepared: Path | None,
    only: tuple[str, ...],
    device: str,
    tiny: bool,
    write: Path,
) -> None:
    """Measure on one GPU what no other machine shows, in a few minutes.

    Groups, in order of value: launch and nccl, steps, hand, then four, conformance and tf32. Each
    row has a time limit and is in the file once it has ended. Rows that measure no time run side by
    side. A run from a prepared folder needs neither ortools nor another solver.

    \b
    Example:
      python -m benchmarks cuda --prepare prepared
      python -m benchmarks cuda --minutes 9 --prepared prepared --write cuda.json
    """
    from benchmarks.cuda.run import make_folder, run_rows

    if prepare is not None:
        made = make_folder(prepare, device, tiny, output.note)
        for name, error in made.failures.items():
            output.warn(f"{name}: {error}")
        count = len(made.failures)
        told = f"{made.bytes / 2**20:.1f} MiB in {prepare}" + (
            f"; {count} programs could not be made" if count else ""
        )
        output.report({"folder": prepare, "bytes": made.bytes, "failures": made.failures}, told)
        return
    rows = run_rows(60 * minutes, prepared, only, device, tiny, write, output)
    output.result({"rows": rows, "file": write})


for _name in PAPERS:
    benchmarks.add_command(paper_command(_name))

if __name__ == "__main__":
    sys.exit(main(command=benchmarks, name=PROGRAM))
