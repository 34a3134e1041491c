"""Reading and writing at places that may count from the end, as ONNX allows and torch does not.

What is written takes the type of what it is written into: under autocast the two may differ, which torch refuses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopipe.backends.torch.runtime.operators.joint import ShardedAxis


def gather_elements(data: Tensor, dim: int, indices: Tensor) -> Tensor:
    """`torch.gather` with indices that may be negative."""
    return torch.gather(data, dim, _from_front(indices, data.shape[dim]))


def _from_front(indices: Tensor, extent: int) -> Tensor:
    indices = indices.to(torch.int64)
    return torch.where(indices < 0, indices + extent, indices)


def gather_nd(data: Tensor, indices: Tensor, batch: int) -> Tensor:
    """Slices of `data` at the tuples in the last dimension of `indices`; the first `batch` dimensions are shared."""
    shared = data.shape[:batch]
    source = data.reshape(-1, *data.shape[batch:])
    places = indices.reshape(source.shape[0], -1, indices.shape[-1])
    sample = torch.arange(source.shape[0], device=data.device).unsqueeze(1)
    result = source[(sample, *places.unbind(-1))]
    return result.reshape(*shared, *indices.shape[batch:-1], *result.shape[2:])


def scatter_elements(data: Tensor, dim: int, indices: Tensor, updates: Tensor, reduction: str | None = None) -> Tensor:
    """`data` with `updates` written, or combined by `sum`, `prod`, `amax` or `amin`, at `indices` along `dim`."""
    places, updates = _from_front(indices, data.shape[dim]), updates.to(data.dtype)
    if reduction is None:
        return data.scatter(dim, places, updates)
    return data.scatter_reduce(dim, places, updates, reduction)


def scatter_nd(data: Tensor, indices: Tensor, updates: Tensor, reduction: str | None = None) -> Tensor:
    """`data` with slices `updates` written, or combined, at the tuples in the last dimension of `indices`."""
    places, updates = indices.unbind(-1), updates.to(data.dtype)
    if reduction in (None, "sum"):
        return data.index_put(places, updates, accumulate=reduction == "sum")
    depth = indices.shape[-1]
    flat = torch.zeros(indices.shape[:-1], dtype=torch.int64, device=data.device)
    for extent, place in zip(data.shape[:depth], places, strict=True):
        flat = flat * extent + _from_front(place, extent)
    rest = int(data[(0,) * depth].numel())
    rows = flat.reshape(-1, 1).expand(-1, rest)
    result = data.reshape(-1, rest).scatter_reduce(0, rows, updates.reshape(-1, rest), reduction)
    return result.reshape(data.shape)


def tensor_scatter(past: Tensor, update: Tensor, start: Tensor | None, dim: int, *, circular: bool) -> Tensor:
    """A cache with `update` written along `dim`, for each sample (dimension 0) from its own `start` on."""
    places = torch.arange(update.shape[dim], device=past.device).expand(past.shape[0], -1)
    if start is not None:
        places = places + start.unsqueeze(1)
    if circular:
        places = places.remainder(past.shape[dim])
    shape = [1] * past.dim()
    shape[0], shape[dim] = places.shape
    return past.scatter(dim, places.reshape(shape).expand(update.shape), update.to(past.dtype))


def one_hot(indices: Tensor, depth: int, values: Tensor, dim: int, group: ShardedAxis | None = None) -> Tensor:
    """`values[1]` at each index along a new dimension `dim`, `values[0]` elsewhere and for indices out of range.

    With `group` this rank's `depth` places of that dimension.
    """
    first, whole = (0, depth) if group is None else (group.position * depth, group.size * depth)
    places = indices.to(torch.int64).unsqueeze(dim)
    classes = torch.arange(depth, device=indices.device).reshape([-1] + [1] * (indices.dim() - dim))
    hit = (torch.where(places < 0, places + whole, places)) == classes + first
    return torch.where(hit, values[1], values[0])
