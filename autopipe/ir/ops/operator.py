"""The class `Operator`, a definition of an operator, and functions from which definitions are
built.

A definition consists of data and small pure functions: the iteration space, the floating-point
operations, the tensors that are saved for backward, the communication, and properties that planning
passes use, such as linearity. The PyTorch code of an operator is part of the backends.
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
    """A collective inside an operator that is split. The operator runs it `times` times per
    forward, over the devices along the split `axes`, which are in the order of the iteration space.

    If `backward` is true, it runs in backward instead, and only if an operand in `through` gets a
    gradient.
    """

    axes: tuple[str, ...]
    bytes: int
    """Bytes of the tensor that is reduced, or of the full tensor that is gathered or scattered."""
    kind: str = "all_reduce"
    backward: bool = False
    times: int = 1
    through: tuple[int, ...] = (0,)


def split_joint_axes(
    space: Space, degrees: Mapping[str, int], names: Iterable[str] | None = None
) -> tuple[str, ...]:
    """Return the names of the split axes of a joint kind, in which devices exchange statistics. If
    `names` is given, only these axes are considered. `degrees` has the split degree of each axis.
    """
    chosen = {axis.name for axis in space.axes} if names is None else set(names)
    return tuple(
        axis.name
        for axis in space.axes
        if axis.kind.is_joint and degrees.get(axis.name, 1) > 1 and axis.name in chosen
    )


def local_point_count(space: Space, degrees: Mapping[str, int], names: Iterable[str]) -> int:
    """Return the number of points of the axes `names` on one device: the product of the axis sizes,
    divided by the split degrees.
    """
    return math.prod(space.axis(name).size // degrees.get(name, 1) for name in names)


def all_reduces_of_statistics(
    axes: tuple[str, ...],
    elements: int,
    forward: Iterable[int],
    backward: Iterable[int],
    through: tuple[int, ...] = (0,),
) -> tuple[OperatorCollective, ...]:
    """Return one all-reduce over `axes` for each entry of `forward` and `backward`; an entry is the
    number of bytes per element. Each all-reduce has `elements` elements. Return () if `axes` is
    empty.
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
    """Return the bytes per element of a statistic that devices exchange: 8 (double precision) for
    values of type float64, otherwise 4 (single precision).
    """
    return 8 if dtype is DType.FLOAT64 else 4


@dataclass(frozen=True, slots=True)
class Signature:
    """One use of an operator: its node, the types of its operands and results, and the data of its
    constant operands.

    `operands[i]` and `results[i]` are None if the optional tensor is absent. `constants[i]` is the
    data of operand i, or None if it is not a constant. `opset` is the version of ONNX's default
    domain.
    """

    node: Node
    operands: tuple[Value | None, ...]
    results: tuple[Value | None, ...]
    constants: tuple[np.ndarray | None, ...]
    opset: int

    @property
    def rank(self) -> int:
        """Number of dimensions of the first operand."""
        return len(self.operand(0).shape)

    @property
    def words(self) -> list[str]:
        """Names of the axes of the first operand, one per dimension: d0, d1, …"""
        return axis_names(self.rank)

    def axis(self, default: int = 0) -> int:
        """Return the attribute `axis` (or `default`) as an axis of the first operand, counted from
        the front.
        """
        return nonnegative_axis(self.node.integer("axis", default), self.rank)

    def operand(self, index: int) -> Value:
        """Return the type of operand `index`, which must be present."""
        value = self.operands[index]
        assert value is not None, f"{self.node.op} lacks operand {index}"
        return value

    def result(self, index: int = 0) -> Value:
        """Return the type of result `index`, which must be present."""
        value = self.results[index]
        assert value is not None, f"{self.node.op} lacks result {index}"
        return value

    def present(self, index: int) -> bool:
        """Return True if operand `index` is present."""
        return index < len(self.operands) and self.operands[index] is not None

    def constant(self, index: int) -> np.ndarray | None:
        """Return the data of operand `index`, or None if it is absent or not a constant."""
        return self.constants[index] if index < len(self.constants) else None

    def integers(self, index: int) -> tuple[int, ...]:
        """Return the elements of the constant operand `index` as integers, in row-major order; ()
        if the operand is not a constant.
        """
        array = self.constant(index)
        return () if array is None else tuple(int(each) for each in array.reshape(-1))

    def sharded(
        self, operands: tuple[Value | None, ...], results: tuple[Value | None, ...]
    ) -> Signature:
        """Return the signature of a device, with the given local shards of operands and results. A
        constant whose shard differs in shape from the full constant is no longer known.
        """
        constants = tuple(
            None if value is None or array is None or value.shape != array.shape else array
            for value, array in zip(operands, self.constants, strict=True)
        )
        return replace(self, operands=operands, results=results, constants=constants)


