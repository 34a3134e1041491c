"""Decompositions of ONNX Runtime's attention operators (domain com.microsoft) into ONNX's
`Attention`, `RotaryEmbedding` and `TensorScatter`.

If the sequences of a batch have different lengths, TensorScatter writes new keys and values behind
the cached ones, and Attention reads the length of each sequence. Padding becomes a mask that is
added to the logits: as in ONNX Runtime's kernels, a key that is padding gets `mask_filter_value`
(default −10,000), not −inf.

Dimensions: B sequences, T new tokens, H query heads, G key-value heads, F features per head.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopipe.ir.graph import DType
from autopipe.ir.words import plural
from autopipe.passes.frontend.rewriter import MAX_RANGE, FileRewriter, Rewriter

MASK_FILTER = -10000.0
"""Default of attribute `mask_filter_value`: the number that is added to the logits of keys that are
padding.
"""
ROTARY_BASE = 10000.0
"""Base of the rotation frequencies that com.microsoft's `Attention` uses if `do_rotary` is 1."""


@dataclass(frozen=True, slots=True)
class AttentionOperands:
    """Names of the operands of an ONNX Attention node, "" for an absent one.

    `query` is [B, H, T, F], `key` and `value` are [B, G, tokens, F], for B sequences, T new tokens,
    H query heads, G key-value heads, and F features per head. `mask` is boolean or is added to the
    logits. `causal` is the attribute `is_causal`.
    """

    query: str
    key: str
    value: str
    mask: str = ""
    past: tuple[str, str] = ("", "")
    """Cached keys and values, to which Attention appends the new ones."""
    lengths: str = ""
    """Number of valid keys per sequence, int64 [B]."""
    sink: str = ""
    """One extra logit per query head that takes part in the softmax, [H]."""
    causal: int = 0


def decompose_group_query_attention(rewriter: FileRewriter) -> None:
    """Decompose GroupQueryAttention: optional normalisation and rotary positions of queries and
    keys, an update of the key-value cache, and Attention.

    Results are the attention output, all keys, all values, and the logits if the node returns them.
    Raises ModelError if the node sets `sliding_window_cache` or `kv_cache_bit_width`.
    """
    node = rewriter.node
    heads = node.integer("num_heads")
    groups = node.integer("kv_num_heads")
    for name in ("sliding_window_cache", "kv_cache_bit_width"):
        rewriter.require(not node.integer(name), f"{name!r} is not supported")
    projections = _read_projections(rewriter, heads, groups)
    query, key, value = (
        _split_heads(rewriter, each, count)
        for each, count in zip(projections, (heads, groups, groups), strict=True)
    )
    batch, _, tokens, _ = rewriter.shape(query)
    past = (rewriter.operand(3), rewriter.operand(4))
    total = rewriter.known_integer(6)
    past_lengths = "" if total == tokens else _cached_token_counts(rewriter, tokens, total)
    if rewriter.operand(14):
        epsilon = node.number("qk_norm_epsilon", 1e-6)
        query, key = (
            rewriter.add(
                "RMSNormalization",
                [each, rewriter.required(weight)],
                rewriter.shape(each),
                axis=-1,
                epsilon=epsilon,
            )
            for each, weight in ((query, 14), (key, 15))
        )
    if node.integer("do_rotary"):
        positions = _rotary_positions(rewriter, past_lengths, batch, tokens)
        query, key = (_rotate_by_cache(rewriter, each, positions) for each in (query, key))
    present = (key, value)
    mask = rewriter.operand(10)
    lengths = ""
    if past_lengths:
        lengths = rewriter.binary("Add", past_lengths, rewriter.integer(tokens))
    if past[0] and rewriter.shape(past[0])[2]:
        size = max(total or 0, rewriter.shape(past[0])[2])
        padded = [rewriter.pad_end(each, 2, size) for each in (past if past_lengths else present)]
        caches = padded[0], padded[1]
        present = caches
        if past_lengths:
            written = _write_caches(rewriter, caches, (key, value), past_lengths)
            present = _zero_unfilled(rewriter, written, lengths)
    if past_lengths:
        key, value = present
    else:
        mask = _prompt_mask(rewriter, mask, key)
    sink = rewriter.operand(11)
    if not sink and node.integer("smooth_softmax"):
        zero = rewriter.number(0.0, rewriter.type_of(query).dtype)
        sink = rewriter.add("Expand", [zero, rewriter.integers(heads)], (heads,))
    window = node.integer("local_window_size", -1)
    causal = node.integer("causal", 1)
    output, _, _ = _write_attention(
        rewriter,
        AttentionOperands(query, key, value, mask, lengths=lengths, sink=sink, causal=causal),
        3,
        softcap=node.number("softcap"),
        qk_matmul_output_mode=(0, 2, 3)[node.integer("qk_output")],
        **{"left_window_size": window - 1} if window > 0 else {},
    )
    for index, each in enumerate((output, *present)):
        rewriter.set_result(index, each)


