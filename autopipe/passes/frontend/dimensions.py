"""Static shapes of a model's inputs: symbolic dimensions bound by name, and the batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autopipe.ir.errors import ConfigurationError, ModelError
from autopipe.ir.graph import DType, Value
from autopipe.ir.kv_cache import MASK, TOKENS, is_cache_input
from autopipe.passes.frontend.elements import dtype_of, shape_of

if TYPE_CHECKING:
    import onnx

MOST_FIXED = 1 << 16
"""Elements of an input that is always the same number."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The data inputs with static shapes, which of their axes count samples, and the extent of every symbol."""

    values: tuple[Value, ...]
    batch_axes: tuple[tuple[str, int], ...]
    symbols: dict[str, int]
    batch: int | None
    """Samples of one evaluation as bound here; None where no input carries samples."""


def bind_inputs(
    inputs: tuple[onnx.ValueInfoProto, ...],
    dims: Mapping[str, int],
    batch: int | None,
    stated_axes: Mapping[str, int | None],
) -> Inputs:
    """Bind symbolic dimensions by `dims`, and those that count samples to `batch` where `dims` does not.

    The batch axis is axis 0 unless `stated_axes` says otherwise (None: the input carries no samples); an input whose
    axis 0 has extent one where another's has not is broadcast and carries none. Where an exporter fixed the batch,
    its extent there is the graph's own batch and holds for symbolic batch axes too. Raises ConfigurationError for
    unbound dimensions and for names that do not occur, ModelError where inputs disagree. A dimension that follows from
    others is bound by them: one called `a + b`, and the length of a decoder's mask, that of its cache and its tokens.
    """
    for name, extent in dims.items():
        if extent <= 0:
            raise ConfigurationError(f"--dim {name}={extent}: an extent is at least 1")
    symbols, shapes = dict(dims), {info.name: _dimensions(info) for info in inputs}
    axes = _batch_axes(shapes, stated_axes, symbols)
    fixed = (_extent(shapes[name][axis], symbols) for name, axis in axes.items())
    size = max((extent for extent in fixed if extent is not None), default=batch or 1)
    for name, axis in axes.items():
        dimension = shapes[name][axis]
        if not dimension.HasField("dim_value") and dimension.dim_param:
            symbols.setdefault(dimension.dim_param, size)
    _bind_sums(shapes, axes, symbols)
    values = tuple(_bound(info, axes.get(info.name), size, symbols) for info in inputs)
    known = sorted({each.dim_param for dimensions in shapes.values() for each in dimensions if each.dim_param})
    for name in dims:
        if name not in known:
            told = f"its symbolic dimensions are {', '.join(map(repr, known))}" if known else "it has none"
            raise ConfigurationError(f"--dim {name}: the model has no such dimension", hint=told)
    for value in values:
        if value.name in axes and value.shape[axes[value.name]] != size:
            raise ModelError(
                f"input {value.name!r} has {value.shape[axes[value.name]]} where others have {size} samples",
                hint=f"say which axis counts samples: model.batch_axes: {{{value.name}: null}} if none does",
            )
    return Inputs(values, tuple(axes.items()), symbols, size if axes else None)


def fixed_numbers(
    inputs: Mapping[str, onnx.ValueInfoProto], fixed: Mapping[str, bool | int | float]
) -> dict[str, np.ndarray]:
    """Inputs full of one number each; what is symbolic of their shapes is one. Raises ConfigurationError for others."""
    found = {}
    for name, number in fixed.items():
        if name not in inputs:
            hint = f"the inputs are {', '.join(map(repr, inputs))}"
            raise ConfigurationError(f"model.inputs names {name!r}, which is no input", hint=hint)
        shape = shape_of([each.dim_value or 1 for each in _dimensions(inputs[name])], f"input {name!r}")
        kind = dtype_of(inputs[name].type.tensor_type.elem_type, f"input {name!r}")
        if math.prod(shape) > MOST_FIXED or kind is DType.BFLOAT16:
            raise ConfigurationError(f"model.inputs: {name!r} is {kind}{list(shape)}, not a few numbers")
        found[name] = np.full(shape, number).astype(kind.value)
    return found


