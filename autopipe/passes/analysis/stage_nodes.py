"""Nodes that each stage really computes, and values that it must give."""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.ir.graph import Graph
from autopipe.ir.layout import is_block
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.ops import space_of
from autopipe.ir.placement import Placement, Split, Stage, recomputed_nodes


@dataclass(frozen=True, slots=True)
class StageNodes:
    """A stage's nodes in topological order, each with its splits, and the values others need of it."""

    nodes: tuple[tuple[int, tuple[Split, ...]], ...]
    outputs: tuple[str, ...]


def assign_nodes(graph: Graph, placement: Placement, wanted: tuple[str, ...]) -> tuple[StageNodes, ...]:
    """Nodes of each stage so that each pipeline computes `wanted`.

    Nodes that nothing wanted depends on are left out. A recomputed node (see `recomputed_nodes`) stands in every stage
    that needs its values.
    """
    live = live_nodes(graph, wanted)
    found: dict[int, StageNodes] = {}
    for pipeline in range(placement.pipelines):
        found |= _assign_pipeline(graph, placement, pipeline, wanted, live)
    return tuple(found[index] for index in range(len(placement.stages)))


def _assign_pipeline(
    graph: Graph, placement: Placement, pipeline: int, wanted: tuple[str, ...], live: tuple[int, ...]
) -> dict[int, StageNodes]:
    """The same for the stages of one pipeline."""
    recomputed, every, stage_of = recomputed_nodes(graph), graph.sources(), placement.stage_of(pipeline)
    stages = {index: stage for index, stage in enumerate(placement.stages) if stage.pipeline == pipeline}
    computed: dict[int, set[int]] = {index: set() for index in stages}
    outputs: dict[int, dict[str, None]] = {index: {} for index in stages}
    for name in wanted:
        producer = graph.producer(name)
        if producer is None:
            outputs[min(stages)][name] = None  # An input, parameter or constant: any stage can give it.
            continue
        stage = stage_of[producer]
        outputs[stage][name] = None
        if producer in recomputed:
            computed[stage].add(producer)
    for index in live:
        if index in recomputed:
            continue
        stage = stage_of[index]
        computed[stage].add(index)
        for name, producer in every[index]:
            if producer in recomputed:
                computed[stage].add(producer)
            elif stage_of[producer] != stage:
                outputs[stage_of[producer]][name] = None
    for own in computed.values():  # Recomputed nodes bring all that they start from.
        waiting = [node for node in own if node in recomputed]
        while waiting:
            sources = {producer for _, producer in every[waiting.pop()]} - own
            own |= sources
            waiting += sources
    return {
        number: StageNodes(
            tuple((node, _splits(graph, placement, stage_of, node, stage)) for node in sorted(computed[number])),
            tuple(outputs[number]),
        )
        for number, stage in stages.items()
    }


@remembered(GRAPHS)
def live_nodes(graph: Graph, wanted: tuple[str, ...]) -> tuple[int, ...]:
    """The nodes that values which are wanted depend on, ascending."""
    live = {producer for name in wanted if (producer := graph.producer(name)) is not None}
    every = graph.sources()
    for index in reversed(range(len(graph.nodes))):
        if index in live:
            live.update(producer for _, producer in every[index])
    return tuple(sorted(live))


def _splits(graph: Graph, placement: Placement, stage_of: dict[int, int], node: int, stage: Stage) -> tuple[Split, ...]:
    """The splits of a node on a stage's group: its own where it lives there, else the same axis over this group.

    Where micro-batches differ, so do the extents that count samples: the group must divide its own.
    """
    home = placement.stages[stage_of[node]]
    if home is stage:
        return stage.splits_of(node)
    degree = len(stage.devices)
    own = home.splits_of(node)
    unequal = stage.micro_batch_size != home.micro_batch_size
    if degree == 1 or len(own) != 1 or (unequal and stage.micro_batch_size % degree):
        return ()
    return (Split(own[0].axis, degree),) if is_block(space_of(graph, graph.nodes[node]), own[0].axis, degree) else ()
