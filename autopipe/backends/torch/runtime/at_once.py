"""Collectives of tensors in host memory over gloo, in one step: every rank sends to all others at once.

Gloo's own go round a ring, and its reduce-scatter sets one up each time. Where ranks share processors, each step of a
ring waits until the next rank has one. `benchmarks/gloo_collectives.py` holds both ways against each other.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from autopipe.backends.torch.runtime.pending import PendingRecv, PendingReduce
from autopipe.ir.errors import LaunchError

_SMALL_BYTES = 1 << 17
"""Tensors up to here are summed by sending each rank's to all: larger ones would be sent too often."""


def goes_at_once(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """True if a collective of the tensor is small enough for a direct exchange."""
    return tensor.device.type == "cpu" and dist.get_backend(group) == "gloo"


def is_summed_at_once(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """True if `start_sum` is the way to add the tensor up."""
    return tensor.nbytes <= _SMALL_BYTES and goes_at_once(tensor, group)


def everyones(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The tensors of all ranks of the group, by rank; [ranks, ...]."""
    return _swap(_for_each(tensor, group), group).wait()


def start_sum(
    tensor: torch.Tensor, group: dist.ProcessGroup | None, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> PendingReduce:
    """Start adding up all ranks' tensors, or take what else `how` says of them."""
    return PendingReduce(_swap(_for_each(tensor, group), group), how)


def start_sum_of_rows(rows: torch.Tensor, group: dist.ProcessGroup | None) -> PendingReduce:
    """Start adding up, of all ranks' [ranks, ...], the rows that are this rank's."""
    return PendingReduce(_swap(rows, group), dist.ReduceOp.SUM)


def _for_each(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    return tensor.detach().expand(dist.get_world_size(group), *tensor.shape)


def _swap(rows: torch.Tensor, group: dist.ProcessGroup | None) -> PendingRecv:
    """Start sending row i to rank i; what arrives is row i from rank i."""
    rows = rows.contiguous()
    received = torch.empty_like(rows)
    work = dist.all_to_all_single(received, rows, group=group, async_op=True)
    if work is None:
        raise LaunchError("this rank is not in the group that exchanges")
    return PendingRecv(work, received, received.device, rows)
