"""VGG-19 with any number of classes (Simonyan and Zisserman, 2015)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from autopipe.configs.schema import AtLeast
from autopipe.configs.zoo.builder import GraphBuilder
from autopipe.configs.zoo.layers import convolution, dense, max_pool
from autopipe.configs.zoo.losses import classify
from autopipe.configs.zoo.model import Count, Setting, ZooModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Vgg19(ZooModel):
    """image [batch, 3, image, image] -> logits [batch, classes]."""

    presets: ClassVar[Mapping[str, Mapping[str, Setting]]] = {
        # Configuration E.
        "imagenet": {"image": 224, "width": 64, "hidden": 4096, "classes": 1000},
        # TePDist: the classifier extended to a million classes.
        "million": {"image": 224, "width": 64, "hidden": 4096, "classes": 1_000_000},
    }

    image: Annotated[int, AtLeast(32)] = 32
    """Height and width of the image."""

    width: Count = 8
    """Channels of the first convolutions; they double three times."""

    hidden: Count = 64
    """Width of the two inner linear layers."""

    classes: Count = 10
    """Extent of the logits."""

    def build(self, graph: GraphBuilder) -> None:
        """Five groups of 2, 2, 4, 4 and 4 convolutions, each pooled, and three linear layers."""
        data = graph.input("image", 3, self.image, self.image)
        channels = 3
        for group, (depth, factor) in enumerate(((2, 1), (2, 2), (4, 4), (4, 8), (4, 8))):
            for index in range(depth):
                name = f"features.{group}.{index}"
                data = convolution(graph, name, data, channels, factor * self.width, kernel=(3, 3), padding=(1, 1))
                data = graph.op("Relu", data)
                channels = factor * self.width
            data = max_pool(graph, data, 2, 2)
        features = channels * (self.image // 32) ** 2
        data = dense(graph, "classifier.0", graph.op("Flatten", data, axis=1), features, self.hidden)
        data = dense(graph, "classifier.1", data, self.hidden, self.hidden)
        classify(graph, dense(graph, "classifier.2", data, self.hidden, self.classes, relu=False), self.loss)
