"""Operator definitions (class `Operator`) and the functions from which they are built.

An operator definition consists of data and small pure functions: the iteration space, the
floating-point operations, the tensors that are saved for backward, the communication, and facts
that passes use, such as linearity. The PyTorch code of an operator is in the backends.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import DType, Graph, Node, Value
from autopipe.ir.space import NotationError, Space, parse_notation


@dataclass(frozen=True, slots=True)
class OperatorCollective:
    """One collective that the implementation of an operator runs `times` times in a forward pass,
    over the devices along the split `axes` (in the order of the iteration space).

    If `backward` is true, the collective belongs to backward instead. It then runs only if an
    operand in `through` gets a gradient.
    """

    axes: tuple[str, ...]
    bytes: int
    """Bytes of the tensor that is reduced, or of the full tensor that is gathered."""
    kind: str = "all_reduce"
    backward: bool = False
    times: int = 1
    through: tuple[int, ...] = (0,)


def joint_splits(
    space: Space, degrees: Mapping[str, int], names: Iterable[str] | None = None
) -> tuple[str, ...]:
    """Return the names of the joint axes that are split, restricted to `names` unless `names` is
    None.
    """
    chosen = {axis.name for axis in space.axes} if names is None else set(names)
    return tuple(
        axis.name
        for axis in space.axes
        if axis.kind.is_joint and degrees.get(axis.name, 1) > 1 and axis.name in chosen
    )


def local_points(space: Space, degrees: Mapping[str, int], names: Iterable[str]) -> int:
    """Return the number of points of the axes in `names` on one device: the product of their local
    sizes.
    """
    return math.prod(space.axis(name).size // degrees.get(name, 1) for name in names)


def all_reduces_of_statistics(
    axes: tuple[str, ...],
    elements: int,
    forward: Iterable[int],
    backward: Iterable[int],
    through: tuple[int, ...] = (0,),
) -> tuple[OperatorCollective, ...]:
    """Return one all-reduce of `elements` elements for each entry of `forward` and `backward`. An
    entry is the number of bytes per element. Return () if `axes` is empty.
    """
    if not axes:
        return ()
    return (
        *(OperatorCollective(axes, elements * width) for width in forward),
        *(
            OperatorCollective(axes, elements * width, backward=True, through=through)
            for width in backward
        ),
    )


def bytes_per_statistic(dtype: DType) -> int:
    """Return the bytes per element of a statistic: 8 (double precision) for float64 values, 4
    (single precision) for all other types.
    """
    return 8 if dtype is DType.FLOAT64 else 4


@dataclass(frozen=True, slots=True)
class Signature:
    """One use of an operator: a node, the types of its operands and results, and the constants
    among its operands.

    `operands[i]` and `results[i]` are None if an optional tensor is absent. `constants[i]` is the
    data of operand i, or None if the operand is not a constant. `opset` is the version of the
    default ONNX domain.
    """

    node: Node
    operands: tuple[Value | None, ...]
    results: tuple[Value | None, ...]
    constants: tuple[np.ndarray | None, ...]
    opset: int

    @property
    def rank(self) -> int:
        return len(self.operand(0).shape)

    @property
    def words(self) -> list[str]:
        """The axis names of the first operand, one per dimension: d0 d1 …"""
        return axis_names(self.rank)

    def axis(self, default: int = 0) -> int:
        """Return the attribute `axis` as a nonnegative axis of the first operand."""
        return nonnegative_axis(self.node.integer("axis", default), self.rank)

    def operand(self, index: int) -> Value:
        value = self.operands[index]
        assert value is not None, f"{self.node.op} lacks operand {index}"
        return value

    def result(self, index: int = 0) -> Value:
        value = self.results[index]
        assert value is not None, f"{self.node.op} lacks result {index}"
        return value

    def present(self, index: int) -> bool:
        return index < len(self.operands) and self.operands[index] is not None

    def constant(self, index: int) -> np.ndarray | None:
        return self.constants[index] if index < len(self.constants) else None

    def integers(self, index: int) -> tuple[int, ...]:
        """Return the constant operand `index` as a flat tuple of integers, or () if the operand is
        not a constant.
        """
        array = self.constant(index)
        return () if array is None else tuple(int(each) for each in array.reshape(-1))

    def sharded(
        self, operands: tuple[Value | None, ...], results: tuple[Value | None, ...]
    ) -> Signature:
        """Return the signature for local shards of the operands and results. A constant stays known
        only if the shard has the shape of the full constant.
        """
        constants = tuple(
            None if value is None or array is None or value.shape != array.shape else array
            for value, array in zip(operands, self.constants, strict=True)
        )
        return replace(self, operands=operands, results=results, constants=constants)


def signature_of(graph: Graph, node: Node) -> Signature:
    constants = [graph.constant(name) if name else None for name in node.inputs]
    return Signature(
        node=node,
        operands=tuple(graph.type_of(name) if name else None for name in node.inputs),
        results=tuple(graph.type_of(name) if name else None for name in node.outputs),
        constants=tuple(None if each is None else each.array for each in constants),
        opset=graph.opset,
    )


DimensionWords = str | Sequence[str]
"""The dimensions of a tensor in iteration-space notation: a sequence of words, one per dimension,
or one string of words separated by blanks.

