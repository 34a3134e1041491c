"""Operators that multiply and sum: matrix products, convolutions, pooling, recurrent layers.

Rows and columns of images can be split: devices read their neighbours' edges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Node, Value
from autopipe.ir.ops.normalization import extreme_statistics
from autopipe.ir.ops.operator import (
    NotationLine,
    Operator,
    Signature,
    SpatialWindow,
    Statistic,
    joint_splits,
    per_point,
    points,
    spell,
    window_of,
)
from autopipe.ir.space import Space


def is_matrix_product(signature: Signature) -> bool:
    """True if this is a MatMul with one matrix for its second factor."""
    node = signature.node
    return node.op == "MatMul" and not node.domain and len(signature.operand(1).shape) == 2


def takes_bias(product: Value, bias: Value) -> bool:
    """True if adding `bias` to such a product can be computed along with it."""
    return len(product.shape) > 1 and bias.shape == product.shape[-1:] and bias.dtype is product.dtype


def matmul(signature: Signature) -> NotationLine:
    """`*b m k, *b k n -> *b m n`, with numpy's rules for vectors and for broadcasting the leading dimensions."""
    first, second, result = batched(signature.operand(0).shape, signature.operand(1).shape, signature.result().shape)
    return NotationLine(f"{first}, {second} -> {result}")


def batched(left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...], k: str = "k+") -> list[str]:
    """Notation of the two factors and the result of a product of stacks of matrices."""
    lead = result[: len(result) - (len(left) > 1) - (len(right) > 1)]
    names = [f"b{axis}" for axis in range(len(lead))]

    def leading(shape: tuple[int, ...]) -> list[str]:
        dims = shape[:-2]
        offset = len(lead) - len(dims)
        return [names[offset + axis] if extent == lead[offset + axis] else "1" for axis, extent in enumerate(dims)]

    row = ["m"] if len(left) > 1 else []
    column = ["n"] if len(right) > 1 else []
    return [
        " ".join(dims) for dims in ([*leading(left), *row, k], [*leading(right), k, *column], [*names, *row, *column])
    ]


def gemm(signature: Signature) -> NotationLine:
    """`m k, k n, *m *n -> m n`, either matrix possibly transposed; of devices with parts of k the first adds C."""
    node = signature.node
    biased = has_bias(signature)
    k = "k&" if biased else "k+"
    first = f"{k} m" if node.integer("transA") else f"m {k}"
    second = "n k" if node.integer("transB") else "k n"
    tensors = [first, second]
    if signature.present(2):
        shape = signature.operand(2).shape
        result = signature.result().shape
        dims = [name if extent == whole else "1" for name, extent, whole in _aligned("mn", shape, result)]
        tensors.append(" ".join(dims) if biased else " ".join("1" for _ in shape))
    return NotationLine(f"{', '.join(tensors)} -> m n")


def has_bias(signature: Signature) -> bool:
    """True if a Gemm adds its third operand."""
    return signature.present(2) and signature.node.number("beta", 1.0) != 0.0


def _aligned(names: str, shape: tuple[int, ...], result: tuple[int, ...]) -> list[tuple[str, int, int]]:
    count = len(shape)
    return list(zip(names[len(names) - count :], shape, result[len(result) - count :], strict=True))


@dataclass(frozen=True, slots=True)
class Equation:
    """An Einsum equation without blanks and with an explicit result; "." stands for an ellipsis."""

    operands: tuple[str, ...]
    result: str

    def __str__(self) -> str:
        return f"{','.join(self.operands)}->{self.result}".replace(".", "...")


def equation_of(signature: Signature) -> Equation:
    """The Einsum equation of a node. Raises ModelError where it is not one."""
    text = signature.node.text("equation").replace(" ", "").replace("...", ".")
    left, arrow, right = text.partition("->")
    operands = tuple(left.split(","))
    letters = [letter for operand in operands for letter in operand if letter != "."]
    if not arrow:
        right = ("." if "." in left else "") + "".join(
            sorted(set(letters) - {x for x in letters if letters.count(x) > 1})
        )
    allowed = all(letter.isascii() and letter.isalpha() for letter in letters)
    fits = len(operands) == len(signature.operands) and all(
        len(word) == len(value.shape) if "." not in word else len(word) - 1 <= len(value.shape)
        for word, value in zip(operands, signature.operands, strict=True)
        if value is not None
    )
    if not allowed or not fits or not set(right) <= {*letters, "."}:
        raise ModelError(f"Einsum has the equation {text!r}", where=repr(signature.node.name))
    return Equation(operands, right)


