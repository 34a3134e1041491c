"""Definitions of attention, rotary embeddings and linear attention, and of operators of ONNX
Runtime's domain com.microsoft that exporters write.

Iteration spaces are written in the notation of `autopipe.ir.space`. A head dimension (h r) consists
of h key-value heads with r query heads each.
"""

from __future__ import annotations

import math

from autopipe.ir.graph import DType, Node
from autopipe.ir.ops.elementwise import pointwise_operators
from autopipe.ir.ops.matmul_conv import batched_matmul_words
from autopipe.ir.ops.normalization import BYTES_OF_MOMENTS, BYTES_OF_NORM
from autopipe.ir.ops.operator import (
    Operator,
    Range,
    Signature,
    Statistics,
    axis_names,
    broadcast_words,
    collectives_per_row,
    flops_per_point,
    flops_per_result_element,
    mark_words,
    no_index_range,
    space_from_notation,
    space_from_words,
)
from autopipe.ir.space import Space

DTYPE_BY_ONNX_CODE = {1: DType.FLOAT32, 10: DType.FLOAT16, 16: DType.BFLOAT16, 11: DType.FLOAT64}
"""Floating-point element types by their numbers in ONNX (`TensorProto.DataType`)."""


def is_positional(signature: Signature) -> bool:
    """Return True if the keys that a query attends to depend on the query's position, because the
    attention is causal or has a window.
    """
    node = signature.node
    windows = (node.integer("left_window_size", -1), node.integer("right_window_size", -1))
    return bool(node.integer("is_causal")) or max(windows) >= 0


def softmax_type(node: Node, dtype: DType) -> DType | None:
    """Return the type in which an attention node computes the softmax, if this type is stated and
    differs from `dtype`, the type of the operands. Otherwise return None.
    """
    found = DTYPE_BY_ONNX_CODE.get(node.integer("softmax_precision"))
    return None if found is dtype else found


def needs_stepwise_softmax(node: Node, dtype: DType) -> bool:
    """Return True if no fused attention kernel of torch computes the node: the node has a soft cap,
    a sink (an additional score per head), the attention scores as a result, or a softmax in a type
    other than `dtype`, the type of the operands.
    """
    special = any(node.inputs[7:]) or any(node.outputs[3:]) or softmax_type(node, dtype) is not None
    return special or bool(node.number("softcap"))


