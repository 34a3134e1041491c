"""mT5: encoder and decoder over one shared embedding (Xue et al., 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from autopipe.configs.zoo.attention import SPREAD, Attention, attention, causal_mask, feed_forward
from autopipe.configs.zoo.builder import GraphBuilder
from autopipe.configs.zoo.layers import embedding, linear, positions, rms_norm
from autopipe.configs.zoo.losses import predict_tokens
from autopipe.configs.zoo.model import Count, Setting, ZooModel

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
