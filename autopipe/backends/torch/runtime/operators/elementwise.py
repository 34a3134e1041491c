"""Shrinkage."""

from __future__ import annotations

import torch
from torch import Tensor


def shrink(data: Tensor, threshold: float, bias: float) -> Tensor:
    """Numbers moved towards zero by `bias`, those within `threshold` to zero."""
    below, above = data < -threshold, data > threshold
    return torch.where(below, data + bias, torch.where(above, data - bias, torch.zeros_like(data)))
