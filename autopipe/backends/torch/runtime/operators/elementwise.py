"""Dropout with its mask, and shrinkage."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def dropout(data: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
    """Elements dropped with probability `ratio`, the others scaled up; and the mask of those that stay."""
    mask = F.dropout(torch.ones_like(data), ratio)
    return data * mask, mask != 0


def shrink(data: Tensor, threshold: float, bias: float) -> Tensor:
    """Numbers moved towards zero by `bias`, those within `threshold` to zero."""
    below, above = data < -threshold, data > threshold
    return torch.where(below, data + bias, torch.where(above, data - bias, torch.zeros_like(data)))
