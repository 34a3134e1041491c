"""Running sums, orderings and one-hot maxima."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def cumsum(data: Tensor, dim: int, *, exclusive: bool, reverse: bool) -> Tensor:
    """Running sums along `dim`; `exclusive` leaves out the element itself, `reverse` runs from the end."""
    return _running(torch.cumsum, 0, data, dim, exclusive=exclusive, reverse=reverse)


def cumprod(data: Tensor, dim: int, *, exclusive: bool, reverse: bool) -> Tensor:
    """Running products along `dim`."""
    return _running(torch.cumprod, 1, data, dim, exclusive=exclusive, reverse=reverse)


def _running(
    run: Callable[..., Tensor], neutral: int, data: Tensor, dim: int, *, exclusive: bool, reverse: bool
) -> Tensor:
    source = data.flip(dim) if reverse else data
    if exclusive:
        first = torch.full_like(source.narrow(dim, 0, 1), neutral)
        source = torch.cat([first, source.narrow(dim, 0, source.shape[dim] - 1)], dim=dim)
    result = run(source, dim=dim, dtype=data.dtype)
    return result.flip(dim) if reverse else result


def top_k(data: Tensor, count: int, dim: int, *, largest: bool) -> tuple[Tensor, Tensor]:
    """The `count` largest or smallest along `dim`, in order, and where they lie.

    Among equals the one with the lower index comes first, which `torch.topk` does not promise.
    """
    source = data.to(torch.int64) if data.dtype in (torch.uint16, torch.uint32, torch.uint64) else data
    values, places = torch.sort(source, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, count).to(data.dtype), places.narrow(dim, 0, count)


def hardmax(data: Tensor, dims: tuple[int, ...]) -> Tensor:
    """One at the first largest element over `dims` (one axis, or all from one on), zero elsewhere."""
    flat = data if len(dims) == 1 else data.flatten(dims[0])
    place = flat.argmax(dim=dims[0], keepdim=True)
    return torch.zeros_like(flat).scatter(dims[0], place, 1).reshape(data.shape)
