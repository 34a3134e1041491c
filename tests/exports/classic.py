"""Attention as the first transformers spelled it, which onnxruntime's optimizer fuses into
operators of its own.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.exports.other_models import Classification
from tests.exports.with_loss import BATCH, SEQUENCE, VOCABULARY, Tensors, WithLoss

WIDTH = 32
HEADS = 4
LAYERS = 2


def _by_head(x: torch.Tensor) -> torch.Tensor:
    return x.view(x.size(0), x.size(1), HEADS, x.size(2) // HEADS).permute(0, 2, 1, 3)


def _merged(x: torch.Tensor) -> torch.Tensor:
    x = x.permute(0, 2, 1, 3).contiguous()
    return x.view(x.size(0), x.size(1), WIDTH)


class BertLayer(nn.Module):
    """Projections apart, norms behind."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.dense = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.last_norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = (_by_head(each(x)) for each in (self.query, self.key, self.value))
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(WIDTH // HEADS)
        x = self.norm(self.dense(_merged(torch.matmul((scores + mask).softmax(-1), value))) + x)
        result: torch.Tensor = self.last_norm(self.down(F.gelu(self.up(x))) + x)
        return result


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.types = nn.Embedding(2, WIDTH)
        self.positions = nn.Embedding(2 * SEQUENCE, WIDTH)
        self.register_buffer("position_ids", torch.arange(2 * SEQUENCE)[None])
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(BertLayer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        x = (
            self.words(ids)
            + self.types(types)
            + self.positions(self.position_ids[:, : ids.size(1)])
        )
        x, hidden = self.norm(x), (1.0 - mask[:, None, None, :].to(x.dtype)) * -10000.0
        for layer in self.layers:
            x = layer(x, hidden)
        result: torch.Tensor = self.head(x)
        return result


class Projection(nn.Module):
    """A linear layer whose weight has inputs first, GPT-2's Conv1D."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inner, outer) * 0.2)
        self.bias = nn.Parameter(torch.randn(outer) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return product.view(*x.size()[:-1], self.weight.size(1))


class GptLayer(nn.Module):
    """One projection for queries, keys and values, a causal mask from a table."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.last_norm = nn.LayerNorm(WIDTH)
        self.attention = Projection(WIDTH, 3 * WIDTH)
        self.projection = Projection(WIDTH, WIDTH)
        self.up = Projection(WIDTH, 2 * WIDTH)
        self.down = Projection(2 * WIDTH, WIDTH)
        self.register_buffer(
            "bias", torch.ones(2 * SEQUENCE, 2 * SEQUENCE, dtype=torch.uint8).tril()[None, None]
        )
        self.register_buffer("masked_bias", torch.tensor(-1e4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = map(_by_head, self.attention(self.norm(x)).split(WIDTH, 2))
        scores = torch.matmul(query, key.permute(0, 1, 3, 2)) / (float(value.size(-1)) ** 0.5)
        shown = self.bias[
            :, :, scores.size(-1) - scores.size(-2) : scores.size(-1), : scores.size(-1)
        ].bool()
        scores = torch.where(shown, scores, self.masked_bias)
        x = x + self.projection(_merged(torch.matmul(scores.softmax(-1), value)))
        result: torch.Tensor = x + self.down(F.gelu(self.up(self.last_norm(x)), approximate="tanh"))
        return result


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(2 * SEQUENCE, WIDTH)
        self.layers = nn.ModuleList(GptLayer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.positions(positions)
        for layer in self.layers:
            x = layer(x)
        result: torch.Tensor = self.head(self.norm(x))
        return result


def _ids(top: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(0, top, (BATCH, SEQUENCE))


def _sentences() -> Tensors:
    return {
        "ids": _ids(),
        "mask": torch.ones(BATCH, SEQUENCE, dtype=torch.int64),
        "types": _ids(2),
        "labels": _ids(),
    }


def _texts() -> Tensors:
    return {
        "ids": _ids(),
        "positions": torch.arange(SEQUENCE).expand(BATCH, SEQUENCE).contiguous(),
        "labels": _ids(),
    }


CLASSIC: dict[str, WithLoss] = {
    "classic_bert": WithLoss(lambda: Classification(Bert()), _sentences),
    "classic_gpt": WithLoss(lambda: Classification(Gpt()), _texts),
}
"""By name."""