def einsum(signature: Signature) -> NotationLine:
    """The equation itself: letters absent from the result add up, letters twice in an operand stay whole."""
    equation = equation_of(signature)
    result = signature.result().shape
    lead = len(result) - len(equation.result.replace(".", ""))
    start = equation.result.find(".")
    spread = result[start : start + lead] if lead else ()
    diagonal = {letter for word in equation.operands for letter in word if word.count(letter) > 1}

    def axis(letter: str) -> str:
        mark = "!" if letter in diagonal else "" if letter in equation.result else "+"
        return f"{letter}{mark}"

    def tensor(word: str, shape: tuple[int, ...]) -> str:
        dims: list[str] = []
        hidden = len(shape) - len(word.replace(".", ""))
        for letter in word:
            if letter != ".":
                dims.append(axis(letter))
                continue
            for place, extent in enumerate(shape[len(dims) : len(dims) + hidden], len(spread) - hidden):
                dims.append(f"e{place}" if place >= 0 and extent == spread[place] else "1")
        return " ".join(dims)

    words = [tensor(word, signature.operand(i).shape) for i, word in enumerate(equation.operands)]
    return NotationLine(f"{', '.join(words)} -> {tensor(equation.result, result)}")


def _einsum_flops(signature: Signature, space: Space) -> float:
    return float(space.points * max(len(signature.operands), 1))


def _matmul_integer(signature: Signature) -> NotationLine:
    return _with_scales(signature, (0, 1), "k+")


def _matmul_quantized(signature: Signature) -> NotationLine:
    return _with_scales(signature, (0, 3), "k")


def _with_scales(signature: Signature, factors: tuple[int, int], k: str) -> NotationLine:
    """A product whose other operands are scales and zero points, of which the factors are cut only where all are one
    number for the whole matrix."""
    shapes = [None if value is None else value.shape for value in signature.operands]
    scales = [shape for index, shape in enumerate(shapes) if index not in factors and shape is not None]
    words = batched(
        signature.operand(factors[0]).shape, signature.operand(factors[1]).shape, signature.result().shape, k
    )
    if any(math.prod(shape) > 1 for shape in scales):
        words = [" ".join(name if name == "1" else f"{name.rstrip('+')}!" for name in word.split()) for word in words]
    tensors = ["?" if shape is None else " ".join("1" for _ in shape) for shape in shapes]
    tensors[factors[0]], tensors[factors[1]] = words[:2]
    return NotationLine(f"{', '.join(tensors)} -> {words[2]}")


PRODUCTS = (
    Operator("MatMul", matmul, "matmul", per_point(2.0), 2.0, keeps=("0", "1"), weights=(0, 1)),
    Operator("Gemm", gemm, "matmul", per_point(2.0), 2.0, keeps=("0", "1"), weights=(0, 1)),
    Operator("Einsum", einsum, "matmul", _einsum_flops, 2.0, keeps=("*",), weights=(0, 1, 2)),
    Operator("MatMulInteger", _matmul_integer, "matmul", per_point(2.0), differentiable=False),
    Operator("QLinearMatMul", _matmul_quantized, "matmul", per_point(2.0), differentiable=False),
)


def spatial(prefix: str, count: int) -> str:
    """Names of `count` spatial axes that stay whole."""
    return " ".join(f"{prefix}{axis}!" for axis in range(count))


