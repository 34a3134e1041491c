"""A benchmark's cases, the rows that they give, and the table and pictures that show them."""

from __future__ import annotations

import difflib
import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from autopipe.api.timeline_figure import Picture
from autopipe.cli.output import Output
from autopipe.configs import zoo
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.passes.frontend import read_model

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

Settings = tuple[tuple[str, int | str], ...]
"""Sizes of a model of the zoo."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `theirs` is what the paper states, None where it states no number; `ours` is made
    in this run.
    """

    case: str
    metric: str
    theirs: float | None
    ours: float | None
    """None where there is no answer: `note` says why."""
    unit: str = ""
    variant: str = ""
    """The schedule, strategy or setting that the figure is for, where a case has several."""
    note: str = ""
    """How ours came about (measured, simulated, on what), or why there is none."""


@dataclass(frozen=True, slots=True)
class Case:
    """One shape or model at one number of devices, for one table or figure."""

    name: str
    """`m/4`, `gpt-11b/p=4`: its rows begin with it; several cases may have one name."""
    part: str
    """The table or figure, for the progress bar."""
    run: Callable[[], Iterable[Row]]
    pictures: Callable[[], Iterable[Picture]] = tuple
    """Drawn below the table."""


def cases_of(
    part: str, rows: Callable[..., Iterable[Row]], each: Iterable[tuple[str, Sequence[object]]]
) -> list[Case]:
    """A case for each name, whose rows are `rows(name, *arguments)`."""
    return [Case(name, part, partial(rows, name, *arguments)) for name, arguments in each]


@cache
def zoo_graph(model: str, settings: Settings, samples: int) -> Graph:
    """One evaluation of a model of the zoo on so many samples, with its loss and without weights.

    The loss's scores are whole, as in the papers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        zoo.build(zoo.configure(model, {**dict(settings), "loss": True, "weights": "none"})).save(
            path
        )
        return read_model(path, batch=samples, scores="keep").graph


def run_cases(name: str, cases: Sequence[Case], only: Sequence[str], output: Output) -> None:
    """Run the cases that `only` names, all where it is empty, and print their rows and pictures."""
    chosen = select(cases, only)
    rows: list[Row] = []
    with output.progress(name, total=len(chosen)) as bar:
        for case in chosen:
            bar.advance(0, note=f"{case.part}, {case.name}")
            rows.extend(case.run())
            bar.advance()
    drawn = (
        []
        if output.as_json
        else [_drawn(picture, output) for case in chosen for picture in case.pictures()]
    )
    output.result({"rows": rows}, *_shown(rows), *itertools.chain.from_iterable(drawn))


def select(cases: Sequence[Case], only: Sequence[str]) -> list[Case]:
    """The cases named exactly or by a prefix. Raises ConfigurationError where a name fits none."""
    for wanted in only:
        if not any(case.name.startswith(wanted) for case in cases):
            names = list(dict.fromkeys(case.name for case in cases))
            near = difflib.get_close_matches(wanted, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(names)}"
            raise ConfigurationError(f"there is no case {wanted!r}", hint=hint, where="--only")
    return [case for case in cases if not only or case.name.startswith(tuple(only))]


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
        table.add_row(
            row.case, row.variant, row.metric, _text(row.theirs), _text(row.ours), row.unit, mark
        )
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
