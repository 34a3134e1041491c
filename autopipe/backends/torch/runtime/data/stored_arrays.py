"""Stored arrays: `.npz` files, `.npy` files, folders of `.npy` files, and files of tokens.

Uncompressed arrays are memory-mapped, so that reading a few samples of a large file reads only the
pages of these samples. No file is unpickled, because unpickling can run code.
"""

from __future__ import annotations

import re
import struct
import tokenize
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from autopipe.backends.torch.runtime.data.input_checks import arrange_samples, elements_per_sample
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.words import plural

_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
"""Layout of the header before each member of a ZIP file. The last two fields are the lengths of the
file name and of the extra field, which follow the header (APPNOTE.TXT, section 4.3.7).
"""
_DAMAGED_FILE_ERRORS = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
    RuntimeError,
    SyntaxError,
    TypeError,
    MemoryError,
    OverflowError,
    tokenize.TokenError,
)
"""Errors that reading a damaged file can raise. Numpy parses the header of a `.npy` file as a
Python literal, which can raise SyntaxError, TokenError, TypeError, and MemoryError for deep
nesting.
"""


class Array(Protocol):
    """The part of numpy's array interface that sources use on a stored array."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def __getitem__(self, key: Any, /) -> np.ndarray: ...


class StoredArrays(ABC):
    """The arrays of a data set on disk, by the name of the graph input that reads them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    @abstractmethod
    def names(self) -> Sequence[str]: ...

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def array(self, name: str) -> Array:
        """Return an array. Raise ConfigurationError if its file is damaged."""

    def describe(self) -> str:
        """Return a line for the user on how the files were interpreted, for example the element
        type that was inferred; "" if there is only one interpretation.
        """
        return ""


