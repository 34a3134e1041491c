"""Operators that several ranks compute together, each with its part of one axis or of several.

Parts are equal and lie in the order of the ranks; they are never gathered. What the ranks tell one another is a number
or two for each row: see `autopipe.ir.ops.operator`. The module holds what all of them share.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class ShardedAxis(Protocol):
    """A group as these operators see it."""

    size: int
    position: int

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over the group, without a gradient."""
        ...

    def largest(self, tensor: Tensor) -> Tensor:
        """The largest over the group, without a gradient."""
        ...

    def all_gather(self, tensor: Tensor, dimension: int) -> Tensor:
        """The ranks' parts joined along a dimension; backward adds up the gradients of all ranks' copies."""
        ...


def summed(tensor: Tensor, group: ShardedAxis) -> Tensor:
    """The sum over the group, which every rank goes on with: what comes back to all of them is added up as well."""
    total: Tensor = _Sum.apply(tensor, group)  # type: ignore[no-untyped-call]
    return total


def once(tensor: Tensor, group: ShardedAxis) -> Tensor:
    """`tensor` on the first rank of the group and zeros on the others: what is added once to shares of a sum."""
    everywhere = torch.ones((), dtype=torch.bool, device=tensor.device)
    return tensor if group.position == 0 else tensor.masked_fill(everywhere, 0)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, group: ShardedAxis) -> Tensor:
        context.group = group
        return group.total(tensor)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return context.group.total(gradients[0]), None


def own_places(places: Tensor, extent: int, group: ShardedAxis) -> tuple[Tensor, Tensor]:
    """Places counted from the start of this rank's part, 0 where they are in another, and whether they are in it."""
    local = places - group.position * extent
    mine = (local >= 0) & (local < extent)
    return local.masked_fill(~mine, 0), mine


def precise(scores: Tensor) -> Tensor:
    """Under autocast softmaxes run in single precision, as torch's own do."""
    narrow = scores.dtype in (torch.bfloat16, torch.float16)
    return scores.float() if narrow and torch.is_autocast_enabled(scores.device.type) else scores


def wide(x: Tensor) -> Tensor:
    """Statistics of half precision are taken in single."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
