"""What the user says is trained: globs over names, or regular expressions after `re:`."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass, field

from autopipe.ir.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Chosen:
    """The patterns of `model.trainable` and `model.frozen`. What both match is trained."""

    trainable: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    matched: set[str] = field(default_factory=set)
    """Filled with the patterns that have matched a name."""

    def trained(self, name: str) -> bool | None:
        """Whether a tensor is trained; None where no pattern matches its name."""
        trainable = self._any("model.trainable", self.trainable, name)
        frozen = self._any("model.frozen", self.frozen, name)
        return True if trainable else False if frozen else None

    def require_matched(self) -> None:
        """Raise ConfigurationError for a pattern that has matched nothing."""
        for key, patterns in (("model.trainable", self.trainable), ("model.frozen", self.frozen)):
            for pattern in patterns:
                if pattern not in self.matched:
                    raise ConfigurationError(
                        f"{key}: no floating-point tensor is called {pattern!r}",
                        hint="autopipe inspect -v lists their names",
                    )

    def _any(self, key: str, patterns: tuple[str, ...], name: str) -> bool:
        found = [pattern for pattern in patterns if _matches(key, name, pattern)]
        self.matched.update(found)
        return bool(found)


def _matches(key: str, name: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.fullmatch(pattern[3:], name) is not None
        except re.error as error:
            raise ConfigurationError(f"{key}: {pattern!r} is no regular expression: {error}") from error
    return fnmatch.fnmatchcase(name, pattern)
