"""The operators that the profiler measures: samples of a model's operators with local shapes, in
groups that are measured together.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from autopipe.ir.errors import AutopipeError, ConfigurationError
from autopipe.ir.measured_costs import (
    Operation,
    OperationSample,
)
from autopipe.passes.cost.measured import Operations
from autopipe.passes.cost.roofline import roofline_costs
from autopipe.passes.frontend import Model
from autopipe.passes.pipeline import Request, read_request_model_uncached

_MAX_LAP_SAMPLES = 400
"""Maximum number of operations in a lap, a sequence that is measured together. A few layers are
representative of many.
"""
_MAX_LAP_BYTES = 2**30
"""Maximum size in bytes of the operands, results and gradients of a lap, a sequence of operations
that is measured together.
"""


@dataclass(frozen=True, slots=True)
class Group:
    """Samples that are measured together, in the order in which the model runs them. A sample is
    one operation of the model, with local shapes. Repetitions are kept as far as a lap has room for
    them; operations of earlier groups are omitted.
    """

    note: str
    size: int
    """Micro-batch size: number of samples of the batch per micro-batch."""
    lap: tuple[OperationSample, ...]


def models_of(request: Request, sizes: Sequence[int] | None) -> tuple[tuple[int, Model], ...]:
    """Return (size, model) for each micro-batch size in `sizes`. If `sizes` is None, use 1, 2, 4
    and the model's batch size, as far as the model supports them. Raise the first error if a size
    in `sizes` is not supported, or if no size is.
    """
    read = read_request_model_uncached(request, None)
    wanted = sizes or tuple(
        size for size in (1, 2, 4, read.batch or 1) if (read.batch or size) % size == 0
    )
    found: list[tuple[int, Model]] = []
    refused: list[AutopipeError] = []
    for size in dict.fromkeys(wanted):
        try:
            found.append(
                (size, read if read.batch == size else read_request_model_uncached(request, size))
            )
        except AutopipeError as error:
            refused.append(error)
    if refused and (sizes is not None or not found):
        raise refused[0]
    return tuple(found)


def groups_of(
    models: Sequence[tuple[int, Model]], precision: str, degrees: Sequence[int]
) -> Iterator[Group]:
    """Yield all samples to measure, in groups. A sample is one operation with local shapes. The
    unsplit operators of each micro-batch size come first, then the shards of operators that are
    split in each of `degrees`. `models` are pairs (micro-batch size, model).

    If the losses of a model can keep or recompute their logits, both forms of the model are
    included.
    """
    seen: set[Operation] = set()
    forms = [(size, form) for size, model in models for form in model.forms]
    for degree in (1, *degrees):
        for size, model in forms:
            new = [
                sample
                for sample in samples_of(model, precision, degree)
                if sample.operation not in seen
            ]
            seen |= {sample.operation for sample in new}
            note = f"micro-batch {size}" + (f", split {degree} ways" if degree > 1 else "")
            yield from (Group(note, size, lap) for lap in _laps(new))


def samples_of(model: Model, precision: str, degree: int = 1) -> Iterator[OperationSample]:
    """Yield the samples to measure, for every node in order. A sample is an operation with local
    shapes: the node, or its shards if it is split by `degree`. Samples of equal nodes are created
    only once.
    """
    operations = Operations(model.graph, precision)
    known: dict[Hashable, tuple[OperationSample, ...]] = {}
    for index, work in enumerate(roofline_costs(operations.graph, operations.precision)):
        if index in operations.absorbed:
            continue
        key = operations.key(index)
        if key not in known:
            cuts = operations.measurable_splits(index, (degree,)) if degree > 1 else ((),)
            known[key] = tuple(operations.sample(index, work, splits) for splits in cuts)
        yield from known[key]


def _laps(samples: Sequence[OperationSample]) -> Iterator[tuple[OperationSample, ...]]:
    """Yield the samples (operations with local shapes) in sequences of limited length and memory,
    called laps. Each distinct operation occurs in a lap; repetitions of an operation may be dropped
    once a lap is full.
    """
    seen: set[Operation] = set()
    lap = list[OperationSample]()
    held = 0
    for sample in samples:
        size = bytes_of(sample)
        if len(lap) >= _MAX_LAP_SAMPLES or held + size > _MAX_LAP_BYTES:
            if sample.operation in seen:
                continue
            if lap:
                yield tuple(lap)
            lap = []
            held = 0
        seen.add(sample.operation)
        lap.append(sample)
        held += size
    if lap:
        yield tuple(lap)


def bytes_of(sample: OperationSample) -> int:
    """Return the size in bytes of the operands and results of an operation, each with its
    gradient.
    """
    values = [value for each in sample.signatures for value in (*each.operands, *each.results)]
    return 2 * sum(value.bytes for value in values if value is not None)


def parsed_sizes(text: str, flag: str) -> tuple[int, ...]:
    """Parse integers of at least 1, separated by commas. Raise ConfigurationError for any other
    text.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if any(not word.isascii() or not word.isdigit() or not 0 < int(word) < 2**31 for word in words):
        raise ConfigurationError(
            f"{text!r} is not a list of positive integers", hint="use the format 1,2,4", where=flag
        )
    return tuple(int(word) for word in words)


_MAX_MODEL_BYTES = 2**32
"""Maximum size in bytes of the model with its activations. A larger model is not run as a whole."""


def is_small(model: Model, precision: str) -> bool:
    """Return True if the model is small enough to run as a whole (`_MAX_MODEL_BYTES`)."""
    return sum(map(bytes_of, samples_of(model, precision))) <= _MAX_MODEL_BYTES
