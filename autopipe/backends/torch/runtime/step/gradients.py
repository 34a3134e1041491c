"""Reduction of gradients: their sum over all ranks that hold the same shard of a parameter. The
gradients are reduced in buckets, each with one collective, which overlap with the backward.

With ZeRO-1 (`zero_stage: 1`), each rank updates a part of each bucket only and stores the optimizer
state of this part (Rajbhandari, Rasley, Ruwase, He: "ZeRO: Memory optimizations toward training
trillion parameter models", SC 2020, section 5.1). Updates are elementwise, so a part may begin and
end within a parameter: see `autopipe.ir.program`.
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
    """A one-dimensional tensor that the optimizer updates instead of parameters (ZeRO-1). It
    consists of the element ranges `runs` of parameters.
    """

    tensor: torch.Tensor
    runs: tuple[ElementRange, ...]
    start: int = 0
    """Index of the tensor's first element in this rank's part of its bucket (parameters whose
    gradients one collective reduces).
    """

    @property
    def part(self) -> slice:
        """The range of this tensor within this rank's part of the bucket, in elements."""
        return slice(self.start, self.start + self.tensor.numel())


class ReducedBucket:
    """A bucket of parameters whose gradients are all-reduced with one collective."""

    def __init__(
        self, transport: Transport, bucket: Bucket, parameters: list[torch.Tensor]
    ) -> None:
        """`parameters` are this rank's shards of the bucket's parameters. If only one stage uses
        the parameters (`bucket.home`), hooks count their gradients, so that the collective starts
        as soon as all are complete.
        """
        self.bucket = bucket
        self.parameters = parameters
        self.missing = 0
        """Number of gradients that the last backward of the stage in this step has not computed
        yet; the collective starts when it becomes 0. Before that backward it is 0 or negative.
        """
        self.pending: PendingRecv | None = None
        """The running collective; None if none runs."""
        self._transport = transport
        if bucket.home is not None:
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(self._count_gradient)

    def _count_gradient(self, _: torch.Tensor) -> None:
        """Hook that autograd calls after it has added to the gradient of a parameter. Starts the
        collective when the last gradient is complete.
        """
        self.missing -= 1
        if self.missing == 0:
            self.start()

    def start(self) -> None:
        """Start the collective with the present gradients. A parameter without a gradient
        contributes zeros.
        """
        gradients = [
            torch.zeros_like(each) if each.grad is None else each.grad for each in self.parameters
        ]
        row = torch.cat([gradient.reshape(-1) for gradient in gradients])
        for parameter in self.parameters:
            # `row` contains a copy of the gradient, so the original is released. `finish` sets the
            # sum as the gradient.
            parameter.grad = None
        self.pending = self._transport.start_all_reduce(row, self.bucket.ranks)

    def finish(self) -> None:
        """Wait for the collective, and set the sums as the gradients of the parameters."""
        assert self.pending is not None
        self._set_gradients(self.pending.wait())
        self.pending = None
        self.missing = 0

    def _set_gradients(self, sums: torch.Tensor) -> None:
        """Set the parts of `sums`, the reduced gradients of all parameters of the bucket one after
        the other, as the gradients of the parameters.
        """
        parts = torch.split(sums, [parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)


class ShardedBucket(ReducedBucket):
    """A bucket of parameters whose gradients are reduce-scattered (ZeRO-1). The parameters are
    views of one tensor, the row. The rank's optimizer updates its part of the row; an all-gather
    then updates the other parts, and thereby the parameters.
    """

    def __init__(
        self,
        transport: Transport,
        bucket: Bucket,
        parameters: list[torch.Tensor],
        groups: Mapping[int, int],
    ) -> None:
        """Move the parameters into one tensor, the row, of which they become views. `groups` has
        the number of the optimizer's parameter group by parameter index; parameters that are
        missing are in group 0.
        """
        super().__init__(transport, bucket, parameters)
        self._row = parameters[0].detach().new_zeros(bucket.elements)
        for parameter, place in zip(parameters, self._parameter_views(self._row), strict=True):
            parameter.data = place.copy_(parameter.detach())
        self.shards = tuple(self._shards_of(groups))

    def _shards_of(self, groups: Mapping[int, int]) -> Iterator[OptimizerShard]:
        """Yield the tensors that the rank's optimizer updates: views of the rank's part of the
        bucket. The part is divided where the optimizer's parameter group changes, because groups
        have different settings.
        """
        own = self._own_part(self._row)
        runs = tuple(self.bucket.element_ranges(self._transport.rank))
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
        """Return this rank's part of `row` as a view. `row` is a one-dimensional tensor with one
        element per element of the bucket, divided evenly among its ranks.
        """
        return row.chunk(len(self.bucket.ranks))[self.bucket.ranks.index(self._transport.rank)]

    def _parameter_views(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Return a view of `row` for each parameter of the bucket, at the parameter's position.
        `row` is a one-dimensional tensor with one element per element of the bucket.
        """
        return [
            row[start : start + parameter.numel()].view_as(parameter)
            for start, parameter in zip(self.bucket.starts, self.parameters, strict=True)
        ]

    def start(self) -> None:
        """Start the reduce-scatter with the present gradients. A parameter without a gradient
        contributes zeros.
        """
        gradients = torch.zeros_like(self._row)
        for parameter, place in zip(self.parameters, self._parameter_views(gradients), strict=True):
            if parameter.grad is not None:
                place.copy_(parameter.grad)
                # `gradients`, the tensor that is reduced, contains a copy of the gradient, so the
                # original is released.
                parameter.grad = None
        self.pending = self._transport.start_reduce_scatter(gradients, self.bucket.ranks)

    def _set_gradients(self, sums: torch.Tensor) -> None:
        """Set `sums`, the reduced gradients of this rank's part of the bucket, as the gradients of
        the tensors that the optimizer updates.
        """
        for shard in self.shards:
            shard.tensor.grad = sums[shard.part]

    def gather_parameters(self) -> None:
        """All-gather the tensor of which the bucket's parameters are views, after the ranks have
        updated their parts of it. Then all parameters are up to date. Collective over the ranks of
        the bucket.
        """
        self._transport.traffic["parameter"] += self._row.nbytes
        self._transport.all_gather_in_place(self._row, self.bucket.ranks)

    def gradients(self) -> dict[int, torch.Tensor]:
        """Return the full gradients of this rank's parameters, by parameter index. Collective over
        the ranks of the bucket. Does not count as communication of a step.
        """
        row = torch.zeros_like(self._row)
        for shard in self.shards:
            assert shard.tensor.grad is not None
            self._own_part(row)[shard.part].copy_(shard.tensor.grad)
        self._transport.all_gather_in_place(row, self.bucket.ranks)
        places = zip(self.bucket.blocks, self._parameter_views(row), strict=True)
        return {block.parameter: place for block, place in places}


class GradientReduction:
    """All buckets of a rank. A bucket is a group of parameters whose gradients one collective
    reduces. A bucket whose parameters belong to one stage is reduced as soon as the last backward
    of that stage in the step has computed their gradients. The other buckets are reduced at the end
    of the step. All ranks of a process group start the collectives of its buckets in the same
    order.
    """

    def __init__(
        self,
        transport: Transport,
        parameters: dict[int, torch.Tensor],
        buckets: Iterable[Bucket],
        shared: bool,
        groups: Mapping[int, int] = _NO_GROUPS,
    ) -> None:
        """`shared` is True for ZeRO-1. The parameters of each bucket then become views of one
        tensor, of which each rank updates a part. `groups` has the number of the optimizer's
        parameter group by parameter index; parameters that are missing are in group 0.
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
        """The tensors that the optimizer updates instead of parameters; empty without ZeRO-1."""
        return [shard for each in self.shared for shard in each.shards]

    @property
    def updated_parameters(self) -> dict[int, torch.Tensor]:
        """The trained parameters that the optimizer updates directly, by index: with ZeRO-1, those
        that are in no bucket; otherwise all.
        """
        in_rows = {id(parameter) for each in self.shared for parameter in each.parameters}
        trained = {index: each for index, each in self._parameters.items() if each.requires_grad}
        return {index: each for index, each in trained.items() if id(each) not in in_rows}

    @property
    def updated_tensors(self) -> list[torch.Tensor]:
        """All tensors that the optimizer updates: `updated_parameters`, then the tensors of
        `shards`.
        """
        return [*self.updated_parameters.values(), *(shard.tensor for shard in self.shards)]

    def counted_in_norm(self, rank: int, shards: Iterable[ParameterShard]) -> list[torch.Tensor]:
        """Return the tensors in `updated_tensors` that rank `rank`, this rank, adds to the gradient
        norm. Of several ranks that hold a parameter, the lowest counts it. `shards` are this rank's
        shards of parameters.
        """
        first = {
            shard.parameter for shard in shards if min(shard.gradient_ranks, default=rank) == rank
        }
        own = [each for index, each in self.updated_parameters.items() if index in first]
        return own + [shard.tensor for shard in self.shards]

    def start_during_backward(self, stage: int, times: Mapping[int, int]) -> None:
        """Prepare the buckets of a stage to start as soon as their gradients are complete. Called
        before the last backward of the stage in the step. `times` has the number of times that one
        backward adds to the gradient of a parameter, by parameter index; 1 for parameters that are
        missing.
        """
        for each in self._buckets:
            if each.bucket.home == stage:
                each.missing = sum(times.get(block.parameter, 1) for block in each.bucket.blocks)

    def start(self, stage: int) -> None:
        """Start the collectives of the stage's buckets that have not started."""
        for each in self._buckets:
            if each.bucket.home == stage and each.pending is None:
                each.start()

    def finish(self) -> None:
        """Start the collectives that have not started, wait for all, and set the sums as
        gradients.
        """
        for each in self._buckets:
            if each.pending is None:
                each.start()
        for each in self._buckets:
            each.finish()

    def gradients(self) -> dict[int, torch.Tensor]:
        """Return the full gradients of this rank's trained shards, by parameter index, for
        verification. With ZeRO-1, collective over all ranks.
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
    """Return True if the gradients of a parameter's shard are summed over `ranks`, the ranks that
    hold it: if there are several ranks and the parameter is trained.
    """
    found = manifest.parameters[parameter]
    return len(ranks) > 1 and found.trainable and found.value.dtype.is_floating


def process_groups_of_program(manifest: Manifest) -> set[tuple[int, ...]]:
    """Return the process groups that a program needs for its stages and its gradient reduction,
    each as a tuple of ranks.
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
    """Return the buckets (groups of shards whose gradients one collective reduces) of the trained
    shards that rank `rank` holds together with other ranks. They are in the order in which the
    ranks start the collectives.
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
