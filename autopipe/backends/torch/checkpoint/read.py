"""Reading and checking checkpoints: any block of what one holds, and one run at a time that saves in a folder."""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from autopipe.backends.torch.checkpoint.format import (
    MANIFEST,
    Block,
    Checkpoint,
    StoredFile,
    StoredTensor,
    advice,
    numpy_type,
    writing,
)
from autopipe.ir.errors import ConfigurationError, LaunchError
from autopipe.ir.layout import Box, whole

_FILE = ".lock"
_PATIENCE_S = 15.0
"""How long a run that was killed may take to be gone, for one that takes its place."""
_PAUSE_S = 0.1


class FolderLock:
    """Holds a folder until `release`, or the end of the process, however it ends."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigurationError where another run holds the folder, LaunchError where it cannot be made."""
        self._descriptor = -1
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self.held = self._take(time.monotonic() + _PATIENCE_S)
        """False where the file system has no locks: then nothing of others may be removed."""
        if self.held is None:
            self.release()
            raise ConfigurationError(
                "another run saves its checkpoints here",
                hint="wait for its end, or choose another --checkpoint folder", where=str(folder),
            )  # fmt: skip

    def _take(self, deadline: float) -> bool | None:
        """None where it is taken and stays so."""
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return None
                time.sleep(_PAUSE_S)
            except OSError:
                return False
            else:
                return True

    def release(self) -> None:
        """Let others save here."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    __del__ = release


_CHUNK = 2**22


def verify_file(path: Path, file: StoredFile) -> None:
    """Read a whole file of the checkpoint in `path`. Raises LaunchError unless it is the one that was written."""
    where = path / file.name
    digest = hashlib.sha256()
    try:
        with where.open("rb") as opened:
            while chunk := opened.read(_CHUNK):
                digest.update(chunk)
            size = opened.tell()
    except OSError as error:
        reason = f"the checkpoint is damaged: a file cannot be read: {error.strerror}"
        raise LaunchError(reason, hint=advice(path), where=str(where)) from error
    if size != file.size:
        reason = f"the checkpoint is damaged: a file has {size} bytes, not {file.size}"
        raise LaunchError(reason, hint=advice(path), where=str(where))
    if digest.hexdigest() != file.sha256:
        raise LaunchError("the checkpoint is damaged: the SHA-256 differs", hint=advice(path), where=str(where))


class Reader:
    """The tensors of the checkpoint in folder `path`. Its files are taken as they are: `verify_file` looks at them."""

    def __init__(self, path: Path, checkpoint: Checkpoint) -> None:
        self._path = path
        self._files = checkpoint.files
        self._mapped: dict[int, np.ndarray] = {}

    def read(self, tensor: StoredTensor, box: Box | None = None) -> np.ndarray:
        """A block of a tensor, all of it unless `box` says which; bfloat16 comes as the bits, in uint16.

        Raises LaunchError where the checkpoint lacks a part of it.
        """
        wanted = whole(tensor.shape) if box is None else box
        found = np.empty(wanted.shape, numpy_type(tensor.dtype))
        elements = 0
        for block in tensor.blocks:
            common = block.box.intersect(wanted)
            if common is not None:
                found[common.within(wanted).slices] = self._stored(tensor, block)[common.within(block.box).slices]
                elements += common.elements
        if elements != wanted.elements:
            reason = f"the checkpoint lacks {wanted.elements - elements} of {wanted.elements} elements of a tensor"
            raise LaunchError(reason, hint=advice(self._path), where=str(self._path))
        return found

    def _stored(self, tensor: StoredTensor, block: Block) -> np.ndarray:
        """All of a block, where it lies in its file."""
        dtype = numpy_type(tensor.dtype)
        size = math.prod(block.box.shape) * dtype.itemsize
        data = self._file(block.file)[block.offset : block.offset + size]
        if data.size != size:
            raise LaunchError("the checkpoint is damaged: a file is short", hint=advice(self._path), where=block.key)
        return data.view(dtype).reshape(block.box.shape)

    def _file(self, number: int) -> np.ndarray:
        if number not in self._mapped:
            where = self._path / self._files[number].name
            try:
                self._mapped[number] = np.asarray(np.memmap(where, dtype=np.uint8, mode="r"))
            except (OSError, ValueError) as error:
                reason = f"the checkpoint is damaged: a file cannot be read: {error}"
                raise LaunchError(reason, hint=advice(self._path), where=str(where)) from error
        return self._mapped[number]


def check_checkpoint(path: Path, checkpoint: Checkpoint, progress: Callable[[int], None] = lambda _: None) -> None:
    """Read all of the checkpoint in folder `path`. Raises LaunchError, naming the file, at the first that is wrong.

    `progress` is told the bytes of every file.
    """
    for name, tensor in tensors_of(checkpoint):
        reason = _flaw(tensor, checkpoint)
        if reason:
            message = f"the checkpoint is damaged: {name}: {reason}"
            raise LaunchError(message, hint=advice(path), where=str(path / MANIFEST))
    for file in checkpoint.files:
        verify_file(path, file)
        progress(file.size)


def tensors_of(checkpoint: Checkpoint) -> Iterator[tuple[str, StoredTensor]]:
    """Every tensor, and what a person calls it."""
    for parameter in checkpoint.parameters:
        yield f"parameter {parameter.name!r}", parameter.value
        for name, tensor in parameter.state:
            yield f"{name} of parameter {parameter.name!r}", tensor
    for generator in checkpoint.random:
        yield f"the random numbers of rank {generator.rank} on {generator.device}", generator.state


def _flaw(tensor: StoredTensor, checkpoint: Checkpoint) -> str:
    """Describe the first defect of a tensor's blocks; "" where they lie inside it, do not overlap, cover it, and lie
    within their files.
    """
    try:
        size = numpy_type(tensor.dtype).itemsize
    except TypeError:
        return f"there is no element type {tensor.dtype!r}"
    everything = whole(tensor.shape)
    rank = len(tensor.shape)
    for block in tensor.blocks:
        box = block.box
        if len(box.starts) != rank or len(box.stops) != rank:
            return f"a block has {len(box.starts)} dimensions, not {rank}"
        if any(stop < start for start, stop in zip(box.starts, box.stops, strict=True)):
            return "a block ends before it begins"
        if box.elements and box.intersect(everything) != box:
            return f"a block {box.starts} to {box.stops} lies outside of its shape {tensor.shape}"
        if not 0 <= block.file < len(checkpoint.files):
            return f"a block lies in file {block.file} of {len(checkpoint.files)}"
        if not 0 <= block.offset <= checkpoint.files[block.file].size - box.elements * size:
            return f"a block ends behind the end of {checkpoint.files[block.file].name}"
    stored = sum(block.box.elements for block in tensor.blocks)
    if stored != everything.elements:
        return f"its blocks have {stored} elements, its shape {everything.elements}"
    return "two of its blocks overlap" if _overlap(tensor) else ""


def _overlap(tensor: StoredTensor) -> bool:
    blocks = [block.box for block in tensor.blocks if block.box.elements]
    if len(blocks) < 2 or not tensor.shape:
        return len(blocks) > 1
    starts = np.array([box.starts for box in blocks])
    stops = np.array([box.stops for box in blocks])
    return any(
        bool(((starts[number + 1 :] < stops[number]) & (starts[number] < stops[number + 1 :])).all(axis=1).any())
        for number in range(len(blocks) - 1)
    )
