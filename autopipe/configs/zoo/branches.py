"""Models with one branch per input: FLAVA and the models of GraphPipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from autopipe.configs.zoo import Count, Settings, ZooModel, preset
from autopipe.configs.zoo.builder import NORMAL_0_02, GraphBuilder, kaiming, lecun, normal
from autopipe.configs.zoo.transformers import (
    TransformerLayer,
    add_positions,
    attention,
    transformer,
)
from autopipe.ir.graph import Initializer

if TYPE_CHECKING:
    import onnx_ir as ir

GRAPHPIPE_PRESET = preset("sequence hidden heads feed_forward classes", 256, 1024, 16, 4096, 1000)
"""The multi-modal transformer of GraphPipe (ASPLOS 2025), appendix A.2. The paper does not define
the number of classes.
"""


def classify_mean(
    graph: GraphBuilder, data: ir.Value, width: int, classes: int, init: Initializer
) -> None:
    """End the graph with a classifier of the mean of `data` [batch, positions, width] over
    positions.
    """
    data = graph.op("ReduceMean", data, graph.constant([1]), keepdims=0)
    graph.classify(graph.linear("classifier", data, width, classes, init))


def dense_layers(
    graph: GraphBuilder, name: str, data: ir.Value, inputs: int, width: int, count: int
) -> ir.Value:
    """Map [batch, inputs] to [batch, width] by `count` linear layers with Relu, called `name.0`,
    `name.1`, ….
    """
    for index in range(count):
        data = graph.dense(f"{name}.{index}", data, width if index else inputs, width)
    return data


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoBranch(ZooModel):
    """The model of GraphPipe's case study: branches of attention and linear layers. input_0,
    input_1, … [batch, sequence, hidden] -> logits [batch, classes].
    """

    presets: ClassVar[Mapping[str, Settings]] = {
        # Sizes of GraphPipe (ASPLOS 2025), section 7: 2 branches of 4 repeats. The widths equal the
        # widths of GraphPipe's multi-modal transformer.
        "paper": {**GRAPHPIPE_PRESET, "branches": 2, "repeats": 4},
    }
    multiples: ClassVar[tuple[tuple[str, str], ...]] = (("hidden", "heads"),)
    branches: Count = 2
    """Parallel branches."""
    repeats: Count = 4
    """Number of times that a branch repeats its three layers: attention, linear, linear."""
    sequence: Count = 16
    """Positions of a sample."""
    hidden: Count = 64
    """Width of inputs and attention."""
    heads: Count = 4
    """Attention heads."""
    feed_forward: Count = 128
    """Width between the two linear layers."""
    classes: Count = 10
    """Number of classes: the size of the last axis of the logits."""

    def build(self, graph: GraphBuilder) -> None:
        layer = TransformerLayer(self.hidden, self.heads, init=lecun(self.hidden))
        joined = []
        for index in range(self.branches):
            data = graph.input(f"input_{index}", self.sequence, self.hidden)
            for repeat in range(self.repeats):
                # The blocks of this model have no residual connections.
                with graph.scope(f"branches.{index}"), graph.scope(f"blocks.{repeat}"):
                    data = attention(graph, "attention", layer, data)
                    data = graph.linear(
                        "up", data, self.hidden, self.feed_forward, init=kaiming(self.hidden)
                    )
                    data = graph.op("Relu", data)
                    init = lecun(self.feed_forward)
                    data = graph.linear("down", data, self.feed_forward, self.hidden, init=init)
            joined.append(data)
        width = self.branches * self.hidden
        classify_mean(
            graph, graph.op("Concat", *joined, axis=-1), width, self.classes, lecun(width)
        )


COMMON_FLAVA_SIZES: Settings = {"vocabulary": 30522, "sequence": 128, "image": 224, "patch": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flava(ZooModel):
    """FLAVA: a text and an image encoder joined by a cross encoder (Singh et al., 2022). tokens
    [batch, sequence], image [batch, 3, image, image] -> logits [batch, 2]: do text and image match?
    """

    presets: ClassVar[Mapping[str, Settings]] = {
        # Sizes of the published FLAVA model.
        "base": {
            **COMMON_FLAVA_SIZES,
            "text_layers": 12,
            "image_layers": 12,
            "cross_layers": 6,
            "hidden": 768,
            "heads": 12,
        },
        # Tessel (HPCA 2024), figure 15, states 24 layers. This preset uses 24 layers in each of the
        # three encoders.
        "paper": {
            **COMMON_FLAVA_SIZES,
            "text_layers": 24,
            "image_layers": 24,
            "cross_layers": 24,
            "hidden": 4096,
            "heads": 32,
        },
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

    def build(self, graph: GraphBuilder) -> None:
        tokens = graph.input("tokens", self.sequence, integer=True)
        with graph.scope("text"):
            text, _ = graph.embedding("token_embedding", tokens, self.vocabulary, self.hidden)
            text = self._encode(
                graph, add_positions(graph, text, self.sequence, self.hidden), self.text_layers
            )
        image = graph.input("image", 3, self.image, self.image)
        patches = (self.image // self.patch) ** 2
        with graph.scope("image"):
            picture = graph.convolution(
                "patches", image, 3, self.hidden, kernel=self.patch, stride=self.patch
            )
            picture = graph.op(
                "Transpose", graph.reshape(picture, [0, self.hidden, patches]), perm=[0, 2, 1]
            )
            picture = self._encode(
                graph, add_positions(graph, picture, patches, self.hidden), self.image_layers
            )
        with graph.scope("cross"):
            text = graph.linear("text_projection", text, self.hidden, self.hidden)
            picture = graph.linear("image_projection", picture, self.hidden, self.hidden)
            data = self._encode(graph, graph.op("Concat", text, picture, axis=1), self.cross_layers)
            first = graph.op("Gather", data, graph.constant(0), axis=1)
        graph.classify(graph.linear("classifier", first, self.hidden, 2))

    def _encode(self, graph: GraphBuilder, data: ir.Value, layers: int) -> ir.Value:
        layer = TransformerLayer(self.hidden, self.heads, 4 * self.hidden)
        data = transformer(graph, "layers", layers, layer, data)
        return graph.layer_norm("norm", data, self.hidden)


PAPER_SIZES: Settings = {"layers": 4, "features": 4096, "hidden": 4096, "top_layers": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class CandleUno(ZooModel):
    """CANDLE-Uno in GraphPipe's sizes: a drug's effect from several groups of features (Xia et al.,
    2018). features_0, features_1, … [batch, features] -> prediction [batch, 1]; its loss is the
    mean squared distance to float labels.
    """

    presets: ClassVar[Mapping[str, Settings]] = {
        # Sizes of GraphPipe (ASPLOS 2025), appendix A.2. The paper does not state the number of
        # layers after the branches.
        "paper": {**PAPER_SIZES, "branches": 7},
        # The number 16 is the maximum number of branches in GraphPipe's measurements.
        "16-branches": {**PAPER_SIZES, "branches": 16},
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
    """Linear layers after the branches are joined, not counting the one that gives the prediction.
    """

    def build(self, graph: GraphBuilder) -> None:
        joined = []
        for index in range(self.branches):
            data = graph.input(f"features_{index}", self.features)
            with graph.scope(f"branches.{index}"):
                joined.append(
                    dense_layers(graph, "layers", data, self.features, self.hidden, self.layers)
                )
        data = graph.op("Concat", *joined, axis=1)
        data = dense_layers(
            graph, "top", data, self.branches * self.hidden, self.hidden, self.top_layers
        )
        effect = graph.dense("effect", data, self.hidden, 1, relu=False)

        def loss(labels: ir.Value) -> ir.Value:
            distance = graph.op("Sub", effect, labels)
            return graph.op("ReduceMean", graph.op("Mul", distance, distance), keepdims=0)

        graph.end("prediction", effect, loss, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiModalTransformer(ZooModel):
    """GraphPipe's multi-modal transformer: parallel branches of layers, concatenated at the end.
    modality_0, modality_1, … [batch, sequence, embedding] -> logits [batch, classes].
    """

    presets: ClassVar[Mapping[str, Settings]] = {
        "paper": {**GRAPHPIPE_PRESET, "embedding": 1024, "branches": 4, "layers": 8},
        # This is the sequential transformer of GraphPipe's evaluation, whose layers are all in one
        # branch.
        "sequential": {**GRAPHPIPE_PRESET, "embedding": 1024, "branches": 1, "layers": 32},
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
    """Number of classes: the size of the last axis of the logits."""

    def build(self, graph: GraphBuilder) -> None:
        layer = TransformerLayer(self.hidden, self.heads, self.feed_forward)
        joined = []
        for index in range(self.branches):
            data = graph.input(f"modality_{index}", self.sequence, self.embedding)
            with graph.scope(f"branches.{index}"):
                data = graph.linear("projection", data, self.embedding, self.hidden)
                data = transformer(graph, "layers", self.layers, layer, data)
                joined.append(graph.layer_norm("norm", data, self.hidden))
        data = graph.op("Concat", *joined, axis=-1) if self.branches > 1 else joined[0]
        classify_mean(graph, data, self.branches * self.hidden, self.classes, NORMAL_0_02)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dlrm(ZooModel):
    """A recommendation model in GraphPipe's sizes: dense branches and embedding bags, joined
    (Naumov et al., 2019). dense_0, … [batch, features] and sparse_0, … [batch, bag] of row numbers
    -> probability [batch, 1]. The loss is the mean binary cross-entropy to labels 0.0 and 1.0,
    spelled as softplus(x) - x y, which stays finite where log(sigmoid(x)) does not.
    """

    presets: ClassVar[Mapping[str, Settings]] = {
        # Sizes of GraphPipe (ASPLOS 2025), appendix A.2. The paper does not state the number of
        # layers after the interaction.
        "paper": preset(
            "dense_branches sparse_branches dense_layers features hidden rows width bag top_layers",
            *(7, 7, 4, 4096, 4096, 1_000_000, 64, 100, 4),
        ),
    }
    dense_branches: Count = 3
    """Branches of linear layers over dense features."""
    sparse_branches: Count = 3
    """Embedding tables."""
    dense_layers: Count = 2
    """Linear layers of a dense branch."""
    features: Count = 16
    """Dense features of a branch."""
    hidden: Count = 32
    """Width of the linear layers."""
    rows: Count = 1000
    """Rows of a table."""
    width: Count = 8
    """Width of a table."""
    bag: Count = 4
    """Rows of a table that a sample looks up; they are concatenated."""
    top_layers: Count = 2
    """Linear layers after the branches are joined, not counting the one that gives the logit."""

    def build(self, graph: GraphBuilder) -> None:
        joined = []
        for index in range(self.dense_branches):
            data = graph.input(f"dense_{index}", self.features)
            with graph.scope(f"dense.{index}"):
                joined.append(
                    dense_layers(
                        graph, "layers", data, self.features, self.hidden, self.dense_layers
                    )
                )
        for index in range(self.sparse_branches):
            rows = graph.input(f"sparse_{index}", self.bag, integer=True)
            init = normal(self.width**-0.5)
            data, _ = graph.embedding(f"tables.{index}", rows, self.rows, self.width, init=init)
            with graph.scope(f"tables.{index}"):
                joined.append(graph.reshape(data, [0, self.bag * self.width]))
        data = graph.op("Concat", *joined, axis=1)
        inputs = self.dense_branches * self.hidden + self.sparse_branches * self.bag * self.width
        data = dense_layers(graph, "top", data, inputs, self.hidden, self.top_layers)
        click = graph.dense("click", data, self.hidden, 1, relu=False)

        def loss(labels: ir.Value) -> ir.Value:
            entropy = graph.op("Sub", graph.op("Softplus", click), graph.op("Mul", click, labels))
            return graph.op("ReduceMean", entropy, keepdims=0)

        graph.end("probability", click if self.loss else graph.op("Sigmoid", click), loss, 1)
