"""The samples of a model that are measured, in groups."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from autopipe.ir.errors import AutopipeError, ConfigurationError
from autopipe.ir.measured_costs import Operation, Sample
from autopipe.passes.cost.measured import Operations
from autopipe.passes.cost.roofline import annotate
from autopipe.passes.frontend import Model
from autopipe.passes.pipeline import Request, read_for

_LAP = 400
"""Places of a lap: a few layers show what many take."""
_LAP_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Group:
    """Samples that are measured together, as often and in the order in which they are run."""

    note: str
    size: int
    """Samples in a micro-batch."""
    lap: tuple[Sample, ...]


def models_of(request: Request, sizes: Sequence[int] | None) -> tuple[tuple[int, Model], ...]:
    """The model on micro-batches of each of `sizes`; of those among 1, 2 and 4 that it takes where None.

    Raises the reason where there is none.
    """
    read = read_for(request, None)
    wanted = sizes or tuple(size for size in (1, 2, 4, read.batch or 1) if (read.batch or size) % size == 0)
    found: list[tuple[int, Model]] = []
    refused: AutopipeError | None = None
    for size in dict.fromkeys(wanted):
        try:
            found.append((size, read if read.batch == size else read_for(request, size)))
        except AutopipeError as error:
            if sizes is not None:
                raise
            refused = refused or error
    if not found:
        assert refused is not None
        raise refused
    return tuple(found)


def groups_of(models: Sequence[tuple[int, Model]], precision: str, degrees: Sequence[int]) -> Iterator[Group]:
    """All samples: whole ones of each size first, then the shares that splits `degrees` ways leave."""
    seen: set[Operation] = set()
    for degree in (1, *degrees):
        for size, model in models:
            samples = samples_of(model, precision, degree)
            new = [sample for sample in samples if sample.operation not in seen]
            seen |= {sample.operation for sample in new}
            note = f"micro-batch {size}" + (f", split {degree} ways" if degree > 1 else "")
            yield from (Group(note, size, lap) for lap in _laps(new))


def samples_of(model: Model, precision: str, degree: int = 1) -> Iterator[Sample]:
    """Samples to measure, of every node in order; equal ones are put together once."""
    operations = Operations.of(model.graph, precision)
    known: dict[Hashable, tuple[Sample, ...]] = {}
    work, absorbed = annotate(operations.graph, operations.precision), operations.absorbed
    for index in range(len(work)):
        key = operations.key(index)
        if index in absorbed:
            continue
        if key not in known:
            cuts = operations.cuts(index, (degree,)) if degree > 1 else ((),)
            known[key] = tuple(operations.sample(index, work[index], splits) for splits in cuts)
        yield from known[key]


def _laps(samples: Sequence[Sample]) -> Iterator[tuple[Sample, ...]]:
    """The samples in laps that are short enough and fit into memory, each one's first place in one of them."""
    seen: set[Operation] = set()
    lap: list[Sample] = []
    held = 0
    for sample in samples:
        size = bytes_of(sample)
        if len(lap) >= _LAP or held + size > _LAP_BYTES:
            if sample.operation in seen:
                continue
            if lap:
                yield tuple(lap)
            lap, held = [], 0
        seen.add(sample.operation)
        lap.append(sample)
        held += size
    if lap:
        yield tuple(lap)


def bytes_of(sample: Sample) -> int:
    """Bytes of operands and results, each with its gradient."""
    values = [value for each in sample.signatures for value in (*each.operands, *each.results)]
    return 2 * sum(value.bytes for value in values if value is not None)


def parsed_sizes(text: str, flag: str) -> tuple[int, ...]:
    """Numbers of at least 1 between commas. Raises ConfigurationError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if any(not word.isascii() or not word.isdigit() or not 0 < int(word) < 2**31 for word in words):
        raise ConfigurationError(f"{text!r} are no numbers of at least 1", hint="write them as 1,2,4", where=flag)
    return tuple(int(word) for word in words)
