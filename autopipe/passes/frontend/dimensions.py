"""Static shapes of a model's inputs: symbolic dimensions bound by name, and the batch.

Extents may be arithmetic over symbols, such as `2*frames` or `floor(s0/2) + 1`, as sympy prints
what exporters derive.
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
from autopipe.passes.frontend.elements import dtype_of, shape_of

if TYPE_CHECKING:
    import onnx


import ast
import operator
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

LONGEST = 500
"""Characters of an expression that are looked at."""
LARGEST = 1 << 62
"""Beyond this a number is no extent, and computing with it goes no further."""


def _power(base: Fraction, power: Fraction) -> Fraction:
    if power.denominator != 1 or not 0 <= power <= 64 or abs(base) > LARGEST:
        raise ValueError("no power of whole numbers")
    return Fraction(base ** int(power))


_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_CALLS: dict[str, Callable[..., Fraction]] = {
    "floor": lambda number: Fraction(math.floor(number)),
    "ceil": lambda number: Fraction(math.ceil(number)),
    "ceiling": lambda number: Fraction(math.ceil(number)),
    "max": max,
    "min": min,
    "mod": operator.mod,
    "floordiv": lambda left, right: Fraction(left // right),
    "cleandiv": operator.truediv,
}
"""By their names in small letters."""


@lru_cache(maxsize=4096)
def _parsed(text: str) -> ast.expr | None:
    """The tree of an expression; None for text that is none, such as a name with blanks in it."""
    if len(text) > LONGEST:
        return None
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def symbols_of(text: str) -> frozenset[str]:
    """The symbols of an expression, a symbol's own name among them."""
    tree = _parsed(text)
    return frozenset(
        {text} if tree is None or isinstance(tree, ast.Name | ast.Attribute) else _names(tree)
    )


def _names(tree: ast.expr) -> Iterable[str]:
    match tree:
        case ast.Name(id=name):
            yield name
        case ast.Attribute():
            yield ast.unparse(tree)
        case ast.BinOp(left=left, right=right):
            yield from (*_names(left), *_names(right))
        case ast.UnaryOp(operand=operand):
            yield from _names(operand)
        case ast.Call(args=arguments):
            for each in arguments:
                yield from _names(each)


def extent_of(text: str, symbols: Mapping[str, int]) -> int | None:
    """The extent that an expression comes to; None where a symbol is not bound or it comes to no
    whole number.
    """
    if text in symbols:
        return symbols[text]
    found = _value(text, symbols)
    return int(found) if found is not None and found.denominator == 1 else None


