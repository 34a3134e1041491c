"""Models with branches, for torch's exporters: two towers that meet in a score, and features that
are joined.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

BATCH = 2
"""Samples of the traced batch; any number can be bound."""
SEQUENCE = 12
VOCABULARY = 96
IMAGE = 32

Tensors = dict[str, torch.Tensor]


class TwoTowers(nn.Module):
    """A text and an image encoder whose embeddings are compared (CLIP, arXiv:2103.00020): a loss
    and scores.

    Each text with its own image alone, labelled as matching or not; or, with `contrast`, with all
    images of the micro-batch, the labels saying which of them is its own.
    """

    def __init__(self, contrast: bool) -> None:
        from transformers import (
            CLIPTextConfig,
            CLIPTextModelWithProjection,
            CLIPVisionConfig,
            CLIPVisionModelWithProjection,
        )

        super().__init__()
        self.contrast = contrast
        common = {
            "hidden_size": 32, "intermediate_size": 64, "projection_dim": 16, "num_hidden_layers": 3,
            "num_attention_heads": 4,
        }  # fmt: skip
        self.text = CLIPTextModelWithProjection(
            CLIPTextConfig(
                vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE, eos_token_id=1, **common
            )
        )
        self.image = CLIPVisionModelWithProjection(
            CLIPVisionConfig(image_size=IMAGE, patch_size=8, **common)
        )
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(
        self, input_ids: torch.Tensor, pixel_values: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss, and scores [batch] or [batch of texts, batch of images]."""
        text = F.normalize(self.text(input_ids=input_ids, return_dict=True).text_embeds, dim=-1)
        image = F.normalize(
            self.image(pixel_values=pixel_values, return_dict=True).image_embeds, dim=-1
        )
        if self.contrast:
            scores = text @ image.T * self.scale.exp()
            return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2, scores
        scores = (text * image).sum(dim=-1) * self.scale.exp()
        return F.binary_cross_entropy_with_logits(scores, labels), scores


class JoinedFeatures(nn.Module):
    """Groups of dense features with layers of their own, tables of categories, and layers over all
    of them (DLRM).
    """

    def __init__(self, groups: int = 3, tables: int = 3, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.dense = nn.ModuleList(
            nn.Sequential(
                *(part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh()))
            )
            for _ in range(groups)
        )
        self.tables = nn.ModuleList(nn.Embedding(50, 8) for _ in range(tables))
        self.top = nn.Sequential(
            nn.Linear(groups * width + tables * 8, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(
        self, dense: torch.Tensor, categories: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss and the logits [batch] of `dense` [batch, groups, width] and `categories`
        [batch, tables].
        """
        joined = [layers(dense[:, index]) for index, layers in enumerate(self.dense)]
        joined += [table(categories[:, index]) for index, table in enumerate(self.tables)]
        logits = self.top(torch.cat(joined, dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, labels), logits


def _pairs(contrast: bool) -> Tensors:
    labels = torch.arange(BATCH) if contrast else torch.rand(BATCH)
    texts = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE))
    return {
        "input_ids": texts,
        "pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE),
        "labels": labels,
    }


def _clicks() -> Tensors:
    categories = torch.randint(0, 50, (BATCH, 3))
    return {
        "dense": torch.randn(BATCH, 3, 32),
        "categories": categories,
        "labels": torch.rand(BATCH),
    }


MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], Tensors]]] = {
    "clip": (lambda: TwoTowers(False), lambda: _pairs(False)),
    "clip-contrast": (lambda: TwoTowers(True), lambda: _pairs(True)),
    "dlrm": (JoinedFeatures, _clicks),
}
"""By name a module, and the inputs that it is traced with."""


def exported(name: str, dynamo: bool, folder: Path) -> Path:
    """The file that one of torch's exporters writes of a model with random weights, its batch
    symbolic.
    """
    build, inputs = MODELS[name]
    path = folder / f"{name}.onnx"
    with torch.random.fork_rng(devices=()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        given = inputs()
        common = {"input_names": list(given), "output_names": ["loss", "scores"], "verbose": False}
        if dynamo:
            batch = torch.export.Dim("batch", min=2, max=64)
            shapes = tuple({0: batch} for _ in given)
            more = {"dynamic_shapes": shapes, "external_data": False}
        else:
            more = {"dynamic_axes": {each: {0: "batch"} for each in given}}
        torch.onnx.export(
            build().eval(), tuple(given.values()), str(path), dynamo=dynamo, **common, **more
        )
    return path
