"""GraphPipe's multi-modal transformer: parallel branches of layers, concatenated at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from autopipe.configs.zoo.attention import SPREAD, Attention, pre_norm_block
from autopipe.configs.zoo.builder import GraphBuilder
from autopipe.configs.zoo.layers import layer_norm, linear
from autopipe.configs.zoo.losses import classify
from autopipe.configs.zoo.model import Count, Setting, ZooModel

if TYPE_CHECKING:
    import onnx_ir as ir

PAPER: Mapping[str, Setting] = {
    "sequence": 256,
    "embedding": 1024,
    "hidden": 1024,
    "heads": 16,
    "feed_forward": 4096,
    "classes": 1000,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiModalTransformer(ZooModel):
    """modality_0, modality_1, … [batch, sequence, embedding] -> logits [batch, classes]."""

    presets: ClassVar[Mapping[str, Mapping[str, Setting]]] = {
        # GraphPipe (ASPLOS 2025), appendix A.2; the number of classes is ours.
        "paper": {**PAPER, "branches": 4, "layers": 8},
        # The sequential transformer of its evaluation: as many layers in one branch.
        "sequential": {**PAPER, "branches": 1, "layers": 32},
    }
    multiples: ClassVar[tuple[tuple[str, str], ...]] = (("hidden", "heads"),)

    branches: Count = 4
    """Modalities, each with layers and an input of its own."""

    layers: Count = 2
    """Transformer layers of a branch."""

    sequence: Count = 16
    """Positions of a sample in every modality."""

    embedding: Count = 32
    """Width of the inputs."""

    hidden: Count = 64
    """Width of the residual stream."""

    heads: Count = 4
    """Attention heads of a layer."""

    feed_forward: Count = 256
    """Inner width of the feed-forward layers."""

    classes: Count = 10
    """Extent of the logits."""

    def build(self, graph: GraphBuilder) -> None:
        """Branches of a projection and layers; their concatenation, mean over positions, classifier."""
        joined = [self._branch(graph, index) for index in range(self.branches)]
        data = graph.op("Concat", *joined, axis=-1) if self.branches > 1 else joined[0]
        width = self.branches * self.hidden
        data = graph.op("ReduceMean", data, graph.constant([1]), keepdims=0)
        classify(graph, linear(graph, "classifier", data, width, self.classes, init=SPREAD), self.loss)

    def _branch(self, graph: GraphBuilder, index: int) -> ir.Value:
        data = graph.input(f"modality_{index}", self.sequence, self.embedding)
        sizes = Attention(self.hidden, self.heads)
        with graph.scope(f"branches.{index}"):
            data = linear(graph, "projection", data, self.embedding, self.hidden, init=SPREAD)
            for layer in range(self.layers):
                data = pre_norm_block(graph, f"layers.{layer}", sizes, self.feed_forward, data)
            return layer_norm(graph, "norm", data, self.hidden)
