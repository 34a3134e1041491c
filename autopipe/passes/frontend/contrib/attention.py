"""ONNX Runtime's attention operators (domain com.microsoft) in terms of ONNX's own.

Caches of a batch whose sequences have different lengths are written by TensorScatter and read by
Attention with the length of each; a mask is what is added to scores, as ONNX Runtime's kernels make
it. Keys that a mask hides are given `mask_filter_value` rather than -inf.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Attribute, DType, Value
from autopipe.ir.words import plural
from autopipe.passes.frontend.contrib.rewriting import MOST_PLACES, Rewriter, Rewriting

if TYPE_CHECKING:
    import onnx

DOMAIN = "com.microsoft"
FILTER = -10000.0
"""Default of `mask_filter_value`."""
ROTARY_BASE = 10000.0


@dataclass(frozen=True, slots=True)
class Heads:
    """Queries, keys and values as [batch, heads, tokens, features], and what of keys a query
    sees.
    """

    query: str
    key: str
    value: str
    mask: str = ""
    past: tuple[str, str] = ("", "")
    lengths: str = ""
    sink: str = ""
    causal: int = 0


def _by_head(to: Rewriting, name: str, heads: int) -> str:
    """[batch, tokens, heads · features] as [batch, heads, tokens, features]."""
    batch, tokens, hidden = to.shape(name)
    to.require(
        heads > 0 and hidden % heads == 0,
        (
            f"{hidden} {plural(hidden, 'feature does', 'features do')} not make up {heads} "
            f"{plural(heads, 'head')}"
        ),
    )
    return to.transpose(to.reshape(name, batch, tokens, heads, hidden // heads), 0, 2, 1, 3)


def _attend(
    to: Rewriting, heads: Heads, scores: int, **settings: Attribute
) -> tuple[str, str, str]:
    """An Attention, and what it gives: the result as [batch, tokens, heads · features], all keys
    and all values.

    `scores` is the place among the node's results that the attention's fourth has.
    """
    batch, count, tokens, _ = to.shape(heads.query)
    groups = to.shape(heads.value)[1]
    features = to.shape(heads.value)[3]
    past = to.shape(heads.past[0])[2] if heads.past[0] else 0
    total = past + to.shape(heads.key)[2]
    scale = to.node.number("scale")
    attributes: dict[str, Attribute] = {"is_causal": heads.causal, **settings}
    if scale:
        attributes["scale"] = scale
    results: list[tuple[int, ...]] = [(batch, count, tokens, features)]
    if heads.past[0] or to.wants(scores):
        results += [(batch, groups, total, to.shape(each)[3]) for each in (heads.key, heads.value)]
    if to.wants(scores):
        results.append((batch, count, tokens, total))
    operands = [
        heads.query,
        heads.key,
        heads.value,
        heads.mask,
        *heads.past,
        heads.lengths,
        heads.sink,
    ]
    dtype = to.type_of(heads.query).dtype
    merged = to.add("Attention", operands, *results, dtype=dtype, **attributes)
    outputs = to.nodes[-1].outputs
    if to.wants(scores):
        to.gives(scores, outputs[3])
    keys, values = outputs[1:3] if heads.past[0] else (heads.key, heads.value)
    rows = to.transpose(merged, 0, 2, 1, 3)
    return to.reshape(rows, batch, tokens, count * features), keys, values


def group_query_attention(to: Rewriting) -> None:
    node = to.node
    count = node.integer("num_heads")
    groups = node.integer("kv_num_heads")
    for name in ("sliding_window_cache", "kv_cache_bit_width"):
        to.require(not node.integer(name), f"{name!r} is not supported")
    words = _packed_or_apart(to, count, groups)
    query, key, value = (
        _by_head(to, each, n) for each, n in zip(words, (count, groups, groups), strict=True)
    )
    batch, _, tokens, _ = to.shape(query)
    past = (to.operand(3), to.operand(4))
    total = to.known(6)
    before = "" if total == tokens else _tokens_before(to, tokens, total)
    if to.operand(14):
        epsilon = node.number("qk_norm_epsilon", 1e-6)
        query, key = (
            to.add(
                "RMSNormalization",
                [each, to.required(weight)],
                to.shape(each),
                axis=-1,
                epsilon=epsilon,
            )
            for each, weight in ((query, 14), (key, 15))
        )
    if node.integer("do_rotary"):
        positions = _positions(to, before, batch, tokens)
        query, key = (_turned(to, each, positions) for each in (query, key))
    present = (key, value)
    mask = to.operand(10)
    lengths = to.both("Add", before, to.constant(np.asarray(tokens))) if before else ""
    if past[0] and to.shape(past[0])[2]:
        places = max(total or 0, to.shape(past[0])[2])
        longer = [to.lengthened(each, 2, places) for each in (past if before else present)]
        caches = longer[0], longer[1]
        present = _filled(to, _written(to, caches, present, before), lengths) if before else caches
    if before:
        key, value = present
    else:
        mask = _prompt_mask(to, mask, key)
    sink = to.operand(11)
    if not sink and node.integer("smooth_softmax"):
        sink = to.add(
            "Expand", [to.number(0.0, to.type_of(query).dtype), to.integers(count)], (count,)
        )
    window = node.integer("local_window_size", -1)
    result, _, _ = _attend(
        to,
        Heads(
            query, key, value, mask, lengths=lengths, sink=sink, causal=node.integer("causal", 1)
        ),
        3,
        softcap=node.number("softcap"),
        qk_matmul_output_mode=(0, 2, 3)[node.integer("qk_output")],
        **{"left_window_size": window - 1} if window > 0 else {},
    )
    for index, each in enumerate((result, *present)):
        to.gives(index, each)


def _prompt_mask(to: Rewriting, added: str, key: str) -> str:
    """Added to scores of prompts: the last keys of those that are shorter are padding."""
    batch, _, tokens, _ = to.shape(key)
    ends = to.both("Add", _each(to, to.required(5)), to.constant(np.asarray(1)))
    shown = _between(to, ends, batch, tokens)
    return (
        to.choose(shown, added, to.number(-math.inf, to.type_of(added).dtype)) if added else shown
    )


def _written(
    to: Rewriting, caches: tuple[str, str], new: tuple[str, str], start: str
) -> tuple[str, str]:
    """Keys and values of earlier calls with this one's written from `start` on, in each
    sequence.
    """
    keys, values = (
        to.add("TensorScatter", [cache, each, start], to.shape(cache), axis=-2)
        for cache, each in zip(caches, new, strict=True)
    )
    return keys, values


def _filled(to: Rewriting, caches: tuple[str, str], lengths: str) -> tuple[str, str]:
    """Keys and values with zeros in the places that are not filled yet, as ONNX Runtime hands them
    on.
    """
    batch, _, places, _ = to.shape(caches[0])
    rows = to.places(0, places, -1, 1)
    filled = to.both("Less", rows, to.reshape(lengths, batch, 1, 1, 1), DType.BOOL)
    zero = to.number(0.0, to.type_of(caches[0]).dtype)
    return to.choose(filled, caches[0], zero), to.choose(filled, caches[1], zero)


def _each(to: Rewriting, name: str) -> str:
    """A number for each sequence, as [batch] of int64."""
    return to.reshape(to.cast(name, DType.INT64), to.type_of(name).elements)


def _packed_or_apart(to: Rewriting, count: int, groups: int) -> list[str]:
    """Queries, keys and values of [batch, tokens, features], which one tensor may hold side by
    side.
    """
    query = to.required(0)
    if to.operand(1):
        return [query, to.operand(1), to.required(2)]
    hidden = to.shape(query)[-1]
    whole = count + 2 * groups
    to.require(
        whole > 0 and hidden % whole == 0,
        (
            f"{hidden} {plural(hidden, 'feature does', 'features do')} not make up {whole} "
            f"{plural(whole, 'head')}"
        ),
    )
    return to.split(query, 2, *(hidden // whole * each for each in (count, groups, groups)))


def _tokens_before(to: Rewriting, tokens: int, total: int | None) -> str:
    """For each sequence the tokens of earlier calls: none where this call's are as many as the
    longest has.
    """
    before = to.both("Add", _each(to, to.required(5)), to.constant(np.asarray(1 - tokens)))
    if total is not None:
        return before
    longest = _each(to, to.required(6))
    begins = to.both("Equal", longest, to.constant(np.asarray(tokens)), DType.BOOL)
    return to.choose(begins, to.constant(np.asarray(0)), before)


def _positions(to: Rewriting, before: str, batch: int, tokens: int) -> str:
    """Positions [batch, tokens] of the tokens of a call; a first one counts on from the first that
    is stated.
    """
    stated = to.operand(9)
    steps = to.places(0, tokens, 1, -1)
    if stated and before:
        return stated
    if stated:
        first, *_ = to.split(stated, 1, 1, tokens - 1) if tokens > 1 else [stated]
        return to.both("Add", first, steps)
    if before:
        return to.both("Add", to.reshape(before, batch, 1), steps)
    return to.add("Expand", [steps, to.integers(batch, tokens)], (batch, tokens))


def _turned(to: Rewriting, name: str, positions: str) -> str:
    cosines = to.required(7)
    sines = to.required(8)
    width = 2 * to.shape(cosines)[1]
    return to.add(
        "RotaryEmbedding",
        [name, cosines, sines, positions],
        to.shape(name),
        rotary_embedding_dim=width % to.shape(name)[3],
        interleaved=to.node.integer("rotary_interleaved"),
    )


def multi_head_attention(to: Rewriting) -> None:
    _multi_head(to, to.operand(3), to.operand(4), to.operand(5), 6)


def decoder_masked_attention(to: Rewriting) -> None:
    """MultiHeadAttention of one token, whose operands stand in another order."""
    beams = to.known(8) if to.operand(8) else 1
    to.require(beams == 1 and not to.operand(9), "beams are not supported")
    _multi_head(to, to.operand(10), to.operand(3), to.operand(4), 5)


def _multi_head(to: Rewriting, bias: str, padding: str, added: str, past: int) -> None:
    count = to.node.integer("num_heads")
    query, key, value = _three(to, count, bias)
    pasts = to.operand(past), to.operand(past + 1)
    total = to.shape(key)[2] + (
        to.shape(pasts[0])[2] if pasts[0] and not to.operand(past + 2) else 0
    )
    heads = _masked(to, Heads(query, key, value), padding, added, total)
    for index, each in enumerate(_with_past(to, heads, pasts, to.operand(past + 2), 3)):
        to.gives(index, each)


def _three(to: Rewriting, count: int, bias: str) -> list[str]:
    """Queries, keys and values of a MultiHeadAttention by head, in whichever form they come, with
    their bias.
    """
    query = to.required(0)
    key = to.operand(1)
    if not key and len(to.shape(query)) == 3:
        hidden = to.shape(query)[2]
        features = hidden // 3
        words = to.split(query, 2, features, features, hidden - 2 * features)
    elif not key:
        words = _stacked(to, query, 3)
    elif len(to.shape(key)) == 5:
        words = [query, *_stacked(to, key, 2)]
    else:
        words = [query, key, to.required(2)]
    parts = [word if len(to.shape(word)) == 3 else "" for word in words]
    if bias:
        sizes = [to.shape(part)[2] if part else 0 for part in parts]
        whole = to.type_of(bias).elements
        if not all(sizes):  # Keys and values of another model's part have theirs already.
            sizes = [sizes[0], sizes[0], whole - 2 * sizes[0]]
        biases = to.split(bias, 0, *sizes)
        parts = [
            to.both("Add", part, each) if part else ""
            for part, each in zip(parts, biases, strict=True)
        ]
    return [
        _by_head(to, part, count) if part else word for part, word in zip(parts, words, strict=True)
    ]


def _stacked(to: Rewriting, name: str, parts: int) -> list[str]:
    """The `parts` of [batch, tokens, heads, parts, features], each of [batch, tokens, heads ·
    features].
    """
    batch, tokens, count, _, features = to.shape(name)
    pieces = to.split(name, 3, *[1] * parts)
    return [to.reshape(each, batch, tokens, count * features) for each in pieces]


def _with_past(
    to: Rewriting, heads: Heads, past: tuple[str, str], before: str, scores: int
) -> tuple[str, str, str]:
    """Attention with keys and values of earlier calls in front of this one's; where `before` tells
    how many tokens of a longer buffer are filled, this one's are written behind them.
    """
    tokens = to.shape(heads.query)[2]
    if past[0] and before:
        batch = to.shape(heads.query)[0]
        start = to.add("Expand", [_each(to, before), to.integers(batch)], (batch,))
        key, value = _written(to, past, (heads.key, heads.value), start)
        lengths = to.both("Add", start, to.constant(np.asarray(tokens)))
        heads = dataclasses.replace(heads, key=key, value=value, lengths=lengths)
    elif past[0] and to.shape(past[0])[2]:
        heads = dataclasses.replace(heads, past=past)
    return _attend(to, heads, scores, qk_matmul_output_mode=2)


def _masked(to: Rewriting, heads: Heads, padding: str, added: str, total: int) -> Heads:
    """With what is added to scores: for keys that are padding, and what the model itself adds."""
    causal = to.node.integer("unidirectional")
    visible = _visible(to, padding, heads.query, total) if padding else ""
    if not visible:
        return dataclasses.replace(heads, mask=added, causal=causal)
    dtype = to.type_of(heads.query).dtype
    tokens = to.shape(heads.query)[2]
    hidden = to.number(to.node.number("mask_filter_value", FILTER), dtype)
    mask = to.choose(visible, to.number(0.0, dtype), hidden)
    if causal and tokens > 1:
        # A query that sees nothing but padding looks at that, and ahead only where padding is
        # hidden as well.
        queries = to.places(total - tokens, total, -1, 1)
        before = to.both("LessOrEqual", to.places(0, total, -1), queries, DType.BOOL)
        mask = to.choose(before, mask, to.number(-math.inf, dtype))
    if added:
        mask = to.both("Add", mask, added)
    return dataclasses.replace(heads, mask=mask)


def _visible(to: Rewriting, padding: str, query: str, total: int) -> str:
    """Truth values of the keys that are no padding, as Attention's mask; "" where all are."""
    batch, _, tokens, _ = to.shape(query)
    shape = to.shape(padding)
    if len(shape) == 1:
        return _between(to, padding, batch, total)
    if shape[-1] == 1 and total > 1:
        return ""  # A stand-in for no mask.
    shown = to.cast(padding, DType.BOOL)
    if len(shape) == 4:
        rows = to.integers(total - tokens, 0), to.integers(total, total), to.integers(2, 3)
        return to.add("Slice", [shown, *rows], (*shape[:2], tokens, total))
    return to.reshape(shown, shape[0], 1, tokens if len(shape) == 3 else 1, shape[-1])


