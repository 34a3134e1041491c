"""Exchanges inside a stage's group, as generated code calls them: differentiable, each one's
backward its transpose. The ranks of a group compute one function together. A rank's gradient of a
tensor it holds a copy of is its share: the shares of all copies add up to the gradient. See
`autopipe.passes.lower.shard`.
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
    degree_of,
    group_members,
    slice_transfers,
)

Exchange = Callable[[torch.Tensor], torch.Tensor]

Cuts = tuple[tuple[tuple[int, int], ...], ...]
"""For each dimension of a tensor the axes of a mesh that cut it, outer to inner, as degree and
stride.
"""

Windows = tuple[tuple[int, int, int, int], ...]
"""Dimensions read through windows, each with the step, offset and length of its blocks: see
`WindowedShards`.
"""

Slices = tuple[slice, ...]
Blocks = tuple[tuple[Slices, ...], ...]  # By position.


class Group:
    """Ranks that exchange something, as seen from one of them: a stage's group, or those along axes
    of its mesh.
    """

    def __init__(self, ranks: tuple[int, ...], transport: Transport) -> None:
        """As the rank of `transport`, one of `ranks`, sees it; what it exchanges is counted
        there.
        """
        self.ranks = ranks
        self.size = len(ranks)
        self.position = ranks.index(transport.rank)
        self.order = tuple(sorted(ranks).index(each) for each in ranks)
        """Where each position's part is in what the process group gathers, which is by rank."""
        self._places = sorted(range(self.size), key=self.order.__getitem__)
        """The position of each rank, the other way round."""
        self._traffic = transport.traffic
        self._waiting = transport.heartbeat.waiting
        self._transport = transport
        self._along: dict[MeshAxes, Group] = {}

    @cached_property
    def _process_group(self) -> dist.ProcessGroup | None:
        """Made only where its ranks exchange anything: a stage's ranks may do so along axes of
        their mesh alone.
        """
        return self._transport.group(self.ranks)

    def along(self, *axes: tuple[int, int]) -> Group:
        """The ranks that differ from this one along `axes` alone, each given as degree and stride,
        outer to inner.
        """
        wanted = tuple(MeshAxis(*axis) for axis in axes)
        if wanted not in self._along:
            ranks = tuple(self.ranks[position] for position in group_members(wanted, self.position))
            self._along[wanted] = Group(ranks, self._transport)
        return self._along[wanted]

    def all_reduce(self, tensor: torch.Tensor, divisor: int = 1) -> torch.Tensor:
        """The sum of all ranks' tensors, divided by `divisor`."""
        total = _exchange(tensor, self._sum, self._sum)
        return total / divisor if divisor > 1 else total

    def all_gather(self, tensor: torch.Tensor, dimension: int) -> torch.Tensor:
        """The ranks' shards joined along `dimension`."""
        return _exchange(
            tensor, partial(self._gather, dimension), partial(self._scatter, dimension)
        )

    def reduce_scatter(
        self, tensor: torch.Tensor, dimension: int, divisor: int = 1
    ) -> torch.Tensor:
        """This rank's shard along `dimension` of the sum of all ranks' tensors, divided by
        `divisor`.
        """
        total = _exchange(
            tensor, partial(self._scatter, dimension), partial(self._gather, dimension)
        )
        return total / divisor if divisor > 1 else total

    def all_to_all(self, tensor: torch.Tensor, origin: int, dimension: int) -> torch.Tensor:
        """Of shards along `origin` this rank's shard along `dimension`."""
        return _exchange(
            tensor,
            partial(self._reshard, origin, dimension),
            partial(self._reshard, dimension, origin),
        )

    def redistribute(
        self,
        tensor: torch.Tensor,
        source: Cuts,
        target: Cuts,
        windows: Windows = (),
        fill: float = 0.0,
    ) -> torch.Tensor:
        """This rank's block under `target` of a tensor held as `source` says, both as axes by
        dimension. Ranks send one another what they lack. Blocks of `windows` may overlap; where one
        sticks out of the tensor it is filled. Backward sends every block's gradient to where it
        came from, which adds up what comes back.
        """
        origin = tuple(tensor.shape)
        shape, sent, received = _moves(origin, self.size, self.position, source, target, windows)

        def there(before: torch.Tensor) -> torch.Tensor:
            after = before.new_full(shape, fill)
            for box, block in self._swap(before, sent, after, received):
                after[box] = block
            return after

        def back(gradient: torch.Tensor) -> torch.Tensor:
            total = gradient.new_zeros(origin)
            for box, block in self._swap(gradient, received, total, sent):
                total[box] += block
            return total

        return _exchange(tensor, there, back)

    def edges(
        self, tensor: torch.Tensor, cuts: Cuts, windows: Windows, fill: float = 0.0
    ) -> torch.Tensor:
        """This rank's block with what `windows` read of its neighbours': the same where no axes
        change.
        """
        return self.redistribute(tensor, cuts, cuts, windows, fill)

    def window(
        self, tensor: torch.Tensor, source: Cuts, target: Cuts, windows: Windows, fill: float = 0.0
    ) -> torch.Tensor:
        """The same block where no rank lacks any of it: nothing is sent."""
        shape, sent, received = _moves(
            tuple(tensor.shape), self.size, self.position, source, target, windows
        )
        result = tensor.new_full(shape, fill)
        for before, after in zip(sent[self.position], received[self.position], strict=True):
            result[after] = tensor[before]
        return result

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, as a number without a gradient of its own."""
        return self._sum(tensor.detach())

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest of all ranks' tensors, element by element, as a number without a gradient of
        its own.
        """
        return self._sum(tensor.detach(), dist.ReduceOp.MAX)

    def slice(self, tensor: torch.Tensor, dimension: int) -> torch.Tensor:
        """This rank's shard of a tensor that every rank holds whole."""
        extent = tensor.shape[dimension] // self.size
        return tensor.narrow(dimension, self.position * extent, extent)

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

    def _swap(
        self, before: torch.Tensor, sent: Blocks, after: torch.Tensor, received: Blocks
    ) -> Iterator[tuple[Slices, torch.Tensor]]:
        """Send the blocks `sent[i]` of one tensor to position i; where in the other what comes back
        belongs, and it.
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
        """Flat parts to each position for flat parts of `sizes` elements from each position."""
        sent = torch.cat([parts[position] for position in self._places])
        received = sent.new_empty(sum(sizes))
        outgoing = [len(parts[position]) for position in self._places]
        incoming = [sizes[position] for position in self._places]
        backend = dist.get_backend(self._process_group)
        if backend == "fake":  # That of dry runs lets no rank receive that sends nothing.
            received.zero_()
        else:
            device = (
                "cpu" if backend == "gloo" else sent.device
            )  # Gloo exchanges tensors of the host alone.
            arrives = received.to(device)
            with self._waiting():
                all_to_all(arrives, sent.to(device), incoming, outgoing, self._process_group)
            received = arrives.to(received.device)
        by_rank = received.split(incoming)
        return [by_rank[place] for place in self.order]


class _Transposed(torch.autograd.Function):
    """An exchange whose backward is another one, its transpose."""

    @staticmethod
    def forward(
        context: Any, tensor: torch.Tensor, run: Exchange, transpose: Exchange
    ) -> torch.Tensor:
        context.transpose = transpose
        return run(tensor)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return context.transpose(gradients[0]), None, None


def _exchange(tensor: torch.Tensor, run: Exchange, transpose: Exchange) -> torch.Tensor:
    result: torch.Tensor = _Transposed.apply(tensor, run, transpose)  # type: ignore[no-untyped-call]
    return result


@lru_cache(maxsize=4096)
def _moves(
    shape: tuple[int, ...], size: int, position: int, source: Cuts, target: Cuts, windows: Windows
) -> tuple[tuple[int, ...], Blocks, Blocks]:
    """For the rank at `position` of `size`, whose block before has `shape`: the shape of its block
    after, and the parts of the first that it sends to each position and of the second that it
    receives from each.
    """
    before, after = (
        tuple(tuple(MeshAxis(*axis) for axis in axes) for axes in cuts) for cuts in (source, target)
    )
    whole = tuple(extent * degree_of(axes) for extent, axes in zip(shape, before, strict=True))
    through = {dimension: WindowedShards(*numbers) for dimension, *numbers in windows}
    have = Layout(whole, before)
    need = Layout(
        whole, after, windows=tuple(map(through.get, range(len(whole)))) if windows else ()
    )
    sent: list[list[Slices]] = [[] for _ in range(size)]
    received: list[list[Slices]] = [[] for _ in range(size)]
    for move in slice_transfers(have, need, size):
        if move.source == position:
            sent[move.target].append(move.part.within(have.shard(position)).slices)
        if move.target == position:
            received[move.source].append(move.part.within(need.shard(position)).slices)
    return need.local_shape(), tuple(map(tuple, sent)), tuple(map(tuple, received))
