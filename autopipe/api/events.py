"""Reports of a function of the application while it runs: progress, notes and warnings.

`autopipe.cli.output.Output` shows these in a terminal. `SilentEvents` ignores them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Progress(Protocol):
    """Progress of one piece of work: the amount that is done, and a note."""

    def advance(self, amount: float = 1, note: str = "") -> None:
        """Add `amount` to the work that is done. `note` replaces the note if it is not empty."""

    def reach(self, completed: float, note: str = "") -> None:
        """Set the amount of work that is done. `note` replaces the note if it is not empty."""


class Events(Protocol):
    """Receives the reports of a function of the application."""

    def progress(
        self, description: str, total: float | None = None
    ) -> AbstractContextManager[Progress]:
        """Return the progress of a piece of work, which ends with the block of the `with`
        statement. `total` is the amount of all work, None if it is not known.
        """

    def note(self, text: str) -> None:
        """Report a fact about the work."""

    def warn(self, message: str, hint: str = "") -> None:
        """Report a problem that does not stop the work, and how to solve it."""


class _SilentProgress:
    def advance(self, amount: float = 1, note: str = "") -> None:
        pass

    def reach(self, completed: float, note: str = "") -> None:
        pass


class SilentEvents:
    """Ignores progress and notes, and passes warnings to the module `warnings`."""

    @contextmanager
    def progress(self, description: str, total: float | None = None) -> Iterator[Progress]:
        yield _SilentProgress()

    def note(self, text: str) -> None:
        pass

    def warn(self, message: str, hint: str = "") -> None:
        warnings.warn(f"{message} ({hint})" if hint else message, stacklevel=3)
