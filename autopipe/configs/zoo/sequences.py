"""Language models that consist of more than one stack of transformer layers (encoder-decoders) or
of LSTM layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from autopipe.configs.zoo import Count, Settings, ZooModel, preset
from autopipe.configs.zoo.builder import GraphBuilder, lecun, normal, uniform
from autopipe.configs.zoo.transformers import (
    TransformerLayer,
    TransformerModel,
    causal_mask,
    tied_logits,
    transformer,
)

if TYPE_CHECKING:
    import onnx_ir as ir

DISTANCE_BUCKETS = 32
"""Number of distance buckets of mT5's position bias."""
MAX_BUCKETED_DISTANCE = 128
"""Distance from which all larger distances are in one bucket."""
_MT5_FIELDS = "layers hidden heads vocabulary tied source target"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mt5(TransformerModel):
    """mT5: encoder and decoder over one shared embedding (Xue et al., 2021). source [batch,
    source], target [batch, target] -> logits [batch, target, vocabulary]. As in T5: RMS norms, no
    biases, unscaled scores, a learned bias by bucketed distance in place of positions.
    """

    presets: ClassVar[Mapping[str, Settings]] = {
        # Sizes of Tessel (HPCA 2024), table III. The table counts the layers of encoder and decoder
        # in one sum: 48, 48, 64, 80. The model of 1.8B parameters has an untied head like mT5; the
        # heads of the other models are tied.
        "1.8b": preset(_MT5_FIELDS, 24, 1024, 16, 512_000, False, 1024, 1024),
        "9.5b": preset(_MT5_FIELDS, 24, 3072, 24, 1_000_000, True, 1024, 1024),
        "43b": preset(_MT5_FIELDS, 32, 6144, 48, 1_500_000, True, 1024, 1024),
        "88b": preset(_MT5_FIELDS, 40, 8192, 64, 1_500_000, True, 1024, 1024),
    }
    layers: Count = 2
    """Layers of the encoder, and of the decoder."""
    hidden: Count = 64
    """Width of the residual stream; the feed-forward layers are four times as wide."""
    vocabulary: Count = 256
    """Rows of the embedding that encoder and decoder share, and size of the last axis of the
    logits.
    """
    tied: bool = True
    """True if the head is the embedding as well, transposed."""
    source: Count = 16
    """Tokens that the encoder reads."""
    target: Count = 16
    """Tokens that the decoder reads and predicts."""

    def build(self, graph: GraphBuilder) -> None:
        source = graph.input("source", self.source, integer=True)
        target = graph.input("target", self.target, integer=True)
        norm = partial(GraphBuilder.rms_norm, epsilon=1e-6)
        layer = TransformerLayer(
            self.hidden,
            self.heads,
            4 * self.hidden,
            norm=norm,
            bias=False,
            inner_bias=False,
            scaled=False,
            activation="Relu",
        )
        memory, table = graph.embedding("embedding", source, self.vocabulary, self.hidden)
        bias = self._distance_bias(graph, "encoder.position_bias", self.source, causal=False)
        memory = transformer(graph, "encoder", self.layers, layer, memory, mask=bias)
        memory = norm(graph, "encoder.norm", memory, self.hidden)
        with graph.scope("target_embedding"):
            data = graph.op("Gather", table, target, axis=0)
        bias = self._distance_bias(graph, "decoder.position_bias", self.target, causal=True)
        mask = graph.op("Add", bias, causal_mask(graph, self.target))
        data = transformer(graph, "decoder", self.layers, layer, data, mask=mask, memory=memory)
        data = norm(graph, "decoder.norm", data, self.hidden)
        if self.tied:
            with graph.scope("head"):
                logits = tied_logits(graph, data, table)
        else:
            logits = graph.linear("head", data, self.hidden, self.vocabulary, bias=False)
        graph.predict_tokens(logits, self.target, self.vocabulary)

    def _distance_bias(
        self, graph: GraphBuilder, name: str, length: int, *, causal: bool
    ) -> ir.Value:
        """Return the position bias [1, heads, length, length]: a learned value for each head and
        each bucket of the distance (Raffel et al., 2020).
        """
        with graph.scope(name):
            bucket = _distance_bucket(graph, length, causal)
            table = graph.parameter("weight", DISTANCE_BUCKETS, self.heads)
            chosen = graph.op("Gather", table, bucket, axis=0)
            return graph.op(
                "Unsqueeze", graph.op("Transpose", chosen, perm=[2, 0, 1]), graph.constant([0])
            )