def attention_space(signature: Signature) -> Space:
    """Return the iteration space `b (h r) q d!, b h k! d, b h k v -> b (h r) q v`: each device has
    all keys, with all of their features.

    b: batch, q: queries, k: keys, d and v: features of a key and of a value. If the mask depends on
    positions, or if the node has further results, q is marked `=`, so that each device gets its
    coordinate along q.

    An additional last operand is the sink: one score per head that takes part in the softmax but
    has no value (Xiao et al. 2023).
    """
    query, key, value = (signature.operand(index).shape for index in range(3))
    q = (
        "q="
        if is_positional(signature) or any(value is not None for value in signature.results[1:])
        else "q"
    )
    past = signature.operand(4).shape[2] if signature.present(4) else 0
    if signature.rank == 4:
        first = [f"b (h r) {q} d!", "b h k! d", "b h k v"]
        result = "b (h r) q v"
        heads = query[1]
        groups = key[1]
        depth = query[3]
        values = value[3]
    else:
        first = [f"b {q} (h r d!)", "b k! (h d)", "b k (h v)"]
        result = "b q (h r v)"
        heads = signature.node.integer("q_num_heads")
        groups = signature.node.integer("kv_num_heads")
        depth = query[2] // heads
        values = value[2] // groups
    scores = (query[0], heads, query[-2], past + key[-2])
    mask = broadcast_words(
        signature.operand(3).shape if signature.present(3) else (),
        scores,
        ["b", "(h r)", "q", "t!"],
    )
    others = [mask, "b h p! d", "b h p v", "b", "(h r)"]
    results = [result, "b h t! d", "b h t v", "b (h r) q t"]
    extents = {"h": groups, "r": heads // groups, "d": depth, "v": values}
    return space_from_words(signature, [*first, *others], results, **extents)


def _attention_flops(signature: Signature, space: Space) -> float:
    """Return the FLOPs of the two matmuls of an attention: queries times all keys (including the p
    cached keys of earlier calls), and probabilities times values.
    """
    axes = space.axis_sizes()
    scores = axes["b"] * axes["h"] * axes["r"] * axes["q"] * (axes["k"] + axes.get("p", 0))
    return 2.0 * scores * (axes["d"] + axes["v"])


def _space_of_heads(signature: Signature, s: str, heads: int, *others: str) -> Space:
    """Return the iteration space of an operator whose first operand and result have dimensions `b h
    s d` or, with three dimensions, `b s (h d)`. The features d cannot be split. `s` is the axis of
    positions with its mark, `heads` the size of h for three dimensions, and `others` the words of
    the other operands.
    """
    shape = signature.operand(0).shape
    if len(shape) == 4:
        return space_from_words(
            signature, [f"b h {s} d!", *others], ["b h s d"], h=shape[1], d=shape[3]
        )
    return space_from_words(
        signature, [f"b {s} (h d!)", *others], ["b s (h d)"], h=heads, d=shape[2] // heads
    )


def rotary_embedding_space(signature: Signature) -> Space:
    """Return the iteration space of a RotaryEmbedding: `b h s d!, b s 1, b s 1, b s -> b h s d`
    with batch b, heads h, positions s and features d. If the node has position ids (the last
    operand), no axis indexes the tables of cosines and sines.
    """
    others = ("1 1", "1 1", "b s") if signature.present(3) else ("b s 1", "b s 1")
    return _space_of_heads(signature, "s", signature.node.integer("num_heads"), *others)


def _fused_rotary_space(signature: Signature) -> Space:
    """Return the iteration space `*x d!, *x 1, *x 1 -> *x d` of a fused rotary embedding. The
    operands are the data, the cosines and the sines, which broadcast to the data; d are the
    features of a head.
    """
    words = axis_names(signature.rank - 1, "x")
    shape = signature.operand(0).shape
    angles = [
        [*broadcast_words(signature.operand(index).shape[:-1], shape[:-1], words), "1"]
        for index in (1, 2)
    ]
    return space_from_words(signature, [[*words, "d!"], *angles], [[*words, "d"]])


def linear_attention_space(signature: Signature) -> Space:
    """Return the iteration space of a LinearAttention: `b t! (h r d!), b t! (h d!), b t! (h v), b h
    d! v -> b t! (h r v), b h d! v`. The operands are queries, keys, values and the state.

    b: batch, t: positions, d and v: features of a key and of a value.
    """
    node = signature.node
    key = signature.operand(1).shape
    value = signature.operand(2).shape
    heads = node.integer("q_num_heads")
    groups = node.integer("kv_num_heads")
    if heads % groups:
        raise ValueError(f"q_num_heads {heads} is not a multiple of kv_num_heads {groups}")
    decay, beta = (
        "" if not signature.present(index) else signature.operand(index).shape[2]
        for index in (4, 5)
    )
    others = [
        "b t! h" if decay == groups else "b t! (h d!)",
        "b t! h" if beta == groups else "b t! 1",
    ]
    operands = ["b t! (h r d!)", "b t! (h d!)", "b t! (h v)", "b h d! v", *others]
    extents = {"h": groups, "r": heads // groups, "d": key[2] // groups, "v": value[2] // groups}
    return space_from_words(signature, operands, ["b t! (h r v)", "b h d! v"], **extents)


def _linear_attention_flops(signature: Signature, space: Space) -> float:
    """Return the FLOPs of a LinearAttention: per position, one update of the state for each key and
    one multiplication by the state for each query. The delta rule multiplies by the state once more
    for each key.
    """
    axes = space.axis_sizes()
    reads = axes["r"] + 1 + signature.present(5)
    return 2.0 * reads * axes["b"] * axes["t"] * axes["h"] * axes["d"] * axes["v"]


def _table_position_range(signature: Signature, slot: int) -> Range | None:
    """Return the range of the position ids (operand 3), which index the tables of cosines and
    sines; None for other operands.
    """
    return (0, signature.operand(1).shape[0]) if slot == 3 else None


ATTENTION = (
    Operator(
        "LinearAttention",
        linear_attention_space,
        "matmul",
        _linear_attention_flops,
        2.5,
        ("*",),
        recomputes=0.5,
        reads_axis=True,
    ),
    Operator(
        "CausalConvWithState",
        space_from_notation("b c t!, c 1 1, c, b c s! -> b c t!, b c s!"),
        "convolution",
        lambda use, space: 2.0 * use.result().elements * use.operand(1).shape[2],
        2.0,
        ("0", "1"),
        reads_axis=True,
    ),
    Operator(
        "Attention",
        attention_space,
        "matmul",
        _attention_flops,
        2.5,
        ("0", "1", "2", ">0"),
        recomputes=0.5,
    ),
    *(
        # Three FLOPs per element: a product with the cosines, a product of the exchanged halves
        # with the sines, and their sum.
        Operator(
            name,
            space,
            "elementwise",
            flops_per_result_element(3.0),
            1.0,
            ("1", "2"),
            kernels=3,
            index_range=positions,
        )
        for name, space, positions in (
            ("RotaryEmbedding", rotary_embedding_space, _table_position_range),
            ("autopipe.Rotary", _fused_rotary_space, no_index_range),
        )
    ),
)


def _fused_matmul_space(signature: Signature) -> Space:
    """Return the iteration space of a FusedMatMul: that of MatMul, with the last two dimensions of
    an operand exchanged if it is transposed.
    """
    swapped = [bool(signature.node.integer(name)) for name in ("transA", "transB")]
    shapes = [signature.operand(index).shape for index in (0, 1)]
    plain = [
        (*shape[:-2], shape[-1], shape[-2]) if swap else shape
        for shape, swap in zip(shapes, swapped, strict=True)
    ]
    *factors, result = (
        words.split()
        for words in batched_matmul_words(plain[0], plain[1], signature.result().shape)
    )
    operands = [
        [*word[:-2], word[-1], word[-2]] if swap else word
        for word, swap in zip(factors, swapped, strict=True)
    ]
    return space_from_words(signature, operands, [result])


def _skip_norm_space(signature: Signature) -> Space:
    """Return the iteration space `*b x=, *b x, x … -> *b x, *b 1, *b 1, *b x`: the data, the skip
    connection, and vectors such as the scale; the result, two statistics, and the sum of the data
    and the skip connection.
    """
    words = mark_words(signature.words, [signature.rank - 1], "=")
    shape = signature.operand(1).shape
    skip = [
        word if extent > 1 else "1"
        for word, extent in zip(words[-len(shape) :], shape, strict=True)
    ]
    vectors = [[words[-1]]] * (len(signature.operands) - 2)
    statistics = [*words[:-1], "1"]
    return space_from_words(
        signature, [words, skip, *vectors], [words, statistics, statistics, words]
    )


def _contrib_rotary_space(signature: Signature) -> Space:
    """Return the iteration space of com.microsoft's RotaryEmbedding: `b h s d!, b s, 1 1, 1 1 -> b
    h s d`, or with data `b s (h d!)`. The second operand has the position ids. If it has only the
    first position, s is marked `&`: each device derives its positions from its coordinate along s.
    """
    shape = signature.operand(0).shape
    positions = signature.operand(1).shape
    starts = math.prod(positions) == 1
    heads = signature.node.integer("num_heads") or shape[2] // (2 * signature.operand(2).shape[1])
    return _space_of_heads(
        signature,
        "s&" if starts else "s",
        heads,
        " ".join("1" for _ in positions) if starts else "b s",
    )


_DOMAIN = "com.microsoft."


def _skip_norm_operator(name: str, cost: float, statistics: Statistics) -> Operator:
    """Return the definition of a norm of the sum of two tensors, in com.microsoft's domain. `cost`
    is the number of FLOPs per element of the result.
    """
    flops = flops_per_result_element(cost)
    return Operator(
        _DOMAIN + name, _skip_norm_space, "normalization", flops, 2.0, ("0",), statistics=statistics
    )


def _contrib_table_position_range(signature: Signature, slot: int) -> Range | None:
    """Return the range of the positions of com.microsoft's RotaryEmbedding (operand 1), which index
    the tables of cosines and sines; None for other operands. An operand with one element is the
    first of consecutive positions.
    """
    if slot != 1:
        return None
    counts_up = signature.operand(1).elements == 1
    last = signature.operand(0).shape[-2] - 1 if counts_up else 0
    return 0, signature.operand(2).shape[0] - last


CONTRIB = (
    *pointwise_operators(f"{_DOMAIN}QuickGelu", 6.0),
    *pointwise_operators(f"{_DOMAIN}Gelu", 8.0),
    *pointwise_operators(f"{_DOMAIN}FastGelu {_DOMAIN}BiasGelu", 9.0),
    Operator(
        f"{_DOMAIN}FusedMatMul",
        _fused_matmul_space,
        "matmul",
        flops_per_point(2.0),
        2.0,
        ("0", "1"),
        weights=(0, 1),
    ),
    _skip_norm_operator(
        "SkipLayerNormalization", 9.0, collectives_per_row(*BYTES_OF_MOMENTS, through=(0, 1, 4))
    ),
    _skip_norm_operator(
        "SkipSimplifiedLayerNormalization",
        6.0,
        collectives_per_row(*BYTES_OF_NORM, through=(0, 1, 3)),
    ),
    Operator(
        f"{_DOMAIN}RotaryEmbedding",
        _contrib_rotary_space,
        "elementwise",
        flops_per_result_element(3.0),
        1.0,
        ("1", "2", "3"),
        kernels=3,
        index_range=_contrib_table_position_range,
    ),
)

OPERATOR_DEFINITIONS = (*ATTENTION, *CONTRIB)
