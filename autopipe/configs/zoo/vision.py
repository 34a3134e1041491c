"""Convolutional networks: Inception-v3, VGG-19, AlexNet, U-Net and wide residual networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from autopipe.configs.zoo import Count, Settings, ZooModel
from autopipe.configs.zoo.builder import ZEROS, Extent, GraphBuilder, kaiming
from autopipe.ir.codec import AtLeast

if TYPE_CHECKING:
    import onnx_ir as ir


def conv_norm(
    graph: GraphBuilder,
    name: str,
    data: ir.Value,
    inputs: int,
    outputs: int,
    epsilon: float = 1e-5,
    **window: Extent,
) -> ir.Value:
    """Apply a convolution without bias, with `window` (kernel, stride, padding), and batch norm."""
    with graph.scope(name):
        data = graph.convolution("conv", data, inputs, outputs, False, **window)
        return graph.batch_norm("norm", data, outputs, epsilon)


Branch = tuple["ir.Value", int]
"""(value, number of its channels)."""
PAPER_WIDTH = 32
"""Number of channels of the first convolution in the paper. All other channel counts are in
proportion to it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class InceptionV3(ZooModel):
    """Inception-v3 without its auxiliary head (Szegedy et al., 2016). image [batch, 3, image,
    image] -> logits [batch, classes].
    """

    presets: ClassVar[Mapping[str, Settings]] = {
        # Sizes of PaSE (IPDPS 2021), which uses batches of 128 samples.
        "paper": {"image": 299, "width": 32, "classes": 1000},
    }
    image: Annotated[int, AtLeast(75)] = 75
    """Height and width of the image."""
    width: Count = 4
    """Channels of the first convolution; all others are in the paper's proportion to its 32."""
    classes: Count = 10
    """Number of classes: the size of the last axis of the logits."""

    def build(self, graph: GraphBuilder) -> None:
        """Stem, modules named A to E as in the paper's figures 5 to 7 and 10, mean over the image,
        classifier.
        """
        network = _InceptionBuilder(graph, self.width)
        data = network.stem(graph.input("image", 3, self.image, self.image))
        for index, pool in enumerate((32, 64, 64)):
            branches = (
                "one 64:1x1",
                "five 48:1x1 64:5x5",
                "three 64:1x1 96:3x3 96:3x3",
                f"pool {pool}:1x1",
            )
            data = network.module(f"mixed_a.{index}", data, *branches)
        data = network.module("mixed_b", data, "three 384/2", "double 64:1x1 96:3x3 96/2", "max")
        for index, inner in enumerate((128, 160, 160, 192)):
            seven = f"seven {inner}:1x1 {inner}:1x7 192:7x1"
            double = f"double {inner}:1x1 {inner}:7x1 {inner}:1x7 {inner}:7x1 192:1x7"
            data = network.module(
                f"mixed_c.{index}", data, "one 192:1x1", seven, double, "pool 192:1x1"
            )
        data = network.module(
            "mixed_d", data, "three 192:1x1 320/2", "seven 192:1x1 192:1x7 192:7x1 192/2", "max"
        )
        for index in range(2):
            data = network.module_e(f"mixed_e.{index}", data)
        data = graph.op("Flatten", graph.op("GlobalAveragePool", data), axis=1)
        graph.classify(graph.dense("classifier", data, network.channels, self.classes, relu=False))


