"""Transformer layers, and the models that are one stack of transformer layers: GPT, BERT, a mixture
of experts, and Llama.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

from autopipe.configs.zoo import Count, Settings, ZooModel, preset
from autopipe.configs.zoo.builder import NORMAL_0_02, ZEROS, GraphBuilder, normal
from autopipe.ir.graph import Initializer

if TYPE_CHECKING:
    import onnx_ir as ir

MASKED_SCORE: Final = -1e9
"""Number added to the score of a query-key pair that is masked: far below any score, and finite in
every precision except fp16.
"""
Rotation = tuple["ir.Value", "ir.Value"]
"""(cosine, sine) of rotary positions, each [sequence, head width]."""


@dataclass(frozen=True, slots=True)
class TransformerLayer:
    """The sizes of a model's transformer layers, and their differences from the layers of GPT-2."""

    hidden: int
    """Width of the residual stream."""
    heads: int
    inner: int = 0
    """Inner width of the feed-forward layer; 0 if the layer does not use `feed_forward`."""
    key_value_heads: int = 0
    """Number of key and value heads, each of which serves several query heads; 0 for as many as
    query heads.
    """
    norm: Callable[[GraphBuilder, str, ir.Value, int], ir.Value] = GraphBuilder.layer_norm
    norm_first: bool = True
    """True if the norm precedes attention and feed-forward (pre-norm), False if it follows the
    residual sums (post-norm).
    """
    bias: bool = True
    """True if the linear layers of attention have a bias."""
    inner_bias: bool = True
    """True if the linear layers of the feed-forward layer have a bias."""
    scaled: bool = True
    """True if attention scores are divided by the square root of the head width."""
    activation: str = "Gelu"
    """Operator of the feed-forward layer, or `SwiGLU`: x · sigmoid(x) of a third linear layer
    multiplies the output of the first.
    """
    init: Initializer = NORMAL_0_02
    depth: int = 0
    """Number of layers of a model that initialises output weights by depth, as GPT-2 does; 0 for
    other models.
    """

    @property
    def width(self) -> int:
        return self.hidden // self.heads

    @property
    def end(self) -> Initializer:
        """Initializer of the weights whose results are added to the residual stream. With `depth`,
        the standard deviation is divided by √(2 · depth), for two residual sums per layer (Radford
        et al. 2019, section 2.3).
        """
        return normal(self.init.scale / math.sqrt(2 * self.depth)) if self.depth else self.init


def causal_mask(graph: GraphBuilder, length: int) -> ir.Value:
    """Return the mask [length query positions, length key positions]: 0 if the key is at or before
    the query, otherwise FORBIDDEN.
    """
    with graph.scope("causal_mask"):
        order = graph.positions(length)
        query = graph.op("Unsqueeze", order, graph.constant([1]))
        key = graph.op("Unsqueeze", order, graph.constant([0]))
        future = graph.op("Less", query, key)
        return graph.op("Where", future, graph.constant(MASKED_SCORE), graph.constant(0.0))


def add_positions(
    graph: GraphBuilder, data: ir.Value, length: int, width: int, order: ir.Value | None = None
) -> ir.Value:
    """Return `data` [batch, length, width] plus a learned vector for each position. `order` is the
    vector 0 … length - 1; None adds it to the graph.
    """
    order = graph.positions(length) if order is None else order
    places, _ = graph.embedding("position_embedding", order, length, width)
    return graph.op("Add", data, places)


def tied_logits(graph: GraphBuilder, data: ir.Value, table: ir.Value) -> ir.Value:
    return graph.op("MatMul", data, graph.op("Transpose", table, perm=[1, 0]))


Sublayer = Callable[[GraphBuilder, str, TransformerLayer, "ir.Value"], "ir.Value"]