def decompose_multi_head_attention(rewriter: FileRewriter) -> None:
    """Decompose MultiHeadAttention. Its operands 3 to 8 are the bias, the padding mask, the tensor
    that is added to the logits, cached keys, cached values, and the number of valid cached tokens.
    """
    _decompose_multi_head(
        rewriter, rewriter.operand(3), rewriter.operand(4), rewriter.operand(5), 6
    )


def decompose_decoder_masked_attention(rewriter: FileRewriter) -> None:
    """Decompose DecoderMaskedMultiHeadAttention: MultiHeadAttention of one new token, with another
    order of operands. Raises ModelError if the node has beams, since beam search is not supported.
    """
    beams = rewriter.known_integer(8) if rewriter.operand(8) else 1
    rewriter.require(beams == 1 and not rewriter.operand(9), "beams are not supported")
    _decompose_multi_head(
        rewriter, rewriter.operand(10), rewriter.operand(3), rewriter.operand(4), 5
    )


def decompose_attention(rewriter: FileRewriter) -> None:
    """Decompose com.microsoft's Attention, which computes queries, keys and values by one matrix
    product, and then attends. Result 1 is the stack of all keys and all values, [2, sequences,
    heads, tokens, features per head].
    """
    node = rewriter.node
    heads = node.integer("num_heads")
    query, key, value = (
        _split_heads(rewriter, each, heads)
        for each in _project_queries_keys_values(rewriter, rewriter.operand(2))
    )
    past = rewriter.operand(4)
    past_length = rewriter.operand(6)
    caches: tuple[str, str] = "", ""
    first_position = 0
    if past and rewriter.shape(past)[3]:
        keys, values = rewriter.split(past, 0, 1, 1)
        shape = rewriter.shape(past)[1:]
        caches = rewriter.reshape(keys, *shape), rewriter.reshape(values, *shape)
        first_position = rewriter.shape(past)[3]
    if node.integer("do_rotary"):
        rewriter.require(
            not past_length, "rotary positions in a shared key-value buffer are not supported"
        )
        query, key = (_rotate_by_position(rewriter, each, first_position) for each in (query, key))
    total = first_position + (0 if past_length else rewriter.shape(key)[2])
    operands = AttentionOperands(query, key, value)
    masked = _combine_masks(rewriter, operands, rewriter.operand(3), rewriter.operand(5), total)
    output, *present = _write_attention_with_past(rewriter, masked, caches, past_length, 2)
    rewriter.set_result(0, output)
    if rewriter.has_result(1):
        stacked = (rewriter.reshape(each, 1, *rewriter.shape(each)) for each in present)
        rewriter.set_result(1, rewriter.concat(0, *stacked))


