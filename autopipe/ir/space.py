"""Iteration spaces: the axes that an operator iterates over, and the axes that index each dimension
of its tensors.

One line of notation describes the iteration space of a node. For instance, a batched matmul::

    b m k, k n -> b m n

Grammar::

    notation  = operands "->" results           either may be empty
    operands, results = tensor {"," tensor}
    tensor    = {dimension}                     a scalar is empty; "?" is an absent operand
    dimension = axis | "1" | "(" axis {axis} ")" | "[" axis stride offset reach "]"
    axis      = letter {letter | digit | "_"} [mark]

`1` is a dimension that no axis indexes. It has size 1 where it is broadcast, or a size that the
operator determines.

`(a b)` is a dimension that merges several axes, outer to inner (row-major).

`[o 2 -1 3]` is a dimension of an operand that is read through windows (convolution, pooling): index
o reads the three elements from 2 · o - 1 on. Elements outside of the tensor have a fill value.

An axis is marked at its first occurrence. The mark says how the operator behaves if the axis is
split over devices:

    !   unsplittable: the operator cannot be split along this axis (yet)
    +   results without the axis are partial sums, as for k of MatMul, or ReduceSum
    ~   results without the axis are partial means of equal weight, as for ReduceMean
    &   joint: the operator gets its coordinate along the axis, and exchanges statistics with the
        other devices if it needs them; results without the axis are partial sums, as for the
        classes of Softmax, or the rows of an embedding table
    =   agreed: like &, but results without the axis are equal on all devices, as for the
        statistics of a normalisation

An axis without a mark is parallel if it is in every result, and unsplittable otherwise.
"""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass

from autopipe.ir.errors import ModelError
from autopipe.ir.words import plural

Dimension = tuple[str, ...]
"""Names of the axes that index a dimension of a tensor, from the outermost to the innermost; () if
no axis indexes it.
"""


class AxisKind(enum.Enum):
    """How an operator behaves if an axis is split over devices. The module docstring defines each
    kind by its mark.

    An axis of kind PARALLEL has no mark. It indexes each result, so devices compute independent
    shards.
    """

    PARALLEL = "parallel"
    UNSPLITTABLE = "unsplittable"
    SUM = "sum"
    MEAN = "mean"
    JOINT = "joint"
    AGREED = "agreed"

    @property
    def is_joint(self) -> bool:
        """True if the implementation of the operator gets its coordinate along the axis, and may
        communicate along it.
        """
        return self in (AxisKind.JOINT, AxisKind.AGREED)


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis of an iteration space."""

    name: str
    size: int
    kind: AxisKind


@dataclass(frozen=True, slots=True)
class Windowed:
    """A dimension of an operand that is read through windows, as by a convolution.

    Index i of `axis`, which has size `count`, reads `reach` consecutive elements from element i ·
    stride + offset on. Elements outside of the tensor have the value `fill`.
    """

    operand: int
    dimension: int
    axis: str
    count: int
    stride: int
    offset: int
    reach: int
    fill: float = 0.0

    def span(self, count: int) -> int:
        """Return the number of elements from the first to the last one that `count` consecutive
        windows read.
        """
        return (count - 1) * self.stride + self.reach


@dataclass(frozen=True, slots=True)
class Space:
    """The iteration space of a node: its axes, and the axes that index each dimension of its
    operands and results.

    `operands[i]` and `results[i]` contain the names of the axes of each dimension, or are None if
    the tensor is absent. A dimension that is read through windows is described in `windows`; its
    entry in `operands` is ().
    """

    axes: tuple[Axis, ...]
    operands: tuple[tuple[Dimension, ...] | None, ...]
    results: tuple[tuple[Dimension, ...] | None, ...]
    windows: tuple[Windowed, ...] = ()

    @property
    def points(self) -> int:
        """Number of points of the iteration space: the product of the sizes of all axes."""
        return math.prod(axis.size for axis in self.axes)

    def axis(self, name: str) -> Axis:
        """Return the axis called `name`. Raise KeyError if there is none."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise KeyError(name)

    def axis_sizes(self) -> dict[str, int]:
        """Return the sizes of the axes by name."""
        return {axis.name: axis.size for axis in self.axes}

    def windows_of(self, operand: int) -> tuple[Windowed, ...]:
        """Return the windowed dimensions of the operand with this index."""
        return tuple(window for window in self.windows if window.operand == operand)

    def __str__(self) -> str:
        marks = {kind: mark for mark, kind in _KIND_BY_MARK.items()} | {AxisKind.PARALLEL: ""}
        kinds = {axis.name: marks[axis.kind] for axis in self.axes}

        def text_of(
            tensor: tuple[Dimension, ...] | None, windows: tuple[Windowed, ...] = ()
        ) -> str:
            if tensor is None:
                return "?"
            words = []
            for dimension in tensor:
                marked_names = [name + kinds[name] for name in dimension]
                if len(marked_names) > 1:
                    words.append(f"({' '.join(marked_names)})")
                else:
                    words.append(marked_names[0] if marked_names else "1")
            for window in windows:
                axis = window.axis + kinds[window.axis]
                words[window.dimension] = f"[{axis} {window.stride} {window.offset} {window.reach}]"
            return " ".join(words)

        operands = (
            text_of(tensor, self.windows_of(index)) for index, tensor in enumerate(self.operands)
        )
        return f"{', '.join(operands)} -> {', '.join(map(text_of, self.results))}"


class NotationError(ModelError):
    """The notation of an iteration space does not fit the shapes of the node's tensors."""


_KIND_BY_MARK = {
    "!": AxisKind.UNSPLITTABLE,
    "+": AxisKind.SUM,
    "~": AxisKind.MEAN,
    "&": AxisKind.JOINT,
    "=": AxisKind.AGREED,
}
_TOKEN_PATTERN = re.compile(r"\([^)]*\)|\[[^\]]*\]|1(?![\w])|[A-Za-z_]\w*[!+~&=]?")


