"""Paths in plan and program folders that stay valid if the folder is moved with its model."""

from __future__ import annotations

import os
from pathlib import Path


def relative_path(path: str | Path, home: str | Path) -> str:
    """Return `path` relative to the folder `home`, for use in a file that is in `home`.

    Symbolic links in the folders of both paths are resolved, because `..` after a link leads to
    another folder. If `path` itself is a link, it is not resolved, because weight files are next to
    the link. A bare name gets the prefix `./`, so that readers recognise a path.
    """
    path = Path(path).absolute()
    found = os.path.relpath(path.parent.resolve() / path.name, Path(home).resolve())
    return found if os.sep in found else os.path.join(os.curdir, found)


def movable_path(path: str, home: str | Path, model: str | Path) -> str:
    """Return `path` relative to `home` if it is in the folder of the file `model` or below, so that
    it can be moved with the model. Otherwise return an absolute path.
    """
    absolute = Path(path).absolute()
    return (
        relative_path(absolute, home)
        if absolute.is_relative_to(Path(model).absolute().parent)
        else str(absolute)
    )


def resolve_path(home: str | Path, text: str) -> str:
    """Return the absolute path of `text`, a path in a file of the folder `home`. This is the
    inverse of `relative_path`.
    """
    return os.path.normpath(os.path.join(Path(home).resolve(), text))
