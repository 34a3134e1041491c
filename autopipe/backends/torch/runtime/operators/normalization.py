"""Normalisations with results or shapes that torch's own lack."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def batch_norm(
    x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, momentum: float, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x normalised by its own statistics, the running mean and variance moved towards them, and these statistics.

    Unlike torch, ONNX moves towards the population's variance, and `momentum` is what is left of the old.
    """
    y = F.batch_norm(x, None, None, scale, bias, training=True, eps=epsilon)
    axes = [axis for axis in range(x.dim()) if axis != 1]
    own_variance, own_mean = torch.var_mean(x.detach().to(mean.dtype), axes, correction=0)
    moved_mean = mean * momentum + own_mean * (1 - momentum)
    moved_variance = variance * momentum + own_variance * (1 - momentum)
    return y, moved_mean, moved_variance, own_mean, own_variance


def layer_norm(
    x: Tensor, shape: tuple[int, ...], scale: Tensor, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer normalisation whose scale and bias only broadcast to the normalised shape; also mean and 1 / deviation."""
    y, mean, inverse = torch.native_layer_norm(x, shape, None, None, epsilon)
    y = y * scale
    return y if bias is None else y + bias, mean, inverse


def mean_variance_norm(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """x less its mean over its standard deviation (plus 1e-9, as ONNX defines), over `axes`."""
    variance, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    return (x - mean) / (torch.sqrt(variance) + 1e-9)


def local_response_norm(x: Tensor, size: int, alpha: float, beta: float, bias: float) -> Tensor:
    """Over windows of an even number of channels, which reach one channel further behind than before."""
    before, behind = (size - 1) // 2, size // 2
    squares = (x * x).movedim(1, -1)
    windows = F.pad(squares, (before, behind)).unfold(-1, size, 1).sum(-1).movedim(-1, 1)
    return x / (bias + alpha / size * windows) ** beta


def skip_layer_norm(
    x: Tensor, skip: Tensor, scale: Tensor, shift: Tensor | None, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Layer normalisation of `x + skip + bias`, its mean and 1 / deviation, and the sum."""
    total = x + skip if bias is None else x + skip + bias
    y, mean, inverse = torch.native_layer_norm(total, scale.shape, scale, shift, epsilon)
    return y, mean, inverse, total


def skip_rms_norm(
    x: Tensor, skip: Tensor, scale: Tensor, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, None, None, Tensor]:
    """Root-mean-square normalisation of `x + skip + bias`, and the sum; statistics are not given."""
    total = x + skip if bias is None else x + skip + bias
    return F.rms_norm(total, scale.shape, scale, epsilon), None, None, total
