"""Division of a step's global batch into micro-batches, for the sizes that the user leaves open."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.words import plural

AUTO_PER_DEVICE = 4
"""Number of micro-batches per device that is aimed at if the user leaves the number open. A
pipeline of p stages then idles at most (p-1)/(5p-1) of the step. With more micro-batches, smaller
kernels lose more time than less idling gains.
"""

MOST_MICRO_BATCHES = 2**16
"""Maximum number of micro-batches per step. It bounds the size of a schedule, which contains tasks
of every micro-batch on every device.
"""


class Division(enum.Enum):
    """How a strategy prefers to divide a step into micro-batches if the user leaves their number
    open.
    """

    MANY = "many"
    """Enough micro-batches to keep a pipeline busy."""
    FEW = "few"
    """As few micro-batches as memory allows, because nothing is pipelined."""
    OWN = "own"
    """The strategy itself chooses the micro-batch size of each stage."""


@dataclass(frozen=True, slots=True)
class Batching:
    """Global batch size of a step, in samples, and its number of micro-batches.

    sizes: the micro-batch sizes that a stage may use, in ascending order, if the strategy chooses
    the size of each stage (`Division.OWN`); otherwise ().
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
    """Yield the divisions of a step into micro-batches that agree with the given sizes, best first.
    A size that is None is open.

    `own` is the batch size that the model file fixes, or None; the micro-batch size must divide it.
    The target for the number of micro-batches is `AUTO_PER_DEVICE` * `devices`, or 1 on one device.
    If `batch_size` is None, the batch is the first of these that is possible:

    - `micro_batches` * `micro_batch_size`
    - `micro_batches` * `own`, or `micro_batches` samples if `own` is None
    - `own`
    - the target times `micro_batch_size`, or as many samples as the target

    If `micro_batches` and `micro_batch_size` are open, all possible numbers of micro-batches are
    yielded, and otherwise one division. With `Division.MANY`, numbers up to the target come first,
    in descending order, and then larger numbers, in ascending order. With any other division, the
    order is ascending. Raise ConfigurationError if the given sizes do not divide each other.
    """
    most = 1 if devices == 1 else AUTO_PER_DEVICE * devices
    if micro_batch_size is None and micro_batches is None:
        batch = batch_size or own or most
        counts = [count for count in divisors(batch) if own is None or own % (batch // count) == 0]
        if not counts:
            raise _fixed_batch_error(batch, own)
        nearest = sorted(counts, key=lambda count: (count > most, abs(count - most)))
        for count in nearest if division is Division.MANY else sorted(counts):
            sizes = tuple(size for size in divisors(batch // count) if batch // size in counts)
            yield Batching(batch, count, sizes if division is Division.OWN else ())
        return
    if micro_batch_size is not None:
        if own is not None and own % micro_batch_size:
            raise _fixed_batch_error(micro_batch_size, own)
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
            raise _fixed_batch_error(batch // count, own)
    if count > MOST_MICRO_BATCHES:
        raise ConfigurationError(
            f"a batch of {batch} {plural(batch, 'sample')} is divided into {count} "
            f"{plural(count, 'micro-batch')}, expected at most {MOST_MICRO_BATCHES}",
            hint="use larger micro-batches",
        )
    yield Batching(batch, count)


def _fixed_batch_error(size: int, own: int | None) -> ConfigurationError:
    """Return the error for micro-batches of `size` samples that do not divide `own`, the batch that
    the model file fixes.
    """
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


def hill_climb(places: Sequence[int], start: int, seconds: Callable[[int], float | None]) -> None:
    """Search for the candidate with the shortest step by hill climbing: try the candidate at index
    `start` of `places`, then the candidates after it while steps get shorter, and then the
    candidates before it while steps get shorter.

    `places` lists numbers or sizes of micro-batches in order of decreasing memory. `seconds` tries
    a candidate and returns the seconds of its step: infinity if the candidate has no plan, and None
    if memory is insufficient. After None, later candidates can still fit in memory, but earlier
    candidates cannot. `seconds` keeps the results; this function returns nothing.
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
    """Return the divisors of a positive number in ascending order."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