In a string, `*x!` expands to the axes x0! x1! … of the dimensions that no other word describes.
`*1` expands to 1 (no axis) for each of these dimensions.
"""
_WORD_PATTERN = re.compile(r"\([^)]*\)|\[[^\]]*\]|\S+")


def _notation_of_tensor(value: Value | None, words: DimensionWords | None) -> str:
    if value is None or words is None:
        return "?" if value is None else " ".join(unindexed_words(value.shape))
    if not isinstance(words, str):
        return " ".join(words)
    found = _WORD_PATTERN.findall(words)
    for place, word in enumerate(found):
        if word.startswith("*"):
            name = word[1:].rstrip("!+~&=")
            count = len(value.shape) - len(found) + 1
            run = ["1"] * count if name == "1" else axis_names(count, name)
            return " ".join(
                [
                    *found[:place],
                    *(each + word[1 + len(name) :] for each in run),
                    *found[place + 1 :],
                ]
            )
    return words


def space_from_words(
    signature: Signature,
    operands: Sequence[DimensionWords],
    results: Sequence[DimensionWords],
    fill: float = 0.0,
    **extents: int,
) -> Space:
    """Return the iteration space of a node from the words of its tensors, and from the sizes of
    axes that the shapes do not determine (`extents`).

    No axis indexes the operands after the last entry of `operands`. The results after the last
    entry of `results` have the words of the last entry. `fill` is the value of elements that a
    window reads outside of a tensor.
    """
    sides = zip_longest(signature.operands, operands[: len(signature.operands)])
    left = [_notation_of_tensor(value, words) for value, words in sides]
    last = len(results) - 1
    right = [
        _notation_of_tensor(value, results[min(place, last)])
        for place, value in enumerate(signature.results)
    ]
    read, written = (
        tuple(None if value is None else value.shape for value in side)
        for side in (signature.operands, signature.results)
    )
    return parse_notation(f"{', '.join(left)} -> {', '.join(right)}", read, written, extents, fill)


Integers = npt.NDArray[np.int64]
Range = tuple[int | Integers, int | Integers]
"""The range [least, below) of integers: one range for all elements of a tensor, or an array with
the bound of each element.
"""
IndexRange = Callable[[Signature, int], Range | None]
"""Function that returns the range of the elements of an operand if they are indices or labels, and
None for other operands. The arguments are the signature and the index of the operand.
"""
Move = Callable[[Signature, int, int, Integers], Integers | None]
"""Function that moves the elements of an array as the operator moves the elements of an operand.