class _InceptionBuilder:
    """Adds modules to `graph`. `channels` is the number of channels of the last module's output."""

    def __init__(self, graph: GraphBuilder, width: int) -> None:
        self.graph = graph
        self.width = width
        self.channels = 3

    def stem(self, image: ir.Value) -> ir.Value:
        """Return the image after the layers before the first module, which divide height and width
        by about eight.
        """
        with self.graph.scope("stem"):
            branch = self._conv_unit("0", (image, 3), 32, stride=2)
            data, channels = self._conv_unit("2", self._conv_unit("1", branch, 32), 64, padding=1)
            branch = self._conv_unit("3", (self.graph.max_pool(data, 3, 2), channels), 80, kernel=1)
            data, self.channels = self._conv_unit("4", branch, 192)
            return self.graph.max_pool(data, 3, 2)

    def module(self, name: str, data: ir.Value, *branches: str) -> ir.Value:
        """Return the outputs of several branches of a module, concatenated along the channels. A
        branch is a text such as `double 448:1x1 384:3x3`, in the notation of `_branch`.
        """
        with self.graph.scope(name):
            data, self.channels = self._concatenate(
                *(self._branch(branch, data) for branch in branches)
            )
        return data

    def module_e(self, name: str, data: ir.Value) -> ir.Value:
        """Add module E: a 1x1 branch, two branches that each fork into parallel 1x3 and 3x1
        convolutions, and a pooling branch.
        """
        with self.graph.scope(name):
            inner = [
                self._branch(each, data) for each in ("three 384:1x1", "double 448:1x1 384:3x3")
            ]
            branches = [self._branch("one 320:1x1", data)]
            for fan, wide in zip(("three", "double"), inner, strict=True):
                row = self._conv_unit(f"{fan}.row", wide, 384, kernel=(1, 3), padding=(0, 1))
                column = self._conv_unit(f"{fan}.column", wide, 384, kernel=(3, 1), padding=(1, 0))
                branches.append(self._concatenate(row, column))
            data, self.channels = self._concatenate(*branches, self._branch("pool 192:1x1", data))
        return data

    def _branch(self, text: str, data: ir.Value) -> Branch:
        """Return the output of a branch. `text` is the branch's name, followed by its convolutions.

        `64:1x7` is a convolution to 64 channels (at full width) with kernel 1 x 7, which keeps
        height and width. `96/2` is a 3 x 3 convolution to 96 channels with stride 2. A branch
        `pool` starts with average pooling over 3 x 3 windows, with zeros beyond the border. A
        branch `max` is max pooling with stride 2.
        """
        name, *units = text.split()
        if name == "max":
            return self.graph.max_pool(data, 3, 2), self.channels
        if name == "pool":
            window = {"kernel_shape": [3, 3], "strides": [1, 1], "pads": [1, 1, 1, 1]}
            data = self.graph.op("AveragePool", data, **window, count_include_pad=1)
        branch = data, self.channels
        for index, unit in enumerate(units):
            full, colon, size = unit.partition(":")
            if colon:
                height, width = map(int, size.split("x"))
                padding = height // 2, width // 2
                branch = self._conv_unit(
                    f"{name}.{index}", branch, int(full), kernel=(height, width), padding=padding
                )
            else:
                end = f"{name}.reduce" if index else name
                branch = self._conv_unit(end, branch, int(unit.removesuffix("/2")), stride=2)
        return branch

    def _conv_unit(
        self, name: str, branch: Branch, full: int, kernel: Extent = 3, **window: Extent
    ) -> Branch:
        """Apply a convolution without bias to `full` channels (scaled by the width), batch norm,
        and Relu.
        """
        (data, channels) = branch
        outputs = max(1, full * self.width // PAPER_WIDTH)
        data = conv_norm(self.graph, name, data, channels, outputs, 1e-3, kernel=kernel, **window)
        with self.graph.scope(name):
            return self.graph.op("Relu", data), outputs

    def _concatenate(self, *branches: Branch) -> Branch:
        return self.graph.op("Concat", *(data for data, _ in branches), axis=1), sum(
            count for _, count in branches
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Vgg19(ZooModel):
    """VGG-19 with any number of classes (Simonyan and Zisserman, 2015). image [batch, 3, image,
    image] -> logits [batch, classes].
    """

    presets: ClassVar[Mapping[str, Settings]] = {
        # Sizes of configuration E of the VGG paper (Simonyan and Zisserman, 2015).
        "imagenet": {"image": 224, "width": 64, "hidden": 4096, "classes": 1000},
        # TePDist extends the classifier of VGG-19 to a million classes.
        "million": {"image": 224, "width": 64, "hidden": 4096, "classes": 1_000_000},
    }
    image: Annotated[int, AtLeast(32)] = 32
    """Height and width of the image."""
    width: Count = 8
    """Channels of the first convolutions; they double three times."""
    hidden: Count = 64
    """Width of the two inner linear layers."""
    classes: Count = 10
    """Number of classes: the size of the last axis of the logits."""

    def build(self, graph: GraphBuilder) -> None:
        data = graph.input("image", 3, self.image, self.image)
        channels = 3
        for group, (depth, factor) in enumerate(((2, 1), (2, 2), (4, 4), (4, 8), (4, 8))):
            for index in range(depth):
                inputs = channels
                channels = factor * self.width
                data = graph.convolution(
                    f"features.{group}.{index}", data, inputs, channels, kernel=3, padding=1
                )
                data = graph.op("Relu", data)
            data = graph.max_pool(data, 2, 2)
        features = channels * (self.image // 32) ** 2
        data = graph.dense("classifier.0", graph.op("Flatten", data, axis=1), features, self.hidden)
        data = graph.dense("classifier.1", data, self.hidden, self.hidden)
        graph.classify(graph.dense("classifier.2", data, self.hidden, self.classes, relu=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class AlexNet(ZooModel):
    """AlexNet in the variant of the PaSE paper: one tower, without response normalisation
    (Krizhevsky et al., 2012). image [batch, 3, image, image] -> logits [batch, classes].
    """

    presets: ClassVar[Mapping[str, Settings]] = {
        # Sizes of PaSE (IPDPS 2021), which uses batches of 128 samples.
        "paper": {"image": 227, "width": 96, "hidden": 4096, "classes": 1024},
    }
    image: Annotated[int, AtLeast(67)] = 67
    """Height and width of the image."""
    width: Annotated[int, AtLeast(3)] = 12
    """Channels of the first convolution; the others have 8/3, 4, 4 and 8/3 times as many."""
    hidden: Count = 64
    """Width of the two inner linear layers."""
    classes: Count = 10
    """Number of classes: the size of the last axis of the logits."""

    def build(self, graph: GraphBuilder) -> None:
        wide = 8 * self.width // 3
        widest = 4 * self.width
        data = graph.input("image", 3, self.image, self.image)
        # Channels, kernel, stride and padding of each convolution. Max pooling follows the first
        # two convolutions and the last.
        rows = (
            (self.width, 11, 4, 0),
            (wide, 5, 1, 2),
            (widest, 3, 1, 1),
            (widest, 3, 1, 1),
            (wide, 3, 1, 1),
        )
        channels = 3
        for number, (outputs, kernel, stride, padding) in enumerate(rows, 1):
            data = graph.convolution(
                f"conv{number}",
                data,
                channels,
                outputs,
                kernel=kernel,
                stride=stride,
                padding=padding,
            )
            data = graph.op("Relu", data)
            channels = outputs
            if number < 3:
                data = graph.max_pool(data, 3, 2)
        data = graph.op("Flatten", graph.max_pool(data, 3, 2), axis=1)
        extent = (self.image - 11) // 4 + 1
        for _ in range(3):
            extent = (extent - 3) // 2 + 1
        data = graph.dense("fc6", data, wide * extent * extent, self.hidden)
        data = graph.dense("fc7", data, self.hidden, self.hidden)
        graph.classify(graph.dense("fc8", data, self.hidden, self.classes, relu=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class UNet(ZooModel):
    """U-Net: a contracting and an expanding path (Ronneberger et al., 2015), with padded borders.
    image [batch, channels, image, image] -> logits [batch, classes, image, image].
    """

    presets: ClassVar[Mapping[str, Settings]] = {
        # The sizes are those of figure 1 of the U-Net paper, but the image has 512 pixels instead
        # of 572. In the paper, the convolutions do not pad the image.
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
    """Number of times that height and width are halved."""
    classes: Count = 4
    """Classes of a pixel."""

    @property
    def stride(self) -> int:
        """Ratio of the image size to the size of the lowest level."""
        return 1 << self.depth

    def build(self, graph: GraphBuilder) -> None:
        data = graph.input("image", self.channels, self.image, self.image)
        skipped: list[ir.Value] = []
        inputs = self.channels
        for level in range(self.depth):
            data = self._convolution_pair(graph, f"down.{level}", data, inputs, self.width << level)
            inputs = self.width << level
            skipped.append(data)
            data = graph.max_pool(data, 2, 2)
        data = self._convolution_pair(graph, "bottom", data, inputs, self.width << self.depth)
        for level in reversed(range(self.depth)):
            outputs = self.width << level
            # The up-convolution doubles height and width and halves the channels.
            with graph.scope(f"up.{level}"), graph.scope("transposed"):
                weight = graph.parameter(
                    "weight", 2 * outputs, outputs, 2, 2, init=kaiming(2 * outputs)
                )
                bias = graph.parameter("bias", outputs, init=ZEROS)
                data = graph.op(
                    "ConvTranspose", data, weight, bias, kernel_shape=[2, 2], strides=[2, 2]
                )
            data = graph.op("Concat", skipped[level], data, axis=1)
            data = self._convolution_pair(graph, f"up.{level}", data, 2 * outputs, outputs)
        logits = graph.convolution("head", data, self.width, self.classes, kernel=1)
        graph.classify(logits, self.image, self.image)

    def _convolution_pair(
        self, graph: GraphBuilder, name: str, data: ir.Value, inputs: int, outputs: int
    ) -> ir.Value:
        with graph.scope(name):
            for index, channels in enumerate((inputs, outputs)):
                data = graph.convolution(f"{index}", data, channels, outputs, kernel=3, padding=1)
                data = graph.op("Relu", data)
        return data


BOTTLENECK_EXPANSION = 4
"""Ratio of a bottleneck's output channels to the output channels of its first convolution."""


def _wide_resnet_preset(
    width: int, factor: int, stages: tuple[int, ...] = (3, 4, 6, 3)
) -> Settings:
    return {"width": width, "factor": factor, "stages": stages, "image": 224, "classes": 1000}


@dataclass(frozen=True, slots=True, kw_only=True)
class WideResNet(ZooModel):
    """Residual networks of wide bottlenecks (He et al., 2016; Zagoruyko and Komodakis, 2016). image
    [batch, 3, image, image] -> logits [batch, classes].
    """

    presets: ClassVar[Mapping[str, Settings]] = {
        "resnet50": _wide_resnet_preset(64, 1),
        "resnet101": _wide_resnet_preset(64, 1, (3, 4, 23, 3)),
        # Models of Alpa (OSDI 2022) and TePDist. The name of a preset is its number of parameters.
        "250m": _wide_resnet_preset(160, 2),
        "500m": _wide_resnet_preset(224, 2),
        "1b": _wide_resnet_preset(320, 2),
        "2b": _wide_resnet_preset(448, 2),
        "4b": _wide_resnet_preset(640, 2),
        "6.8b": _wide_resnet_preset(320, 16),
        "13b": _wide_resnet_preset(320, 16, (3, 4, 23, 3)),
    }
    image: Count = 32
    """Height and width of the image."""
    width: Count = 8
    """Channels of the first convolution and of the first stage's bottlenecks; each stage doubles
    them.
    """
    factor: Count = 2
    """How much wider than its neighbours the 3x3 convolution of a bottleneck is."""
    stages: tuple[Count, ...] = (1, 1, 1, 1)
    """Bottlenecks of each stage; every stage but the first halves height and width."""
    classes: Count = 10
    """Number of classes: the size of the last axis of the logits."""

    def build(self, graph: GraphBuilder) -> None:
        data = graph.input("image", 3, self.image, self.image)
        with graph.scope("stem"):
            data = graph.convolution(
                "conv", data, 3, self.width, kernel=7, stride=2, padding=3, bias=False
            )
            data = graph.max_pool(
                graph.op("Relu", graph.batch_norm("norm", data, self.width)), 3, 2, 1
            )
        channels = self.width
        for stage, depth in enumerate(self.stages):
            for index in range(depth):
                with graph.scope(f"stages.{stage}.{index}"):
                    stride = 2 if stage and not index else 1
                    data = self._bottleneck(graph, data, channels, self.width << stage, stride)
                channels = BOTTLENECK_EXPANSION * (self.width << stage)
        data = graph.op("Flatten", graph.op("GlobalAveragePool", data), axis=1)
        graph.classify(graph.dense("classifier", data, channels, self.classes, relu=False))

    def _bottleneck(
        self, graph: GraphBuilder, data: ir.Value, inputs: int, width: int, stride: int
    ) -> ir.Value:
        inner = self.factor * width
        outputs = BOTTLENECK_EXPANSION * width
        branch = graph.op("Relu", conv_norm(graph, "1", data, inputs, width, kernel=1))
        branch = graph.op(
            "Relu", conv_norm(graph, "2", branch, width, inner, kernel=3, stride=stride, padding=1)
        )
        branch = conv_norm(graph, "3", branch, inner, outputs, kernel=1)
        if stride != 1 or inputs != outputs:
            data = conv_norm(graph, "shortcut", data, inputs, outputs, kernel=1, stride=stride)
        return graph.op("Relu", graph.op("Add", branch, data))
