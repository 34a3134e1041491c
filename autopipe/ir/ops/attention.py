"""Attention and what goes with it. Heads are (h r): h key-value heads, each shared by r query heads."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopipe.ir.ops.lines import aligned, spell
from autopipe.ir.ops.row import NotationLine, Operator, Signature, per_result
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
