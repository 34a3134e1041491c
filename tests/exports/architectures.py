"""Small models with random weights, and one batch of inputs for each, for torch's exporters to
trace.

The sizes are the smallest that keep every part of an architecture: several heads, several layers, a
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

SEQUENCE = 12
VOCABULARY = 96
CLASSES = 10

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Architecture:
    """A module and what it takes: without labels it gives logits, with labels a loss and logits."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensors]
    """Inputs of a batch of this many samples, the labels last under the name `labels`."""
    sequences: tuple[str, ...] = ()
    """Inputs whose axis 1 counts tokens, and may be dynamic."""


class Called(nn.Module):
    """A model of `transformers` called with tensors by name, its outputs a tuple."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.names = names

    def forward(self, *tensors: torch.Tensor) -> Any:
        result = self.model(**dict(zip(self.names, tensors, strict=True)), return_dict=True)
        return (result.loss, result.logits) if "labels" in self.names else result.logits


class LanguageModel(nn.Module):
    """An LSTM over embedded tokens, and a classifier of the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 24)
        self.lstm = nn.LSTM(24, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.head(self.lstm(self.embedding(tokens))[0])
        if labels is None:
            return logits
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1)), logits


class Recommender(nn.Module):
    """Dense features and embedded categories, their pairwise products, and a click's logit (DLRM,
    arXiv:1906.00091).
    """

    def __init__(self) -> None:
        super().__init__()
        width = 16
        tables = (50, 30, 70)
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, width), nn.ReLU())
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for rows in tables)
        count = len(tables) + 1
        self.top = nn.Sequential(
            nn.Linear(width + count * (count - 1) // 2, 32), nn.ReLU(), nn.Linear(32, 1)
        )
        pairs = torch.tril_indices(count, count, offset=-1)
        self.register_buffer("rows", pairs[0])
        self.register_buffer("columns", pairs[1])

    def forward(
        self, dense: torch.Tensor, category: torch.Tensor, labels: torch.Tensor | None = None
    ) -> Any:
        bottom = self.bottom(dense)
        features = [bottom, *(table(category[:, index]) for index, table in enumerate(self.tables))]
        stacked = torch.stack(features, dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        logits = self.top(torch.cat([bottom, products[:, self.rows, self.columns]], dim=1)).squeeze(
            1
        )
        return (
            logits
            if labels is None
            else (F.binary_cross_entropy_with_logits(logits, labels), logits)
        )


def perturb(model: nn.Module) -> None:
    """Move all that is trained and every statistic: biases of 0 hide mistakes, and exporters merge
    equal weights.
    """
    with torch.no_grad():
        for parameter in filter(lambda each: each.requires_grad, model.parameters()):
            parameter.add_(0.05 * torch.randn_like(parameter))
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None and module.running_var is not None
                module.running_mean.normal_(std=0.1)
                module.running_var.uniform_(0.5, 1.5)


def _tokens(batch: int, below: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(0, below, (batch, SEQUENCE))


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=4, n_head=4, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ))  # fmt: skip


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
    ))  # fmt: skip


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ))  # fmt: skip


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, attn_implementation="eager",
    ))  # fmt: skip


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=8,
        num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ))  # fmt: skip


def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 32, 48], depths=[2, 2, 2], num_labels=CLASSES
    ))  # fmt: skip


def _images(batch: int) -> Tensors:
    return {
        "pixel_values": torch.randn(batch, 3, 32, 32),
        "labels": torch.randint(0, CLASSES, (batch,)),
    }


def _mask(batch: int) -> torch.Tensor:
    """Ones for a sentence's tokens and zeros for the padding behind them."""
    lengths = torch.arange(batch)[:, None] % 3 + SEQUENCE - 2
    return (torch.arange(SEQUENCE)[None] < lengths).to(torch.int64)


def _masked_sentences(batch: int) -> Tensors:
    return {"input_ids": _tokens(batch), "attention_mask": _mask(batch), "labels": _tokens(batch)}


def _typed_sentences(batch: int) -> Tensors:
    kinds = _tokens(batch, 2)
    return {
        "input_ids": _tokens(batch),
        "attention_mask": _mask(batch),
        "token_type_ids": kinds,
        "labels": _tokens(batch),
    }


def _sentence_pairs(batch: int) -> Tensors:
    return {
        "input_ids": _tokens(batch),
        "decoder_input_ids": _tokens(batch),
        "labels": _tokens(batch),
    }


def _texts(batch: int) -> Tensors:
    return {"tokens": _tokens(batch), "labels": _tokens(batch)}


def _clicks(batch: int) -> Tensors:
    labels = torch.randint(0, 2, (batch,)).float()
    return {
        "dense": torch.randn(batch, 13),
        "category": torch.randint(0, 30, (batch, 3)),
        "labels": labels,
    }


ARCHITECTURES = {
    "gpt2": Architecture(_gpt2, _masked_sentences, ("input_ids", "attention_mask", "labels")),
    "llama": Architecture(_llama, _masked_sentences, ("input_ids", "attention_mask", "labels")),
    "bert": Architecture(
        _bert, _typed_sentences, ("input_ids", "attention_mask", "token_type_ids", "labels")
    ),
    "t5": Architecture(_t5, _sentence_pairs, ("input_ids", "decoder_input_ids", "labels")),
    "vit": Architecture(_vit, _images),
    "resnet": Architecture(_resnet, _images),
    "dlrm": Architecture(Recommender, _clicks),
    "lstm": Architecture(
        LanguageModel,
        lambda batch: {"tokens": _tokens(batch), "labels": _tokens(batch)},
        ("tokens", "labels"),
    ),
}
"""The models that torch exports, by name."""
