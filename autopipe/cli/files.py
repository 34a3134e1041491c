"""Writing files whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from autopipe.ir.errors import ConfigurationError


def write_texts(texts: Mapping[Path, str]) -> None:
    """Write each text under a temporary name beside its path, then rename them all.

    Raises ConfigurationError where one cannot be written; none of them is then.
    """
    made: dict[Path, str] = {}
    try:
        for path, text in texts.items():
            made[path] = _written(path, text)
        for path in texts:
            os.replace(made[path], path)
            del made[path]
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}", hint="choose another place") from error
    finally:
        for name in made.values():
            os.unlink(name)


def check_writable(path: Path) -> None:
    """Raise ConfigurationError where no file can be written at `path`: it is asked before the long work begins."""
    if path.is_dir():
        raise ConfigurationError(f"{path} is a folder", hint="name a file")
    parent = path.absolute().parent
    if not os.access(parent, os.W_OK | os.X_OK):
        why = "it may not be written to" if parent.is_dir() else "there is no such folder"
        raise ConfigurationError(f"cannot write {path}: {parent}: {why}", hint="choose another place")


def _written(path: Path, text: str) -> str:
    """The temporary file beside `path` that holds `text`; it vanishes where it cannot be written."""
    if path.is_dir():
        raise ConfigurationError(f"{path} is a folder", hint="name a file")
    handle, made = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.absolute().parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(made, 0o644)
    except BaseException:
        os.unlink(made)
        raise
    return made