def decompose_packed_attention(rewriter: FileRewriter) -> None:
    """Decompose PackedAttention: Attention on a batch without padding, whose sequences are
    concatenated along the dimension of tokens.
    """
    _write_packed_attention(
        rewriter,
        _project_queries_keys_values(rewriter, rewriter.operand(2)),
        rewriter.required(3),
        rewriter.required(4),
        rewriter.operand(5),
    )


def decompose_packed_multi_head_attention(rewriter: FileRewriter) -> None:
    """Decompose PackedMultiHeadAttention: MultiHeadAttention on a batch without padding, whose
    sequences are concatenated along the dimension of tokens. Queries, keys and values are separate
    or stacked.
    """
    query = rewriter.required(0)
    if rewriter.operand(1):
        projections = [query, rewriter.operand(1), rewriter.required(2)]
    else:
        tokens, heads, _, features = rewriter.shape(query)
        projections = [
            rewriter.reshape(each, tokens, heads * features)
            for each in rewriter.split(query, 2, 1, 1, 1)
        ]
    if bias := rewriter.operand(3):
        biases = rewriter.split(bias, 0, *(rewriter.shape(each)[1] for each in projections))
        projections = [
            rewriter.binary("Add", projection, part)
            for projection, part in zip(projections, biases, strict=True)
        ]
    _write_packed_attention(
        rewriter, projections, rewriter.required(4), rewriter.required(5), rewriter.operand(6)
    )


