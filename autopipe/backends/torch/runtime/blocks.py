"""Tensors that travel in blocks."""

from __future__ import annotations

import torch

from autopipe.backends.torch.runtime.roots import OutputEdge
from autopipe.backends.torch.runtime.wiring import Slices

Block = tuple[torch.Tensor, Slices | None]
"""A block of a tensor, and where in it; None for all of it."""

Form = tuple[torch.dtype, tuple[int, ...]]
"""A tensor's type and shape."""


def extents(box: Slices) -> tuple[int, ...]:
    """The shape of a block."""
    return tuple(stop - start for start, stop in box)


def part(tensor: torch.Tensor, box: Slices | None) -> torch.Tensor:
    """The block of a tensor, as a view."""
    return tensor if box is None else tensor[tuple(slice(*each) for each in box)]


def joined(pieces: list[Block], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor that pieces make up."""
    if len(pieces) == 1 and pieces[0][1] is None:
        return pieces[0][0]
    whole = torch.empty(shape, dtype=dtype, device=pieces[0][0].device)
    for tensor, box in pieces:
        part(whole, box).copy_(tensor)
    return whole


def added(pieces: list[Block], root: OutputEdge) -> torch.Tensor:
    """The sum of a result's gradients, each of a block; blocks that no one uses have gradient zero."""
    if len(pieces) == 1 and pieces[0][1] is None:
        return pieces[0][0]
    total = torch.zeros(root.shape, dtype=root.dtype, device=root.device)
    for tensor, box in pieces:
        part(total, box).add_(tensor)
    return total
