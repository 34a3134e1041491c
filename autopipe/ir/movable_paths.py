"""Paths in files of plans and programs, which hold after a plan is moved with its model."""

from __future__ import annotations

import os
from pathlib import Path


def relative_path(path: str | Path, home: str | Path) -> str:
    """Return `path` relative to the folder `home`, for a file that lies in `home` or is moved
    there.

    Links among the folders are resolved, since `..` behind a link leads to another folder; a link
    that `path` itself is stays, since files with weights lie next to the link. A name gets `./`, to
    be told from a word.
    """
    path = Path(path).absolute()
    found = os.path.relpath(path.parent.resolve() / path.name, Path(home).resolve())
    return found if os.sep in found else os.path.join(os.curdir, found)


def movable_path(path: str, home: str | Path, model: str | Path) -> str:
    """Return `path` relative to the folder `home` if it lies in the folder of the model's file, or
    below that folder: then it is moved together with the model. Otherwise return it absolute.
    """
    absolute = Path(path).absolute()
    return (
        relative_path(absolute, home)
        if absolute.is_relative_to(Path(model).absolute().parent)
        else str(absolute)
    )


def path_from(home: str | Path, text: str) -> str:
    """Return the absolute path that `text` means in a file of the folder `home`: the inverse of
    `relative_path`.
    """
    return os.path.normpath(os.path.join(Path(home).resolve(), text))
