"""The model of GraphPipe's case study: two branches of attention and linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from autopipe.configs.zoo.attention import Attention, attention
from autopipe.configs.zoo.builder import GraphBuilder, kaiming, lecun
from autopipe.configs.zoo.layers import linear
from autopipe.configs.zoo.losses import classify
from autopipe.configs.zoo.model import Count, Setting, ZooModel

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoBranch(ZooModel):
    """input_0, input_1, … [batch, sequence, hidden] -> logits [batch, classes]."""

    presets: ClassVar[Mapping[str, Mapping[str, Setting]]] = {
        # GraphPipe (ASPLOS 2025), section 7: 2 branches of 4 repeats; widths as in its multi-modal transformer.
        "paper": {
            "branches": 2,
            "repeats": 4,
            "sequence": 256,
            "hidden": 1024,
            "heads": 16,
            "feed_forward": 4096,
            "classes": 1000,
        },
    }
    multiples: ClassVar[tuple[tuple[str, str], ...]] = (("hidden", "heads"),)

    branches: Count = 2
    """Parallel branches."""

    repeats: Count = 4
    """Times that attention, linear, linear stand in a branch."""

    sequence: Count = 16
    """Positions of a sample."""

    hidden: Count = 64
    """Width of inputs and attention."""

    heads: Count = 4
    """Attention heads."""

    feed_forward: Count = 128
    """Width between the two linear layers."""

    classes: Count = 10
    """Extent of the logits."""

    def build(self, graph: GraphBuilder) -> None:
        """Branches without residuals, their concatenation, mean over positions, classifier."""
        joined = [self._branch(graph, index) for index in range(self.branches)]
        data = graph.op("Concat", *joined, axis=-1)
        data = graph.op("ReduceMean", data, graph.constant([1]), keepdims=0)
        width = self.branches * self.hidden
        classify(graph, linear(graph, "classifier", data, width, self.classes, init=lecun(width)), self.loss)

    def _branch(self, graph: GraphBuilder, index: int) -> ir.Value:
        data = graph.input(f"input_{index}", self.sequence, self.hidden)
        sizes = Attention(self.hidden, self.heads, init=lecun(self.hidden))
        with graph.scope(f"branches.{index}"):
            for repeat in range(self.repeats):
                with graph.scope(f"blocks.{repeat}"):
                    data = attention(graph, "attention", sizes, data)
                    init = kaiming(self.hidden)
                    data = graph.op("Relu", linear(graph, "up", data, self.hidden, self.feed_forward, init=init))
                    init = lecun(self.feed_forward)
                    data = linear(graph, "down", data, self.feed_forward, self.hidden, init=init)
        return data
