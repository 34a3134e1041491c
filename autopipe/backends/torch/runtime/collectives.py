"""Exchanges inside a stage's group, as generated code calls them: differentiable, each one's backward its transpose.

The ranks of a group compute one function together. A rank's gradient of a tensor it holds a copy of is its share:
the shares of all copies add up to the gradient. See `autopipe.passes.lower.shard`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class Group:
    """A stage's group as seen from one of its ranks."""

    def __init__(self, ranks: tuple[int, ...], rank: int, process_group: dist.ProcessGroup | None) -> None:
        self.size = len(ranks)
        self.position = ranks.index(rank)
        self.order = tuple(sorted(ranks).index(each) for each in ranks)
        """Where each position's part is in what the process group gathers, which is by rank."""
        self.process_group = process_group

    def all_reduce(self, tensor: torch.Tensor, average: bool = False) -> torch.Tensor:
        """The sum, or with `average` the mean, of all ranks' tensors."""
        total: torch.Tensor = _AllReduce.apply(tensor, self)  # type: ignore[no-untyped-call]
        return total / self.size if average else total

    def all_gather(self, tensor: torch.Tensor, dimension: int) -> torch.Tensor:
        """The ranks' shards joined along `dimension`."""
        gathered: torch.Tensor = _AllGather.apply(tensor, self, dimension)  # type: ignore[no-untyped-call]
        return gathered

    def reduce_scatter(self, tensor: torch.Tensor, dimension: int, average: bool = False) -> torch.Tensor:
        """This rank's shard along `dimension` of the sum, or with `average` the mean, of all ranks' tensors."""
        total: torch.Tensor = _ReduceScatter.apply(tensor, self, dimension)  # type: ignore[no-untyped-call]
        return total / self.size if average else total

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, as a number without a gradient of its own."""
        return _sum(tensor.detach(), self)

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest of all ranks' tensors, element by element, as a number without a gradient of its own."""
        return _reduced(tensor.detach(), self, dist.ReduceOp.MAX)

    def slice(self, tensor: torch.Tensor, dimension: int) -> torch.Tensor:
        """This rank's shard of a tensor that every rank holds whole."""
        extent = tensor.shape[dimension] // self.size
        return tensor.narrow(dimension, self.position * extent, extent)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        context.group = group
        return _sum(tensor, group)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(gradients[0], context.group), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, group: Group, dimension: int) -> torch.Tensor:
        context.group, context.dimension = group, dimension
        return _gathered(tensor, group, dimension)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _scattered(gradients[0], context.group, context.dimension), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, group: Group, dimension: int) -> torch.Tensor:
        context.group, context.dimension = group, dimension
        return _scattered(tensor, group, dimension)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _gathered(gradients[0], context.group, context.dimension), None, None


def _sum(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    return _reduced(tensor, group, dist.ReduceOp.SUM)


def _reduced(tensor: torch.Tensor, group: Group, how: dist.ReduceOp.RedOpType) -> torch.Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, how, group=group.process_group)
    return total


def _gathered(tensor: torch.Tensor, group: Group, dimension: int) -> torch.Tensor:
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size)]
    dist.all_gather(parts, tensor.contiguous(), group=group.process_group)
    return torch.cat([parts[place] for place in group.order], dimension)


def _scattered(tensor: torch.Tensor, group: Group, dimension: int) -> torch.Tensor:
    if tensor.is_cuda and dist.get_backend(group.process_group) == "gloo":  # It scatters tensors of the host alone.
        return group.slice(_sum(tensor, group), dimension).contiguous()
    parts = tensor.chunk(group.size, dimension)
    by_rank = [parts[group.order.index(place)].contiguous() for place in range(group.size)]
    shard = torch.empty_like(by_rank[0])
    dist.reduce_scatter(shard, by_rank, group=group.process_group)
    return shard
