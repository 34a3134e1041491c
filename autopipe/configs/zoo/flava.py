"""FLAVA: a text and an image encoder joined by a cross encoder (Singh et al., 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from autopipe.configs.zoo.attention import SPREAD, Attention, pre_norm_block
from autopipe.configs.zoo.builder import GraphBuilder
from autopipe.configs.zoo.layers import convolution, embedding, layer_norm, linear, positions
from autopipe.configs.zoo.losses import classify
from autopipe.configs.zoo.model import Count, Setting, ZooModel

if TYPE_CHECKING:
    import onnx_ir as ir

COMMON: Mapping[str, Setting] = {"vocabulary": 30522, "sequence": 128, "image": 224, "patch": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flava(ZooModel):
    """tokens [batch, sequence], image [batch, 3, image, image] -> logits [batch, 2]: do text and image match?"""

    presets: ClassVar[Mapping[str, Mapping[str, Setting]]] = {
        # The published model.
        "base": {**COMMON, "text_layers": 12, "image_layers": 12, "cross_layers": 6, "hidden": 768, "heads": 12},
        # Tessel (HPCA 2024), figure 15: 24 layers, which we give to each of the three encoders.
        "paper": {**COMMON, "text_layers": 24, "image_layers": 24, "cross_layers": 24, "hidden": 4096, "heads": 32},
    }
    multiples: ClassVar[tuple[tuple[str, str], ...]] = (("hidden", "heads"), ("image", "patch"))

    text_layers: Count = 2
    """Layers of the text encoder."""

    image_layers: Count = 2
    """Layers of the image encoder."""

    cross_layers: Count = 2
    """Layers of the cross encoder."""

    hidden: Count = 64
    """Width of all three; the feed-forward layers are four times as wide."""

    heads: Count = 4
    """Attention heads of a layer."""

    vocabulary: Count = 256
    """Rows of the token embedding."""

    sequence: Count = 16
    """Tokens of the text; the first stands for the pair in the cross encoder."""

    image: Count = 32
    """Height and width of the image."""

    patch: Count = 8
    """Height and width of a patch of the image."""

    @property
    def patches(self) -> int:
        """Patches of an image."""
        return (self.image // self.patch) ** 2

    def build(self, graph: GraphBuilder) -> None:
        """Text branch, image branch, cross encoder over both, classifier on the first position."""
        text, picture = self._text(graph), self._picture(graph)
        with graph.scope("cross"):
            text = linear(graph, "text_projection", text, self.hidden, self.hidden, init=SPREAD)
            picture = linear(graph, "image_projection", picture, self.hidden, self.hidden, init=SPREAD)
            data = self._encoded(graph, graph.op("Concat", text, picture, axis=1), self.cross_layers)
            first = graph.op("Gather", data, graph.constant(0), axis=1)
        classify(graph, linear(graph, "classifier", first, self.hidden, 2, init=SPREAD), self.loss)

    def _text(self, graph: GraphBuilder) -> ir.Value:
        tokens = graph.input("tokens", self.sequence, integer=True)
        with graph.scope("text"):
            data, _ = embedding(graph, "token_embedding", tokens, self.vocabulary, self.hidden, init=SPREAD)
            return self._encoded(graph, self._placed(graph, data, self.sequence), self.text_layers)

    def _picture(self, graph: GraphBuilder) -> ir.Value:
        image = graph.input("image", 3, self.image, self.image)
        window = (self.patch, self.patch)
        with graph.scope("image"):
            data = convolution(graph, "patches", image, 3, self.hidden, kernel=window, stride=self.patch)
            data = graph.op("Transpose", graph.reshape(data, [0, self.hidden, self.patches]), perm=[0, 2, 1])
            return self._encoded(graph, self._placed(graph, data, self.patches), self.image_layers)

    def _placed(self, graph: GraphBuilder, data: ir.Value, length: int) -> ir.Value:
        """`data` [batch, length, hidden] plus a learned vector for each position."""
        order = positions(graph, length)
        places, _ = embedding(graph, "position_embedding", order, length, self.hidden, init=SPREAD)
        return graph.op("Add", data, places)

    def _encoded(self, graph: GraphBuilder, data: ir.Value, layers: int) -> ir.Value:
        sizes = Attention(self.hidden, self.heads)
        for index in range(layers):
            data = pre_norm_block(graph, f"layers.{index}", sizes, 4 * self.hidden, data)
        return layer_norm(graph, "norm", data, self.hidden)
