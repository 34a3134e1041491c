"""Ports: the arguments and results of a stage. Generated files pass them to `rank.stage(...)`."""

from __future__ import annotations

from dataclasses import InitVar, dataclass

from autopipe.backends.torch.runtime.data.sample_source import BlockRanges
from autopipe.backends.torch.runtime.deprecated import warn_of_old_name


@dataclass(frozen=True, slots=True)
class Data:
    """The argument `argument` of the stage's forward, which is read from the input data."""

    argument: str
    name: str
    """Name of the graph input that provides the data."""
    offsets: BlockRanges
    """The slice of the graph input that this rank reads, within one micro-batch: (start, stop) of
    each dimension.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePort:
    """A tensor, or a slice of it, that this stage exchanges with another stage, which may be on
    another rank or on this one. `rank` is the rank of the other stage; `channel` is the number of
    the channel.
    """

    rank: int
    stage: int
    """Number of the other stage."""
    channel: int
    gradient: bool = True
    """True if the gradient of the tensor is sent in the other direction."""
    dtype: str | None = None
    """Element type in which the tensor is sent; None for the type of the tensor itself. It may have
    fewer bits.
    """
    offsets: BlockRanges | None = None
    """The slice that is sent: (start, stop) of each dimension; None for the full tensor."""
    slice: tuple[int, int] = (0, 1)
    """(index, count): the port is used by the micro-batches index, index + count, index + 2 ·
    count, ... of this stage (`MicroBatchSlice`).
    """
    part: int = 0
    """Index of the other stage's `MicroBatchSlice`, which selects the micro-batches of that stage
    that use the channel.
    """
    box: InitVar[BlockRanges | None] = None
    """Old name of `offsets`, in programs of the previous release."""

    def __post_init__(self, box: BlockRanges | None) -> None:
        if box is not None:
            warn_of_old_name("box=", "offsets=")
            object.__setattr__(self, "offsets", box)


@dataclass(frozen=True, slots=True)
class Recv(RemotePort):
    """The argument `argument` of the stage's forward, which another stage computes."""

    argument: str


@dataclass(frozen=True, slots=True)
class Send(RemotePort):
    """A result of the stage's forward that another stage reads."""

    result: int
    """Index of the result of the stage's forward."""


@dataclass(frozen=True, slots=True)
class WeightedResult:
    """A scalar result whose weighted sum over all ranks and micro-batches is computed."""

    result: int
    """Index of the result of the stage's forward."""
    weight: float = 0.0
    """Weight of one micro-batch's result in the sum."""
    share: InitVar[float | None] = None
    """Old name of `weight`, in programs of the previous release."""

    def __post_init__(self, share: float | None) -> None:
        if share is not None:
            warn_of_old_name("share=", "weight=")
            object.__setattr__(self, "weight", share)


class Loss(WeightedResult):
    """The result that is the loss of a micro-batch. Its weighted sum over a batch is the loss of
    the batch.
    """

    __slots__ = ()


class Labels(WeightedResult):
    """The result that is the number of a micro-batch's labels that are not ignored. Its weighted
    sum over a batch is the fraction of the batch's labels that are not ignored.
    """

    __slots__ = ()


Port = Data | Recv | Send | Loss | Labels
