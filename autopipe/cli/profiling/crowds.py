"""The model run by more processes than there are processors: how much longer each takes of a processor's own time."""

from __future__ import annotations

from pathlib import Path

from autopipe.backends.torch.profiler.worker import numbers_of
from autopipe.cli.profiling.whole import whole_program
from autopipe.ir.costs import Oversubscription
from autopipe.ir.errors import AutopipeError
from autopipe.passes.frontend import Model


def measure_oversubscription(
    model: Model, precision: str, processors: int, ranks: int, folder: Path, seconds: float
) -> tuple[Oversubscription, ...]:
    """Run the model for about `seconds` in as many processes as there are processors, in twice as many and so on up to
    `ranks`, and compare. Files go to `folder`.

    Nothing where ranks have a processor each, or where so many of the model are too large or do not run.
    """
    counts = [processors]
    while counts[-1] < ranks:
        counts.append(min(ranks, 2 * counts[-1]))
    program = whole_program(model, precision, folder, ranks) if len(counts) > 1 else None
    if program is None:
        return ()
    try:
        alone, *crowds = numbers_of("crowd_worker", program, ",".join(map(str, counts)), seconds)
    except AutopipeError:
        return ()
    found: list[Oversubscription] = []
    for count, each in zip(counts[1:], crowds, strict=True):
        # Not less than with fewer: that would be noise.
        least = found[-1].slowdown if found else 1.0
        found.append(Oversubscription(count, max(least, each / alone)))
    return tuple(found)
