"""AlexNet as PaSE takes it: one tower, without response normalisation (Krizhevsky et al., 2012)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from autopipe.configs.schema import AtLeast
from autopipe.configs.zoo.builder import GraphBuilder
from autopipe.configs.zoo.layers import convolution, dense, max_pool, pooled
from autopipe.configs.zoo.losses import classify
from autopipe.configs.zoo.model import Count, Setting, ZooModel

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True, slots=True, kw_only=True)
class AlexNet(ZooModel):
    """image [batch, 3, image, image] -> logits [batch, classes]."""

    presets: ClassVar[Mapping[str, Mapping[str, Setting]]] = {
        # PaSE (IPDPS 2021), which uses batches of 128.
        "paper": {"image": 227, "width": 96, "hidden": 4096, "classes": 1024},
    }

    image: Annotated[int, AtLeast(67)] = 67
    """Height and width of the image."""

    width: Annotated[int, AtLeast(3)] = 12
    """Channels of the first convolution; the others have 8/3, 4, 4 and 8/3 times as many."""

    hidden: Count = 64
    """Width of the two inner linear layers."""

    classes: Count = 10
    """Extent of the logits."""

    def build(self, graph: GraphBuilder) -> None:
        """Five convolutions, three of them pooled, and three linear layers."""
        wide, widest = 8 * self.width // 3, 4 * self.width
        data = graph.input("image", 3, self.image, self.image)
        data = self._convolved(graph, "conv1", data, 3, self.width, kernel=11, stride=4, padding=0)
        data = max_pool(graph, data, 3, 2)
        data = self._convolved(graph, "conv2", data, self.width, wide, kernel=5, padding=2)
        data = max_pool(graph, data, 3, 2)
        data = self._convolved(graph, "conv3", data, wide, widest)
        data = self._convolved(graph, "conv4", data, widest, widest)
        data = self._convolved(graph, "conv5", data, widest, wide)
        data = graph.op("Flatten", max_pool(graph, data, 3, 2), axis=1)
        extent = pooled(self.image, 11, 4)
        for _ in range(3):
            extent = pooled(extent, 3, 2)
        data = dense(graph, "fc6", data, wide * extent * extent, self.hidden)
        data = dense(graph, "fc7", data, self.hidden, self.hidden)
        classify(graph, dense(graph, "fc8", data, self.hidden, self.classes, relu=False), self.loss)

    def _convolved(
        self,
        graph: GraphBuilder,
        name: str,
        data: ir.Value,
        inputs: int,
        outputs: int,
        *,
        kernel: int = 3,
        stride: int = 1,
        padding: int = 1,
    ) -> ir.Value:
        window, border = (kernel, kernel), (padding, padding)
        result = convolution(graph, name, data, inputs, outputs, kernel=window, stride=stride, padding=border)
        return graph.op("Relu", result)
