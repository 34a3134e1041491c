"""Inception-v3 without its auxiliary head (Szegedy et al., 2016)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from autopipe.configs.schema import AtLeast
from autopipe.configs.zoo.builder import GraphBuilder
from autopipe.configs.zoo.layers import batch_norm, convolution, dense, max_pool
from autopipe.configs.zoo.losses import classify
from autopipe.configs.zoo.model import Count, Setting, ZooModel

if TYPE_CHECKING:
    import onnx_ir as ir

Unit = tuple[int, tuple[int, int]]
"""Channels (at full width) and kernel of a convolution that keeps height and width."""

FULL_WIDTH = 32
"""Channels of the first convolution in the paper, to which all others are in proportion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InceptionV3(ZooModel):
    """image [batch, 3, image, image] -> logits [batch, classes]."""

    presets: ClassVar[Mapping[str, Mapping[str, Setting]]] = {
        # PaSE (IPDPS 2021), which uses batches of 128.
        "paper": {"image": 299, "width": 32, "classes": 1000},
    }

    image: Annotated[int, AtLeast(75)] = 75
    """Height and width of the image."""

    width: Count = 4
    """Channels of the first convolution; all others are in the paper's proportion to its 32."""

    classes: Count = 10
    """Extent of the logits."""

    def build(self, graph: GraphBuilder) -> None:
        """Stem, modules named A to E as in the paper's figures 5 to 7 and 10, mean over the image, classifier."""
        network = _Network(graph, self.width)
        data = network.stem(graph.input("image", 3, self.image, self.image))
        for index, pool in enumerate((32, 64, 64)):
            data = network.module_a(f"mixed_a.{index}", data, pool)
        data = network.module_b("mixed_b", data)
        for index, inner in enumerate((128, 160, 160, 192)):
            data = network.module_c(f"mixed_c.{index}", data, inner)
        data = network.module_d("mixed_d", data)
        for index in range(2):
            data = network.module_e(f"mixed_e.{index}", data)
        data = graph.op("Flatten", graph.op("GlobalAveragePool", data), axis=1)
        classify(graph, dense(graph, "classifier", data, network.channels, self.classes, relu=False), self.loss)