def signature_of(graph: Graph, node: Node) -> Signature:
    """Return the signature of a node of the graph."""
    constants = [graph.constant(name) if name else None for name in node.inputs]
    return Signature(
        node=node,
        operands=tuple(graph.type_of(name) if name else None for name in node.inputs),
        results=tuple(graph.type_of(name) if name else None for name in node.outputs),
        constants=tuple(None if each is None else each.array for each in constants),
        opset=graph.opset,
    )


DimensionWords = str | Sequence[str]
"""The dimensions of a tensor in the notation of `autopipe.ir.space`: a sequence of words, one per
dimension, or one string of words separated by blanks.

In a string, `*x!` stands for the axes x0! x1! … of all dimensions that no other word describes.
`*1` stands for dimensions without axes.
"""
_WORD_PATTERN = re.compile(r"\([^)]*\)|\[[^\]]*\]|\S+")


def _notation_of_tensor(value: Value | None, words: DimensionWords | None) -> str:
    """Return the notation of a tensor as one string, with words such as `*x` expanded. It is "?"
    for an absent tensor. Without `words`, no axis indexes the tensor.
    """
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
    """Return the iteration space of a node, given the notation of its operands and results.
    `extents` has the sizes of axes that the shapes do not determine.

    No axis indexes operands beyond the last entry of `operands`. Results beyond the last entry of
    `results` have the notation of this entry. `fill` is the value that a window reads outside of a
    tensor.
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
"""A range [least, below) of integers: one range for all elements of a tensor, or two arrays with
the bounds of each element.
"""
IndexRange = Callable[[Signature, int], Range | None]
"""Function of a signature and an operand index that returns the valid range of the operand's
elements if they are indices or labels, otherwise None.
"""
Move = Callable[[Signature, int, int, Integers], Integers | None]
"""Function that shows where a node's result contains elements of an operand, for example to
propagate indices.

