"""The row of an operator: everything the compiler knows of it, and the pieces that rows are put
together from.

A row is data and small pure functions. How an operator is spelled in PyTorch is not here: see the
backends.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import DType, Graph, Node, Value
from autopipe.ir.space import NotationError, Space, parse


@dataclass(frozen=True, slots=True)
class Statistic:
    """One exchange that an operator makes itself, `times` in an evaluation, over the devices along
    split `axes` (in the order of the space). In backward it is made where a gradient goes to one of
    the operands `through`.
    """

    axes: tuple[str, ...]
    bytes: int
    """Of the tensor that is reduced, or of the whole that is gathered."""
    kind: str = "all_reduce"
    backward: bool = False
    times: int = 1
    through: tuple[int, ...] = (0,)


def joint_splits(
    space: Space, degrees: Mapping[str, int], names: Iterable[str] | None = None
) -> tuple[str, ...]:
    """The joint axes, of those called `names` or of all, that are split."""
    chosen = {axis.name for axis in space.axes} if names is None else set(names)
    return tuple(
        axis.name
        for axis in space.axes
        if axis.kind.is_joint and degrees.get(axis.name, 1) > 1 and axis.name in chosen
    )


def points(space: Space, degrees: Mapping[str, int], names: Iterable[str]) -> int:
    """How many points of the axes called `names` one device has."""
    return math.prod(space.axis(name).size // degrees.get(name, 1) for name in names)


def reduced(
    axes: tuple[str, ...],
    elements: int,
    forward: Iterable[int],
    backward: Iterable[int],
    through: tuple[int, ...] = (0,),
) -> tuple[Statistic, ...]:
    """An all-reduce for each of `forward` and `backward`, the bytes of one element; none where no
    axis is split.
    """
    if not axes:
        return ()
    return (
        *(Statistic(axes, elements * width) for width in forward),
        *(Statistic(axes, elements * width, backward=True, through=through) for width in backward),
    )


def single(dtype: DType) -> int:
    """Bytes of a statistic of values of a type: those of double precision keep it, all others have
    single.
    """
    return 8 if dtype is DType.FLOAT64 else 4


@dataclass(frozen=True, slots=True)
class Signature:
    """One use of an operator: the node, the types of what it reads and writes, and what is known
    while compiling. `operands[i]` and `results[i]` are None where an optional tensor is absent.
    `constants[i]` holds an operand's numbers where they are known, else None. `opset` gives the ""
    domain's meaning.
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
        """An axis for each dimension of the first operand: d0 d1 …"""
        return names(self.rank)

    def axis(self, default: int = 0) -> int:
        """The attribute `axis`, counted from the front of the first operand."""
        return positive(self.node.integer("axis", default), self.rank)

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
        """The constant as whole numbers, flat; () where it is none."""
        array = self.constant(index)
        return () if array is None else tuple(int(each) for each in array.reshape(-1))

    def sharded(
        self, operands: tuple[Value | None, ...], results: tuple[Value | None, ...]
    ) -> Signature:
        """The same use on local blocks: numbers stay known only where an operand is the whole
        constant.
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


Words = str | Sequence[str]
"""How notation spells a tensor: a word for each dimension, or all of them one blank apart, in which
`*x!` stands for axes x0! x1! … of the dimensions that no other word spells, and `*1` for as many
without an axis.
"""
_WORD = re.compile(r"\([^)]*\)|\[[^\]]*\]|\S+")


def _spelled(value: Value | None, words: Words | None) -> str:
    if value is None or words is None:
        return "?" if value is None else " ".join(unindexed(value.shape))
    if not isinstance(words, str):
        return " ".join(words)
    found = _WORD.findall(words)
    for place, word in enumerate(found):
        if word.startswith("*"):
            name = word[1:].rstrip("!+~&=")
            count = len(value.shape) - len(found) + 1
            run = ["1"] * count if name == "1" else names(count, name)
            return " ".join(
                [
                    *found[:place],
                    *(each + word[1 + len(name) :] for each in run),
                    *found[place + 1 :],
                ]
            )
    return words


def notate(
    signature: Signature,
    operands: Sequence[Words],
    results: Sequence[Words],
    fill: float = 0.0,
    **extents: int,
) -> Space:
    """The space of a use, from words for its tensors and from extents of axes that shapes alone do
    not tell. Operands behind the given ones are settings, which no axis indexes; results behind the
    given ones are as the last one. `fill` is what windows read outside of a tensor.
    """
    sides = zip_longest(signature.operands, operands[: len(signature.operands)])
    left = [_spelled(value, words) for value, words in sides]
    last = len(results) - 1
    right = [
        _spelled(value, results[min(place, last)]) for place, value in enumerate(signature.results)
    ]
    read, written = (
        tuple(None if value is None else value.shape for value in side)
        for side in (signature.operands, signature.results)
    )
    return parse(f"{', '.join(left)} -> {', '.join(right)}", read, written, extents, fill)


Statistics = Callable[[Signature, Space, Mapping[str, int]], tuple[Statistic, ...]]
"""Function from a use's signature and space, and the degrees of its splits by axis, to its
statistics.
"""


def no_statistics(
    signature: Signature, space: Space, degrees: Mapping[str, int]
) -> tuple[Statistic, ...]:
    """For operators that tell other devices nothing."""
    return ()


def per_row(
    forward: Sequence[int],
    backward: Sequence[int],
    fixed: Sequence[int] = (),
    through: tuple[int, ...] = (0,),
) -> Statistics:
    """For operators that reduce the rows of their first operand along its joint axes. Each exchange
    of `forward` has as many numbers a row, each of `fixed` as many bytes, each of `backward`
    numbers.
    """

    def statistics(
        signature: Signature, space: Space, degrees: Mapping[str, int]
    ) -> tuple[Statistic, ...]:
        width = single(signature.operand(0).dtype)
        told = [width * count for count in forward]
        back = [width * count for count in backward]
        axes = {name for dimension in space.operands[0] or () for name in dimension}
        rows = points(space, degrees, (name for name in axes if not space.axis(name).kind.is_joint))
        return reduced(joint_splits(space, degrees), rows, [*told, *fixed], back, through)

    return statistics


@dataclass(frozen=True, slots=True)
class Operator:
    name: str
    """Operator type; of other domains with the domain in front: `com.microsoft.Gelu`."""
    notation: Callable[[Signature], Space]
    """The space of one use, from a line of notation (see `autopipe.ir.space`)."""
    kind: str
    """Class for costs: matmul, convolution, recurrent, normalization, reduction, elementwise,
    memory (copies), or view (neither work nor traffic: the result aliases the operand).
    """
    flops: Callable[[Signature, Space], float] = lambda signature, space: 0.0
    """Floating-point operations of one forward evaluation; a multiply-add counts two."""
    backward: float = 1.0
    """Operations of backward, as a multiple of forward (2 for products: one for each operand's
    gradient).
    """
    keeps: tuple[str, ...] = ()
    """Tensors that backward needs: "0", "1" … operands, ">0" … results, "*" all operands, "mask"
    one byte an element of the first result, "places" eight (where a maximum was), "probabilities" a
    tensor like the first operand, "rows" of each element of the second operand a label, its weight
    and its logarithm. Values kept by several consumers count once; parameters and constants are
    kept anyway.
    """
    kernels: int = 1
    """Kernels of a forward evaluation; each but the last writes as much as the result, which the
    next reads.
    """
    static: tuple[int, ...] = ()
    """Operands whose numbers must be known while compiling (Reshape's shape)."""
    shaping: tuple[int, ...] = ()
    """Operands of `static` that tell only the shapes of results: shapes that a file states stand
    for their numbers.
    """
    computable: tuple[int, ...] = ()
    """Operands of `static` that programs also take if their numbers are computed while running."""
    random: bool = False
    """True if it draws numbers: anew in each evaluation, and others for each node."""
    differentiable: bool = True
    mixes_samples: Callable[[Signature], bool] = lambda signature: False
    """True if one use's result of a sample depends on other samples of the batch in a way that a
    micro-batch changes (BatchNormalization in training mode, a mean loss that ignores some labels);
    the frontend warns.
    """
    statistics: Statistics = no_statistics
    """Exchanges of the operator itself when it is split along joint axes, in their order: from the
    whole tensors' signature, its space, and all degrees by axis.
    """
    weights: tuple[int, ...] = ()
    """Operands whose gradient is a product (or, of a lookup, a scatter) of its own. Where one is a
    parameter, a split backward leaves its gradient to the second half.
    """
    recomputes: float = 0.0
    """Part of `backward`, as a multiple of forward, that computes values of forward again: no model
    FLOPs.
    """

    def space(self, signature: Signature) -> Space:
        """The iteration space of one use. Raises ModelError where the node's attributes make no
        sense for its operands, as a file may state any, and NotationError, a ModelError, where the
        row does not fit the tensors.
        """
        where = repr(signature.node.name)
        try:
            return self.notation(signature)
        except NotationError as error:
            raise NotationError(
                f"{self.name} does not fit its tensors: {error.message}", where=where
            ) from error
        except (ArithmeticError, AssertionError, LookupError, ValueError) as error:
            shapes = ", ".join(
                "absent" if value is None else str(value.shape) for value in signature.operands
            )
            message = f"{self.name} cannot take operands {shapes} with these attributes"
            raise ModelError(message, where=where) from error


OPERATORS: dict[str, Operator] = {}
"""Every row by name; the package puts those of all families in."""


def qualified_name(node: Node) -> str:
    """The operator's name as rows and emitters are keyed: with the domain in front unless it is
    ONNX's own.
    """
    return f"{node.domain}.{node.op}" if node.domain not in ("", "ai.onnx") else node.op


def notated(text: str) -> Callable[[Signature], Space]:
    """The same line for every use, as `notate` takes it."""
    left, _, right = text.partition("->")
    operands, results = (
        [words.strip() for words in side.split(",") if side.strip()] for side in (left, right)
    )
    return lambda signature: notate(signature, operands, results or [""])


def per_point(coefficient: float) -> Callable[[Signature, Space], float]:
    """Operations: `coefficient` for each point of the iteration space."""
    return lambda signature, space: coefficient * space.points


def per_result(coefficient: float) -> Callable[[Signature, Space], float]:
    """Operations: `coefficient` for each element of the first result."""
    return lambda signature, space: coefficient * math.prod(signature.result().shape)


def names(rank: int, prefix: str = "d") -> list[str]:
    """One axis a dimension: d0 d1 …"""
    return [f"{prefix}{axis}" for axis in range(rank)]


def unindexed(shape: Sequence[int]) -> list[str]:
    return ["1"] * len(shape)


def marked(words: Sequence[str], axes: Iterable[int], mark: str) -> list[str]:
    chosen = set(axes)
    return [
        word + mark if axis in chosen and word != "1" else word for axis, word in enumerate(words)
    ]


def replaced(words: Sequence[str], axes: Iterable[int], word: str = "1") -> list[str]:
    chosen = set(axes)
    return [word if axis in chosen else each for axis, each in enumerate(words)]


def aligned(shape: Sequence[int], result: Sequence[int], words: Sequence[str]) -> list[str]:
    """The words of an operand that broadcasts to `result`, whose words are `words`: trailing
    dimensions aligned.
    """
    offset = len(result) - len(shape)
    return [
        words[offset + axis] if extent == result[offset + axis] else "1"
        for axis, extent in enumerate(shape)
    ]


def opaque(signature: Signature) -> Space:
    """No axis at all: an operator that cannot be split."""
    return notate(
        signature, [], [unindexed(value.shape if value else ()) for value in signature.results]
    )


def along(signature: Signature, axes: Iterable[int], mark: str) -> Space:
    """The first operand and all results have one shape, with `mark` at `axes`; other operands are
    settings.
    """
    return notate(signature, [marked(signature.words, axes, mark)], [signature.words])


def changed(signature: Signature, axes: Iterable[int], operands: int = 1) -> Space:
    """The first operands and all results have one shape but for `axes`, which are not indexed;
    others are settings.
    """
    words = replaced(signature.words, axes)
    return notate(signature, [words] * operands, [words])


def positive(axis: int, rank: int) -> int:
    """An axis counted from the front, given one that may count from the back."""
    return axis + rank if axis < 0 else axis


def axes_of(signature: Signature, operand: int) -> tuple[int, ...] | None:
    """Axes given as attribute `axes` or, in later opsets, as a static operand; counted from the
    front. Those of operators that add dimensions count in the result. None where neither is given.
    """
    rank = max(signature.rank, len(signature.result().shape))
    if signature.constant(operand) is not None:
        given = signature.integers(operand)
    elif signature.node.has("axes"):
        given = signature.node.integers("axes")
    else:
        return None
    return tuple(positive(axis, rank) for axis in given)


@dataclass(frozen=True, slots=True)
class SpatialWindow:
    """One number for each spatial axis; `begin` and `end` are the pads that the node states or that
    follow from `auto_pad`.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def reach(self) -> tuple[int, ...]:
        """Extent that a window covers, holes counted."""
        return tuple(
            dilation * (size - 1) + 1
            for size, dilation in zip(self.kernel, self.dilations, strict=True)
        )

    def inside(self, is_split: Callable[[str], bool]) -> SpatialWindow:
        """Without pads along the axes of windows that are split."""
        begin, end = (
            tuple(0 if is_split(f"o{axis}") else pad for axis, pad in enumerate(side))
            for side in (self.begin, self.end)
        )
        return replace(self, begin=begin, end=end)

    def words(self, axis: int, source: int, result: int, splits: bool = True) -> tuple[str, str]:
        """How notation spells a spatial axis from extent `source` to `result`, of the operand and
        of the result.
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
        """Extents that `source` windows cover: a transposed convolution's whole result, before it
        is cropped.
        """
        return tuple(
            (count - 1) * stride + reach
            for count, stride, reach in zip(source, self.strides, self.reach, strict=True)
        )

    def needed(self, source: tuple[int, ...], result: tuple[int, ...]) -> tuple[int, ...]:
        """Pads at the end with which `result` windows fit exactly (negative where the last elements
        are not read).
        """
        covered = zip(self.spread(result), source, self.begin, strict=True)
        return tuple(whole - extent - begin for whole, extent, begin in covered)


def window_of(
    node: Node, kernel: tuple[int, ...], source: tuple[int, ...], result: tuple[int, ...]
) -> SpatialWindow:
    """The window of a convolution or pooling from spatial extents `source` to `result`."""
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
