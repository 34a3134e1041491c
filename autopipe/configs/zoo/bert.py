"""BERT with its masked-language-model head (Devlin et al., 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from autopipe.configs.zoo.attention import FORBIDDEN, SPREAD, Attention, post_norm_block
from autopipe.configs.zoo.builder import ZEROS, GraphBuilder
from autopipe.configs.zoo.layers import embedding, layer_norm, linear, positions
from autopipe.configs.zoo.losses import predict_tokens
from autopipe.configs.zoo.model import Count, Setting, ZooModel

if TYPE_CHECKING:
    import onnx_ir as ir

EPSILON = 1e-12
"""Of the layer norms."""


def _sizes(layers: int, hidden: int, heads: int, vocabulary: int = 30522) -> dict[str, Setting]:
    return {"layers": layers, "hidden": hidden, "heads": heads, "vocabulary": vocabulary, "sequence": 512}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bert(ZooModel):
    """tokens, token_types, attention_mask [batch, sequence] -> logits [batch, sequence, vocabulary]."""

    presets: ClassVar[Mapping[str, Mapping[str, Setting]]] = {
        "base": _sizes(12, 768, 12),
        "large": _sizes(24, 1024, 16),
        # DNABERT (Ji et al., 2021), over all words of six bases and five special tokens; one of TePDist's models.
        "dnabert": _sizes(12, 768, 12, 4**6 + 5),
    }
    multiples: ClassVar[tuple[tuple[str, str], ...]] = (("hidden", "heads"),)

    layers: Count = 4
    """Transformer layers."""

    hidden: Count = 64
    """Width of the residual stream; the feed-forward layers are four times as wide."""

    heads: Count = 4
    """Attention heads of a layer."""

    vocabulary: Count = 256
    """Rows of the embedding, and extent of the logits."""

    sequence: Count = 32
    """Tokens of a sample."""

    def build(self, graph: GraphBuilder) -> None:
        """Embeddings, post-norm layers, head."""
        tokens = graph.input("tokens", self.sequence, integer=True)
        token_types = graph.input("token_types", self.sequence, integer=True)
        present = graph.input("attention_mask", self.sequence, integer=True)
        data, table = self._embedded(graph, tokens, token_types)
        mask = self._padding_mask(graph, present)
        sizes = Attention(self.hidden, self.heads)
        for index in range(self.layers):
            data = post_norm_block(graph, f"layers.{index}", sizes, 4 * self.hidden, data, mask=mask)
        logits = self._head(graph, data, table)
        predict_tokens(graph, logits, self.loss, self.sequence, self.vocabulary)

    def _embedded(self, graph: GraphBuilder, tokens: ir.Value, token_types: ir.Value) -> tuple[ir.Value, ir.Value]:
        with graph.scope("embeddings"):
            words, table = embedding(graph, "word", tokens, self.vocabulary, self.hidden, init=SPREAD)
            order = positions(graph, self.sequence)
            places, _ = embedding(graph, "position", order, self.sequence, self.hidden, init=SPREAD)
            kinds, _ = embedding(graph, "token_type", token_types, 2, self.hidden, init=SPREAD)
            summed = graph.op("Add", graph.op("Add", words, kinds), places)
            return layer_norm(graph, "norm", summed, self.hidden, EPSILON), table

    def _padding_mask(self, graph: GraphBuilder, present: ir.Value) -> ir.Value:
        """[batch, 1, 1, sequence]: 0 where a token is, FORBIDDEN where padding is."""
        with graph.scope("padding_mask"):
            spread = graph.op("Cast", graph.op("Unsqueeze", present, graph.constant([1, 2])), to=1)
            return graph.op("Mul", graph.op("Sub", graph.constant(1.0), spread), graph.constant(FORBIDDEN))

    def _head(self, graph: GraphBuilder, data: ir.Value, table: ir.Value) -> ir.Value:
        with graph.scope("head"):
            data = graph.op("Gelu", linear(graph, "transform", data, self.hidden, self.hidden, init=SPREAD))
            data = layer_norm(graph, "norm", data, self.hidden, EPSILON)
            logits = graph.op("MatMul", data, graph.op("Transpose", table, perm=[1, 0]))
            return graph.op("Add", logits, graph.parameter("bias", self.vocabulary, init=ZEROS))
