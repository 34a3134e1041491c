"""mT5: encoder and decoder over one shared embedding (Xue et al., 2021).

The encoder-decoder translation model of Vaswani et al. (2017), as PaSE takes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from autopipe.configs.zoo.builder import (
    GraphBuilder,
    embedding,
    float_positions,
    layer_norm,
    lecun,
    linear,
    normal,
    positions,
    predict_tokens,
    rms_norm,
)
from autopipe.configs.zoo.settings import Count, Setting, ZooModel
from autopipe.configs.zoo.transformers import SPREAD, Attention, attention, causal_mask, feed_forward

if TYPE_CHECKING:
    import onnx_ir as ir


EPSILON = 1e-6
"""Of the RMS norms."""

BUCKETS = 32
"""Distances that the position bias tells apart."""

FARTHEST = 128
"""Distance from which on all share a bucket."""


def _sizes(layers: int, hidden: int, heads: int, vocabulary: int, tied: bool = True) -> dict[str, Setting]:
    """A row of Tessel's table, whose layers are those of encoder and decoder together."""
    return {
        "layers": layers // 2,
        "hidden": hidden,
        "heads": heads,
        "vocabulary": vocabulary,
        "tied": tied,
        "source": 1024,
        "target": 1024,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Mt5(ZooModel):
    """source [batch, source], target [batch, target] -> logits [batch, target, vocabulary].

    As in T5: RMS norms, no biases, unscaled scores, a learned bias by bucketed distance in place of positions.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Setting]]] = {
        # Tessel (HPCA 2024), table III. 1.8B parameters need a head of its own, as mT5 has it; the others are tied.
        "1.8b": _sizes(48, 1024, 16, 512_000, tied=False),
        "9.5b": _sizes(48, 3072, 24, 1_000_000),
        "43b": _sizes(64, 6144, 48, 1_500_000),
        "88b": _sizes(80, 8192, 64, 1_500_000),
    }
    multiples: ClassVar[tuple[tuple[str, str], ...]] = (("hidden", "heads"),)

    layers: Count = 2
    """Layers of the encoder, and of the decoder."""

    hidden: Count = 64
    """Width of the residual stream; the feed-forward layers are four times as wide."""

    heads: Count = 4
    """Attention heads of a layer."""

    vocabulary: Count = 256
    """Rows of the embedding that encoder and decoder share, and extent of the logits."""

    tied: bool = True
    """True if the head is the embedding as well, transposed."""

    source: Count = 16
    """Tokens that the encoder reads."""

    target: Count = 16
    """Tokens that the decoder reads and predicts."""

    @property
    def attention(self) -> Attention:
        """The sizes of every attention layer."""
        return Attention(self.hidden, self.heads, bias=False, scaled=False)

    def build(self, graph: GraphBuilder) -> None:
        """Encoder, decoder, head."""
        source = graph.input("source", self.source, integer=True)
        target = graph.input("target", self.target, integer=True)
        memory, table = embedding(graph, "embedding", source, self.vocabulary, self.hidden, init=SPREAD)
        bias = self._distance_bias(graph, "encoder.position_bias", self.source, causal=False)
        for index in range(self.layers):
            with graph.scope(f"encoder.{index}"):
                memory = self._attended(graph, "attention", memory, mask=bias)
                memory = self._fed_forward(graph, memory)
        memory = rms_norm(graph, "encoder.norm", memory, self.hidden, EPSILON)
        with graph.scope("target_embedding"):
            data = graph.op("Gather", table, target, axis=0)
        bias = self._distance_bias(graph, "decoder.position_bias", self.target, causal=True)
        mask = graph.op("Add", bias, causal_mask(graph, self.target))
        for index in range(self.layers):
            with graph.scope(f"decoder.{index}"):
                data = self._attended(graph, "attention", data, mask=mask)
                data = self._attended(graph, "cross_attention", data, memory=memory)
                data = self._fed_forward(graph, data)
        data = rms_norm(graph, "decoder.norm", data, self.hidden, EPSILON)
        predict_tokens(graph, self._head(graph, data, table), self.loss, self.target, self.vocabulary)

    def _head(self, graph: GraphBuilder, data: ir.Value, table: ir.Value) -> ir.Value:
        if not self.tied:
            return linear(graph, "head", data, self.hidden, self.vocabulary, init=SPREAD, bias=False)
        with graph.scope("head"):
            return graph.op("MatMul", data, graph.op("Transpose", table, perm=[1, 0]))

    def _attended(
        self,
        graph: GraphBuilder,
        name: str,
        data: ir.Value,
        *,
        memory: ir.Value | None = None,
        mask: ir.Value | None = None,
    ) -> ir.Value:
        normed = rms_norm(graph, f"{name}_norm", data, self.hidden, EPSILON)
        mixed = attention(graph, name, self.attention, normed, memory=memory, mask=mask)
        return graph.op("Add", data, mixed)

    def _fed_forward(self, graph: GraphBuilder, data: ir.Value) -> ir.Value:
        normed = rms_norm(graph, "feed_forward_norm", data, self.hidden, EPSILON)
        inner = 4 * self.hidden
        raised = feed_forward(graph, "feed_forward", normed, self.hidden, inner, activation="Relu", bias=False)
        return graph.op("Add", data, raised)

    def _distance_bias(self, graph: GraphBuilder, name: str, length: int, *, causal: bool) -> ir.Value:
        """[1, heads, length, length]: a value by head and bucket of the distance (Raffel et al., 2020)."""
        with graph.scope(name):
            bucket = _bucket(graph, length, causal)
            table = graph.parameter("weight", BUCKETS, self.heads, init=SPREAD)
            chosen = graph.op("Gather", table, bucket, axis=0)
            return graph.op("Unsqueeze", graph.op("Transpose", chosen, perm=[2, 0, 1]), graph.constant([0]))


def _bucket(graph: GraphBuilder, length: int, causal: bool) -> ir.Value:
    """int64 [length, length]: the bucket of key position minus query position.

    Half of the buckets hold one distance each, the other half grow logarithmically up to FARTHEST. A causal model
    looks back only; otherwise keys after the query have the second half of the table to themselves.
    """
    order = positions(graph, length)
    key, query = graph.op("Unsqueeze", order, graph.constant([0])), graph.op("Unsqueeze", order, graph.constant([1]))
    offset = graph.op("Sub", key, query)
    buckets = BUCKETS if causal else BUCKETS // 2
    exact = buckets // 2
    if causal:
        distance = graph.op("Max", graph.op("Neg", offset), graph.constant(0))
    else:
        distance = graph.op("Abs", offset)
    beyond = graph.op("Cast", graph.op("Max", distance, graph.constant(exact)), to=1)
    growth = graph.op("Log", graph.op("Div", beyond, graph.constant(float(exact))))
    step = graph.op("Mul", growth, graph.constant((buckets - exact) / math.log(FARTHEST / exact)))
    far = graph.op("Add", graph.op("Cast", step, to=7), graph.constant(exact))
    far = graph.op("Min", far, graph.constant(buckets - 1))
    bucket = graph.op("Where", graph.op("Less", distance, graph.constant(exact)), distance, far)
    if causal:
        return bucket
    ahead = graph.op("Cast", graph.op("Greater", offset, graph.constant(0)), to=7)
    return graph.op("Add", bucket, graph.op("Mul", ahead, graph.constant(buckets)))


WAVELENGTH = 10000.0
"""Base of the sinusoids' wavelengths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer(ZooModel):
    """source, target [batch, sequence] -> logits [batch, sequence, vocabulary]; norms follow the residual sums."""

    presets: ClassVar[Mapping[str, Mapping[str, Setting]]] = {
        # PaSE (IPDPS 2021), which uses batches of 64; the sizes of the original base model.
        "paper": {
            "layers": 6,
            "hidden": 512,
            "heads": 8,
            "feed_forward": 2048,
            "vocabulary": 50_000,
            "sequence": 256,
        },
    }
    multiples: ClassVar[tuple[tuple[str, str], ...]] = (("hidden", "heads"), ("hidden", "waves"))

    layers: Count = 2
    """Layers of the encoder, and of the decoder."""

    hidden: Count = 64
    """Width of the residual stream."""

    heads: Count = 4
    """Attention heads of a layer."""

    feed_forward: Count = 256
    """Inner width of the feed-forward layers."""

    vocabulary: Count = 256
    """Rows of each of the two embeddings, and extent of the logits."""

    sequence: Count = 16
    """Tokens of the source, and of the target."""

    @property
    def waves(self) -> int:
        """A sine and a cosine for each frequency need an even width."""
        return 2

    @property
    def attention(self) -> Attention:
        """The sizes of every attention layer."""
        return Attention(self.hidden, self.heads, bias=False, init=lecun(self.hidden))

    def build(self, graph: GraphBuilder) -> None:
        """Encoder, decoder, projection."""
        source = graph.input("source", self.sequence, integer=True)
        target = graph.input("target", self.sequence, integer=True)
        waves = self._sinusoids(graph)
        memory = self._embedded(graph, "source_embedding", source, waves)
        for index in range(self.layers):
            with graph.scope(f"encoder.{index}"):
                memory = self._attended(graph, "attention", memory)
                memory = self._fed_forward(graph, memory)
        mask = causal_mask(graph, self.sequence)
        data = self._embedded(graph, "target_embedding", target, waves)
        for index in range(self.layers):
            with graph.scope(f"decoder.{index}"):
                data = self._attended(graph, "attention", data, mask=mask)
                data = self._attended(graph, "cross_attention", data, memory=memory)
                data = self._fed_forward(graph, data)
        logits = linear(graph, "projection", data, self.hidden, self.vocabulary, init=lecun(self.hidden), bias=False)
        predict_tokens(graph, logits, self.loss, self.sequence, self.vocabulary)

    def _embedded(self, graph: GraphBuilder, name: str, tokens: ir.Value, waves: ir.Value) -> ir.Value:
        init = normal(1.0 / math.sqrt(self.hidden))
        data, _ = embedding(graph, name, tokens, self.vocabulary, self.hidden, init=init)
        with graph.scope(name):
            scaled = graph.op("Mul", data, graph.constant(math.sqrt(self.hidden)))
            return graph.op("Add", scaled, waves)

    def _sinusoids(self, graph: GraphBuilder) -> ir.Value:
        """[sequence, hidden]: sines, then cosines, of position / 10000^(2 i / hidden)."""
        half = self.hidden // 2
        with graph.scope("positions"):
            place = graph.op("Unsqueeze", float_positions(graph, self.sequence), graph.constant([1]))
            frequency = graph.constant([WAVELENGTH ** (-step / half) for step in range(half)])
            angle = graph.op("Mul", place, frequency)
            return graph.op("Concat", graph.op("Sin", angle), graph.op("Cos", angle), axis=-1)

    def _attended(
        self,
        graph: GraphBuilder,
        name: str,
        data: ir.Value,
        *,
        memory: ir.Value | None = None,
        mask: ir.Value | None = None,
    ) -> ir.Value:
        mixed = attention(graph, name, self.attention, data, memory=memory, mask=mask)
        return layer_norm(graph, f"{name}_norm", graph.op("Add", data, mixed), self.hidden)

    def _fed_forward(self, graph: GraphBuilder, data: ir.Value) -> ir.Value:
        raised = feed_forward(
            graph,
            "feed_forward",
            data,
            self.hidden,
            self.feed_forward,
            activation="Relu",
            init=lecun(self.hidden),
        )
        return layer_norm(graph, "feed_forward_norm", graph.op("Add", data, raised), self.hidden)
