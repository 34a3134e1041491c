"""Checks of arrays against a model's inputs: element types, shapes, and ranges of indices and
labels. An error names the array, the row, the value and the allowed range.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autopipe.backends.torch.runtime.data.sample_order import SampleNumbers
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import DType
from autopipe.ir.program import InputBounds, InputRange
from autopipe.ir.words import plural


def rows_per_sample(entry: InputRange, manifest: Manifest) -> int:
    """Return the number of rows per sample along the batch axis of an input that has one."""
    assert entry.batch_axis is not None
    return entry.value.shape[entry.batch_axis] // manifest.micro_batch_size


def elements_per_sample(entry: InputRange, manifest: Manifest, where: str, kind: str) -> int:
    """Return the number of elements per sample of an input. Raise ConfigurationError if the input
    has no batch axis, because files of this kind contain only samples.
    """
    if entry.batch_axis is None:
        hint = "use .npy files or module:function"
        raise ConfigurationError(
            f"input {entry.value.name!r} lacks a batch axis, so {kind} cannot contain its values",
            hint,
            where,
        )
    return entry.value.elements // manifest.micro_batch_size


def sample_blocks(samples: np.ndarray, entry: InputRange, manifest: Manifest) -> np.ndarray:
    """Return `samples` [count, elements] in the shape of the input, with all samples along its
    batch axis. The result is a view if possible.
    """
    axis = entry.batch_axis or 0
    shape = list(entry.value.shape)
    del shape[axis]
    return np.moveaxis(
        samples.reshape(len(samples) * rows_per_sample(entry, manifest), *shape), 0, axis
    )


def numpy_dtype(entry: InputRange) -> np.dtype:
    return np.dtype("float32" if entry.value.dtype is DType.BFLOAT16 else entry.value.dtype.held)


def bounded_region(bounds: InputBounds, batch_axis: int | None) -> tuple[slice, ...]:
    """Return the slices of the block that the bounds apply to, for all samples."""
    block = [slice(*each) for each in zip(bounds.starts, bounds.stops, strict=True)]
    if batch_axis is not None:
        block[batch_axis] = slice(None)
    return tuple(block)


def count_samples(
    manifest: Manifest, shapes: Mapping[str, tuple[int, ...]], where: str
) -> int | None:
    """Return the number of samples of arrays with these shapes; None if no array has a batch axis.
    Raise ConfigurationError if the shapes do not fit the model or each other.
    """
    found: dict[str, int] = {}
    for entry in manifest.inputs:
        name = entry.value.name
        axis = entry.batch_axis
        if name not in shapes:
            continue
        shape = shapes[name]
        value = entry.value
        if len(shape) != len(value.shape) or any(
            index != axis and have != need
            for index, (have, need) in enumerate(zip(shape, value.shape, strict=True))
        ):
            wanted = [
                "samples" if index == axis else str(extent)
                for index, extent in enumerate(value.shape)
            ]
            raise ConfigurationError(
                f"array {name!r} has shape {list(shape)}, expected [{', '.join(wanted)}]",
                where=where,
            )
        if axis is None:
            continue
        if not (rows := shape[axis]):
            raise ConfigurationError(f"array {name!r} contains 0 samples", where=where)
        extent = rows_per_sample(entry, manifest)
        if rows % extent:
            raise ConfigurationError(
                f"array {name!r} has {rows:,} {plural(rows, 'row')}, expected a multiple of "
                f"the rows per sample, {extent}",
                where=where,
            )
        found[name] = rows // extent
    if len(set(found.values())) > 1:
        lengths = ", ".join(f"{name!r} {count:,}" for name, count in found.items())
        raise ConfigurationError(
            f"the arrays differ in the number of samples: {lengths}", where=where
        )
    return next(iter(found.values()), None)


_ACCEPTED_KINDS = {"b": "biuf", "i": "biu", "u": "biu", "f": "biuf", "c": "biufc"}
"""Kinds of numpy types that an input accepts, by the kind of the input's type. Integer inputs do
not accept floating-point arrays, because floating-point types round large integers: float16 cannot
represent 2,049, float32 cannot represent 16,777,217.
"""


def check_type(dtype: np.dtype, entry: InputRange, where: str) -> None:
    """Raise ConfigurationError if the input does not accept arrays of this type."""
    name = entry.value.name
    wanted = numpy_dtype(entry)
    if dtype == wanted or dtype.kind in _ACCEPTED_KINDS[wanted.kind]:
        return
    hint = (
        f"save the array as {wanted}: {name}.astype({wanted.name!r})" if dtype.kind == "f" else ""
    )
    raise ConfigurationError(f"array {name!r} is of type {dtype}, expected {wanted}", hint, where)


def convert_rows(
    rows: np.ndarray, entry: InputRange, where: str, numbers: range | SampleNumbers | None = None
) -> np.ndarray:
    """Return `rows` in the input's type. `numbers` are the numbers of these rows in the array.
    Raise ConfigurationError as `check_rows` does.
    """
    check_rows(rows, entry, where, numbers)
    return rows.astype(numpy_dtype(entry), copy=False)


def check_rows(
    rows: np.ndarray, entry: InputRange, where: str, numbers: range | SampleNumbers | None = None
) -> None:
    """Raise ConfigurationError if the input does not accept the type of the rows, if an integer or
    Boolean input cannot represent a value, or if an index or label is out of range and is not the
    ignored one. An index or label in a floating-point input must also be an integer.

    `numbers` are the numbers of the rows in the array, for the message. Rows of integers in range
    are not copied.
    """
    name = entry.value.name
    dtype = numpy_dtype(entry)
    check_type(rows.dtype, entry, where)
    whole = dtype.kind in "biu"
    if whole and rows.size and not np.can_cast(rows.dtype, dtype, "safe"):
        if rows.dtype.kind == "f" or dtype.kind == "b":
            with np.errstate(invalid="ignore"):
                exact = np.array_equal(rows.astype(dtype), rows)
        else:
            limits = np.iinfo(dtype)
            exact = int(rows.min()) >= limits.min and int(rows.max()) <= limits.max
        if not exact:
            raise ConfigurationError(
                f"array {name!r} contains numbers that {dtype} cannot represent", where=where
            )
    for bounds in entry.allowed if rows.size else ():
        block = rows[bounded_region(bounds, entry.batch_axis)]
        bad = _mask_of_invalid_values(block, bounds)
        if bad is None:
            continue
        if entry.ignored is not None:
            bad &= block != entry.ignored
        if not bad.any():
            continue
        place = np.argwhere(bad)[0]
        row = ""
        if entry.batch_axis is not None:
            index = int(place[entry.batch_axis])
            row = f" row {index if numbers is None else int(numbers[index]):,}"
        besides = "" if entry.ignored is None else f", or {entry.ignored}"
        kind = "an integer " if rows.dtype.kind == "f" else ""
        raise ConfigurationError(
            f"array {name!r}{row} contains {block[tuple(place)].item():.15g}, expected "
            f"{kind}from {bounds.least} to {bounds.below - 1}{besides}",
            where=where,
        )


def _mask_of_invalid_values(block: np.ndarray, bounds: InputBounds) -> np.ndarray | None:
    """Return a mask of the values that are out of bounds or are not integers. Return None if all
    values are integers in range; for floating-point values a mask is returned in any case.
    """
    is_floating = block.dtype.kind == "f"
    if not block.size or (
        not is_floating and block.min() >= bounds.least and block.max() < bounds.below
    ):
        return None
    bad = ~((block >= bounds.least) & (block < bounds.below))
    return bad | (block != np.trunc(block)) if is_floating else bad
