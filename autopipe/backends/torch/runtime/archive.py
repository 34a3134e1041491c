"""Arrays of an `.npz` file, read where they lie: a rank that takes a few rows of a large one reads those only."""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np

from autopipe.ir.errors import ConfigurationError

_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
"""ZIP's header before each member; its last two fields are the lengths of the name and of the extra field that follow
(APPNOTE.TXT 4.3.7)."""
_DAMAGED = (OSError, ValueError, EOFError, KeyError, struct.error, zlib.error, zipfile.BadZipFile, RuntimeError)


class Archive:
    """The arrays of one file by name. Raises ConfigurationError where it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                self._members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        except _DAMAGED as error:
            raise ConfigurationError(f"data cannot be read: {error}", where=str(path)) from error

    @property
    def names(self) -> frozenset[str]:
        """Names of the arrays."""
        return frozenset(self._members)

    def shape(self, name: str) -> tuple[int, ...]:
        """The extents of the array called `name`."""
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(self._members[name]) as file:
                return _array_header(file)[0]
        except _DAMAGED as error:
            raise ConfigurationError(f"{name!r} cannot be read: {error}", where=str(self.path)) from error

    def array(self, name: str) -> np.ndarray:
        """The array called `name`: mapped where it is stored as it is, in memory where it is compressed."""
        info = self._members[name]
        try:
            if info.compress_type == zipfile.ZIP_STORED:
                return self._mapped(info)
            with zipfile.ZipFile(self.path) as archive, archive.open(info) as file:
                loaded: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
                return loaded
        except _DAMAGED as error:
            raise ConfigurationError(f"{name!r} cannot be read: {error}", where=str(self.path)) from error

    def _mapped(self, info: zipfile.ZipInfo) -> np.ndarray:
        with self.path.open("rb") as file:
            file.seek(info.header_offset)
            *_, name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
            file.seek(name_length + extra_length, 1)
            shape, fortran, dtype = _array_header(file)
            if dtype.hasobject:
                raise ValueError("it holds Python objects")
            if 0 in shape:
                return np.empty(shape, dtype)
            order = "F" if fortran else "C"
            mapped = np.memmap(self.path, dtype=dtype, mode="r", offset=file.tell(), shape=shape, order=order)  # type: ignore[call-overload]
            return np.asarray(mapped)  # A memmap's own slices take many times as long to make.


def _array_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether columns come first, and element type."""
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(file)
    raise ValueError(f"format {version[0]}.{version[1]} of arrays is not known")