def attention(
    graph: GraphBuilder,
    name: str,
    layer: TransformerLayer,
    data: ir.Value,
    *,
    memory: ir.Value | None = None,
    mask: ir.Value | None = None,
    rotation: Rotation | None = None,
    length: int = 0,
) -> ir.Value:
    """Return attention of `data` [batch, length, hidden] to `memory`, or to `data` if `memory` is
    None: softmax(q kᵀ / √width + mask) v, followed by a linear layer.

    `length` is the number of positions of `memory`; it is required if there are fewer key and value
    heads than query heads.
    """
    source = data if memory is None else memory
    groups = layer.key_value_heads or layer.heads
    with graph.scope(name):
        query = _split_heads(graph, "query", layer, data, layer.heads)
        key, value = (_split_heads(graph, each, layer, source, groups) for each in ("key", "value"))
        if rotation is not None:
            query = _rotate_pairs(graph, query, rotation)
            key = _rotate_pairs(graph, key, rotation)
        if groups < layer.heads:
            key, value = (_repeat_heads(graph, each, layer, length) for each in (key, value))
        scores = graph.op("MatMul", query, graph.op("Transpose", key, perm=[0, 1, 3, 2]))
        if layer.scaled:
            scores = graph.op("Mul", scores, graph.constant(1.0 / math.sqrt(layer.width)))
        if mask is not None:
            scores = graph.op("Add", scores, mask)
        mixed = graph.op("MatMul", graph.op("Softmax", scores, axis=-1), value)
        merged = graph.reshape(
            graph.op("Transpose", mixed, perm=[0, 2, 1, 3]), [0, 0, layer.hidden]
        )
        return graph.linear(
            "output", merged, layer.hidden, layer.hidden, init=layer.end, bias=layer.bias
        )


def _split_heads(
    graph: GraphBuilder, name: str, layer: TransformerLayer, data: ir.Value, heads: int
) -> ir.Value:
    """Map [batch, length, hidden] to [batch, heads, length, width]."""
    rows = graph.linear(
        name, data, layer.hidden, heads * layer.width, init=layer.init, bias=layer.bias
    )
    return graph.op("Transpose", graph.reshape(rows, [0, 0, heads, layer.width]), perm=[0, 2, 1, 3])


def _rotate_pairs(graph: GraphBuilder, data: ir.Value, rotation: Rotation) -> ir.Value:
    """Rotate each pair (i, i + width / 2) of the last axis by the angle of its position (Su et al.,
    2021).
    """
    cosine, sine = rotation
    lower, upper = graph.split_op("Split", 2, data, axis=-1, num_outputs=2)
    turned = graph.op("Concat", graph.op("Neg", upper), lower, axis=-1)
    return graph.op("Add", graph.op("Mul", data, cosine), graph.op("Mul", turned, sine))


def _repeat_heads(
    graph: GraphBuilder, data: ir.Value, layer: TransformerLayer, length: int
) -> ir.Value:
    """Map [batch, key_value_heads, …] to [batch, heads, …]: each head is repeated `heads` /
    `key_value_heads` times.
    """
    spread = graph.op("Unsqueeze", data, graph.constant([2]))
    times = layer.heads // layer.key_value_heads
    spread = graph.op("Expand", spread, graph.constant([1, 1, times, 1, 1]))
    return graph.reshape(spread, [0, layer.heads, length, layer.width])


def feed_forward(
    graph: GraphBuilder, name: str, layer: TransformerLayer, data: ir.Value
) -> ir.Value:
    """Map hidden to inner, apply the activation, and map inner to hidden."""
    bias = layer.inner_bias
    with graph.scope(name):
        if layer.activation == "SwiGLU":
            gate = graph.linear("gate", data, layer.hidden, layer.inner, init=layer.init, bias=bias)
            gate = graph.op("Mul", gate, graph.op("Sigmoid", gate))
        raised = graph.linear("up", data, layer.hidden, layer.inner, init=layer.init, bias=bias)
        raised = (
            graph.op("Mul", gate, raised)
            if layer.activation == "SwiGLU"
            else graph.op(layer.activation, raised)
        )
        return graph.linear("down", raised, layer.inner, layer.hidden, init=layer.end, bias=bias)


def residual(
    graph: GraphBuilder, name: str, layer: TransformerLayer, data: ir.Value, sublayer: Sublayer
) -> ir.Value:
    """Return `data` plus the result of `sublayer`, which is called `name`. The layer's norm is
    applied to the input of the sublayer if `norm_first`, otherwise to the sum.
    """
    normed = layer.norm(graph, f"{name}_norm", data, layer.hidden) if layer.norm_first else data
    total = graph.op("Add", data, sublayer(graph, name, layer, normed))
    return total if layer.norm_first else layer.norm(graph, f"{name}_norm", total, layer.hidden)


