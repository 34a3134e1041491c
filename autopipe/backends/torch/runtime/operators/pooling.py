"""Pooling with uneven pads, holes, powers, or indices. Pads are in the order of `F.pad`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

Extents = tuple[int, ...]
_AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _windows(padded: Tensor, kernel: Extents, strides: Extents, dilations: Extents) -> Tensor:
    """[n, c, *o, *k]: a view of every window's elements."""
    for axis, (size, stride, dilation) in enumerate(zip(kernel, strides, dilations, strict=True), 2):
        padded = padded.unfold(axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
    return padded


def _last(count: int) -> Extents:
    return tuple(range(-count, 0))


def average_pool(
    x: Tensor, kernel: Extents, strides: Extents, dilations: Extents, pads: Extents, counted: Extents
) -> Tensor:
    """Mean of each window of x padded by `pads`; of those pads only what lies within `counted` is counted."""
    ones = F.pad(torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype, device=x.device), counted, value=1.0)
    rest = tuple(pad - known for pad, known in zip(pads, counted, strict=True))
    settings = (kernel, strides, dilations)
    return _window_means(F.pad(x, pads), *settings) / _window_means(F.pad(ones, rest), *settings)


def _window_means(padded: Tensor, kernel: Extents, strides: Extents, dilations: Extents) -> Tensor:
    if set(dilations) == {1}:
        return _AVERAGE[len(kernel)](padded, kernel, strides)
    return _windows(padded, kernel, strides, dilations).mean(_last(len(kernel)))


def lp_pool(x: Tensor, kernel: Extents, strides: Extents, dilations: Extents, pads: Extents, power: int) -> Tensor:
    """p-norm of each window of x padded by `pads`."""
    windows = _windows(F.pad(x, pads), kernel, strides, dilations)
    norms: Tensor = torch.linalg.vector_norm(windows, power, _last(len(kernel)))
    return norms


def max_pool_with_indices(
    x: Tensor, kernel: Extents, strides: Extents, dilations: Extents, pads: Extents, order: int
) -> tuple[Tensor, Tensor]:
    """Largest of each window and its index in the whole of x, laid out by rows (`order` 0) or columns (1)."""
    values = x if x.is_floating_point() else x.float()
    rank = len(kernel)
    windows = _windows(F.pad(values, pads, value=-math.inf), kernel, strides, dilations).flatten(-rank)
    largest, places = windows.max(-1)
    strides_of_x = _strides(x.shape, order)
    index = torch.zeros(x.shape, dtype=torch.int64, device=x.device)
    for axis, stride in enumerate(strides_of_x):
        count = torch.arange(x.shape[axis], device=x.device) * stride
        index += count.reshape([-1 if place == axis else 1 for place in range(x.dim())])
    indices = _windows(F.pad(index, pads), kernel, strides, dilations).flatten(-rank)
    found = torch.gather(indices, -1, places.unsqueeze(-1)).squeeze(-1)
    return largest.to(x.dtype), found


def _strides(shape: torch.Size, order: int) -> list[int]:
    """Distance between neighbours along each axis; `order` 1 has the first spatial axis innermost."""
    spatial = range(2, len(shape))
    strides = [0] * len(shape)
    distance = 1
    for axis in (*(spatial if order else reversed(spatial)), 1, 0):
        strides[axis] = distance
        distance *= shape[axis]
    return strides


def max_unpool(x: Tensor, indices: Tensor, inferred: Extents, shape: Extents) -> Tensor:
    """Zeros of `inferred` with x at `indices` into it, then padded at the end to `shape`."""
    flat = torch.zeros(math.prod(inferred), dtype=x.dtype, device=x.device)
    filled = flat.scatter(0, indices.reshape(-1), x.reshape(-1)).reshape(inferred)
    return F.pad(filled, [pad for axis in reversed(range(len(shape))) for pad in (0, shape[axis] - inferred[axis])])
