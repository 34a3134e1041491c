"""A language model of stacked LSTM layers, as PaSE takes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from autopipe.configs.zoo.builder import GraphBuilder, uniform
from autopipe.configs.zoo.layers import embedding, linear
from autopipe.configs.zoo.losses import predict_tokens
from autopipe.configs.zoo.model import Count, Setting, ZooModel

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True, slots=True, kw_only=True)
class RnnLm(ZooModel):
    """tokens [batch, sequence] -> logits [batch, sequence, vocabulary]."""

    presets: ClassVar[Mapping[str, Mapping[str, Setting]]] = {
        # PaSE (IPDPS 2021), which uses batches of 64.
        "paper": {"layers": 2, "hidden": 2048, "vocabulary": 100_000, "sequence": 256},
    }

    layers: Count = 2
    """LSTM layers."""

    hidden: Count = 32
    """Units of a layer and width of the embedding."""

    vocabulary: Count = 256
    """Rows of the embedding, and extent of the logits."""

    sequence: Count = 16
    """Tokens of a sample."""

    def build(self, graph: GraphBuilder) -> None:
        """Embedding, LSTM layers over [sequence, batch, hidden], projection."""
        init = uniform(1.0 / math.sqrt(self.hidden))
        tokens = graph.input("tokens", self.sequence, integer=True)
        data, _ = embedding(graph, "embedding", tokens, self.vocabulary, self.hidden, init=init)
        data = graph.op("Transpose", data, perm=[1, 0, 2])
        for index in range(self.layers):
            data = self._recurrent(graph, f"layers.{index}", data)
        data = graph.op("Transpose", data, perm=[1, 0, 2])
        logits = linear(graph, "projection", data, self.hidden, self.vocabulary, init=init)
        predict_tokens(graph, logits, self.loss, self.sequence, self.vocabulary)

    def _recurrent(self, graph: GraphBuilder, name: str, data: ir.Value) -> ir.Value:
        """One direction, states that start at zero; ONNX orders the gates input, output, forget, cell."""
        init = uniform(1.0 / math.sqrt(self.hidden))
        with graph.scope(name):
            weight = graph.parameter("weight", 1, 4 * self.hidden, self.hidden, init=init)
            recurrence = graph.parameter("recurrence", 1, 4 * self.hidden, self.hidden, init=init)
            bias = graph.parameter("bias", 1, 8 * self.hidden, init=init)
            result = graph.op("LSTM", data, weight, recurrence, bias, hidden_size=self.hidden)
            return graph.op("Squeeze", result, graph.constant([1]))