def conv(signature: Signature) -> NotationLine:
    """`n (g c) *[o], (g m) c *k, (g m) -> n (g m) *o`, windows of the operand for each o.

    c adds up only without a bias, which would be added twice.
    """
    weight = signature.operand(1).shape
    groups = signature.operand(0).shape[1] // weight[1]
    rank = len(weight) - 2
    c = "c&" if signature.present(2) else "c+"
    bias = ", (g m)" if signature.present(2) else ""
    extents = signature.operand(0).shape[2:], signature.result().shape[2:]
    window = window_of(signature.node, weight[2:], *extents)
    read, written = zip(
        *(window.words(axis, *each) for axis, each in enumerate(zip(*extents, strict=True))), strict=True
    )
    return _grouped(
        f"n (g {c}) {' '.join(read)}, (g m) c {spatial('k', rank)}{bias} -> n (g m) {' '.join(written)}",
        groups,
        c=weight[1],
        m=weight[0] // groups,
    )


def conv_transpose(signature: Signature) -> NotationLine:
    """`n (g c) *i, (g c) m *k, (g m) -> n (g m) *o`."""
    weight = signature.operand(1).shape
    groups = signature.node.integer("group", 1)
    rank = len(weight) - 2
    c = "c&" if signature.present(2) else "c+"
    bias = ", (g m)" if signature.present(2) else ""
    return _grouped(
        f"n (g {c}) {spatial('i', rank)}, (g c) m {spatial('k', rank)}{bias} -> n (g m) {spatial('o', rank)}",
        groups,
        c=weight[0] // groups,
        m=weight[1],
    )


def conv_integer(signature: Signature) -> NotationLine:
    """As Conv, with zero points; channels are split only by batch and with one zero point for all."""
    groups, c, m = _quantized_channels(signature, 1)
    rank = len(signature.operand(1).shape) - 2
    points = "".join(", ?" if value is None else ", 1" if value.shape else ", " for value in signature.operands[2:])
    if len(signature.operands) > 3 and signature.operand(3).shape not in ((), (1,)):
        points = f"{points.rpartition(',')[0]}, (g m)"
    return _grouped(
        f"n (g c+) {spatial('i', rank)}, (g m) c {spatial('k', rank)}{points} -> n (g m) {spatial('o', rank)}",
        groups,
        c=c,
        m=m,
    )


def conv_quantized(signature: Signature) -> NotationLine:
    """QLinearConv: as Conv with bias; scale and zero point of the weights may be one a channel."""
    groups, c, m = _quantized_channels(signature, 3)
    rank = len(signature.operand(3).shape) - 2
    tensors = []
    for index, value in enumerate(signature.operands):
        if value is None:
            tensors.append("?")
        elif index == 0:
            tensors.append(f"n (g c) {spatial('i', rank)}")
        elif index == 3:
            tensors.append(f"(g m) c {spatial('k', rank)}")
        elif len(value.shape) == 1 and index in (4, 5, 8) and value.shape[0] == groups * m:
            tensors.append("(g m)")
        else:
            tensors.append(" ".join("1" for _ in value.shape))
    return _grouped(f"{', '.join(tensors)} -> n (g m) {spatial('o', rank)}", groups, c=c, m=m)


def deform_conv(signature: Signature) -> NotationLine:
    """`n c *i, m c *k, n *offset *o, m, n *mask *o -> n m *o`; m is split where there is one group."""
    weight = signature.operand(1).shape
    rank = len(weight) - 2
    single = signature.node.integer("group", 1) == 1
    m = "m" if single else "m!"
    others = [f"n q! {spatial('o', rank)}", m, f"n r! {spatial('o', rank)}"]
    tensors = [f"n c! {spatial('i', rank)}", f"{m} {'c!' if single else 'd!'} {spatial('k', rank)}"]
    for index, value in enumerate(signature.operands[2:]):
        tensors.append("?" if value is None else others[index])
    return NotationLine(f"{', '.join(tensors)} -> n {m} {spatial('o', rank)}")


def _grouped(text: str, groups: int, c: int, m: int) -> NotationLine:
    return NotationLine(text, (("g", groups), ("c", c), ("m", m)))


def _quantized_channels(signature: Signature, weight: int) -> tuple[int, int, int]:
    """Groups, input channels of a group, output channels of a group."""
    shape = signature.operand(weight).shape
    groups = signature.operand(0).shape[1] // shape[1]
    return groups, shape[1], shape[0] // groups


