"""The parts of a node that a group computes together, each in a thread that waits for the others to exchange."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

_TIMEOUT_S = 60.0
Result = TypeVar("Result")


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


@dataclass(frozen=True, slots=True)
class Member:
    """A group as one of its members sees it."""

    meeting: Meeting
    position: int

    @property
    def size(self) -> int:
        """Number of members."""
        return self.meeting.size

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over the group."""
        return self.meeting.exchanged(self.position, tensor).sum(0)

    def largest(self, tensor: Tensor) -> Tensor:
        """The largest over the group."""
        return self.meeting.exchanged(self.position, tensor).amax(0)


def together(parts: Sequence[Callable[[Member], Result]]) -> list[Result]:
    """What each part gives as a member of one group."""
    meeting = Meeting(len(parts))

    def joined(position: int, part: Callable[[Member], Result]) -> Result:
        try:
            return part(Member(meeting, position))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(len(parts)) as pool:
        return [each.result() for each in [pool.submit(joined, *item) for item in enumerate(parts)]]
