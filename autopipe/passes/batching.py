"""How a step's samples are divided into micro-batches where the user leaves it open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopipe.ir.errors import ConfigurationError

AUTO_PER_DEVICE = 4
"""`auto` takes at most this many micro-batches a device: a pipeline of p stages then idles at most (p-1)/(5p-1) of the
step, and more micro-batches gain less than they lose to smaller kernels."""


@dataclass(frozen=True, slots=True)
class Batching:
    """A step's samples, and how many evaluations of the graph they make."""

    batch_size: int
    micro_batches: int

    @property
    def micro_batch_size(self) -> int:
        """Samples of one evaluation."""
        return self.batch_size // self.micro_batches


def batchings(
    batch_size: int | None,
    micro_batches: int | None,
    micro_batch_size: int | None,
    baked: int | None,
    devices: int,
) -> Iterator[Batching]:
    """The divisions that respect what is given, best first; `baked` is the batch that the model's file fixes.

    Where nothing is given, a step has one sample a micro-batch and `AUTO_PER_DEVICE` micro-batches a device, or the
    file's own batch in one micro-batch. Where `micro_batches` is open, it is the largest divisor of the batch that is
    at most `AUTO_PER_DEVICE` times the devices; smaller divisors follow. Raises ConfigurationError for what does not
    divide.
    """
    size = _one_size(micro_batch_size, baked)
    most = 1 if devices == 1 else AUTO_PER_DEVICE * devices
    if batch_size is None:
        if micro_batches is not None or size is not None:
            count = micro_batches or (1 if baked else most)
            yield Batching((size or 1) * count, count)
            return
        batch_size = most
    if size is not None:
        yield _divided(batch_size, size, micro_batches, baked)
        return
    if micro_batches is not None:
        if batch_size % micro_batches:
            raise ConfigurationError(
                f"{micro_batches} micro-batches do not divide a batch of {batch_size} samples",
                hint=f"{_nearest_divisor(batch_size, micro_batches)} do",
            )
        yield Batching(batch_size, micro_batches)
        return
    for count in range(min(most, batch_size), 0, -1):
        if batch_size % count == 0:
            yield Batching(batch_size, count)


def _one_size(micro_batch_size: int | None, baked: int | None) -> int | None:
    """Samples of one evaluation, where the user or the file fixes them."""
    if micro_batch_size is not None and baked is not None and micro_batch_size != baked:
        raise ConfigurationError(
            f"a micro-batch of {micro_batch_size} samples was asked for, but the file fixes {baked}",
            hint="export the model with a symbolic batch, or leave the micro-batch's size open",
        )
    return baked if micro_batch_size is None else micro_batch_size


def _divided(batch_size: int, size: int, micro_batches: int | None, baked: int | None) -> Batching:
    if batch_size % size:
        fixed = "the batch that the file fixes" if baked else "the micro-batch's size"
        raise ConfigurationError(
            f"a batch of {batch_size} samples is no multiple of {size}, {fixed}",
            hint=f"--batch-size {max(1, round(batch_size / size)) * size}",
        )
    if micro_batches is not None and micro_batches * size != batch_size:
        raise ConfigurationError(
            f"{micro_batches} micro-batches of {size} samples are {micro_batches * size}, not {batch_size}",
            hint=f"--micro-batches {batch_size // size}",
        )
    return Batching(batch_size, batch_size // size)


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = (divisor for divisor in range(1, number + 1) if number % divisor == 0)
    return min(divisors, key=lambda divisor: (abs(divisor - wanted), divisor))