The arguments are the signature, the index of the operand, the index of the result, and an array of
the operand's shape. The function returns an array of the result's shape, with -1 at positions that
hold other elements. It returns None if the result holds no element of the operand, or if the
positions are not known.
"""


def no_index_range(signature: Signature, slot: int) -> Range | None:
    """Return None: the operand has no indices."""
    return None


def reshaped(signature: Signature, slot: int, result: int, array: Integers) -> Integers | None:
    """Return the array of the first operand in the result's shape (see `Move`)."""
    return None if slot else array.reshape(signature.result(result).shape)


def broadcast_to_result(
    signature: Signature, slot: int, result: int, array: Integers
) -> Integers | None:
    """Return the array of an operand, broadcast to the result's shape (see `Move`)."""
    return np.broadcast_to(array, signature.result(result).shape)


def first_broadcast(
    signature: Signature, slot: int, result: int, array: Integers
) -> Integers | None:
    """Return the array of the first operand, broadcast to the result's shape (see `Move`)."""
    return None if slot else broadcast_to_result(signature, slot, result, array)


Statistics = Callable[[Signature, Space, Mapping[str, int]], tuple[OperatorCollective, ...]]
"""Function that returns the collectives of a node from its signature, its iteration space, and the
degree of each split axis.
"""


def no_statistics(
    signature: Signature, space: Space, degrees: Mapping[str, int]
) -> tuple[OperatorCollective, ...]:
    """Return (): the operator runs no collective."""
    return ()


def per_row(
    forward: Sequence[int],
    backward: Sequence[int],
    fixed: Sequence[int] = (),
    through: tuple[int, ...] = (0,),
) -> Statistics:
    """Return the `Statistics` function of an operator that reduces the rows of its first operand
    along the joint axes of this operand.

    Each all-reduce in forward sends, per row, n statistics for an entry n of `forward` or n bytes
    for an entry n of `fixed`. Each all-reduce in backward sends n statistics per row for an entry n
    of `backward`.
    """

    def statistics(
        signature: Signature, space: Space, degrees: Mapping[str, int]
    ) -> tuple[OperatorCollective, ...]:
        width = bytes_per_statistic(signature.operand(0).dtype)
        told = [width * count for count in forward]
        back = [width * count for count in backward]
        axes = {name for dimension in space.operands[0] or () for name in dimension}
        rows = local_points(
            space, degrees, (name for name in axes if not space.axis(name).kind.is_joint)
        )
        return all_reduces_of_statistics(
            joint_splits(space, degrees), rows, [*told, *fixed], back, through
        )

    return statistics