class _Network:
    """Adds modules to `graph`, remembering the `channels` that the last one left."""

    def __init__(self, graph: GraphBuilder, width: int) -> None:
        self.graph = graph
        self.width = width
        self.channels = 3

    def stem(self, image: ir.Value) -> ir.Value:
        """The layers before the first module, which divide height and width by eight."""
        graph = self.graph
        with graph.scope("stem"):
            data, channels = self._unit("0", image, 3, 32, stride=2)
            data, channels = self._unit("1", data, channels, 32)
            data, channels = self._unit("2", data, channels, 64, padding=(1, 1))
            data, channels = self._unit("3", max_pool(graph, data, 3, 2), channels, 80, kernel=(1, 1))
            data, self.channels = self._unit("4", data, channels, 192)
            return max_pool(graph, data, 3, 2)

    def module_a(self, name: str, data: ir.Value, pool: int) -> ir.Value:
        """1x1, 5x5, two 3x3, and pooling."""
        with self.graph.scope(name):
            return self._joined(
                self._chain("one", data, (64, (1, 1))),
                self._chain("five", data, (48, (1, 1)), (64, (5, 5))),
                self._chain("three", data, (64, (1, 1)), (96, (3, 3)), (96, (3, 3))),
                self._chain("pool", self._averaged(data), (pool, (1, 1))),
            )

    def module_b(self, name: str, data: ir.Value) -> ir.Value:
        """Halves height and width by 3x3, two 3x3, and pooling."""
        with self.graph.scope(name):
            return self._joined(
                self._unit("three", data, self.channels, 384, stride=2),
                self._reduced("double", self._chain("double", data, (64, (1, 1)), (96, (3, 3))), 96),
                (max_pool(self.graph, data, 3, 2), self.channels),
            )

    def module_c(self, name: str, data: ir.Value, inner: int) -> ir.Value:
        """1x1, one and two factorised 7x7, and pooling."""
        row, column = (1, 7), (7, 1)
        with self.graph.scope(name):
            return self._joined(
                self._chain("one", data, (192, (1, 1))),
                self._chain("seven", data, (inner, (1, 1)), (inner, row), (192, column)),
                self._chain(
                    "double", data, (inner, (1, 1)), (inner, column), (inner, row), (inner, column), (192, row)
                ),
                self._chain("pool", self._averaged(data), (192, (1, 1))),
            )

    def module_d(self, name: str, data: ir.Value) -> ir.Value:
        """Halves height and width by 3x3, factorised 7x7 and 3x3, and pooling."""
        with self.graph.scope(name):
            return self._joined(
                self._reduced("three", self._chain("three", data, (192, (1, 1))), 320),
                self._reduced("seven", self._chain("seven", data, (192, (1, 1)), (192, (1, 7)), (192, (7, 1))), 192),
                (max_pool(self.graph, data, 3, 2), self.channels),
            )

    def module_e(self, name: str, data: ir.Value) -> ir.Value:
        """1x1, branches that fan out into 1x3 and 3x1, and pooling."""
        with self.graph.scope(name):
            three, three_channels = self._chain("three", data, (384, (1, 1)))
            double, double_channels = self._chain("double", data, (448, (1, 1)), (384, (3, 3)))
            return self._joined(
                self._chain("one", data, (320, (1, 1))),
                self._fan("three", three, three_channels),
                self._fan("double", double, double_channels),
                self._chain("pool", self._averaged(data), (192, (1, 1))),
            )

    def _chain(self, name: str, data: ir.Value, *units: Unit) -> tuple[ir.Value, int]:
        """Convolutions one after the other that keep height and width."""
        channels = self.channels
        for index, (full, kernel) in enumerate(units):
            padding = (kernel[0] // 2, kernel[1] // 2)
            data, channels = self._unit(f"{name}.{index}", data, channels, full, kernel=kernel, padding=padding)
        return data, channels

    def _reduced(self, name: str, branch: tuple[ir.Value, int], full: int) -> tuple[ir.Value, int]:
        """A 3x3 convolution of stride 2 at the end of a branch."""
        return self._unit(f"{name}.reduce", *branch, full, stride=2)

    def _fan(self, name: str, data: ir.Value, channels: int) -> tuple[ir.Value, int]:
        """1x3 and 3x1 side by side."""
        row, row_channels = self._unit(f"{name}.row", data, channels, 384, kernel=(1, 3), padding=(0, 1))
        column, column_channels = self._unit(f"{name}.column", data, channels, 384, kernel=(3, 1), padding=(1, 0))
        return self._put_together((row, row_channels), (column, column_channels))

    def _unit(
        self,
        name: str,
        data: ir.Value,
        channels: int,
        full: int,
        *,
        kernel: tuple[int, int] = (3, 3),
        stride: int = 1,
        padding: tuple[int, int] = (0, 0),
    ) -> tuple[ir.Value, int]:
        """Convolution to `full` channels (scaled by the width) without bias, batch norm, Relu."""
        outputs = max(1, full * self.width // FULL_WIDTH)
        with self.graph.scope(name):
            data = convolution(
                self.graph,
                "conv",
                data,
                channels,
                outputs,
                kernel=kernel,
                stride=stride,
                padding=padding,
                bias=False,
            )
            data = batch_norm(self.graph, "norm", data, outputs, 1e-3)
            return self.graph.op("Relu", data), outputs

    def _averaged(self, data: ir.Value) -> ir.Value:
        """Mean over 3x3 windows, the border counted as zeros."""
        return self.graph.op(
            "AveragePool", data, kernel_shape=[3, 3], strides=[1, 1], pads=[1, 1, 1, 1], count_include_pad=1
        )

    def _joined(self, *branches: tuple[ir.Value, int]) -> ir.Value:
        """The end of a module: its branches' channels one after the other."""
        data, self.channels = self._put_together(*branches)
        return data

    def _put_together(self, *branches: tuple[ir.Value, int]) -> tuple[ir.Value, int]:
        """The branches' channels one after the other."""
        return self.graph.op("Concat", *(data for data, _ in branches), axis=1), sum(count for _, count in branches)
