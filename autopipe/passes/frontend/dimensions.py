"""Static shapes of a model's inputs: symbolic dimensions bound by name, and the batch.

How much computing the constants of a file may take: a few bytes can spell a pooling window of 10⁹ elements.

What would take more is not computed while compiling: it stays a node of the graph.

Operators whose numbers one line of numpy tells, as ONNX's own evaluator does: masks, positions, angles.

To load that evaluator is to load every operator there is, which takes longer than to read most models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from autopipe.ir.errors import ConfigurationError, ModelError
from autopipe.ir.graph import Value
from autopipe.passes.frontend.elements import MOST_DIMENSIONS, dtype_of, shape_of

if TYPE_CHECKING:
    import onnx


def _unsqueezed(data: np.ndarray, axes: np.ndarray) -> np.ndarray:
    return np.expand_dims(data, axis=tuple(axes.tolist()))


def _range(start: np.ndarray, end: np.ndarray, step: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.arange(start.item(), end.item(), step.item()).astype(start.dtype)
    return found


def _chosen(condition: np.ndarray, shown: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    return np.where(condition, shown, hidden).astype(shown.dtype, copy=False)


FORMULAS: dict[str, tuple[Callable[..., Any], tuple[str, ...], int]] = {
    "Add": (np.add, ("iuf", "iuf"), 0),
    "Less": (np.less, ("iuf", "iuf"), 0),
    "Mul": (np.multiply, ("iuf", "iuf"), 0),
    "Range": (_range, ("iuf", "iuf", "iuf"), 0),
    "Sub": (np.subtract, ("iuf", "iuf"), 0),
    "Unsqueeze": (_unsqueezed, ("biuf", "i"), 1),
    "Where": (_chosen, ("b", "biuf", "biuf"), 1),
}
"""By operator without attributes: what computes it, the kinds of its operands' types (numpy's own), and from which
operand on types are one."""


def told_by_formula(node: onnx.NodeProto, operands: Sequence[np.ndarray | None]) -> tuple[np.ndarray] | None:
    """The numbers of the result; None where there is no formula for such a node, or none for such numbers."""
    if node.op_type not in FORMULAS or node.domain not in ("", "ai.onnx") or node.attribute:
        return None
    formula, kinds, alike = FORMULAS[node.op_type]
    types = [each.dtype for each in operands if each is not None]
    if len(operands) != len(kinds) or len(types) != len(kinds) or len(set(types[alike:])) > 1:
        return None
    if not all(each.kind in kind for each, kind in zip(types, kinds, strict=True)):
        return None
    try:
        return (np.asarray(formula(*operands)),)
    except (ArithmeticError, ValueError, TypeError, MemoryError):
        return None


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
    unbound dimensions and for names that do not occur, ModelError where inputs disagree.
    """
    symbols = _checked(dims)
    axes = _batch_axes(inputs, stated_axes, symbols)
    own = _own_batch(inputs, axes, symbols)
    size = own if own is not None else (batch or 1)
    for info in inputs:
        axis = axes.get(info.name)
        if axis is not None:
            dimension = _dimensions(info)[axis]
            if not dimension.HasField("dim_value") and dimension.dim_param:
                symbols.setdefault(dimension.dim_param, size)
    values = tuple(_bound(info, axes.get(info.name), size, symbols) for info in inputs)
    _require_used(dims, inputs)
    for value in values:
        if value.name in axes and value.shape[axes[value.name]] != size:
            raise ModelError(
                f"input {value.name!r} has {value.shape[axes[value.name]]} where others have {size} samples",
                hint=f"say which axis counts samples: model.batch_axes: {{{value.name}: null}} if none does",
            )
    return Inputs(values, tuple(axes.items()), symbols, size if axes else None)


def _checked(dims: Mapping[str, int]) -> dict[str, int]:
    for name, extent in dims.items():
        if extent <= 0:
            raise ConfigurationError(f"--dim {name}={extent}: an extent is at least 1")
    return dict(dims)


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
    inputs: tuple[onnx.ValueInfoProto, ...], stated: Mapping[str, int | None], symbols: Mapping[str, int]
) -> dict[str, int]:
    unknown = sorted(set(stated) - {info.name for info in inputs})
    if unknown:
        raise ConfigurationError(
            f"model.batch_axes names {unknown[0]!r}, which is no input",
            hint=f"the inputs are {', '.join(repr(info.name) for info in inputs)}",
        )
    axes: dict[str, int] = {}
    for info in inputs:
        rank = len(_dimensions(info))
        axis = stated.get(info.name, 0 if rank else None)
        if axis is None:
            continue
        if not -rank <= axis < rank:
            raise ConfigurationError(f"model.batch_axes: {info.name!r} has {rank} dimensions, no axis {axis}")
        axes[info.name] = axis % rank
    extents = {info.name: _extent(_dimensions(info)[axes[info.name]], symbols) for info in inputs if info.name in axes}
    if any(extent != 1 for extent in extents.values()):
        return {name: axis for name, axis in axes.items() if extents[name] != 1 or name in stated}
    return axes


