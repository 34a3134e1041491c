"""The batches: random ones, an `.npz` file, or a Python function; each rank reads only the blocks it needs."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import struct
import sys
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import IO

import numpy as np

from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.philox import box_muller_normal, integers, words
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import DType
from autopipe.ir.program import InputBounds, InputRange

Slices = tuple[tuple[int, int], ...]  # A block of a tensor: (start, stop) in each dimension.
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
"""ZIP's header before each member; its last two fields are the lengths of the name and of the extra field that follow
(APPNOTE.TXT 4.3.7)."""
_DAMAGED = (OSError, ValueError, EOFError, KeyError, struct.error, zlib.error, zipfile.BadZipFile, RuntimeError)


class Archive:
    """The arrays of an `.npz` file by name, read where they lie: who takes a few rows of a large one reads those only.
    Raises ConfigurationError where it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._opened("data") as archive:
            self.members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}

    @contextmanager
    def _opened(self, what: str) -> Iterator[zipfile.ZipFile]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                yield archive
        except _DAMAGED as error:
            raise ConfigurationError(f"{what} cannot be read: {error}", where=str(self.path)) from error

    def shape(self, name: str) -> tuple[int, ...]:
        with self._opened(repr(name)) as archive, archive.open(self.members[name]) as file:
            return _array_header(file)[0]

    def array(self, name: str) -> np.ndarray:
        """The array called `name`: mapped where it is stored as it is, in memory where it is compressed."""
        info = self.members[name]
        with self._opened(repr(name)) as archive:
            if info.compress_type == zipfile.ZIP_STORED:
                return self._mapped(info)
            with archive.open(info) as file:
                loaded: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
                return loaded

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
    form = np.lib.format
    version = form.read_magic(file)
    readers = {(1, 0): form.read_array_header_1_0, (2, 0): form.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"format {version[0]}.{version[1]} of arrays is not known")
    return readers[version](file)


_DATA_STREAM = 2
_PIECE = 1 << 24  # Bytes of an array that are looked at together.


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run has come: steps done, and samples taken. Batches before may have had another size."""

    steps: int = 0
    samples: int = 0


START = Position()


class Source(ABC):
    """Where samples come from, in the order of their numbers, which run on from step to step. This one has no end;
    `left_over` are the samples at an epoch's end that fill no batch, which training leaves out."""

    left_over = 0

    def __init__(self, manifest: Manifest, begin: Position) -> None:
        self._manifest = manifest
        self._begin = begin

    def sample(self, step: int) -> int:
        """The number of a step's first sample."""
        return self._begin.samples + (step - self._begin.steps) * self._manifest.batch_size

    def has(self, step: int) -> bool:
        """True if there is data for a step. In training there is: behind an epoch's end begins the next."""
        return True

    def epoch(self, step: int) -> int:
        """The epoch, counted from 1, of a step whose data was read."""
        return 1

    def count(self, step: int) -> int:
        """Samples of a step that are data; those behind them only fill its batch up."""
        return self._manifest.batch_size

    @abstractmethod
    def rows(self, entry: InputRange, start: int, stop: int) -> np.ndarray:
        """Samples [start, stop) of an input, along its batch axis; the whole value where it has none. `start` says the
        step either way. Behind the last sample come the first ones again."""

    def _rows_of(self, array: np.ndarray, entry: InputRange, start: int, stop: int, where: str) -> np.ndarray:
        """`rows`, where `array` is all of the input."""
        axis = entry.batch_axis
        if axis is None:
            return _taken(array, entry, where)
        extent, length = rows_per_sample(entry, self._manifest), array.shape[axis]
        first, count = start * extent % length, (stop - start) * extent
        if first + count <= length:
            rows = array[(slice(None),) * axis + (slice(first, first + count),)]
        else:
            rows = np.take(array, np.arange(first, first + count) % length, axis=axis)
        return _taken(rows, entry, where, first)


