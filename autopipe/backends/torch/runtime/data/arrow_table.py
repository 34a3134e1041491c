"""Data sets in the formats of Apache Arrow: Parquet files, Arrow IPC files, and folders that
Hugging Face's `datasets` saves, which contain Arrow IPC files.

A row of the table is a sample, a column is a graph input. Arrow IPC files are memory-mapped. From a
Parquet file, a rank decodes only the columns that it reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from autopipe.backends.torch.runtime.data.input_checks import (
    arrange_samples,
    elements_per_sample,
    numpy_dtype,
)
from autopipe.backends.torch.runtime.data.stored_arrays import Array, StoredArrays
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.words import plural

TABLE_SUFFIXES = (".parquet", ".arrow", ".feather")
_FILE_MAGIC = b"ARROW1"


def table_files(path: Path) -> list[Path]:
    """Return the files of the table at `path` in the order of their rows; [] if there is no table.
    Raise ConfigurationError if `path` is a folder with several datasets (a saved `DatasetDict`), or
    if the description of a saved dataset cannot be read.
    """
    if path.suffix in TABLE_SUFFIXES:
        return [path]
    if (path / "dataset_dict.json").is_file():
        splits = sorted(each.parent.name for each in path.glob("*/state.json"))
        hint = f"choose one of the splits: {', '.join(str(path / each) for each in splits)}"
        raise ConfigurationError(
            f"folder {str(path)!r} contains several datasets, expected one", hint
        )
    if (path / "state.json").is_file():
        try:
            listed = json.loads((path / "state.json").read_text(encoding="utf-8"))["_data_files"]
            return [path / Path(each["filename"]).name for each in listed]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigurationError(
                f"the file does not describe a dataset: {error!r}", where=str(path / "state.json")
            ) from error
    return next(
        (found for suffix in TABLE_SUFFIXES if (found := sorted(path.glob(f"*{suffix}")))), []
    )


class ArrowTable(StoredArrays):
    """The table that consists of the rows of `files`, one after the other. The files must have
    equal schemas. Raises ConfigurationError if a file cannot be read, if the schemas differ, or if
    pyarrow is not installed.
    """

    def __init__(self, path: Path, files: Sequence[Path], manifest: Manifest) -> None:
        super().__init__(path)
        try:
            import pyarrow
        except ImportError as error:
            raise ConfigurationError(
                f"reading {path} requires the package pyarrow", hint="pip install 'autopipe[data]'"
            ) from error
        self._pyarrow = pyarrow
        self._files = files
        self._manifest = manifest
        self._entries = {each.value.name: each for each in manifest.inputs}
        self._readers: list[Callable[[str], Any]] = []
        """For each file, a function from the name of a column to the column, a
        `pyarrow.ChunkedArray`.
        """
        schemas = list[Any]()
        self._rows = 0
        for file in files:
            with self._convert_read_errors("the table", file):
                if file.suffix == ".parquet":
                    from pyarrow import parquet

                    opened = parquet.ParquetFile(file, memory_map=True)
                    schemas.append(opened.schema_arrow)
                    self._rows += opened.metadata.num_rows
                    self._readers.append(partial(_read_parquet_column, opened))
                else:
                    table = self._map_ipc_file(file)
                    schemas.append(table.schema)
                    self._rows += len(table)
                    self._readers.append(table.column)
        if any(not each.equals(schemas[0]) for each in schemas):
            raise ConfigurationError(
                "the files of the table differ in their columns", where=str(path)
            )
        self._columns: list[str] = schemas[0].names

    @contextmanager
    def _convert_read_errors(self, what: str, file: Path | None = None) -> Iterator[None]:
        """Convert read errors in the block to ConfigurationError. `what` names the data in the
        message; `file` is the file that is read, None for the path of the table.
        """
        try:
            yield
        except (
            OSError,
            ValueError,
            KeyError,
            NotImplementedError,
            self._pyarrow.ArrowException,
        ) as error:
            reason = str(error).partition("\n")[0]
            raise ConfigurationError(
                f"{what} cannot be read: {reason}", where=str(file or self.path)
            ) from error

    def _map_ipc_file(self, file: Path) -> Any:
        """Return the memory-mapped table in an Arrow IPC file. Both formats are supported: the
        stream format, which `datasets` writes, and the file format.
        """
        with file.open("rb") as opened:
            is_file = opened.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        ipc = self._pyarrow.ipc
        source = self._pyarrow.memory_map(str(file))
        return (ipc.open_file if is_file else ipc.open_stream)(source).read_all()

    @property
    def names(self) -> Sequence[str]:
        return self._columns

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the array of an input, with all samples along its batch axis."""
        entry = self._entries[name]
        shape = list(entry.value.shape)
        if entry.batch_axis is not None:
            shape[entry.batch_axis] = (
                self._rows * shape[entry.batch_axis] // self._manifest.micro_batch_size
            )
        return tuple(shape)

    def array(self, name: str) -> Array:
        """Return the array of an input, with all samples along its batch axis. Raise
        ConfigurationError if the column cannot be read, contains nulls or no numbers, or has rows
        of another length than a sample.
        """
        entry = self._entries[name]
        chunks = list[np.ndarray]()
        first = 0
        elements = elements_per_sample(entry, self._manifest, str(self.path), "a table")
        for read in self._readers:
            with self._convert_read_errors(repr(name)):
                for chunk in read(name).chunks:
                    if len(chunk):
                        chunks.append(
                            arrange_samples(
                                self._values_of_chunk(chunk, name, elements, first),
                                entry,
                                self._manifest,
                            )
                        )
                        first += len(chunk)
        axis = entry.batch_axis or 0
        return (
            chunks[0]
            if len(chunks) == 1
            else ChunkedRows(chunks, axis, self.shape(name), numpy_dtype(entry))
        )

    def _values_of_chunk(self, chunk: Any, name: str, elements: int, first: int) -> np.ndarray:
        """Return the values of a chunk of column `name` as an array [rows, elements], where
        `elements` is the number of elements of a sample. Raise ConfigurationError for values that
        are not numbers or rows of another length.

        `first` is the table row at which the chunk starts, for messages. Values are views of the
        file where possible; booleans are copied, because Arrow stores them as single bits.
        """
        types = self._pyarrow.types
        rows = len(chunk)
        if isinstance(chunk, self._pyarrow.ExtensionArray):
            # The package `datasets` stores arrays with two or more dimensions as extension types.
            # The attribute `storage` of such a chunk contains the values as nested lists.
            chunk = chunk.storage
        lengths = np.ones(rows, np.int64)
        while (
            types.is_list(chunk.type)
            or types.is_large_list(chunk.type)
            or types.is_fixed_size_list(chunk.type)
        ):
            self._check_has_no_nulls(chunk, name, first)
            if types.is_fixed_size_list(chunk.type):
                inner = np.full(len(chunk), chunk.type.list_size)
            else:
                inner = np.diff(chunk.offsets.to_numpy())
            lengths = (
                np.add.reduceat(inner, np.cumsum(lengths) - lengths) if lengths.all() else lengths
            )
            chunk = chunk.flatten()
        self._check_has_no_nulls(chunk, name, first)
        if not (
            types.is_integer(chunk.type)
            or types.is_floating(chunk.type)
            or types.is_boolean(chunk.type)
        ):
            hint = "convert the text to tokens" if "string" in str(chunk.type) else ""
            raise ConfigurationError(
                f"column {name!r} is of type {chunk.type}, expected numbers", hint, str(self.path)
            )
        if (wrong := np.flatnonzero(lengths != elements)).size:
            row = first + int(wrong[0])
            has = int(lengths[wrong[0]])
            message = (
                f"row {row:,} of column {name!r} has {has} {plural(has, 'element')}, but a "
                f"sample of the input has {elements}"
            )
            raise ConfigurationError(
                message, "pad or truncate the rows to one length", str(self.path)
            )
        return np.asarray(chunk.to_numpy(zero_copy_only=False)).reshape(rows, elements)

    def _check_has_no_nulls(self, chunk: Any, name: str, first: int) -> None:
        """Raise ConfigurationError if a chunk, which starts at table row `first`, contains
        nulls.
        """
        if chunk.null_count:
            raise ConfigurationError(
                f"column {name!r} contains nulls from row {first:,} on", where=str(self.path)
            )


