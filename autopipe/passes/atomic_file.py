"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that becomes `path` when the block ends well, and vanishes when it does not.

    Raises OSError where it cannot be written.
    """
    handle, made = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.absolute().parent)
    try:
        with open(handle, "wb") as file:
            yield file
        os.chmod(made, 0o644)
        os.replace(made, path)
    except BaseException:
        os.unlink(made)
        raise
