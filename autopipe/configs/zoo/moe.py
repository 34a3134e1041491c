"""A language model whose feed-forward layers are experts chosen by a gate (Lepikhin et al., 2021: GShard)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from autopipe.configs.zoo.attention import SPREAD, Attention, attention, causal_mask, closing_spread
from autopipe.configs.zoo.builder import ZEROS, GraphBuilder
from autopipe.configs.zoo.layers import embedding, layer_norm, linear, positions
from autopipe.configs.zoo.losses import predict_tokens
from autopipe.configs.zoo.model import Count, Setting, ZooModel

if TYPE_CHECKING:
    import onnx_ir as ir


def _sizes(layers: int, hidden: int, experts: int) -> dict[str, Setting]:
    """Two experts a token, room for twice their even share, as GShard has it."""
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": 16,
        "experts": experts,
        "choices": 2,
        "capacity": -(-2 * 2 * 1024 // experts),
        "vocabulary": 32000,
        "sequence": 1024,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts(ZooModel):
    """tokens [batch, sequence] -> logits [batch, sequence, vocabulary].

    Each sample is a group of its own: its tokens compete for the experts' places, those of other samples do not, so
    that a batch may be split anywhere.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Setting]]] = {
        # The family of Alpa (OSDI 2022) against which TePDist measures, named by the number of parameters.
        "380m": _sizes(8, 768, 8),
        "690m": _sizes(8, 768, 16),
        "1.3b": _sizes(16, 768, 16),
        "2.4b": _sizes(16, 1024, 16),
        "10b": _sizes(16, 1536, 32),
        "27b": _sizes(16, 2048, 48),
        "70b": _sizes(32, 2048, 64),
    }
    multiples: ClassVar[tuple[tuple[str, str], ...]] = (("hidden", "heads"),)
    limits: ClassVar[tuple[tuple[str, str], ...]] = (("choices", "experts"),)

    layers: Count = 2
    """Transformer layers."""

    hidden: Count = 64
    """Width of the residual stream."""

    heads: Count = 4
    """Attention heads of a layer."""

    experts: Count = 4
    """Feed-forward networks of a layer, each four times as wide inside."""

    choices: Count = 2
    """Experts that a token is sent to."""

    capacity: Count = 16
    """Tokens of a sample that an expert takes; what comes later passes by on the residual alone."""

    vocabulary: Count = 256
    """Rows of the embedding, and extent of the logits."""

    sequence: Count = 16
    """Tokens of a sample."""

    def build(self, graph: GraphBuilder) -> None:
        """Embeddings, layers of attention and experts, norm, head."""
        tokens = graph.input("tokens", self.sequence, integer=True)
        data, _ = embedding(graph, "token_embedding", tokens, self.vocabulary, self.hidden, init=SPREAD)
        order = positions(graph, self.sequence)
        places, _ = embedding(graph, "position_embedding", order, self.sequence, self.hidden, init=SPREAD)
        data = graph.op("Add", data, places)
        mask = causal_mask(graph, self.sequence)
        sizes = Attention(self.hidden, self.heads, closing=closing_spread(self.layers))
        for index in range(self.layers):
            with graph.scope(f"layers.{index}"):
                normed = layer_norm(graph, "attention_norm", data, self.hidden)
                data = graph.op("Add", data, attention(graph, "attention", sizes, normed, mask=mask))
                normed = layer_norm(graph, "experts_norm", data, self.hidden)
                data = graph.op("Add", data, self._mixture(graph, normed))
        data = layer_norm(graph, "norm", data, self.hidden)
        logits = linear(graph, "head", data, self.hidden, self.vocabulary, init=SPREAD, bias=False)
        predict_tokens(graph, logits, self.loss, self.sequence, self.vocabulary)

    def _mixture(self, graph: GraphBuilder, data: ir.Value) -> ir.Value:
        """Tokens to the places of their experts, through the experts, and back weighted by the gate."""
        with graph.scope("experts"):
            weights, chosen = self._gate(graph, data)
            dispatch, combine = self._places(graph, weights, chosen)
            sent = graph.op("Einsum", dispatch, data, equation="bsec,bsh->bech")
            inner = 4 * self.hidden
            raised = graph.op("MatMul", sent, graph.parameter("up", self.experts, self.hidden, inner, init=SPREAD))
            raised = graph.op("Add", raised, graph.parameter("up_bias", self.experts, 1, inner, init=ZEROS))
            down = graph.parameter("down", self.experts, inner, self.hidden, init=closing_spread(self.layers))
            lowered = graph.op("MatMul", graph.op("Gelu", raised), down)
            lowered = graph.op("Add", lowered, graph.parameter("down_bias", self.experts, 1, self.hidden, init=ZEROS))
            return graph.op("Einsum", combine, lowered, equation="bsec,bech->bsh")

    def _gate(self, graph: GraphBuilder, data: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Of each token's best experts the weights, which sum to one, and one-hot choices.

        Both by choice first: [batch, choices * sequence] and [batch, choices * sequence, experts].
        """
        with graph.scope("gate"):
            scores = linear(graph, "projection", data, self.hidden, self.experts, init=SPREAD, bias=False)
            shares = graph.op("Softmax", scores, axis=-1)
            best, which = graph.split_op("TopK", 2, shares, graph.constant([self.choices]), axis=-1)
            weights = graph.op("Div", best, graph.op("ReduceSum", best, graph.constant([-1]), keepdims=1))
            weights = graph.op("Transpose", weights, perm=[0, 2, 1])
            which = graph.op("Transpose", which, perm=[0, 2, 1])
            rows = self.choices * self.sequence
            chosen = self._one_hot(graph, graph.reshape(which, [0, rows]), self.experts)
            return graph.reshape(weights, [0, rows]), chosen

    def _places(self, graph: GraphBuilder, weights: ir.Value, chosen: ir.Value) -> tuple[ir.Value, ir.Value]:
        """[batch, sequence, experts, capacity]: 1 where a token takes an expert's place, and there its weight.

        First choices are seated before second ones, earlier tokens before later ones; a place beyond the capacity is
        out of range for the one-hot rows, which makes them zero.
        """
        with graph.scope("places"):
            before = graph.op("CumSum", chosen, graph.constant(1), exclusive=1)
            place = graph.op("ReduceSum", graph.op("Mul", before, chosen), graph.constant([-1]), keepdims=0)
            seat = self._one_hot(graph, graph.op("Cast", place, to=7), self.capacity)
            seats = graph.op("Einsum", chosen, seat, equation="bte,btc->btec")
            weighted = graph.op("Mul", seats, graph.op("Unsqueeze", weights, graph.constant([2, 3])))
            return self._over_choices(graph, seats), self._over_choices(graph, weighted)

    def _over_choices(self, graph: GraphBuilder, seats: ir.Value) -> ir.Value:
        """[batch, choices * sequence, …] summed over the choices."""
        apart = graph.reshape(seats, [0, self.choices, self.sequence, self.experts, self.capacity])
        return graph.op("ReduceSum", apart, graph.constant([1]), keepdims=0)

    def _one_hot(self, graph: GraphBuilder, indices: ir.Value, depth: int) -> ir.Value:
        """float32 [*indices, depth]."""
        return graph.op("OneHot", indices, graph.constant([depth]), graph.constant([0.0, 1.0]), axis=-1)
