"""Wide residual networks of bottlenecks (He et al., 2016; Zagoruyko and Komodakis, 2016)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from autopipe.configs.zoo.builder import GraphBuilder
from autopipe.configs.zoo.layers import batch_norm, convolution, dense, max_pool
from autopipe.configs.zoo.losses import classify
from autopipe.configs.zoo.model import Count, Setting, ZooModel

if TYPE_CHECKING:
    import onnx_ir as ir

EXPANSION = 4
"""Channels that leave a bottleneck, by those that enter its first convolution's output."""


def _sizes(width: int, factor: int, stages: tuple[int, ...] = (3, 4, 6, 3)) -> dict[str, Setting]:
    return {"width": width, "factor": factor, "stages": stages, "image": 224, "classes": 1000}


@dataclass(frozen=True, slots=True, kw_only=True)
class WideResNet(ZooModel):
    """image [batch, 3, image, image] -> logits [batch, classes]."""

    presets: ClassVar[Mapping[str, Mapping[str, Setting]]] = {
        "resnet50": _sizes(64, 1),
        "resnet101": _sizes(64, 1, (3, 4, 23, 3)),
        # Sizes of the family that Alpa (OSDI 2022) and TePDist scale; named by their number of parameters.
        "250m": _sizes(160, 2),
        "500m": _sizes(224, 2),
        "1b": _sizes(320, 2),
        "2b": _sizes(448, 2),
        "4b": _sizes(640, 2),
        "6.8b": _sizes(320, 16),
        "13b": _sizes(320, 16, (3, 4, 23, 3)),
    }

    image: Count = 32
    """Height and width of the image."""

    width: Count = 8
    """Channels of the first convolution and of the first stage's bottlenecks; each stage doubles them."""

    factor: Count = 2
    """How much wider than its neighbours the 3x3 convolution of a bottleneck is."""

    stages: tuple[Count, ...] = (1, 1, 1, 1)
    """Bottlenecks of each stage; every stage but the first halves height and width."""

    classes: Count = 10
    """Extent of the logits."""

    def build(self, graph: GraphBuilder) -> None:
        """A 7x7 convolution and pooling, stages of bottlenecks, mean over the image, classifier."""
        data = graph.input("image", 3, self.image, self.image)
        with graph.scope("stem"):
            data = convolution(graph, "conv", data, 3, self.width, kernel=(7, 7), stride=2, padding=(3, 3), bias=False)
            data = max_pool(graph, graph.op("Relu", batch_norm(graph, "norm", data, self.width)), 3, 2, 1)
        channels = self.width
        for stage, depth in enumerate(self.stages):
            for index in range(depth):
                with graph.scope(f"stages.{stage}.{index}"):
                    stride = 2 if stage and not index else 1
                    data = self._bottleneck(graph, data, channels, self.width << stage, stride)
                channels = EXPANSION * (self.width << stage)
        data = graph.op("Flatten", graph.op("GlobalAveragePool", data), axis=1)
        classify(graph, dense(graph, "classifier", data, channels, self.classes, relu=False), self.loss)

    def _bottleneck(self, graph: GraphBuilder, data: ir.Value, inputs: int, width: int, stride: int) -> ir.Value:
        inner, outputs = self.factor * width, EXPANSION * width
        branch = graph.op("Relu", self._unit(graph, "1", data, inputs, width))
        branch = graph.op("Relu", self._unit(graph, "2", branch, width, inner, kernel=3, stride=stride))
        branch = self._unit(graph, "3", branch, inner, outputs)
        if stride != 1 or inputs != outputs:
            data = self._unit(graph, "shortcut", data, inputs, outputs, stride=stride)
        return graph.op("Relu", graph.op("Add", branch, data))

    def _unit(
        self,
        graph: GraphBuilder,
        name: str,
        data: ir.Value,
        inputs: int,
        outputs: int,
        *,
        kernel: int = 1,
        stride: int = 1,
    ) -> ir.Value:
        """Convolution without bias, then batch norm."""
        window, border = (kernel, kernel), (kernel // 2, kernel // 2)
        with graph.scope(name):
            data = convolution(
                graph, "conv", data, inputs, outputs, kernel=window, stride=stride, padding=border, bias=False
            )
            return batch_norm(graph, "norm", data, outputs)