def _distance_bucket(graph: GraphBuilder, length: int, causal: bool) -> ir.Value:
    """Return the bucket of the distance from query position to key position, int64 [length,
    length].

    Half of the buckets hold one distance each. The other buckets grow logarithmically up to
    FARTHEST. In a causal model only distances to earlier keys are distinguished. Otherwise keys
    after the query use the second half of the table.
    """
    order = graph.positions(length)
    key = graph.op("Unsqueeze", order, graph.constant([0]))
    query = graph.op("Unsqueeze", order, graph.constant([1]))
    offset = graph.op("Sub", key, query)
    buckets = DISTANCE_BUCKETS if causal else DISTANCE_BUCKETS // 2
    exact = buckets // 2
    back = graph.op("Neg" if causal else "Abs", offset)
    distance = graph.op("Max", back, graph.constant(0)) if causal else back
    beyond = graph.op("Cast", graph.op("Max", distance, graph.constant(exact)), to=1)
    growth = graph.op("Log", graph.op("Div", beyond, graph.constant(float(exact))))
    step = graph.op(
        "Mul", growth, graph.constant((buckets - exact) / math.log(MAX_BUCKETED_DISTANCE / exact))
    )
    far = graph.op("Add", graph.op("Cast", step, to=7), graph.constant(exact))
    far = graph.op("Min", far, graph.constant(buckets - 1))
    bucket = graph.op("Where", graph.op("Less", distance, graph.constant(exact)), distance, far)
    if causal:
        return bucket
    after = graph.op("Cast", graph.op("Greater", offset, graph.constant(0)), to=7)
    return graph.op("Add", bucket, graph.op("Mul", after, graph.constant(buckets)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer(TransformerModel):
    """The encoder-decoder translation model of Vaswani et al. (2017), in the variant of the PaSE
    paper. source, target [batch, sequence] -> logits [batch, sequence, vocabulary]; norms follow
    the residual sums.
    """

    presets: ClassVar[Mapping[str, Settings]] = {
        # A model of PaSE (IPDPS 2021), which uses batches of 64 samples. The layers have the sizes
        # of the original base Transformer.
        "paper": preset(
            "layers hidden heads feed_forward vocabulary sequence", 6, 512, 8, 2048, 50_000, 256
        ),
    }
    multiples: ClassVar[tuple[tuple[str, str], ...]] = (("hidden", "heads"), ("hidden", "waves"))
    waves: ClassVar[int] = 2
    """Divisor of `hidden`: sinusoidal positions have a sine and a cosine for each frequency."""
    layers: Count = 2
    """Layers of the encoder, and of the decoder."""
    feed_forward: Count = 256
    """Inner width of the feed-forward layers."""
    vocabulary: Count = 256
    """Rows of each of the two embeddings, and size of the last axis of the logits."""
    sequence: Count = 16
    """Tokens of the source, and of the target."""

    def build(self, graph: GraphBuilder) -> None:
        source = graph.input("source", self.sequence, integer=True)
        target = graph.input("target", self.sequence, integer=True)
        init = lecun(self.hidden)
        layer = TransformerLayer(
            self.hidden,
            self.heads,
            self.feed_forward,
            norm_first=False,
            bias=False,
            activation="Relu",
            init=init,
        )
        with graph.scope("positions"):
            # The shape of `waves` is [sequence, hidden]. It contains the sines, then the cosines,
            # of position / 10000^(2 i / hidden).
            angle = graph.angles(self.sequence, self.hidden // 2, 10000)
            waves = graph.op("Concat", graph.op("Sin", angle), graph.op("Cos", angle), axis=-1)
        memory = self._embed(graph, "source_embedding", source, waves)
        memory = transformer(graph, "encoder", self.layers, layer, memory)
        mask = causal_mask(graph, self.sequence)
        data = self._embed(graph, "target_embedding", target, waves)
        data = transformer(graph, "decoder", self.layers, layer, data, mask=mask, memory=memory)
        logits = graph.linear(
            "projection", data, self.hidden, self.vocabulary, init=init, bias=False
        )
        graph.predict_tokens(logits, self.sequence, self.vocabulary)

    def _embed(self, graph: GraphBuilder, name: str, tokens: ir.Value, waves: ir.Value) -> ir.Value:
        init = normal(1.0 / math.sqrt(self.hidden))
        data, _ = graph.embedding(name, tokens, self.vocabulary, self.hidden, init=init)
        with graph.scope(name):
            scaled = graph.op("Mul", data, graph.constant(math.sqrt(self.hidden)))
            return graph.op("Add", scaled, waves)


@dataclass(frozen=True, slots=True, kw_only=True)
class RnnLm(ZooModel):
    """A language model of stacked LSTM layers, in the variant of the PaSE paper. tokens [batch,
    sequence] -> logits [batch, sequence, vocabulary].
    """

    presets: ClassVar[Mapping[str, Settings]] = {
        # A model of PaSE (IPDPS 2021), which uses batches of 64 samples.
        "paper": {"layers": 2, "hidden": 2048, "vocabulary": 100_000, "sequence": 256},
    }
    layers: Count = 2
    """LSTM layers."""
    hidden: Count = 32
    """Units of a layer and width of the embedding."""
    vocabulary: Count = 256
    """Rows of the embedding, and size of the last axis of the logits."""
    sequence: Count = 16
    """Tokens of a sample."""

    def build(self, graph: GraphBuilder) -> None:
        """Add an embedding, LSTM layers over [sequence, batch, hidden], and a projection. LSTMs are
        unidirectional and start from zero states. ONNX orders their gates input, output, forget,
        cell.
        """
        width = self.hidden
        init = uniform(1.0 / math.sqrt(self.hidden))
        tokens = graph.input("tokens", self.sequence, integer=True)
        data, _ = graph.embedding("embedding", tokens, self.vocabulary, width, init=init)
        data = graph.op("Transpose", data, perm=[1, 0, 2])
        for index in range(self.layers):
            with graph.scope(f"layers.{index}"):
                weight = graph.parameter("weight", 1, 4 * width, width, init=init)
                recurrence = graph.parameter("recurrence", 1, 4 * width, width, init=init)
                bias = graph.parameter("bias", 1, 8 * width, init=init)
                result = graph.op("LSTM", data, weight, recurrence, bias, hidden_size=width)
                data = graph.op("Squeeze", result, graph.constant([1]))
        data = graph.op("Transpose", data, perm=[1, 0, 2])
        logits = graph.linear("projection", data, width, self.vocabulary, init=init)
        graph.predict_tokens(logits, self.sequence, self.vocabulary)
