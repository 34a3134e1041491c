"""Multi-head attention spelled out as products, scaling, mask and softmax, and the blocks around it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from autopipe.configs.zoo.builder import GraphBuilder, Initializer, normal
from autopipe.configs.zoo.layers import layer_norm, linear, positions

if TYPE_CHECKING:
    import onnx_ir as ir

FORBIDDEN: Final = -1e9
"""Added to the score of a pair that may not attend: far below any score, and finite in every precision but fp16."""

SPREAD: Final = normal(0.02)
"""How the weights of GPT and BERT are drawn."""


@dataclass(frozen=True, slots=True)
class Attention:
    """The sizes of one attention layer."""

    hidden: int
    """Width of its input and output."""

    heads: int
    """Number of heads, each of `hidden` / `heads` unless `head_size` says otherwise."""

    head_size: int = 0
    """Width of a head; 0 for `hidden` / `heads`."""

    bias: bool = True
    """True if its four projections have one."""

    scaled: bool = True
    """True if scores are divided by the root of the head's width."""

    init: Initializer = SPREAD
    """How its weights are drawn."""

    closing: Initializer | None = None
    """How the weights that end in a residual sum are drawn; None: as the others."""

    @property
    def width(self) -> int:
        """Width of a head."""
        return self.head_size or self.hidden // self.heads


def closing_spread(layers: int) -> Initializer:
    """GPT-2's spread of what is added to the residual stream, twice a layer: its sum keeps its size.

    Radford et al. 2019, section 2.3.
    """
    return normal(SPREAD.scale / math.sqrt(2 * layers))


def causal_mask(graph: GraphBuilder, length: int) -> ir.Value:
    """[length, length]: 0 where the key stands at or before the query, FORBIDDEN after it."""
    with graph.scope("causal_mask"):
        order = positions(graph, length)
        query = graph.op("Unsqueeze", order, graph.constant([1]))
        key = graph.op("Unsqueeze", order, graph.constant([0]))
        future = graph.op("Less", query, key)
        return graph.op("Where", future, graph.constant(FORBIDDEN), graph.constant(0.0))


def split_heads(graph: GraphBuilder, data: ir.Value, heads: int, width: int) -> ir.Value:
    """[batch, length, heads * width] -> [batch, heads, length, width]."""
    return graph.op("Transpose", graph.reshape(data, [0, 0, heads, width]), perm=[0, 2, 1, 3])


def weighted_sum(
    graph: GraphBuilder,
    query: ir.Value,
    key: ir.Value,
    value: ir.Value,
    *,
    scale: float | None,
    mask: ir.Value | None,
) -> ir.Value:
    """softmax(query key^T * scale + mask) value, on [batch, heads, length, width]."""
    scores = graph.op("MatMul", query, graph.op("Transpose", key, perm=[0, 1, 3, 2]))
    if scale is not None:
        scores = graph.op("Mul", scores, graph.constant(scale))
    if mask is not None:
        scores = graph.op("Add", scores, mask)
    return graph.op("MatMul", graph.op("Softmax", scores, axis=-1), value)


def merge_heads(graph: GraphBuilder, data: ir.Value, total: int) -> ir.Value:
    """[batch, heads, length, width] -> [batch, length, total]."""
    return graph.reshape(graph.op("Transpose", data, perm=[0, 2, 1, 3]), [0, 0, total])


def attention(
    graph: GraphBuilder,
    name: str,
    sizes: Attention,
    data: ir.Value,
    *,
    memory: ir.Value | None = None,
    mask: ir.Value | None = None,
) -> ir.Value:
    """Attention of `data` [batch, length, hidden] to `memory` (itself by default); `mask` is added to the scores."""
    total = sizes.heads * sizes.width
    source = data if memory is None else memory
    with graph.scope(name):
        query = _projected(graph, "query", sizes, data)
        key = _projected(graph, "key", sizes, source)
        value = _projected(graph, "value", sizes, source)
        scale = 1.0 / math.sqrt(sizes.width) if sizes.scaled else None
        merged = merge_heads(graph, weighted_sum(graph, query, key, value, scale=scale, mask=mask), total)
        closing = sizes.closing or sizes.init
        return linear(graph, "output", merged, total, sizes.hidden, init=closing, bias=sizes.bias)


def _projected(graph: GraphBuilder, name: str, sizes: Attention, data: ir.Value) -> ir.Value:
    """[batch, length, hidden] -> [batch, heads, length, width]."""
    total = sizes.heads * sizes.width
    rows = linear(graph, name, data, sizes.hidden, total, init=sizes.init, bias=sizes.bias)
    return split_heads(graph, rows, sizes.heads, sizes.width)


def feed_forward(
    graph: GraphBuilder,
    name: str,
    data: ir.Value,
    hidden: int,
    inner: int,
    *,
    activation: str = "Gelu",
    init: Initializer = SPREAD,
    closing: Initializer | None = None,
    bias: bool = True,
) -> ir.Value:
    """hidden -> inner, activation, inner -> hidden; `closing` draws the second product's weights if it is given."""
    with graph.scope(name):
        raised = graph.op(activation, linear(graph, "up", data, hidden, inner, init=init, bias=bias))
        return linear(graph, "down", raised, inner, hidden, init=closing or init, bias=bias)


def pre_norm_block(
    graph: GraphBuilder, name: str, sizes: Attention, inner: int, data: ir.Value, *, mask: ir.Value | None = None
) -> ir.Value:
    """A transformer layer with the norm before attention and feed-forward, as in GPT-2 and ViT."""
    with graph.scope(name):
        normed = layer_norm(graph, "attention_norm", data, sizes.hidden)
        data = graph.op("Add", data, attention(graph, "attention", sizes, normed, mask=mask))
        normed = layer_norm(graph, "feed_forward_norm", data, sizes.hidden)
        raised = feed_forward(graph, "feed_forward", normed, sizes.hidden, inner, closing=sizes.closing)
        return graph.op("Add", data, raised)


def post_norm_block(
    graph: GraphBuilder, name: str, sizes: Attention, inner: int, data: ir.Value, *, mask: ir.Value | None = None
) -> ir.Value:
    """A transformer layer with the norm after each residual sum, as in BERT."""
    with graph.scope(name):
        attended = attention(graph, "attention", sizes, data, mask=mask)
        data = layer_norm(graph, "attention_norm", graph.op("Add", data, attended), sizes.hidden, 1e-12)
        raised = feed_forward(graph, "feed_forward", data, sizes.hidden, inner)
        return layer_norm(graph, "feed_forward_norm", graph.op("Add", data, raised), sizes.hidden, 1e-12)
