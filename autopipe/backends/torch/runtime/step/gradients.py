"""Adding up gradients over the ranks that hold the same block of a parameter: in buckets,
overlapped with backward.

With ZeRO-1 each of the ranks updates a share of a bucket, and keeps the optimizer's state of that
share only (Rajbhandari, Rasley, Ruwase, He: "ZeRO: Memory optimizations toward training trillion
parameter models", SC 2020, section 5.1). Updates are element by element, so a share is any part of
a bucket's row: see `autopipe.ir.program`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import torch

from autopipe.backends.torch.runtime.communication.transport import PendingRecv, Transport
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.program import Block, Bucket, ElementRange, Shard, buckets_of

_ALIKE: Mapping[int, int] = {}


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerShard:
    """A tensor that the optimizer updates in place of parameters, and which elements of them it
    is.
    """

    tensor: torch.Tensor
    runs: tuple[ElementRange, ...]
    start: int = 0
    """Where the tensor begins in the rank's share of the bucket; its runs are counted from there.
    """

    @property
    def part(self) -> slice:
        return slice(self.start, self.start + self.tensor.numel())


class ReducedBucket:
    """A bucket of which each rank gets all sums."""

    def __init__(
        self, transport: Transport, bucket: Bucket, parameters: list[torch.Tensor]
    ) -> None:
        self.bucket = bucket
        self.parameters = parameters
        self.missing = 0
        """Gradients that its stage's last backward has still to give; where that has not begun, it
        only falls.
        """
        self.pending: PendingRecv | None = None  # From its start to its end the exchange.
        self._transport = transport
        if bucket.home is not None:
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self._count)

    def _count(self, _: torch.Tensor) -> None:
        self.missing -= 1
        if self.missing == 0:
            self.start()

    def start(self) -> None:
        gradients = [
            torch.zeros_like(each) if each.grad is None else each.grad for each in self.parameters
        ]
        row = torch.cat([gradient.reshape(-1) for gradient in gradients])
        for parameter in self.parameters:
            parameter.grad = None  # It is in the message now, and comes back from there.
        self.pending = self._transport.start_all_reduce(row, self.bucket.ranks)

    def finish(self) -> None:
        assert self.pending is not None
        self._place(self.pending.wait())
        self.pending = None
        self.missing = 0

    def _place(self, sums: torch.Tensor) -> None:
        parts = torch.split(sums, [parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)


class ShardedBucket(ReducedBucket):
    """A bucket of which each rank gets a share of the sums, and updates that. Its parameters lie in
    one row, and the share is a part of it: what is gathered after an update is in place.
    """

    def __init__(
        self,
        transport: Transport,
        bucket: Bucket,
        parameters: list[torch.Tensor],
        groups: Mapping[int, int],
    ) -> None:
        super().__init__(transport, bucket, parameters)
        self._row = parameters[0].detach().new_zeros(bucket.elements)
        for parameter, place in zip(parameters, self._places(self._row), strict=True):
            parameter.data = place.copy_(parameter.detach())
        self.shards = tuple(self._shards_of(groups))

    def _shards_of(self, groups: Mapping[int, int]) -> Iterator[OptimizerShard]:
        """The rank's share, in parts whose parameters are updated alike: all of it where these are
        of one group.
        """
        own = self._own(self._row)
        runs = tuple(self.bucket.runs(self._transport.rank))
        if len({groups.get(run.parameter, 0) for run in runs}) < 2:
            yield OptimizerShard(own, runs)
            return
        for _, part in groupby(runs, key=lambda run: groups.get(run.parameter, 0)):
            together = tuple(part)
            start = together[0].at
            last = together[-1]
            tensor = own[start : last.at + last.stop - last.start]
            yield OptimizerShard(
                tensor, tuple(replace(run, at=run.at - start) for run in together), start
            )

    def _own(self, row: torch.Tensor) -> torch.Tensor:
        return row.chunk(len(self.bucket.ranks))[self.bucket.ranks.index(self._transport.rank)]

    def _places(self, row: torch.Tensor) -> list[torch.Tensor]:
        return [
            row[start : start + parameter.numel()].view_as(parameter)
            for start, parameter in zip(self.bucket.starts, self.parameters, strict=True)
        ]

    def start(self) -> None:
        gradients = torch.zeros_like(self._row)
        for parameter, place in zip(self.parameters, self._places(gradients), strict=True):
            if parameter.grad is not None:
                place.copy_(parameter.grad)
                parameter.grad = None  # It is in the message now.
        self.pending = self._transport.start_reduce_scatter(gradients, self.bucket.ranks)

    def _place(self, sums: torch.Tensor) -> None:
        for shard in self.shards:
            shard.tensor.grad = sums[shard.part]

    def gather(self) -> None:
        self._transport.traffic["parameter"] += self._row.nbytes
        self._transport.gather(self._row, self.bucket.ranks)

    def gradients(self) -> dict[int, torch.Tensor]:
        """The gradients by parameter, whole. All of the bucket's ranks together; not counted as a
        step's.
        """
        row = torch.zeros_like(self._row)
        for shard in self.shards:
            assert shard.tensor.grad is not None
            self._own(row)[shard.part].copy_(shard.tensor.grad)
        self._transport.gather(row, self.bucket.ranks)
        places = zip(self.bucket.blocks, self._places(row), strict=True)
        return {block.parameter: place for block, place in places}


class GradientReduction:
    """All buckets of a rank. Every rank of a group starts the group's buckets in the same order.
    Buckets of parameters with a home stage start as soon as the stage's last backward has their
    gradients, the others at the end.
    """

    def __init__(
        self,
        transport: Transport,
        parameters: dict[int, torch.Tensor],
        buckets: Iterable[Bucket],
        shared: bool,
        groups: Mapping[int, int] = _ALIKE,
    ) -> None:
        """With `shared` each rank updates a share of each bucket (ZeRO-1): its parameters move into
        one row. `groups` are those of the optimizer, by parameter, 0 where it is not listed.
        """
        self._parameters = parameters
        make = partial(ShardedBucket, groups=groups) if shared else ReducedBucket
        self._buckets = [
            make(transport, each, [parameters[block.parameter] for block in each.blocks])
            for each in buckets
        ]
        self.shared = [each for each in self._buckets if isinstance(each, ShardedBucket)]

    @property
    def shards(self) -> list[OptimizerShard]:
        return [shard for each in self.shared for shard in each.shards]

    @property
    def updated_parameters(self) -> dict[int, torch.Tensor]:
        """The parameters that the optimizer updates as they are, not in shards."""
        in_rows = {id(parameter) for each in self.shared for parameter in each.parameters}
        trained = {index: each for index, each in self._parameters.items() if each.requires_grad}
        return {index: each for index, each in trained.items() if id(each) not in in_rows}

    @property
    def updated(self) -> list[torch.Tensor]:
        """Tensors that the optimizer updates: parameters, and shards of buckets."""
        return [*self.updated_parameters.values(), *(shard.tensor for shard in self.shards)]

    def counted(self, rank: int, shards: Iterable[Shard]) -> list[torch.Tensor]:
        """The tensors among `updated` that are counted here and on no other rank; `shards` are the
        rank's blocks.
        """
        first = {
            shard.parameter for shard in shards if min(shard.gradient_ranks, default=rank) == rank
        }
        own = [each for index, each in self.updated_parameters.items() if index in first]
        return own + [shard.tensor for shard in self.shards]

    def arm(self, stage: int, times: Mapping[int, int]) -> None:
        """Mark the stage's next backward as its last: buckets start when their gradients are
        complete. `times` is how often a backward adds to the gradient of a parameter, by its index;
        once where it is not listed.
        """
        for each in self._buckets:
            if each.bucket.home == stage:
                each.missing = sum(times.get(block.parameter, 1) for block in each.bucket.blocks)

    def start(self, stage: int) -> None:
        """Start the stage's buckets that wait for their gradients no longer."""
        for each in self._buckets:
            if each.bucket.home == stage and each.pending is None:
                each.start()

    def finish(self) -> None:
        """Start what has not started, wait for all, and put the sums in place."""
        for each in self._buckets:
            if each.pending is None:
                each.start()
        for each in self._buckets:
            each.finish()

    def gradients(self) -> dict[int, torch.Tensor]:
        """The gradients of the rank's trained blocks by parameter, all of them: what verification
        compares.
        """
        found = {
            index: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for index, parameter in self._parameters.items()
            if parameter.requires_grad
        }
        for each in self.shared:
            found |= each.gradients()
        return found


