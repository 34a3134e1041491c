"""Differentiable collectives that generated code calls. The backward of a collective is its
transpose: an all-reduce for an all-reduce, a reduce-scatter for an all-gather.

The ranks of a group compute one function together. If several ranks hold copies of a tensor, each
rank computes the gradient of its copy, and the sum over all copies is the gradient of the tensor
(`autopipe.passes.lower.shard`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist

from autopipe.backends.torch.runtime.communication.transport import (
    Transport,
    all_gather,
    all_to_all,
    start_all_reduce,
    start_reduce_scatter,
)
from autopipe.ir.layout import (
    Layout,
    MeshAxes,
    MeshAxis,
    WindowedShards,
    group_members,
    slice_transfers,
    total_degree,
)

TensorCollective = Callable[[torch.Tensor], torch.Tensor]

ShardAxes = tuple[tuple[tuple[int, int], ...], ...]
"""The sharding of a tensor: for each dimension, the mesh axes that shard the dimension, from outer
to inner. An axis is (degree, stride). A dimension without axes is not sharded.
"""

Windows = tuple[tuple[int, int, int, int], ...]
"""(dimension, step, offset, length) of each dimension that an operator reads through windows, as a
convolution does. Shard i of the dimension consists of the `length` elements from index i · step +
offset on (`autopipe.ir.layout.WindowedShards`).
"""

TensorSlices = tuple[slice, ...]
SlicesByPosition = tuple[tuple[TensorSlices, ...], ...]
"""For each position in the group, the slices of a tensor that go to the rank at that position, or
that come from that rank.
"""


class Group:
    """A process group from the view of one of its ranks. Its ranks are all ranks of a stage, or the
    ranks that differ along some axes of the stage's device mesh only.

    A position is the index of a rank in `ranks`, which orders the ranks as the mesh does,
    row-major. "Shard" means an equal part of a tensor along one dimension; shards are in the order
    of positions.
    """

    def __init__(self, ranks: tuple[int, ...], transport: Transport) -> None:
        """`ranks` are global ranks in mesh order, and include the rank of `transport`. The group
        adds the bytes of its collectives to `transport.traffic`.
        """
        self.ranks = ranks
        self.size = len(ranks)
        self.position = ranks.index(transport.rank)
        self.order = tuple(sorted(ranks).index(each) for each in ranks)
        """For each position, the rank's index in the torch process group, which sorts its ranks in
        ascending order.
        """
        self._places = sorted(range(self.size), key=self.order.__getitem__)
        """For each index in the torch process group, the position of the rank: the inverse of
        `order`.
        """
        self._traffic = transport.traffic
        self._waiting = transport.heartbeat.record_wait
        self._transport = transport
        self._along: dict[MeshAxes, Group] = {}

    @cached_property
    def _process_group(self) -> dist.ProcessGroup | None:
        """The torch process group of `ranks`; None for torch's default group. It is looked up at
        the first collective, because it is created only if these ranks communicate: in some stages
        only the ranks along a mesh axis do.
        """
        return self._transport.group(self.ranks)

    def along(self, *axes: tuple[int, int]) -> Group:
        """Return the group of the ranks that differ from this rank along the mesh axes `axes` only.
        An axis is (degree, stride): its number of positions, and the distance of neighbouring
        positions in `ranks`. Axes are ordered from outer to inner.
        """
        wanted = tuple(MeshAxis(*axis) for axis in axes)
        if wanted not in self._along:
            ranks = tuple(self.ranks[position] for position in group_members(wanted, self.position))
            self._along[wanted] = Group(ranks, self._transport)
        return self._along[wanted]

    def all_reduce(self, tensor: torch.Tensor, divisor: int = 1) -> torch.Tensor:
        """Return the elementwise sum of the ranks' tensors, divided by `divisor`, on every rank."""
        total = _apply_collective(tensor, self._all_reduce, self._all_reduce)
        return total / divisor if divisor > 1 else total

    def all_gather(self, tensor: torch.Tensor, dimension: int) -> torch.Tensor:
        """Return, on every rank, the concatenation of the ranks' shards along `dimension`."""
        return _apply_collective(
            tensor, partial(self._all_gather, dimension), partial(self._reduce_scatter, dimension)
        )

    def reduce_scatter(
        self, tensor: torch.Tensor, dimension: int, divisor: int = 1
    ) -> torch.Tensor:
        """Sum the ranks' tensors elementwise and divide by `divisor`. Return this rank's shard of
        the result along `dimension`.
        """
        total = _apply_collective(
            tensor, partial(self._reduce_scatter, dimension), partial(self._all_gather, dimension)
        )
        return total / divisor if divisor > 1 else total

    def all_to_all(self, tensor: torch.Tensor, origin: int, dimension: int) -> torch.Tensor:
        """Redistribute a tensor from shards along the dimension `origin` to shards along
        `dimension`. Return this rank's new shard.
        """
        return _apply_collective(
            tensor,
            partial(self._all_to_all_shards, origin, dimension),
            partial(self._all_to_all_shards, dimension, origin),
        )

    def redistribute(
        self,
        tensor: torch.Tensor,
        source: ShardAxes,
        target: ShardAxes,
        windows: Windows = (),
        fill: float = 0.0,
    ) -> torch.Tensor:
        """Redistribute a tensor from the sharding `source` to the sharding `target`. Return this
        rank's new shard. A rank receives only elements that it does not hold.

        With `windows`, the new shards contain all elements that windowed operators, for example
        convolutions, read, so neighbouring shards may overlap. Elements outside of the tensor are
        set to `fill`. The backward sends the gradient of each element to the rank that sent the
        element; this rank adds up all gradients that arrive for the element.
        """
        origin = tuple(tensor.shape)
        shape, sent, received = _plan_slice_exchange(
            origin, self.size, self.position, source, target, windows
        )

        def redistribute_forward(before: torch.Tensor) -> torch.Tensor:
            after = before.new_full(shape, fill)
            for box, block in self._exchange_slices(before, sent, after, received):
                after[box] = block
            return after

        def redistribute_backward(gradient: torch.Tensor) -> torch.Tensor:
            total = gradient.new_zeros(origin)
            for box, block in self._exchange_slices(gradient, received, total, sent):
                total[box] += block
            return total

        return _apply_collective(tensor, redistribute_forward, redistribute_backward)

    def edges(
        self, tensor: torch.Tensor, cuts: ShardAxes, windows: Windows, fill: float = 0.0
    ) -> torch.Tensor:
        """Return this rank's shard, extended by the neighbouring ranks' elements that `windows`
        read (a halo exchange). `cuts` is the sharding of `tensor`, which does not change. Elements
        outside of the full tensor are set to `fill`.
        """
        return self.redistribute(tensor, cuts, cuts, windows, fill)

    def window(
        self,
        tensor: torch.Tensor,
        source: ShardAxes,
        target: ShardAxes,
        windows: Windows,
        fill: float = 0.0,
    ) -> torch.Tensor:
        """Return the result of `redistribute` without communication. This requires that every rank
        holds all elements of its new shard.
        """
        shape, sent, received = _plan_slice_exchange(
            tuple(tensor.shape), self.size, self.position, source, target, windows
        )
        result = tensor.new_full(shape, fill)
        for before, after in zip(sent[self.position], received[self.position], strict=True):
            result[after] = tensor[before]
        return result

    def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elementwise sum of the ranks' tensors, on every rank, without a gradient."""
        return self._all_reduce(tensor.detach())

    def max_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elementwise maximum of the ranks' tensors, on every rank, without a
        gradient.
        """
        return self._all_reduce(tensor.detach(), dist.ReduceOp.MAX)

    def slice(self, tensor: torch.Tensor, dimension: int) -> torch.Tensor:
        """Return this rank's shard along `dimension` of a tensor that all ranks hold in full, as a
        view.
        """
        size = tensor.shape[dimension] // self.size
        return tensor.narrow(dimension, self.position * size, size)

    def _all_reduce(
        self, tensor: torch.Tensor, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> torch.Tensor:
        """Return the all-reduce of the ranks' tensors with the operation `how`, by default
        the sum.
        """
        self._traffic["all_reduce"] += tensor.nbytes
        with self._waiting():
            return start_all_reduce(tensor, self._process_group, how, in_place=False).wait()

    def _all_gather(self, dimension: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return the concatenation of the ranks' shards along `dimension`, in the order of
        positions.
        """
        self._traffic["all_gather"] += tensor.nbytes * self.size
        with self._waiting():
            parts = all_gather(tensor, self._process_group)
        return torch.cat([parts[place] for place in self.order], dimension)

    def _reduce_scatter(self, dimension: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard along `dimension` of the sum of the ranks' tensors."""
        self._traffic["reduce_scatter"] += tensor.nbytes
        rows = tensor.unflatten(dimension, (self.size, -1)).movedim(dimension, 0)
        if self._places != list(range(self.size)):
            rows = rows[self._places]
        with self._waiting():
            return start_reduce_scatter(rows, self._process_group).wait()

    def _all_to_all_shards(self, origin: int, dimension: int, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard along `dimension` of a tensor that is sharded along `origin`.
        Uses one all-to-all.
        """
        parts = [part.contiguous() for part in tensor.chunk(self.size, dimension)]
        self._traffic["all_to_all"] += tensor.nbytes
        arrived = self._all_to_all_flat(
            [part.reshape(-1) for part in parts], [parts[0].numel()] * self.size
        )
        return torch.cat([part.reshape(parts[0].shape) for part in arrived], origin)

    def _exchange_slices(
        self,
        before: torch.Tensor,
        sent: SlicesByPosition,
        after: torch.Tensor,
        received: SlicesByPosition,
    ) -> Iterator[tuple[TensorSlices, torch.Tensor]]:
        """Send the slices `sent[i]` of `before` to the rank at position i. Yield (slice of `after`,
        received tensor) for each slice in `received`, in which `received[i]` lists the slices of
        `after` that the rank at position i sends. The caller writes the received tensors into
        `after`.
        """
        parts = [
            torch.cat([before[box].reshape(-1) for box in boxes]) if boxes else before.new_empty(0)
            for boxes in sent
        ]
        shapes = [[after[box].shape for box in boxes] for boxes in received]
        sizes = [sum(shape.numel() for shape in each) for each in shapes]
        self._traffic["redistribute"] += (sum(sizes) - sizes[self.position]) * after.element_size()
        for boxes, each, whole in zip(
            received, shapes, self._all_to_all_flat(parts, sizes), strict=True
        ):
            flat = whole.split([shape.numel() for shape in each])
            yield from (
                (box, part.reshape(shape))
                for box, shape, part in zip(boxes, each, flat, strict=True)
            )

    def _all_to_all_flat(self, parts: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
        """Send the one-dimensional tensor `parts[i]` to the rank at position i. Return the
        one-dimensional tensors that arrive, in the order of positions; the tensor from position i
        has `sizes[i]` elements.
        """
        sent = torch.cat([parts[position] for position in self._places])
        received = sent.new_empty(sum(sizes))
        outgoing = [len(parts[position]) for position in self._places]
        incoming = [sizes[position] for position in self._places]
        backend = dist.get_backend(self._process_group)
        # A dry run uses torch's backend `fake`, which rejects a size of 0. So the call is omitted,
        # and the result is zeros.
        if backend == "fake":
            received.zero_()
        else:
            # Gloo's all-to-all accepts tensors in host memory only, so tensors on a GPU are copied
            # to the host.
            device = "cpu" if backend == "gloo" else sent.device
            arrives = received.to(device)
            with self._waiting():
                all_to_all(arrives, sent.to(device), incoming, outgoing, self._process_group)
            received = arrives.to(received.device)
        by_rank = received.split(incoming)
        return [by_rank[place] for place in self.order]


class _CollectiveWithTranspose(torch.autograd.Function):
    """A collective whose backward is another collective, its transpose."""

    @staticmethod
    def forward(
        context: Any, tensor: torch.Tensor, run: TensorCollective, transpose: TensorCollective
    ) -> torch.Tensor:
        context.transpose = transpose
        return run(tensor)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return context.transpose(gradients[0]), None, None


def _apply_collective(
    tensor: torch.Tensor, run: TensorCollective, transpose: TensorCollective
) -> torch.Tensor:
    """Return `run(tensor)`. In the backward, `transpose` maps the gradient of the result to the
    gradient of `tensor`.
    """
    result: torch.Tensor = _CollectiveWithTranspose.apply(  # type: ignore[no-untyped-call]
        tensor, run, transpose
    )
    return result


@lru_cache(maxsize=4096)
def _plan_slice_exchange(
    shape: tuple[int, ...],
    size: int,
    position: int,
    source: ShardAxes,
    target: ShardAxes,
    windows: Windows,
) -> tuple[tuple[int, ...], SlicesByPosition, SlicesByPosition]:
    """Return (shape, sent, received) of a redistribution from `source` to `target`, for the rank at
    `position` in a group of `size` ranks. The rank's shard under `source` has the shape `shape`.

    shape: the shape of the rank's shard under `target`.
    sent: by position of the receiving rank, the slices of the old shard that this rank sends.
    received: by position of the sending rank, the slices of the new shard that arrive.
    """
    before, after = (
        tuple(tuple(MeshAxis(*axis) for axis in axes) for axes in cuts) for cuts in (source, target)
    )
    whole = tuple(extent * total_degree(axes) for extent, axes in zip(shape, before, strict=True))
    through = {dimension: WindowedShards(*numbers) for dimension, *numbers in windows}
    have = Layout(whole, before)
    need = Layout(
        whole, after, windows=tuple(map(through.get, range(len(whole)))) if windows else ()
    )
    sent: list[list[TensorSlices]] = [[] for _ in range(size)]
    received: list[list[TensorSlices]] = [[] for _ in range(size)]
    for move in slice_transfers(have, need, size):
        if move.source == position:
            sent[move.target].append(move.part.relative_to(have.shard(position)).slices)
        if move.target == position:
            received[move.source].append(move.part.relative_to(need.shard(position)).slices)
    return need.local_shape(), tuple(map(tuple, sent)), tuple(map(tuple, received))
