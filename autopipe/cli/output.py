"""Terminal output: results on stdout, progress and warnings on stderr."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePath

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as EstimateColumn
from rich.segment import Segment
from rich.text import Text

_PIPED_WIDTH = 160
"""Characters a line where stdout is no terminal."""


class Verbosity(enum.IntEnum):
    """How much is said on stderr besides warnings and errors."""

    QUIET = 0
    NORMAL = 1
    DETAILED = 2


def printable(text: str) -> str:
    """`text` on one line, with escapes in place of what would move the cursor, colour, reorder or hide text.

    Every name from a model, a plan or a schedule that a person is shown goes through here.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def printable_lines(text: str) -> str:
    """`text` with its line breaks, each line as `printable` shows it."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


@dataclass(frozen=True, slots=True)
class _Printable:
    """A renderable whose own text is shown; styles stay as they are."""

    part: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.part, options):
            yield segment if segment.control else Segment(printable_lines(segment.text), segment.style)


@dataclass(frozen=True, slots=True)
class Bar:
    """One line of progress: how far, how long still, and a note such as the best answer and its bound so far."""

    _progress: Progress
    _task: TaskID

    def advance(self, amount: float = 1, note: str = "") -> None:
        """Move on by `amount` of the total; `note` replaces the text at the end of the line where it is given."""
        self._progress.advance(self._task, amount)
        self._say(note)

    def reach(self, completed: float, note: str = "") -> None:
        """Set how much of the total is done, for work that reports where it stands, such as a solver's seconds."""
        self._progress.update(self._task, completed=completed)
        self._say(note)

    def _say(self, note: str) -> None:
        """Show `note`, or keep the last one where it is empty."""
        if note:
            self._progress.update(self._task, note=note)


@dataclass(frozen=True, slots=True)
class Output:
    """The two streams of a command.

    stdout carries the result and nothing else: with `as_json` one JSON object, otherwise what a person reads.
    stderr carries notes, progress and warnings. Names from models are never rich markup, and their
    control characters are shown.
    """

    as_json: bool = False
    verbosity: Verbosity = Verbosity.NORMAL
    stdout: Console = field(default_factory=lambda: Console(markup=False, highlight=False, emoji=False))
    stderr: Console = field(default_factory=lambda: Console(stderr=True, markup=False, highlight=False, emoji=False))

    @property
    def width(self) -> int:
        """Characters a line of stdout for what is drawn."""
        return self.stdout.width if self.stdout.is_terminal else _PIPED_WIDTH

    @property
    def coloured(self) -> bool:
        """True if stdout shows colours."""
        return self.stdout.is_terminal and not self.stdout.no_color

    def result(self, data: Mapping[str, object], *shown: RenderableType) -> None:
        """Print the command's result, once: `data` as JSON, or `shown` (text, tables) for a person."""
        if self.as_json:
            self.stdout.file.write(json.dumps(_plain(data), allow_nan=False) + "\n")
            return
        for part in shown:
            self._print(self.stdout, part)

    def line(self, text: str) -> None:
        """Print a line of a result that grows while the command runs, such as a step's; on stderr with `as_json`."""
        if not self.as_json:
            self._print(self.stdout, text)
        elif self.verbosity > Verbosity.QUIET:
            self._print(self.stderr, text)

    def note(self, text: str) -> None:
        """Say on stderr what is being done; silent with -q."""
        if self.verbosity >= Verbosity.NORMAL:
            self._print(self.stderr, text)

    def detail(self, text: str) -> None:
        """Say on stderr what only -v asks for."""
        if self.verbosity >= Verbosity.DETAILED:
            self._print(self.stderr, text)

    def warn(self, message: str, hint: str = "") -> None:
        """Warn on stderr in one line; never silenced."""
        advice = f" ({hint})" if hint else ""
        self._print(self.stderr, Text.assemble(("warning: ", "yellow"), f"{message}{advice}"))

    @contextmanager
    def progress(self, description: str, total: float | None = None) -> Iterator[Bar]:
        """A progress bar on stderr for the length of the block; shows nothing with -q or where stderr is no terminal.

        `total` is the bound that the bar runs to, in whatever unit `Bar.advance` counts; None where it is not known.
        """
        hidden = self.verbosity is Verbosity.QUIET or not self.stderr.is_terminal
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            EstimateColumn(),
            TextColumn("{task.fields[note]}", markup=False),
        )
        with Progress(*columns, console=self.stderr, transient=True, disable=hidden) as progress:
            yield Bar(progress, progress.add_task(description, total=total, note=""))

    def _print(self, console: Console, part: RenderableType) -> None:
        """Print `part`; text keeps its own line breaks however narrow the terminal is."""
        text = isinstance(part, (str, Text))
        console.print(printable_lines(part) if isinstance(part, str) else _Printable(part), soft_wrap=text)


def _plain(value: object) -> object:
    """`value` in JSON's own types; a figure that is infinite or no number becomes null, which JSON can say."""
    match value:
        case None | bool() | str():
            return value
        case enum.Enum():
            return _plain(value.value)
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else None
        case Mapping():
            return {str(key): _plain(entry) for key, entry in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_plain(entry) for entry in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
        case PurePath():
            return str(value)
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {part.name: _plain(getattr(value, part.name)) for part in dataclasses.fields(value)}
        case _ if hasattr(value, "tolist"):  # numpy's scalars and arrays
            return _plain(value.tolist())
        case _:
            raise TypeError(f"{type(value).__name__} has no JSON form")
