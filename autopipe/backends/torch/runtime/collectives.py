"""Exchanges inside a stage's group, as generated code calls them: differentiable, each one's backward its transpose.

The ranks of a group compute one function together. A rank's gradient of a tensor it holds a copy of is its share:
the shares of all copies add up to the gradient. See `autopipe.passes.lower.shard`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from autopipe.backends.torch.runtime.transport import (
    everyones,
    goes_at_once,
    is_summed_at_once,
    start_sum,
    start_sum_of_rows,
)
from autopipe.ir.layout import Box, Layout, MeshAxes, MeshAxis, WindowedBlocks, degree_of, members, moves_between

if TYPE_CHECKING:
    from autopipe.backends.torch.runtime.transport import Transport

Cuts = tuple[tuple[tuple[int, int], ...], ...]
"""For each dimension of a tensor the axes of a mesh that cut it, outer to inner, as degree and stride."""

Windows = tuple[tuple[int, int, int, int], ...]
"""Dimensions read through windows, each with the step, offset and length of its blocks: see `WindowedBlocks`."""


class Group:
    """Ranks that exchange something, as seen from one of them: a stage's group, or those along axes of its mesh."""

    def __init__(self, ranks: tuple[int, ...], transport: Transport) -> None:
        """As the rank of `transport`, one of `ranks`, sees it; what it exchanges is counted there."""
        self.ranks = ranks
        self.size = len(ranks)
        self.position = ranks.index(transport.rank)
        self.order = tuple(sorted(ranks).index(each) for each in ranks)
        """Where each position's part is in what the process group gathers, which is by rank."""
        self.process_group = transport.group(tuple(sorted(ranks)))
        self.traffic = transport.traffic
        self.heartbeat = transport.heartbeat
        self._transport = transport
        self._along: dict[MeshAxes, Group] = {}

    def along(self, *axes: tuple[int, int]) -> Group:
        """The ranks that differ from this one along `axes` alone, each given as degree and stride, outer to inner."""
        wanted = tuple(MeshAxis(*axis) for axis in axes)
        if wanted not in self._along:
            ranks = tuple(self.ranks[position] for position in members(wanted, self.position))
            self._along[wanted] = Group(ranks, self._transport)
        return self._along[wanted]

    def all_reduce(self, tensor: torch.Tensor, divisor: int = 1) -> torch.Tensor:
        """The sum of all ranks' tensors, divided by `divisor`."""
        total: torch.Tensor = _AllReduce.apply(tensor, self)  # type: ignore[no-untyped-call]
        return total / divisor if divisor > 1 else total

    def all_gather(self, tensor: torch.Tensor, dimension: int) -> torch.Tensor:
        """The ranks' shards joined along `dimension`."""
        gathered: torch.Tensor = _AllGather.apply(tensor, self, dimension)  # type: ignore[no-untyped-call]
        return gathered

    def reduce_scatter(self, tensor: torch.Tensor, dimension: int, divisor: int = 1) -> torch.Tensor:
        """This rank's shard along `dimension` of the sum of all ranks' tensors, divided by `divisor`."""
        total: torch.Tensor = _ReduceScatter.apply(tensor, self, dimension)  # type: ignore[no-untyped-call]
        return total / divisor if divisor > 1 else total

    def all_to_all(self, tensor: torch.Tensor, origin: int, dimension: int) -> torch.Tensor:
        """Of shards along `origin` this rank's shard along `dimension`."""
        exchanged: torch.Tensor = _AllToAll.apply(tensor, self, origin, dimension)  # type: ignore[no-untyped-call]
        return exchanged

    def redistribute(
        self, tensor: torch.Tensor, source: Cuts, target: Cuts, windows: Windows = (), fill: float = 0.0
    ) -> torch.Tensor:
        """This rank's block under `target` of a tensor held as `source` says, both as axes by dimension.

        Axes are given as degree and stride. Ranks send one another what they lack. Blocks of `windows` may overlap;
        where one sticks out of the tensor it is filled.
        """
        moves = _moves(tuple(tensor.shape), self.size, self.position, source, target, windows)
        moved: torch.Tensor = _Redistribute.apply(tensor, self, moves, fill)  # type: ignore[no-untyped-call]
        return moved

    def edges(self, tensor: torch.Tensor, cuts: Cuts, windows: Windows, fill: float = 0.0) -> torch.Tensor:
        """This rank's block with what `windows` read of its neighbours': the same where no axes change."""
        return self.redistribute(tensor, cuts, cuts, windows, fill)

    def window(
        self, tensor: torch.Tensor, source: Cuts, target: Cuts, windows: Windows, fill: float = 0.0
    ) -> torch.Tensor:
        """The same block where no rank lacks any of it: nothing is sent."""
        moves = _moves(tuple(tensor.shape), self.size, self.position, source, target, windows)
        result = tensor.new_full(moves.shape, fill)
        for before, after in zip(moves.sent[self.position], moves.received[self.position], strict=True):
            result[after] = tensor[before]
        return result

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, as a number without a gradient of its own."""
        return _sum(tensor.detach(), self)

    def largest(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest of all ranks' tensors, element by element, as a number without a gradient of its own."""
        return _reduced(tensor.detach(), self, dist.ReduceOp.MAX)

    def slice(self, tensor: torch.Tensor, dimension: int) -> torch.Tensor:
        """This rank's shard of a tensor that every rank holds whole."""
        extent = tensor.shape[dimension] // self.size
        return tensor.narrow(dimension, self.position * extent, extent)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        context.group = group
        return _sum(tensor, group)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(gradients[0], context.group), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, group: Group, dimension: int) -> torch.Tensor:
        context.group, context.dimension = group, dimension
        return _gathered(tensor, group, dimension)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _scattered(gradients[0], context.group, context.dimension), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, group: Group, dimension: int) -> torch.Tensor:
        context.group, context.dimension = group, dimension
        return _scattered(tensor, group, dimension)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _gathered(gradients[0], context.group, context.dimension), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, group: Group, origin: int, dimension: int) -> torch.Tensor:
        context.group, context.origin, context.dimension = group, origin, dimension
        return _exchanged(tensor, group, origin, dimension)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchanged(gradients[0], context.group, context.dimension, context.origin), None, None, None


