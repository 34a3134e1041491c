"""Checks of arrays against a model's inputs: element types, shapes, and ranges of indices and
labels. Errors name the array, and where possible the row, the value and the allowed range.

A row is an index along the batch axis of an input. A sample consists of one or more rows.
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
    """Return the number of rows per sample of an input, which must have a batch axis."""
    assert entry.batch_axis is not None
    return entry.value.shape[entry.batch_axis] // manifest.micro_batch_size


def elements_per_sample(entry: InputRange, manifest: Manifest, where: str, kind: str) -> int:
    """Return the number of elements per sample of an input. Raise ConfigurationError if the input
    has no batch axis: the file `where`, whose kind is named `kind`, stores samples only.
    """
    if entry.batch_axis is None:
        hint = "use .npy files or module:function"
        raise ConfigurationError(
            f"input {entry.value.name!r} lacks a batch axis, so {kind} cannot contain its values",
            hint,
            where,
        )
    return entry.value.elements // manifest.micro_batch_size


def arrange_samples(samples: np.ndarray, entry: InputRange, manifest: Manifest) -> np.ndarray:
    """Return `samples`, an array [samples, elements per sample], in the shape of the input with all
    samples along the batch axis. The result is a view where numpy can make one.
    """
    axis = entry.batch_axis or 0
    shape = list(entry.value.shape)
    del shape[axis]
    return np.moveaxis(
        samples.reshape(len(samples) * rows_per_sample(entry, manifest), *shape), 0, axis
    )


def numpy_dtype(entry: InputRange) -> np.dtype:
    """Return the numpy type in which the host holds values of an input: float32 for bfloat16, which
    numpy lacks.
    """
    return np.dtype(
        "float32" if entry.value.dtype is DType.BFLOAT16 else entry.value.dtype.torch_name
    )


def bounded_slices(bounds: InputBounds, batch_axis: int | None) -> tuple[slice, ...]:
    """Return the slices, one per dimension of an input, of the elements to which `bounds` apply.
    The slice of the batch axis covers all samples.
    """
    block = [slice(*each) for each in zip(bounds.starts, bounds.stops, strict=True)]
    if batch_axis is not None:
        block[batch_axis] = slice(None)
    return tuple(block)


def count_samples(
    manifest: Manifest, shapes: Mapping[str, tuple[int, ...]], where: str
) -> int | None:
    """Return the number of samples in arrays whose shapes are given by input name; None if no array
    has a batch axis. Raise ConfigurationError if a shape does not fit its input, or if the numbers
    of samples differ. `where` names the data in messages.
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
"""Kinds of numpy types (`numpy.dtype.kind`) of arrays that an input accepts, by the kind of the
input's own type. Integer inputs do not accept floating-point arrays, because floating-point types
round large integers: float16 cannot represent 2,049, float32 cannot represent 16,777,217.
"""


def check_element_type(dtype: np.dtype, entry: InputRange, where: str) -> None:
    """Raise ConfigurationError if the input does not accept arrays of type `dtype`. `where` names
    the data in the message.
    """
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
    """Check `rows` as `check_rows` does, which may raise ConfigurationError, and return them in the
    input's numpy type.
    """
    check_rows(rows, entry, where, numbers)
    return rows.astype(numpy_dtype(entry), copy=False)


def check_rows(
    rows: np.ndarray, entry: InputRange, where: str, numbers: range | SampleNumbers | None = None
) -> None:
    """Raise ConfigurationError if `rows` are not valid values of an input:

    - the input does not accept their element type,
    - an integer or Boolean input cannot represent a value, or
    - an index or label is out of range and is not the ignored label. In a floating-point input, an
      index or label must also be an integer.

    `where` names the data in messages. `numbers[i]` is the number of row i in the stored array;
    None if `rows` are the rows from 0 on. Rows of integers that are in range are not copied.
    """
    name = entry.value.name
    dtype = numpy_dtype(entry)
    check_element_type(rows.dtype, entry, where)
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
        block = rows[bounded_slices(bounds, entry.batch_axis)]
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
    """Return a Boolean mask of the values of `block` that are outside of `bounds` or are not
    integers. Return None if the block is empty or contains only integers of an integer type within
    the bounds.
    """
    is_floating = block.dtype.kind == "f"
    if not block.size or (
        not is_floating and block.min() >= bounds.least and block.max() < bounds.below
    ):
        return None
    bad = ~((block >= bounds.least) & (block < bounds.below))
    return bad | (block != np.trunc(block)) if is_floating else bad