def _read_parquet_column(file: Any, name: str) -> Any:
    """Return one column of an open `pyarrow.parquet.ParquetFile`."""
    return file.read(columns=[name]).column(0)


class ChunkedRows:
    """The concatenation of arrays along `axis`, which is never in memory as a whole. It implements
    the part of numpy's interface that `Array` names.
    """

    def __init__(
        self, chunks: Sequence[np.ndarray], axis: int, shape: tuple[int, ...], dtype: np.dtype
    ) -> None:
        self._chunks = chunks
        self._axis = axis
        self.shape = shape
        self.dtype = chunks[0].dtype if chunks else dtype
        self._ends = np.cumsum([each.shape[axis] for each in chunks])

    def __getitem__(self, key: Any, /) -> np.ndarray:
        """Return a copy of the selected rows. `key` has a full slice for each dimension before
        `axis`, then the selection along `axis`: a slice with start and stop and without a step, or
        an array of row numbers.
        """
        which = key[self._axis]
        rows = np.arange(which.start, which.stop) if isinstance(which, slice) else which
        numbers = np.searchsorted(self._ends, rows, side="right")
        shape = (*self.shape[: self._axis], len(rows), *self.shape[self._axis + 1 :])
        found = np.empty(shape, self.dtype)
        before = key[: self._axis]
        for number in np.unique(numbers):
            chunk = self._chunks[number]
            places = np.flatnonzero(numbers == number)
            local = rows[places] - (self._ends[number] - chunk.shape[self._axis])
            found[(*before, places)] = chunk[(*before, local)]
        return found