class _Redistribute(torch.autograd.Function):
    """Backward sends every block's gradient to where it came from, which adds up what comes back."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, group: Group, moves: _Moves, fill: float) -> torch.Tensor:
        context.group, context.moves, context.shape = group, moves, tensor.shape
        result = tensor.new_full(moves.shape, fill)
        arrived = _swapped([[tensor[box] for box in boxes] for boxes in moves.sent], moves.received, result, group)
        for boxes, blocks in zip(moves.received, arrived, strict=True):
            for box, block in zip(boxes, blocks, strict=True):
                result[box] = block
        return result

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        moves, group = context.moves, context.group
        (gradient,) = gradients
        result = gradient.new_zeros(context.shape)
        arrived = _swapped([[gradient[box] for box in boxes] for boxes in moves.received], moves.sent, result, group)
        for boxes, blocks in zip(moves.sent, arrived, strict=True):
            for box, block in zip(boxes, blocks, strict=True):
                result[box] += block
        return result, None, None, None


Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class _Moves:
    """Blocks that a rank sends to and receives from each position, of its own tensors before and after."""

    shape: tuple[int, ...]
    sent: tuple[tuple[Slices, ...], ...]
    received: tuple[tuple[Slices, ...], ...]


@lru_cache(maxsize=4096)
def _moves(shape: tuple[int, ...], size: int, position: int, source: Cuts, target: Cuts, windows: Windows) -> _Moves:
    """For the rank at `position` of `size`, whose block before has `shape`."""
    before, after = (tuple(tuple(MeshAxis(*axis) for axis in axes) for axes in cuts) for cuts in (source, target))
    whole = tuple(extent * degree_of(axes) for extent, axes in zip(shape, before, strict=True))
    through = {dimension: WindowedBlocks(*numbers) for dimension, *numbers in windows}
    have = Layout(whole, before)
    need = Layout(whole, after, windows=tuple(map(through.get, range(len(whole)))) if windows else ())
    sent: list[list[Slices]] = [[] for _ in range(size)]
    received: list[list[Slices]] = [[] for _ in range(size)]
    for move in moves_between(have, need, size):
        if move.source == position:
            sent[move.target].append(_slices(move.box.within(have.box(position))))
        if move.target == position:
            received[move.source].append(_slices(move.box.within(need.box(position))))
    return _Moves(need.local_shape(), tuple(map(tuple, sent)), tuple(map(tuple, received)))


def _slices(box: Box) -> Slices:
    return tuple(map(slice, box.starts, box.stops))


def _swapped(
    blocks: list[list[torch.Tensor]], expected: tuple[tuple[Slices, ...], ...], like: torch.Tensor, group: Group
) -> list[list[torch.Tensor]]:
    """Send `blocks[i]` to position i and receive from it what fills the `expected` parts of `like`; by position."""
    parts = [torch.cat([block.reshape(-1) for block in each]) if each else like.new_empty(0) for each in blocks]
    shapes = [[like[box].shape for box in boxes] for boxes in expected]
    sizes = [sum(shape.numel() for shape in each) for each in shapes]
    arrived = _all_to_all(parts, sizes, group)
    own = sizes[group.position]
    group.traffic["redistribute"] += (sum(sizes) - own) * like.element_size()
    return [
        [part.reshape(shape) for part, shape in zip(whole.split([s.numel() for s in each]), each, strict=True)]
        for whole, each in zip(arrived, shapes, strict=True)
    ]


def _all_to_all(parts: list[torch.Tensor], sizes: list[int], group: Group) -> list[torch.Tensor]:
    """Flat parts to each position for flat parts of `sizes` elements from each position."""
    places = sorted(range(group.size), key=group.order.__getitem__)
    sent = torch.cat([parts[place] for place in places])
    received = sent.new_empty(sum(sizes))
    outgoing, incoming = [len(parts[place]) for place in places], [sizes[place] for place in places]
    backend = dist.get_backend(group.process_group)
    if sent.is_cuda and backend == "gloo":  # It exchanges tensors of the host alone.
        host = received.cpu()
        with group.heartbeat.waiting():
            dist.all_to_all_single(host, sent.cpu(), incoming, outgoing, group=group.process_group)
        received.copy_(host)
    elif backend == "fake":  # That of dry runs lets no rank receive that sends nothing.
        received.zero_()
    else:
        with group.heartbeat.waiting():
            dist.all_to_all_single(received, sent, incoming, outgoing, group=group.process_group)
    by_rank = received.split(incoming)
    return [by_rank[place] for place in group.order]


def _exchanged(tensor: torch.Tensor, group: Group, origin: int, dimension: int) -> torch.Tensor:
    parts = [part.contiguous() for part in tensor.chunk(group.size, dimension)]
    group.traffic["all_to_all"] += tensor.nbytes
    arrived = _all_to_all([part.reshape(-1) for part in parts], [parts[0].numel()] * group.size, group)
    return torch.cat([part.reshape(parts[0].shape) for part in arrived], origin)


def _sum(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    return _reduced(tensor, group, dist.ReduceOp.SUM)


def _reduced(tensor: torch.Tensor, group: Group, how: dist.ReduceOp.RedOpType) -> torch.Tensor:
    group.traffic["all_reduce"] += tensor.nbytes
    return _combined(tensor, group, how)


def _combined(tensor: torch.Tensor, group: Group, how: dist.ReduceOp.RedOpType) -> torch.Tensor:
    if is_summed_at_once(tensor, group.process_group):
        with group.heartbeat.waiting():
            return start_sum(tensor, group.process_group, how).wait()
    total = tensor.clone(memory_format=torch.contiguous_format)
    with group.heartbeat.waiting():
        dist.all_reduce(total, how, group=group.process_group)
    return total


def _gathered(tensor: torch.Tensor, group: Group, dimension: int) -> torch.Tensor:
    group.traffic["all_gather"] += tensor.nbytes * group.size
    if goes_at_once(tensor, group.process_group):
        with group.heartbeat.waiting():
            rows = everyones(tensor, group.process_group)
        return torch.cat([rows[place] for place in group.order], dimension)
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size)]
    with group.heartbeat.waiting():
        dist.all_gather(parts, tensor.contiguous(), group=group.process_group)
    return torch.cat([parts[place] for place in group.order], dimension)


def _scattered(tensor: torch.Tensor, group: Group, dimension: int) -> torch.Tensor:
    group.traffic["reduce_scatter"] += tensor.nbytes
    if tensor.is_cuda and dist.get_backend(group.process_group) == "gloo":  # It scatters tensors of the host alone.
        return group.slice(_combined(tensor, group, dist.ReduceOp.SUM), dimension).contiguous()
    parts = tensor.chunk(group.size, dimension)
    by_rank = [parts[group.order.index(place)].contiguous() for place in range(group.size)]
    if goes_at_once(tensor, group.process_group):
        with group.heartbeat.waiting():
            return start_sum_of_rows(torch.stack(by_rank), group.process_group).wait()
    shard = torch.empty_like(by_rank[0])
    with group.heartbeat.waiting():
        dist.reduce_scatter(shard, by_rank, group=group.process_group)
    return shard