@dataclass(frozen=True, slots=True)
class Operator:
    name: str
    """Operator type, preceded by the domain if it is not ONNX's default domain:
    `com.microsoft.Gelu`.
    """
    notation: Callable[[Signature], Space]
    """Function that returns the iteration space of a node (see `autopipe.ir.space`)."""
    kind: str
    """Class for the cost model: matmul, convolution, recurrent, normalization, reduction,
    elementwise, memory (copies), or view (no work and no memory traffic: the result aliases the
    operand).
    """
    flops: Callable[[Signature, Space], float] = lambda signature, space: 0.0
    """Floating-point operations of one forward pass. A multiply-add counts as two operations."""
    backward: float = 1.0
    """Floating-point operations of backward, as a multiple of forward. A matmul has 2: one matmul
    for the gradient of each operand.
    """
    keeps: tuple[str, ...] = ()
    """Tensors that are saved for backward:

    - "0", "1", …: the operand at this index; ">0", …: the result at this index; "*": all operands
    - "mask": one byte per element of the first result
    - "places": eight bytes per element of the first result (the index of a maximum)
    - "probabilities": a tensor like the first operand
    - "rows": the label, weight and logarithm of each element of the second operand

    A tensor that several consumers save counts once. Parameters and constants are in memory anyway.
    """
    kernels: int = 1
    """Kernels of a forward pass. Each kernel except the last writes as many bytes as the result
    has, and the next kernel reads them.
    """
    static: tuple[int, ...] = ()
    """Operands that must be constants when the model is compiled (the shape operand of Reshape)."""
    shaping: tuple[int, ...] = ()
    """Operands of `static` that determine only the shapes of results. The result shapes that a
    model file states can replace the data of these operands.
    """
    computable: tuple[int, ...] = ()
    """Operands of `static` that may also be computed when the program runs."""
    random: bool = False
    """True if the operator draws random values. The values differ between forward passes and
    between nodes.
    """
    differentiable: bool = True
    mixes_samples: Callable[[Signature], bool] = lambda signature: False
    """True if the result for one sample depends on other samples of the batch, so that splitting
    the batch into micro-batches changes the result (BatchNormalization in training mode, or a mean
    loss that ignores some labels). The frontend warns about such nodes.
    """
    statistics: Statistics = no_statistics
    """Collectives that the implementation runs if it is split along joint axes, in order of
    execution. The arguments are the signature of the unsharded tensors, the iteration space, and
    the degrees of all splits by axis.
    """
    weights: tuple[int, ...] = ()
    """Operands whose gradient is computed by a separate matmul (or by a scatter, for a lookup). If
    such an operand is a parameter, a split backward computes its gradient in backward_weight.
    """
    recomputes: float = 0.0
    """Fraction of `backward`, as a multiple of forward, that recomputes values of forward. It is
    not part of the model FLOPs.
    """
    same_elements: bool = False
    """True if the result has the elements of the first operand in the same row-major order. Only
    the shape may differ.
    """
    linear: str = ""
    """How the floating-point results depend on the floating-point operands, as far as passes use
    it. Axes, indices and conditions are fixed.

    - "together": linear in all operands together, f(a x, a y) = a f(x, y)
    - "each": linear in each operand if the other operands are fixed, f(a x, y) = a f(x, y)
    - "first": linear in the first operand if the other operands are fixed
    - "": none of these, or not stated
    """
    adds: bool = False
    """True if each element of the result is a sum or a difference of one element per operand."""
    mask: bool = False
    """True if the results are booleans for operands of every type."""
    comparison: bool = False
    """True if the operator compares the elements of two operands. `mask` is true, too."""
    loss: bool = False
    """True for the loss of class labels: operand 1 has the labels, operand 2 a weight per class."""
    lookup: bool = False
    """True if the operator selects slices of operand 0 by the indices in operand 1, as an embedding
    selects rows of its table.
    """
    gates: int = 0
    """Number of gates of a recurrent layer: rows of a weight per hidden unit. 0 if the operator is
    not a recurrent layer.
    """
    neutral: float | None = None
    """For an operator that combines the elements along an axis: the element that changes no result
    if it is added along this axis, except that a mean divides by the number of all elements. None
    for other operators, or if it is not stated.
    """
    finite_at: tuple[tuple[int, int], ...] = ()
    """Pairs of an operand and an element of this operand for which the result and its gradient are
    finite. Stated for operands for which other elements give infinite or undefined results.
    """
    layer_weights: tuple[int, ...] = ()
    """Operands that are weights of a layer if they do not depend on the inputs of the model."""
    scales_and_biases: tuple[int, ...] = ()
    """Operands of `layer_weights` that are scales, biases or slopes. In a new layer, all elements
    of such an operand are equal.
    """

    reads_axis: bool = False
    """True for reductions, cumulative sums and products, sorts, and operators along a sequence:
    each result depends on elements at other positions of an axis. If this axis is not splittable
    and holds the samples of a batch, the results mix samples. False for windows and normalizations.
    """
    sizes: tuple[int, ...] = ()
    """Operands of `static` that are sizes or positions, which files compute from the number of
    selected rows.
    """
    index_range: IndexRange = no_index_range
    """Ranges of the operands that are indices or labels."""
    moved: Move | None = None
    """How the results hold elements of the operands. None if the operator computes other elements,
    or if the movement is not stated. Abs, Clip, Max, Min, Mod and Where may replace elements.
    """

    copied_weights: tuple[int, ...] = ()
    """Operands that may be 16-bit copies of parameters in generated code."""
    interpolation: str = ""
    """Default of the attribute `mode` of an operator that interpolates at computed coordinates; ""
    for other operators.
    """

    @property
    def has_zero_gradient(self) -> bool:
        """True if the derivative is 0 wherever it exists."""
        return self.differentiable and self.backward == 0.0

    def space(self, signature: Signature) -> Space:
        """Return the iteration space of a node.

        Raise NotationError, a ModelError, if the notation does not fit the shapes of the tensors.
        Raise ModelError if the attributes of the node are invalid for its operands.
        """
        where = repr(signature.node.name)
        try:
            return self.notation(signature)
        except NotationError as error:
            raise NotationError(
                f"the operands do not fit operator {self.name}: {error.message}", where=where
            ) from error
        except (ArithmeticError, AssertionError, LookupError, ValueError) as error:
            shapes = ", ".join(
                "absent" if value is None else str(value.shape) for value in signature.operands
            )
            message = f"{self.name} cannot take operands {shapes} with these attributes"
            raise ModelError(message, where=where) from error


