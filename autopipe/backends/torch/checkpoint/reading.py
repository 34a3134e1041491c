"""Reading any block of what a checkpoint holds: only the bytes of it are read, from whichever files they are in."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np

from autopipe.backends.torch.checkpoint.element_types import numpy_type
from autopipe.backends.torch.checkpoint.folder import advice
from autopipe.backends.torch.checkpoint.form import Block, Checkpoint, StoredFile, StoredTensor
from autopipe.ir.errors import LaunchError
from autopipe.ir.layout import Box, whole

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
                found[_region(common.within(wanted))] = self._stored(tensor, block)[_region(common.within(block.box))]
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


def _region(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in zip(box.starts, box.stops, strict=True))