def _conv_flops(signature: Signature, space: Space) -> float:
    """Each element of the result sums over the weights of one output channel."""
    weight = signature.operand(3 if signature.node.op == "QLinearConv" else 1).shape
    return 2.0 * signature.result().elements * math.prod(weight[1:])


def _transpose_flops(signature: Signature, space: Space) -> float:
    """Each element of the operand is spread by the weights of one input channel."""
    return 2.0 * signature.operand(0).elements * math.prod(signature.operand(1).shape[1:])


CONVOLUTION = (
    Operator("Conv", conv, "convolution", _conv_flops, 2.0, keeps=("0", "1"), weights=(1,)),
    Operator("ConvTranspose", conv_transpose, "convolution", _transpose_flops, 2.0, keeps=("0", "1"), weights=(1,)),
    Operator("ConvInteger", conv_integer, "convolution", _conv_flops, differentiable=False),
    Operator("QLinearConv", conv_quantized, "convolution", _conv_flops, differentiable=False),
    Operator("DeformConv", deform_conv, "convolution", _conv_flops, 2.0, keeps=("*",), weights=(1,)),
)


def pool(signature: Signature) -> NotationLine:
    """`n c *[o] -> n c *o`, windows of the operand for each o.

    Where indices into the whole tensor are asked for, it stays whole; so does a mean along axes with pads that do not
    count, as its divisor changes towards the edges.
    """
    indexed = any(value is not None for value in signature.results[1:])
    extents = signature.operand(0).shape[2:], signature.result().shape[2:]
    window = window_of(signature.node, signature.node.integers("kernel_shape"), *extents)
    even = _even_divisors(signature, window.needed(*extents), window)
    read, written = zip(
        *(
            window.words(axis, *each, splits=even[axis] and not indexed)
            for axis, each in enumerate(zip(*extents, strict=True))
        ),
        strict=True,
    )
    lead = "n! c!" if indexed else "n c"
    result = f"{lead} {' '.join(written)}"
    results = [result if value is not None else "?" for value in signature.results]
    fill = -math.inf if signature.node.op == "MaxPool" else 0.0
    return NotationLine(f"{lead} {' '.join(read)} -> {', '.join(results)}", fill=fill)


def _even_divisors(signature: Signature, needed: tuple[int, ...], window: SpatialWindow) -> tuple[bool, ...]:
    """For each spatial axis whether all windows count as many elements; `needed` are the pads at the end they reach."""
    if signature.node.op != "AveragePool":
        return (True,) * len(needed)
    counted = bool(signature.node.integer("count_include_pad"))
    return tuple(
        reached <= end if counted else begin == 0 and reached <= 0
        for begin, end, reached in zip(window.begin, window.end, needed, strict=True)
    )


def _global_mean(signature: Signature) -> NotationLine:
    return _global(signature, "~")


def _global_largest(signature: Signature) -> NotationLine:
    return _global(signature, "=" if signature.operand(0).dtype.is_floating else "!")


def _global_whole(signature: Signature) -> NotationLine:
    return _global(signature, "!")


def _global(signature: Signature, mark: str) -> NotationLine:
    rank = len(signature.operand(0).shape) - 2
    return spell([["n", "c", *(f"i{axis}{mark}" for axis in range(rank))]], [["n", "c", *["1"] * rank]])


def _unpool(signature: Signature) -> NotationLine:
    """Indices count in the whole tensor, so nothing is split."""
    rank = len(signature.operand(0).shape) - 2
    source = f"n! c! {spatial('i', rank)}"
    shape = ", 1" if signature.present(2) else ""
    return NotationLine(f"{source}, {source}{shape} -> n c {spatial('o', rank)}")


def _window_flops(signature: Signature, space: Space) -> float:
    return float(signature.result().elements * math.prod(signature.node.integers("kernel_shape")))


def _source_flops(signature: Signature, space: Space) -> float:
    return float(signature.operand(0).elements)


