"""Quantised numbers: between floats and integers, and products of integers (exact, computed in float64)."""

from __future__ import annotations

import torch
from torch import Tensor


def quantize_linear(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    dtype: torch.dtype,
    axis: int = 1,
    block_size: int = 0,
    precision: torch.dtype | None = None,
) -> Tensor:
    """`saturate(round(x / scale) + zero_point)`, halves to even; one scale a tensor, a slice of `axis`, or a block."""
    spread = _spread(scale, x, axis, block_size)
    ratio = x / spread if precision is None else x.to(precision) / spread.to(precision)
    rounded = torch.round(ratio.float())
    if zero_point is not None:
        rounded = rounded + _spread(zero_point, x, axis, block_size).float()
    return _saturate(rounded, dtype)


def dequantize_linear(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, dtype: torch.dtype, axis: int = 1, block_size: int = 0
) -> Tensor:
    """`(x - zero_point) * scale`, with scale and zero point as in `quantize_linear`."""
    difference = x.float()
    if zero_point is not None:
        difference = difference - _spread(zero_point, x, axis, block_size).float()
    return (difference * _spread(scale, x, axis, block_size)).to(dtype)


def dynamic_quantize_linear(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x as uint8, its scale, and its zero point, from the range of x widened to hold 0."""
    low, high = torch.clamp(torch.amin(x), max=0), torch.clamp(torch.amax(x), min=0)
    span = high - low
    scale = torch.where(span == 0, torch.ones_like(span), span) / 255
    zero_point = torch.round(torch.clamp(-low / scale, 0, 255))
    return _saturate(torch.round(x / scale) + zero_point, torch.uint8), scale, zero_point.to(torch.uint8)


def matmul_whole(a: Tensor, b: Tensor) -> Tensor:
    """The product of stacks of integer matrices, in their own type; CUDA has none, so there the CPU computes it."""
    return torch.matmul(a.cpu(), b.cpu()).to(a.device) if a.is_cuda else torch.matmul(a, b)


def matmul_integer(a: Tensor, b: Tensor, a_zero_point: Tensor | None, b_zero_point: Tensor | None) -> Tensor:
    """`(a - a_zero_point) @ (b - b_zero_point)` as int32; zero points by row of a and by column of b."""
    return torch.matmul(_centred(a, a_zero_point, -1), _centred(b, b_zero_point, -2)).to(torch.int32)


def matmul_quantized(
    a: Tensor,
    a_scale: Tensor,
    a_zero_point: Tensor,
    b: Tensor,
    b_scale: Tensor,
    b_zero_point: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The product of two quantised matrices, quantised."""
    product = torch.matmul(_centred(a, a_zero_point, -1), _centred(b, b_zero_point, -2))
    ratio = a_scale.double() * b_scale.double() / scale.double()
    return _saturate(torch.round(product * ratio) + zero_point, dtype)


def centre(x: Tensor, zero_point: Tensor | None) -> Tensor:
    """`x - zero_point` in float64, where it is exact; a vector of zero points goes along axis 0."""
    exact = x.double()
    if zero_point is None:
        return exact
    shape = (-1, *(1 for _ in range(x.dim() - 1))) if zero_point.numel() > 1 else ()
    return exact - zero_point.double().reshape(shape)


def requantize(exact: Tensor, ratio: Tensor, zero_point: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A sum of products [n, c, ...] times `ratio` (one number or one a channel), quantised."""
    shape = (-1, *(1 for _ in range(exact.dim() - 2))) if ratio.numel() > 1 else ()
    rounded = torch.round(exact * ratio.double().reshape(shape))
    return _saturate(rounded if zero_point is None else rounded + zero_point, dtype)


def _centred(x: Tensor, zero_point: Tensor | None, along: int) -> Tensor:
    """`x - zero_point`, a vector of zero points holding one for each slice across `along`."""
    exact = x.double()
    if zero_point is None:
        return exact
    point = zero_point.double()
    return exact - (point.unsqueeze(along) if point.dim() == 1 and point.numel() > 1 else point)


def _spread(values: Tensor, x: Tensor, axis: int, block_size: int) -> Tensor:
    """Scales or zero points in a shape that broadcasts with x."""
    if values.numel() == 1:
        return values.reshape(())
    if block_size:
        extent = x.shape[axis]
        return values.repeat_interleave(block_size, axis).narrow(axis, 0, extent)
    if values.dim() == 1:
        return values.reshape([-1 if place == axis % x.dim() else 1 for place in range(x.dim())])
    return values


def _saturate(rounded: Tensor, dtype: torch.dtype) -> Tensor:
    limits = torch.iinfo(dtype)
    return torch.clamp(rounded, limits.min, limits.max).to(torch.int32).to(dtype)