def _value(text: str, symbols: Mapping[str, int | Fraction]) -> Fraction | None:
    tree = _parsed(text)
    try:
        return None if tree is None else _computed(tree, symbols)
    except (ArithmeticError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _computed(tree: ast.expr, symbols: Mapping[str, int | Fraction]) -> Fraction:
    match tree:
        case ast.Constant(value=int() as number):
            found = Fraction(number)
        case ast.Name() | ast.Attribute():
            found = Fraction(symbols[ast.unparse(tree)])
        case ast.BinOp(left=left, op=kind, right=right):
            found = _BINARY[type(kind)](_computed(left, symbols), _computed(right, symbols))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            found = -_computed(operand, symbols)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            found = _CALLS[name.lower()](*(_computed(each, symbols) for each in arguments))
        case _:
            raise ValueError("not arithmetic")
    if abs(found) > LARGEST:
        raise ValueError("too large")
    return found


def solved(text: str, extent: int, symbols: Mapping[str, int]) -> dict[str, int]:
    """The one symbol of an expression that is not bound, where the expression is `extent` at one
    whole number of it.

    Only expressions that are linear in it are solved.
    """
    open_symbols = sorted(symbols_of(text) - symbols.keys())
    if len(open_symbols) != 1 or open_symbols == [text]:
        return {}
    name = open_symbols[0]
    at = [_value(text, {**symbols, name: number}) for number in (0, 1, 7)]
    if (
        at[0] is None
        or at[1] is None
        or at[2] is None
        or at[1] == at[0]
        or at[2] - at[0] != 7 * (at[1] - at[0])
    ):
        return {}
    number = (extent - at[0]) / (at[1] - at[0])
    return {name: int(number)} if number.denominator == 1 and number >= 0 else {}


MOST_FIXED = 1 << 16
"""Elements of an input that is always the same number."""


_NO_SAMPLES = (
    "export with a batch of at least one sample, or say in model.batch_axes that axis 0 counts no "
    "samples"
)

Dimension = int | str
"""An extent, or the name of one: the file's own, or INPUT:AXIS where the file has none."""
NAMELESS = frozenset({"", "?", "-1", "None", "none", "*"})
"""Names of unknown dimensions that exporters use again and again, such as PaddlePaddle's `?`: none
is equal to another.
"""
SEQUENCES = frozenset({"seq", "sequence", "sequence_length", "seq_len"})
"""Names that mean the second axis of whole-number inputs, such as tokens and masks, in files
without such a name.
"""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The data inputs with static shapes, which of their axes count samples, and the extent of
    every symbol.
    """

    values: tuple[Value, ...]
    batch_axes: tuple[tuple[str, int], ...]
    symbols: dict[str, int]
    batch: int | None
    """Samples of one evaluation as bound here; None where no input carries samples."""


def bounds_of(
    nodes: Iterable[onnx.NodeProto], dims: Mapping[str, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Of extents that a user gives those of results of Range, by their names, and the others."""
    ranges = {f"{node.output[0]}:0": node.output[0] for node in nodes if node.op_type == "Range"}
    own = {name for name, extent in dims.items() if name in ranges and extent > 0}
    return {ranges[name]: dims[name] for name in own}, {
        name: dims[name] for name in dims if name not in own
    }


def by_symbol(
    inputs: tuple[onnx.ValueInfoProto, ...],
    dims: Mapping[str, int],
    stated_axes: Mapping[str, int | None],
) -> dict[str, int]:
    """Extents by the file's own names for those that a user gives by name, by INPUT:AXIS, or as
    `batch` and `seq`.

    Raises ConfigurationError for what names no dimension, for one bound twice, and for an extent
    below 0.
    """
    shapes = {info.name: dimensions_of(info) for info in inputs}
    symbols = {
        name
        for shape in shapes.values()
        for each in shape
        if isinstance(each, str)
        for name in _known_by(each)
    }
    found: dict[str, int] = {}
    for name, extent in dims.items():
        if extent < 0:
            raise ConfigurationError(f"--dim {name}={extent}: an extent is at least 0")
        for symbol in _meant(name, shapes, symbols, stated_axes):
            if found.setdefault(symbol, extent) != extent:
                raise ConfigurationError(
                    f"--dim {name}={extent}: dimension {symbol!r} is {found[symbol]} already"
                )
    return found


def _known_by(dimension: str) -> set[str]:
    return {dimension, *symbols_of(dimension)}


def _meant(
    name: str,
    shapes: Mapping[str, list[Dimension]],
    symbols: set[str],
    stated_axes: Mapping[str, int | None],
) -> list[str]:
    """The symbols that a name stands for."""
    if name in symbols:
        return [name]
    value, colon, axis = name.rpartition(":")
    if colon and value in shapes:
        if not axis.isdigit() or int(axis) >= len(shapes[value]):
            raise ConfigurationError(
                f"--dim {name}: {value!r} has {len(shapes[value])} "
                f"{plural(len(shapes[value]), 'dimension')}"
            )
        dimension = shapes[value][int(axis)]
        if isinstance(dimension, int):
            raise ConfigurationError(f"--dim {name}: the file fixes it to {dimension}")
        return [dimension]
    if name == "batch":
        axes = {each: stated_axes.get(each, 0) for each in shapes}
        named = [
            shapes[each][axis]
            for each, axis in axes.items()
            if axis is not None and axis < len(shapes[each])
        ]
        meant = {each for each in named if isinstance(each, str)}
    elif name in SEQUENCES:
        cached = any(map(is_cache_input, shapes))  # Then a mask covers the cache, too.
        named = [
            shape[1]
            for each, shape in shapes.items()
            if len(shape) == 2 and not (cached and each == MASK)
        ]
        meant = {each for each in named if isinstance(each, str)}
    else:
        meant = set()
    if not meant:
        told = (
            f"its symbolic dimensions are {', '.join(map(repr, sorted(symbols)))}"
            if symbols
            else "it has none"
        )
        raise ConfigurationError(f"--dim {name}: the model has no such dimension", hint=told)
    return sorted(meant)


def bind_inputs(
    inputs: tuple[onnx.ValueInfoProto, ...],
    dims: Mapping[str, int],
    batch: int | None,
    stated_axes: Mapping[str, int | None],
    opened: bool = False,
) -> Inputs:
    """Bind symbolic dimensions by `dims`, and those that count samples to `batch` where `dims` does
    not.

    The batch axis is axis 0 unless `stated_axes` says otherwise (None: the input carries no
    samples); an input whose axis 0 has extent one where another's has not is broadcast and carries
    none. Where an exporter fixed the batch, its extent there is the graph's own batch and holds for
    symbolic batch axes too; with `opened` a batch of one sample counts as not fixed. Raises
    ConfigurationError for unbound dimensions, all at once, ModelError where inputs disagree. A
    dimension that follows from others is bound by them: an expression over them, what an expression
    that is bound leaves open, and the length of a decoder's mask, that of its cache and its tokens.
    """
    symbols = dict(dims)
    shapes = {info.name: dimensions_of(info) for info in inputs}
    axes = _batch_axes(shapes, stated_axes, symbols)
    if (
        opened
        and batch
        and all(_extent(shapes[name][axis], symbols) in (1, None) for name, axis in axes.items())
    ):
        for name, axis in axes.items():
            if shapes[name][axis] == 1:
                shapes[name][axis] = batch
    fixed = (_extent(shapes[name][axis], symbols) for name, axis in axes.items())
    size = max((extent for extent in fixed if extent is not None), default=batch or 1)
    for name, axis in axes.items():
        dimension = shapes[name][axis]
        if isinstance(dimension, str) and symbols_of(dimension) == {dimension}:
            symbols.setdefault(dimension, size)
    if not size:
        named = ", ".join(repr(name) for name in axes)
        raise ModelError(f"its inputs have a batch of 0 samples: {named}", hint=_NO_SAMPLES)
    _bind_others(shapes, axes, symbols)
    _require_bound(shapes, symbols)
    values = tuple(_bound(info, shapes[info.name], symbols) for info in inputs)
    for value in values:
        if value.name in axes and value.shape[axes[value.name]] != size:
            raise ModelError(
                f"input {value.name!r} has {value.shape[axes[value.name]]} "
                f"where others have {size} {plural(size, 'sample')}",
                hint=(
                    f"say which axis counts samples: model.batch_axes: {{{value.name}: null}} if "
                    "none does"
                ),
            )
    return Inputs(values, tuple(axes.items()), symbols, size if axes else None)


def fixes_samples(
    inputs: Iterable[onnx.ValueInfoProto], batch_axes: Iterable[tuple[str, int]]
) -> bool:
    """Return True if a file states a number of samples for one of its inputs."""
    shapes = {info.name: dimensions_of(info) for info in inputs}
    return any(isinstance(shapes[name][axis], int) for name, axis in batch_axes if name in shapes)


def fixed_numbers(
    inputs: Mapping[str, onnx.ValueInfoProto], fixed: Mapping[str, bool | int | float]
) -> dict[str, np.ndarray]:
    """Inputs full of one number each; what is symbolic of their shapes is one. Raises
    ConfigurationError for others.
    """
    found = {}
    for name, number in fixed.items():
        if name not in inputs:
            hint = f"the inputs are {', '.join(map(repr, inputs))}"
            raise ConfigurationError(f"model.inputs names {name!r}, which is no input", hint=hint)
        shape = tuple(each if isinstance(each, int) else 1 for each in dimensions_of(inputs[name]))
        kind = dtype_of(inputs[name].type.tensor_type.elem_type, f"input {name!r}")
        if math.prod(shape) > MOST_FIXED or kind is DType.BFLOAT16:
            raise ConfigurationError(
                f"model.inputs: {name!r} is {kind}{list(shape)}, not a few numbers"
            )
        found[name] = np.full(shape, number).astype(kind.value)
    return found


def _bind_others(
    shapes: Mapping[str, list[Dimension]], axes: Mapping[str, int], symbols: dict[str, int]
) -> None:
    """Bind symbols that follow from those that are bound."""
    named = {each for shape in shapes.values() for each in shape if isinstance(each, str)}
    while True:
        before = len(symbols)
        for name in sorted(named):
            extent = extent_of(name, symbols)
            if extent is not None:
                symbols |= {name: extent} | solved(name, extent, symbols)
        if len(symbols) == before:
            break
    tokens = shapes.get(TOKENS, [])
    mask = shapes.get(MASK, [])
    if len(tokens) != 2 or len(mask) != 2 or not isinstance(mask[1], str) or mask[1] in symbols:
        return
    cached = {
        symbols.get(each)
        for name, shape in shapes.items()
        for axis, each in enumerate(shape)
        if is_cache_input(name) and isinstance(each, str) and axis != axes.get(name)
    }
    lengths = [_extent(tokens[1], symbols), *cached]
    found = [length for length in lengths if length is not None]
    if len(found) == len(lengths) == 2:
        symbols[mask[1]] = sum(found)


def _require_bound(shapes: Mapping[str, list[Dimension]], symbols: Mapping[str, int]) -> None:
    """Raise ConfigurationError, naming them all with the flags to add, for dimensions that nothing
    binds.
    """
    places: dict[str, str] = {}
    for name, shape in shapes.items():
        for axis, each in enumerate(shape):
            if isinstance(each, str) and _extent(each, symbols) is None:
                places.setdefault(each, f"{each!r} (axis {axis} of input {name!r})")
    opened = {each: symbols_of(each) - symbols.keys() for each in places}
    # An expression over symbols that are told themselves follows from them.
    told = [
        place
        for each, place in places.items()
        if opened[each] in ({each}, set()) or opened[each] - opened.keys()
    ]
    if told:
        needed = sorted({symbol for each in opened.values() for symbol in each} or places.keys())
        flags = " ".join(f"--dim {shlex.quote(each + '=EXTENT')}" for each in needed)
        plural, verb = ("s", "are") if len(told) > 1 else ("", "is")
        hint = f"add {flags}"
        if elsewhere := " ".join(
            f"--batch-axis {shlex.quote(each)}" for each in _samples_elsewhere(shapes, symbols)
        ):
            hint += f", or {elsewhere} if that axis counts samples"
        raise ConfigurationError(f"dimension{plural} {', '.join(told)} {verb} symbolic", hint=hint)


def _samples_elsewhere(
    shapes: Mapping[str, list[Dimension]], symbols: Mapping[str, int]
) -> list[str]:
    """Return `INPUT=AXIS` for each input whose first axis is fixed and one other axis is not:
    recurrent states and sequences before samples.
    """
    found = []
    for name, shape in shapes.items():
        free = [
            axis
            for axis, each in enumerate(shape)
            if isinstance(each, str) and _extent(each, symbols) is None
        ]
        if len(free) == 1 and free != [0] and not isinstance(shape[0], str):
            found.append(f"{name}={free[0]}")
    return found


def dimensions_of(info: onnx.ValueInfoProto) -> list[Dimension]:
    """The dimensions of an input; what files write as -1 or by a name of `NAMELESS` is called
    INPUT:AXIS. Raises ModelError where there are none.
    """
    where = f"input {info.name!r}"
    if not info.type.HasField("tensor_type"):
        kinds = {"sequence_type": "a sequence", "optional_type": "an Optional", "map_type": "a map"}
        held = next(
            (kind for field, kind in kinds.items() if info.type.HasField(field)), "of no known type"
        )
        hint = "make each tensor that it holds an input of its own"
        raise ModelError(f"it is {held}, and only tensors are supported as inputs", hint, where)
    if not info.type.tensor_type.HasField("shape"):
        raise ModelError("its number of dimensions is unknown", where=where)
    dimensions = info.type.tensor_type.shape.dim
    shape_of([max(each.dim_value, 0) for each in dimensions], where)
    return [
        each.dim_value
        if each.HasField("dim_value") and each.dim_value >= 0
        else f"{info.name}:{axis}"
        if each.dim_param in NAMELESS
        else each.dim_param
        for axis, each in enumerate(dimensions)
    ]


def _batch_axes(
    shapes: Mapping[str, list[Dimension]],
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
            raise ConfigurationError(
                f"model.batch_axes: {name!r} has {rank} {plural(rank, 'dimension')}, no axis {axis}"
            )
        axes[name] = axis % rank
    extents = {name: _extent(shapes[name][axis], symbols) for name, axis in axes.items()}
    if any(extent != 1 for extent in extents.values()):
        return {name: axis for name, axis in axes.items() if extents[name] != 1 or name in stated}
    return axes


def _extent(dimension: Dimension, symbols: Mapping[str, int]) -> int | None:
    return dimension if isinstance(dimension, int) else extent_of(dimension, symbols)


def _bound(
    info: onnx.ValueInfoProto, dimensions: list[Dimension], symbols: Mapping[str, int]
) -> Value:
    shape = tuple(extent for each in dimensions if (extent := _extent(each, symbols)) is not None)
    if any(extent < 0 for extent in shape):
        raise ModelError(f"input {info.name!r} has the shape {shape}")
    return Value(
        info.name, dtype_of(info.type.tensor_type.elem_type, f"input {info.name!r}"), shape
    )
