"""Iteration spaces: which axes an operator runs over, and which dimension of which tensor each one
indexes.

One line of notation a node, for instance of a batched product::

    b m k, k n -> b m n

Grammar::

    notation  = operands "->" results           operands, results = tensor {"," tensor}     (either may be empty)
    tensor    = {dimension}                     a scalar is the empty string; "?" stands for an absent operand
    dimension = axis | "1" | "(" axis {axis} ")" | "[" axis stride offset reach "]"
    axis      = letter {letter | digit | "_"} [mark]

`1` is a dimension that no axis indexes: extent one where others broadcast, or an extent the
operator makes up itself. `(a b)` is a dimension made of several axes, outer to inner (row-major).
`[o 2 -1 3]` is a dimension of an operand that is read through windows (convolution, pooling): index
o reads the three elements from 2 · o - 1 on, and in place of those that lie outside of the tensor a
fill. Marks, given where the axis first stands:

    !   the axis must stay whole: the operator cannot be split along it (yet)
    +   partial results over a split of this axis add up            (MatMul's k, ReduceSum)
    ~   partial results over a split average, with equal shares    (ReduceMean)
    &   devices with a part each compute together: the operator knows its part, and exchanges statistics over the group
        where it needs any; results without the axis add up       (Softmax's classes, the rows of a table looked up in)
    =   the same, but results without the axis are known to every device as they are   (a normalisation's statistics)

An axis absent from a result and without a mark is treated as whole.
"""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass

from autopipe.ir.errors import ModelError
from autopipe.ir.words import plural

Dimension = tuple[str, ...]
"""Names of the axes that make up a dimension, outer to inner; () where none does."""


class AxisKind(enum.Enum):
    """Meaning of a split along the axis: a parallel one, which indexes every result, leaves
    independent shards; for the others see the marks.
    """

    PARALLEL = "parallel"
    WHOLE = "whole"
    SUM = "sum"
    MEAN = "mean"
    JOINT = "joint"
    AGREED = "agreed"

    @property
    def is_joint(self) -> bool:
        """True if the operator itself knows its part and exchanges what it needs of the others."""
        return self in (AxisKind.JOINT, AxisKind.AGREED)


@dataclass(frozen=True, slots=True)
class Axis:
    name: str
    extent: int
    kind: AxisKind