POOLING = (
    Operator("MaxPool", pool, "reduction", _window_flops, 1.0, keeps=("0", "places")),
    Operator("AveragePool", pool, "reduction", _window_flops, 1.0),
    Operator("LpPool", pool, "reduction", _window_flops, 2.0, keeps=("0", ">0")),
    Operator("GlobalAveragePool", _global_mean, "reduction", _source_flops, 1.0),
    Operator(
        "GlobalMaxPool",
        _global_largest,
        "reduction",
        _source_flops,
        1.0,
        keeps=("0", ">0"),
        statistics=extreme_statistics,
    ),
    Operator("GlobalLpPool", _global_whole, "reduction", _source_flops, 2.0, keeps=("0", ">0")),
    Operator("MaxUnpool", _unpool, "memory", keeps=("1",), static=(2,)),
)


GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
"""Gates of a cell."""


ACTIVATIONS = {
    "affine", "elu", "hardsigmoid", "leakyrelu", "relu", "scaledtanh", "sigmoid", "softplus", "softsign", "tanh",
    "thresholdedrelu",
}  # fmt: skip
"""Activations of gates, in lower case as their names may be spelled."""


def _check(node: Node) -> None:
    """Raise ModelError for a direction or an activation that ONNX does not define."""
    direction = node.text("direction", "forward")
    unknown = [name for name in node.texts("activations") if name.lower() not in ACTIVATIONS]
    if direction not in ("forward", "reverse", "bidirectional"):
        raise ModelError(f"{node.op} has direction {direction!r}", where=repr(node.name))
    if unknown:
        raise ModelError(f"{node.op} has no activation {unknown[0]!r}", where=repr(node.name))


def recurrent(signature: Signature) -> NotationLine:
    """`s b i, e gh i, e gh k, e bias, b, e b k, e b h -> s e b h, e b h, e b h`; with layout 1 b goes first.

    e are directions, h hidden units, and k the same units where all of them are read: a device with some of them holds
    the weights whole, since its rows lie apart, gate by gate.
    """
    _check(signature.node)
    batch_first = signature.node.integer("layout") == 1
    state = ["b", "e!", "h&"] if batch_first else ["e!", "b", "h&"]
    words = [
        ["b", "s!", "i!"] if batch_first else ["s!", "b", "i!"],
        ["e!", "gh!", "i!"],
        ["e!", "gh!", "k!"],
        ["e!", "gates!"],
        ["b"],
        [*state[:2], "k!"],
        state,
        ["e!", "peepholes!"],
    ]
    whole = ["b", "s!", "e!", "h&"] if batch_first else ["s!", "e!", "b", "h&"]
    operands = [None if value is None else words[index] for index, value in enumerate(signature.operands)]
    results = [whole, state, state]
    return spell(operands, [None if value is None else results[index] for index, value in enumerate(signature.results)])


def _flops(signature: Signature, space: Space) -> float:
    """Two products a step, direction and gate: of the input and of the state."""
    shape = signature.operand(0).shape
    directions, rows, hidden = signature.operand(2).shape
    return 2.0 * shape[0] * shape[1] * directions * rows * (shape[2] + hidden)


def _statistics(signature: Signature, space: Space, degrees: Mapping[str, int]) -> tuple[Statistic, ...]:
    """All units' outputs before each step but the first; where a GRU resets before its product, what it resets too."""
    axes = joint_splits(space, degrees)
    if not axes:
        return ()
    before_product = signature.node.op == "GRU" and not signature.node.integer("linear_before_reset")
    steps, directions = space.axis("s").extent, space.axis("e").extent
    times = directions * (steps - 1 + steps * before_product)
    size = points(space, degrees, "b") * space.axis("h").extent * signature.operand(2).dtype.itemsize
    operands = tuple(index for index in range(len(signature.operands)) if index != _LENGTHS)
    return (
        Statistic(axes, size, "all_gather", times=times),
        Statistic(axes, size, "reduce_scatter", times=times, backward=True, through=operands),
    )


_LENGTHS = 4
"""The operand that says how many steps each sample has."""

RECURRENT = tuple(
    Operator(name, recurrent, "recurrent", _flops, 2.0, ("0", ">0"), statistics=_statistics) for name in GATES
)
