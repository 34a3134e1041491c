"""Random stage graphs, and predictions with given times."""

from __future__ import annotations

import dataclasses
import math

from hypothesis import strategies

from autopipe.ir.schedule import MicroBatchSlice, StageGraph
from autopipe.ir.timeline import Message, Prediction, StagePrediction


def chain(stages: int) -> StageGraph:
    """Return a chain of stages on one device each."""
    edges = tuple((stage, stage + 1) for stage in range(stages - 1))
    return StageGraph(stages, tuple((stage,) for stage in range(stages)), edges)


def predicted(
    graph: StageGraph, forward: float = 1.0, backward: float = 2.0, kept: int = 0
) -> Prediction:
    """Return a prediction of equal stages whose messages take no time."""
    stages = (StagePrediction(forward, backward, kept_bytes=kept),) * len(graph.stage_devices)
    return Prediction(stages, free_messages(graph))


def free_messages(graph: StageGraph) -> tuple[Message, ...]:
    """Return a message of 0 bytes for each edge and each pair of micro-batch slices that share
    samples.
    """
    groups = graph.stage_devices
    return tuple(
        Message(
            a,
            b,
            groups[a][0],
            groups[b][0],
            0,
            0,
            0.0,
            0.0,
            MicroBatchSlice(own, turns[0]),
            MicroBatchSlice(other, turns[1]),
        )
        for a, b in graph.edges
        for turns in [(graph.micro_batch_ratio_at(a), graph.micro_batch_ratio_at(b))]
        for own in range(turns[0])
        for other in range(turns[1])
        if samples_of(graph, a, own) & samples_of(graph, b, other)
    )


def samples_of(graph: StageGraph, stage: int, micro_batch: int) -> set[int]:
    """Return the samples of a stage's micro-batch, in the smallest unit that makes them
    integers.
    """
    size = math.lcm(*graph.ratios) // graph.micro_batch_ratio_at(stage)
    return set(range(micro_batch * size, (micro_batch + 1) * size))


def with_ratios(graph: StageGraph) -> strategies.SearchStrategy[StageGraph]:
    """Draw the graph with a ratio of micro-batches for each stage, or without ratios."""
    counts = strategies.tuples(*[strategies.sampled_from((1, 2, 3, 4))] * len(graph.stage_devices))
    return (strategies.just(()) | counts).map(
        lambda turns: dataclasses.replace(graph, ratios=turns)
    )


@strategies.composite
def stage_graphs(draw: strategies.DrawFn, shared: bool = True) -> StageGraph:
    """Draw up to 6 stages with any edges on up to 4 devices. With `shared`, stages are on groups of
    devices that may overlap.
    """
    stages = draw(strategies.integers(1, 6))
    pairs = [(source, target) for target in range(stages) for source in range(target)]
    edges = draw(strategies.lists(strategies.sampled_from(pairs), unique=True)) if pairs else []
    if not shared:
        return StageGraph(stages, tuple((stage,) for stage in range(stages)), tuple(sorted(edges)))
    devices = draw(strategies.integers(1, 4))
    group = strategies.lists(
        strategies.integers(0, devices - 1), min_size=1, max_size=devices, unique=True
    )
    groups = tuple(tuple(draw(group)) for _ in range(stages))
    return StageGraph(devices, groups, tuple(sorted(edges)))