def _bind_sums(
    shapes: Mapping[str, list[onnx.TensorShapeProto.Dimension]], axes: Mapping[str, int], symbols: dict[str, int]
) -> None:
    """Bind symbols that are sums of others."""
    for name in {each.dim_param for dimensions in shapes.values() for each in dimensions} - symbols.keys():
        terms = [symbols.get(term.strip()) for term in name.split("+")]
        found = [term for term in terms if term is not None]
        if len(found) == len(terms) > 1:
            symbols[name] = sum(found)
    tokens, mask = shapes.get(TOKENS, []), shapes.get(MASK, [])
    if len(tokens) != 2 or len(mask) != 2 or not mask[1].dim_param or mask[1].dim_param in symbols:
        return
    cached = {
        symbols.get(each.dim_param)
        for name, dimensions in shapes.items()
        for axis, each in enumerate(dimensions)
        if is_cache_input(name) and each.dim_param and axis != axes.get(name)
    }
    lengths = [_extent(tokens[1], symbols), *cached]
    found = [length for length in lengths if length is not None]
    if len(found) == len(lengths) == 2:
        symbols[mask[1].dim_param] = sum(found)


def _dimensions(info: onnx.ValueInfoProto) -> list[onnx.TensorShapeProto.Dimension]:
    where = f"input {info.name!r}"
    if not info.type.HasField("tensor_type"):
        raise ModelError("only tensors are supported as inputs", where=where)
    if not info.type.tensor_type.HasField("shape"):
        raise ModelError("its number of dimensions is unknown", where=where)
    dimensions = list(info.type.tensor_type.shape.dim)
    shape_of([dimension.dim_value for dimension in dimensions], where)
    return dimensions


def _batch_axes(
    shapes: Mapping[str, list[onnx.TensorShapeProto.Dimension]],
    stated: Mapping[str, int | None],
    symbols: Mapping[str, int],
) -> dict[str, int]:
    unknown = sorted(set(stated) - shapes.keys())
    if unknown:
        raise ConfigurationError(
            f"model.batch_axes names {unknown[0]!r}, which is no input",
            hint=f"the inputs are {', '.join(map(repr, shapes))}",
        )
    axes: dict[str, int] = {}
    for name, dimensions in shapes.items():
        rank = len(dimensions)
        axis = stated.get(name, 0 if rank else None)
        if axis is None:
            continue
        if not -rank <= axis < rank:
            raise ConfigurationError(f"model.batch_axes: {name!r} has {rank} dimensions, no axis {axis}")
        axes[name] = axis % rank
    extents = {name: _extent(shapes[name][axis], symbols) for name, axis in axes.items()}
    if any(extent != 1 for extent in extents.values()):
        return {name: axis for name, axis in axes.items() if extents[name] != 1 or name in stated}
    return axes


def _extent(dimension: onnx.TensorShapeProto.Dimension, symbols: Mapping[str, int]) -> int | None:
    return dimension.dim_value if dimension.HasField("dim_value") else symbols.get(dimension.dim_param)


def _bound(info: onnx.ValueInfoProto, batch_axis: int | None, size: int, symbols: Mapping[str, int]) -> Value:
    shape = []
    for axis, dimension in enumerate(_dimensions(info)):
        extent = _extent(dimension, symbols)
        if extent is not None:
            shape.append(extent)
        elif axis == batch_axis:
            shape.append(size)
        elif dimension.dim_param:
            name = dimension.dim_param
            raise ConfigurationError(
                f"dimension {name!r} (axis {axis} of input {info.name!r}) is symbolic", hint=f"add --dim {name}=EXTENT"
            )
        else:
            raise ModelError(f"axis {axis} of input {info.name!r} has neither extent nor name")
    if any(extent < 0 for extent in shape):
        raise ModelError(f"input {info.name!r} has the shape {tuple(shape)}")
    return Value(info.name, dtype_of(info.type.tensor_type.elem_type, f"input {info.name!r}"), tuple(shape))