def _between(to: Rewriting, bounds: str, batch: int, total: int) -> str:
    """Keys before an end for each sequence, or, where `bounds` goes on with starts, between
    both.
    """
    size = to.shape(bounds)[0]
    bounds = to.cast(bounds, DType.INT64)
    places = to.places(0, total, 1, 1, 1, -1)
    ends, *starts = to.split(bounds, 0, batch, size - batch) if size > batch else [bounds]
    shown = to.both("Less", places, to.reshape(ends, batch, 1, 1, 1), DType.BOOL)
    if size != 2 * batch:
        return shown
    begun = to.both("GreaterOrEqual", places, to.reshape(starts[0], batch, 1, 1, 1), DType.BOOL)
    return to.both("And", shown, begun)


def merged_attention(to: Rewriting) -> None:
    """Attention whose projections of one input are one product."""
    node = to.node
    words = _projected(to, to.operand(2))
    count = node.integer("num_heads")
    query, key, value = (_by_head(to, word, count) for word in words)
    past = to.operand(4)
    filled = to.operand(6)
    halves: tuple[str, str] = "", ""
    earlier = 0
    if past and to.shape(past)[3]:
        keys, values = to.split(past, 0, 1, 1)
        halves = to.reshape(keys, *to.shape(past)[1:]), to.reshape(values, *to.shape(past)[1:])
        earlier = to.shape(past)[3]
    if node.integer("do_rotary"):
        to.require(not filled, "rotary positions in a shared buffer are not supported")
        query, key = (_turned_by_place(to, each, earlier) for each in (query, key))
    total = earlier + (0 if filled else to.shape(key)[2])
    heads = _masked(to, Heads(query, key, value), to.operand(3), to.operand(5), total)
    result, *present = _with_past(to, heads, halves, filled, 2)
    to.gives(0, result)
    if to.wants(1):
        to.gives(1, to.concat(0, *(to.reshape(each, 1, *to.shape(each)) for each in present)))


