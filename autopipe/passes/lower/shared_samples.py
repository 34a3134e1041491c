"""Which blocks of a value two stages' micro-batches have in common, where these are of different sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autopipe.ir.batch import BatchAxes, Samples
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.layout import Box, whole
from autopipe.ir.schedule import EVERY, MicroBatchSlice


@dataclass(frozen=True, slots=True)
class Shared:
    """The block of a value that micro-batches of a sender's turn and of a receiver's turn share.

    `sent` and `received` are the same numbers, in coordinates of either's whole value.
    """

    source_turn: MicroBatchSlice
    target_turn: MicroBatchSlice
    sent: Box
    received: Box


def shared_blocks(
    graph: Graph, batch: BatchAxes, name: str, source: tuple[int, tuple[int, ...]], target: tuple[int, tuple[int, ...]]
) -> tuple[Shared, ...]:
    """All that is sent of a value; `source` and `target` are the stages' samples a micro-batch, and the value's shape.

    A value that depends on no sample is sent whole, to each of the receiver's micro-batches once. Raises
    InfeasibleError where `check_shareable` does.
    """
    sent, received = whole(source[1]), whole(target[1])
    if source[0] == target[0]:
        return (Shared(EVERY, EVERY, sent, received),)
    pairs = tuple(_overlaps(source[0], target[0]))
    check_shareable(graph, batch, name, source[0], target[0])
    for place in batch.values.get(name, ()):
        return tuple(block for pair in pairs for block in _blocks(pair, place, source, target))
    first = {pair.target_turn: pair for pair in reversed(pairs)}
    return tuple(Shared(pair.source_turn, turn, sent, received) for turn, pair in reversed(first.items()))


def check_shareable(graph: Graph, batch: BatchAxes, name: str, source: int, target: int) -> None:
    """Raise InfeasibleError for a value between micro-batches of `source` and `target` samples that depends on samples
    but does not keep them apart along one dimension: a mean of some is no mean of others."""
    places = batch.values.get(name, ())
    if source != target and len(places) != 1 and (places or _depends_on_samples(graph, batch, name)):
        raise InfeasibleError(
            f"{name!r} goes from micro-batches of {source} samples to ones of {target}, but its samples cannot be told "
            "apart",
            hint="give the stages that compute and read it equal micro-batches, or make them one stage",
        )


@dataclass(frozen=True, slots=True)
class _Overlap:
    """Samples [start, stop), counted from where a micro-batch of either side begins, that a pair of turns share."""

    source_turn: MicroBatchSlice
    target_turn: MicroBatchSlice
    start: int
    stop: int


def _overlaps(source: int, target: int) -> Iterator[_Overlap]:
    """All pairs of turns that share samples, where micro-batches have `source` and `target` of them."""
    period = math.lcm(source, target)
    sends, receives = period // source, period // target
    for j in range(receives):
        for i in range(sends):
            start, stop = max(i * source, j * target), min((i + 1) * source, (j + 1) * target)
            if start < stop:
                yield _Overlap(MicroBatchSlice(i, sends), MicroBatchSlice(j, receives), start, stop)


def _blocks(
    pair: _Overlap, place: Samples, source: tuple[int, tuple[int, ...]], target: tuple[int, tuple[int, ...]]
) -> Iterator[Shared]:
    """The blocks that hold the shared samples: several where something else is counted outside of them."""
    for outer in range(place.outer):
        boxes = []
        for (size, shape), turn in ((source, pair.source_turn), (target, pair.target_turn)):
            first = (outer - turn.index) * size
            starts, stops = [0] * len(shape), list(shape)
            starts[place.dimension] = (first + pair.start) * place.inner
            stops[place.dimension] = (first + pair.stop) * place.inner
            boxes.append(Box(tuple(starts), tuple(stops)))
        yield Shared(pair.source_turn, pair.target_turn, *boxes)


def _depends_on_samples(graph: Graph, batch: BatchAxes, name: str) -> bool:
    """True if it is computed from anything that carries samples."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        each = waiting.pop()
        if batch.values.get(each):
            return True
        producer = graph.producer(each)
        if producer is not None and each not in seen:
            seen.add(each)
            waiting.extend(name for name in graph.nodes[producer].inputs if name)
    return False
