"""A run of rows within a time: each row has a limit of its own, and is in the file of results once
it has ended.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from autopipe.ir.output_files import open_replacement_file
from benchmarks.cuda.processes import Failed, Processes, Runner

_RESERVE_S = 8.0
"""Seconds before the end of a run at which the last row is stopped."""
_WATCHDOG_S = 4.0
"""Seconds before the end of a run at which its processes are killed, and from half of which on it
ends itself.
"""
_LEAST_S = 10.0
"""A row that would have less time is left out."""
Figures = Mapping[str, Any]
"""Measured values of a row, by name."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement."""

    name: str
    measure: Callable[[Runner], Figures]
    limit_s: float


@dataclass(frozen=True, slots=True)
class Group:
    """Rows in order of value, of which `at_once` may run side by side; 1 for rows that measure
    time.
    """

    name: str
    rows: Sequence[Row]
    at_once: int


@dataclass(slots=True)
class Session:
    """A run that ends after `seconds`. Use it as a context: on leaving, no process is left."""

    seconds: float
    file: Path
    facts: Mapping[str, Any]
    """Entries of the file before its rows."""
    note: Callable[[Figures], None] = lambda _: None
    """Called with each row once it is in the file."""
    began: float = field(default_factory=time.monotonic)
    rows: list[dict[str, Any]] = field(default_factory=list)
    processes: Processes = field(default_factory=Processes)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _watchdog: threading.Timer | None = None

    def __enter__(self) -> Session:
        self._watchdog = threading.Timer(self._left() - _WATCHDOG_S, self._end)
        self._watchdog.daemon = True
        self._watchdog.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.processes.close()
        if self._watchdog is not None:
            self._watchdog.cancel()

    def run(self, phases: Sequence[Sequence[Group]]) -> None:
        """Run the groups of each phase side by side, one phase after the other."""
        for phase in phases:
            with ThreadPoolExecutor(max(1, len(phase))) as pool:
                list(pool.map(self._run_group, phase))

    def found(self, name: str) -> Figures:
        """Return the figures of a row that has ended, {} if there is none."""
        with self._lock:
            return next((row for row in self.rows if row["row"] == name), {})

    def _run_group(self, group: Group) -> None:
        with ThreadPoolExecutor(group.at_once) as pool:
            list(pool.map(lambda row: self._run_row(group, row), group.rows))

    def _run_row(self, group: Group, row: Row) -> None:
        """Measure and write a row. An error is what the row found; it stops no other row."""
        start = time.monotonic()
        limit = min(row.limit_s, self._left() - _RESERVE_S)
        if limit < min(_LEAST_S, row.limit_s):
            found: Figures = {"left_out": "there was no time"}
        else:
            try:
                found = row.measure(Runner(self.processes, start + limit))
            except (Failed, OSError, LookupError, TypeError, ValueError) as error:
                found = {"error": f"{type(error).__name__}: {error}"}
        took = round(time.monotonic() - start, 2)
        self._add(
            {
                "group": group.name,
                "row": row.name,
                "began_s": round(start - self.began, 2),
                "took_s": took,
                **found,
            }
        )

    def _add(self, row: dict[str, Any]) -> None:
        with self._lock:
            self.rows.append(row)
            with open_replacement_file(self.file) as file:
                file.write(
                    (json.dumps({**self.facts, "rows": self.rows}, indent=1) + "\n").encode()
                )
            self.note(row)

    def _left(self) -> float:
        return self.began + self.seconds - time.monotonic()

    def _end(self) -> None:
        """Stop all rows. End this process if a row hangs nevertheless; the rows before are in the
        file.
        """
        self.processes.close()
        time.sleep(_WATCHDOG_S / 2)
        os._exit(_STOPPED)


_STOPPED = 5
"""Exit code of a run that did not end by itself."""
