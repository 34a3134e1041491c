"""Llama: RMS norms, rotary positions, SwiGLU and grouped-query attention (Touvron et al., 2023).

Multi-head attention spelled out as products, scaling, mask and softmax, and the blocks around it.

A language model whose feed-forward layers are experts chosen by a gate (Lepikhin et al., 2021: GShard).

GPT: a decoder-only language model whose head is its embedding, transposed (Brown et al., 2020).

BERT with its masked-language-model head (Devlin et al., 2019).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from autopipe.configs.zoo.builder import (
    ZEROS,
    GraphBuilder,
    Initializer,
    embedding,
    float_positions,
    layer_norm,
    linear,
    normal,
    positions,
    predict_tokens,
    rms_norm,
)
from autopipe.configs.zoo.settings import Count, Setting, ZooModel

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


def _sizes(layers: int, hidden: int, experts: int) -> dict[str, Setting]:
    """Two experts a token, room for twice their even share, as GShard has it."""
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": 16,
        "experts": experts,
        "choices": 2,
        "capacity": -(-2 * 2 * 1024 // experts),
        "vocabulary": 32000,
        "sequence": 1024,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts(ZooModel):
    """tokens [batch, sequence] -> logits [batch, sequence, vocabulary].

    Each sample is a group of its own: its tokens compete for the experts' places, those of other samples do not, so
    that a batch may be split anywhere.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Setting]]] = {
        # The family of Alpa (OSDI 2022) against which TePDist measures, named by the number of parameters.
        "380m": _sizes(8, 768, 8),
        "690m": _sizes(8, 768, 16),
        "1.3b": _sizes(16, 768, 16),
        "2.4b": _sizes(16, 1024, 16),
        "10b": _sizes(16, 1536, 32),
        "27b": _sizes(16, 2048, 48),
        "70b": _sizes(32, 2048, 64),
    }
    multiples: ClassVar[tuple[tuple[str, str], ...]] = (("hidden", "heads"),)
    limits: ClassVar[tuple[tuple[str, str], ...]] = (("choices", "experts"),)

    layers: Count = 2
    """Transformer layers."""

    hidden: Count = 64
    """Width of the residual stream."""

    heads: Count = 4
    """Attention heads of a layer."""

    experts: Count = 4
    """Feed-forward networks of a layer, each four times as wide inside."""

    choices: Count = 2
    """Experts that a token is sent to."""

    capacity: Count = 16
    """Tokens of a sample that an expert takes; what comes later passes by on the residual alone."""

    vocabulary: Count = 256
    """Rows of the embedding, and extent of the logits."""

    sequence: Count = 16
    """Tokens of a sample."""

    def build(self, graph: GraphBuilder) -> None:
        """Embeddings, layers of attention and experts, norm, head."""
        tokens = graph.input("tokens", self.sequence, integer=True)
        data, _ = embedding(graph, "token_embedding", tokens, self.vocabulary, self.hidden, init=SPREAD)
        order = positions(graph, self.sequence)
        places, _ = embedding(graph, "position_embedding", order, self.sequence, self.hidden, init=SPREAD)
        data = graph.op("Add", data, places)
        mask = causal_mask(graph, self.sequence)
        sizes = Attention(self.hidden, self.heads, closing=closing_spread(self.layers))
        for index in range(self.layers):
            with graph.scope(f"layers.{index}"):
                normed = layer_norm(graph, "attention_norm", data, self.hidden)
                data = graph.op("Add", data, attention(graph, "attention", sizes, normed, mask=mask))
                normed = layer_norm(graph, "experts_norm", data, self.hidden)
                data = graph.op("Add", data, self._mixture(graph, normed))
        data = layer_norm(graph, "norm", data, self.hidden)
        logits = linear(graph, "head", data, self.hidden, self.vocabulary, init=SPREAD, bias=False)
        predict_tokens(graph, logits, self.loss, self.sequence, self.vocabulary)

    def _mixture(self, graph: GraphBuilder, data: ir.Value) -> ir.Value:
        """Tokens to the places of their experts, through the experts, and back weighted by the gate."""
        with graph.scope("experts"):
            weights, chosen = self._gate(graph, data)
            dispatch, combine = self._places(graph, weights, chosen)
            sent = graph.op("Einsum", dispatch, data, equation="bsec,bsh->bech")
            inner = 4 * self.hidden
            raised = graph.op("MatMul", sent, graph.parameter("up", self.experts, self.hidden, inner, init=SPREAD))
            raised = graph.op("Add", raised, graph.parameter("up_bias", self.experts, 1, inner, init=ZEROS))
            down = graph.parameter("down", self.experts, inner, self.hidden, init=closing_spread(self.layers))
            lowered = graph.op("MatMul", graph.op("Gelu", raised), down)
            lowered = graph.op("Add", lowered, graph.parameter("down_bias", self.experts, 1, self.hidden, init=ZEROS))
            return graph.op("Einsum", combine, lowered, equation="bsec,bech->bsh")

    def _gate(self, graph: GraphBuilder, data: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Of each token's best experts the weights, which sum to one, and one-hot choices.

        Both by choice first: [batch, choices * sequence] and [batch, choices * sequence, experts].
        """
        with graph.scope("gate"):
            scores = linear(graph, "projection", data, self.hidden, self.experts, init=SPREAD, bias=False)
            shares = graph.op("Softmax", scores, axis=-1)
            best, which = graph.split_op("TopK", 2, shares, graph.constant([self.choices]), axis=-1)
            weights = graph.op("Div", best, graph.op("ReduceSum", best, graph.constant([-1]), keepdims=1))
            weights = graph.op("Transpose", weights, perm=[0, 2, 1])
            which = graph.op("Transpose", which, perm=[0, 2, 1])
            rows = self.choices * self.sequence
            chosen = self._one_hot(graph, graph.reshape(which, [0, rows]), self.experts)
            return graph.reshape(weights, [0, rows]), chosen

    def _places(self, graph: GraphBuilder, weights: ir.Value, chosen: ir.Value) -> tuple[ir.Value, ir.Value]:
        """[batch, sequence, experts, capacity]: 1 where a token takes an expert's place, and there its weight.

        First choices are seated before second ones, earlier tokens before later ones; a place beyond the capacity is
        out of range for the one-hot rows, which makes them zero.
        """
        with graph.scope("places"):
            before = graph.op("CumSum", chosen, graph.constant(1), exclusive=1)
            place = graph.op("ReduceSum", graph.op("Mul", before, chosen), graph.constant([-1]), keepdims=0)
            seat = self._one_hot(graph, graph.op("Cast", place, to=7), self.capacity)
            seats = graph.op("Einsum", chosen, seat, equation="bte,btc->btec")
            weighted = graph.op("Mul", seats, graph.op("Unsqueeze", weights, graph.constant([2, 3])))
            return self._over_choices(graph, seats), self._over_choices(graph, weighted)

    def _over_choices(self, graph: GraphBuilder, seats: ir.Value) -> ir.Value:
        """[batch, choices * sequence, …] summed over the choices."""
        apart = graph.reshape(seats, [0, self.choices, self.sequence, self.experts, self.capacity])
        return graph.op("ReduceSum", apart, graph.constant([1]), keepdims=0)

    def _one_hot(self, graph: GraphBuilder, indices: ir.Value, depth: int) -> ir.Value:
        """float32 [*indices, depth]."""
        return graph.op("OneHot", indices, graph.constant([depth]), graph.constant([0.0, 1.0]), axis=-1)


EPSILON = 1e-5
"""Of the RMS norms."""


def _llama_sizes(
    layers: int,
    hidden: int,
    heads: int,
    key_value_heads: int,
    feed_forward: int,
    *,
    vocabulary: Count = 32000,
    rotary_base: Count = 10000,
) -> dict[str, Setting]:
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "key_value_heads": key_value_heads,
        "feed_forward": feed_forward,
        "vocabulary": vocabulary,
        "rotary_base": rotary_base,
        "sequence": 4096,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama(ZooModel):
    """tokens [batch, sequence] -> logits [batch, sequence, vocabulary]; the head is not tied to the embedding."""

    presets: ClassVar[Mapping[str, Mapping[str, Setting]]] = {
        # Llama 2 (Touvron et al., 2023b).
        "7b": _llama_sizes(32, 4096, 32, 32, 11008),
        "13b": _llama_sizes(40, 5120, 40, 40, 13824),
        "70b": _llama_sizes(80, 8192, 64, 8, 28672),
        # Llama 3 (Grattafiori et al., 2024), table 3.
        "3-8b": _llama_sizes(32, 4096, 32, 8, 14336, vocabulary=128256, rotary_base=500000),
        "3-70b": _llama_sizes(80, 8192, 64, 8, 28672, vocabulary=128256, rotary_base=500000),
        "3-405b": _llama_sizes(126, 16384, 128, 8, 53248, vocabulary=128256, rotary_base=500000),
    }

    multiples: ClassVar[tuple[tuple[str, str], ...]] = (
        ("hidden", "heads"),
        ("heads", "key_value_heads"),
        ("head_size", "halves"),
    )

    layers: Count = 4
    """Transformer layers."""

    hidden: Count = 64
    """Width of the residual stream."""

    heads: Count = 4
    """Query heads of a layer."""

    key_value_heads: Count = 2
    """Key and value heads of a layer, each shared by `heads` / `key_value_heads` query heads."""

    feed_forward: Count = 128
    """Inner width of the SwiGLU."""

    vocabulary: Count = 256
    """Rows of the embedding, and extent of the logits."""

    sequence: Count = 32
    """Tokens of a sample."""

    rotary_base: Count = 10000
    """Base of the rotary frequencies."""

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    @property
    def halves(self) -> int:
        """Rotary positions turn the first half of a head against the second."""
        return 2

    def build(self, graph: GraphBuilder) -> None:
        """Embedding, layers, norm, head."""
        tokens = graph.input("tokens", self.sequence, integer=True)
        data, _ = embedding(graph, "embedding", tokens, self.vocabulary, self.hidden, init=SPREAD)
        mask = causal_mask(graph, self.sequence)
        rotation = self._rotation(graph)
        for index in range(self.layers):
            with graph.scope(f"layers.{index}"):
                data = self._layer(graph, data, rotation, mask)
        data = rms_norm(graph, "norm", data, self.hidden, EPSILON)
        logits = linear(graph, "head", data, self.hidden, self.vocabulary, init=SPREAD, bias=False)
        predict_tokens(graph, logits, self.loss, self.sequence, self.vocabulary)

    def _layer(
        self, graph: GraphBuilder, data: ir.Value, rotation: tuple[ir.Value, ir.Value], mask: ir.Value
    ) -> ir.Value:
        normed = rms_norm(graph, "attention_norm", data, self.hidden, EPSILON)
        data = graph.op("Add", data, self._attention(graph, normed, rotation, mask))
        normed = rms_norm(graph, "feed_forward_norm", data, self.hidden, EPSILON)
        with graph.scope("feed_forward"):
            gate = linear(graph, "gate", normed, self.hidden, self.feed_forward, init=SPREAD, bias=False)
            gate = graph.op("Mul", gate, graph.op("Sigmoid", gate))
            raised = linear(graph, "up", normed, self.hidden, self.feed_forward, init=SPREAD, bias=False)
            gated = graph.op("Mul", gate, raised)
            lowered = linear(graph, "down", gated, self.feed_forward, self.hidden, init=SPREAD, bias=False)
        return graph.op("Add", data, lowered)

    def _attention(
        self, graph: GraphBuilder, data: ir.Value, rotation: tuple[ir.Value, ir.Value], mask: ir.Value
    ) -> ir.Value:
        with graph.scope("attention"):
            query = self._projected(graph, "query", data, self.heads)
            key = self._projected(graph, "key", data, self.key_value_heads)
            value = self._projected(graph, "value", data, self.key_value_heads)
            query, key = self._rotated(graph, query, rotation), self._rotated(graph, key, rotation)
            key, value = self._repeated(graph, key), self._repeated(graph, value)
            mixed = weighted_sum(graph, query, key, value, scale=1.0 / math.sqrt(self.head_size), mask=mask)
            merged = merge_heads(graph, mixed, self.hidden)
            return linear(graph, "output", merged, self.hidden, self.hidden, init=SPREAD, bias=False)

    def _projected(self, graph: GraphBuilder, name: str, data: ir.Value, heads: int) -> ir.Value:
        width = heads * self.head_size
        return split_heads(
            graph, linear(graph, name, data, self.hidden, width, init=SPREAD, bias=False), heads, self.head_size
        )

    def _rotation(self, graph: GraphBuilder) -> tuple[ir.Value, ir.Value]:
        """Cosine and sine [sequence, head_size] of position times frequency base^(-2 i / head_size)."""
        half = self.head_size // 2
        with graph.scope("rotary"):
            place = graph.op("Unsqueeze", float_positions(graph, self.sequence), graph.constant([1]))
            frequency = graph.constant([self.rotary_base ** (-step / half) for step in range(half)])
            angle = graph.op("Mul", place, frequency)
            angle = graph.op("Concat", angle, angle, axis=-1)
            return graph.op("Cos", angle), graph.op("Sin", angle)

    def _rotated(self, graph: GraphBuilder, data: ir.Value, rotation: tuple[ir.Value, ir.Value]) -> ir.Value:
        """Each pair (i, i + head_size / 2) of the last axis turned by its position's angle (Su et al., 2021)."""
        cosine, sine = rotation
        lower, upper = graph.split_op("Split", 2, data, axis=-1, num_outputs=2)
        turned = graph.op("Concat", graph.op("Neg", upper), lower, axis=-1)
        return graph.op("Add", graph.op("Mul", data, cosine), graph.op("Mul", turned, sine))

    def _repeated(self, graph: GraphBuilder, data: ir.Value) -> ir.Value:
        """[batch, key_value_heads, …] -> [batch, heads, …], each head standing `heads` / `key_value_heads` times."""
        copies = self.heads // self.key_value_heads
        if copies == 1:
            return data
        spread = graph.op("Unsqueeze", data, graph.constant([2]))
        target = [1, 1, copies, 1, 1]
        spread = graph.op("Expand", spread, graph.constant(target))
        return graph.reshape(spread, [0, self.heads, self.sequence, self.head_size])


def _gpt_sizes(
    layers: int, hidden: int, heads: int, vocabulary: int = 50257, sequence: int = 2048
) -> dict[str, Setting]:
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "vocabulary": vocabulary,
        "sequence": sequence,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt(ZooModel):
    """tokens [batch, sequence] -> logits [batch, sequence, vocabulary]."""

    presets: ClassVar[Mapping[str, Mapping[str, Setting]]] = {
        # GPT-2 (Radford et al., 2019).
        "gpt2": _gpt_sizes(12, 768, 12, sequence=1024),
        "gpt2-xl": _gpt_sizes(48, 1600, 25, sequence=1024),
        # GPT-3, table 2.1. The paper's 24 heads of 128 (1.3B) and hidden 5140 (13B) do not divide: 16 and 5120 do.
        "125m": _gpt_sizes(12, 768, 12),
        "350m": _gpt_sizes(24, 1024, 16),
        "760m": _gpt_sizes(24, 1536, 16),
        "1.3b": _gpt_sizes(24, 2048, 16),
        "2.7b": _gpt_sizes(32, 2560, 32),
        "6.7b": _gpt_sizes(32, 4096, 32),
        "13b": _gpt_sizes(40, 5120, 40),
        "175b": _gpt_sizes(96, 12288, 96),
        # Between the two, as Megatron-LM (Narayanan et al., 2021) and Alpa (OSDI 2022) have it.
        "39b": _gpt_sizes(48, 8192, 64),
        # Tessel (HPCA 2024), table III; "1M" read as 1,000,000, which gives the parameter counts it names.
        "11b": _gpt_sizes(32, 4096, 32, 1_000_000),
        "24b": _gpt_sizes(40, 6144, 48, 1_000_000),
        "47b": _gpt_sizes(48, 8192, 64, 1_000_000),
        "77b": _gpt_sizes(80, 8192, 64, 1_500_000),
        # Tessel, figure 2: layers of GPT 6.7B under an embedding of 768K rows.
        "tessel-figure-2": _gpt_sizes(32, 4096, 32, 768_000),
    }

    multiples: ClassVar[tuple[tuple[str, str], ...]] = (("hidden", "heads"),)

    layers: Count = 4
    """Transformer layers."""

    hidden: Count = 64
    """Width of the residual stream."""

    heads: Count = 4
    """Attention heads of a layer."""

    vocabulary: Count = 256
    """Rows of the embedding, and extent of the logits."""

    sequence: Count = 32
    """Tokens of a sample."""

    def build(self, graph: GraphBuilder) -> None:
        """Embeddings, pre-norm layers, norm, product with the transposed embedding."""
        tokens = graph.input("tokens", self.sequence, integer=True)
        data, table = embedding(graph, "token_embedding", tokens, self.vocabulary, self.hidden, init=SPREAD)
        with graph.scope("position_embedding"):
            order = positions(graph, self.sequence)
        places, _ = embedding(graph, "position_embedding", order, self.sequence, self.hidden, init=SPREAD)
        data = graph.op("Add", data, places)
        mask = causal_mask(graph, self.sequence)
        sizes = Attention(self.hidden, self.heads, closing=closing_spread(self.layers))
        for index in range(self.layers):
            data = pre_norm_block(graph, f"layers.{index}", sizes, 4 * self.hidden, data, mask=mask)
        data = layer_norm(graph, "norm", data, self.hidden)
        with graph.scope("head"):
            logits = graph.op("MatMul", data, graph.op("Transpose", table, perm=[1, 0]))
        predict_tokens(graph, logits, self.loss, self.sequence, self.vocabulary)


BERT_EPSILON = 1e-12
"""Of the layer norms."""


def _bert_sizes(layers: int, hidden: int, heads: int, vocabulary: int = 30522) -> dict[str, Setting]:
    return {"layers": layers, "hidden": hidden, "heads": heads, "vocabulary": vocabulary, "sequence": 512}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bert(ZooModel):
    """tokens, token_types, attention_mask [batch, sequence] -> logits [batch, sequence, vocabulary]."""

    presets: ClassVar[Mapping[str, Mapping[str, Setting]]] = {
        "base": _bert_sizes(12, 768, 12),
        "large": _bert_sizes(24, 1024, 16),
        # DNABERT (Ji et al., 2021), over all words of six bases and five special tokens; one of TePDist's models.
        "dnabert": _bert_sizes(12, 768, 12, 4**6 + 5),
    }
    multiples: ClassVar[tuple[tuple[str, str], ...]] = (("hidden", "heads"),)

    layers: Count = 4
    """Transformer layers."""

    hidden: Count = 64
    """Width of the residual stream; the feed-forward layers are four times as wide."""

    heads: Count = 4
    """Attention heads of a layer."""

    vocabulary: Count = 256
    """Rows of the embedding, and extent of the logits."""

    sequence: Count = 32
    """Tokens of a sample."""

    def build(self, graph: GraphBuilder) -> None:
        """Embeddings, post-norm layers, head."""
        tokens = graph.input("tokens", self.sequence, integer=True)
        token_types = graph.input("token_types", self.sequence, integer=True)
        present = graph.input("attention_mask", self.sequence, integer=True)
        data, table = self._embedded(graph, tokens, token_types)
        mask = self._padding_mask(graph, present)
        sizes = Attention(self.hidden, self.heads)
        for index in range(self.layers):
            data = post_norm_block(graph, f"layers.{index}", sizes, 4 * self.hidden, data, mask=mask)
        logits = self._head(graph, data, table)
        predict_tokens(graph, logits, self.loss, self.sequence, self.vocabulary)

    def _embedded(self, graph: GraphBuilder, tokens: ir.Value, token_types: ir.Value) -> tuple[ir.Value, ir.Value]:
        with graph.scope("embeddings"):
            words, table = embedding(graph, "word", tokens, self.vocabulary, self.hidden, init=SPREAD)
            order = positions(graph, self.sequence)
            places, _ = embedding(graph, "position", order, self.sequence, self.hidden, init=SPREAD)
            kinds, _ = embedding(graph, "token_type", token_types, 2, self.hidden, init=SPREAD)
            summed = graph.op("Add", graph.op("Add", words, kinds), places)
            return layer_norm(graph, "norm", summed, self.hidden, BERT_EPSILON), table

    def _padding_mask(self, graph: GraphBuilder, present: ir.Value) -> ir.Value:
        """[batch, 1, 1, sequence]: 0 where a token is, FORBIDDEN where padding is."""
        with graph.scope("padding_mask"):
            spread = graph.op("Cast", graph.op("Unsqueeze", present, graph.constant([1, 2])), to=1)
            return graph.op("Mul", graph.op("Sub", graph.constant(1.0), spread), graph.constant(FORBIDDEN))

    def _head(self, graph: GraphBuilder, data: ir.Value, table: ir.Value) -> ir.Value:
        with graph.scope("head"):
            data = graph.op("Gelu", linear(graph, "transform", data, self.hidden, self.hidden, init=SPREAD))
            data = layer_norm(graph, "norm", data, self.hidden, BERT_EPSILON)
            logits = graph.op("MatMul", data, graph.op("Transpose", table, perm=[1, 0]))
            return graph.op("Add", logits, graph.parameter("bias", self.vocabulary, init=ZEROS))
