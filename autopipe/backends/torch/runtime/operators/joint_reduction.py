"""Reductions over axes of which each rank has a part, that no sum or mean of the ranks' results would give.

Every rank has the result, and the gradients of all copies count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopipe.backends.torch.runtime.operators.joint import ShardedAxis, summed, wide

Dims = tuple[int, ...]


def extreme_part(x: Tensor, dims: Dims, keepdim: bool, largest: bool, group: ShardedAxis) -> Tensor:
    """The largest or smallest over `dims` of all ranks' parts; those that are equal share the gradient."""
    found: Tensor = _Extreme.apply(wide(x), dims, largest, group)  # type: ignore[no-untyped-call]
    return _shaped(found.to(x.dtype), dims, keepdim)


def norm_part(x: Tensor, dims: Dims, keepdim: bool, group: ShardedAxis) -> Tensor:
    """The 2-norm over `dims` of all ranks' parts; that of zeros has no gradient."""
    squares = summed(wide(x).square().sum(dims, keepdim=True), group)
    tiny = torch.finfo(squares.dtype).tiny
    norm = torch.where(squares > 0, squares.clamp_min(tiny).sqrt(), torch.zeros_like(squares))
    return _shaped(norm.to(x.dtype), dims, keepdim)


def log_sum_part(x: Tensor, dims: Dims, keepdim: bool, group: ShardedAxis) -> Tensor:
    """The logarithm of the sum over `dims` of all ranks' parts."""
    return _shaped(summed(wide(x).sum(dims, keepdim=True), group).log().to(x.dtype), dims, keepdim)


def log_sum_exp_part(x: Tensor, dims: Dims, keepdim: bool, group: ShardedAxis) -> Tensor:
    """The logarithm of the sum of exponentials over `dims` of all ranks' parts."""
    data = wide(x)
    largest = group.largest(data.amax(dims, keepdim=True))
    largest = torch.where(largest.isinf(), torch.zeros_like(largest), largest)
    total = summed((data - largest).exp().sum(dims, keepdim=True), group).log() + largest
    return _shaped(total.to(x.dtype), dims, keepdim)


def index_of_extreme_part(x: Tensor, dim: int, keepdim: bool, largest: bool, last: bool, group: ShardedAxis) -> Tensor:
    """Where along `dim` of all ranks' parts the largest or smallest lies: the first or the last place."""
    data = wide(x) if largest else -wide(x)
    extent = x.shape[dim]
    local = extent - 1 - data.flip(dim).argmax(dim, keepdim=True) if last else data.argmax(dim, keepdim=True)
    value = data.gather(dim, local)
    place = local + group.position * extent
    sign = 1 if last else -1
    lowest = torch.full_like(place, torch.iinfo(place.dtype).min)
    found = sign * group.largest(torch.where(value == group.largest(value), sign * place, lowest))
    return found if keepdim else found.squeeze(dim)


def _shaped(x: Tensor, dims: Dims, keepdim: bool) -> Tensor:
    return x if keepdim else x.squeeze(dims)


class _Extreme(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, dims: Dims, largest: bool, group: ShardedAxis) -> Tensor:
        if largest:
            found = group.largest(x.amax(dims, keepdim=True))
        else:
            found = -group.largest(-x.amin(dims, keepdim=True))
        context.dims, context.group = dims, group
        context.save_for_backward(x, found)
        return found

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        x, found = context.saved_tensors
        hit = (x == found).to(x.dtype)
        told = torch.stack((gradients[0], hit.sum(context.dims, keepdim=True)))
        gradient, count = context.group.total(told).unbind()
        return hit * (gradient / count), None, None, None
