"""Llama: RMS norms, rotary positions, SwiGLU and grouped-query attention (Touvron et al., 2023)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from autopipe.configs.zoo.attention import SPREAD, causal_mask, merge_heads, split_heads, weighted_sum
from autopipe.configs.zoo.builder import GraphBuilder
from autopipe.configs.zoo.layers import embedding, float_positions, linear, rms_norm
from autopipe.configs.zoo.losses import predict_tokens
from autopipe.configs.zoo.model import Count, Setting, ZooModel

if TYPE_CHECKING:
    import onnx_ir as ir

EPSILON = 1e-5
"""Of the RMS norms."""


def _sizes(
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
        "7b": _sizes(32, 4096, 32, 32, 11008),
        "13b": _sizes(40, 5120, 40, 40, 13824),
        "70b": _sizes(80, 8192, 64, 8, 28672),
        # Llama 3 (Grattafiori et al., 2024), table 3.
        "3-8b": _sizes(32, 4096, 32, 8, 14336, vocabulary=128256, rotary_base=500000),
        "3-70b": _sizes(80, 8192, 64, 8, 28672, vocabulary=128256, rotary_base=500000),
        "3-405b": _sizes(126, 16384, 128, 8, 53248, vocabulary=128256, rotary_base=500000),
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