def _split_heads(rewriter: Rewriter, name: str, heads: int) -> str:
    """Write the value `name` [sequences, tokens, heads · F], with F features per head, as
    [sequences, heads, tokens, F] and return the result's name. Raises ModelError if the features
    are not divisible by `heads`.
    """
    batch, tokens, hidden = rewriter.shape(name)
    rewriter.require(
        heads > 0 and hidden % heads == 0,
        f"{hidden} {plural(hidden, 'feature')} cannot be divided into {heads} "
        f"{plural(heads, 'head')}",
    )
    split = rewriter.reshape(name, batch, tokens, heads, hidden // heads)
    return rewriter.transpose(split, 0, 2, 1, 3)


def _write_attention(
    rewriter: Rewriter, heads: AttentionOperands, logits_index: int, **settings: Any
) -> tuple[str, str, str]:
    """Write an ONNX Attention node with the operands `heads`. Return the names of its output
    [sequences, tokens, heads · features per head], of all keys, and of all values. Keys and values
    include the cached ones.

    `logits_index` is the index of the replaced node's result that has the attention logits. If the
    replaced node has that result, it becomes the fourth result of Attention. `settings` are further
    attributes.
    """
    batch, count, tokens, _ = rewriter.shape(heads.query)
    groups = rewriter.shape(heads.value)[1]
    features = rewriter.shape(heads.value)[3]
    past = rewriter.shape(heads.past[0])[2] if heads.past[0] else 0
    total = past + rewriter.shape(heads.key)[2]
    scale = rewriter.node.number("scale")
    attributes: dict[str, Any] = {"is_causal": heads.causal, **settings}
    if scale:
        attributes["scale"] = scale
    shapes: list[tuple[int, ...]] = [(batch, count, tokens, features)]
    if heads.past[0] or rewriter.has_result(logits_index):
        shapes += [
            (batch, groups, total, rewriter.shape(each)[3]) for each in (heads.key, heads.value)
        ]
    if rewriter.has_result(logits_index):
        shapes.append((batch, count, tokens, total))
    operands = [
        heads.query,
        heads.key,
        heads.value,
        heads.mask,
        *heads.past,
        heads.lengths,
        heads.sink,
    ]
    dtype = rewriter.type_of(heads.query).dtype
    output = rewriter.add("Attention", operands, *shapes, dtype=dtype, **attributes)
    outputs = rewriter.nodes[-1].outputs
    if rewriter.has_result(logits_index):
        rewriter.set_result(logits_index, outputs[3])
    keys, values = outputs[1:3] if heads.past[0] else (heads.key, heads.value)
    by_token = rewriter.transpose(output, 0, 2, 1, 3)
    return rewriter.reshape(by_token, batch, tokens, count * features), keys, values


def _write_attention_with_past(
    rewriter: Rewriter,
    heads: AttentionOperands,
    past: tuple[str, str],
    past_length: str,
    logits_index: int,
) -> tuple[str, str, str]:
    """Write an ONNX Attention node with the operands `heads`, whose keys and values follow the
    cached ones, `past`. Return the names of its output, of all keys, and of all values.

    If `past_length` is not "", it names the number of valid cached tokens. The cache is then a
    longer buffer, and the new keys and values are written behind the valid tokens. `logits_index`
    is the index of the replaced node's result that has the attention logits.
    """
    tokens = rewriter.shape(heads.query)[2]
    if past[0] and past_length:
        batch = rewriter.shape(heads.query)[0]
        length = _reshape_per_sequence(rewriter, past_length)
        start = rewriter.add("Expand", [length, rewriter.integers(batch)], (batch,))
        key, value = _write_caches(rewriter, past, (heads.key, heads.value), start)
        lengths = rewriter.binary("Add", start, rewriter.integer(tokens))
        heads = dataclasses.replace(heads, key=key, value=value, lengths=lengths)
    elif past[0] and rewriter.shape(past[0])[2]:
        heads = dataclasses.replace(heads, past=past)
    return _write_attention(rewriter, heads, logits_index, qk_matmul_output_mode=2)


def _read_projections(rewriter: Rewriter, heads: int, groups: int) -> list[str]:
    """Return the names of queries [sequences, tokens, heads · F], keys and values [sequences,
    tokens, groups · F], with F features per head; `groups` is the number of key-value heads. They
    are operands 0 to 2 of the replaced node. If operand 1 is absent, they are the parts of operand
    0 along its last dimension.
    """
    query = rewriter.required(0)
    if rewriter.operand(1):
        return [query, rewriter.operand(1), rewriter.required(2)]
    hidden = rewriter.shape(query)[-1]
    total = heads + 2 * groups
    rewriter.require(
        total > 0 and hidden % total == 0,
        f"{hidden} {plural(hidden, 'feature')} cannot be divided into {total} "
        f"{plural(total, 'head')}",
    )
    sizes = (hidden // total * each for each in (heads, groups, groups))
    return rewriter.split(query, 2, *sizes)


def _cached_token_counts(rewriter: Rewriter, tokens: int, total: int | None) -> str:
    """Return the name of the number of cached tokens per sequence, an int64 vector. It is operand 5
    of the replaced node (the index of the last token of each sequence) + 1 − `tokens`.

    `tokens` is the number of new tokens per sequence. `total` is the value of operand 6, the
    maximum over the sequences of cached plus new tokens, or None if it is not known before running.
    If operand 6 is found to be `tokens` while running, the result is 0: nothing is cached.
    """
    last_position = _reshape_per_sequence(rewriter, rewriter.required(5))
    cached = rewriter.binary("Add", last_position, rewriter.integer(1 - tokens))
    if total is not None:
        return cached
    longest = _reshape_per_sequence(rewriter, rewriter.required(6))
    is_prompt = rewriter.binary("Equal", longest, rewriter.integer(tokens), DType.BOOL)
    return rewriter.select(is_prompt, rewriter.integer(0), cached)


def _reshape_per_sequence(rewriter: Rewriter, name: str) -> str:
    """Write the value `name`, which has one integer per sequence, as an int64 vector [sequences],
    and return the result's name.
    """
    return rewriter.reshape(rewriter.cast(name, DType.INT64), rewriter.type_of(name).elements)


def _prompt_mask(rewriter: Rewriter, added: str, key: str) -> str:
    """Return the name of the mask of a prompt, a batch without cached tokens. Sequences that are
    shorter than the longest one end in padding.

    `added` is the tensor that the model adds to the logits; the result is `added` with −inf for
    keys that are padding. If `added` is "", the result is a boolean mask [sequences, 1, 1, tokens],
    true for keys that are not padding.
    """
    batch, _, tokens, _ = rewriter.shape(key)
    last_position = _reshape_per_sequence(rewriter, rewriter.required(5))
    ends = rewriter.binary("Add", last_position, rewriter.integer(1))
    visible = _key_range_mask(rewriter, ends, batch, tokens)
    if not added:
        return visible
    hidden = rewriter.number(-math.inf, rewriter.type_of(added).dtype)
    return rewriter.select(visible, added, hidden)


def _write_caches(
    rewriter: Rewriter, caches: tuple[str, str], new: tuple[str, str], start: str
) -> tuple[str, str]:
    """Write the new keys and values `new` into `caches`, from token `start[b]` of sequence b on.
    Return the names of the updated keys and values, whose shape is that of `caches`.
    """
    keys, values = (
        rewriter.add("TensorScatter", [cache, each, start], rewriter.shape(cache), axis=-2)
        for cache, each in zip(caches, new, strict=True)
    )
    return keys, values


def _zero_unfilled(rewriter: Rewriter, caches: tuple[str, str], lengths: str) -> tuple[str, str]:
    """Return the names of the cached keys and values with zeros from token `lengths[b]` of sequence
    b on, as ONNX Runtime returns them. `lengths` is int64 [B].
    """
    batch, _, tokens, _ = rewriter.shape(caches[0])
    positions = rewriter.range(0, tokens, -1, 1)
    ends = rewriter.reshape(lengths, batch, 1, 1, 1)
    filled = rewriter.binary("Less", positions, ends, DType.BOOL)
    zero = rewriter.number(0.0, rewriter.type_of(caches[0]).dtype)
    return rewriter.select(filled, caches[0], zero), rewriter.select(filled, caches[1], zero)


def _rotary_positions(rewriter: Rewriter, past_lengths: str, batch: int, tokens: int) -> str:
    """Return the name of the rotary positions [B, T] of the new tokens.

    Operand 9 of the replaced node may contain the positions. If nothing is cached (`past_lengths`
    is ""), only its first position per sequence counts, and the following tokens have consecutive
    positions. Without operand 9, positions continue from the number of cached tokens.
    """
    given = rewriter.operand(9)
    steps = rewriter.range(0, tokens, 1, -1)
    if given and past_lengths:
        return given
    if given:
        first, *_ = rewriter.split(given, 1, 1, tokens - 1) if tokens > 1 else [given]
        return rewriter.binary("Add", first, steps)
    if past_lengths:
        return rewriter.binary("Add", rewriter.reshape(past_lengths, batch, 1), steps)
    return rewriter.add("Expand", [steps, rewriter.integers(batch, tokens)], (batch, tokens))


def _rotate_by_cache(rewriter: Rewriter, name: str, positions: str) -> str:
    """Write a RotaryEmbedding of the heads `name` [B, heads, T, F], with the cosines and sines that
    are operands 7 and 8 of the replaced node. `positions` [B, T] are rows of these tables. Return
    the result's name.
    """
    cosines = rewriter.required(7)
    sines = rewriter.required(8)
    width = 2 * rewriter.shape(cosines)[1]
    return rewriter.add(
        "RotaryEmbedding",
        [name, cosines, sines, positions],
        rewriter.shape(name),
        rotary_embedding_dim=width % rewriter.shape(name)[3],
        interleaved=rewriter.node.integer("rotary_interleaved"),
    )


def _rotate_by_position(rewriter: Rewriter, name: str, first: int) -> str:
    """Write a RotaryEmbedding of the heads `name` [B, heads, T, F] whose T positions are first,
    first + 1, …, with cosines and sines that are computed here from `ROTARY_BASE`. Return the
    result's name.
    """
    batch, _, tokens, features = rewriter.shape(name)
    width = rewriter.node.integer("rotary_embedding_dim") or features
    rewriter.require(
        0 < width <= features,
        f"rotary_embedding_dim={width} is not between 1 and the head size {features}",
    )
    rewriter.require(
        tokens * width <= MAX_RANGE,
        f"{tokens} {plural(tokens, 'token')} of {width} {plural(width, 'angle')} are not "
        f"supported, at most {MAX_RANGE} angles in all",
    )
    frequencies = ROTARY_BASE ** (np.arange(0, width, 2) / width)
    angles = np.arange(first, first + tokens)[:, None] / frequencies
    dtype = rewriter.type_of(name).dtype
    tables = [
        rewriter.cast(rewriter.constant(function(angles).astype(np.float32)), dtype)
        for function in (np.cos, np.sin)
    ]
    steps = rewriter.range(0, tokens, 1, -1)
    positions = rewriter.add("Expand", [steps, rewriter.integers(batch, tokens)], (batch, tokens))
    return rewriter.add(
        "RotaryEmbedding",
        [name, *tables, positions],
        rewriter.shape(name),
        rotary_embedding_dim=width % features,
    )


def _decompose_multi_head(
    rewriter: Rewriter, bias: str, padding: str, added: str, past: int
) -> None:
    """Decompose a MultiHeadAttention whose optional operands are `bias`, the padding mask
    `padding`, and the tensor `added` that is added to the logits ("" for an absent one).

    `past` is the index of the operand with the cached keys; the cached values and the number of
    valid cached tokens are the two operands after it.
    """
    heads = rewriter.node.integer("num_heads")
    query, key, value = _queries_keys_values(rewriter, heads, bias)
    caches = rewriter.operand(past), rewriter.operand(past + 1)
    past_length = rewriter.operand(past + 2)
    total = rewriter.shape(key)[2]
    if caches[0] and not past_length:
        total += rewriter.shape(caches[0])[2]
    masked = _combine_masks(rewriter, AttentionOperands(query, key, value), padding, added, total)
    results = _write_attention_with_past(rewriter, masked, caches, past_length, 3)
    for index, each in enumerate(results):
        rewriter.set_result(index, each)


def _queries_keys_values(rewriter: Rewriter, heads: int, bias: str) -> list[str]:
    """Return the names of queries, keys and values [B, heads, tokens, F] of a MultiHeadAttention,
    with their bias added, for B sequences and F features per head.

    The operands may be:

    - three tensors [B, tokens, heads · F];
    - one tensor in which all three are concatenated along the last dimension;
    - a stack [B, tokens, heads, 3, F];
    - queries, and a stack of keys and values;
    - queries, and keys and values [B, heads, tokens, F], as in cross-attention.
    """
    query = rewriter.required(0)
    key = rewriter.operand(1)
    if not key and len(rewriter.shape(query)) == 3:
        hidden = rewriter.shape(query)[2]
        third = hidden // 3
        projections = rewriter.split(query, 2, third, third, hidden - 2 * third)
    elif not key:
        projections = _split_stack(rewriter, query, 3)
    elif len(rewriter.shape(key)) == 5:
        projections = [query, *_split_stack(rewriter, key, 2)]
    else:
        projections = [query, key, rewriter.required(2)]
    undivided = [each if len(rewriter.shape(each)) == 3 else "" for each in projections]
    if bias:
        sizes = [rewriter.shape(each)[2] if each else 0 for each in undivided]
        if not all(sizes):
            # The bias contains a part for each of queries, keys and values, even if keys and values
            # are already divided into heads. Their bias was then added earlier, so these parts are
            # not used.
            total = rewriter.type_of(bias).elements
            sizes = [sizes[0], sizes[0], total - 2 * sizes[0]]
        biases = rewriter.split(bias, 0, *sizes)
        undivided = [
            rewriter.binary("Add", each, part) if each else ""
            for each, part in zip(undivided, biases, strict=True)
        ]
    return [
        _split_heads(rewriter, each, heads) if each else divided
        for each, divided in zip(undivided, projections, strict=True)
    ]


def _split_stack(rewriter: Rewriter, name: str, parts: int) -> list[str]:
    """Return the names of the `parts` tensors [sequences, tokens, heads · F] of the stack `name`
    [sequences, tokens, heads, parts, F], with F features per head.
    """
    batch, tokens, heads, _, features = rewriter.shape(name)
    pieces = rewriter.split(name, 3, *[1] * parts)
    return [rewriter.reshape(each, batch, tokens, heads * features) for each in pieces]


def _combine_masks(
    rewriter: Rewriter, heads: AttentionOperands, padding: str, added: str, total: int
) -> AttentionOperands:
    """Return `heads`, the operands of an Attention node, with a mask that is added to the logits
    [sequences, heads, queries, total]. The mask is the sum of the padding mask `padding` and the
    tensor `added`, which are operands of the replaced node, "" if absent.

    `total` is the number of keys, including cached ones. If the replaced node is causal, the result
    has `causal` 1 if there is no padding mask; otherwise its mask also hides later keys.
    """
    causal = rewriter.node.integer("unidirectional")
    visible = _visible_key_mask(rewriter, padding, heads.query, total) if padding else ""
    if not visible:
        return dataclasses.replace(heads, mask=added, causal=causal)
    dtype = rewriter.type_of(heads.query).dtype
    tokens = rewriter.shape(heads.query)[2]
    hidden = rewriter.number(rewriter.node.number("mask_filter_value", MASK_FILTER), dtype)
    mask = rewriter.select(visible, rewriter.number(0.0, dtype), hidden)
    if causal and tokens > 1:
        # Keys after the query are masked by -inf, padding by the finite filter value. A query that
        # follows only padding therefore attends to this padding and not to later keys.
        queries = rewriter.range(total - tokens, total, -1, 1)
        keys = rewriter.range(0, total, -1)
        precedes = rewriter.binary("LessOrEqual", keys, queries, DType.BOOL)
        mask = rewriter.select(precedes, mask, rewriter.number(-math.inf, dtype))
    if added:
        mask = rewriter.binary("Add", mask, added)
    return dataclasses.replace(heads, mask=mask)


def _visible_key_mask(rewriter: Rewriter, padding: str, query: str, total: int) -> str:
    """Return the name of a boolean mask that is true for keys that are not padding. It broadcasts
    to [B, heads, T, total], for B sequences, T queries and `total` keys. The operand `padding` of
    the replaced node is one of these:

    - [B]: the number of keys of each sequence;
    - [2 · B]: the index after the last key of each sequence, then the index of its first key;
    - [B, total], [B, T, total] or [B, 1, longest, longest]: 1 for each key that is not padding.

    Return "" if `padding` has several dimensions, and the last one has size 1 although there are
    several keys. As in ONNX Runtime, there is no mask then.
    """
    batch, _, tokens, _ = rewriter.shape(query)
    shape = rewriter.shape(padding)
    if len(shape) == 1:
        return _key_range_mask(rewriter, padding, batch, total)
    if shape[-1] == 1 and total > 1:
        # ONNX Runtime ignores a mask whose last dimension is 1 if there are several keys, so no
        # mask is applied.
        return ""
    visible = rewriter.cast(padding, DType.BOOL)
    if len(shape) == 4:
        return rewriter.slice(visible, {2: (total - tokens, total), 3: (0, total)})
    rows = tokens if len(shape) == 3 else 1
    return rewriter.reshape(visible, shape[0], 1, rows, shape[-1])


def _key_range_mask(rewriter: Rewriter, bounds: str, batch: int, total: int) -> str:
    """Return the name of a boolean mask [batch, 1, 1, total] that is true for the keys of sequence
    b before `bounds[b]`. If `bounds` has 2 · `batch` elements, the keys before `bounds[batch + b]`
    are hidden, too.
    """
    size = rewriter.shape(bounds)[0]
    bounds = rewriter.cast(bounds, DType.INT64)
    positions = rewriter.range(0, total, 1, 1, 1, -1)
    ends = bounds
    starts = ""
    if size > batch:
        ends, starts = rewriter.split(bounds, 0, batch, size - batch)
    ends = rewriter.reshape(ends, batch, 1, 1, 1)
    visible = rewriter.binary("Less", positions, ends, DType.BOOL)
    if size != 2 * batch:
        return visible
    starts = rewriter.reshape(starts, batch, 1, 1, 1)
    started = rewriter.binary("GreaterOrEqual", positions, starts, DType.BOOL)
    return rewriter.binary("And", visible, started)


def _project_queries_keys_values(rewriter: Rewriter, bias: str) -> list[str]:
    """Return the names of queries, keys and values [..., heads · F]: the parts of operand 0 times
    operand 1 (the concatenated weights), plus `bias` if it is not "". Raises ModelError if the
    operands do not fit.
    """
    inputs = rewriter.required(0)
    weights = rewriter.required(1)
    features, hidden = rewriter.shape(weights)
    rewriter.require(
        rewriter.shape(inputs)[-1] == features,
        f"the last dimension of the input is {rewriter.shape(inputs)[-1]}, expected {features}",
    )
    product = rewriter.add("MatMul", [inputs, weights], (*rewriter.shape(inputs)[:-1], hidden))
    if bias:
        product = rewriter.binary("Add", product, bias)
    sizes = rewriter.node.integers("qkv_hidden_sizes") or (hidden // 3,) * 3
    return rewriter.split(product, len(rewriter.shape(product)) - 1, *sizes)


def _write_packed_attention(
    rewriter: Rewriter, projections: list[str], offsets: str, bounds: str, added: str
) -> None:
    """Write attention within each of B sequences that are concatenated without padding.
    `projections` are the queries, keys and values of all sequences, each [tokens, heads · features
    per head].

    The tokens of each sequence are gathered into a tensor [B, longest], in which other tokens pad
    shorter sequences. After attention, the results are gathered back. `bounds` [B + 1] has the
    index of the first token of each sequence, then the number of tokens. `offsets` is [B, longest];
    its first elements are, for each token, its index among the B · longest padded tokens. `added`
    is added to the logits; "" for nothing.
    """
    (batch, longest) = rewriter.shape(offsets)
    heads = rewriter.node.integer("num_heads")
    tokens = rewriter.shape(projections[0])[0]
    bounds = rewriter.reshape(rewriter.cast(bounds, DType.INT64), batch + 1, 1)
    starts, _ = rewriter.split(bounds, 0, batch, 1)
    _, ends = rewriter.split(bounds, 0, 1, batch)
    lengths = rewriter.reshape(rewriter.binary("Sub", ends, starts), batch)
    indices = rewriter.binary("Add", starts, rewriter.range(0, longest, 1, -1))
    indices = rewriter.binary("Min", indices, rewriter.integer(tokens - 1))
    padded = [
        rewriter.add("Gather", [each, indices], (batch, longest, rewriter.shape(each)[1]), axis=0)
        for each in projections
    ]
    query, key, value = (_split_heads(rewriter, each, heads) for each in padded)
    operands = AttentionOperands(query, key, value, added, lengths=lengths)
    output, _, _ = _write_attention(rewriter, operands, 1)
    features = rewriter.shape(output)[2]
    flat = rewriter.reshape(output, batch * longest, features)
    order = rewriter.reshape(rewriter.cast(offsets, DType.INT64), batch * longest)
    if tokens < batch * longest:
        order = rewriter.split(order, 0, tokens, batch * longest - tokens)[0]
    rewriter.set_result(0, rewriter.add("Gather", [flat, order], (tokens, features), axis=0))
