"""Division of a step's global batch into micro-batches, for the sizes that the user leaves open."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.words import plural

AUTO_PER_DEVICE = 4
"""Maximum number of micro-batches per device that `auto` chooses. A pipeline of p stages then idles
at most (p-1)/(5p-1) of the step. More micro-batches gain less than they lose through smaller
kernels.
"""

MOST_MICRO_BATCHES = 2**16
"""Maximum number of micro-batches per step. A schedule lists every micro-batch as a task on every
device.
"""


class Division(enum.Enum):
    """Number of micro-batches that a strategy prefers if the user leaves it open."""

    MANY = "many"
    """Enough micro-batches to keep a pipeline busy."""
    FEW = "few"
    """As few micro-batches as memory allows, because nothing is pipelined."""
    OWN = "own"
    """The strategy chooses the micro-batch size of each stage, up to the largest possible size."""


@dataclass(frozen=True, slots=True)
class Batching:
    """Global batch size of a step and its number of micro-batches.

    `sizes` lists the micro-batch sizes that a stage may use, in ascending order, if the strategy
    chooses them; otherwise it is empty.
    """

    batch_size: int
    micro_batches: int
    sizes: tuple[int, ...] = ()

    @property
    def micro_batch_size(self) -> int:
        """Number of samples in one micro-batch."""
        return self.batch_size // self.micro_batches


def batchings(
    batch_size: int | None,
    micro_batches: int | None,
    micro_batch_size: int | None,
    own: int | None,
    devices: int,
    division: Division = Division.MANY,
) -> Iterator[Batching]:
    """Yield the divisions of a step that agree with the given sizes, best first.

    `own` is the batch size that the model file fixes, or None; the micro-batch size must divide it.
    Without `batch_size`, the batch is the first that applies of: `micro_batches` times
    `micro_batch_size`; `micro_batches` times `own` (1 if None); `own`; and otherwise as many
    samples, or micro-batches of `micro_batch_size`, as the target below.

    If the number of micro-batches is open, divisors of the batch are tried in order of their
    distance from a target of `AUTO_PER_DEVICE` per device (1 on one device): first those up to the
    target, then larger ones. With a `division` other than `MANY`, the order is ascending. Raise
    ConfigurationError if the given sizes do not divide each other.
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
                f"a batch of {batch} {plural(batch, 'sample')} cannot be divided into "
                f"{count or 1} {plural(count or 1, 'micro-batch')} of {micro_batch_size} "
                f"{plural(micro_batch_size, 'sample')}",
                hint=f"set --batch-size {max(1, count) * micro_batch_size}",
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
                hint=f"set --micro-batches {near}",
            )
        if own is not None and own % (batch // count):
            raise _not_of_own(batch // count, own)
    if count > MOST_MICRO_BATCHES:
        raise ConfigurationError(
            f"a batch of {batch} {plural(batch, 'sample')} is divided into {count} "
            f"{plural(count, 'micro-batch')}, expected at most {MOST_MICRO_BATCHES}",
            hint="use larger micro-batches",
        )
    yield Batching(batch, count)


def _not_of_own(size: int, own: int | None) -> ConfigurationError:
    return ConfigurationError(
        (
            f"micro-batches of {size} {plural(size, 'sample')} do not divide the batch of {own} "
            f"{plural(own or 0, 'sample')} that the model fixes"
        ),
        hint=(
            f"choose a micro-batch size that divides {own}, or export the model with a symbolic "
            "batch"
        ),
    )


def climb(places: Sequence[int], start: int, seconds: Callable[[int], float | None]) -> None:
    """Try the candidate at index `start` of `places`, then the candidates after it and then those
    before it, as long as the steps get shorter.

    `places` lists numbers or sizes of micro-batches in order. `seconds` tries a candidate and
    returns the time of its step: infinity if the candidate has no plan, None if memory is
    insufficient. After None, later candidates may still fit in memory, but no earlier candidate
    does.
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
