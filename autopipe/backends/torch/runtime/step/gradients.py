"""Reduction of gradients over the ranks that hold the same shard of a parameter, in buckets that
overlap with the backward.

With ZeRO-1 (`zero_stage: 1`), each rank updates a part of each bucket and stores the optimizer
state of this part only (Rajbhandari, Rasley, Ruwase, He: "ZeRO: Memory optimizations toward
training trillion parameter models", SC 2020, section 5.1). Updates are elementwise, so the parts
need not end at parameters: see `autopipe.ir.program`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import torch

from autopipe.backends.torch.runtime.communication.transport import PendingRecv, Transport
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.ir.program import Bucket, BucketShard, ElementRange, ParameterShard, make_buckets

_NO_GROUPS: Mapping[int, int] = {}


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerShard:
    """A flat tensor that the optimizer updates instead of parameters; `runs` are the elements of
    parameters that it consists of.
    """

    tensor: torch.Tensor
    runs: tuple[ElementRange, ...]
    start: int = 0
    """Index of the tensor's first element in the rank's part of the bucket."""

    @property
    def part(self) -> slice:
        """Return the slice of the rank's part of the bucket that the tensor covers."""
        return slice(self.start, self.start + self.tensor.numel())


class ReducedBucket:
    """A bucket whose gradients are all-reduced."""

    def __init__(
        self, transport: Transport, bucket: Bucket, parameters: list[torch.Tensor]
    ) -> None:
        self.bucket = bucket
        self.parameters = parameters
        self.missing = 0
        """Number of gradients that the stage's last backward has not computed yet. It is negative
        or 0 before that backward.
        """
        self.pending: PendingRecv | None = None
        """The collective while it runs."""
        self._transport = transport
        if bucket.home is not None:
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self._count_gradient)

    def _count_gradient(self, _: torch.Tensor) -> None:
        self.missing -= 1
        if self.missing == 0:
            self.start()

    def start(self) -> None:
        """Start the collective with the gradients so far; parameters without a gradient contribute
        zeros.
        """
        gradients = [
            torch.zeros_like(each) if each.grad is None else each.grad for each in self.parameters
        ]
        row = torch.cat([gradient.reshape(-1) for gradient in gradients])
        for parameter in self.parameters:
            parameter.grad = None  # The collective's buffer has it; `finish` sets the sum.
        self.pending = self._transport.start_all_reduce(row, self.bucket.ranks)

    def finish(self) -> None:
        """Wait for the collective, and set the sums as gradients."""
        assert self.pending is not None
        self._place(self.pending.wait())
        self.pending = None
        self.missing = 0

    def _place(self, sums: torch.Tensor) -> None:
        parts = torch.split(sums, [parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)


class ShardedBucket(ReducedBucket):
    """A bucket whose gradients are reduce-scattered (ZeRO-1). Its parameters are views of one row
    of memory, of which the rank updates its part. An all-gather then updates the parameters in
    place.
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
        """Yield the tensors that the rank's optimizer updates: its part of the row, divided where
        the parameter group changes.
        """
        own = self._own_part(self._row)
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

    def _own_part(self, row: torch.Tensor) -> torch.Tensor:
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
                parameter.grad = None  # The collective's buffer has it.
        self.pending = self._transport.start_reduce_scatter(gradients, self.bucket.ranks)

    def _place(self, sums: torch.Tensor) -> None:
        for shard in self.shards:
            shard.tensor.grad = sums[shard.part]

    def gather(self) -> None:
        """All-gather the updated parameters. Collective over the bucket's ranks."""
        self._transport.traffic["parameter"] += self._row.nbytes
        self._transport.gather(self._row, self.bucket.ranks)

    def gradients(self) -> dict[int, torch.Tensor]:
        """Return the full gradients by parameter index. Collective over the bucket's ranks; not
        counted as communication of a step.
        """
        row = torch.zeros_like(self._row)
        for shard in self.shards:
            assert shard.tensor.grad is not None
            self._own_part(row)[shard.part].copy_(shard.tensor.grad)
        self._transport.gather(row, self.bucket.ranks)
        places = zip(self.bucket.blocks, self._places(row), strict=True)
        return {block.parameter: place for block, place in places}


class GradientReduction:
    """All buckets of a rank. The ranks of a group start its buckets in the same order. Buckets of
    parameters with a home stage start when the last backward of the stage has computed their
    gradients, the others at the end of the step.
    """

    def __init__(
        self,
        transport: Transport,
        parameters: dict[int, torch.Tensor],
        buckets: Iterable[Bucket],
        shared: bool,
        groups: Mapping[int, int] = _NO_GROUPS,
    ) -> None:
        """`shared` is True for ZeRO-1: each rank updates a part of each bucket, whose parameters
        move into one row. `groups` has the number of the optimizer's group by parameter index;
        parameters that are missing are in group 0.
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
        """The tensors that the optimizer updates instead of parameters (ZeRO-1)."""
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

    def counted(self, rank: int, shards: Iterable[ParameterShard]) -> list[torch.Tensor]:
        """Return the tensors in `updated` that this rank adds to the gradient norm, so that no
        element is counted on two ranks. `shards` are the rank's shards of parameters.
        """
        first = {
            shard.parameter for shard in shards if min(shard.gradient_ranks, default=rank) == rank
        }
        own = [each for index, each in self.updated_parameters.items() if index in first]
        return own + [shard.tensor for shard in self.shards]

    def arm(self, stage: int, times: Mapping[int, int]) -> None:
        """Make the stage's buckets start as soon as their gradients are complete in its next
        backward, the last of the step. `times` has the number of additions to a gradient in one
        backward, by parameter index; 1 for parameters that are missing.
        """
        for each in self._buckets:
            if each.bucket.home == stage:
                each.missing = sum(times.get(block.parameter, 1) for block in each.bucket.blocks)

    def start(self, stage: int) -> None:
        """Start the stage's buckets that have not started."""
        for each in self._buckets:
            if each.bucket.home == stage and each.pending is None:
                each.start()

    def finish(self) -> None:
        """Start the remaining buckets, wait for all, and set the sums as gradients."""
        for each in self._buckets:
            if each.pending is None:
                each.start()
        for each in self._buckets:
            each.finish()

    def gradients(self) -> dict[int, torch.Tensor]:
        """Return the full gradients of the rank's trained shards by parameter index, for
        verification. Collective over all ranks with ZeRO-1.
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
    """Return True if the gradients of a shard that `ranks` hold are summed over these ranks."""
    found = manifest.parameters[parameter]
    return len(ranks) > 1 and found.trainable and found.value.dtype.is_floating


def groups_of(manifest: Manifest) -> set[tuple[int, ...]]:
    """Return the ranks of all process groups of a program: of its stages and of gradient
    reduction.
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
    """Return the buckets of trained shards that the rank holds together with others, in the order
    of their collectives.
    """
    found = []
    for shard in manifest.shards[rank]:
        if is_reduced(manifest, shard.parameter, shard.gradient_ranks):
            dtype = manifest.parameters[shard.parameter].value.dtype
            elements = shard.box.elements
            found.append(
                BucketShard(
                    shard.parameter,
                    elements,
                    dtype.value,
                    dtype.itemsize,
                    shard.gradient_ranks,
                    shard.home,
                )
            )
    return make_buckets(found)
