"""Updating parameters in shares (ZeRO-1): each of the ranks that hold them keeps the optimizer's state of one share.

Rajbhandari, Rasley, Ruwase, He: "ZeRO: Memory optimizations toward training trillion parameter models" (SC 2020),
section 5.1. Updates are element by element, so a share is any part of a bucket's row: see `autopipe.ir.program`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopipe.backends.torch.runtime.pending import PendingRecv, PendingReduce
from autopipe.backends.torch.runtime.transport import Transport
from autopipe.ir.program import Bucket, ElementRange


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerShard:
    """A tensor that the optimizer updates in place of parameters, and which elements of them it is."""

    tensor: torch.Tensor
    runs: tuple[ElementRange, ...]


class ShardedBucket:
    """A bucket of which each rank gets a share of the sums, and updates that.

    Its parameters lie in one row, and the share is a part of it: what is gathered after an update is in place.
    """

    def __init__(self, transport: Transport, bucket: Bucket, parameters: list[torch.Tensor]) -> None:
        self.bucket = bucket
        self.parameters = parameters
        self.runs = tuple(bucket.runs(transport.rank))
        self._transport = transport
        self._row = parameters[0].detach().new_zeros(bucket.elements)
        for parameter, place in zip(parameters, self._places(self._row), strict=True):
            parameter.data = place.copy_(parameter.detach())
        self.share = self._row.chunk(len(bucket.ranks))[bucket.ranks.index(transport.rank)]
        self._coming: PendingRecv | PendingReduce | None = None

    def _places(self, row: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' parts of a row."""
        return [
            row[start : start + parameter.numel()].view_as(parameter)
            for start, parameter in zip(self.bucket.starts, self.parameters, strict=True)
        ]

    def start(self) -> None:
        """Take the parameters' gradients and send them off."""
        gradients = torch.zeros_like(self._row)
        for parameter, place in zip(self.parameters, self._places(gradients), strict=True):
            if parameter.grad is not None:
                place.copy_(parameter.grad)
                parameter.grad = None  # It is in the message now.
        self._coming = self._transport.start_reduce_scatter(gradients, self.bucket.ranks)

    def finish(self) -> None:
        """Wait for the sums, and make them the share's gradient."""
        assert self._coming is not None
        self.share.grad = self._coming.wait()
        self._coming = None

    def gather(self) -> None:
        """Get the other ranks' shares of the parameters."""
        self._transport.traffic["parameter"] += self._row.nbytes
        self._transport.gather(self._row, self.bucket.ranks)

    def gradients(self) -> dict[int, torch.Tensor]:
        """The gradients by parameter, whole. All of the bucket's ranks together; not counted as a step's."""
        assert self.share.grad is not None
        row = torch.zeros_like(self._row)
        row.chunk(len(self.bucket.ranks))[self.bucket.ranks.index(self._transport.rank)].copy_(self.share.grad)
        self._transport.gather(row, self.bucket.ranks)
        places = zip(self.bucket.blocks, self._places(row), strict=True)
        return {block.parameter: place for block, place in places}