def transformer(
    graph: GraphBuilder,
    name: str,
    count: int,
    layer: TransformerLayer,
    data: ir.Value,
    *,
    mask: ir.Value | None = None,
    memory: ir.Value | None = None,
    attend: Sublayer | None = None,
    last: tuple[str, Sublayer] = ("feed_forward", feed_forward),
) -> ir.Value:
    """Return `data` after `count` layers called `name.0`, `name.1`, …. A layer is self-attention,
    cross-attention to `memory` if that is given, and the sublayer `last`.
    """
    for index in range(count):
        with graph.scope(f"{name}.{index}"):
            data = residual(
                graph, "attention", layer, data, attend or partial(attention, mask=mask)
            )
            if memory is not None:
                data = residual(
                    graph, "cross_attention", layer, data, partial(attention, memory=memory)
                )
            data = residual(graph, last[0], layer, data, last[1])
    return data


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerModel(ZooModel):
    multiples: ClassVar[tuple[tuple[str, str], ...]] = (("hidden", "heads"),)

    layers: Count = 4
    """Transformer layers."""
    hidden: Count = 64
    """Width of the residual stream."""
    heads: Count = 4
    """Attention heads of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel(TransformerModel):
    """Fields of a model that reads `tokens` [batch, sequence]."""

    vocabulary: Count = 256
    """Rows of the embedding, and size of the last axis of the logits."""
    sequence: Count = 32
    """Tokens of a sample."""


_GPT_FIELDS = "layers hidden heads vocabulary sequence"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt(LanguageModel):
    """GPT, whose head is its embedding, transposed (Brown et al., 2020). tokens [batch, sequence]
    -> logits [batch, sequence, vocabulary].
    """

    presets: ClassVar[Mapping[str, Settings]] = {
        # Sizes of GPT-2 (Radford et al., 2019).
        "gpt2": preset(_GPT_FIELDS, 12, 768, 12, 50257, 1024),
        "gpt2-xl": preset(_GPT_FIELDS, 48, 1600, 25, 50257, 1024),
        # Sizes of GPT-3, table 2.1, with two exceptions. The paper has 24 heads of 128 for 1.3B and
        # hidden 5140 for 13B, so the hidden size is not a multiple of the heads. These presets have
        # 16 heads and hidden 5120 instead.
        "125m": preset(_GPT_FIELDS, 12, 768, 12, 50257, 2048),
        "350m": preset(_GPT_FIELDS, 24, 1024, 16, 50257, 2048),
        "760m": preset(_GPT_FIELDS, 24, 1536, 16, 50257, 2048),
        "1.3b": preset(_GPT_FIELDS, 24, 2048, 16, 50257, 2048),
        "2.7b": preset(_GPT_FIELDS, 32, 2560, 32, 50257, 2048),
        "6.7b": preset(_GPT_FIELDS, 32, 4096, 32, 50257, 2048),
        "13b": preset(_GPT_FIELDS, 40, 5120, 40, 50257, 2048),
        "175b": preset(_GPT_FIELDS, 96, 12288, 96, 50257, 2048),
        # Sizes of Megatron-LM (Narayanan et al., 2021) and Alpa (OSDI 2022).
        "39b": preset(_GPT_FIELDS, 48, 8192, 64, 50257, 2048),
        # Sizes of Tessel (HPCA 2024), table III. The vocabulary "1M" is 1,000,000 here, because the
        # parameter counts of the table result from this number.
        "11b": preset(_GPT_FIELDS, 32, 4096, 32, 1_000_000, 2048),
        "24b": preset(_GPT_FIELDS, 40, 6144, 48, 1_000_000, 2048),
        "47b": preset(_GPT_FIELDS, 48, 8192, 64, 1_000_000, 2048),
        "77b": preset(_GPT_FIELDS, 80, 8192, 64, 1_500_000, 2048),
        # Sizes of Tessel (HPCA 2024), figure 2: layers of GPT 6.7B and an embedding of 768,000
        # rows.
        "tessel-figure-2": preset(_GPT_FIELDS, 32, 4096, 32, 768_000, 2048),
    }

    def build(self, graph: GraphBuilder) -> None:
        tokens = graph.input("tokens", self.sequence, integer=True)
        data, table = graph.embedding("token_embedding", tokens, self.vocabulary, self.hidden)
        with graph.scope("position_embedding"):
            order = graph.positions(self.sequence)
        data = add_positions(graph, data, self.sequence, self.hidden, order)
        mask = causal_mask(graph, self.sequence)
        layer = TransformerLayer(self.hidden, self.heads, 4 * self.hidden, depth=self.layers)
        data = transformer(graph, "layers", self.layers, layer, data, mask=mask)
        data = graph.layer_norm("norm", data, self.hidden)
        with graph.scope("head"):
            logits = tied_logits(graph, data, table)
        graph.predict_tokens(logits, self.sequence, self.vocabulary)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bert(LanguageModel):
    """BERT with its masked-language-model head (Devlin et al., 2019). tokens, token_types,
    attention_mask [batch, sequence] -> logits [batch, sequence, vocabulary].
    """

    presets: ClassVar[Mapping[str, Settings]] = {
        "base": preset(_GPT_FIELDS, 12, 768, 12, 30522, 512),
        "large": preset(_GPT_FIELDS, 24, 1024, 16, 30522, 512),
        # Sizes of DNABERT (Ji et al., 2021), one of TePDist's models. The vocabulary contains all
        # words of six bases and five special tokens.
        "dnabert": preset(_GPT_FIELDS, 12, 768, 12, 4**6 + 5, 512),
    }
    hidden: Count = 64
    """Width of the residual stream; the feed-forward layers are four times as wide."""

    def build(self, graph: GraphBuilder) -> None:
        tokens, token_types, present = (
            graph.input(name, self.sequence, integer=True)
            for name in ("tokens", "token_types", "attention_mask")
        )
        norm = partial(GraphBuilder.layer_norm, epsilon=1e-12)
        with graph.scope("embeddings"):
            words, table = graph.embedding("word", tokens, self.vocabulary, self.hidden)
            order = graph.positions(self.sequence)
            places, _ = graph.embedding("position", order, self.sequence, self.hidden)
            kinds, _ = graph.embedding("token_type", token_types, 2, self.hidden)
            data = norm(
                graph, "norm", graph.op("Add", graph.op("Add", words, kinds), places), self.hidden
            )
        with graph.scope("padding_mask"):  # The shape of the mask is [batch, 1, 1, sequence].
            spread = graph.op("Cast", graph.op("Unsqueeze", present, graph.constant([1, 2])), to=1)
            mask = graph.op(
                "Mul", graph.op("Sub", graph.constant(1.0), spread), graph.constant(MASKED_SCORE)
            )
        layer = TransformerLayer(
            self.hidden, self.heads, 4 * self.hidden, norm=norm, norm_first=False
        )
        data = transformer(graph, "layers", self.layers, layer, data, mask=mask)
        with graph.scope("head"):
            data = graph.op("Gelu", graph.linear("transform", data, self.hidden, self.hidden))
            logits = tied_logits(graph, norm(graph, "norm", data, self.hidden), table)
            logits = graph.op("Add", logits, graph.parameter("bias", self.vocabulary, init=ZEROS))
        graph.predict_tokens(logits, self.sequence, self.vocabulary)


def _moe_sizes(layers: int, hidden: int, experts: int) -> Settings:
    """Return a preset with two experts per token and a capacity of twice the tokens that an expert
    gets on average, as in GShard.
    """
    names = "layers hidden heads experts choices capacity vocabulary sequence"
    return preset(names, layers, hidden, 16, experts, 2, -(-2 * 2 * 1024 // experts), 32000, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts(TransformerModel):
    """A language model whose feed-forward layers are experts chosen by a gate (Lepikhin et al.,
    2021: GShard). tokens [batch, sequence] -> logits [batch, sequence, vocabulary]. Each sample is
    a group of its own: its tokens compete for the experts' places, those of other samples do not,
    so that a batch may be split anywhere.
    """

    presets: ClassVar[Mapping[str, Settings]] = {
        # Models of Alpa (OSDI 2022), which is the baseline of TePDist's measurements. The name of a
        # preset is its number of parameters.
        "380m": _moe_sizes(8, 768, 8),
        "690m": _moe_sizes(8, 768, 16),
        "1.3b": _moe_sizes(16, 768, 16),
        "2.4b": _moe_sizes(16, 1024, 16),
        "10b": _moe_sizes(16, 1536, 32),
        "27b": _moe_sizes(16, 2048, 48),
        "70b": _moe_sizes(32, 2048, 64),
    }
    limits: ClassVar[tuple[tuple[str, str], ...]] = (("choices", "experts"),)

    layers: Count = 2
    experts: Count = 4
    """Feed-forward networks of a layer, each four times as wide inside."""
    choices: Count = 2
    """Experts that a token is sent to."""
    capacity: Count = 16
    """Maximum number of tokens of a sample that an expert takes. Later tokens skip the expert: only
    the residual carries them on.
    """
    vocabulary: Count = 256
    """Rows of the embedding, and size of the last axis of the logits."""
    sequence: Count = 16
    """Tokens of a sample."""

    def build(self, graph: GraphBuilder) -> None:
        tokens = graph.input("tokens", self.sequence, integer=True)
        data, _ = graph.embedding("token_embedding", tokens, self.vocabulary, self.hidden)
        data = add_positions(graph, data, self.sequence, self.hidden)
        mask = causal_mask(graph, self.sequence)
        layer = TransformerLayer(self.hidden, self.heads, 4 * self.hidden, depth=self.layers)
        data = transformer(
            graph, "layers", self.layers, layer, data, mask=mask, last=("experts", self._mixture)
        )
        data = graph.layer_norm("norm", data, self.hidden)
        logits = graph.linear("head", data, self.hidden, self.vocabulary, bias=False)
        graph.predict_tokens(logits, self.sequence, self.vocabulary)

    def _mixture(
        self, graph: GraphBuilder, name: str, layer: TransformerLayer, data: ir.Value
    ) -> ir.Value:
        """Send each token to a slot of each of its experts, apply the experts, and combine the
        results with the weights of the gate. An expert has a slot for each token that it can take
        (its capacity).
        """
        inner = layer.inner
        with graph.scope(name):
            weights, chosen = self._gate(graph, data)
            dispatch, combine = self._dispatch_and_combine(graph, weights, chosen)
            sent = graph.op("Einsum", dispatch, data, equation="bsec,bsh->bech")
            raised = graph.op(
                "MatMul", sent, graph.parameter("up", self.experts, self.hidden, inner)
            )
            raised = graph.op(
                "Add", raised, graph.parameter("up_bias", self.experts, 1, inner, init=ZEROS)
            )
            down = graph.parameter("down", self.experts, inner, self.hidden, init=layer.end)
            lowered = graph.op("MatMul", graph.op("Gelu", raised), down)
            lowered = graph.op(
                "Add",
                lowered,
                graph.parameter("down_bias", self.experts, 1, self.hidden, init=ZEROS),
            )
            return graph.op("Einsum", combine, lowered, equation="bsec,bech->bsh")

    def _gate(self, graph: GraphBuilder, data: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return (weights, chosen) for the best experts of each token.

        weights: [batch, choices * sequence], which sum to one per token. chosen: one-hot experts,
        [batch, choices * sequence, experts]. In both, all first choices precede all second choices.
        """
        with graph.scope("gate"):
            scores = graph.linear("projection", data, self.hidden, self.experts, bias=False)
            shares = graph.op("Softmax", scores, axis=-1)
            best, which = graph.split_op("TopK", 2, shares, graph.constant([self.choices]), axis=-1)
            weights = graph.op(
                "Div", best, graph.op("ReduceSum", best, graph.constant([-1]), keepdims=1)
            )
            weights = graph.op("Transpose", weights, perm=[0, 2, 1])
            which = graph.op("Transpose", which, perm=[0, 2, 1])
            rows = self.choices * self.sequence
            chosen = _one_hot(graph, graph.reshape(which, [0, rows]), self.experts)
            return graph.reshape(weights, [0, rows]), chosen

    def _dispatch_and_combine(
        self, graph: GraphBuilder, weights: ir.Value, chosen: ir.Value
    ) -> tuple[ir.Value, ir.Value]:
        """Return (dispatch, combine), both [batch, sequence, experts, capacity]: 1 (dispatch) or
        the weight of the gate (combine) for the slot that a token has in an expert, otherwise 0. An
        expert has `capacity` slots, one per token that it takes.

        Slots are assigned to first choices before second choices, and to earlier tokens before
        later tokens. A slot beyond the capacity is out of range for OneHot, whose row is then zero,
        so the token is dropped.
        """
        with graph.scope("places"):
            before = graph.op("CumSum", chosen, graph.constant(1), exclusive=1)
            place = graph.op(
                "ReduceSum", graph.op("Mul", before, chosen), graph.constant([-1]), keepdims=0
            )
            seat = _one_hot(graph, graph.op("Cast", place, to=7), self.capacity)
            seats = graph.op("Einsum", chosen, seat, equation="bte,btc->btec")
            weighted = graph.op(
                "Mul", seats, graph.op("Unsqueeze", weights, graph.constant([2, 3]))
            )
            return self._sum_over_choices(graph, seats), self._sum_over_choices(graph, weighted)

    def _sum_over_choices(self, graph: GraphBuilder, seats: ir.Value) -> ir.Value:
        """Return `seats` [batch, choices * sequence, experts, capacity] summed over the choices:
        [batch, sequence, experts, capacity].
        """
        apart = graph.reshape(seats, [0, self.choices, self.sequence, self.experts, self.capacity])
        return graph.op("ReduceSum", apart, graph.constant([1]), keepdims=0)


