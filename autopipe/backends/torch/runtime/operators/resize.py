"""Resizing by any of ONNX's rules for places, weights and edges, one axis after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ResizedAxis = tuple[int, int, float, float, float]
"""Axis, extent after, scale, and where the part that is read starts and ends (0 to 1)."""


def resize(
    x: Tensor,
    axes: Sequence[ResizedAxis],
    mode: str,
    places: str,
    *,
    rounding: str = "round_prefer_floor",
    coefficient: float = -0.75,
    antialias: bool = False,
    exclude_outside: bool = False,
    outside: float = 0.0,
) -> Tensor:
    """x resized along `axes`. `places` names the rule from places of the result to places of x, `rounding` that of
    nearest neighbours, `coefficient` the cubic kernel's (Keys, 1981); `outside` is what lies beyond the part read.
    """
    for resized in axes:
        axis, extent = resized[0], x.shape[resized[0]]
        source = _places(resized, extent, places)
        beyond = (source < 0) | (source > extent - 1)
        if mode == "nearest":
            index = _round(source, rounding).long().clamp(0, extent - 1)
            x = x.index_select(axis, index.to(x.device))
        else:
            support = 1 if mode == "linear" else 2
            taps, weights = _taps(source, support, coefficient, min(resized[2], 1.0) if antialias else 1.0)
            if exclude_outside:
                weights = weights * ((taps >= 0) & (taps < extent))
                weights = weights / weights.sum(1, keepdim=True)
            x = _weighted(x, axis, taps.clamp(0, extent - 1), weights)
        if places == "tf_crop_and_resize" and bool(beyond.any()):
            x = x.masked_fill(_along(beyond.to(x.device), axis, x.dim()), outside)
    return x


def _places(resized: ResizedAxis, extent: int, rule: str) -> Tensor:
    """Where each element of the result lies in x, as float64."""
    _, count, scale, start, stop = resized
    spots = torch.arange(count, dtype=torch.float64)
    width = scale * extent
    if rule == "align_corners":
        return torch.zeros_like(spots) if width == 1 else spots * (extent - 1) / (width - 1)
    if rule == "asymmetric":
        return spots / scale
    if rule == "tf_half_pixel_for_nn":
        return (spots + 0.5) / scale
    if rule == "tf_crop_and_resize":
        span = (stop - start) * (extent - 1)
        return start * (extent - 1) + (spots * 0 + span / 2 if width == 1 else spots * span / (width - 1))
    if rule == "pytorch_half_pixel" and width == 1:
        return torch.full_like(spots, -0.5)
    shift = extent / 2 * (1 - count / width) if rule == "half_pixel_symmetric" else 0.0
    return shift + (spots + 0.5) / scale - 0.5


def _round(places: Tensor, rounding: str) -> Tensor:
    if rounding == "round_prefer_floor":
        return torch.ceil(places - 0.5)
    if rounding == "round_prefer_ceil":
        return torch.floor(places + 0.5)
    return torch.floor(places) if rounding == "floor" else torch.ceil(places)


def _taps(places: Tensor, support: int, coefficient: float, stretch: float) -> tuple[Tensor, Tensor]:
    """Elements of x that each element of the result reads, and their weights: two tensors [result, taps]."""
    first = int(torch.floor(torch.tensor(-support / stretch, dtype=torch.float64))) + 1
    offsets = torch.arange(first, 2 - first)
    base = torch.ceil(places) - 1
    distance = ((offsets - (places - base)[:, None]) * stretch).abs()
    if support == 1:
        weights = (1 - distance).clamp(min=0)
    else:
        near = ((coefficient + 2) * distance - (coefficient + 3)) * distance**2 + 1
        far = ((coefficient * distance - 5 * coefficient) * distance + 8 * coefficient) * distance - 4 * coefficient
        weights = torch.where(distance <= 1, near, torch.where(distance < 2, far, torch.zeros_like(far)))
    return base.long()[:, None] + offsets, weights / weights.sum(1, keepdim=True)


def _weighted(x: Tensor, axis: int, taps: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of elements of x, which is floating, along an axis."""
    read: Tensor = x.index_select(axis, taps.reshape(-1).to(x.device)).unflatten(axis, taps.shape)
    shape = [1] * axis + list(weights.shape) + [1] * (x.dim() - axis - 1)
    factors = weights.to(x.device, x.dtype).reshape(shape)
    return (read * factors).sum(axis + 1)


def _along(values: Tensor, axis: int, rank: int) -> Tensor:
    return values.reshape([-1 if place == axis else 1 for place in range(rank)])