def is_reduced(manifest: Manifest, parameter: int, ranks: Sequence[int]) -> bool:
    """True if the gradients of a block that `ranks` hold are added up, so that its optimizer's
    state may be shared.
    """
    found = manifest.parameters[parameter]
    return len(ranks) > 1 and found.trainable and found.value.dtype.is_floating


def groups_of(manifest: Manifest) -> set[tuple[int, ...]]:
    """The ranks of all groups of a program that exchange anything, for its stages or to add up
    gradients.
    """
    found = {ranks for stage in manifest.stages for ranks in stage.groups()}
    if manifest.train:
        for shards in manifest.shards:
            found |= {
                each.gradient_ranks
                for each in shards
                if is_reduced(manifest, each.parameter, each.gradient_ranks)
            }
    return found


def buckets_of_rank(manifest: Manifest, rank: int) -> tuple[Bucket, ...]:
    """Buckets of the trained blocks that the rank holds together with others, in the order of their
    exchanges.
    """
    found = []
    for shard in manifest.shards[rank]:
        if is_reduced(manifest, shard.parameter, shard.gradient_ranks):
            dtype = manifest.parameters[shard.parameter].value.dtype
            elements = shard.box.elements
            found.append(
                Block(
                    shard.parameter,
                    elements,
                    dtype.value,
                    dtype.itemsize,
                    shard.gradient_ranks,
                    shard.home,
                )
            )
    return buckets_of(found)
