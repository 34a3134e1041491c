"""Definitions of matmuls, convolutions, pooling and recurrent layers. Iteration spaces are written
in the notation of `autopipe.ir.space`.

Conv, MaxPool, AveragePool and LpPool can be split along spatial axes (see `conv_space` and
`pool_space`). Each device then receives the elements at the edges of its shard from its neighbours
(halo exchange).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Value
from autopipe.ir.ops.normalization import extreme_collectives
from autopipe.ir.ops.operator import (
    DimensionWords,
    Operator,
    OperatorCollective,
    Signature,
    axis_names,
    broadcast_words,
    flops_per_point,
    local_point_count,
    space_from_notation,
    space_from_words,
    split_joint_axes,
    unindexed_words,
    window_of,
)
from autopipe.ir.space import Space


def is_matmul_of_matrices(signature: Signature) -> bool:
    """Return True if the node is an ONNX MatMul whose second operand is a matrix. The first operand
    may have any rank.
    """
    node = signature.node
    return node.op == "MatMul" and not node.domain and len(signature.operand(1).shape) == 2


def can_fuse_bias(product: Value, bias: Value) -> bool:
    """Return True if the addition of `bias` can be fused with the matmul that computes `product`:
    the bias has one element per column of the product and the product's type, and the product has
    at least two dimensions.
    """
    return (
        len(product.shape) > 1 and bias.shape == product.shape[-1:] and bias.dtype is product.dtype
    )


def matmul_space(signature: Signature) -> Space:
    """Return the iteration space `*b m k+, *b k n -> *b m n` of a MatMul, with batch dimensions *b.
    Vectors and batch dimensions follow the rules of numpy.matmul.
    """
    first, second, result = batched_matmul_words(
        signature.operand(0).shape, signature.operand(1).shape, signature.result().shape
    )
    return space_from_words(signature, [first, second], [result])


def batched_matmul_words(
    left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...], k: str = "k+"
) -> list[str]:
    """Return the notation of the two operands and the result of a batched matmul with the given
    shapes. `k` is the contracted axis with its mark.
    """
    row = ["m"] * (len(left) > 1)
    column = ["n"] * (len(right) > 1)
    lead = result[: len(result) - len(row) - len(column)]
    stacks = axis_names(len(lead), "b")
    first = broadcast_words(left[:-2], lead, stacks)
    second = broadcast_words(right[:-2], lead, stacks)
    return [
        " ".join(words)
        for words in ([*first, *row, k], [*second, k, *column], [*stacks, *row, *column])
    ]


def gemm_space(signature: Signature) -> Space:
    """Return the iteration space `m k, k n, *m *n -> m n` of a Gemm. Either matrix may be
    transposed. If k is split, only the first device along k adds the bias.
    """
    biased = has_bias(signature)
    k = "k&" if biased else "k+"
    first = f"{k} m" if signature.node.integer("transA") else f"m {k}"
    second = "n k" if signature.node.integer("transB") else "k n"
    bias = (
        [broadcast_words(signature.operand(2).shape, signature.result().shape, ["m", "n"])]
        if biased
        else []
    )
    return space_from_words(signature, [first, second, *bias], ["m n"])


def has_bias(signature: Signature) -> bool:
    """Return True if a Gemm adds its third operand."""
    return signature.present(2) and signature.node.number("beta", 1.0) != 0.0


@dataclass(frozen=True, slots=True)
class Equation:
    """An Einsum equation: the letters of each operand and of the result. "." stands for an
    ellipsis.
    """

    operands: tuple[str, ...]
    result: str

    def __str__(self) -> str:
        return f"{','.join(self.operands)}->{self.result}".replace(".", "...")


def equation_of(signature: Signature) -> Equation:
    """Return the Einsum equation of a node, with a result even if the attribute omits it. Raise
    ModelError if the equation is invalid or does not fit the operands.
    """
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
        raise ModelError(
            f"the Einsum equation {text!r} is not supported", where=repr(signature.node.name)
        )
    return Equation(operands, right)


def einsum_space(signature: Signature) -> Space:
    """Return the iteration space of an Einsum, with one axis per letter of the equation and one per
    dimension of the ellipsis.

    A letter that the result lacks is summed, so its axis is marked `+`. The axis of a letter that
    occurs twice in one operand cannot be split.
    """
    equation = equation_of(signature)
    result = signature.result().shape
    lead = len(result) - len(equation.result.replace(".", ""))
    start = equation.result.find(".")
    spread = result[start : start + lead] if lead else ()
    diagonal = {letter for word in equation.operands for letter in word if word.count(letter) > 1}

    def operand_words(word: str, shape: tuple[int, ...]) -> str:
        """Return the notation of a tensor with letters `word` and the given shape."""
        dims: list[str] = []
        hidden = len(shape) - len(word.replace(".", ""))
        for letter in word:
            if letter != ".":
                dims.append(
                    letter
                    + ("!" if letter in diagonal else "" if letter in equation.result else "+")
                )
                continue
            for place, extent in enumerate(
                shape[len(dims) : len(dims) + hidden], len(spread) - hidden
            ):
                dims.append(f"e{place}" if place >= 0 and extent == spread[place] else "1")
        return " ".join(dims)

    words = [
        operand_words(word, signature.operand(i).shape) for i, word in enumerate(equation.operands)
    ]
    return space_from_words(signature, words, [operand_words(equation.result, result)])


def _quantized_matmul_space(signature: Signature, second: int, k: str) -> Space:
    """Return the iteration space of a matmul of quantized integers. `second` is the index of the
    second matrix, and `k` the contracted axis with its mark; the other operands are scales and zero
    points. No axis can be split if a scale or zero point has more than one element.
    """
    scales = [
        value
        for index, value in enumerate(signature.operands)
        if index not in (0, second) and value
    ]
    words = batched_matmul_words(
        signature.operand(0).shape, signature.operand(second).shape, signature.result().shape, k
    )
    if any(value.elements > 1 for value in scales):
        words = [
            " ".join(name if name == "1" else f"{name.rstrip('+')}!" for name in word.split())
            for word in words
        ]
    between = [
        unindexed_words(value.shape if value else ()) for value in signature.operands[1:second]
    ]
    return space_from_words(signature, [words[0], *between, words[1]], [words[2]])


def _einsum_flops(signature: Signature, space: Space) -> float:
    """Return the FLOPs of an Einsum: one per point of the iteration space and operand."""
    return float(space.points * max(len(signature.operands), 1))


MATMULS = (
    Operator(
        "MatMul",
        matmul_space,
        "matmul",
        flops_per_point(2.0),
        2.0,
        keeps=("0", "1"),
        weights=(0, 1),
        linear="each",
        neutral=0.0,
        layer_weights=(0, 1),
        copied_weights=(0, 1),
    ),
    Operator(
        "Gemm",
        gemm_space,
        "matmul",
        flops_per_point(2.0),
        2.0,
        keeps=("0", "1"),
        weights=(0, 1),
        neutral=0.0,
        layer_weights=(0, 1, 2),
        scales_and_biases=(2,),
        copied_weights=(0, 1),
    ),
    Operator(
        "Einsum",
        einsum_space,
        "matmul",
        _einsum_flops,
        2.0,
        keeps=("*",),
        weights=(0, 1, 2),
        linear="each",
        neutral=0.0,
        layer_weights=(0, 1),
    ),
    Operator(
        "MatMulInteger",
        lambda use: _quantized_matmul_space(use, 1, "k+"),
        "matmul",
        flops_per_point(2.0),
        differentiable=False,
    ),
    Operator(
        "QLinearMatMul",
        lambda use: _quantized_matmul_space(use, 3, "k"),
        "matmul",
        flops_per_point(2.0),
        differentiable=False,
    ),
)


def spatial_window_words(
    signature: Signature, kernel: tuple[int, ...], indexed: bool = False, *, averages: bool = False
) -> tuple[str, str]:
    """Return (operand, result): the notation of the spatial dimensions of a convolution or pooling
    with window size `kernel`.

    indexed: True if the result contains indices into the full tensor. The axes then cannot be
    split.
    averages: True for an average pooling. An axis then cannot be split if its windows average
    different numbers of elements.
    """
    extents = signature.operand(0).shape[2:], signature.result().shape[2:]
    window = window_of(signature.node, kernel, *extents)
    splits = [not indexed] * len(kernel)
    if averages and not indexed:
        edges = zip(window.begin, window.end, window.exact_end_pads(*extents), strict=True)
        counted = bool(signature.node.integer("count_include_pad"))
        splits = [
            reached <= end if counted else begin == 0 and reached <= 0
            for begin, end, reached in edges
        ]
    words = [
        window.words(axis, *each) for axis, each in enumerate(zip(*extents, splits, strict=True))
    ]
    return " ".join(read for read, _ in words), " ".join(written for _, written in words)


def conv_space(signature: Signature) -> Space:
    """Return the iteration space `n (g c) *[o], (g m) c *k!, (g m) -> n (g m) *o` of a convolution.
    Each spatial position o of the result reads a window of the operand.

    n: batch, g: groups, c and m: input and output channels per group, k: positions of the kernel.
    With a bias, c is marked `&`, so that only one device adds the bias.
    """
    weight = signature.operand(1).shape
    read, written = spatial_window_words(signature, weight[2:])
    c = "c&" if signature.present(2) else "c+"
    tensors = f"n (g {c}) {read}", "(g m) c *k!", "(g m)"
    return space_from_words(
        signature, tensors, [f"n (g m) {written}"], **_channel_sizes(signature, 1)
    )


def conv_transpose_space(signature: Signature) -> Space:
    """Return the iteration space `n (g c) *i!, (g c) m *k!, (g m) -> n (g m) *o!` of a transposed
    convolution, with the letters of `conv_space`. The spatial axes i and o cannot be split.
    """
    weight = signature.operand(1).shape
    groups = signature.node.integer("group", 1)
    c = "c&" if signature.present(2) else "c+"
    extents = {"g": groups, "c": weight[0] // groups, "m": weight[1]}
    return space_from_words(
        signature, [f"n (g {c}) *i!", "(g c) m *k!", "(g m)"], ["n (g m) *o!"], **extents
    )


def conv_integer_space(signature: Signature) -> Space:
    """Return the iteration space of a ConvInteger: that of a convolution whose spatial axes cannot
    be split, with zero points. If there is one zero point per output channel, the axes g and m
    index the zero points.
    """
    tensors: list[DimensionWords] = ["n (g c+) *i!", "(g m) c *k!"]
    if len(signature.operands) > 3 and signature.operand(3).shape not in ((), (1,)):
        point = signature.operands[2]
        tensors += [unindexed_words(point.shape if point else ()), "(g m)"]
    return space_from_words(signature, tensors, ["n (g m) *o!"], **_channel_sizes(signature, 1))


def conv_quantized_space(signature: Signature) -> Space:
    """Return the iteration space of a QLinearConv: that of a convolution with bias, whose spatial
    axes cannot be split. Scale, zero point and bias of the weights may have one element per output
    channel.
    """
    extents = _channel_sizes(signature, 3)
    tensors: list[DimensionWords] = []
    for index, value in enumerate(signature.operands):
        shape = value.shape if value else ()
        is_channels = index in (4, 5, 8) and shape == (extents["g"] * extents["m"],)
        tensors.append("(g m)" if is_channels else unindexed_words(shape))
    tensors[0] = "n (g c) *i!"
    tensors[3] = "(g m) c *k!"
    return space_from_words(signature, tensors, ["n (g m) *o!"], **extents)


def deform_conv_space(signature: Signature) -> Space:
    """Return the iteration space `n c! *i!, m c! *k!, n q! *o!, m, n r! *o! -> n m *o!` of a
    DeformConv: data, weights, offsets, bias and mask.

    n: batch, c: input channels, i and o: positions of the operand and of the result, k: positions
    of the kernel, q and r: channels of the offsets and of the mask. The output channels m can be
    split if there is one group.
    """
    m, c = ("m", "c!") if signature.node.integer("group", 1) == 1 else ("m!", "d!")
    return space_from_words(
        signature, ["n c! *i!", f"{m} {c} *k!", "n q! *o!", m, "n r! *o!"], [f"n {m} *o!"]
    )


def _channel_sizes(signature: Signature, weight: int) -> dict[str, int]:
    """Return the sizes of the axes g (groups), c (input channels per group) and m (output channels
    per group). `weight` is the operand index of the weights.
    """
    outputs, c, *_ = signature.operand(weight).shape
    groups = signature.operand(0).shape[1] // c
    return {"g": groups, "c": c, "m": outputs // groups}


def _conv_flops(signature: Signature, space: Space) -> float:
    """Return the FLOPs of a convolution: two per element of the result and weight of an output
    channel. For a transposed convolution: two per element of the operand and weight of an input
    channel.
    """
    weight = signature.operand(3 if signature.node.op == "QLinearConv" else 1).shape
    outer = signature.operand(0) if signature.node.op == "ConvTranspose" else signature.result()
    return 2.0 * outer.elements * math.prod(weight[1:])


CONVOLUTION = (
    *(
        Operator(
            name,
            notation,
            "convolution",
            _conv_flops,
            2.0,
            keeps=("0", "1"),
            weights=(1,),
            layer_weights=(1, 2),
            scales_and_biases=(2,),
            copied_weights=copied,
        )
        for name, notation, copied in (
            ("Conv", conv_space, (1,)),
            ("ConvTranspose", conv_transpose_space, ()),
        )
    ),
    Operator("ConvInteger", conv_integer_space, "convolution", _conv_flops, differentiable=False),
    Operator("QLinearConv", conv_quantized_space, "convolution", _conv_flops, differentiable=False),
    Operator(
        "DeformConv", deform_conv_space, "convolution", _conv_flops, 2.0, keeps=("*",), weights=(1,)
    ),
)


def pool_space(signature: Signature) -> Space:
    """Return the iteration space `n c *[o] -> n c *o` of a pooling. Each spatial position o of the
    result reads a window of the operand.

    No axis can be split if the node also returns indices, which refer to the full tensor. A spatial
    axis of AveragePool cannot be split if windows at the edges divide by a smaller number, because
    pads do not count.
    """
    indexed = any(value is not None for value in signature.results[1:])
    kernel = signature.node.integers("kernel_shape")
    read, written = spatial_window_words(
        signature, kernel, indexed, averages=signature.node.op == "AveragePool"
    )
    lead = "n! c!" if indexed else "n c"
    fill = -math.inf if signature.node.op == "MaxPool" else 0.0
    return space_from_words(signature, [f"{lead} {read}"], [f"{lead} {written}"], fill=fill)


def _window_pool_flops(signature: Signature, space: Space) -> float:
    """Return the FLOPs of a pooling with windows: one per element of each window."""
    return float(signature.result().elements * math.prod(signature.node.integers("kernel_shape")))


def _global_pool_flops(signature: Signature, space: Space) -> float:
    """Return the FLOPs of a pooling over all positions: one per element of the operand."""
    return float(signature.operand(0).elements)


POOLING = (
    Operator("MaxPool", pool_space, "reduction", _window_pool_flops, 1.0, keeps=("0", "places")),
    Operator("AveragePool", pool_space, "reduction", _window_pool_flops, 1.0),
    Operator("LpPool", pool_space, "reduction", _window_pool_flops, 2.0, keeps=("0", ">0")),
    Operator(
        "GlobalAveragePool",
        space_from_notation("n c *i~ -> n c *1"),
        "reduction",
        _global_pool_flops,
        1.0,
    ),
    Operator(
        "GlobalMaxPool",
        lambda use: space_from_words(
            use, ["n c *i=" if use.operand(0).dtype.is_floating else "n c *i!"], ["n c *1"]
        ),
        "reduction",
        _global_pool_flops,
        keeps=("0", ">0"),
        statistics=extreme_collectives,
    ),
    Operator(
        "GlobalLpPool",
        space_from_notation("n c *i! -> n c *1"),
        "reduction",
        _global_pool_flops,
        2.0,
        keeps=("0", ">0"),
    ),
    # No axis can be split, because the indices of MaxUnpool refer to the full tensor.
    Operator(
        "MaxUnpool",
        space_from_notation("n! c! *i!, n! c! *i! -> n c *o!"),
        "memory",
        keeps=("1",),
        static=(2,),
        shaping=(2,),
    ),
)


ACTIVATIONS = {
    "affine",
    "elu",
    "hardsigmoid",
    "leakyrelu",
    "relu",
    "scaledtanh",
    "sigmoid",
    "softplus",
    "softsign",
    "tanh",
    "thresholdedrelu",
}
"""Supported activations of recurrent layers, in lower case because ONNX ignores the case of their
names.
"""


def recurrent_space(signature: Signature) -> Space:
    """Return the iteration space of a recurrent layer with layout 0: `s! b i!, e! gh! i!, e! gh!
    k!, e! gates!, b, e! b k!, e! b h&, e! peepholes! -> s! e! b h&, e! b h&, e! b h&`. With layout
    1, b is the first dimension of the data and states.

    s: steps, b: batch, i: input features, e: directions, gh: rows of the weights (gates × hidden
    units), gates: elements of the bias, h: hidden units, k: hidden units that a step reads. If h is
    split, each device still has the full weights, because they are stacked by gate, so that the
    rows of some hidden units are not contiguous.
    """
    node = signature.node
    if (direction := node.text("direction", "forward")) not in (
        "forward",
        "reverse",
        "bidirectional",
    ):
        raise ModelError(
            f"{node.op} uses the direction {direction!r}, which is not supported",
            where=repr(node.name),
        )
    for name in node.texts("activations"):
        if name.lower() not in ACTIVATIONS:
            raise ModelError(
                f"{node.op} uses the activation {name!r}, which is not supported",
                where=repr(node.name),
            )
    if not signature.operand(0).shape[node.integer("layout")]:
        raise ModelError(
            f"{node.op} reads a sequence of length 0, expected 1 or more", where=repr(node.name)
        )
    if node.integer("layout") == 1:
        data = "b s! i!"
        before = "b e! k!"
        state = "b e! h&"
        whole = "b s! e! h&"
    else:
        data = "s! b i!"
        before = "e! b k!"
        state = "e! b h&"
        whole = "s! e! b h&"
    operands = [data, "e! gh! i!", "e! gh! k!", "e! gates!", "b", before, state, "e! peepholes!"]
    return space_from_words(signature, operands, [whole, state])


def _recurrent_flops(signature: Signature, space: Space) -> float:
    """Return the FLOPs of a recurrent layer: per step, direction and gate, a matmul of the input
    and one of the state.
    """
    shape = signature.operand(0).shape
    directions, rows, hidden = signature.operand(2).shape
    return 2.0 * shape[0] * shape[1] * directions * rows * (shape[2] + hidden)


def _recurrent_collectives(
    signature: Signature, space: Space, degrees: Mapping[str, int]
) -> tuple[OperatorCollective, ...]:
    """Return the collectives of a recurrent layer that is split along its hidden units.

    Before each step except the first, an all-gather collects the outputs of all hidden units. In
    each step of a GRU that applies its reset gate before the matmul, another all-gather collects
    the outputs after their multiplication by this gate. Backward has one reduce-scatter per
    all-gather.
    """
    axes = split_joint_axes(space, degrees)
    if not axes:
        return ()
    before_product = signature.node.op == "GRU" and not signature.node.integer(
        "linear_before_reset"
    )
    steps = space.axis("s").size
    directions = space.axis("e").size
    times = directions * (steps - 1 + steps * before_product)
    size = (
        local_point_count(space, degrees, "b")
        * space.axis("h").size
        * signature.operand(2).dtype.itemsize
    )
    # The backward collective runs only if one of `operands` requires a gradient. Operand 4, the
    # number of steps of each sample, never requires one.
    operands = tuple(index for index in range(len(signature.operands)) if index != 4)
    return (
        OperatorCollective(axes, size, "all_gather", times=times),
        OperatorCollective(
            axes, size, "reduce_scatter", times=times, backward=True, through=operands
        ),
    )


RECURRENT = tuple(
    Operator(
        name,
        recurrent_space,
        "recurrent",
        _recurrent_flops,
        2.0,
        ("0", ">0"),
        statistics=_recurrent_collectives,
        gates=gates,
        reads_axis=True,
        layer_weights=weights,
    )
    for name, gates, weights in (
        ("RNN", 1, (1, 2, 3)),
        ("GRU", 3, (1, 2, 3)),
        ("LSTM", 4, (1, 2, 3, 7)),  # Operand 7 of an LSTM contains its peephole weights.
    )
)

OPERATOR_DEFINITIONS = (*MATMULS, *CONVOLUTION, *POOLING, *RECURRENT)
