"""Losses with more results than torch's own."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def cross_entropy(
    scores: Tensor, labels: Tensor, weight: Tensor | None = None, ignore_index: int = -100, reduction: str = "mean"
) -> tuple[Tensor, Tensor]:
    """Softmax cross-entropy over axis 1, and the logarithms of the probabilities."""
    log_probabilities = F.log_softmax(scores, 1)
    loss = F.nll_loss(log_probabilities, labels, weight, ignore_index=ignore_index, reduction=reduction)
    return loss, log_probabilities
