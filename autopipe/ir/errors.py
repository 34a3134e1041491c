"""Exceptions of autopipe, and functions for the text of their messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AutopipeError(Exception):
    """An error in the user's input or request. `message` describes it in one line or more. `where`
    is its place: file and line, node, or stage. `hint` is a remedy.
    """

    exit_code = 70

    def __init__(self, message: str, hint: str = "", where: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.where = where

    @property
    def line(self) -> str:
        """First line of the message with single spaces between words, for a row of a table."""
        return " ".join(self.message.partition("\n")[0].split())

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        advice = f" ({self.hint})" if self.hint else ""
        return f"{place}{self.message}{advice}"


class InternalError(AutopipeError):
    """A bug of autopipe: a pass raised an exception other than an AutopipeError."""


class ConfigurationError(AutopipeError):
    """An invalid YAML file, flag or plan folder."""

    exit_code = 2


class ModelError(AutopipeError):
    """An ONNX file that cannot be read, or an unsupported operator."""

    exit_code = 3


class InfeasibleError(AutopipeError):
    """No solution exists within the limits, or the search found none. The message names the
    violated limit.
    """

    exit_code = 4


class OutOfMemoryError(InfeasibleError):
    """The plan exceeds the device memory. Smaller micro-batches, recomputation or more devices may
    help.
    """


class RenamedWarning(FutureWarning):
    """Warning for the use of a name or key of the previous release. It is still accepted, but the
    next release will reject it.
    """


CANDIDATE_ERRORS = (ConfigurationError, InfeasibleError, ModelError)
"""Errors that reject one candidate of a search. The search continues with other candidates."""


class LaunchError(AutopipeError):
    """Ranks failed while a program ran. The message names the first rank that failed, and its
    task.
    """

    exit_code = 5


class VerificationError(LaunchError):
    """Two results differ that should be equal. The message names the tensor with the largest
    difference, and the difference.
    """


class CodegenError(AutopipeError):
    """No program can be generated for a plan, because code generation does not support a part of
    it.
    """

    exit_code = 2


def similar_name_hint(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the most similar of the `known` names, or all of them if
    none is similar.
    """
    names = list(known)
    match = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if match:
        return f"did you mean {match[0]!r}?"
    return f"known: {', '.join(names)}" if names else "there are no known names"


def quote(text: str) -> str:
    """Return a text in quotes for an error message, on one line, reduced to at most 60
    characters.
    """
    return repr(text if len(text) <= 60 else text[:57] + "...")
