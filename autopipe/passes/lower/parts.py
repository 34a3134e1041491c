"""Parts of a program from the stages of a placement: their local forwards, the message blocks between them, and the
ranks' parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopipe.ir.batch import batch_axes_of
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement
from autopipe.ir.program import MessageBlock, Shard
from autopipe.passes.lower.gradients import differentiable_values
from autopipe.passes.lower.parameters import parameter_shards, torn_parameters
from autopipe.passes.lower.recomputing import with_segments
from autopipe.passes.lower.shard import Demands, ShardedStage, shard_stage
from autopipe.passes.lower.sizes import stage_graphs, stage_micro_batches, with_numbered_constants
from autopipe.passes.lower.stages import assign_nodes
from autopipe.passes.lower.transfers import transfer_pieces


@dataclass(frozen=True, slots=True)
class Parts:
    """All of a program that does not depend on its schedule; `shards` are by rank."""

    graphs: tuple[Graph, ...]
    """The graph of each stage's own micro-batch."""
    stages: tuple[ShardedStage, ...]
    pieces: tuple[MessageBlock, ...]
    shards: tuple[tuple[Shard, ...], ...]
    differentiable: frozenset[str]
    """The values that gradients flow through: none without training."""


def parts_of(graph: Graph, placement: Placement, devices: int, loss: str | None) -> Parts:
    """The parts of the program that trains with `loss`, or gives all of the graph's outputs.

    Raises CodegenError for splits and micro-batches that cannot be executed.
    """
    wanted = wanted_values(graph, loss)
    turns, graphs = stage_micro_batches(graph, placement), stage_graphs(graph, placement)
    stages = _sharded(graph, placement, graphs, wanted)
    codes = with_numbered_constants([stage.code for stage in stages], graphs, graph)
    stages = tuple(
        replace(stage, code=replace(code, turns=each)) for stage, code, each in zip(stages, codes, turns, strict=True)
    )
    differentiable = differentiable_values(graph) if loss is not None else frozenset()
    if loss is not None:
        cut = (
            with_segments(own, stage.code, differentiable, placement.length)
            for own, stage in zip(graphs, stages, strict=True)
        )
        stages = tuple(replace(stage, code=code) for stage, code in zip(stages, cut, strict=True))
    pieces = transfer_pieces(graph, placement, stages, differentiable)
    return Parts(graphs, stages, pieces, parameter_shards(graph, devices, stages), differentiable)


def wanted_values(graph: Graph, loss: str | None) -> tuple[str, ...]:
    """Results of a program: its loss, or all of the graph's outputs."""
    return (loss,) if loss is not None else tuple(dict.fromkeys(graph.outputs))


def _sharded(
    graph: Graph, placement: Placement, graphs: tuple[Graph, ...], wanted: Sequence[str]
) -> tuple[ShardedStage, ...]:
    """The stages' local forwards, each of its own of `graphs`.

    A parameter that stages would cut differently is held whole by all of them: its gradient is a sum over equal blocks.
    """
    assigned = assign_nodes(graph, placement, tuple(wanted))
    shares = frozenset(wanted) - graph.consumers().keys()
    batch = batch_axes_of(graph)

    def shard(whole: frozenset[str]) -> tuple[ShardedStage, ...]:
        return tuple(
            shard_stage(own, number, stage, nodes, Demands(whole, shares), batch)
            for number, (own, stage, nodes) in enumerate(zip(graphs, placement.stages, assigned, strict=True))
        )

    stages = shard(frozenset())
    torn = torn_parameters(stages)
    return shard(torn) if torn else stages