def _projected(to: Rewriting, bias: str) -> list[str]:
    """Queries, keys and values: an input by merged weights, a bias added."""
    rows = to.required(0)
    weights = to.required(1)
    inside, hidden = to.shape(weights)
    to.require(
        to.shape(rows)[-1] == inside, f"its weights take {inside} {plural(inside, 'feature')}"
    )
    product = to.add("MatMul", [rows, weights], (*to.shape(rows)[:-1], hidden))
    if bias:
        product = to.both("Add", product, bias)
    sizes = to.node.integers("qkv_hidden_sizes") or (hidden // 3,) * 3
    return to.split(product, len(to.shape(product)) - 1, *sizes)


def _turned_by_place(to: Rewriting, name: str, first: int) -> str:
    """Heads turned by their places, the first of which is `first`, as GPT-NeoX does."""
    batch, _, tokens, features = to.shape(name)
    width = to.node.integer("rotary_embedding_dim") or features
    to.require(
        0 < width <= features and tokens * width <= MOST_PLACES,
        f"{tokens} {plural(tokens, 'token')} of {width} {plural(width, 'angle')} do not fit",
    )
    angles = np.arange(first, first + tokens)[:, None] / ROTARY_BASE ** (
        np.arange(0, width, 2) / width
    )
    dtype = to.type_of(name).dtype
    tables = [
        to.cast(to.constant(turn(angles).astype(np.float32)), dtype) for turn in (np.cos, np.sin)
    ]
    steps = to.places(0, tokens, 1, -1)
    positions = to.add("Expand", [steps, to.integers(batch, tokens)], (batch, tokens))
    return to.add(
        "RotaryEmbedding",
        [name, *tables, positions],
        to.shape(name),
        rotary_embedding_dim=width % features,
    )


def packed_attention(to: Rewriting) -> None:
    _unpacked(to, _projected(to, to.operand(2)), to.required(3), to.required(4), to.operand(5))


def packed_multi_head_attention(to: Rewriting) -> None:
    query = to.required(0)
    if to.operand(1):
        words = [query, to.operand(1), to.required(2)]
    else:
        tokens, count, _, features = to.shape(query)
        words = [to.reshape(each, tokens, count * features) for each in to.split(query, 2, 1, 1, 1)]
    if bias := to.operand(3):
        biases = to.split(bias, 0, *(to.shape(word)[1] for word in words))
        words = [to.both("Add", *pair) for pair in zip(words, biases, strict=True)]
    _unpacked(to, words, to.required(4), to.required(5), to.operand(6))


def _unpacked(to: Rewriting, words: list[str], offsets: str, bounds: str, added: str) -> None:
    """Attention among the tokens [tokens, features] of each sequence, which stand one behind the
    other: gathered into sequences of one length, and back. `offsets` begins with the tokens' places
    among those.
    """
    (batch, longest) = to.shape(offsets)
    count = to.node.integer("num_heads")
    tokens = to.shape(words[0])[0]
    bounds = to.reshape(to.cast(bounds, DType.INT64), batch + 1, 1)
    starts, _ = to.split(bounds, 0, batch, 1)
    _, ends = to.split(bounds, 0, 1, batch)
    lengths = to.reshape(to.both("Sub", ends, starts), batch)
    places = to.both("Add", starts, to.places(0, longest, 1, -1))
    places = to.both("Min", places, to.constant(np.asarray(tokens - 1)))
    rows = [
        to.add("Gather", [word, places], (batch, longest, to.shape(word)[1]), axis=0)
        for word in words
    ]
    query, key, value = (_by_head(to, each, count) for each in rows)
    result, _, _ = _attend(to, Heads(query, key, value, added, lengths=lengths), 1)
    flat = to.reshape(result, batch * longest, to.shape(result)[2])
    order = to.reshape(to.cast(offsets, DType.INT64), batch * longest)
    if tokens < batch * longest:
        order = to.split(order, 0, tokens, batch * longest - tokens)[0]
    to.gives(0, to.add("Gather", [flat, order], (tokens, to.shape(flat)[1]), axis=0))


def linear_attention(to: Rewriting) -> None:
    """ONNX's own operator of that name."""
    _require_defaults(to, state_window=0)
    value = to.shape(to.required(2))
    groups = to.node.integer("kv_num_heads")
    size = to.shape(to.required(1))[2] // groups
    width = value[2] // groups
    result = (*value[:2], to.node.integer("q_num_heads") * width)
    to.itself(result, (value[0], groups, size, width))


def causal_convolution(to: Rewriting) -> None:
    """ONNX's own operator of that name."""
    _require_defaults(to, state_window=0, channels_last=0, dilation=1, ndim=1)
    shape = to.shape(to.required(0))
    weight = to.shape(to.required(1))
    to.itself(shape, (*shape[:2], weight[2] - 1))


def dequantize(to: Rewriting) -> None:
    """ONNX's own operator of that name, of types that it may not have yet in the file's opset."""
    to.itself(to.shape(to.required(0)), dtype=to.type_of(to.required(1)).dtype)


def quantize(to: Rewriting) -> None:
    """ONNX's own operator of that name, of types that it may not have yet in the file's opset."""
    dtype = to.type_of(to.operand(2)).dtype if to.operand(2) else DType.UINT8
    to.itself(to.shape(to.required(0)), dtype=dtype)


def _require_defaults(to: Rewriting, **defaults: int) -> None:
    for name, default in defaults.items():
        to.require(to.node.integer(name, default) == default, f"only {name}={default} is supported")


REWRITERS: dict[str, Rewriter] = {
    "Attention": merged_attention,
    "CausalConvWithState": causal_convolution,
    "DecoderMaskedMultiHeadAttention": decoder_masked_attention,
    "DequantizeLinear": dequantize,
    "GroupQueryAttention": group_query_attention,
    "LinearAttention": linear_attention,
    "MultiHeadAttention": multi_head_attention,
    "PackedAttention": packed_attention,
    "PackedMultiHeadAttention": packed_multi_head_attention,
    "QuantizeLinear": quantize,
}
"""By operator of the domain."""


def is_rewritten(node: onnx.NodeProto) -> bool:
    return node.domain == DOMAIN and node.op_type in REWRITERS


def rewritten(
    node: onnx.NodeProto,
    operands: tuple[str, ...],
    types: Mapping[str, Value],
    arrays: Mapping[str, np.ndarray],
) -> Rewriting:
    """The nodes in a node's place. Raises ModelError where its operands are not what the operator
    takes.
    """
    found = Rewriting(node, operands, types, arrays)
    try:
        REWRITERS[node.op_type](found)
    except (ArithmeticError, LookupError, ValueError) as error:
        shapes = ", ".join(str(types[name].shape) if name else "absent" for name in operands)
        raise ModelError(f"operands {shapes} do not fit", where=found.where) from error
    return found
