"""The parts of a node that a group computes together, each in a thread that waits for the others to
exchange.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

_TIMEOUT_S = 60.0
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Told:
    """One exchange as a member made it: kind, bytes, and whether in backward."""

    kind: str
    bytes: int
    backward: bool


@dataclass(slots=True)
class Meeting:
    """Where the members of a group put what they exchange."""

    size: int
    barrier: threading.Barrier = field(init=False)
    brought: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size)

    def exchanged(self, position: int, tensor: Tensor) -> Tensor:
        """All members' tensors, stacked."""
        self.brought[position] = tensor.detach()
        self.barrier.wait(_TIMEOUT_S)
        found = torch.stack([self.brought[each] for each in range(self.size)])
        self.barrier.wait(_TIMEOUT_S)
        return found


@dataclass(slots=True)
class Meetings:
    """All groups of some ranks, by their members in order."""

    size: int
    found: dict[tuple[int, ...], Meeting] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, ranks: tuple[int, ...]) -> Meeting:
        """The meeting of these ranks."""
        with self.lock:
            return self.found.setdefault(ranks, Meeting(len(ranks)))

    def abort(self) -> None:
        """Let nobody wait for one who will not come."""
        with self.lock:
            for meeting in self.found.values():
                meeting.barrier.abort()


@dataclass(frozen=True, slots=True)
class Member:
    """A group as one of its members sees it; `log` is what the member has told in any group."""

    meetings: Meetings
    ranks: tuple[int, ...]
    position: int
    log: list[Told] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def along(self, *axes: tuple[int, int]) -> Member:
        """The members that differ from this one along axes (degree, stride) of the group alone, in
        their order.
        """
        position = self.position
        found = [position - sum(position // stride % degree * stride for degree, stride in axes)]
        for degree, stride in axes:
            found = [each + place * stride for each in found for place in range(degree)]
        return Member(
            self.meetings,
            tuple(self.ranks[each] for each in found),
            found.index(position),
            self.log,
        )

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """The sum over the group."""
        return self._exchanged("all_reduce", tensor).sum(0)

    def max_over_ranks(self, tensor: Tensor) -> Tensor:
        """The largest over the group."""
        return self._exchanged("all_reduce", tensor).amax(0)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the group, which every member goes on with: what comes back to all of them
        is added up too.
        """
        found: Tensor = _AllReduce.apply(tensor, self)  # type: ignore[no-untyped-call]
        return found

    def all_gather(self, tensor: Tensor, dimension: int) -> Tensor:
        """The members' parts joined along a dimension; its backward adds up and shares out."""
        found: Tensor = _AllGather.apply(tensor, self, dimension)  # type: ignore[no-untyped-call]
        return found

    def _exchanged(self, kind: str, tensor: Tensor) -> Tensor:
        size = tensor.nbytes * (self.size if kind == "all_gather" else 1)
        self.log.append(Told(kind, size, torch._C._current_autograd_node() is not None))
        return self.meetings.of(self.ranks).exchanged(self.position, tensor)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, member: Member) -> Tensor:
        context.member = member
        return member.sum_over_ranks(tensor)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return context.member.sum_over_ranks(gradients[0]), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, member: Member, dimension: int) -> Tensor:
        context.member = member
        context.dimension = dimension
        return torch.cat(list(member._exchanged("all_gather", tensor)), dimension)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        member = context.member
        total = member._exchanged("reduce_scatter", gradients[0]).sum(0)
        return total.chunk(member.size, context.dimension)[member.position].contiguous(), None, None


def together(parts: Sequence[Callable[[Member], Result]]) -> list[Result]:
    """What each part gives as a member of one group."""
    meetings = Meetings(len(parts))
    meetings.of(tuple(range(len(parts))))

    def joined(position: int, part: Callable[[Member], Result]) -> Result:
        try:
            return part(Member(meetings, tuple(range(len(parts))), position))
        except BaseException:
            meetings.abort()
            raise

    with ThreadPoolExecutor(len(parts)) as pool:
        return [each.result() for each in [pool.submit(joined, *item) for item in enumerate(parts)]]
