"""Matmuls and lookups with weights that are packed integers of a few bits. A few rows of weights
are unpacked at a time; backward unpacks them again.

Packed data have blocks along each row; each block has one scale and one zero point.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopipe.backends.torch.runtime.communication.collectives import Group
from autopipe.backends.torch.runtime.operators.sharded import nonnegative_indices

_MAX_UNPACKED_WEIGHTS = 1 << 22
"""Maximum number of weights that are unpacked at one time (at least one row)."""


def unpack_bits(data: Tensor, bits: int) -> Tensor:
    """Return the unsigned integers of `bits` bits that are packed in the bytes of the last
    dimension. The lowest bits of a byte come first.
    """
    if bits == 8:
        return data
    parts = [(data >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, -1).flatten(-2)


def _dequantize_blocks(data: Tensor, scales: Tensor, points: Tensor | None, bits: int) -> Tensor:
    """Return the dequantized values [rows, values] of packed blocks [rows, blocks, bytes] with
    scales [rows, blocks]. Zero points `points` of type uint8 are packed; without zero points, the
    zero point is 2^(bits - 1).
    """
    if points is None:
        return (
            (unpack_bits(data, bits).to(scales.dtype) - (1 << bits - 1)) * scales.unsqueeze(-1)
        ).flatten(-2)
    if points.dtype == torch.uint8:
        points = unpack_bits(points, bits)[..., : scales.shape[-1]]
    numbers = unpack_bits(data, bits).to(scales.dtype) - points.to(scales.dtype).unsqueeze(-1)
    return (numbers * scales.unsqueeze(-1)).flatten(-2)


def _dequantize_rows(
    data: Tensor,
    scales: Tensor,
    points: Tensor | None,
    bits: int,
    width: int,
    groups: Tensor | None,
) -> Tensor:
    """Return the dequantized values [rows, width] of rows of packed weights `data` [rows, blocks,
    bytes]. If `groups` is given, it contains, for each column, the index of the block whose scale
    and zero point apply.
    """
    if groups is None:
        return _dequantize_blocks(data, scales, points, bits)[:, :width]
    if points is not None and points.dtype == torch.uint8:
        points = unpack_bits(points, bits)[:, : scales.shape[1]]
    numbers = unpack_bits(data, bits).flatten(1)[:, :width].to(scales.dtype)
    chosen = groups.to(torch.int64)
    middle = 1 << bits - 1 if points is None else points.to(scales.dtype)[:, chosen]
    return (numbers - middle) * scales[:, chosen]


class _PackedMatmul(torch.autograd.Function):
    """x Wᵀ for packed weights W. Only the packed weights are saved for backward."""

    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        data: Tensor,
        scales: Tensor,
        points: Tensor | None,
        groups: Tensor | None,
        bits: int,
    ) -> Tensor:
        context.save_for_backward(data, scales, points, groups)
        context.bits = bits
        context.width = x.shape[-1]
        context.dtype = x.dtype
        step = max(1, _MAX_UNPACKED_WEIGHTS // max(1, x.shape[-1]))
        found = []
        for first in range(0, len(data), step):
            own = slice(first, first + step)
            part = None if points is None else points[own]
            weight = _dequantize_rows(data[own], scales[own], part, bits, x.shape[-1], groups)
            found.append(F.linear(x, weight.to(x.dtype)))
        return found[0] if len(found) == 1 else torch.cat(found, -1)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        data, scales, points, groups = context.saved_tensors
        step = max(1, _MAX_UNPACKED_WEIGHTS // max(1, context.width))
        total: Tensor | None = None
        for first in range(0, len(data), step):
            own = slice(first, first + step)
            part = None if points is None else points[own]
            weight = _dequantize_rows(
                data[own], scales[own], part, context.bits, context.width, groups
            )
            share = torch.matmul(gradients[0][..., own], weight.to(gradients[0].dtype))
            total = share if total is None else total + share
        return None if total is None else total.to(context.dtype), None, None, None, None, None


def matmul_nbits(
    x: Tensor,
    data: Tensor,
    scales: Tensor,
    points: Tensor | None = None,
    groups: Tensor | None = None,
    *,
    bits: int,
) -> Tensor:
    """Return x Wᵀ. The weights W are packed integers of `bits` bits: blocks `data` [rows, blocks,
    bytes] with scales [rows, blocks] and zero points.

    Zero points `points` of type uint8 are packed, other types are not. Without zero points, the
    zero point is 2^(bits - 1). If `groups` is given, it contains, for each column of W, the index
    of the block whose scale and zero point apply.
    """
    found: Tensor = _PackedMatmul.apply(  # type: ignore[no-untyped-call]
        x, data, scales, points, groups, bits
    )
    return found


def gather_blocks(
    data: Tensor,
    indices: Tensor,
    scales: Tensor,
    points: Tensor | None,
    group: Group | None = None,
    *,
    bits: int,
) -> Tensor:
    """Return the dequantized rows of a packed table at `indices`. Rows at indices that are out of
    range are zeros. With `group`, the table is sharded along its rows, and rows of other ranks are
    zeros.
    """
    rows = len(data)
    places = nonnegative_indices(indices, rows * (1 if group is None else group.size))
    places = places if group is None else places - group.position * rows
    mine = (places >= 0) & (places < rows)
    own = places.masked_fill(~mine, 0).reshape(-1)
    picked = data.index_select(0, own).unflatten(1, (scales.shape[1], -1))
    part = None if points is None else points.index_select(0, own)
    found = _dequantize_blocks(picked, scales.index_select(0, own), part, bits)
    return found.reshape(*indices.shape, -1).masked_fill(~mine.unsqueeze(-1), 0)


def dequantize_packed(data: Tensor, scales: Tensor, points: Tensor | None, bits: int) -> Tensor:
    """Return the dequantized values of rows of packed integers. There is one scale per row, [rows],
    or one per block, [rows, blocks]. Zero points of type uint8 are packed.
    """
    if scales.dim() == 1:
        if points is not None:
            points = unpack_bits(points, bits)[: len(scales)].to(scales.dtype).unsqueeze(-1)
        scales = scales.unsqueeze(-1)
    return _dequantize_blocks(data.unflatten(-1, (scales.shape[-1], -1)), scales, points, bits)