def parse_notation(
    notation: str,
    operand_shapes: tuple[tuple[int, ...] | None, ...],
    result_shapes: tuple[tuple[int, ...] | None, ...],
    extents: dict[str, int] | None = None,
    fill: float = 0.0,
) -> Space:
    """Return the iteration space that `notation` describes for tensors with the given shapes. The
    shape of an absent tensor is None.

    The sizes of axes are inferred from the shapes. `extents` must contain the size of an axis that
    occurs only in merged dimensions, unless the sizes of the other axes of such a dimension
    determine it. `fill` is the value that windows read outside of a tensor. Raise NotationError if
    the notation does not fit the shapes.
    """
    operand_text, arrow, result_text = notation.partition("->")
    if not arrow:
        raise NotationError(f"the iteration-space notation {notation!r} lacks '->'")
    marks: dict[str, str] = {}
    windows: list[_Window] = []
    operands = _parse_tensors(operand_text, len(operand_shapes), marks, windows)
    results = _parse_tensors(result_text, len(result_shapes), marks, [])
    tensors = [
        *zip(operands, operand_shapes, strict=True),
        *zip(results, result_shapes, strict=True),
    ]
    sizes = _solve_sizes(tensors, dict(extents or {}), notation)
    axes_by_result = [
        {name for dimension in tensor for name in dimension}
        for tensor in results
        if tensor is not None
    ]
    in_results = set.intersection(*axes_by_result) if axes_by_result else set()
    default_kinds = {
        name: AxisKind.PARALLEL if name in in_results else AxisKind.UNSPLITTABLE for name in marks
    }
    axes = tuple(
        Axis(name, sizes[name], _KIND_BY_MARK.get(mark) or default_kinds[name])
        for name, mark in marks.items()
    )
    windowed = tuple(
        Windowed(operand, dimension, axis, sizes[axis], *parameters, fill)
        for operand, dimension, axis, parameters in windows
    )
    return Space(axes, tuple(operands), tuple(results), windowed)


_Window = tuple[int, int, str, tuple[int, int, int]]
"""A dimension that is read through windows: (operand index, dimension index, axis, (stride, offset,
reach)).
"""


def _parse_tensors(
    text: str, count: int, marks: dict[str, str], windows: list[_Window]
) -> list[tuple[Dimension, ...] | None]:
    """Return the dimensions of each tensor in the part of the notation before or after `->`. Store
    the marks of axes in `marks`, and windowed dimensions in `windows`. Raise NotationError unless
    it describes `count` tensors.
    """
    words = text.split(",") if count else []
    if len(words) != count:
        raise NotationError(
            f"notation {text!r} describes {len(words)} {plural(len(words), 'tensor')}, but the "
            f"node reads or writes {count}"
        )
    return [_parse_tensor(part.strip(), marks, index, windows) for index, part in enumerate(words)]


def _parse_tensor(
    text: str, marks: dict[str, str], operand: int, windows: list[_Window]
) -> tuple[Dimension, ...] | None:
    """Return the dimensions of a tensor as its notation describes them, or None for an absent
    tensor. Store the marks of axes in `marks`, and windowed dimensions in `windows`.
    """
    if text == "?":
        return None

    def axis_name(word: str) -> str:
        """Return the name of the axis in `word`, and store its mark in `marks`."""
        name = word.rstrip("!+~&=")
        marks[name] = marks.get(name) or word[len(name) :]
        return name

    dimensions: list[Dimension] = []
    for token in _TOKEN_PATTERN.findall(text):
        if token.startswith("["):
            word, stride, offset, reach = token[1:-1].split()
            windows.append(
                (operand, len(dimensions), axis_name(word), (int(stride), int(offset), int(reach)))
            )
            dimensions.append(())
        else:
            dimensions.append(
                tuple(axis_name(word) for word in token.strip("()").split() if word != "1")
            )
    return tuple(dimensions)


def _solve_sizes(
    tensors: list[tuple[tuple[Dimension, ...] | None, tuple[int, ...] | None]],
    known: dict[str, int],
    notation: str,
) -> dict[str, int]:
    """Return `known` with the sizes of all other axes, which follow from the shapes of the tensors.
    Raise NotationError if a size does not follow or contradicts a shape.

    First, the sizes of axes that index a dimension alone are set. Then each merged dimension with
    one unknown axis is solved, in order.
    """
    dimensions: list[tuple[Dimension, int]] = []
    for tensor, shape in tensors:
        if tensor is not None and shape is not None:
            if len(tensor) != len(shape):
                raise NotationError(
                    f"notation {notation!r} describes {len(tensor)} "
                    f"{plural(len(tensor), 'dimension')} of a tensor of shape {shape}"
                )
            dimensions += zip(tensor, shape, strict=True)
    for dimension, size in dimensions:
        if len(dimension) == 1 and known.setdefault(dimension[0], size) != size:
            raise NotationError(
                f"axis {dimension[0]!r} of {notation!r} is of size {known[dimension[0]]} in one "
                f"dimension and of size {size} in another"
            )
    for dimension, size in dimensions:
        missing = [name for name in dimension if name not in known]
        if len(missing) > 1:
            raise NotationError(
                f"sizes of axes {', '.join(missing)} in {notation!r} cannot be inferred"
            )
        product = math.prod(known[name] for name in dimension if name in known)
        if missing:
            known[missing[0]] = size // max(product, 1)
            product *= known[missing[0]]
        if dimension and product != size:
            raise NotationError(
                f"dimension {dimension} of {notation!r} is of size {product}, but the dimension "
                f"of the tensor is of size {size}"
            )
    return known
