"""Normalisations over axes of which each rank has a part.

Forward exchanges the moments of the parts, backward two sums a row, both at once. Variances of parts are taken about
their own means and joined in double precision (Chan, Golub and LeVeque, "Algorithms for computing the sample variance",
The American Statistician 37(3), 1983), so that a mean far from zero costs no digits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopipe.backends.torch.runtime.operators.joint import ShardedAxis, precise, summed, wide

Inverse = Callable[[Tensor], Tensor]
"""Factor to multiply by, from the variance."""


def layer_norm_part(
    x: Tensor, dims: tuple[int, ...], scale: Tensor, bias: Tensor | None, epsilon: float, group: ShardedAxis
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's part of a layer normalisation over `dims`, which are the last; the mean and 1 / deviation."""
    y, mean, variance = _standardized(precise(x), dims, lambda variance: torch.rsqrt(variance + epsilon), group)
    y = y * scale
    return y if bias is None else y + bias, mean, torch.rsqrt(variance + epsilon)


def rms_norm_part(x: Tensor, dims: tuple[int, ...], scale: Tensor, epsilon: float, group: ShardedAxis) -> Tensor:
    """This rank's part of a root-mean-square normalisation over `dims`."""
    x = precise(x)
    data = wide(x)
    squares = summed(data.square().sum(dims, keepdim=True), group)
    return (data * torch.rsqrt(squares / (_count(x, dims) * group.size) + epsilon)).to(x.dtype) * scale


def skip_layer_norm_part(
    x: Tensor,
    skip: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
    group: ShardedAxis,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This rank's part of the layer normalisation of `x + skip + bias`, its mean and 1 / deviation, and the sum."""
    total = x + skip if bias is None else x + skip + bias
    return *layer_norm_part(total, (-1,), scale, shift, epsilon, group), total


def skip_rms_norm_part(
    x: Tensor, skip: Tensor, scale: Tensor, bias: Tensor | None, epsilon: float, group: ShardedAxis
) -> tuple[Tensor, None, None, Tensor]:
    """This rank's part of the root-mean-square normalisation of `x + skip + bias`, and the sum."""
    total = x + skip if bias is None else x + skip + bias
    return rms_norm_part(total, (-1,), scale, epsilon, group), None, None, total


def batch_norm_part(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    momentum: float,
    epsilon: float,
    group: ShardedAxis,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x normalised by the statistics of all ranks' samples; what else `operators.batch_norm` gives, on every rank."""
    dims = tuple(axis for axis in range(x.dim()) if axis != 1)
    y, own_mean, own_variance = _standardized(x, dims, lambda found: torch.rsqrt(found + epsilon), group)
    own_mean, own_variance = (each.reshape(-1).to(mean.dtype) for each in (own_mean, own_variance))
    moved_mean = mean * momentum + own_mean * (1 - momentum)
    moved_variance = variance * momentum + own_variance * (1 - momentum)
    return _by_channel(y, scale, bias), moved_mean, moved_variance, own_mean, own_variance


def instance_norm_part(x: Tensor, scale: Tensor, bias: Tensor, epsilon: float, group: ShardedAxis) -> Tensor:
    """This rank's part of every channel normalised by itself."""
    dims = tuple(range(2, x.dim()))
    y, _, _ = _standardized(x, dims, lambda variance: torch.rsqrt(variance + epsilon), group)
    return _by_channel(y, scale, bias)


def group_norm_part(x: Tensor, groups: int, scale: Tensor, bias: Tensor, epsilon: float, group: ShardedAxis) -> Tensor:
    """This rank's part of `groups` groups of channels, each normalised by itself."""
    x = precise(x)
    apart = x.reshape(x.shape[0], groups, -1)
    y, _, _ = _standardized(apart, (2,), lambda variance: torch.rsqrt(variance + epsilon), group)
    return _by_channel(y.reshape(x.shape), scale, bias)


def mean_variance_norm_part(x: Tensor, dims: tuple[int, ...], group: ShardedAxis) -> Tensor:
    """This rank's part of x less its mean over its standard deviation (plus 1e-9), over `dims`."""
    return _standardized(x, dims, lambda variance: 1 / (torch.sqrt(variance) + 1e-9), group)[0]


def normalize_part(x: Tensor, p: int, dim: int, group: ShardedAxis) -> Tensor:
    """This rank's part of x over its p-norm along `dim`; p is 1 or 2."""
    data = wide(x)
    if p == 1:
        norm = summed(data.abs().sum(dim, keepdim=True), group).clamp_min(1e-12)
    else:
        norm = summed(data.square().sum(dim, keepdim=True), group).clamp_min(1e-24).sqrt()
    return (data / norm).to(x.dtype)


def _by_channel(y: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    shape = (-1, *[1] * (y.dim() - 2))
    return (y * scale.reshape(shape) + bias.reshape(shape)).to(y.dtype)


def _count(x: Tensor, dims: tuple[int, ...]) -> int:
    count = 1
    for dim in dims:
        count *= x.shape[dim]
    return count


def _standardized(
    x: Tensor, dims: tuple[int, ...], inverse: Inverse, group: ShardedAxis
) -> tuple[Tensor, Tensor, Tensor]:
    """x less its mean over all ranks' parts, times `inverse` of the variance; the mean and the variance."""
    y, mean, variance = _Standardized.apply(wide(x), dims, inverse, group)  # type: ignore[no-untyped-call]
    return y.to(x.dtype), mean, variance


class _Standardized(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, x: Tensor, dims: tuple[int, ...], inverse: Inverse, group: ShardedAxis
    ) -> tuple[Tensor, Tensor, Tensor]:
        variance, mean = (each.double() for each in torch.var_mean(x, dims, correction=0, keepdim=True))
        mean, square = (group.total(torch.stack((mean, variance + mean.square()))) / group.size).unbind()
        variance = (square - mean.square()).clamp_min_(0)
        factor = inverse(variance).to(x.dtype)
        mean, variance = mean.to(x.dtype), variance.to(x.dtype)
        y = (x - mean) * factor
        context.dims, context.group, context.count = dims, group, _count(x, dims) * group.size
        context.save_for_backward(y, factor)
        context.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        y, factor = context.saved_tensors
        gradient = gradients[0]
        sums = torch.stack((gradient.sum(context.dims, keepdim=True), (gradient * y).sum(context.dims, keepdim=True)))
        mean, slope = (context.group.total(sums) / context.count).unbind()
        return (gradient - mean - y * slope) * factor, None, None, None
