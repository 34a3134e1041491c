"""Attention, rotary embeddings and linear attention, and operators of ONNX Runtime's domain
com.microsoft that exporters write.

A head dimension (h r) consists of h key-value heads and, for each, r query heads.
"""

from __future__ import annotations

import math

from autopipe.ir.graph import DType, Node
from autopipe.ir.ops.elementwise import pointwise
from autopipe.ir.ops.matmul_conv import batched_matmul_words
from autopipe.ir.ops.normalization import BYTES_OF_MOMENTS, BYTES_OF_NORM
from autopipe.ir.ops.operator import (
    Operator,
    Range,
    Signature,
    Statistics,
    axis_names,
    broadcast_words,
    mark_words,
    no_index_range,
    per_point,
    per_result,
    per_row,
    space_from_notation,
    space_from_words,
)
from autopipe.ir.space import Space

DTYPE_BY_ONNX_CODE = {1: DType.FLOAT32, 10: DType.FLOAT16, 16: DType.BFLOAT16, 11: DType.FLOAT64}
"""Element types by the value of ONNX's TensorProto.DataType."""


def is_positional(signature: Signature) -> bool:
    """True if the keys that a query attends to depend on the position of the query (causal mask or
    window).
    """
    node = signature.node
    windows = (node.integer("left_window_size", -1), node.integer("right_window_size", -1))
    return bool(node.integer("is_causal")) or max(windows) >= 0


def softmax_type(node: Node, dtype: DType) -> DType | None:
    """Return the type in which an attention node computes the softmax, or None if it is `dtype`,
    the type of the operands, or not stated.
    """
    found = DTYPE_BY_ONNX_CODE.get(node.integer("softmax_precision"))
    return None if found is dtype else found


def needs_stepwise_softmax(node: Node, dtype: DType) -> bool:
    """True if no attention kernel of torch computes the node: it has a soft cap, a sink, scores as
    a result, or a softmax in another type than `dtype`, the type of the operands.
    """
    special = any(node.inputs[7:]) or any(node.outputs[3:]) or softmax_type(node, dtype) is not None
    return special or bool(node.number("softcap"))


def attention(signature: Signature) -> Space:
    """Return the iteration space `b (h r) q d, b h k d, b h k v -> b (h r) q v`, with d and k
    unsplittable.

    b: batch, q: queries, k: keys, d and v: features of a key and a value. If the mask depends on
    positions, each device gets its coordinate along q. Each device has all keys and values.

    The operands may include a sink after the operands of ONNX: a score per head that is part of the
    softmax and has no value (Xiao et al. 2023).
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
    """Return the FLOPs of two matmuls: queries by all keys, including the p cached keys of earlier
    calls, and probabilities by values.
    """
    axes = space.axis_sizes()
    scores = axes["b"] * axes["h"] * axes["r"] * axes["q"] * (axes["k"] + axes.get("p", 0))
    return 2.0 * scores * (axes["d"] + axes["v"])


def _space_of_heads(signature: Signature, s: str, heads: int, *others: str) -> Space:
    """Return the iteration space with data `b h s d` or `b s (h d)`, and d unsplittable. `heads` is
    the number of heads of the second form.
    """
    shape = signature.operand(0).shape
    if len(shape) == 4:
        return space_from_words(
            signature, [f"b h {s} d!", *others], ["b h s d"], h=shape[1], d=shape[3]
        )
    return space_from_words(
        signature, [f"b {s} (h d!)", *others], ["b s (h d)"], h=heads, d=shape[2] // heads
    )


def rotary_embedding(signature: Signature) -> Space:
    """Return the iteration space `b h s d, b s 1, b s 1, b s -> b h s d`, with d unsplittable. If
    the node has position ids, no axis indexes the cosine and sine tables.
    """
    others = ("1 1", "1 1", "b s") if signature.present(3) else ("b s 1", "b s 1")
    return _space_of_heads(signature, "s", signature.node.integer("num_heads"), *others)


def _rotary(signature: Signature) -> Space:
    """Return the iteration space `*x d!, *x 1, *x 1 -> *x d` of a fused rotary embedding. The
    cosines and sines broadcast to the data.
    """
    words = axis_names(signature.rank - 1, "x")
    shape = signature.operand(0).shape
    angles = [
        [*broadcast_words(signature.operand(index).shape[:-1], shape[:-1], words), "1"]
        for index in (1, 2)
    ]
    return space_from_words(signature, [[*words, "d!"], *angles], [[*words, "d"]])


def linear_attention(signature: Signature) -> Space:
    """Return the iteration space `b t (h r d), b t (h d), b t (h v), b h d v -> b t (h r v), b h d
    v`, with t and d unsplittable.
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
    """Return the FLOPs of one write of the state per key and one read per query. The delta rule
    adds one read per key.
    """
    axes = space.axis_sizes()
    reads = axes["r"] + 1 + signature.present(5)
    return 2.0 * reads * axes["b"] * axes["t"] * axes["h"] * axes["d"] * axes["v"]


