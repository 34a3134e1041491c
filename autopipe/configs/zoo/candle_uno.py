"""CANDLE-Uno in GraphPipe's sizes: a drug's effect from several groups of features (Xia et al., 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from autopipe.configs.zoo.builder import GraphBuilder
from autopipe.configs.zoo.layers import dense
from autopipe.configs.zoo.losses import regress
from autopipe.configs.zoo.model import Count, Setting, ZooModel

if TYPE_CHECKING:
    import onnx_ir as ir

PAPER: Mapping[str, Setting] = {"layers": 4, "features": 4096, "hidden": 4096, "top_layers": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class CandleUno(ZooModel):
    """features_0, features_1, … [batch, features] -> prediction [batch, 1]; its loss is the mean squared error."""

    presets: ClassVar[Mapping[str, Mapping[str, Setting]]] = {
        # GraphPipe (ASPLOS 2025), appendix A.2; it leaves open the number of layers after the branches.
        "paper": {**PAPER, "branches": 7},
        # The widest of its comparison by number of branches.
        "16-branches": {**PAPER, "branches": 16},
    }

    branches: Count = 7
    """Groups of features, each with layers of its own."""

    layers: Count = 2
    """Linear layers of a branch."""

    features: Count = 16
    """Features of a group."""

    hidden: Count = 32
    """Width of the linear layers."""

    top_layers: Count = 2
    """Linear layers after the branches are joined, not counting the one that gives the prediction."""

    def build(self, graph: GraphBuilder) -> None:
        """Branches, concatenated, linear layers, one number."""
        joined = [self._branch(graph, index) for index in range(self.branches)]
        data = graph.op("Concat", *joined, axis=1)
        inputs = self.branches * self.hidden
        for index in range(self.top_layers):
            data = dense(graph, f"top.{index}", data, inputs, self.hidden)
            inputs = self.hidden
        regress(graph, dense(graph, "effect", data, inputs, 1, relu=False), self.loss, 1)

    def _branch(self, graph: GraphBuilder, index: int) -> ir.Value:
        data = graph.input(f"features_{index}", self.features)
        inputs = self.features
        with graph.scope(f"branches.{index}"):
            for layer in range(self.layers):
                data = dense(graph, f"layers.{layer}", data, inputs, self.hidden)
                inputs = self.hidden
        return data
