"""The words in which a rank's file says what a stage takes and gives."""

from __future__ import annotations

from dataclasses import dataclass

Slices = tuple[tuple[int, int], ...]
"""A block of a tensor: (start, stop) in each dimension."""


@dataclass(frozen=True, slots=True)
class Data:
    """An argument read from the batch: the block `box` of one micro-batch of the graph input `name`."""

    argument: str
    name: str
    box: Slices


@dataclass(frozen=True, slots=True)
class Receive:
    """An argument, or the block `box` of it, that comes from a stage on `rank`; its gradient goes back there."""

    argument: str
    rank: int
    stage: int
    channel: int
    gradient: bool = True
    box: Slices | None = None
    slice: tuple[int, int] = (0, 1)
    """Index and count of the `Turn` of the stage's micro-batches of which it carries something."""


@dataclass(frozen=True, slots=True)
class Send:
    """A result, or the block `box` of it, that goes to a stage on `rank`; its gradient comes back from there."""

    result: int
    rank: int
    stage: int
    channel: int
    gradient: bool = True
    box: Slices | None = None
    slice: tuple[int, int] = (0, 1)
    """Index and count of the `Turn` of the stage's micro-batches of which it carries something."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The result that is the loss; `share` is its weight in the step's loss, over all ranks and micro-batches."""

    result: int
    share: float


Wire = Data | Receive | Send | Loss
