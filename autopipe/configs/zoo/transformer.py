"""The encoder-decoder translation model of Vaswani et al. (2017), as PaSE takes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from autopipe.configs.zoo.attention import Attention, attention, causal_mask, feed_forward
from autopipe.configs.zoo.builder import GraphBuilder, lecun, normal
from autopipe.configs.zoo.layers import embedding, float_positions, layer_norm, linear
from autopipe.configs.zoo.losses import predict_tokens
from autopipe.configs.zoo.model import Count, Setting, ZooModel

if TYPE_CHECKING:
    import onnx_ir as ir

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
