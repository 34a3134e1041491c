"""Adding up gradients over the ranks that hold the same block of a parameter: in buckets, overlapped with backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from autopipe.backends.torch.runtime.manifest import ShardEntry
from autopipe.backends.torch.runtime.transport import Transport

_BUCKET_BYTES = 25 * 2**20
"""Small gradients travel together; 25 MiB is what torch's DistributedDataParallel found good."""
_NO_STAGE = -1


@dataclass(slots=True)
class Bucket:
    """Parameters whose gradients are added up over the same ranks in one message."""

    stage: int
    """The stage whose last backward completes it, or `_NO_STAGE`."""
    ranks: tuple[int, ...]
    parameters: list[torch.Tensor]
    waiting: int = 0
    flat: torch.Tensor | None = None
    work: dist.Work | None = None


class GradientReduction:
    """All buckets of a rank. Every rank of a group starts the group's buckets in the same order."""

    def __init__(self, transport: Transport, parameters: dict[int, torch.Tensor], shards: Iterable[ShardEntry]) -> None:
        """Buckets of parameters with a home stage start as soon as the stage's last backward has their gradients, the
        others at the end. Parameters are taken last first, since backward finishes with the first.
        """
        self.transport = transport
        self.buckets: list[Bucket] = []
        members: dict[tuple[int, tuple[int, ...]], list[torch.Tensor]] = {}
        for shard in sorted(shards, key=lambda shard: shard.parameter, reverse=True):
            parameter = parameters[shard.parameter]
            if len(shard.ranks) > 1 and parameter.requires_grad:
                home = _NO_STAGE if shard.home is None else shard.home
                members.setdefault((home, shard.ranks), []).append(parameter)
        for stage, group in sorted(members):
            self.buckets.extend(_packed(stage, group, members[stage, group]))
        for bucket in self.buckets:
            if bucket.stage != _NO_STAGE:
                for parameter in bucket.parameters:
                    parameter.register_post_accumulate_grad_hook(self._hook(bucket))

    def _hook(self, bucket: Bucket) -> Callable[[torch.Tensor], None]:
        def ready(parameter: torch.Tensor) -> None:
            bucket.waiting -= 1  # Not armed, it only falls below zero.
            if bucket.waiting == 0:
                self._start(bucket)

        return ready

    def arm(self, stage: int) -> None:
        """Say that the stage's next backward is its last: buckets start when their gradients are there."""
        for bucket in self.buckets:
            if bucket.stage == stage:
                bucket.waiting = len(bucket.parameters)

    def start(self, stage: int) -> None:
        """Start the stage's buckets that wait for their gradients no longer."""
        for bucket in self.buckets:
            if bucket.stage == stage and bucket.flat is None:
                self._start(bucket)

    def finish(self) -> None:
        """Start what has not started, wait for all, and put the sums in place."""
        for bucket in self.buckets:
            if bucket.flat is None:
                self._start(bucket)
        for bucket in self.buckets:
            self._finish(bucket)

    def _start(self, bucket: Bucket) -> None:
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in bucket.parameters
        ]
        bucket.flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        for parameter in bucket.parameters:
            parameter.grad = None  # It is in the message now, and comes back from there.
        bucket.work = self.transport.start_all_reduce(bucket.flat, bucket.ranks)

    def _finish(self, bucket: Bucket) -> None:
        assert bucket.flat is not None and bucket.work is not None
        bucket.work.wait()
        flat = bucket.flat.to(bucket.parameters[0].device)
        parts = torch.split(flat, [parameter.numel() for parameter in bucket.parameters])
        for parameter, part in zip(bucket.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        bucket.flat = bucket.work = None
        bucket.waiting = 0


def _packed(stage: int, ranks: tuple[int, ...], parameters: list[torch.Tensor]) -> list[Bucket]:
    buckets: list[Bucket] = []
    size = 0
    for parameter in parameters:
        same = bool(buckets) and buckets[-1].parameters[0].dtype is parameter.dtype
        if not same or size >= _BUCKET_BYTES:
            buckets.append(Bucket(stage, ranks, []))
            size = 0
        buckets[-1].parameters.append(parameter)
        size += parameter.numel() * parameter.element_size()
    return buckets
