"""Patterns over names: globs, or regular expressions after `re:`."""

from __future__ import annotations

import fnmatch
import re

from autopipe.ir.errors import ConfigurationError


def matches(pattern: str, name: str, key: str) -> bool:
    """True if the whole name is one of the pattern's. Raises ConfigurationError that names the `key` under which the
    pattern was given where it is no regular expression."""
    if pattern.startswith("re:"):
        try:
            return re.fullmatch(pattern[3:], name) is not None
        except re.error as error:
            raise ConfigurationError(f"{key}: {pattern!r} is no regular expression: {error}") from error
    return fnmatch.fnmatchcase(name, pattern)
