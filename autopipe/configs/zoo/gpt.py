"""GPT: a decoder-only language model whose head is its embedding, transposed (Brown et al., 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from autopipe.configs.zoo.attention import SPREAD, Attention, causal_mask, closing_spread, pre_norm_block
from autopipe.configs.zoo.builder import GraphBuilder
from autopipe.configs.zoo.layers import embedding, layer_norm, positions
from autopipe.configs.zoo.losses import predict_tokens
from autopipe.configs.zoo.model import Count, Setting, ZooModel


def _sizes(layers: int, hidden: int, heads: int, vocabulary: int = 50257, sequence: int = 2048) -> dict[str, Setting]:
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "vocabulary": vocabulary,
        "sequence": sequence,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt(ZooModel):
    """tokens [batch, sequence] -> logits [batch, sequence, vocabulary]."""

    presets: ClassVar[Mapping[str, Mapping[str, Setting]]] = {
        # GPT-2 (Radford et al., 2019).
        "gpt2": _sizes(12, 768, 12, sequence=1024),
        "gpt2-xl": _sizes(48, 1600, 25, sequence=1024),
        # GPT-3, table 2.1. The paper's 24 heads of 128 (1.3B) and hidden 5140 (13B) do not divide: 16 and 5120 do.
        "125m": _sizes(12, 768, 12),
        "350m": _sizes(24, 1024, 16),
        "760m": _sizes(24, 1536, 16),
        "1.3b": _sizes(24, 2048, 16),
        "2.7b": _sizes(32, 2560, 32),
        "6.7b": _sizes(32, 4096, 32),
        "13b": _sizes(40, 5120, 40),
        "175b": _sizes(96, 12288, 96),
        # Between the two, as Megatron-LM (Narayanan et al., 2021) and Alpa (OSDI 2022) have it.
        "39b": _sizes(48, 8192, 64),
        # Tessel (HPCA 2024), table III; "1M" read as 1,000,000, which gives the parameter counts it names.
        "11b": _sizes(32, 4096, 32, 1_000_000),
        "24b": _sizes(40, 6144, 48, 1_000_000),
        "47b": _sizes(48, 8192, 64, 1_000_000),
        "77b": _sizes(80, 8192, 64, 1_500_000),
        # Tessel, figure 2: layers of GPT 6.7B under an embedding of 768K rows.
        "tessel-figure-2": _sizes(32, 4096, 32, 768_000),
    }

    multiples: ClassVar[tuple[tuple[str, str], ...]] = (("hidden", "heads"),)

    layers: Count = 4
    """Transformer layers."""

    hidden: Count = 64
    """Width of the residual stream."""

    heads: Count = 4
    """Attention heads of a layer."""

    vocabulary: Count = 256
    """Rows of the embedding, and extent of the logits."""

    sequence: Count = 32
    """Tokens of a sample."""

    def build(self, graph: GraphBuilder) -> None:
        """Embeddings, pre-norm layers, norm, product with the transposed embedding."""
        tokens = graph.input("tokens", self.sequence, integer=True)
        data, table = embedding(graph, "token_embedding", tokens, self.vocabulary, self.hidden, init=SPREAD)
        with graph.scope("position_embedding"):
            order = positions(graph, self.sequence)
        places, _ = embedding(graph, "position_embedding", order, self.sequence, self.hidden, init=SPREAD)
        data = graph.op("Add", data, places)
        mask = causal_mask(graph, self.sequence)
        sizes = Attention(self.hidden, self.heads, closing=closing_spread(self.layers))
        for index in range(self.layers):
            data = pre_norm_block(graph, f"layers.{index}", sizes, 4 * self.hidden, data, mask=mask)
        data = layer_norm(graph, "norm", data, self.hidden)
        with graph.scope("head"):
            logits = graph.op("MatMul", data, graph.op("Transpose", table, perm=[1, 0]))
        predict_tokens(graph, logits, self.loss, self.sequence, self.vocabulary)
