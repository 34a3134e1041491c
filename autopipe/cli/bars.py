"""Progress of work on stderr: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from rich.progress import Progress, TaskID


@dataclass(frozen=True, slots=True)
class RichBar:
    """A progress bar of rich. Rich redraws it."""

    _progress: Progress
    _task: TaskID

    def advance(self, amount: float = 1, note: str = "") -> None:
        self._update(note, advance=amount)

    def reach(self, completed: float, note: str = "") -> None:
        self._update(note, completed=completed)

    def _update(self, note: str, **change: Any) -> None:
        if note:
            change["note"] = note
        self._progress.update(self._task, **change)


class PrintedBar:
    """Prints a line of progress every `interval_s` seconds. The lines are printed by a separate
    thread, because solvers call no other code for minutes. For work that is shorter than the
    interval, nothing is printed.
    """

    def __init__(
        self,
        print_line: Callable[[str], None],
        description: str,
        total: float | None,
        interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._print_line = print_line
        self._description = description
        self._total = total
        self._interval_s = interval_s
        self._clock = clock
        self._done = 0.0
        self._note = ""
        self._began = self._shown = clock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._print_lines, name="progress", daemon=True)

    def __enter__(self) -> PrintedBar:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def advance(self, amount: float = 1, note: str = "") -> None:
        self.reach(self._done + amount, note)

    def reach(self, completed: float, note: str = "") -> None:
        self._done = completed
        self._note = note or self._note

    def postpone(self) -> None:
        """Restart the interval until the next line, because the progress has just been reported in
        another way.
        """
        self._shown = self._clock()

    def wait_s(self) -> float:
        """Return the seconds until the next line is due; at most 0 if it is."""
        return self._shown + self._interval_s - self._clock()

    def line(self) -> str:
        """Return the line of the work as it is now."""
        done = f"{self._done:,.0f}" + ("" if self._total is None else f" of {self._total:,.0f}")
        seconds = self._clock() - self._began
        return ", ".join(
            filter(None, (f"{self._description}: {done}", f"{seconds:.0f} s", self._note))
        )

    def _print_lines(self) -> None:
        while not self._ended.wait(max(0.0, self.wait_s())):
            if self.wait_s() <= 0:
                self._shown = self._clock()
                self._print_line(self.line())
