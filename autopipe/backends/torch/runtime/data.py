"""The batches: random ones, an `.npz` file, or a Python function; each rank reads only the blocks it needs."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from autopipe.backends.torch.runtime import philox
from autopipe.backends.torch.runtime.archive import Archive
from autopipe.backends.torch.runtime.manifest import InputEntry, Manifest
from autopipe.backends.torch.runtime.wiring import Slices
from autopipe.ir.errors import ConfigurationError

_DATA_STREAM = 2


@dataclass(frozen=True, slots=True)
class Position:
    """How far a run has come: steps done, and samples taken. Batches before may have had another size."""

    steps: int = 0
    samples: int = 0


START = Position()


class Source(Protocol):
    """Where samples come from. Sample numbers run on from step to step."""

    def rows(self, entry: InputEntry, start: int, stop: int) -> np.ndarray:
        """Samples [start, stop) of an input, along its batch axis; the whole value where it has none.

        `start` says the step either way.
        """


def open_source(manifest: Manifest, data: str | None, seed: int, begin: Position = START) -> Source:
    """The source that `--data` names, for a run that goes on from `begin`.

    Raises ConfigurationError where it does not fit the model.
    """
    if data is None:
        return RandomSource(manifest, seed)
    if data.endswith(".npz"):
        return FileSource(manifest, Path(data))
    return FunctionSource(manifest, data, begin)


def read_block(source: Source, manifest: Manifest, entry: InputEntry, sample: int, box: Slices) -> np.ndarray:
    """The block `box` of the micro-batch that starts at sample number `sample`; a copy, row-major."""
    axis = entry.batch_axis
    if axis is None:
        return source.rows(entry, sample, sample)[tuple(slice(*each) for each in box)].copy()
    start, stop = box[axis]
    per_sample = entry.shape[axis] // manifest.micro_batch_size
    rows = source.rows(entry, sample + start // per_sample, sample + -(-stop // per_sample))
    base = start // per_sample * per_sample
    region = [slice(*each) for each in box]
    region[axis] = slice(start - base, stop - base)
    return rows[tuple(region)].copy()


def save_samples(manifest: Manifest, target: Path) -> None:
    """Draw one step's samples into an `.npz` file to run on, where drawing them shall be no part of a step."""
    source = RandomSource(manifest, 0)
    drawn = {entry.name: source.rows(entry, 0, manifest.batch_size) for entry in manifest.inputs}
    np.savez(target, **drawn)  # type: ignore[arg-type]


class RandomSource:
    """Random values that respect where an input goes; sample i is the same whoever draws it."""

    def __init__(self, manifest: Manifest, seed: int) -> None:
        self._manifest = manifest
        self._seed = seed
        self._index = {entry.name: index for index, entry in enumerate(manifest.inputs)}

    def rows(self, entry: InputEntry, start: int, stop: int) -> np.ndarray:
        axis = entry.batch_axis
        if axis is None:
            return self._draw(entry, 0, math.prod(entry.shape)).reshape(entry.shape)
        extent = entry.shape[axis] // self._manifest.micro_batch_size
        rest = (*entry.shape[:axis], *entry.shape[axis + 1 :])
        sample = extent * math.prod(rest)
        drawn = self._draw(entry, start * sample, (stop - start) * sample)
        return np.moveaxis(drawn.reshape((stop - start) * extent, *rest), 0, axis)

    def _draw(self, entry: InputEntry, start: int, count: int) -> np.ndarray:
        stream = (_DATA_STREAM, self._index[entry.name])
        if entry.below is None:
            return philox.normal(self._seed, stream, start, count).astype(_numpy_dtype(entry))
        return philox.integers(self._seed, stream, start, count, entry.below).astype(_numpy_dtype(entry))


class FileSource:
    """An `.npz` file with one array an input, samples along the batch axis, read again from the start at its end."""

    def __init__(self, manifest: Manifest, path: Path) -> None:
        self._manifest = manifest
        self._archive = Archive(path)
        missing = [entry.name for entry in manifest.inputs if entry.name not in self._archive.names]
        if missing:
            have = ", ".join(sorted(self._archive.names)) or "nothing"
            raise ConfigurationError(f"no array for input {missing[0]!r}", hint=f"it has {have}", where=str(path))
        self._where = str(path)
        self._arrays: dict[str, np.ndarray] = {}

    def rows(self, entry: InputEntry, start: int, stop: int) -> np.ndarray:
        if entry.name not in self._arrays:
            self._arrays[entry.name] = _fitting(self._archive.array(entry.name), entry, self._where)
        array, axis = self._arrays[entry.name], entry.batch_axis
        if axis is None:
            return _converted(array, entry, self._where)
        extent, length = entry.shape[axis] // self._manifest.micro_batch_size, array.shape[axis]
        first, count = start * extent % length, (stop - start) * extent
        if first + count <= length:
            rows = array[(slice(None),) * axis + (slice(first, first + count),)]
        else:
            rows = np.take(array, np.arange(first, first + count) % length, axis=axis)
        return _converted(rows, entry, self._where)