@dataclass(frozen=True, slots=True)
class Windowed:
    """A dimension of an operand that is read through windows: index i of `axis`, of `count`, reads
    the `reach` elements from i · stride + offset on; those outside of the tensor count as `fill`.
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
        """How many elements `count` neighbouring windows cover."""
        return (count - 1) * self.stride + self.reach


@dataclass(frozen=True, slots=True)
class Space:
    """A node's iteration space. `operands[i]` is None where the operand is absent. A dimension that
    is read through windows is in `windows`; among the operands no axis indexes it.
    """

    axes: tuple[Axis, ...]
    operands: tuple[tuple[Dimension, ...] | None, ...]
    results: tuple[tuple[Dimension, ...] | None, ...]
    windows: tuple[Windowed, ...] = ()

    @property
    def points(self) -> int:
        return math.prod(axis.extent for axis in self.axes)

    def axis(self, name: str) -> Axis:
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise KeyError(name)

    def extents(self) -> dict[str, int]:
        return {axis.name: axis.extent for axis in self.axes}

    def windows_of(self, operand: int) -> tuple[Windowed, ...]:
        return tuple(each for each in self.windows if each.operand == operand)

    def __str__(self) -> str:
        marks = {kind: mark for mark, kind in _MARKS.items()} | {AxisKind.PARALLEL: ""}
        kinds = {axis.name: marks[axis.kind] for axis in self.axes}

        def spell(tensor: tuple[Dimension, ...] | None, windows: tuple[Windowed, ...] = ()) -> str:
            if tensor is None:
                return "?"
            words = []
            for dimension in tensor:
                names = [name + kinds[name] for name in dimension]
                words.append(
                    "1" if not names else names[0] if len(names) == 1 else f"({' '.join(names)})"
                )
            for each in windows:
                words[each.dimension] = (
                    f"[{each.axis}{kinds[each.axis]} {each.stride} {each.offset} {each.reach}]"
                )
            return " ".join(words)

        operands = (
            spell(tensor, self.windows_of(index)) for index, tensor in enumerate(self.operands)
        )
        return f"{', '.join(operands)} -> {', '.join(map(spell, self.results))}"


class NotationError(ModelError):
    """A line of notation that does not fit the tensors it is meant for, which a file's node may
    have of any shape.
    """


_MARKS = {
    "!": AxisKind.WHOLE,
    "+": AxisKind.SUM,
    "~": AxisKind.MEAN,
    "&": AxisKind.JOINT,
    "=": AxisKind.AGREED,
}
_TOKEN = re.compile(r"\([^)]*\)|\[[^\]]*\]|1(?![\w])|[A-Za-z_]\w*[!+~&=]?")


def parse(
    notation: str,
    operand_shapes: tuple[tuple[int, ...] | None, ...],
    result_shapes: tuple[tuple[int, ...] | None, ...],
    extents: dict[str, int] | None = None,
    fill: float = 0.0,
) -> Space:
    """The space that `notation` describes for tensors of these shapes (None where a tensor is
    absent). Extents follow from the shapes; those of axes inside merged dimensions that occur alone
    nowhere must be given in `extents`. Windows that stick out of a tensor read `fill` there. Raises
    NotationError where notation and shapes disagree.
    """
    left, arrow, right = notation.partition("->")
    if not arrow:
        raise NotationError(f"no arrow in notation {notation!r}")
    marks: dict[str, str] = {}
    windows: list[_Window] = []
    operands = _tensors(left, len(operand_shapes), marks, windows)
    results = _tensors(right, len(result_shapes), marks, [])
    pairs = [*zip(operands, operand_shapes, strict=True), *zip(results, result_shapes, strict=True)]
    known = _solved_extents(pairs, dict(extents or {}), notation)
    written = [
        {name for dimension in tensor for name in dimension}
        for tensor in results
        if tensor is not None
    ]
    in_results = set.intersection(*written) if written else set()
    unmarked = {name: AxisKind.PARALLEL if name in in_results else AxisKind.WHOLE for name in marks}
    axes = tuple(
        Axis(name, known[name], _MARKS.get(mark) or unmarked[name]) for name, mark in marks.items()
    )
    through = tuple(
        Windowed(operand, dimension, axis, known[axis], *numbers, fill)
        for operand, dimension, axis, numbers in windows
    )
    return Space(axes, tuple(operands), tuple(results), through)


_Window = tuple[int, int, str, tuple[int, int, int]]
"""Operand, dimension, axis, and the three numbers of a window."""


def _tensors(
    side: str, count: int, marks: dict[str, str], windows: list[_Window]
) -> list[tuple[Dimension, ...] | None]:
    parts = side.split(",") if count else []
    if len(parts) != count:
        raise NotationError(
            f"notation {side!r} names {len(parts)} {plural(len(parts), 'tensor')}, the node "
            "has "
            f"{count}"
        )
    return [_tensor(part.strip(), marks, index, windows) for index, part in enumerate(parts)]


def _tensor(
    text: str, marks: dict[str, str], index: int, windows: list[_Window]
) -> tuple[Dimension, ...] | None:
    if text == "?":
        return None

    def marked(word: str) -> str:
        """The axis of a word, whose mark is taken down."""
        name = word.rstrip("!+~&=")
        marks[name] = marks.get(name) or word[len(name) :]
        return name

    dimensions: list[Dimension] = []
    for token in _TOKEN.findall(text):
        if token.startswith("["):
            word, stride, offset, reach = token[1:-1].split()
            windows.append(
                (index, len(dimensions), marked(word), (int(stride), int(offset), int(reach)))
            )
            dimensions.append(())
        else:
            dimensions.append(
                tuple(marked(word) for word in token.strip("()").split() if word != "1")
            )
    return tuple(dimensions)


def _solved_extents(
    pairs: list[tuple[tuple[Dimension, ...] | None, tuple[int, ...] | None]],
    known: dict[str, int],
    notation: str,
) -> dict[str, int]:
    """`known` with the extents that follow from the tensors' shapes: first of axes that are a whole
    dimension.
    """
    dimensions: list[tuple[Dimension, int]] = []
    for tensor, shape in pairs:
        if tensor is not None and shape is not None:
            if len(tensor) != len(shape):
                raise NotationError(f"notation {notation!r} does not fit shape {shape}")
            dimensions += zip(tensor, shape, strict=True)
    for dimension, extent in dimensions:
        if len(dimension) == 1 and known.setdefault(dimension[0], extent) != extent:
            raise NotationError(
                f"axis {dimension[0]!r} of {notation!r} is both {known[dimension[0]]} and {extent}"
            )
    for dimension, extent in dimensions:
        missing = [name for name in dimension if name not in known]
        if len(missing) > 1:
            raise NotationError(f"extents of {', '.join(missing)} in {notation!r} cannot be told")
        product = math.prod(known[name] for name in dimension if name in known)
        if missing:
            known[missing[0]] = extent // max(product, 1)
            product *= known[missing[0]]
        if dimension and product != extent:
            raise NotationError(
                f"dimension {dimension} of {notation!r} has extent {product}, the tensor {extent}"
            )
    return known
