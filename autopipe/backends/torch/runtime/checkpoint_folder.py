"""The folder of a run's checkpoints: what is committed, and how a new one is, so that a crash never loses the last.

A checkpoint is a folder `step_00000012`: a safetensors file for each rank and `manifest.json`. It is written under a
temporary name and renamed when every byte is on the disk, so that what has the final name is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from autopipe.ir.errors import ConfigurationError, LaunchError

FORMAT = "autopipe.checkpoint/1"
MANIFEST = "manifest.json"
KEPT = 2
"""Checkpoints that stay: the newest and the one before."""
_COMMITTED = re.compile(r"step_(\d{8,})")
_TEMPORARY = re.compile(r"step_\d{8,}\.tmp-.*")
_CHUNK = 2**20


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failure to write into one line that says what is not lost."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise LaunchError(
            f"the checkpoint cannot be written: {reason}", hint="earlier checkpoints are untouched", where=str(path)
        ) from error


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


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return folder / f"step_{step:08d}"


def rank_file(rank: int) -> str:
    """Name of a rank's file within a checkpoint."""
    return f"rank_{rank:05d}.safetensors"


def temporary_path(folder: Path, step: int, token: str) -> Path:
    """Where a checkpoint is written before it is committed; `token` sets runs apart."""
    return folder / f"step_{step:08d}.tmp-{token}"


def begin(temporary: Path) -> None:
    """Make the folder of a checkpoint to come, and remove what earlier crashes left. One rank alone does this."""
    with writing(temporary):
        temporary.parent.mkdir(parents=True, exist_ok=True)
        for path in temporary.parent.iterdir():
            if _TEMPORARY.fullmatch(path.name):
                shutil.rmtree(path)
        temporary.mkdir()


def write_file(path: Path, write: Callable[[Path], None]) -> tuple[int, str]:
    """Write a file through `write`, down to the disk. Returns its size in bytes and its SHA-256."""
    with writing(path):
        write(path)
        flush(path)
        return path.stat().st_size, sha256_of(path)


def commit(temporary: Path, manifest: Mapping[str, Any]) -> Path:
    """Give a checkpoint whose files are all written its manifest and its final name. One rank alone does this."""
    final = temporary.with_name(temporary.name.partition(".")[0])
    with writing(final):
        path = temporary / MANIFEST
        path.write_text(json.dumps(manifest) + "\n", encoding="utf-8")
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


def read_checkpoint_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a committed checkpoint. Raises LaunchError where it is damaged or of another format."""
    where = str(path / MANIFEST)
    try:
        form = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LaunchError(f"the checkpoint is damaged: {error}", hint=_other(path), where=where) from error
    if not isinstance(form, dict) or form.get("format") != FORMAT:
        raise LaunchError(f"not a checkpoint of format {FORMAT}", hint=_other(path), where=where)
    return form


def check_file(path: Path, size: int, digest: str) -> None:
    """Raise LaunchError unless a file is the one that was written."""
    try:
        same = path.stat().st_size == size and sha256_of(path) == digest
    except OSError as error:
        raise LaunchError(f"the checkpoint cannot be read: {error.strerror}", where=str(path)) from error
    if not same:
        raise LaunchError("the checkpoint is damaged: the SHA-256 differs", hint=_other(path.parent), where=str(path))


def _other(path: Path) -> str:
    return f"remove {path.name} to go on from the one before"


def sha256_of(path: Path) -> str:
    """Digest of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def flush(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
