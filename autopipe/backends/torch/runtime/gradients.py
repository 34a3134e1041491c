"""Adding up gradients over the ranks that hold the same block of a parameter: in buckets, overlapped with backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch

from autopipe.backends.torch.runtime.pending import PendingRecv, PendingReduce
from autopipe.backends.torch.runtime.shares import OptimizerShard, ShardedBucket
from autopipe.backends.torch.runtime.transport import Transport
from autopipe.ir.program import Bucket


class ReducedBucket(Protocol):
    """A bucket of a rank, and what is done with its gradients."""

    bucket: Bucket
    parameters: list[torch.Tensor]

    def start(self) -> None:
        """Take the parameters' gradients and send them off."""

    def finish(self) -> None:
        """Wait for the sums, and put them in place."""


class WholeBucket:
    """A bucket of which each rank gets all sums."""

    def __init__(self, transport: Transport, bucket: Bucket, parameters: list[torch.Tensor]) -> None:
        self.bucket = bucket
        self.parameters = parameters
        self._transport = transport
        self._coming: PendingRecv | PendingReduce | None = None

    def start(self) -> None:
        """Take the parameters' gradients and send them off."""
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in self.parameters
        ]
        row = torch.cat([gradient.reshape(-1) for gradient in gradients])
        for parameter in self.parameters:
            parameter.grad = None  # It is in the message now, and comes back from there.
        self._coming = self._transport.start_all_reduce(row, self.bucket.ranks)

    def finish(self) -> None:
        """Wait for the sums, and make them the parameters' gradients."""
        assert self._coming is not None
        parts = torch.split(self._coming.wait(), [parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        self._coming = None


class GradientReduction:
    """All buckets of a rank. Every rank of a group starts the group's buckets in the same order.

    Buckets of parameters with a home stage start as soon as the stage's last backward has their gradients, the others
    at the end.
    """

    def __init__(
        self, transport: Transport, parameters: dict[int, torch.Tensor], buckets: Iterable[Bucket], shared: bool
    ) -> None:
        """With `shared` each rank updates a share of each bucket (ZeRO-1): its parameters move into one row."""
        self._parameters = parameters
        self.shared: list[ShardedBucket] = []
        self._buckets: list[ReducedBucket] = []
        for bucket in buckets:
            tensors = [parameters[block.parameter] for block in bucket.blocks]
            if shared:
                self.shared.append(ShardedBucket(transport, bucket, tensors))
                self._buckets.append(self.shared[-1])
            else:
                self._buckets.append(WholeBucket(transport, bucket, tensors))
        self._waiting = [0] * len(self._buckets)
        """By bucket the gradients that its stage's last backward has still to give; not armed, it only falls."""
        self._started = [False] * len(self._buckets)
        for number, each in enumerate(self._buckets):
            if each.bucket.home is not None:
                for parameter in each.parameters:
                    parameter.register_post_accumulate_grad_hook(self._hook(number))

    @property
    def updated(self) -> list[torch.Tensor]:
        """Tensors that the optimizer updates: parameters, and shards of buckets."""
        in_rows = {id(parameter) for each in self.shared for parameter in each.parameters}
        own = [each for each in self._parameters.values() if each.requires_grad and id(each) not in in_rows]
        return own + [each.share for each in self.shared]

    @property
    def shares(self) -> list[OptimizerShard]:
        """The shares among them."""
        return [OptimizerShard(each.share, each.runs) for each in self.shared]

    def _hook(self, number: int) -> Callable[[torch.Tensor], None]:
        def ready(parameter: torch.Tensor) -> None:
            self._waiting[number] -= 1
            if self._waiting[number] == 0:
                self._start(number)

        return ready

    def arm(self, stage: int, times: Mapping[int, int]) -> None:
        """Mark the stage's next backward as its last: buckets start when their gradients are complete.

        `times` is how often a backward adds to the gradient of a parameter, by its index; once where absent.
        """
        for number, each in enumerate(self._buckets):
            if each.bucket.home == stage:
                self._waiting[number] = sum(times.get(block.parameter, 1) for block in each.bucket.blocks)

    def start(self, stage: int) -> None:
        """Start the stage's buckets that wait for their gradients no longer."""
        for number, each in enumerate(self._buckets):
            if each.bucket.home == stage and not self._started[number]:
                self._start(number)

    def _start(self, number: int) -> None:
        self._started[number] = True
        self._buckets[number].start()

    def finish(self) -> None:
        """Start what has not started, wait for all, and put the sums in place."""
        for number, started in enumerate(self._started):
            if not started:
                self._start(number)
        for number, each in enumerate(self._buckets):
            each.finish()
            self._started[number] = False
            self._waiting[number] = 0

    def gather(self) -> None:
        """Get what the other ranks have updated."""
        for each in self.shared:
            each.gather()

    def gradients(self) -> dict[int, torch.Tensor]:
        """The gradients of the rank's trained blocks by parameter, all of them: what verification compares."""
        found = {
            index: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for index, parameter in self._parameters.items()
            if parameter.requires_grad
        }
        for each in self.shared:
            found |= each.gradients()
        return found