def _extent(dimension: onnx.TensorShapeProto.Dimension, symbols: Mapping[str, int]) -> int | None:
    return dimension.dim_value if dimension.HasField("dim_value") else symbols.get(dimension.dim_param)


def _own_batch(
    inputs: tuple[onnx.ValueInfoProto, ...], axes: Mapping[str, int], symbols: Mapping[str, int]
) -> int | None:
    """The largest extent that the file, or a bound symbol, fixes for a batch axis."""
    extents = [_extent(_dimensions(info)[axes[info.name]], symbols) for info in inputs if info.name in axes]
    return max((extent for extent in extents if extent is not None), default=None)


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


def _require_used(dims: Mapping[str, int], inputs: tuple[onnx.ValueInfoProto, ...]) -> None:
    symbols = sorted({dimension.dim_param for info in inputs for dimension in _dimensions(info) if dimension.dim_param})
    for name in dims:
        if name not in symbols:
            known = f"its symbolic dimensions are {', '.join(map(repr, symbols))}" if symbols else "it has none"
            raise ConfigurationError(f"--dim {name}: the model has no such dimension", hint=known)


MOST_OPERATIONS = 1 << 31
"""Operations for all constants of a graph together: ten masks of 8,192 by 8,192, or a few seconds."""

LOOP = 256
"""Operations that one round of a loop in Python counts as."""

_WHOLE_ARRAYS = """
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor
    Cast CastLike Ceil Clip Compress Concat ConstantOfShape Cos Cosh CumSum DepthToSpace DequantizeLinear Div Equal Exp
    Expand EyeLike Flatten Floor Gather Greater GreaterOrEqual Identity IsInf IsNaN Less LessOrEqual Log LogSoftmax Max
    Mean Min Mod Mul Neg NonZero Not OneHot Or Pow QuantizeLinear Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum
    ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Round Shape Sigmoid
    Sign Sin Sinh Size Slice Softmax SpaceToDepth Split Sqrt Squeeze Sub Sum Tan Tanh Tile TopK Transpose Trilu Unique
    Unsqueeze Where Xor
"""
_LINEAR = frozenset(_WHOLE_ARRAYS.split())
"""Operators that numpy computes with a few operations for each element that they read or write."""
_LOOPED = frozenset({"Erf", "GatherElements", "GatherND", "Gelu", "ReverseSequence", "ScatterElements", "ScatterND"})
"""Operators that ONNX's evaluator computes in a loop over elements."""
_GROWING = frozenset({"ConstantOfShape", "Expand", "EyeLike", "OneHot", "Range", "Tile"})
"""Operators of which a few numbers tell how much they write."""


@dataclass(slots=True)
class Budget:
    """Rest of the operations or bytes that computing the constants of a graph may take."""

    left: int

    def takes(self, amount: int) -> bool:
        """Take `amount` from what is left, if there is as much."""
        if amount > self.left:
            return False
        self.left -= amount
        return True


def operations_of(node: onnx.NodeProto, operands: Sequence[np.ndarray | None], results: Sequence[Value | None]) -> int:
    """At most what it takes to compute a node: near for operators that tell shapes or make masks, far for others."""
    read = sum(array.size for array in operands if array is not None)
    written = 0
    for name, value in zip(node.output, results, strict=False):
        if value is not None:
            written += value.elements
        elif name:
            written += read if node.op_type not in _GROWING else _grown(node.op_type, operands)
    first, second = (*operands, None, None)[:2]
    if node.op_type in _LINEAR:
        return read + written
    if node.op_type in _LOOPED:
        return (read + written) * LOOP
    if node.op_type in ("MatMul", "Gemm") and first is not None:
        return read + written * max(first.shape, default=1)
    if node.op_type == "Einsum":
        return written + math.prod(array.size for array in operands if array is not None)
    if node.op_type == "Pad" and second is not None and (second >= 0).all():
        return read + written
    # No more than each number of the attributes (windows, paddings) times what is read times what is written.
    sizes: list[int] = [abs(number) for each in node.attribute for number in (*each.ints, each.i)]
    return (1 + read) * (1 + written) * math.prod(1 + size for size in sizes) * LOOP


def _grown(operator: str, operands: Sequence[np.ndarray | None]) -> int:
    """At most the elements of what an operator writes, by the numbers that it reads."""
    arrays = [array for array in operands if array is not None and array.dtype.kind in "iuf"]
    numbers: list[float] = [
        number for array in arrays if array.size <= MOST_DIMENSIONS for number in array.reshape(-1).tolist()
    ]
    if not all(map(math.isfinite, numbers)):
        return MOST_OPERATIONS
    if operator == "Range" and len(numbers) == 3:
        start, end, step = numbers
        return min(math.ceil(abs((end - start) / step)), MOST_OPERATIONS) if step else 0
    return math.prod(array.size for array in arrays) * math.prod(1 + math.ceil(abs(number)) for number in numbers)
