"""A recommendation model in GraphPipe's sizes: dense branches and embedding bags, joined (Naumov et al., 2019).

A language model of stacked LSTM layers, as PaSE takes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from autopipe.configs.zoo.builder import (
    GraphBuilder,
    click_or_not,
    dense,
    embedding,
    linear,
    normal,
    predict_tokens,
    uniform,
)
from autopipe.configs.zoo.settings import Count, Setting, ZooModel

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True, slots=True, kw_only=True)
class Dlrm(ZooModel):
    """dense_0, … [batch, features] and sparse_0, … [batch, bag] of row numbers -> probability [batch, 1]."""

    presets: ClassVar[Mapping[str, Mapping[str, Setting]]] = {
        # GraphPipe (ASPLOS 2025), appendix A.2; it leaves open the number of layers after the interaction.
        "paper": {
            "dense_branches": 7,
            "sparse_branches": 7,
            "dense_layers": 4,
            "features": 4096,
            "hidden": 4096,
            "rows": 1_000_000,
            "width": 64,
            "bag": 100,
            "top_layers": 4,
        },
    }

    dense_branches: Count = 3
    """Branches of linear layers over dense features."""

    sparse_branches: Count = 3
    """Embedding tables."""

    dense_layers: Count = 2
    """Linear layers of a dense branch."""

    features: Count = 16
    """Dense features of a branch."""

    hidden: Count = 32
    """Width of the linear layers."""

    rows: Count = 1000
    """Rows of a table."""

    width: Count = 8
    """Width of a table."""

    bag: Count = 4
    """Rows of a table that a sample looks up; they are concatenated."""

    top_layers: Count = 2
    """Linear layers after the branches are joined, not counting the one that gives the logit."""

    def build(self, graph: GraphBuilder) -> None:
        """Both kinds of branches, concatenated, linear layers, one logit."""
        joined = [self._dense_branch(graph, index) for index in range(self.dense_branches)]
        joined += [self._sparse_branch(graph, index) for index in range(self.sparse_branches)]
        data = graph.op("Concat", *joined, axis=1)
        inputs = self.dense_branches * self.hidden + self.sparse_branches * self.bag * self.width
        for index in range(self.top_layers):
            data = dense(graph, f"top.{index}", data, inputs, self.hidden)
            inputs = self.hidden
        click_or_not(graph, dense(graph, "click", data, inputs, 1, relu=False), self.loss)

    def _dense_branch(self, graph: GraphBuilder, index: int) -> ir.Value:
        data = graph.input(f"dense_{index}", self.features)
        inputs = self.features
        with graph.scope(f"dense.{index}"):
            for layer in range(self.dense_layers):
                data = dense(graph, f"layers.{layer}", data, inputs, self.hidden)
                inputs = self.hidden
        return data

    def _sparse_branch(self, graph: GraphBuilder, index: int) -> ir.Value:
        chosen = graph.input(f"sparse_{index}", self.bag, integer=True)
        data, _ = embedding(graph, f"tables.{index}", chosen, self.rows, self.width, init=normal(self.width**-0.5))
        with graph.scope(f"tables.{index}"):
            return graph.reshape(data, [0, self.bag * self.width])


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