def open_source(manifest: Manifest, data: str | None, seed: int, begin: Position = START) -> Source:
    """The source that `--data` names, for a run that goes on from `begin`. Raises ConfigurationError where it does not
    fit the model."""
    if data is None:
        return RandomSource(manifest, seed, begin)
    if data.endswith(".npz"):
        return FileSource(manifest, Path(data), begin)
    return FunctionSource(manifest, data, begin)


def read_block(source: Source, manifest: Manifest, entry: InputRange, sample: int, box: Slices) -> np.ndarray:
    """The block `box` of the micro-batch that starts at sample number `sample`; a copy, row-major."""
    axis, region = entry.batch_axis, [slice(*each) for each in box]
    if axis is None:
        return np.array(source.rows(entry, sample, sample)[tuple(region)])
    start, stop = box[axis]
    per_sample = rows_per_sample(entry, manifest)
    first = start // per_sample
    rows = source.rows(entry, sample + first, sample + -(-stop // per_sample))
    region[axis] = slice(start - first * per_sample, stop - first * per_sample)
    return rows[tuple(region)].copy()


def rows_per_sample(entry: InputRange, manifest: Manifest) -> int:
    """Rows of a sample along the batch axis of an input that has one."""
    assert entry.batch_axis is not None
    return entry.value.shape[entry.batch_axis] // manifest.micro_batch_size


def save_samples(manifest: Manifest, target: Path) -> None:
    """Draw one step's samples into an `.npz` file to run on, where drawing them shall be no part of a step."""
    source = RandomSource(manifest, 0)
    drawn = {entry.value.name: source.rows(entry, 0, manifest.batch_size) for entry in manifest.inputs}
    np.savez(target, **drawn)  # type: ignore[arg-type]


class RandomSource(Source):
    """Random values that respect where an input goes, without end; sample i is the same whoever draws it."""

    def __init__(self, manifest: Manifest, seed: int, begin: Position = START) -> None:
        super().__init__(manifest, begin)
        self._seed = seed
        self._index = {entry.value.name: index for index, entry in enumerate(manifest.inputs)}

    def rows(self, entry: InputRange, start: int, stop: int) -> np.ndarray:
        """Made from words of the input's stream, samples first where there are any."""
        shape, axis, place = entry.value.shape, entry.batch_axis, 0
        if axis is not None:
            extent = rows_per_sample(entry, self._manifest)
            rest = (*shape[:axis], *shape[axis + 1 :])
            place, shape = start * extent * math.prod(rest), ((stop - start) * extent, *rest)
        flat = words(self._seed, (_DATA_STREAM, self._index[entry.value.name]), place, math.prod(shape))
        found = (box_muller_normal(flat) if entry.below is None else integers(flat, entry.below)).reshape(shape)
        drawn = flat.reshape(shape)
        for bounds in entry.drawn:
            block = _region(bounds, axis)
            if axis is not None:
                block = (slice(None), *block[:axis], *block[axis + 1 :])
            least = max(0, bounds.least) if bounds.below > 0 else bounds.least
            found[block] = integers(drawn[block], bounds.below - least) + least
        return np.moveaxis(found.astype(_numpy_dtype(entry)), 0, axis) if axis else found.astype(_numpy_dtype(entry))


class FileSource(Source):
    """An `.npz` file with one array an input, samples along the batch axis, as many in each. Its end is the end of an
    epoch: training leaves out the last samples, where they fill no batch, and begins again; inference ends there, with
    its last batch filled up."""

    def __init__(self, manifest: Manifest, path: Path, begin: Position = START) -> None:
        super().__init__(manifest, begin)
        self._where = str(path)
        archive = Archive(path)
        self._array = cache(archive.array)
        names = [entry.value.name for entry in manifest.inputs]
        for name in names:
            if name not in archive.members:
                have = ", ".join(sorted(archive.members)) or "nothing"
                raise ConfigurationError(f"no array for input {name!r}", hint=f"it has {have}", where=self._where)
        self.samples = _samples(manifest, {name: archive.shape(name) for name in names}, self._where)
        """How many there are; None where no input has samples."""
        self.left_over = 0 if self.samples is None else self.samples % manifest.batch_size
        if manifest.train and self.samples is not None and self.samples < manifest.batch_size:
            raise ConfigurationError(
                f"{self.samples} samples are no batch of {manifest.batch_size}",
                hint="plan with a smaller --batch-size, or give more data",
                where=self._where,
            )

    def sample(self, step: int) -> int:
        batch, begin, done = self._manifest.batch_size, self._begin.samples, step - self._begin.steps
        if self.samples is None or not self._manifest.train:
            return super().sample(step)
        left = (self.samples - begin % self.samples) // batch
        if done < left:
            return super().sample(step)
        epochs, within = divmod(done - left, self.samples // batch)
        return (begin // self.samples + 1 + epochs) * self.samples + within * batch

    def has(self, step: int) -> bool:
        return self._manifest.train or self.samples is None or self.sample(step) < self.samples

    def epoch(self, step: int) -> int:
        return 1 if self.samples is None else self.sample(step) // self.samples + 1

    def count(self, step: int) -> int:
        batch = self._manifest.batch_size
        return batch if self.samples is None else min(batch, self.samples - self.sample(step) % self.samples)

    def rows(self, entry: InputRange, start: int, stop: int) -> np.ndarray:
        return self._rows_of(self._array(entry.value.name), entry, start, stop, self._where)

    def check(self, samples: int | None = None) -> None:
        """Look at the first `samples` of each array, a piece at a time. Raises ConfigurationError for numbers that the
        model cannot take."""
        for entry in self._manifest.inputs:
            array, axis, dtype = self._array(entry.value.name), entry.batch_axis, _numpy_dtype(entry)
            if not entry.allowed and (array.dtype == dtype or dtype.kind not in "biu"):
                _check_convertible(array, entry, self._where)
                continue
            if axis is None:
                _taken(array, entry, self._where)
                continue
            extent, length = rows_per_sample(entry, self._manifest), array.shape[axis]
            stop = length if samples is None else min(length, samples * extent)
            piece = max(1, _PIECE * length // max(array.nbytes, 1))
            for first in range(0, stop, piece):
                rows = array[(slice(None),) * axis + (slice(first, min(first + piece, stop)),)]
                _taken(rows, entry, self._where, first)

    @property
    def steps(self) -> int:
        """Steps that take all samples once."""
        return 1 if self.samples is None else -(-self.samples // self._manifest.batch_size)

    def says(self, steps: int) -> str:
        """Warning about data that these steps leave out, repeat or lack; "" where there is none."""
        if self.samples is None:
            return ""
        batch, samples = self._manifest.batch_size, f"{self._where}: {self.samples:,} samples"
        full, rest = self.samples // batch, self.left_over
        if self._manifest.train:
            left = f", the last {rest:,} of each epoch left out" if rest else ""
            more = f"; {steps:,} steps go on into epoch {-(-steps // full):,}" if steps > full else ""
            return f"{samples} are {full:,} batches of {batch}{left}{more}" if left or more else ""
        batches = self.steps
        padded = f", the last of {rest:,}" if rest and steps >= batches else ""
        without = [repr(output.value.name) for output in self._manifest.outputs if output.batch_axis is None]
        if padded and without:
            padded += f" ({', '.join(without)}: the last value also counts what fills its micro-batch up)"
        ends = f"; it ends before step {batches:,} of {steps:,}" if steps > batches else ""
        return f"{samples} are {batches:,} batches of {batch}{padded}{ends}" if padded or ends else ""


class FunctionSource(Source):
    """A Python function `module:function` that returns an iterator of batches, each a mapping of input to array. Batch
    i is what step i runs on. The iterator cannot go back: a run that continues takes the batches before it too. Its end
    is the end of an epoch: for the next one the function is called again, in training."""

    def __init__(self, manifest: Manifest, name: str, begin: Position) -> None:
        module, colon, function = name.partition(":")
        if not colon:
            raise ConfigurationError(f"{name!r} is neither an .npz file nor module:function")
        try:
            self._function = getattr(_module(module), function)
        except (ImportError, AttributeError) as error:
            raise ConfigurationError(f"data function {name!r} cannot be imported: {error}") from error
        super().__init__(manifest, begin)
        self._name = name
        self._batches = self._numbered()
        self._step = -1
        self._current: tuple[int, Mapping[str, np.ndarray], int] = (1, {}, manifest.batch_size)

    def has(self, step: int) -> bool:
        return self._manifest.train or self._advance(step)

    def epoch(self, step: int) -> int:
        return self._current[0]

    def count(self, step: int) -> int:
        return self._current[2]

    def rows(self, entry: InputRange, start: int, stop: int) -> np.ndarray:
        begin, batch_size, name = self._begin, self._manifest.batch_size, entry.value.name
        step = begin.steps + (start - begin.samples) // batch_size
        self._advance(step)
        _, batch, _ = self._current
        if name not in batch:
            raise ConfigurationError(f"a batch lacks input {name!r}", where=self._name)
        offset = begin.samples + (self._step - begin.steps) * batch_size
        where = f"{self._name}, batch {step}"
        return self._rows_of(np.asarray(batch[name]), entry, start - offset, stop - offset, where)

    def _advance(self, step: int) -> bool:
        """Take the batches up to that of `step`; no more where they end before."""
        while self._step < step:
            if (found := next(self._batches, None)) is None:
                return False
            self._current = found
            self._step += 1
        return True

    def _numbered(self) -> Iterator[tuple[int, Mapping[str, np.ndarray], int]]:
        """Epochs, batches, and how many samples each batch has: only the last of an epoch may lack some."""
        batch_size = self._manifest.batch_size
        for epoch in itertools.count(1):
            number, short = -1, None
            for number, batch in enumerate(self._function()):
                if short is not None:
                    message = f"batch {number - 1} has {short[1]} samples, not {batch_size}, and is not the last"
                    raise ConfigurationError(message, where=self._name)
                shapes = {name: np.shape(array) for name, array in batch.items()}
                count = _samples(self._manifest, shapes, f"{self._name}, batch {number}")
                if count is None or count == batch_size:
                    yield epoch, batch, batch_size
                elif count > batch_size:
                    raise ConfigurationError(f"batch {number} has {count} samples, not {batch_size}", where=self._name)
                else:
                    short = batch, count
            if not self._manifest.train:
                if short is not None:
                    yield epoch, *short
                return
            self.left_over = 0 if short is None else short[1]
            if number < 0 or (number == 0 and short):
                raise ConfigurationError(f"epoch {epoch} has no batch of {batch_size} samples", where=self._name)


def check_data(manifest: Manifest, data: str | None, steps: int | None) -> FileSource | None:
    """The file that `--data` names, its arrays looked at as far as `steps` read them; None where it is no file. Raises
    ConfigurationError where they do not fit the model or one another."""
    if data is None or not data.endswith(".npz"):
        return None
    source = FileSource(manifest, Path(data))
    source.check(None if steps is None else steps * manifest.batch_size)
    return source


def _samples(manifest: Manifest, shapes: Mapping[str, tuple[int, ...]], where: str) -> int | None:
    """How many samples arrays of these shapes have; None where none has any. Raises ConfigurationError where they do
    not fit the model or one another."""
    found: dict[str, int] = {}
    for entry in manifest.inputs:
        name, axis = entry.value.name, entry.batch_axis
        if name not in shapes:
            continue
        shape, value = shapes[name], entry.value
        if len(shape) != len(value.shape) or any(
            index != axis and have != need for index, (have, need) in enumerate(zip(shape, value.shape, strict=True))
        ):
            wanted = ["samples" if index == axis else str(extent) for index, extent in enumerate(value.shape)]
            raise ConfigurationError(f"{name!r} is {list(shape)}, not [{', '.join(wanted)}]", where=where)
        if axis is None:
            continue
        if not (rows := shape[axis]):
            raise ConfigurationError(f"{name!r} has no samples", where=where)
        extent = rows_per_sample(entry, manifest)
        if rows % extent:
            raise ConfigurationError(f"{name!r} has {rows:,} rows, of which a sample has {extent}", where=where)
        found[name] = rows // extent
    if len(set(found.values())) > 1:
        lengths = ", ".join(f"{name!r} {count:,}" for name, count in found.items())
        raise ConfigurationError(f"the arrays have different numbers of samples: {lengths}", where=where)
    return next(iter(found.values()), None)


def _module(name: str) -> ModuleType:
    """The module of that name in the current folder, or else on the module path. From then on, the folder comes last on
    the path, for what the module imports from beside it."""
    folder, first = os.getcwd(), name.partition(".")[0]
    spec = None if first in sys.modules or first in sys.stdlib_module_names else PathFinder.find_spec(first, [folder])
    if spec is not None and folder not in sys.path:
        sys.path.append(folder)
    if spec is not None and spec.origin is not None and spec.loader is not None:
        found = sys.modules[first] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    return importlib.import_module(name)


def _taken(rows: np.ndarray, entry: InputRange, where: str, first: int = 0) -> np.ndarray:
    """Rows, of which the first is number `first`, in the input's type. Raises ConfigurationError for what it cannot
    hold, text or fractions as whole numbers, and for what it may not: indices and labels out of range."""
    name, dtype, found = entry.value.name, _numpy_dtype(entry), rows
    if rows.dtype != dtype:
        _check_convertible(rows, entry, where)
        with np.errstate(invalid="ignore"):
            found = rows.astype(dtype)
        if dtype.kind in "biu" and not np.array_equal(found, rows):
            raise ConfigurationError(f"{name!r} holds numbers that are no {dtype}", where=where)
    for bounds in entry.allowed if found.size else ():
        block = found[_region(bounds, entry.batch_axis)]
        if not block.size or (block.min() >= bounds.least and block.max() < bounds.below):
            continue
        bad = (block < bounds.least) | (block >= bounds.below)
        if entry.ignored is not None:
            bad &= block != entry.ignored
        if not bad.any():
            continue
        place = np.argwhere(bad)[0]
        row = "" if entry.batch_axis is None else f" row {first + int(place[entry.batch_axis]):,}"
        besides = "" if entry.ignored is None else f", or {entry.ignored}"
        raise ConfigurationError(
            f"{name!r}{row} holds {int(block[tuple(place)])}: it must be from {bounds.least} to "
            f"{bounds.below - 1}{besides}",
            where=where,
        )
    return found


def _region(bounds: InputBounds, batch_axis: int | None) -> tuple[slice, ...]:
    block = [slice(*each) for each in zip(bounds.starts, bounds.stops, strict=True)]
    if batch_axis is not None:
        block[batch_axis] = slice(None)
    return tuple(block)


def _check_convertible(array: np.ndarray, entry: InputRange, where: str) -> None:
    dtype = _numpy_dtype(entry)
    if array.dtype != dtype and array.dtype.kind not in ("biufc" if dtype.kind == "c" else "biuf"):
        raise ConfigurationError(f"{entry.value.name!r} holds {array.dtype}, not {dtype}", where=where)


def _numpy_dtype(entry: InputRange) -> np.dtype:
    return np.dtype("float32" if entry.value.dtype is DType.BFLOAT16 else entry.value.dtype.value)
