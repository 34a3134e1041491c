"""Exceptions of autopipe, one small family, and words for their messages; only the command line
catches them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AutopipeError(Exception):
    """A user's mistake or an impossible request, said in one line. `message` says what is wrong,
    `where` the file, line, node or stage it is wrong at, `hint` what to do about it.
    """

    exit_code = 70

    def __init__(self, message: str, hint: str = "", where: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.where = where

    @property
    def line(self) -> str:
        """The message's first line, its words one space apart: what stands in a row of a table."""
        return " ".join(self.message.partition("\n")[0].split())

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        advice = f" ({self.hint})" if self.hint else ""
        return f"{place}{self.message}{advice}"


class InternalError(AutopipeError):
    """A bug of autopipe: a pass raised an exception that is no AutopipeError."""


class ConfigurationError(AutopipeError):
    """A YAML file, a flag or a plan folder that cannot be taken as it is."""

    exit_code = 2


class ModelError(AutopipeError):
    """An ONNX file that cannot be read, or an operator that is not supported."""

    exit_code = 3


class InfeasibleError(AutopipeError):
    """A pass found no answer within the limits; the message names the limit and by how much it is
    missed.
    """

    exit_code = 4


class OutOfMemoryError(InfeasibleError):
    """The devices' memory does not hold it, which smaller micro-batches, recomputation or more
    devices may change.
    """


class RenamedWarning(FutureWarning):
    """A name or key of the previous release was used; the next release rejects it."""


REFUSALS = (ConfigurationError, InfeasibleError, ModelError)
"""Errors that refuse one choice where there are others to try."""


class LaunchError(AutopipeError):
    """Ranks failed while running; the message names the first failing rank and its task."""

    exit_code = 5


class VerificationError(LaunchError):
    """Two results that must be equal differ; the message names the worst tensor and the
    difference.
    """


class CodegenError(AutopipeError):
    """A program cannot be written for this plan."""

    exit_code = 2


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint: the known name most like `name`, or all of them."""
    names = list(known)
    match = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if match:
        return f"did you mean {match[0]!r}?"
    return f"known: {', '.join(names)}" if names else "none are known here"


def quote(text: str) -> str:
    """A user's text for an error message: in quotes, on one line, not too long."""
    return repr(text if len(text) <= 60 else text[:57] + "...")
