"""U-Net: segmentation by a contracting and an expanding path (Ronneberger et al., 2015), with padded borders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from autopipe.configs.zoo.builder import ZEROS, GraphBuilder, kaiming
from autopipe.configs.zoo.layers import convolution, max_pool
from autopipe.configs.zoo.losses import classify
from autopipe.configs.zoo.model import Count, Setting, ZooModel

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True, slots=True, kw_only=True)
class UNet(ZooModel):
    """image [batch, channels, image, image] -> logits [batch, classes, image, image]."""

    presets: ClassVar[Mapping[str, Mapping[str, Setting]]] = {
        # Figure 1 of the paper; 512 instead of its 572 because borders are padded.
        "paper": {"image": 512, "channels": 1, "width": 64, "depth": 4, "classes": 2},
    }
    multiples: ClassVar[tuple[tuple[str, str], ...]] = (("image", "stride"),)

    image: Count = 32
    """Height and width of the image, a multiple of 2^depth."""

    channels: Count = 3
    """Channels of the image."""

    width: Count = 8
    """Channels of the first level; each level below has twice as many."""

    depth: Count = 2
    """How often height and width are halved."""

    classes: Count = 4
    """Classes of a pixel."""

    @property
    def stride(self) -> int:
        """By how much the lowest level is smaller than the image."""
        return 1 << self.depth

    def build(self, graph: GraphBuilder) -> None:
        """Down with a pair of convolutions a level, up again with each level's skip connection."""
        data = graph.input("image", self.channels, self.image, self.image)
        skipped: list[ir.Value] = []
        inputs = self.channels
        for level in range(self.depth):
            data = self._pair(graph, f"down.{level}", data, inputs, self.width << level)
            inputs = self.width << level
            skipped.append(data)
            data = max_pool(graph, data, 2, 2)
        data = self._pair(graph, "bottom", data, inputs, self.width << self.depth)
        for level in reversed(range(self.depth)):
            outputs = self.width << level
            data = self._enlarged(graph, f"up.{level}", data, outputs)
            data = graph.op("Concat", skipped[level], data, axis=1)
            data = self._pair(graph, f"up.{level}", data, 2 * outputs, outputs)
        classify(
            graph,
            convolution(graph, "head", data, self.width, self.classes, kernel=(1, 1)),
            self.loss,
            self.image,
            self.image,
        )

    def _pair(self, graph: GraphBuilder, name: str, data: ir.Value, inputs: int, outputs: int) -> ir.Value:
        with graph.scope(name):
            for index, channels in enumerate((inputs, outputs)):
                data = convolution(graph, f"{index}", data, channels, outputs, kernel=(3, 3), padding=(1, 1))
                data = graph.op("Relu", data)
        return data

    def _enlarged(self, graph: GraphBuilder, name: str, data: ir.Value, outputs: int) -> ir.Value:
        """Twice the height and width at half the channels."""
        with graph.scope(name), graph.scope("transposed"):
            weight = graph.parameter("weight", 2 * outputs, outputs, 2, 2, init=kaiming(2 * outputs))
            bias = graph.parameter("bias", outputs, init=ZEROS)
            return graph.op("ConvTranspose", data, weight, bias, kernel_shape=[2, 2], strides=[2, 2])
