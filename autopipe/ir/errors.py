"""Exceptions of autopipe, and text for their messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AutopipeError(Exception):
    """An error of the input or an impossible request. `message` describes the error in one line,
    `where` is its file and line, node or stage, and `hint` is a remedy.
    """

    exit_code = 70

    def __init__(self, message: str, hint: str = "", where: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.where = where

    @property
    def line(self) -> str:
        """First line of the message, with single spaces, for a row of a table."""
        return " ".join(self.message.partition("\n")[0].split())

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        advice = f" ({self.hint})" if self.hint else ""
        return f"{place}{self.message}{advice}"


class InternalError(AutopipeError):
    """A bug of autopipe: a pass raised an exception that is no AutopipeError."""


class ConfigurationError(AutopipeError):
    """An invalid YAML file, flag or plan folder."""

    exit_code = 2


class ModelError(AutopipeError):
    """An ONNX file that cannot be read, or an unsupported operator."""

    exit_code = 3


class InfeasibleError(AutopipeError):
    """No solution exists, or none was found, within the limits. The message names the violated
    limit.
    """

    exit_code = 4


class OutOfMemoryError(InfeasibleError):
    """The plan exceeds the device memory. Smaller micro-batches, recomputation or more devices may
    help.
    """


class RenamedWarning(FutureWarning):
    """A name or key of the previous release was used; the next release rejects it."""


CANDIDATE_ERRORS = (ConfigurationError, InfeasibleError, ModelError)
"""Errors that reject one candidate, so that a search continues with others."""


class LaunchError(AutopipeError):
    """Ranks failed at run time. The message names the first failed rank and its task."""

    exit_code = 5


class VerificationError(LaunchError):
    """Two results that must be equal differ. The message names the tensor with the largest
    difference and the difference.
    """


class CodegenError(AutopipeError):
    """No program can be generated for a plan."""

    exit_code = 2


def similar_name_hint(name: str, known: Iterable[str]) -> str:
    """Return a hint: the known name that is most similar to `name`, or all known names."""
    names = list(known)
    match = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if match:
        return f"did you mean {match[0]!r}?"
    return f"known: {', '.join(names)}" if names else "there are no known names"


def quote(text: str) -> str:
    """Return a text for an error message: quoted, on one line, at most 60 characters of it."""
    return repr(text if len(text) <= 60 else text[:57] + "...")
