"""Output of commands: results on stdout, and notes, progress and warnings on stderr. Also tables
and the text of groups of devices.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePath

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as EstimateColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from autopipe.api.events import Progress as Work
from autopipe.cli.bars import PrintedBar, RichBar
from autopipe.ir.placement import devices_text
from autopipe.ir.words import printable_lines

_WIDTH_WITHOUT_TERMINAL = 160
"""Line width in characters if stdout is no terminal and COLUMNS is not set."""


class Verbosity(enum.IntEnum):
    """Amount of output on stderr besides warnings and errors."""

    QUIET = 0
    NORMAL = 1
    DETAILED = 2


@dataclass(frozen=True, slots=True)
class _EscapedRenderable:
    """A renderable whose text is escaped by `printable`; its styles are unchanged."""

    part: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.part, options):
            yield (
                segment
                if segment.control
                else Segment(printable_lines(segment.text), segment.style)
            )


def _make_console(stderr: bool = False) -> Console:
    console = Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdecimal():
        console.width = _WIDTH_WITHOUT_TERMINAL
    return console


@dataclass(frozen=True, slots=True)
class Output:
    """The output streams of a command. Stdout has the result only: text, or with `as_json` one
    JSON object, which follows the JSON lines of `record`. Stderr has notes, progress and
    warnings. Names from models are not interpreted as rich markup, and their control characters
    are escaped.
    """

    as_json: bool = False
    verbosity: Verbosity = Verbosity.NORMAL
    stdout: Console = field(default_factory=_make_console)
    stderr: Console = field(default_factory=lambda: _make_console(stderr=True))
    interval_s: float = 10.0
    """Seconds between two lines of progress if stderr is no terminal."""

    @property
    def width(self) -> int:
        """Characters per line of stdout."""
        return self.stdout.width

    @property
    def coloured(self) -> bool:
        return self.stdout.is_terminal and not self.stdout.no_color

    def result(self, data: Mapping[str, object], *shown: RenderableType) -> None:
        """Print the command's result once: `data` as JSON with `as_json`, otherwise `shown` (text,
        tables).
        """
        if self.as_json:
            self.stdout.file.write(json.dumps(_as_json_value(data), allow_nan=False) + "\n")
            return
        for part in shown:
            self._print(self.stdout, part)

    def report(self, data: Mapping[str, object], *shown: RenderableType) -> None:
        """Print the result of a command that creates something. With -q, `shown` is not printed."""
        self.result(data, *(shown if self.verbosity > Verbosity.QUIET else ()))

    def height(self, part: RenderableType) -> int:
        """Return the number of lines that `part` takes on stdout."""
        if isinstance(part, str) and not self.stdout.is_terminal:
            return part.count("\n") + 1
        return len(self.stdout.render_lines(part))

    def line(self, part: RenderableType) -> None:
        """Print a part of a result that grows while the command runs, for example the line of a
        step. With `as_json`, the part goes to stderr.
        """
        if not self.as_json:
            self._print(self.stdout, part)
        elif self.verbosity > Verbosity.QUIET:
            self._print(self.stderr, part)

    def record(self, data: Mapping[str, object]) -> None:
        """With `as_json`, print a part of a growing result as one JSON line."""
        if self.as_json:
            self.stdout.file.write(json.dumps(_as_json_value(data), allow_nan=False) + "\n")
            self.stdout.file.flush()

    def note(self, text: str) -> None:
        """Print a note on stderr, unless -q was given."""
        if self.verbosity >= Verbosity.NORMAL:
            self._print(self.stderr, text)

    def detail(self, text: str) -> None:
        """Print a detail on stderr if -v was given."""
        if self.verbosity >= Verbosity.DETAILED:
            self._print(self.stderr, text)

    def warn(self, message: str, hint: str = "") -> None:
        """Print a warning on stderr, also with -q."""
        advice = f" ({hint})" if hint else ""
        text = Text.assemble(("warning: ", "yellow"), f"{message}{advice}")
        self.stderr.print(_EscapedRenderable(text), soft_wrap=not self.stderr.is_terminal)

    @contextmanager
    def progress(self, description: str, total: float | None = None) -> Iterator[Work]:
        """Context manager that shows progress on stderr: a bar on a terminal, otherwise a line
        every `interval_s` seconds, and nothing with -q. `total` is the amount of all work, in the
        unit that `Progress.advance` counts; None if it is not known.
        """
        if not self.stderr.is_terminal:
            with self.progress_lines(description, total) as lines:
                yield lines
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            EstimateColumn(),
            TextColumn("{task.fields[note]}", markup=False),
        )
        hidden = self.verbosity is Verbosity.QUIET
        with Progress(*columns, console=self.stderr, transient=True, disable=hidden) as progress:
            yield RichBar(progress, progress.add_task(description, total=total, note=""))

    @contextmanager
    def progress_lines(self, description: str, total: float | None = None) -> Iterator[PrintedBar]:
        """Context manager that prints a line of progress every `interval_s` seconds if stderr is no
        terminal and -q was not given. It is for work that shows its progress on terminals itself.
        """
        bar = PrintedBar(self.note, description, total, self.interval_s)
        if self.stderr.is_terminal or self.verbosity is Verbosity.QUIET:
            yield bar
            return
        with bar:
            yield bar

    def _print(self, console: Console, part: RenderableType) -> None:
        """Print `part`. On a terminal, prose is wrapped between words. Elsewhere it stays on one
        line. A `Text` (a row of a timeline, a command to copy) keeps its own line breaks, however
        narrow the terminal is.
        """
        plain = printable_lines(part) if isinstance(part, str) else _EscapedRenderable(part)
        kept = isinstance(part, Text) or (isinstance(part, str) and not console.is_terminal)
        console.print(plain, soft_wrap=kept)


def _as_json_value(value: object) -> object:
    """Convert `value` to the types of JSON. An infinite number or NaN becomes "inf", "-inf" or
    "nan", because JSON has no such numbers.
    """
    match value:
        case enum.Enum():
            return _as_json_value(value.value)
        case None | int() | str():
            return value
        case float():
            return float(value) if math.isfinite(value) else str(float(value))
        case Mapping():
            return {str(key): _as_json_value(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_as_json_value(entry) for entry in value]
        case set() | frozenset():
            return [_as_json_value(entry) for entry in sorted(value)]
        case PurePath():
            return str(value)
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {
                part.name: _as_json_value(getattr(value, part.name))
                for part in dataclasses.fields(value)
            }
        case _ if hasattr(value, "tolist"):  # NumPy scalars and arrays have the method `tolist`.
            return _as_json_value(value.tolist())
    raise TypeError(f"{type(value).__name__} has no JSON form")


def plain_table(*heads: str, right: int | None = None, no_wrap: bool = False) -> Table:
    """Return a table without lines. Columns from number `right` on are right-aligned, and stay on
    one line with `no_wrap`.
    """
    table = Table(*heads, box=None, pad_edge=False)
    for column in table.columns[right:] if right is not None else ():
        column.justify = "right"
        column.no_wrap = no_wrap
    return table


def facts_table() -> Table:
    """Return a table of two columns without headers: a name and a description."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


_LONGEST_GROUP = 32
"""Maximum number of characters that a list of devices takes in a sentence before it is
shortened.
"""


def kinds_text(names: Sequence[str], devices: Iterable[int]) -> str:
    """Return the device types of some devices, from the type names of all devices: `A100`, or `6
    A100 and 2 V100`.
    """
    own = [names[device] for device in devices]
    return own[0] if len(set(own)) == 1 else counted_text(own)


def counted_text(names: Iterable[str]) -> str:
    """Return each name with its number of occurrences: `6 A100 and 2 V100`."""
    return " and ".join(f"{count} {name}" for name, count in Counter(names).items())


def group_text(devices: Sequence[int]) -> str:
    """Return a group of devices for use in a sentence. If the text would be too long, return the
    first two devices, the last one, and the number of devices.
    """
    text = devices_text(devices)
    if len(text) <= _LONGEST_GROUP:
        return text
    return f"{devices[0]},{devices[1]},...,{devices[-1]} ({len(devices)} of them)"
