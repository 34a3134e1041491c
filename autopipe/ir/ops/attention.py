"""Attention and what goes with it, and ONNX Runtime's own operators (domain com.microsoft) that exporters write.

Heads are (h r): h key-value heads, each shared by r query heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from autopipe.ir.ops.elementwise import broadcast
from autopipe.ir.ops.normalization import layer_norm, moment_statistics, norm_statistics
from autopipe.ir.ops.operator import (
    NotationLine,
    Operator,
    Signature,
    aligned,
    marked,
    names,
    per_point,
    per_result,
    spell,
)
from autopipe.ir.ops.products import batched
from autopipe.ir.space import Space


@dataclass(frozen=True, slots=True)
class Heads:
    """Extents of one Attention."""

    batch: int
    groups: int
    """Key-value heads."""
    repeats: int
    """Query heads a key-value head."""
    queries: int
    past: int
    keys: int
    """Keys of this call; attention reads `past + keys`."""
    depth: int
    values: int

    @property
    def total(self) -> int:
        """Keys that attention reads."""
        return self.past + self.keys


def heads_of(signature: Signature) -> Heads:
    """The extents of an Attention, whether its operands are [b, h, s, d] or [b, s, h * d]."""
    query, key, value = (signature.operand(index).shape for index in range(3))
    past = signature.operand(4).shape[2] if signature.present(4) else 0
    if len(query) == 4:
        batch, heads, queries, depth = query
        groups, keys, values = key[1], key[2], value[3]
    else:
        heads, groups = signature.node.integer("q_num_heads"), signature.node.integer("kv_num_heads")
        batch, queries, depth = query[0], query[1], query[2] // heads
        keys, values = key[1], value[2] // groups
    return Heads(batch, groups, heads // groups, queries, past, keys, depth, values)


def is_positional(signature: Signature) -> bool:
    """True if what a query may see depends on its place."""
    node = signature.node
    windows = (node.integer("left_window_size", -1), node.integer("right_window_size", -1))
    return bool(node.integer("is_causal")) or max(windows) >= 0


def attention(signature: Signature) -> NotationLine:
    """`b (h r) q d, b h k d, b h k v -> b (h r) q v` with d and k whole.

    Where masks depend on places, a device with some of the queries knows which they are; all know all keys and values.
    """
    heads = heads_of(signature)
    q = "q=" if is_positional(signature) or any(value is not None for value in signature.results[1:]) else "q"
    if len(signature.operand(0).shape) == 4:
        first = [["b", "(h r)", q, "d!"], ["b", "h", "k!", "d"], ["b", "h", "k", "v"]]
        result = ["b", "(h r)", "q", "v"]
    else:
        first = [["b", q, "(h r d!)"], ["b", "k!", "(h d)"], ["b", "k", "(h v)"]]
        result = ["b", "q", "(h r v)"]
    scores = (heads.batch, heads.groups * heads.repeats, heads.queries, heads.total)
    cached = [["b", "h", "p!", "d"], ["b", "h", "p", "v"], ["b"]]
    others: list[list[str] | None] = []
    for index, value in enumerate(signature.operands[3:]):
        if value is None:
            others.append(None)
        else:
            others.append(aligned(value.shape, scores, ["b", "(h r)", "q", "t!"]) if index == 0 else cached[index - 1])
    kept = [["b", "h", "t!", "d"], ["b", "h", "t", "v"], ["b", "(h r)", "q", "t"]]
    results = [None if value is None else kept[index] for index, value in enumerate(signature.results[1:])]
    line = spell([*first, *others], [result, *results])
    return NotationLine(line.text, (("h", heads.groups), ("r", heads.repeats), ("d", heads.depth), ("v", heads.values)))


def _attention_flops(signature: Signature, space: Space) -> float:
    """Two products: queries by keys, probabilities by values."""
    heads = heads_of(signature)
    scores = heads.batch * heads.groups * heads.repeats * heads.queries * heads.total
    return 2.0 * scores * (heads.depth + heads.values)


def rotary_embedding(signature: Signature) -> NotationLine:
    """`b h s d, b s 1, b s 1, b s -> b h s d` with d whole; with positions the caches are tables that stay whole."""
    shape = signature.operand(0).shape
    cache = ["1", "1"] if signature.present(3) else ["b", "s", "1"]
    positions = [["b", "s"]] if signature.present(3) else []
    first = ["b", "h", "s", "d!"] if len(shape) == 4 else ["b", "s", "(h d!)"]
    line = spell([first, cache, cache, *positions], [first])
    heads = shape[1] if len(shape) == 4 else signature.node.integer("num_heads")
    return NotationLine(
        line.text, (("h", heads), ("d", math.prod(shape[2:]) // heads if len(shape) == 3 else shape[3]))
    )


ATTENTION = (
    Operator("Attention", attention, "matmul", _attention_flops, 2.5, ("0", "1", "2", ">0")),
    Operator("RotaryEmbedding", rotary_embedding, "elementwise", per_result(3.0), 1.0, ("1", "2")),
)


def _fused_matmul(signature: Signature) -> NotationLine:
    """MatMul of factors that may be transposed."""
    node = signature.node
    swapped = [bool(node.integer("transA")), bool(node.integer("transB"))]
    shapes = [signature.operand(index).shape for index in (0, 1)]
    plain = [
        (*shape[:-2], shape[-1], shape[-2]) if swap else shape for shape, swap in zip(shapes, swapped, strict=True)
    ]
    *factors, result = (word.split() for word in batched(plain[0], plain[1], signature.result().shape))
    operands = [[*word[:-2], word[-1], word[-2]] if swap else word for word, swap in zip(factors, swapped, strict=True)]
    return spell(operands, [result])


def _skip_layer_norm(signature: Signature) -> NotationLine:
    """`*b x, *b x, x … -> *b x, *b 1, *b 1, *b x` with x=."""
    words = marked(names(len(signature.operand(0).shape)), [len(signature.operand(0).shape) - 1], "=")
    skip = words[len(words) - len(signature.operand(1).shape) :]
    skip = [word if extent > 1 else "1" for word, extent in zip(skip, signature.operand(1).shape, strict=True)]
    vectors = [None if value is None else [words[-1]] for value in signature.operands[2:]]
    statistics = [*words[:-1], "1"]
    shown = [words, statistics, statistics, words]
    return spell(
        [words, skip, *vectors],
        [None if value is None else shown[index] for index, value in enumerate(signature.results)],
    )


def _rotary_embedding(signature: Signature) -> NotationLine:
    """`b h s d, b s, 1 1, 1 1 -> b h s d`, or `b s (h d)`; where one position starts all, devices count on from it."""
    shape = signature.operand(0).shape
    table = signature.operand(2).shape
    starts = math.prod(signature.operand(1).shape) == 1
    s = "s&" if starts else "s"
    first = ["b", "h", s, "d!"] if len(shape) == 4 else ["b", s, "(h d!)"]
    positions = ["1"] * len(signature.operand(1).shape) if starts else ["b", "s"]
    heads = shape[1] if len(shape) == 4 else signature.node.integer("num_heads") or shape[2] // (2 * table[1])
    line = spell([first, positions, ["1", "1"], ["1", "1"]], [first])
    return NotationLine(line.text, (("h", heads), ("d", shape[3] if len(shape) == 4 else shape[2] // heads)))


CONTRIB = (
    Operator("com.microsoft.Gelu", broadcast, "elementwise", per_result(8.0), 1.0, ("0",)),
    Operator("com.microsoft.QuickGelu", broadcast, "elementwise", per_result(6.0), 1.0, ("0",)),
    Operator("com.microsoft.FastGelu", broadcast, "elementwise", per_result(9.0), 1.0, ("0",)),
    Operator("com.microsoft.BiasGelu", broadcast, "elementwise", per_result(9.0), 1.0, ("0",)),
    Operator("com.microsoft.FusedMatMul", _fused_matmul, "matmul", per_point(2.0), 2.0, ("0", "1"), weights=(0, 1)),
    Operator(
        "com.microsoft.SkipLayerNormalization",
        _skip_layer_norm,
        "normalization",
        per_result(9.0),
        2.0,
        ("0",),
        statistics=partial(moment_statistics, through=(0, 1, 4)),
    ),
    Operator(
        "com.microsoft.SkipSimplifiedLayerNormalization",
        _skip_layer_norm,
        "normalization",
        per_result(6.0),
        2.0,
        ("0",),
        statistics=partial(norm_statistics, through=(0, 1, 3)),
    ),
    Operator("com.microsoft.RotaryEmbedding", _rotary_embedding, "elementwise", per_result(3.0), 1.0, ("1", "2", "3")),
    Operator(
        "SimplifiedLayerNormalization",
        layer_norm,
        "normalization",
        per_result(5.0),
        2.0,
        ("0",),
        statistics=norm_statistics,
    ),
)
