"""Static shapes of the inputs of a model. All symbolic dimensions, including the batch, are bound
to sizes.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autopipe.ir.errors import ConfigurationError, ModelError
from autopipe.ir.graph import DType, Value
from autopipe.ir.kv_cache import MASK, TOKENS, is_cache_input
from autopipe.ir.words import plural
from autopipe.passes.frontend.elements import checked_shape, dtype_of
from autopipe.passes.frontend.size_expressions import size_of, solve_symbol, symbols_of

if TYPE_CHECKING:
    import onnx

_MAX_FIXED_ELEMENTS = 1 << 16
"""Maximum number of elements of an input that the option `model.inputs` fixes to a number."""
_EMPTY_BATCH_HINT = (
    "export with a batch of at least one sample, or say in model.batch_axes that axis 0 counts no "
    "samples"
)
Dimension = int | str
"""A size, or the symbol or expression that the file declares for a dimension. An unnamed dimension
has the symbol INPUT:AXIS.
"""
NAMELESS = frozenset({"", "?", "-1", "None", "none", "*"})
"""Symbols that exporters write for any unknown dimension, for example PaddlePaddle's `?`. Two
dimensions with such a symbol need not be equal.
"""
SEQUENCES = frozenset({"seq", "sequence", "sequence_length", "seq_len"})
"""Names with which a user can set axis 1 of every input with two dimensions, for example tokens and
masks. They only apply if the file has no dimension of that name.
"""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of a model that get data in each step, with static shapes."""

    values: tuple[Value, ...]
    batch_axes: tuple[tuple[str, int], ...]
    """(input, axis) for each input that has a batch axis."""
    symbols: dict[str, int]
    """Sizes of the symbols and expressions in the file's shapes."""
    batch: int | None
    """Number of samples of one forward pass; None if no input has a batch axis."""