def _table_positions(signature: Signature, slot: int) -> Range | None:
    """Return the range of the positions in the tables of cosines and sines: operand 3."""
    return (0, signature.operand(1).shape[0]) if slot == 3 else None


ATTENTION = (
    Operator(
        "LinearAttention",
        linear_attention,
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
        attention,
        "matmul",
        _attention_flops,
        2.5,
        ("0", "1", "2", ">0"),
        recomputes=0.5,
    ),
    *(
        # Multiply by the cosines, then add the product of the swapped halves with the sines.
        Operator(
            name,
            space,
            "elementwise",
            per_result(3.0),
            1.0,
            ("1", "2"),
            kernels=3,
            index_range=positions,
        )
        for name, space, positions in (
            ("RotaryEmbedding", rotary_embedding, _table_positions),
            ("autopipe.Rotary", _rotary, no_index_range),
        )
    ),
)


def _fused_matmul(signature: Signature) -> Space:
    """Return the iteration space of a MatMul whose operands may be transposed."""
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


def _skip_layer_norm(signature: Signature) -> Space:
    """Return the iteration space `*b x, *b x, x … -> *b x, *b 1, *b 1, *b x`, with x marked `=`."""
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


def _rotary_embedding(signature: Signature) -> Space:
    """Return the iteration space `b h s d, b s, 1 1, 1 1 -> b h s d`, or with data `b s (h d)`. If
    the only position id is that of the first token, each device derives its positions from its
    coordinate along s.
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
    flops = per_result(cost)
    return Operator(
        _DOMAIN + name, _skip_layer_norm, "normalization", flops, 2.0, ("0",), statistics=statistics
    )


def _contributed_table_positions(signature: Signature, slot: int) -> Range | None:
    """Return the range of the positions in the tables of cosines and sines: operand 1. If the
    operand has one element, it is the first position, from which the positions count up.
    """
    if slot != 1:
        return None
    counts_up = signature.operand(1).elements == 1
    last = signature.operand(0).shape[-2] - 1 if counts_up else 0
    return 0, signature.operand(2).shape[0] - last


CONTRIB = (
    *pointwise(f"{_DOMAIN}QuickGelu", 6.0),
    *pointwise(f"{_DOMAIN}Gelu", 8.0),
    *pointwise(f"{_DOMAIN}FastGelu {_DOMAIN}BiasGelu", 9.0),
    Operator(
        f"{_DOMAIN}FusedMatMul",
        _fused_matmul,
        "matmul",
        per_point(2.0),
        2.0,
        ("0", "1"),
        weights=(0, 1),
    ),
    _skip_norm_operator(
        "SkipLayerNormalization", 9.0, per_row(*BYTES_OF_MOMENTS, through=(0, 1, 4))
    ),
    _skip_norm_operator(
        "SkipSimplifiedLayerNormalization", 6.0, per_row(*BYTES_OF_NORM, through=(0, 1, 3))
    ),
    Operator(
        f"{_DOMAIN}RotaryEmbedding",
        _rotary_embedding,
        "elementwise",
        per_result(3.0),
        1.0,
        ("1", "2", "3"),
        kernels=3,
        index_range=_contributed_table_positions,
    ),
)

OPERATOR_DEFINITIONS = (*ATTENTION, *CONTRIB)