OPERATORS: dict[str, Operator] = {}
"""All operator definitions by name. The package `autopipe.ir.ops` fills this dictionary."""


def qualified_name(node: Node) -> str:
    """Return the name of a node's operator as a key of `OPERATORS`: the operator type, preceded by
    the domain unless the domain is ONNX's default domain.
    """
    return f"{node.domain}.{node.op}" if node.domain not in ("", "ai.onnx") else node.op


def space_from_notation(text: str) -> Callable[[Signature], Space]:
    """Return a function that applies one fixed line of notation to each signature."""
    left, _, right = text.partition("->")
    operands, results = (
        [words.strip() for words in side.split(",") if side.strip()] for side in (left, right)
    )
    return lambda signature: space_from_words(signature, operands, results or [""])


def per_point(coefficient: float) -> Callable[[Signature, Space], float]:
    """Return a FLOPs function: `coefficient` operations per point of the iteration space."""
    return lambda signature, space: coefficient * space.points


def per_result(coefficient: float) -> Callable[[Signature, Space], float]:
    """Return a FLOPs function: `coefficient` operations per element of the first result."""
    return lambda signature, space: coefficient * math.prod(signature.result().shape)


def axis_names(rank: int, prefix: str = "d") -> list[str]:
    """Return one axis name per dimension: d0 d1 … for the default prefix."""
    return [f"{prefix}{axis}" for axis in range(rank)]


def unindexed_words(shape: Sequence[int]) -> list[str]:
    return ["1"] * len(shape)


def mark_words(words: Sequence[str], axes: Iterable[int], mark: str) -> list[str]:
    chosen = set(axes)
    return [
        word + mark if axis in chosen and word != "1" else word for axis, word in enumerate(words)
    ]


def replace_words(words: Sequence[str], axes: Iterable[int], word: str = "1") -> list[str]:
    chosen = set(axes)
    return [word if axis in chosen else each for axis, each in enumerate(words)]


def broadcast_words(shape: Sequence[int], result: Sequence[int], words: Sequence[str]) -> list[str]:
    """Return the words of an operand of shape `shape` that broadcasts to shape `result`.

    `words` are the words of the result. Trailing dimensions are aligned. A dimension whose size
    differs from the result's gets the word "1".
    """
    offset = len(result) - len(shape)
    return [
        words[offset + axis] if extent == result[offset + axis] else "1"
        for axis, extent in enumerate(shape)
    ]


def unsplittable_space(signature: Signature) -> Space:
    """Return an iteration space without axes, for an operator that cannot be split."""
    return space_from_words(
        signature,
        [],
        [unindexed_words(value.shape if value else ()) for value in signature.results],
    )


def space_along_axes(signature: Signature, axes: Iterable[int], mark: str) -> Space:
    """Return the iteration space of an operator whose first operand and results have equal shapes.
    The axes in `axes` carry `mark`. No axis indexes the other operands.
    """
    return space_from_words(signature, [mark_words(signature.words, axes, mark)], [signature.words])


def space_with_changed_axes(signature: Signature, axes: Iterable[int], operands: int = 1) -> Space:
    """Return the iteration space of an operator whose first `operands` operands and all results
    differ in shape only along `axes`. No axis indexes these dimensions or the other operands.
    """
    words = replace_words(signature.words, axes)
    return space_from_words(signature, [words] * operands, [words])


