"""Paths in the files of plan and program folders. They remain valid if a folder is moved together
with its model.
"""

from __future__ import annotations

import os
from pathlib import Path


def relative_path(path: str | Path, home: str | Path) -> str:
    """Return `path` relative to the folder `home`, for a file in that folder.

    Symbolic links among the parent folders of both paths are resolved first, because `..` after a
    link leads to another folder. A link at the end of `path` is not resolved, because weight files
    are next to the link. A bare file name gets the prefix `./`, by which readers recognise a path.
    """
    path = Path(path).absolute()
    found = os.path.relpath(path.parent.resolve() / path.name, Path(home).resolve())
    return found if os.sep in found else os.path.join(os.curdir, found)


def movable_path(path: str, home: str | Path, model: str | Path) -> str:
    """Return `path` relative to `home` if it is in or below the folder of the file `model`, so that
    both can be moved together. Otherwise return an absolute path.
    """
    absolute = Path(path).absolute()
    return (
        relative_path(absolute, home)
        if absolute.is_relative_to(Path(model).absolute().parent)
        else str(absolute)
    )


def resolve_path(home: str | Path, text: str) -> str:
    """Return the absolute path for `text`, a path in a file of the folder `home`; the inverse of
    `relative_path`.
    """
    return os.path.normpath(os.path.join(Path(home).resolve(), text))
