"""The batches: random ones, an `.npz` file, or a Python function; each rank reads only the blocks it needs."""

from __future__ import annotations

import importlib
import math
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from autopipe.backends.torch.runtime import philox
from autopipe.backends.torch.runtime.manifest import InputEntry, Manifest
from autopipe.backends.torch.runtime.wiring import Slices
from autopipe.ir.errors import ConfigurationError

_DATA_STREAM = 2


class Source(Protocol):
    """Where samples come from. Sample numbers run on from step to step."""

    def rows(self, entry: InputEntry, start: int, stop: int) -> np.ndarray:
        """Samples [start, stop) of an input, along its batch axis; the whole value where it has none."""


def open_source(manifest: Manifest, data: str | None, seed: int) -> Source:
    """The source that `--data` names. Raises ConfigurationError where it does not fit the model."""
    if data is None:
        return RandomSource(manifest, seed)
    if data.endswith(".npz"):
        return FileSource(manifest, Path(data))
    return FunctionSource(manifest, data)


def read_block(source: Source, manifest: Manifest, entry: InputEntry, sample: int, box: Slices) -> np.ndarray:
    """The block `box` of the micro-batch that starts at sample number `sample`."""
    axis = entry.batch_axis
    if axis is None:
        return np.ascontiguousarray(source.rows(entry, 0, 0)[tuple(slice(*each) for each in box)])
    start, stop = box[axis]
    per_sample = entry.shape[axis] // manifest.micro_batch_size
    rows = source.rows(entry, sample + start // per_sample, sample + -(-stop // per_sample))
    base = start // per_sample * per_sample
    region = [slice(*each) for each in box]
    region[axis] = slice(start - base, stop - base)
    return np.ascontiguousarray(rows[tuple(region)])


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
        self._path = path
        try:
            with zipfile.ZipFile(path) as archive:
                self._names = {name.removesuffix(".npy") for name in archive.namelist()}
            self._archive = np.load(path, allow_pickle=False)
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise ConfigurationError(f"data cannot be read: {error}", where=str(path)) from error
        missing = [entry.name for entry in manifest.inputs if entry.name not in self._names]
        if missing:
            have = ", ".join(sorted(self._names)) or "nothing"
            raise ConfigurationError(f"no array for input {missing[0]!r}", hint=f"it has {have}", where=str(path))
        self._arrays: dict[str, np.ndarray] = {}

    def rows(self, entry: InputEntry, start: int, stop: int) -> np.ndarray:
        array = self._array(entry)
        if entry.batch_axis is None:
            return array
        extent = entry.shape[entry.batch_axis] // self._manifest.micro_batch_size
        indices = np.arange(start * extent, stop * extent) % array.shape[entry.batch_axis]
        return np.take(array, indices, axis=entry.batch_axis)

    def _array(self, entry: InputEntry) -> np.ndarray:
        if entry.name not in self._arrays:
            try:
                array = self._archive[entry.name]
            except ValueError as error:
                raise ConfigurationError(f"{entry.name!r} cannot be read: {error}", where=str(self._path)) from error
            self._arrays[entry.name] = _checked(array, entry, str(self._path))
        return self._arrays[entry.name]


class FunctionSource:
    """A Python function `module:function` that returns an iterator of batches, each a mapping of input to array."""

    def __init__(self, manifest: Manifest, name: str) -> None:
        module, colon, function = name.partition(":")
        if not colon:
            raise ConfigurationError(f"{name!r} is neither an .npz file nor module:function")
        try:
            made = getattr(importlib.import_module(module), function)()
        except (ImportError, AttributeError) as error:
            raise ConfigurationError(f"data function {name!r} cannot be imported: {error}") from error
        self._name = name
        self._manifest = manifest
        self._batches: Iterator[Mapping[str, np.ndarray]] = iter(made)
        self._step = -1
        self._batch: Mapping[str, np.ndarray] = {}

    def rows(self, entry: InputEntry, start: int, stop: int) -> np.ndarray:
        if entry.batch_axis is None:
            self._advance(max(self._step, 0))
            return _checked(np.asarray(self._value(entry)), entry, self._name)
        self._advance(start // self._manifest.batch_size)
        extent = entry.shape[entry.batch_axis] // self._manifest.micro_batch_size
        array = _checked(np.asarray(self._value(entry)), entry, self._name)
        offset = self._step * self._manifest.batch_size
        if array.shape[entry.batch_axis] < (stop - offset) * extent:
            raise ConfigurationError(
                f"{entry.name!r} has {array.shape[entry.batch_axis]} rows, a batch {self._manifest.batch_size * extent}",
                where=self._name,
            )
        return np.take(array, range((start - offset) * extent, (stop - offset) * extent), axis=entry.batch_axis)

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


def _checked(array: np.ndarray, entry: InputEntry, where: str) -> np.ndarray:
    """The array in the input's type, if it fits its shape apart from the number of samples."""
    axis = entry.batch_axis
    fits = len(array.shape) == len(entry.shape) and all(
        have == need for index, (have, need) in enumerate(zip(array.shape, entry.shape, strict=True)) if index != axis
    )
    if not fits:
        raise ConfigurationError(f"{entry.name!r} is {list(array.shape)}, not {list(entry.shape)}", where=where)
    return array.astype(_numpy_dtype(entry), copy=False)


def _numpy_dtype(entry: InputEntry) -> np.dtype:
    return np.dtype("float32" if entry.dtype == "bfloat16" else entry.dtype)