def nonnegative_axis(axis: int, rank: int) -> int:
    """Return `axis` counted from the front. A negative axis counts from the back."""
    return axis + rank if axis < 0 else axis


def axes_of(signature: Signature, operand: int) -> tuple[int, ...] | None:
    """Return the axes from the constant operand `operand` or, if there is none, from the attribute
    `axes`. Return None if the node has neither.

    The axes are nonnegative. Negative axes count from the end of the larger of the first operand
    and the first result, because some operators add dimensions.
    """
    rank = max(signature.rank, len(signature.result().shape))
    if signature.constant(operand) is not None:
        given = signature.integers(operand)
    elif signature.node.has("axes"):
        given = signature.node.integers("axes")
    else:
        return None
    return tuple(nonnegative_axis(axis, rank) for axis in given)


@dataclass(frozen=True, slots=True)
class SpatialWindow:
    """The window of a convolution or pooling, with one entry per spatial axis in each field.
    `begin` and `end` are the pads, as stated by the node or derived from `auto_pad`.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def reach(self) -> tuple[int, ...]:
        """The size that a window covers along each axis, including the gaps of dilation."""
        return tuple(
            dilation * (size - 1) + 1
            for size, dilation in zip(self.kernel, self.dilations, strict=True)
        )

    def inside(self, is_split: Callable[[str], bool]) -> SpatialWindow:
        """Return the window without pads along each axis o0, o1, … that is split."""
        begin, end = (
            tuple(0 if is_split(f"o{axis}") else pad for axis, pad in enumerate(side))
            for side in (self.begin, self.end)
        )
        return replace(self, begin=begin, end=end)

    def words(self, axis: int, source: int, result: int, splits: bool = True) -> tuple[str, str]:
        """Return the words (operand, result) of a spatial axis that has size `source` in the
        operand and `result` in the result. If `splits` is false, the axis is unsplittable.
        """
        word = f"o{axis}"
        stride = self.strides[axis]
        begin = self.begin[axis]
        reach = self.reach[axis]
        if not splits:
            return f"i{axis}!", f"{word}!"
        is_same = (stride, begin, reach) == (1, 0, 1) and source == result
        return word if is_same else f"[{word} {stride} {-begin} {reach}]", word

    def spread(self, source: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes that `source` windows cover. A transposed convolution has a result of
        these sizes before cropping.
        """
        return tuple(
            (count - 1) * stride + reach
            for count, stride, reach in zip(source, self.strides, self.reach, strict=True)
        )

    def needed(self, source: tuple[int, ...], result: tuple[int, ...]) -> tuple[int, ...]:
        """Return the pads at the end with which `result` windows fit exactly. A pad is negative if
        the windows do not read the last elements.
        """
        covered = zip(self.spread(result), source, self.begin, strict=True)
        return tuple(whole - extent - begin for whole, extent, begin in covered)


def window_of(
    node: Node, kernel: tuple[int, ...], source: tuple[int, ...], result: tuple[int, ...]
) -> SpatialWindow:
    """Return the window of a convolution or pooling whose spatial sizes are `source` in the operand
    and `result` in the result.
    """
    rank = len(kernel)
    policy = node.text("auto_pad", "NOTSET")
    strides, dilations = (node.integers(name) or (1,) * rank for name in ("strides", "dilations"))
    pads = (node.integers("pads") if policy == "NOTSET" else ()) or (0,) * (2 * rank)
    window = SpatialWindow(kernel, strides, dilations, pads[:rank], pads[rank:])
    if policy in ("SAME_UPPER", "SAME_LOWER"):
        totals = [max(total, 0) for total in window.needed(source, result)]
        small = tuple(total // 2 for total in totals)
        large = tuple(total - total // 2 for total in totals)
        begin, end = (small, large) if policy == "SAME_UPPER" else (large, small)
        return replace(window, begin=begin, end=end)
    return window