Its arguments are the signature, the index of the operand, the index of the result, and an array of
the operand's shape. It returns an array of the result's shape with the entries of the given array
at the positions to which the operator moves the operand's elements, and -1 at all other positions.
It returns None if the result contains no element of the operand, or if the positions are not known.
"""


def no_index_range(signature: Signature, slot: int) -> Range | None:
    """Return None: the elements of the operand are neither indices nor labels (see
    `IndexRange`).
    """
    return None


def move_through_reshape(
    signature: Signature, slot: int, result: int, array: Integers
) -> Integers | None:
    """Return `array`, one entry per element of the first operand, in the shape of the result; None
    for other operands (see `Move`).
    """
    return None if slot else array.reshape(signature.result(result).shape)


def move_by_broadcast(
    signature: Signature, slot: int, result: int, array: Integers
) -> Integers | None:
    """Return `array`, one entry per element of an operand, broadcast to the shape of the result
    (see `Move`).
    """
    return np.broadcast_to(array, signature.result(result).shape)


def move_first_by_broadcast(
    signature: Signature, slot: int, result: int, array: Integers
) -> Integers | None:
    """Return `array`, one entry per element of the first operand, broadcast to the shape of the
    result; None for other operands (see `Move`).
    """
    return None if slot else move_by_broadcast(signature, slot, result, array)


Statistics = Callable[[Signature, Space, Mapping[str, int]], tuple[OperatorCollective, ...]]
"""Function of a signature, its iteration space and the split degree of each axis that returns the
collectives inside the operator.
"""


def no_collectives(
    signature: Signature, space: Space, degrees: Mapping[str, int]
) -> tuple[OperatorCollective, ...]:
    """Return (): the operator contains no collective (see `Statistics`)."""
    return ()


def collectives_per_row(
    forward: Sequence[int],
    backward: Sequence[int],
    fixed: Sequence[int] = (),
    through: tuple[int, ...] = (0,),
) -> Statistics:
    """Return the `Statistics` function of an operator that reduces the rows of its first operand
    along joint axes, i.e. axes along which devices exchange statistics if they are split.

    Each entry n of `forward` is an all-reduce in forward of n statistics per row; each entry n of
    `fixed` is one of n bytes per row. Each entry n of `backward` is an all-reduce in backward of n
    statistics per row. `through` is a field of `OperatorCollective`.
    """

    def statistics(
        signature: Signature, space: Space, degrees: Mapping[str, int]
    ) -> tuple[OperatorCollective, ...]:
        width = bytes_per_statistic(signature.operand(0).dtype)
        told = [width * count for count in forward]
        back = [width * count for count in backward]
        axes = {name for dimension in space.operands[0] or () for name in dimension}
        rows = local_point_count(
            space, degrees, (name for name in axes if not space.axis(name).kind.is_joint)
        )
        return all_reduces_of_statistics(
            split_joint_axes(space, degrees), rows, [*told, *fixed], back, through
        )

    return statistics


@dataclass(frozen=True, slots=True)
class Operator:
    """The definition of an operator. Functions in the fields are called with the signature of one
    use of the operator.
    """

    name: str
    """Name of the operator, with its domain unless this is ONNX's default domain, such as
    `com.microsoft.Gelu`.
    """
    notation: Callable[[Signature], Space]
    """Function that returns the iteration space of one use of the operator (see
    `autopipe.ir.space`).
    """
    kind: str
    """Class of the operator for the cost model: matmul, convolution, recurrent, normalization,
    reduction, elementwise, memory (copies), or view (neither computation nor memory traffic,
    because the result aliases the operand).
    """
    flops: Callable[[Signature, Space], float] = lambda signature, space: 0.0
    """Floating-point operations of one forward pass. A multiply-add counts as two operations."""
    backward: float = 1.0
    """FLOPs of backward, as a multiple of those of forward. A matmul has 2, because the gradient of
    each operand is a matmul.
    """
    keeps: tuple[str, ...] = ()
    """Tensors that are saved for backward:

    - "0", "1", …: the operand at this index; ">0", …: the result at this index; "*": all operands
    - "mask": one byte per element of the first result
    - "places": eight bytes per element of the first result (the index of a maximum)
    - "probabilities": a tensor of the size of the first operand
    - "rows": label, weight and logarithm for each element of the second operand

    A tensor that several nodes save counts once. Parameters and constants do not count, because
    they are in memory anyway.
    """
    kernels: int = 1
    """Number of kernels of a forward. Each kernel except the last one writes an intermediate tensor
    of the size of the result, which the next kernel reads.
    """
    static: tuple[int, ...] = ()
    """Operands that must be constant when a program is generated, such as the shape operand of
    Reshape.
    """
    shaping: tuple[int, ...] = ()
    """Operands in `static` that determine nothing but the shapes of results. If their data are not
    known, the result shapes that a model file states are used instead.
    """
    computable: tuple[int, ...] = ()
    """Operands of `static` that may also be computed when the program runs."""
    random: bool = False
    """True if the operator generates random numbers, which differ between forward passes and
    between nodes.
    """
    differentiable: bool = True
    mixes_samples: Callable[[Signature], bool] = lambda signature: False
    """Function that returns True if the result for a sample depends on other samples of the batch,
    so that a division of the batch into micro-batches changes the result. Examples are
    BatchNormalization in training mode, and a mean loss that ignores some labels. The frontend
    warns about such nodes.
    """
    statistics: Statistics = no_collectives
    """Function that returns the collectives inside the operator, in order of execution, if it is
    split along joint axes. Its arguments are the signature of the unsharded tensors, the iteration
    space, and the split degree of each axis.
    """
    weights: tuple[int, ...] = ()
    """Operands whose gradient is computed by a separate matmul (for a lookup, a scatter). If such
    an operand is a parameter, a split backward computes its gradient in its second half,
    `backward_weight`.
    """
    recomputes: float = 0.0
    """Part of `backward`, also as a multiple of the FLOPs of forward, that computes values of
    forward again. It does not count as model FLOPs.
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
    """True for a loss of class labels. Operand 1 has the labels, and operand 2 one weight per
    class.
    """
    lookup: bool = False
    """True if the operator selects slices of operand 0 by the indices in operand 1, as an embedding
    selects rows of its table.
    """
    gates: int = 0
    """Number of gates of a recurrent layer, which is the number of rows of a weight matrix per
    hidden unit; 0 for other operators.
    """
    neutral: float | None = None
    """For an operator that combines the elements along an axis: the element that leaves the results
    unchanged if it is appended along this axis (a mean also counts the appended elements). None for
    other operators, or if the element is not stated.
    """
    finite_at: tuple[tuple[int, int], ...] = ()
    """Pairs (operand, value): if all elements of the operand have the value, result and gradient
    are finite. Stated for operands for which other values may give infinite or undefined results.
    """
    layer_weights: tuple[int, ...] = ()
    """Operands that count as weights of a layer if they do not depend on the inputs of the model.
    """
    scales_and_biases: tuple[int, ...] = ()
    """Operands in `layer_weights` that are scales, biases or slopes. All of their elements are
    equal in a new layer.
    """

    reads_axis: bool = False
    """True for reductions, cumulative sums and products, sorts, and operators along a sequence:
    each result depends on elements at other positions of an axis. If this axis cannot be split and
    contains the samples of a batch, the operator mixes samples. False for windows and
    normalizations.
    """
    sizes: tuple[int, ...] = ()
    """Operands in `static` that are sizes or positions, and that a model may compute from the
    data-dependent number of selected rows.
    """
    index_range: IndexRange = no_index_range
    """Function that returns the valid range of an operand of indices or labels."""
    moved: Move | None = None
    """Function that shows where a result contains elements of an operand. None if the operator
    computes new elements, or if the movement is not stated. For Abs, Clip, Max, Min, Mod and Where,
    an element at such a position may also be another value.
    """

    copied_weights: tuple[int, ...] = ()
    """Operands for which generated code may read a 16-bit copy of a parameter."""
    interpolation: str = ""
    """For an operator that interpolates at computed coordinates: the default of its attribute
    `mode`. "" for other operators.
    """

    @property
    def has_zero_gradient(self) -> bool:
        """True if the operator is differentiable with derivative 0 everywhere, except at steps."""
        return self.differentiable and self.backward == 0.0

    def space(self, signature: Signature) -> Space:
        """Return the iteration space of one use of the operator.

        Raise NotationError, a subclass of ModelError, if the notation does not fit the shapes of
        the tensors. Raise ModelError if the attributes of the node do not fit its operands.
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
    """Return the name of a node's operator, as in the keys of `OPERATORS`: the operator type, with
    its domain unless this is ONNX's default domain.
    """
    return f"{node.domain}.{node.op}" if node.domain not in ("", "ai.onnx") else node.op


def space_from_notation(text: str) -> Callable[[Signature], Space]:
    """Return a function that returns the iteration space of a signature from the fixed notation
    `text`, in which words such as `*x` stand for several dimensions (see `DimensionWords`).
    """
    left, _, right = text.partition("->")
    operands, results = (
        [words.strip() for words in side.split(",") if side.strip()] for side in (left, right)
    )
    return lambda signature: space_from_words(signature, operands, results or [""])


def flops_per_point(coefficient: float) -> Callable[[Signature, Space], float]:
    """Return a function for `Operator.flops`: `coefficient` FLOPs per point of the iteration
    space.
    """
    return lambda signature, space: coefficient * space.points


def flops_per_result_element(coefficient: float) -> Callable[[Signature, Space], float]:
    """Return a function for `Operator.flops`: `coefficient` FLOPs per element of the first
    result.
    """
    return lambda signature, space: coefficient * math.prod(signature.result().shape)


def axis_names(rank: int, prefix: str = "d") -> list[str]:
    """Return `rank` names of axes that consist of `prefix` and a number, such as d0, d1, …"""
    return [f"{prefix}{axis}" for axis in range(rank)]


def unindexed_words(shape: Sequence[int]) -> list[str]:
    """Return the notation of a tensor that no axis indexes: "1" for each dimension."""
    return ["1"] * len(shape)


def mark_words(words: Sequence[str], axes: Iterable[int], mark: str) -> list[str]:
    """Return `words` with `mark` appended to those of the dimensions `axes`. A word "1", which is
    no axis, gets no mark.
    """
    chosen = set(axes)
    return [
        word + mark if axis in chosen and word != "1" else word for axis, word in enumerate(words)
    ]


def replace_words(words: Sequence[str], axes: Iterable[int], word: str = "1") -> list[str]:
    """Return `words` with `word` in place of those of the dimensions `axes`."""
    chosen = set(axes)
    return [word if axis in chosen else each for axis, each in enumerate(words)]


def broadcast_words(shape: Sequence[int], result: Sequence[int], words: Sequence[str]) -> list[str]:
    """Return the notation of an operand of shape `shape` that broadcasts to a result of shape
    `result` with notation `words`. Dimensions are aligned at the end. A dimension that is broadcast
    has no axis, so its word is "1".
    """
    offset = len(result) - len(shape)
    return [
        words[offset + axis] if extent == result[offset + axis] else "1"
        for axis, extent in enumerate(shape)
    ]


def unsplittable_space(signature: Signature) -> Space:
    """Return the iteration space of an operator that cannot be split: it has no axes."""
    return space_from_words(
        signature,
        [],
        [unindexed_words(value.shape if value else ()) for value in signature.results],
    )


def space_along_axes(signature: Signature, axes: Iterable[int], mark: str) -> Space:
    """Return the iteration space of an operator whose results have the shape of its first operand.
    The axes of the dimensions `axes` have the mark `mark`. No axis indexes the other operands.
    """
    return space_from_words(signature, [mark_words(signature.words, axes, mark)], [signature.words])


def space_with_changed_axes(signature: Signature, axes: Iterable[int], operands: int = 1) -> Space:
    """Return the iteration space of an operator whose first `operands` operands and all results
    differ in shape only in the dimensions `axes`. No axis indexes these dimensions and the other
    operands.
    """
    words = replace_words(signature.words, axes)
    return space_from_words(signature, [words] * operands, [words])


def nonnegative_axis(axis: int, rank: int) -> int:
    """Return the index from the front of an axis, which may be negative (counted from the back), of
    a tensor with `rank` dimensions.
    """
    return axis + rank if axis < 0 else axis


def stated_axes(signature: Signature, operand: int) -> tuple[int, ...] | None:
    """Return the axes that the constant operand `operand` states or, without such a constant, the
    attribute `axes`. Return None if the node has neither.

    The result counts axes from the front. Negative axes are relative to the larger rank of the
    first operand and the first result, because some operators add dimensions.
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
    """The window of a convolution or pooling. Each field has one entry per spatial axis. `begin`
    and `end` are the pads, as the node states them or as `auto_pad` defines them.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def reach(self) -> tuple[int, ...]:
        """Number of elements from the first to the last one that a window reads, along each axis;
        dilation leaves gaps in between.
        """
        return tuple(
            dilation * (size - 1) + 1
            for size, dilation in zip(self.kernel, self.dilations, strict=True)
        )

    def without_split_pads(self, is_split: Callable[[str], bool]) -> SpatialWindow:
        """Return the window without the pads of spatial axes that are split. `is_split` is called
        with the name of the axis, o0, o1 and so on.
        """
        begin, end = (
            tuple(0 if is_split(f"o{axis}") else pad for axis, pad in enumerate(side))
            for side in (self.begin, self.end)
        )
        return replace(self, begin=begin, end=end)

    def words(self, axis: int, source: int, result: int, splits: bool = True) -> tuple[str, str]:
        """Return (operand, result): the notation of one spatial dimension, with size `source` in
        the operand and `result` in the result. Unless `splits` is true, the axis cannot be split.
        """
        word = f"o{axis}"
        stride = self.strides[axis]
        begin = self.begin[axis]
        reach = self.reach[axis]
        if not splits:
            return f"i{axis}!", f"{word}!"
        is_same = (stride, begin, reach) == (1, 0, 1) and source == result
        return word if is_same else f"[{word} {stride} {-begin} {reach}]", word

    def covered_sizes(self, source: tuple[int, ...]) -> tuple[int, ...]:
        """Return, for each axis, the size that `source` consecutive windows cover. The result of a
        transposed convolution has this size before it is cropped.
        """
        return tuple(
            (count - 1) * stride + reach
            for count, stride, reach in zip(source, self.strides, self.reach, strict=True)
        )

    def exact_end_pads(self, source: tuple[int, ...], result: tuple[int, ...]) -> tuple[int, ...]:
        """Return, for each axis, the pads at the end with which `result` windows exactly cover an
        operand of size `source`. A pad is negative if the windows do not read the last elements.
        """
        covered = zip(self.covered_sizes(result), source, self.begin, strict=True)
        return tuple(whole - extent - begin for whole, extent, begin in covered)


def window_of(
    node: Node, kernel: tuple[int, ...], source: tuple[int, ...], result: tuple[int, ...]
) -> SpatialWindow:
    """Return the window of a convolution or pooling node. `kernel` is the size of the window;
    `source` and `result` are the spatial sizes of operand and result.
    """
    rank = len(kernel)
    policy = node.text("auto_pad", "NOTSET")
    strides, dilations = (node.integers(name) or (1,) * rank for name in ("strides", "dilations"))
    pads = (node.integers("pads") if policy == "NOTSET" else ()) or (0,) * (2 * rank)
    window = SpatialWindow(kernel, strides, dilations, pads[:rank], pads[rank:])
    if policy in ("SAME_UPPER", "SAME_LOWER"):
        totals = [max(total, 0) for total in window.exact_end_pads(source, result)]
        small = tuple(total // 2 for total in totals)
        large = tuple(total - total // 2 for total in totals)
        begin, end = (small, large) if policy == "SAME_UPPER" else (large, small)
        return replace(window, begin=begin, end=end)
    return window