class Archive(StoredArrays):
    """The arrays of an `.npz` file, by member name. Raises ConfigurationError if the file is
    damaged.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with self._open_archive("data") as archive:
            self._members = {
                info.filename.removesuffix(".npy"): info for info in archive.infolist()
            }

    @property
    def names(self) -> Sequence[str]:
        return sorted(self._members)

    @contextmanager
    def _open_archive(self, what: str) -> Iterator[zipfile.ZipFile]:
        """Open the ZIP file for the block. Read errors become ConfigurationError; `what` names the
        data in the message.
        """
        with _convert_read_errors(self.path, what), zipfile.ZipFile(self.path) as archive:
            yield archive

    def shape(self, name: str) -> tuple[int, ...]:
        with self._open_archive(repr(name)) as archive, archive.open(self._members[name]) as file:
            return _read_npy_header(file)[0]

    def array(self, name: str) -> np.ndarray:
        """Return an array: memory-mapped if its member is stored uncompressed, otherwise read into
        memory.
        """
        info = self._members[name]
        with self._open_archive(repr(name)) as archive:
            if info.compress_type != zipfile.ZIP_STORED:
                with archive.open(info) as member:
                    loaded: np.ndarray = np.lib.format.read_array(member, allow_pickle=False)
                    return loaded
            with self.path.open("rb") as file:
                file.seek(info.header_offset)
                *_, name_length, extra_length = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
                file.seek(name_length + extra_length, 1)
                return _map_array(self.path, file)


class ArrayFiles(StoredArrays):
    """The arrays of a folder with a file `NAME.npy` for each input, or a single `.npy` file for a
    model with one input.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        """Raise ConfigurationError if `path` is a file and the model has several inputs."""
        super().__init__(path)
        if path.is_dir():
            self._files = {file.stem: file for file in sorted(path.glob("*.npy"))}
        elif len(manifest.inputs) == 1:
            self._files = {manifest.inputs[0].value.name: path}
        else:
            hint = (
                "use a folder with a file for each of "
                f"{', '.join(each.value.name for each in manifest.inputs)}"
            )
            raise ConfigurationError(
                "the data are one array, but the model has several inputs",
                hint,
                str(path),
            )

    @property
    def names(self) -> Sequence[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        with (
            _convert_read_errors(self._files[name], repr(name)),
            self._files[name].open("rb") as file,
        ):
            return _read_npy_header(file)[0]

    def array(self, name: str) -> np.ndarray:
        with (
            _convert_read_errors(self._files[name], repr(name)),
            self._files[name].open("rb") as file,
        ):
            return _map_array(self._files[name], file)


@contextmanager
def _convert_read_errors(path: Path, what: str) -> Iterator[None]:
    """Convert errors that a damaged file can raise in the block to ConfigurationError. `what` names
    the data in the message.
    """
    try:
        yield
    except _DAMAGED_FILE_ERRORS as error:
        reason = (error.strerror if isinstance(error, OSError) else "") or error
        raise ConfigurationError(f"{what} cannot be read: {reason}", where=str(path)) from error


def _read_npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Read the header of a `.npy` file from `file` and return (shape, is_fortran_order, dtype). The
    file's position is then at the start of the data. Raise ValueError for an unsupported version.
    """
    form = np.lib.format
    version = form.read_magic(file)
    readers = {(1, 0): form.read_array_header_1_0, (2, 0): form.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"format {version[0]}.{version[1]} of a NumPy file is not supported")
    return readers[version](file)


def _map_array(path: Path, file: IO[bytes]) -> np.ndarray:
    """Return a memory-mapped array of the file `path`. The header of the array starts at the
    current position of `file`, which is open on the same file. Raise ValueError if the array
    contains Python objects.
    """
    shape, fortran, dtype = _read_npy_header(file)
    if dtype.hasobject:
        raise ValueError("the array contains Python objects, expected numbers")
    if 0 in shape:
        return np.empty(shape, dtype)
    order = "F" if fortran else "C"
    mapped = np.memmap(  # type: ignore[call-overload]
        path, dtype=dtype, mode="r", offset=file.tell(), shape=shape, order=order
    )
    # A plain array is returned, because slicing a memmap object is many times slower.
    return np.asarray(mapped)


_LABELS_PATTERN = re.compile(r"(?:.*[._/])?(?:labels?|targets?)")
_CONSTANT_INPUTS = {"attention_mask": 1, "token_type_ids": 0}
_POSITION_INPUT = "position_ids"
_SAMPLED_WORDS = 1 << 16
"""Number of 16-bit words at the start of a token file from which the size of a token (16, 32 or 64
bits) is inferred.
"""
_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_TYPE_BY_CODE = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Numpy element type by its code in Megatron's `.idx` files
(megatron/core/datasets/indexed_dataset.py).
"""


class TokenFile(StoredArrays):
    """A `.bin` file of token ids, as nanoGPT and Megatron write it.

    With the sequence length s of the graph, sample i consists of the tokens [i·s, (i + 1)·s). Its
    labels are the next tokens: [i·s + 1, (i + 1)·s + 1).

    The name of an input determines its data. Exactly one input must have a name that is not in this
    list; it reads the tokens.

      labels, targets   the labels; also `label` and `target`, and after a dot, slash or underscore
      attention_mask    ones
      token_type_ids    zeros
      position_ids      0 to s - 1

    If the graph itself shifts the labels by one token, the labels input reads the tokens unshifted.
    Such a graph is recognised by its loss, which does not read the first label of a sample.

    The element type is read from Megatron's `.idx` file of the same name, if there is one.
    Otherwise `_infer_token_type` infers uint16, uint32 or int64.
    """

    def __init__(self, path: Path, manifest: Manifest, sequence_length: int | None) -> None:
        """`sequence_length` is the sequence length that the data settings require, None for any.
        Raise ConfigurationError if the model's inputs do not fit a file of tokens, or if the file
        cannot be read or has less than one sample.
        """
        super().__init__(path)
        self._manifest = manifest
        self._entries = {each.value.name: each for each in manifest.inputs}
        sizes = {
            name: elements_per_sample(each, manifest, str(path), "a file of tokens")
            for name, each in self._entries.items()
        }
        tokens = [
            name
            for name in sizes
            if not _LABELS_PATTERN.fullmatch(name)
            and name not in _CONSTANT_INPUTS
            and name != _POSITION_INPUT
        ]
        if len(tokens) != 1:
            hint = (
                "use one input for tokens; other inputs must have the names labels, targets, "
                "attention_mask, token_type_ids or position_ids"
            )
            raise ConfigurationError(
                "a file of tokens requires one input for tokens, but the model has "
                f"{', '.join(tokens) or 'none'}",
                hint,
                str(path),
            )
        self._input = tokens[0]
        self.length = sizes[tokens[0]]
        if sequence_length not in (None, self.length):
            message = (
                f"data.sequence_length is {sequence_length}, but a sample of {self._input!r} has "
                f"{self.length} {plural(self.length, 'token')}"
            )
            raise ConfigurationError(
                message, "export the model for this length, or plan with --dim", str(path)
            )
        for name, size in sizes.items():
            if size != self.length:
                message = (
                    f"a sample of {name!r} has {size} {plural(size, 'element')}, one of "
                    f"{self._input!r} {self.length}"
                )
                raise ConfigurationError(message, where=str(path))
        self._tokens = self._map_tokens()
        moved = any(self._label_shift(name) for name in sizes)
        self._samples = (len(self._tokens) - moved) // self.length
        if self._samples < 1:
            raise ConfigurationError(
                f"the data have {len(self._tokens):,} {plural(len(self._tokens), 'token')}, "
                f"fewer than a sample of {self.length}",
                where=str(path),
            )

    @property
    def names(self) -> Sequence[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.array(name).shape

    def describe(self) -> str:
        labels = [f"{name!r} moved by one" for name in self.names if self._label_shift(name)]
        takes = "".join(f", {each}" for each in labels)
        return (
            f"{len(self._tokens):,} {plural(len(self._tokens), 'token')} "
            f"of {self._tokens.dtype}: {self._input!r}{takes}"
        )

    def array(self, name: str) -> np.ndarray:
        count = self._samples
        length = self.length
        entry = self._entries[name]
        if name in _CONSTANT_INPUTS:
            samples = np.broadcast_to(np.uint8(_CONSTANT_INPUTS[name]), (count, length))
        elif name == _POSITION_INPUT:
            samples = np.broadcast_to(np.arange(length), (count, length))
        else:
            first = self._label_shift(name)
            samples = self._tokens[first : first + count * length].reshape(count, length)
        return arrange_samples(samples, entry, self._manifest)

    def _label_shift(self, name: str) -> int:
        """Return by how many tokens the data of an input are shifted: 1 for labels, 0 for other
        inputs and for labels that the graph itself shifts.
        """
        if not _LABELS_PATTERN.fullmatch(name):
            return 0
        entry = self._entries[name]
        starts = {
            start
            for bounds in entry.allowed
            for axis, start in enumerate(bounds.starts)
            if axis != entry.batch_axis
        }
        return 0 if starts and max(starts) == 1 else 1

    def _map_tokens(self) -> np.ndarray:
        """Return the tokens of the file, a memory-mapped array [tokens]."""
        with _convert_read_errors(self.path, "tokens"):
            kind = self._type_in_index() or "<u2"
            if kind == "<u2" and not self.path.with_suffix(".idx").is_file():
                most = max(
                    (bounds.below for bounds in self._entries[self._input].allowed), default=0
                )
                kind = _infer_token_type(np.fromfile(self.path, "<u2", _SAMPLED_WORDS), most)
            dtype = np.dtype(kind)
            if rest := self.path.stat().st_size % dtype.itemsize:
                raise ValueError(
                    f"the file size leaves a remainder of {rest} {plural(rest, 'byte')} for "
                    f"tokens of type {dtype}"
                )
            return np.asarray(np.memmap(self.path, dtype=dtype, mode="r"))

    def _type_in_index(self) -> str:
        """Return the numpy element type that Megatron's `.idx` file states, "" if there is no such
        file. Raise ValueError if the file is not a valid index.
        """
        index = self.path.with_suffix(".idx")
        if not index.is_file():
            return ""
        with index.open("rb") as file:
            magic, _, code = struct.unpack("<9sQB", file.read(18))
        if magic != _INDEX_MAGIC or code not in _INDEX_TYPE_BY_CODE:
            raise ValueError(f"{index.name} is not an index of integer tokens")
        return _INDEX_TYPE_BY_CODE[code]


def _infer_token_type(words: np.ndarray, vocabulary: int) -> str:
    """Return the numpy element type of a token file. `words` are the 16-bit words at its start,
    `vocabulary` is the number of token ids that the model accepts, 0 if unknown.

    The upper words of a small little-endian integer are 0. If words 2 and 3 (from 0) of each group
    of 4 are 0, tokens have 64 bits. Otherwise, if `vocabulary` exceeds 2^16 or if each second word
    is 0, tokens have 32 bits. Otherwise they have 16 bits.
    """
    if words.any() and len(words) % 4 == 0 and not words.reshape(-1, 4)[:, 2:].any():
        return "<i8"
    if vocabulary > 1 << 16:
        return "<u4"
    if words.any() and len(words) % 2 == 0 and not words[1::2].any():
        return "<u4"
    return "<u2"
