"""How a step's samples are divided into micro-batches where the user leaves it open."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.words import plural

AUTO_PER_DEVICE = 4
"""`auto` takes at most this many micro-batches a device: a pipeline of p stages then idles at most
(p-1)/(5p-1) of the step, and more micro-batches gain less than they lose to smaller kernels.
"""

MOST_MICRO_BATCHES = 2**16
"""Every micro-batch is a task on every device that a schedule lists."""


class Division(enum.Enum):
    """How a strategy wants a step's samples divided where the user leaves it open."""

    MANY = "many"
    """Enough micro-batches to keep a pipeline busy."""
    FEW = "few"
    """Into as few as memory takes: nothing is pipelined."""
    OWN = "own"
    """As the strategy says: it chooses the micro-batches of each stage, up to the largest there can
    be.
    """


@dataclass(frozen=True, slots=True)
class Batching:
    """A step's samples, and how many evaluations of the graph they make. `sizes` are the samples
    that stages may have in a micro-batch, ascending, where a strategy chooses.
    """

    batch_size: int
    micro_batches: int
    sizes: tuple[int, ...] = ()

    @property
    def micro_batch_size(self) -> int:
        """Samples of one evaluation."""
        return self.batch_size // self.micro_batches


def batchings(
    batch_size: int | None,
    micro_batches: int | None,
    micro_batch_size: int | None,
    own: int | None,
    devices: int,
    division: Division = Division.MANY,
) -> Iterator[Batching]:
    """The divisions that respect what is given, best first.

    `own` is the batch that the model's file fixes: a micro-batch is a part of it. Where no batch is
    given it is the file's own, one of it for each micro-batch asked for; without one, a sample a
    micro-batch. Where the number of micro-batches is open, it is the largest divisor of the batch
    that is at most `AUTO_PER_DEVICE` times the devices (1 on one device), then smaller ones, then
    larger ones; with a `division` other than `MANY` the smallest comes first. Raises
    ConfigurationError for what does not divide.
    """
    most = 1 if devices == 1 else AUTO_PER_DEVICE * devices
    if micro_batch_size is None and micro_batches is None:
        batch = batch_size or own or most
        counts = [count for count in divisors(batch) if own is None or own % (batch // count) == 0]
        if not counts:
            raise _not_of_own(batch, own)
        nearest = sorted(counts, key=lambda count: (count > most, abs(count - most)))
        for count in nearest if division is Division.MANY else sorted(counts):
            sizes = tuple(size for size in divisors(batch // count) if batch // size in counts)
            yield Batching(batch, count, sizes if division is Division.OWN else ())
        return
    if micro_batch_size is not None:
        if own is not None and own % micro_batch_size:
            raise _not_of_own(micro_batch_size, own)
        count = micro_batches or (batch_size or own or most * micro_batch_size) // micro_batch_size
        batch = batch_size or count * micro_batch_size
        if batch != count * micro_batch_size or not count:
            raise ConfigurationError(
                f"a batch of {batch} {plural(batch, 'sample')} is not {count or 1} "
                f"{plural(count or 1, 'micro-batch')} of {micro_batch_size}",
                hint=f"--batch-size {max(1, count) * micro_batch_size}",
            )
    else:
        assert micro_batches is not None
        count = micro_batches
        batch = batch_size or (own or 1) * micro_batches
        if batch % count:
            near = min(divisors(batch), key=lambda divisor: abs(divisor - count))
            raise ConfigurationError(
                f"{count} {plural(count, 'micro-batch does', 'micro-batches do')} not "
                f"divide a batch of {batch} {plural(batch, 'sample')}",
                hint=f"--micro-batches {near}",
            )
        if own is not None and own % (batch // count):
            raise _not_of_own(batch // count, own)
    if count > MOST_MICRO_BATCHES:
        raise ConfigurationError(
            f"a batch of {batch} {plural(batch, 'sample')} in {count} "
            f"{plural(count, 'micro-batch')} is too fine to schedule",
            hint=f"at most {MOST_MICRO_BATCHES} micro-batches",
        )
    yield Batching(batch, count)


def _not_of_own(size: int, own: int | None) -> ConfigurationError:
    return ConfigurationError(
        (
            f"micro-batches of {size} {plural(size, 'sample')} cannot be made of the {own} that "
            "the "
            "model's file fixes"
        ),
        hint=(
            f"choose a micro-batch size that divides {own}, or export the model with a symbolic "
            "batch"
        ),
    )


def climb(places: Sequence[int], start: int, seconds: Callable[[int], float | None]) -> None:
    """Try `places` from the one at index `start` on, then those after it and those before it while
    steps get shorter. `places` are numbers, or sizes, of micro-batches in order. `seconds` tries
    one of them and gives the time of its step: infinite where it has none, None where memory
    refuses it, but may hold those after it, and none before it.
    """
    first = last = seconds(places[start])
    for place in places[start + 1 :]:
        found = seconds(place)
        if last is not None and (found is None or found >= last):
            break
        last = found
    last = first
    for place in places[:start][::-1] if first is not None else ():
        found = seconds(place)
        if found is None or last is None or found >= last:
            break
        last = found


def divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