def _one_hot(graph: GraphBuilder, indices: ir.Value, depth: int) -> ir.Value:
    """Return one-hot vectors of length `depth`, float32 [*indices, depth]."""
    return graph.op("OneHot", indices, graph.constant([depth]), graph.constant([0.0, 1.0]), axis=-1)


_LLAMA_FIELDS = "layers hidden heads key_value_heads feed_forward vocabulary rotary_base sequence"


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama(TransformerModel):
    """Llama: RMS norms, rotary positions, SwiGLU and grouped-query attention (Touvron et al.,
    2023). tokens [batch, sequence] -> logits [batch, sequence, vocabulary]; the head is not tied to
    the embedding.
    """

    presets: ClassVar[Mapping[str, Settings]] = {
        # Sizes of Llama 2 (Touvron et al., 2023b).
        "7b": preset(_LLAMA_FIELDS, 32, 4096, 32, 32, 11008, 32000, 10000, 4096),
        "13b": preset(_LLAMA_FIELDS, 40, 5120, 40, 40, 13824, 32000, 10000, 4096),
        "70b": preset(_LLAMA_FIELDS, 80, 8192, 64, 8, 28672, 32000, 10000, 4096),
        # Sizes of Llama 3 (Grattafiori et al., 2024), table 3.
        "3-8b": preset(_LLAMA_FIELDS, 32, 4096, 32, 8, 14336, 128256, 500000, 4096),
        "3-70b": preset(_LLAMA_FIELDS, 80, 8192, 64, 8, 28672, 128256, 500000, 4096),
        "3-405b": preset(_LLAMA_FIELDS, 126, 16384, 128, 8, 53248, 128256, 500000, 4096),
    }
    multiples: ClassVar[tuple[tuple[str, str], ...]] = (
        ("hidden", "heads"),
        ("heads", "key_value_heads"),
        ("head_size", "halves"),
    )
    halves: ClassVar[int] = 2
    """Divisor of the head size: rotary positions rotate the first half of a head against the
    second.
    """
    heads: Count = 4
    """Query heads of a layer."""
    key_value_heads: Count = 2
    """Key and value heads of a layer, each shared by `heads` / `key_value_heads` query heads."""
    feed_forward: Count = 128
    """Inner width of the SwiGLU."""
    vocabulary: Count = 256
    """Rows of the embedding, and size of the last axis of the logits."""
    sequence: Count = 32
    """Tokens of a sample."""
    rotary_base: Count = 10000
    """Base of the rotary frequencies."""

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    def build(self, graph: GraphBuilder) -> None:
        tokens = graph.input("tokens", self.sequence, integer=True)
        data, _ = graph.embedding("embedding", tokens, self.vocabulary, self.hidden)
        norm = partial(GraphBuilder.rms_norm, epsilon=1e-5)
        layer = TransformerLayer(
            self.hidden,
            self.heads,
            self.feed_forward,
            self.key_value_heads,
            norm,
            bias=False,
            inner_bias=False,
            activation="SwiGLU",
        )
        mask = causal_mask(graph, self.sequence)
        with graph.scope("rotary"):
            angle = graph.angles(self.sequence, self.head_size // 2, self.rotary_base)
            angle = graph.op("Concat", angle, angle, axis=-1)
            rotation = graph.op("Cos", angle), graph.op("Sin", angle)
        attend = partial(attention, mask=mask, rotation=rotation, length=self.sequence)
        data = transformer(graph, "layers", self.layers, layer, data, attend=attend)
        data = norm(graph, "norm", data, self.hidden)
        logits = graph.linear("head", data, self.hidden, self.vocabulary, bias=False)
        graph.predict_tokens(logits, self.sequence, self.vocabulary)