def split_range_bounds(
    nodes: Iterable[onnx.NodeProto], dims: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Split the sizes `dims` that a user sets, and return (bounds, others).

    - bounds: maximum length of each Range result, by the name of the result. A user sets it by the
      entry RESULT:0 of `dims`, where RESULT is that name; the entry must be positive.
    - others: the other entries of `dims`.
    """
    ranges = {f"{node.output[0]}:0": node.output[0] for node in nodes if node.op_type == "Range"}
    bounds = {ranges[name]: size for name, size in dims.items() if name in ranges and size > 0}
    others = {name: size for name, size in dims.items() if name not in ranges or size <= 0}
    return bounds, others


def sizes_by_symbol(
    inputs: tuple[onnx.ValueInfoProto, ...],
    dims: Mapping[str, int],
    declared_axes: Mapping[str, int | None],
) -> dict[str, int]:
    """Return the sizes that a user sets, by the symbols of the file. A key of `dims` is a symbol,
    INPUT:AXIS, `batch`, or a name of `SEQUENCES`.

    `declared_axes` contains the batch axes that the user declares. Raises ConfigurationError for a
    key that names no symbolic dimension, for two different sizes of one dimension, and for a
    negative size.
    """
    shapes = {info.name: dimensions_of(info) for info in inputs}
    names: set[str] = set()
    for shape in shapes.values():
        for each in shape:
            if isinstance(each, str):
                names |= {each, *symbols_of(each)}
    found: dict[str, int] = {}
    for name, size in dims.items():
        if size < 0:
            raise ConfigurationError(
                f"--dim {name}={size} is negative, expected a size of at least 0"
            )
        for symbol in _find_symbols(name, shapes, names, declared_axes):
            if found.setdefault(symbol, size) != size:
                raise ConfigurationError(
                    f"--dim {name}={size} contradicts another --dim that sets {symbol!r} to "
                    f"{found[symbol]}"
                )
    return found


def _find_symbols(
    name: str,
    shapes: Mapping[str, list[Dimension]],
    names: set[str],
    declared_axes: Mapping[str, int | None],
) -> list[str]:
    """Return the symbols or expressions of the dimensions that the user means with the key `name`
    of `--dim`. `names` contains all symbols of the file. Raises ConfigurationError if there are
    none.
    """
    if name in names:
        return [name]
    input_name, colon, axis = name.rpartition(":")
    if colon and input_name in shapes:
        return [_dimension_at(name, axis, shapes[input_name], input_name)]
    named: list[Dimension] = []
    if name == "batch":
        for each, shape in shapes.items():
            batch_axis = declared_axes.get(each, 0)
            if batch_axis is not None and batch_axis < len(shape):
                named.append(shape[batch_axis])
    elif name in SEQUENCES:
        # The mask of a decoder with a KV cache covers the cache and the tokens, so its length is
        # not the sequence length.
        has_cache = any(map(is_cache_input, shapes))
        for each, shape in shapes.items():
            if len(shape) == 2 and not (has_cache and each == MASK):
                named.append(shape[1])
    found = {each for each in named if isinstance(each, str)}
    if not found:
        listed = ", ".join(map(repr, sorted(names)))
        raise ConfigurationError(
            f"--dim {name} names an unknown dimension",
            hint=f"use a symbolic dimension of the model: {listed}"
            if names
            else "omit --dim: all dimensions of the model's inputs are static",
        )
    return sorted(found)


def _dimension_at(name: str, axis: str, shape: list[Dimension], input_name: str) -> str:
    """Return the symbol of the dimension that the user names INPUT:AXIS. Raises ConfigurationError
    if the axis does not exist or has a fixed size.
    """
    if not axis.isdigit() or int(axis) >= len(shape):
        raise ConfigurationError(
            f"--dim {name} names axis {axis!r} of input {input_name!r}, which has {len(shape)} "
            f"{plural(len(shape), 'dimension')}"
        )
    dimension = shape[int(axis)]
    if isinstance(dimension, int):
        raise ConfigurationError(
            f"--dim {name} names a static dimension, which the model fixes to {dimension}"
        )
    return dimension


def bind_inputs(
    inputs: tuple[onnx.ValueInfoProto, ...],
    dims: Mapping[str, int],
    batch: int | None,
    declared_axes: Mapping[str, int | None],
    replaces_batch_of_one: bool = False,
) -> Inputs:
    """Return the inputs with all symbolic dimensions bound to sizes. The sizes are those in `dims`,
    `batch` for batch axes, and sizes that follow from these.

    The batch axis of an input is axis 0, unless `declared_axes` contains another axis, or None for
    an input without samples. If axis 0 is of size 1 in some inputs but not in all, these inputs are
    broadcast and lack a batch axis unless declared. A batch size that the file fixes also applies
    to symbolic batch axes. If `replaces_batch_of_one` is True, a fixed batch of one sample becomes
    `batch`.

    A dimension follows from other dimensions if it is an expression of them, if it is the only
    unknown of an expression whose value is bound, or if it is the length of a decoder's mask: cache
    plus tokens.

    Raises ConfigurationError that lists all unbound dimensions, and ModelError if inputs differ in
    batch size or the batch is empty.
    """
    symbols = dict(dims)
    shapes = {info.name: dimensions_of(info) for info in inputs}
    axes = _batch_axes(shapes, declared_axes, symbols)
    known = [_size(shapes[name][axis], symbols) for name, axis in axes.items()]
    if replaces_batch_of_one and batch and all(size in (1, None) for size in known):
        for name, axis in axes.items():
            if shapes[name][axis] == 1:
                shapes[name][axis] = batch
    known = [_size(shapes[name][axis], symbols) for name, axis in axes.items()]
    samples = max((size for size in known if size is not None), default=batch or 1)
    for name, axis in axes.items():
        dimension = shapes[name][axis]
        if isinstance(dimension, str) and symbols_of(dimension) == {dimension}:
            symbols.setdefault(dimension, samples)
    if not samples:
        listed = ", ".join(map(repr, axes))
        raise ModelError(
            f"the batch of the inputs {listed} has 0 samples, expected at least 1",
            hint=_EMPTY_BATCH_HINT,
        )
    _bind_derived(shapes, axes, symbols)
    _require_bound(shapes, symbols)
    values = tuple(_bound_value(info, shapes[info.name], symbols) for info in inputs)
    for value in values:
        if value.name in axes and value.shape[axes[value.name]] != samples:
            raise ModelError(
                f"input {value.name!r} has the batch size {value.shape[axes[value.name]]}, and "
                f"other inputs have the batch size {samples}",
                hint=(
                    f"set the batch axis with model.batch_axes: {{{value.name}: AXIS}}, or null "
                    "for an input without a batch axis"
                ),
            )
    return Inputs(values, tuple(axes.items()), symbols, samples if axes else None)


def has_fixed_batch(
    inputs: Iterable[onnx.ValueInfoProto], batch_axes: Iterable[tuple[str, int]]
) -> bool:
    """True if the file declares a fixed size for at least one of the batch axes, given as (input,
    axis).
    """
    shapes = {info.name: dimensions_of(info) for info in inputs}
    return any(isinstance(shapes[name][axis], int) for name, axis in batch_axes if name in shapes)


def filled_inputs(
    inputs: Mapping[str, onnx.ValueInfoProto], fixed: Mapping[str, bool | int | float]
) -> dict[str, np.ndarray]:
    """Return for each input in `fixed` an array whose elements all equal the number in `fixed`.
    Symbolic dimensions are of size 1.

    Raises ConfigurationError for a name that is not an input, for bfloat16, and for more than
    `_MAX_FIXED_ELEMENTS` elements.
    """
    found = {}
    for name, number in fixed.items():
        if name not in inputs:
            hint = f"use a name of: {', '.join(map(repr, inputs))}"
            raise ConfigurationError(
                f"model.inputs names {name!r}, which is not an input of the model", hint=hint
            )
        shape = tuple(each if isinstance(each, int) else 1 for each in dimensions_of(inputs[name]))
        dtype = dtype_of(inputs[name].type.tensor_type.elem_type, f"input {name!r}")
        if math.prod(shape) > _MAX_FIXED_ELEMENTS or dtype is DType.BFLOAT16:
            raise ConfigurationError(
                f"model.inputs sets {name!r}, which is {dtype}{list(shape)}: only inputs of at "
                f"most {_MAX_FIXED_ELEMENTS} elements and of another type than bfloat16 can be "
                "set"
            )
        found[name] = np.full(shape, number).astype(dtype.value)
    return found


def _bind_derived(
    shapes: Mapping[str, list[Dimension]], axes: Mapping[str, int], symbols: dict[str, int]
) -> None:
    """Add to `symbols` the sizes of dimensions that follow from the sizes it has: expressions of
    bound symbols, the only unknown symbol of an expression whose size is bound, and the length of a
    decoder's mask, which is cache plus tokens.
    """
    named = {each for shape in shapes.values() for each in shape if isinstance(each, str)}
    while True:
        before = len(symbols)
        for name in sorted(named):
            size = size_of(name, symbols)
            if size is not None:
                symbols |= {name: size} | solve_symbol(name, size, symbols)
        if len(symbols) == before:
            break
    tokens = shapes.get(TOKENS, [])
    mask = shapes.get(MASK, [])
    if len(tokens) != 2 or len(mask) != 2 or not isinstance(mask[1], str) or mask[1] in symbols:
        return
    cache_lengths = {
        symbols.get(each)
        for name, shape in shapes.items()
        for axis, each in enumerate(shape)
        if is_cache_input(name) and isinstance(each, str) and axis != axes.get(name)
    }
    lengths = [_size(tokens[1], symbols), *cache_lengths]
    known = [length for length in lengths if length is not None]
    if len(known) == len(lengths) == 2:
        symbols[mask[1]] = sum(known)


def _require_bound(shapes: Mapping[str, list[Dimension]], symbols: Mapping[str, int]) -> None:
    """Raise ConfigurationError if dimensions are unbound. The error lists them, and its hint has
    the flags that bind them.
    """
    titles: dict[str, str] = {}
    for name, shape in shapes.items():
        for axis, each in enumerate(shape):
            if isinstance(each, str) and _size(each, symbols) is None:
                titles.setdefault(each, f"{each!r} (axis {axis} of input {name!r})")
    unknown = {each: symbols_of(each) - symbols.keys() for each in titles}
    # An expression of symbols, such as "a + b", is omitted if all of its unbound symbols are listed
    # themselves, because the expression follows from these symbols.
    listed = [
        title
        for each, title in titles.items()
        if unknown[each] in ({each}, set()) or unknown[each] - unknown.keys()
    ]
    if not listed:
        return
    required = sorted({symbol for each in unknown.values() for symbol in each} or titles.keys())
    flags = " ".join(f"--dim {shlex.quote(each + '=SIZE')}" for each in required)
    hint = f"add {flags}"
    batch_flags = " ".join(
        f"--batch-axis {shlex.quote(each)}" for each in _possible_batch_axes(shapes, symbols)
    )
    if batch_flags:
        hint += f", or {batch_flags} if that axis is the batch axis"
    dimensions = plural(len(listed), "dimension")
    verb = "are" if len(listed) > 1 else "is"
    raise ConfigurationError(
        f"{dimensions} {', '.join(listed)} {verb} symbolic and must be set to a size", hint=hint
    )


def _possible_batch_axes(
    shapes: Mapping[str, list[Dimension]], symbols: Mapping[str, int]
) -> list[str]:
    """Return `INPUT=AXIS` for each input whose axis 0 is fixed and that has exactly one unbound
    axis, which may be the batch axis. Examples are states of recurrent layers, and sequences whose
    axis 0 counts positions.
    """
    found = []
    for name, shape in shapes.items():
        unbound = [
            axis
            for axis, each in enumerate(shape)
            if isinstance(each, str) and _size(each, symbols) is None
        ]
        if len(unbound) == 1 and unbound != [0] and not isinstance(shape[0], str):
            found.append(f"{name}={unbound[0]}")
    return found


def dimensions_of(info: onnx.ValueInfoProto) -> list[Dimension]:
    """Return the dimensions that the file declares for an input. A dimension of size -1 or with a
    name of `NAMELESS` is called INPUT:AXIS. Raises ModelError if the input is no tensor or declares
    no shape.
    """
    where = f"input {info.name!r}"
    if not info.type.HasField("tensor_type"):
        kinds = {"sequence_type": "a sequence", "optional_type": "an Optional", "map_type": "a map"}
        fields = (kind for field, kind in kinds.items() if info.type.HasField(field))
        kind = next(fields, "of no known type")
        hint = "make each contained tensor a separate input of the model"
        raise ModelError(f"the input is {kind}, expected a tensor", hint, where)
    if not info.type.tensor_type.HasField("shape"):
        raise ModelError(
            "the input declares no shape, so its number of dimensions is unknown", where=where
        )
    dimensions = info.type.tensor_type.shape.dim
    checked_shape([max(each.dim_value, 0) for each in dimensions], where)
    found: list[Dimension] = []
    for axis, each in enumerate(dimensions):
        if each.HasField("dim_value") and each.dim_value >= 0:
            found.append(each.dim_value)
        elif each.dim_param in NAMELESS:
            found.append(f"{info.name}:{axis}")
        else:
            found.append(each.dim_param)
    return found


def _batch_axes(
    shapes: Mapping[str, list[Dimension]],
    declared_axes: Mapping[str, int | None],
    symbols: Mapping[str, int],
) -> dict[str, int]:
    """Return the batch axis of each input that has one. It is axis 0, unless `declared_axes`
    contains another axis or None. If the axis has size 1 in some inputs but not in all, these
    inputs are omitted unless declared. Raises ConfigurationError if `declared_axes` names an input
    or axis that does not exist.
    """
    unknown = sorted(set(declared_axes) - shapes.keys())
    if unknown:
        raise ConfigurationError(
            f"model.batch_axes names {unknown[0]!r}, which is not an input of the model",
            hint=f"use a name of: {', '.join(map(repr, shapes))}",
        )
    axes: dict[str, int] = {}
    for name, dimensions in shapes.items():
        rank = len(dimensions)
        axis = declared_axes.get(name, 0 if rank else None)
        if axis is None:
            continue
        if not -rank <= axis < rank:
            raise ConfigurationError(
                f"model.batch_axes sets axis {axis} for input {name!r}, which has {rank} "
                f"{plural(rank, 'dimension')}"
            )
        axes[name] = axis % rank
    sizes = {name: _size(shapes[name][axis], symbols) for name, axis in axes.items()}
    if all(size == 1 for size in sizes.values()):
        return axes
    return {name: axis for name, axis in axes.items() if sizes[name] != 1 or name in declared_axes}


def _size(dimension: Dimension, symbols: Mapping[str, int]) -> int | None:
    """Return the size of a dimension; None if a symbol in it is unbound."""
    return dimension if isinstance(dimension, int) else size_of(dimension, symbols)


def _bound_value(
    info: onnx.ValueInfoProto, dimensions: list[Dimension], symbols: Mapping[str, int]
) -> Value:
    """Return the type of an input whose dimensions are all bound. Raises ModelError for a negative
    size.
    """
    sizes = [_size(each, symbols) for each in dimensions]
    shape = tuple(size for size in sizes if size is not None)
    if any(size < 0 for size in shape):
        raise ModelError(
            f"input {info.name!r} has the shape {list(shape)}, expected sizes of at least 0"
        )
    dtype = dtype_of(info.type.tensor_type.elem_type, f"input {info.name!r}")
    return Value(info.name, dtype, shape)
