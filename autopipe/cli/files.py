"""Writing a file whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from autopipe.ir.errors import ConfigurationError


def write_text(path: Path, text: str) -> None:
    """Write `text` under a temporary name beside `path`, then rename. Raises ConfigurationError where that fails."""
    if path.is_dir():
        raise ConfigurationError(f"{path} is a folder", hint="name a file")
    try:
        handle, made = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.absolute().parent)
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(made, 0o644)
            os.replace(made, path)
        except BaseException:
            os.unlink(made)
            raise
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}", hint="choose another place") from error
