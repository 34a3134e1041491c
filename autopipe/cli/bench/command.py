"""`autopipe bench`: a paper's tables and figures, theirs and ours side by side."""

from __future__ import annotations

import difflib
import importlib
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import click

from autopipe.cli.bench.row import Case, Row
from autopipe.cli.options import standard_options
from autopipe.cli.output import Output
from autopipe.ir.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from autopipe.cli.drawing.picture import Picture

BENCHMARKS: Final = {
    "graphpipe": "autopipe.cli.bench.graphpipe",
    "pase": "autopipe.cli.bench.pase",
    "tepdist": "autopipe.cli.bench.tepdist",
    "tessel": "autopipe.cli.bench.tessel",
}
"""A benchmark's name -> the package whose `cases()` lists its parts."""


@click.command()
@click.argument("name", metavar="NAME", type=click.Choice(sorted(BENCHMARKS)))
@click.option(
    "--only",
    metavar="CASE",
    multiple=True,
    help="Run this case alone (repeatable); a beginning takes all cases that begin so.",
)
@standard_options
def bench(output: Output, name: str, only: tuple[str, ...]) -> None:
    """Compute the tables and figures of the paper called NAME again.

    Search times are measured here and now; bubbles, periods and memory are computed; speed-ups come from the
    simulator. The note of every row says which.

    \b
    Example:
      autopipe bench tessel
      autopipe bench tessel --only m/4 --json
    """
    cases = importlib.import_module(BENCHMARKS[name]).cases()
    chosen = _chosen(cases, only)
    rows: list[Row] = []
    with output.progress(f"bench {name}", total=len(chosen)) as bar:
        for case in chosen:
            bar.advance(0, note=f"{case.part}, {case.name}")
            rows.extend(case.run())
            bar.advance()
    drawn = [] if output.as_json else [_drawn(picture, output) for case in chosen for picture in case.pictures()]
    output.result({"rows": rows}, *_shown(rows), *itertools.chain.from_iterable(drawn))


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
