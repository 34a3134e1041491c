"""A folder of JSON documents that outlives a run: what was found once need not be searched again.

Documents are read by name, written whole or not at all, and hold data alone: nothing that can be run. Any number of
runs may share the folder. One that cannot be read or written is one that is not there.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from autopipe.ir.codec import JsonRecord, read_record, record_text
from autopipe.ir.errors import ConfigurationError
from autopipe.passes.replacing import replacing

_MOST_BYTES = 256 * 2**20
"""Bytes of all documents together, of which those that were used last stay."""


def cache_folder() -> Path | None:
    """`$AUTOPIPE_CACHE`, else `autopipe` where the user's caches are; None where there is no such place."""
    named = os.environ.get("AUTOPIPE_CACHE")
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(home) / "autopipe" if home else Path.home() / ".cache" / "autopipe"
    except RuntimeError:  # There is no home.
        return None


def answers() -> Store | None:
    """The answers of earlier runs; None where there is no place for them."""
    folder = cache_folder()
    return None if folder is None else Store(folder / "answers")


@dataclass(frozen=True, slots=True)
class Store:
    """The documents of one folder, which is made where it is needed."""

    folder: Path
    most_bytes: int = _MOST_BYTES

    def read(self, name: str, form: str) -> JsonRecord | None:
        """The document called `name`, whose `format` is `form`; None where there is none that can be read."""
        path = self._path(name)
        try:
            record = read_record(path, form)
        except ConfigurationError:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # It was used last.
        return record

    def write(self, name: str, document: dict[str, object]) -> None:
        """Keep a document, and drop those that were not used for longest where there are too many."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            with replacing(self._path(name)) as file:
                file.write(record_text(document).encode())
            self._make_room()

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _make_room(self) -> None:
        """Another run may remove the same documents meanwhile."""
        found = []
        for path in self.folder.glob("*.json"):
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        used = 0
        for _, size, path in sorted(found, key=lambda each: each[0], reverse=True):
            used += size
            if used > self.most_bytes:
                path.unlink(missing_ok=True)
