"""The folder of a run's checkpoints: what is committed, and how a new one is, so that a crash never loses the last.

A checkpoint is written under a temporary name and renamed when every byte is on the disk, so that what has the final
name is whole. The newest and the one before stay; an older one goes only when a newer one is committed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autopipe.ir.errors import ConfigurationError, LaunchError

MANIFEST = "manifest.json"
KEPT = 2
"""Checkpoints that stay: the newest and the one before."""
_COMMITTED = re.compile(r"step_(\d{8,})")
_TEMPORARY = re.compile(r"step_\d{8,}\.tmp-.*")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write into one line that says what is not lost."""
    try:
        yield
    except OSError as error:
        raise LaunchError(
            f"the checkpoint cannot be written: {error.strerror or error}",
            hint="earlier checkpoints are untouched", where=str(path),
        ) from error  # fmt: skip


def committed_steps(folder: Path) -> list[int]:
    """Steps of the committed checkpoints, ascending."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigurationError(f"checkpoints cannot be read: {error.strerror}", where=str(folder)) from error
    found = (_COMMITTED.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def check_unused(folder: Path) -> None:
    """Raise ConfigurationError where a run that starts anew would save beside the checkpoints of another."""
    if steps := committed_steps(folder):
        raise ConfigurationError(
            f"{folder} holds a checkpoint after {steps[-1]} steps",
            hint="give --resume to go on from it, or choose another folder",
        )


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step_{step:08d}"


def rank_file(rank: int) -> str:
    """Name of a rank's file within a checkpoint."""
    return f"rank_{rank:05d}.safetensors"


def temporary_path(folder: Path, step: int, token: str) -> Path:
    """Where a checkpoint is written before it is committed; `token` sets runs apart."""
    return folder / f"step_{step:08d}.tmp-{token}"


def advice(path: Path) -> str:
    """Hint for the user of a damaged checkpoint."""
    return f"remove {path.name} to go on from the one before"


def remove_leftovers(folder: Path) -> None:
    """Remove what crashed runs left. No run may be saving here: see `FolderLock`."""
    with writing(folder):
        for path in folder.iterdir():
            if _TEMPORARY.fullmatch(path.name):
                shutil.rmtree(path)


def commit(temporary: Path, manifest: str) -> Path:
    """Give a checkpoint whose files are all on the disk its manifest and its final name. One rank alone does this."""
    final = temporary.with_name(temporary.name.partition(".")[0])
    with writing(final):
        path = temporary / MANIFEST
        path.write_text(manifest, encoding="utf-8")
        flush(path)
        flush(temporary)
        os.rename(temporary, final)
        flush(final.parent)
    return final


def prune(folder: Path) -> None:
    """Remove all but the newest checkpoints. Renamed first, so that no half-removed one looks whole."""
    for step in committed_steps(folder)[:-KEPT]:
        old = checkpoint_path(folder, step)
        with writing(old):
            gone = temporary_path(folder, step, "old")
            os.rename(old, gone)
            shutil.rmtree(gone)


def flush(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
