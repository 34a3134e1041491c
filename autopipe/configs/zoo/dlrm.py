"""A recommendation model in GraphPipe's sizes: dense branches and embedding bags, joined (Naumov et al., 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from autopipe.configs.zoo.builder import GraphBuilder, normal
from autopipe.configs.zoo.layers import dense, embedding
from autopipe.configs.zoo.losses import click_or_not
from autopipe.configs.zoo.model import Count, Setting, ZooModel

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
