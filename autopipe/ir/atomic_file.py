"""Files and folders that appear whole or not at all, and how large tensors lie in them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

INLINE_LIMIT: Final = 3 << 29
"""Bytes of tensors (1.5 GiB) up to which they stand in an ONNX file itself; protobuf cannot hold 2 GiB."""
_ALIGNMENT: Final = 4096
Progress = Callable[[int], None]
"""Told the number of bytes written after every piece."""


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that becomes `path` when the block ends well, and vanishes when it does not. Raises OSError where
    it cannot be written."""
    handle, made = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.absolute().parent)
    try:
        with open(handle, "wb") as file:
            yield file
        os.chmod(made, 0o644)
        os.replace(made, path)
    except BaseException:
        os.unlink(made)
        raise


def aligned(file: IO[bytes]) -> int:
    """Fill the file up to where a tensor may lie, so that it can be mapped into memory. Returns that offset."""
    file.write(bytes(-file.tell() % _ALIGNMENT))
    return file.tell()


@contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """An empty folder to fill that takes the place of `folder` when the block ends well, and vanishes when it does not.
    Raises OSError where that cannot be done; what was at `folder` is then still there."""
    folder = folder.absolute()
    with tempfile.TemporaryDirectory(
        prefix=f".{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True
    ) as scratch:
        made, previous = Path(scratch, "made"), Path(scratch, "previous")
        made.mkdir()
        yield made
        replaced = folder.exists()
        if replaced:
            folder.rename(previous)
        try:
            made.rename(folder)
        except OSError:
            if replaced:
                previous.rename(folder)
            raise
