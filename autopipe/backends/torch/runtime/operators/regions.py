"""Regions of images, pooled."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def roi_align(
    images: Tensor,
    regions: Tensor,
    owners: Tensor,
    *,
    size: tuple[int, int],
    samples: int,
    scale: float,
    half_pixel: bool,
    largest: bool,
) -> Tensor:
    """Each region [x1, y1, x2, y2] of `images[owner]` as `size` bins of bilinear samples, averaged or the largest.

    `samples` a bin and axis, or as many as the bin has pixels where 0. He et al., "Mask R-CNN", 2017; the largest is
    taken over the four weighted neighbours of every sample, as ONNX defines.
    """
    found = [
        _region(images[int(owner)], region, size, samples, half_pixel, largest)
        for region, owner in zip(regions * scale - (0.5 if half_pixel else 0.0), owners, strict=True)
    ]
    return torch.stack(found) if found else images.new_zeros((0, images.shape[1], *size))


def _region(
    image: Tensor, region: Tensor, size: tuple[int, int], samples: int, half_pixel: bool, largest: bool
) -> Tensor:
    """[c, *size] of one region of one image [c, h, w]."""
    left, top, right, bottom = region.tolist()
    smallest = -math.inf if half_pixel else 1.0
    height, width = max(bottom - top, smallest), max(right - left, smallest)
    rows, row_counts = _samples(top, height, size[0], samples, image)
    columns, column_counts = _samples(left, width, size[1], samples, image)
    low_y, high_y, weight_y, inside_y = _neighbours(rows, image.shape[1])
    low_x, high_x, weight_x, inside_x = _neighbours(columns, image.shape[2])
    inside = (inside_y[:, None] & inside_x).to(image.dtype)
    parts = [
        image[:, y[:, None], x] * (wy[:, None] * wx * inside)
        for y, wy in ((low_y, 1 - weight_y), (high_y, weight_y))
        for x, wx in ((low_x, 1 - weight_x), (high_x, weight_x))
    ]
    bins = (size[0], row_counts, size[1], column_counts)
    merged: Tensor = torch.stack(parts).amax(0) if largest else torch.stack(parts).sum(0)
    binned = merged.reshape(-1, *bins)
    return binned.amax((2, 4)) if largest else binned.mean((2, 4))


def _samples(start: float, extent: float, bins: int, samples: int, like: Tensor) -> tuple[Tensor, int]:
    """Where the samples of all bins lie along one axis, and how many a bin has."""
    count = samples or max(math.ceil(extent / bins), 1)
    places = torch.arange(bins * count, device=like.device, dtype=like.dtype)
    return start + (places + 0.5) * (extent / bins / count), count


def _neighbours(places: Tensor, extent: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The pixels before and behind each place, the weight of the one behind, and whether the place is in the image."""
    inside = (places >= -1.0) & (places <= extent)
    clamped = places.clamp(0, extent - 1)
    low = clamped.floor().long()
    return low, (low + 1).clamp(max=extent - 1), clamped - low, inside
