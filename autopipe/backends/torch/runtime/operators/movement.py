"""Paddings, reversals and selections."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def pad(data: Tensor, pads: Sequence[tuple[int, int]], mode: str) -> Tensor:
    """Elements added before and after each dimension (negative counts: taken away) by `reflect`, `edge` or `wrap`."""
    for dim, (before, after) in enumerate(pads):
        if (before, after) != (0, 0):
            places = _places(data.shape[dim], before, after, mode, data.device)
            data = data.index_select(dim, places)
    return data


def _places(extent: int, before: int, after: int, mode: str, device: torch.device) -> Tensor:
    places = torch.arange(-before, extent + after, device=device)
    if mode == "edge":
        return places.clamp(0, extent - 1)
    if mode == "wrap":
        return places.remainder(extent)
    period = max(2 * (extent - 1), 1)
    places = places.remainder(period)
    return torch.where(places < extent, places, period - places)


def reverse_sequence(data: Tensor, lengths: Tensor, time: int, batch: int) -> Tensor:
    """The first `lengths[i]` steps of sample i turned round, the rest as they are."""
    steps = torch.arange(data.shape[time], device=data.device)
    count = lengths.to(torch.int64).unsqueeze(1)
    places = torch.where(steps < count, count - 1 - steps, steps)
    if batch > time:
        places = places.T
    shape = [1] * data.dim()
    shape[time], shape[batch] = data.shape[time], data.shape[batch]
    return data.gather(time, places.reshape(shape).expand(data.shape))


def compress(data: Tensor, condition: Tensor, dim: int | None) -> Tensor:
    """Slices along `dim` (elements, where it is None) for which the condition holds; a short one is false behind."""
    source, dim = (data.flatten(), 0) if dim is None else (data, dim)
    return source.index_select(dim, condition.nonzero().squeeze(1))


def col2im(
    data: Tensor,
    image: tuple[int, ...],
    block: tuple[int, ...],
    *,
    dilations: tuple[int, ...],
    strides: tuple[int, ...],
    pads: tuple[int, ...],
) -> Tensor:
    """Patches of shape `block`, `[batch, channels · points, positions]`, added up into images of shape `image`."""
    rank = len(block)
    padded = [image[i] + pads[i] + pads[i + rank] for i in range(rank)]
    counts = [(padded[i] - dilations[i] * (block[i] - 1) - 1) // strides[i] + 1 for i in range(rank)]
    flat = torch.zeros((), dtype=torch.int64, device=data.device)
    for i in range(rank):
        inside = torch.arange(block[i], device=data.device) * dilations[i]
        places = torch.arange(counts[i], device=data.device) * strides[i]
        shape = [1] * (2 * rank)
        shape[i], shape[rank + i] = block[i], counts[i]
        flat = flat * padded[i] + (inside.unsqueeze(1) + places).reshape(shape)
    total, channels = math.prod(padded), data.shape[1] // math.prod(block)
    source = data.reshape(data.shape[0], channels, -1)
    result = data.new_zeros(data.shape[0], channels, total).index_add(2, flat.flatten(), source)
    result = result.reshape(data.shape[0], channels, *padded)
    for i in range(rank):
        result = result.narrow(2 + i, pads[i], image[i])
    return result