class FunctionSource:
    """A Python function `module:function` that returns an iterator of batches, each a mapping of input to array.

    Batch i is what step i runs on. The iterator cannot go back: a run that continues takes the batches before it too.
    """

    def __init__(self, manifest: Manifest, name: str, begin: Position) -> None:
        module, colon, function = name.partition(":")
        if not colon:
            raise ConfigurationError(f"{name!r} is neither an .npz file nor module:function")
        try:
            made = getattr(importlib.import_module(module), function)()
        except (ImportError, AttributeError) as error:
            raise ConfigurationError(f"data function {name!r} cannot be imported: {error}") from error
        self._name = name
        self._manifest = manifest
        self._begin = begin
        self._batches: Iterator[Mapping[str, np.ndarray]] = iter(made)
        self._step = -1
        self._batch: Mapping[str, np.ndarray] = {}

    def rows(self, entry: InputEntry, start: int, stop: int) -> np.ndarray:
        begin, batch_size = self._begin, self._manifest.batch_size
        self._advance(begin.steps + (start - begin.samples) // batch_size)
        array = _fitting(np.asarray(self._value(entry)), entry, self._name)
        if entry.batch_axis is None:
            return _converted(array, entry, self._name)
        extent = entry.shape[entry.batch_axis] // self._manifest.micro_batch_size
        offset = begin.samples + (self._step - begin.steps) * batch_size
        have, needed = array.shape[entry.batch_axis], batch_size * extent
        if have < needed:
            raise ConfigurationError(f"{entry.name!r} has {have} rows, a batch {needed}", where=self._name)
        rows = np.take(array, range((start - offset) * extent, (stop - offset) * extent), axis=entry.batch_axis)
        return _converted(rows, entry, self._name)

    def _advance(self, step: int) -> None:
        while self._step < step:
            try:
                self._batch = next(self._batches)
            except StopIteration:
                raise ConfigurationError(f"ended after {self._step + 1} batches", where=self._name) from None
            self._step += 1

    def _value(self, entry: InputEntry) -> np.ndarray:
        if entry.name not in self._batch:
            raise ConfigurationError(f"a batch lacks input {entry.name!r}", where=self._name)
        return self._batch[entry.name]


def _fitting(array: np.ndarray, entry: InputEntry, where: str) -> np.ndarray:
    """The array, if it fits the input's shape apart from the number of samples. Raises ConfigurationError."""
    axis = entry.batch_axis
    wanted = ["samples" if index == axis else str(extent) for index, extent in enumerate(entry.shape)]
    fits = len(array.shape) == len(wanted) and all(
        need in ("samples", str(have)) for have, need in zip(array.shape, wanted, strict=True)
    )
    if not fits:
        raise ConfigurationError(f"{entry.name!r} is {list(array.shape)}, not [{', '.join(wanted)}]", where=where)
    if axis is not None and not array.shape[axis]:
        raise ConfigurationError(f"{entry.name!r} has no samples", where=where)
    return array


def _converted(rows: np.ndarray, entry: InputEntry, where: str) -> np.ndarray:
    """Rows in the input's type. Raises ConfigurationError for what it cannot hold: text, fractions as whole numbers."""
    dtype = _numpy_dtype(entry)
    if rows.dtype == dtype:
        return rows
    numbers = "biufc" if dtype.kind == "c" else "biuf"
    if rows.dtype.kind not in numbers:
        raise ConfigurationError(f"{entry.name!r} holds {rows.dtype}, not {dtype}", where=where)
    with np.errstate(invalid="ignore"):
        found: np.ndarray = rows.astype(dtype)
    if dtype.kind in "biu" and not np.array_equal(found, rows):
        raise ConfigurationError(f"{entry.name!r} holds numbers that are no {dtype}", where=where)
    return found


def _numpy_dtype(entry: InputEntry) -> np.dtype:
    return np.dtype("float32" if entry.dtype == "bfloat16" else entry.dtype)
