"""The nodes that each stage computes, and the values that other stages need from it."""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.ir.graph import Graph
from autopipe.ir.layout import is_even_split
from autopipe.ir.memo import MAX_CACHED_GRAPHS, memoize
from autopipe.ir.ops import space_of
from autopipe.ir.placement import Placement, Split, Stage, recomputed_nodes


@dataclass(frozen=True, slots=True)
class StageNodes:
    """The nodes of a stage and the values that it must provide.

    nodes: pairs (index of the node, its splits), in topological order.
    outputs: names of the values that other stages or the outputs of the program need from the
    stage.
    """

    nodes: tuple[tuple[int, tuple[Split, ...]], ...]
    outputs: tuple[str, ...]


def assign_nodes(
    graph: Graph, placement: Placement, wanted: tuple[str, ...]
) -> tuple[StageNodes, ...]:
    """Return the nodes and outputs of each stage such that each pipeline computes the values
    `wanted`.

    A node that no wanted value depends on is omitted. A node of `recomputed_nodes` (cheap nodes
    such as masks, which are computed again instead of sent) is in each stage that needs its values.
    """
    recomputed = recomputed_nodes(graph)
    every = graph.sources()
    computed = [set[int]() for _ in placement.stages]
    outputs = [dict[str, None]() for _ in placement.stages]
    homes = [placement.stage_of(pipeline) for pipeline in range(placement.pipelines)]
    for pipeline, stage_of in enumerate(homes):
        for name in wanted:
            producer = graph.producer(name)
            if producer is None:
                # No stage computes an input, parameter or constant, so any stage can return this
                # value as an output. The first stage of the pipeline is chosen.
                outputs[[stage.pipeline for stage in placement.stages].index(pipeline)][name] = None
                continue
            outputs[stage_of[producer]][name] = None
            if producer in recomputed:
                computed[stage_of[producer]].add(producer)
        for index in live_nodes(graph, wanted):
            if index in recomputed:
                continue
            own = stage_of[index]
            computed[own].add(index)
            for name, producer in every[index]:
                if producer in recomputed:
                    computed[own].add(producer)
                elif stage_of[producer] != own:
                    outputs[stage_of[producer]][name] = None
    for nodes in computed:
        # A stage that computes a recomputed node must also compute all ancestors of the node.
        waiting = [node for node in nodes if node in recomputed]
        while waiting:
            sources = {producer for _, producer in every[waiting.pop()]} - nodes
            nodes |= sources
            waiting += sources
    found = []
    for stage, nodes, given in zip(placement.stages, computed, outputs, strict=True):
        splits = (
            (node, _splits_in_stage(graph, placement, homes[stage.pipeline], node, stage))
            for node in sorted(nodes)
        )
        found.append(StageNodes(tuple(splits), tuple(given)))
    return tuple(found)


@memoize(MAX_CACHED_GRAPHS)
def live_nodes(graph: Graph, wanted: tuple[str, ...]) -> tuple[int, ...]:
    """Return the indices of the nodes that the values `wanted` depend on, in ascending order."""
    live = {producer for name in wanted if (producer := graph.producer(name)) is not None}
    every = graph.sources()
    for index in reversed(range(len(graph.nodes))):
        if index in live:
            live.update(producer for _, producer in every[index])
    return tuple(sorted(live))


def _splits_in_stage(
    graph: Graph, placement: Placement, stage_of: dict[int, int], node: int, stage: Stage
) -> tuple[Split, ...]:
    """Return the splits of a node in `stage`. `stage_of` is the stage to which the placement
    assigns each node.

    In the stage of the placement, a node has the splits of the placement. In another stage, where
    it is recomputed, a node with one split is split along the same axis, over all devices of
    `stage`. It is unsplit there if it does not have exactly one split, or if these shards would not
    be even. It is also unsplit if the two stages have different micro-batch sizes and the number of
    devices of `stage` does not divide the micro-batch size of `stage`.
    """
    home = placement.stages[stage_of[node]]
    if home is stage:
        return stage.splits_of(node)
    degree = len(stage.devices)
    own = home.splits_of(node)
    unequal = stage.micro_batch_size != home.micro_batch_size
    if degree == 1 or len(own) != 1 or (unequal and stage.micro_batch_size % degree):
        return ()
    return (
        (Split(own[0].axis, degree),)
        if is_even_split(space_of(graph, graph.nodes[node]), own[0].axis, degree)
        else ()
    )
