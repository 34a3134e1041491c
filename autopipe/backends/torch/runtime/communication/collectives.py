"""Differentiable collectives of generated code. The backward of each collective is its transpose.

The ranks of a group compute one function together. If several ranks hold copies of a tensor, the
gradients of all copies add up to the tensor's gradient (`autopipe.passes.lower.shard`).
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
"""For each dimension of a tensor the mesh axes that shard it, outer to inner, as (degree, stride).
"""

Windows = tuple[tuple[int, int, int, int], ...]
"""(dimension, step, offset, length) of each dimension that is read through windows, as in
convolutions: see `WindowedShards`.
"""

TensorSlices = tuple[slice, ...]
SlicesByPosition = tuple[tuple[TensorSlices, ...], ...]
"""For each position in the group, the slices of a tensor that the rank there sends or receives."""


class Group:
    """A process group as one of its ranks sees it: the ranks of a stage, or those along axes of the
    stage's mesh.
    """

    def __init__(self, ranks: tuple[int, ...], transport: Transport) -> None:
        """`ranks` includes the rank of `transport`, which counts the bytes of the group's
        collectives.
        """
        self.ranks = ranks
        self.size = len(ranks)
        self.position = ranks.index(transport.rank)
        self.order = tuple(sorted(ranks).index(each) for each in ranks)
        """For each position in `ranks`, the index of its rank in the process group, which orders by
        rank.
        """
        self._places = sorted(range(self.size), key=self.order.__getitem__)
        """For each index in the process group, the position of the rank in `ranks`: the inverse of
        `order`.
        """
        self._traffic = transport.traffic
        self._waiting = transport.heartbeat.waiting
        self._transport = transport
        self._along: dict[MeshAxes, Group] = {}

    @cached_property
    def _process_group(self) -> dist.ProcessGroup | None:
        """The torch process group, looked up at the first collective. It exists only if these ranks
        communicate: some stages communicate along mesh axes only.
        """
        return self._transport.group(self.ranks)

    def along(self, *axes: tuple[int, int]) -> Group:
        """Return the group of ranks that differ from this one along `axes` only, each given as
        (degree, stride), outer to inner.
        """
        wanted = tuple(MeshAxis(*axis) for axis in axes)
        if wanted not in self._along:
            ranks = tuple(self.ranks[position] for position in group_members(wanted, self.position))
            self._along[wanted] = Group(ranks, self._transport)
        return self._along[wanted]

    def all_reduce(self, tensor: torch.Tensor, divisor: int = 1) -> torch.Tensor:
        """Return the sum of all ranks' tensors divided by `divisor`."""
        total = _apply_collective(tensor, self._sum, self._sum)
        return total / divisor if divisor > 1 else total

    def all_gather(self, tensor: torch.Tensor, dimension: int) -> torch.Tensor:
        """Return the ranks' shards concatenated along `dimension`."""
        return _apply_collective(
            tensor, partial(self._gather, dimension), partial(self._scatter, dimension)
        )

    def reduce_scatter(
        self, tensor: torch.Tensor, dimension: int, divisor: int = 1
    ) -> torch.Tensor:
        """Return this rank's shard along `dimension` of the sum of all ranks' tensors divided by
        `divisor`.
        """
        total = _apply_collective(
            tensor, partial(self._scatter, dimension), partial(self._gather, dimension)
        )
        return total / divisor if divisor > 1 else total

    def all_to_all(self, tensor: torch.Tensor, origin: int, dimension: int) -> torch.Tensor:
        """Turn shards along `origin` into shards along `dimension`; return this rank's."""
        return _apply_collective(
            tensor,
            partial(self._reshard, origin, dimension),
            partial(self._reshard, dimension, origin),
        )

    def redistribute(
        self,
        tensor: torch.Tensor,
        source: ShardAxes,
        target: ShardAxes,
        windows: Windows = (),
        fill: float = 0.0,
    ) -> torch.Tensor:
        """Return this rank's shard under `target` of a tensor that is sharded by `source`; both
        give the mesh axes of each dimension. Ranks send one another only the elements that are
        missing.

        Shards under `windows` may overlap; parts outside of the tensor are set to `fill`. The
        backward sends each element's gradient to the rank that sent the element, which adds them
        up.
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
        """Return this rank's shard extended by the neighbours' elements that `windows` read (a halo
        exchange). The mesh axes of each dimension stay the same.
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
        """Return the result of `redistribute` if no rank lacks an element of its new shard. Sends
        nothing.
        """
        shape, sent, received = _plan_slice_exchange(
            tuple(tensor.shape), self.size, self.position, source, target, windows
        )
        result = tensor.new_full(shape, fill)
        for before, after in zip(sent[self.position], received[self.position], strict=True):
            result[after] = tensor[before]
        return result

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors without a gradient."""
        return self._sum(tensor.detach())

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the maximum of all ranks' tensors for each element, without a gradient."""
        return self._sum(tensor.detach(), dist.ReduceOp.MAX)

    def slice(self, tensor: torch.Tensor, dimension: int) -> torch.Tensor:
        """Return this rank's shard along `dimension` of a replicated tensor."""
        size = tensor.shape[dimension] // self.size
        return tensor.narrow(dimension, self.position * size, size)

    def _sum(
        self, tensor: torch.Tensor, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> torch.Tensor:
        self._traffic["all_reduce"] += tensor.nbytes
        with self._waiting():
            return start_all_reduce(tensor, self._process_group, how, in_place=False).wait()

    def _gather(self, dimension: int, tensor: torch.Tensor) -> torch.Tensor:
        self._traffic["all_gather"] += tensor.nbytes * self.size
        with self._waiting():
            parts = all_gather(tensor, self._process_group)
        return torch.cat([parts[place] for place in self.order], dimension)

    def _scatter(self, dimension: int, tensor: torch.Tensor) -> torch.Tensor:
        self._traffic["reduce_scatter"] += tensor.nbytes
        rows = tensor.unflatten(dimension, (self.size, -1)).movedim(dimension, 0)
        if self._places != list(range(self.size)):
            rows = rows[self._places]
        with self._waiting():
            return start_reduce_scatter(rows, self._process_group).wait()

    def _reshard(self, origin: int, dimension: int, tensor: torch.Tensor) -> torch.Tensor:
        parts = [part.contiguous() for part in tensor.chunk(self.size, dimension)]
        self._traffic["all_to_all"] += tensor.nbytes
        arrived = self._all_to_all(
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
        """Send the slices `sent[i]` of `before` to position i. Yield (slice of `after`, received
        tensor) for each slice in `received`.
        """
        parts = [
            torch.cat([before[box].reshape(-1) for box in boxes]) if boxes else before.new_empty(0)
            for boxes in sent
        ]
        shapes = [[after[box].shape for box in boxes] for boxes in received]
        sizes = [sum(shape.numel() for shape in each) for each in shapes]
        self._traffic["redistribute"] += (sum(sizes) - sizes[self.position]) * after.element_size()
        for boxes, each, whole in zip(
            received, shapes, self._all_to_all(parts, sizes), strict=True
        ):
            flat = whole.split([shape.numel() for shape in each])
            yield from (
                (box, part.reshape(shape))
                for box, shape, part in zip(boxes, each, flat, strict=True)
            )

    def _all_to_all(self, parts: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
        """Send the flat tensor `parts[i]` to position i; return the flat tensors of `sizes[i]`
        elements from each position i.
        """
        sent = torch.cat([parts[position] for position in self._places])
        received = sent.new_empty(sum(sizes))
        outgoing = [len(parts[position]) for position in self._places]
        incoming = [sizes[position] for position in self._places]
        backend = dist.get_backend(self._process_group)
        if backend == "fake":  # A dry run: the fake backend does not accept sizes of 0.
            received.zero_()
        else:
            # Gloo's all-to-all accepts tensors in host memory only.
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
    """Return (shape, sent, received) of a redistribution for the rank at `position` of `size`,
    whose shard under `source` has the given shape.

    shape: of its shard under `target`. sent: for each position, the slices of the old shard that
    this rank sends there. received: for each position, the slices of the new shard that come from
    there.
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
            sent[move.target].append(move.part.within(have.shard(position)).slices)
        if move.target == position:
            received[move.source].append(move.part.within(need.shard(position)).slices)
    return need.local_shape(), tuple(map(tuple, sent)), tuple(map(tuple, received))
