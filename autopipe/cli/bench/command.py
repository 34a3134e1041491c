"""`autopipe bench`: papers' tables and figures, theirs and ours side by side; and predictions held against runs."""

from __future__ import annotations

import difflib
import importlib
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import click

from autopipe.cli.bench.fidelity.command import fidelity
from autopipe.cli.bench.row import Case, Row
from autopipe.cli.options import standard_options
from autopipe.cli.output import Output
from autopipe.ir.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from autopipe.cli.drawing.picture import Picture

PAPERS: Final = {
    "auto": "all four papers' main cases, with no strategy named,",
    "graphpipe": "the GraphPipe paper",
    "pase": "the PaSE paper",
    "tepdist": "the TePDist paper",
    "tessel": "the Tessel paper",
}
"""A benchmark's name, that of the package here whose `cases()` lists its parts -> what it computes again."""


class Benchmarks(click.Group):
    """A command for every paper of `PAPERS`, and those that are added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, sorted."""
        return sorted([*PAPERS, *self.commands])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name; None where there is none."""
        return paper_command(cmd_name) if cmd_name in PAPERS else self.commands.get(cmd_name)


@click.group(cls=Benchmarks)
def bench() -> None:
    """Compute the tables and figures of a paper again, or run all plans and hold predictions against that.

    \b
    Example:
      autopipe bench tessel --only m/4
      autopipe bench fidelity --only gpt --ranks 4
    """


bench.add_command(fidelity)


def paper_command(name: str) -> click.Command:
    """`autopipe bench NAME` for a paper."""

    @click.command(
        name,
        help=f"""Compute the tables and figures of {PAPERS[name]} again.

    Search times are measured here and now; bubbles, periods and memory are computed; speed-ups come from the
    simulator. The note of every row says which.

    \b
    Example:
      autopipe bench {name}
      autopipe bench {name} --json
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
        cases = importlib.import_module(f"{__package__}.{name}").cases()
        chosen = _chosen(cases, only)
        rows: list[Row] = []
        with output.progress(f"bench {name}", total=len(chosen)) as bar:
            for case in chosen:
                bar.advance(0, note=f"{case.part}, {case.name}")
                rows.extend(case.run())
                bar.advance()
        drawn = [] if output.as_json else [_drawn(picture, output) for case in chosen for picture in case.pictures()]
        output.result({"rows": rows}, *_shown(rows), *itertools.chain.from_iterable(drawn))

    return paper


def _chosen(cases: Sequence[Case], only: tuple[str, ...]) -> list[Case]:
    """The cases named exactly or by a prefix. Raises ConfigurationError where a name fits none."""
    for wanted in only:
        if not any(case.name.startswith(wanted) for case in cases):
            names = list(dict.fromkeys(case.name for case in cases))
            near = difflib.get_close_matches(wanted, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(names)}"
            raise ConfigurationError(f"there is no case {wanted!r}", hint=hint, where="--only")
    return [case for case in cases if not only or any(case.name.startswith(wanted) for wanted in only)]


def _shown(rows: Sequence[Row]) -> list[Table | str]:
    """A table, and below it the notes that its last column counts."""
    from rich.table import Table

    notes = list(dict.fromkeys(row.note for row in rows if row.note))
    table = Table(box=None, pad_edge=False)
    for name in ("case", "variant", "metric"):
        table.add_column(name, overflow="fold")
    table.add_column("theirs", justify="right", no_wrap=True)
    table.add_column("ours", justify="right", no_wrap=True)
    table.add_column("unit", overflow="fold")
    table.add_column("note", justify="right", no_wrap=True)
    for row in rows:
        mark = str(notes.index(row.note) + 1) if row.note else ""
        table.add_row(row.case, row.variant, row.metric, _text(row.theirs), _text(row.ours), row.unit, mark)
    return [table, "", *(f"{number}  {note}" for number, note in enumerate(notes, start=1))]


def _drawn(picture: Picture, output: Output) -> Iterator[Text | str]:
    """A timeline below its title."""
    from autopipe.cli.drawing.terminal import draw_timeline

    yield from ("", picture.title)
    yield from draw_timeline(picture, output.width, output.coloured)


def _text(figure: float | None) -> str:
    if figure is None:
        return "–"
    return str(figure) if isinstance(figure, int) else f"{figure:.4g}"
