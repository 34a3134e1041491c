"""Arguments and results of a stage, as generated files pass them to `rank.stage(...)`."""

from __future__ import annotations

from dataclasses import InitVar, dataclass

from autopipe.backends.torch.runtime.data.sample_source import BlockRanges
from autopipe.backends.torch.runtime.deprecated import warn_of_old_name


@dataclass(frozen=True, slots=True)
class Data:
    """An argument of the stage's forward that is read from the batch."""

    argument: str
    name: str
    """Name of the graph input."""
    offsets: BlockRanges
    """The slice of one micro-batch of the graph input: (start, stop) of each dimension."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePort:
    """A tensor, or a slice of it, that a stage exchanges with a stage on `rank`."""

    rank: int
    stage: int
    """Number of the other stage."""
    channel: int
    gradient: bool = True
    """True if the gradient of the tensor goes in the other direction."""
    dtype: str | None = None
    """Element type in which the tensor is sent, None for the tensor's own; it may be narrower."""
    offsets: BlockRanges | None = None
    """(start, stop) of each dimension of the slice that is sent; None for the full tensor."""
    slice: tuple[int, int] = (0, 1)
    """Index and count of the `MicroBatchSlice` of this stage's micro-batches that use the port."""
    part: int = 0
    """Index of the `MicroBatchSlice` of the other stage's micro-batches."""
    box: InitVar[BlockRanges | None] = None
    """Name of `offsets` in programs of the previous release."""

    def __post_init__(self, box: BlockRanges | None) -> None:
        if box is not None:
            warn_of_old_name("box=", "offsets=")
            object.__setattr__(self, "offsets", box)


@dataclass(frozen=True, slots=True)
class Recv(RemotePort):
    """An argument of the stage's forward that another stage computes."""

    argument: str


@dataclass(frozen=True, slots=True)
class Send(RemotePort):
    """A result of the stage's forward that another stage uses."""

    result: int
    """Index of the result."""


@dataclass(frozen=True, slots=True)
class WeightedResult:
    """A scalar result that is added up over all ranks and micro-batches."""

    result: int
    """Index of the result."""
    weight: float = 0.0
    """Factor of one micro-batch's result in the sum."""
    share: InitVar[float | None] = None
    """Name of `weight` in programs of the previous release."""

    def __post_init__(self, share: float | None) -> None:
        if share is not None:
            warn_of_old_name("share=", "weight=")
            object.__setattr__(self, "weight", share)


class Loss(WeightedResult):
    """The result that is the loss of a micro-batch. The weighted sum is the loss of the step."""

    __slots__ = ()


class Labels(WeightedResult):
    """The result that is the number of a micro-batch's labels that are not ignored. The weighted
    sum is the fraction of the step's labels that are not ignored.
    """

    __slots__ = ()


Port = Data | Recv | Send | Loss | Labels
