"""A `Program` from a plan: the only place that knows all of its parts."""

from __future__ import annotations

import math

from autopipe.ir.errors import CodegenError
from autopipe.ir.graph import Graph
from autopipe.ir.layout import Box, Layout, Partial
from autopipe.ir.placement import Placement
from autopipe.ir.program import (
    DataInput,
    Output,
    OutputShard,
    Piece,
    Program,
    RankCode,
    Shard,
    StageOnRank,
    Verb,
)
from autopipe.ir.schedule import Schedule
from autopipe.passes.lower.gradients import differentiable_values
from autopipe.passes.lower.inputs import input_ranges
from autopipe.passes.lower.order import instructions, sections
from autopipe.passes.lower.shard import ShardedStage, shard_stage
from autopipe.passes.lower.stages import assign_nodes
from autopipe.passes.lower.transfers import transfer_pieces


def lower(graph: Graph, placement: Placement, schedule: Schedule, loss: str | None) -> Program:
    """The program that runs `schedule`. With `loss` it trains; without, it gives all of the graph's outputs.

    Raises CodegenError where the placement or the schedule cannot be executed.
    """
    if loss is not None and math.prod(graph.type_of(loss).shape) != 1:
        raise CodegenError(
            f"the loss {loss!r} has shape {list(graph.type_of(loss).shape)}", hint="it must be one number"
        )
    wanted = (loss,) if loss is not None else tuple(dict.fromkeys(graph.outputs))
    assigned = assign_nodes(graph, placement, wanted)
    stages = tuple(
        shard_stage(graph, number, stage, nodes.nodes, nodes.outputs)
        for number, (stage, nodes) in enumerate(zip(placement.stages, assigned, strict=True))
    )
    pieces = transfer_pieces(graph, stages, differentiable_values(graph) if loss is not None else frozenset())
    shards = _parameter_shards(graph, placement, stages)
    return Program(
        world_size=len(schedule.tasks),
        train=loss is not None,
        micro_batches=schedule.micro_batches,
        micro_batch_size=placement.stages[0].micro_batch_size,
        loss=loss,
        parameters=graph.parameters,
        inputs=input_ranges(graph),
        outputs=tuple(_output(graph, name, placement, stages) for name in wanted),
        stages=tuple(stage.code for stage in stages),
        ranks=tuple(_rank(rank, graph, stages, pieces, shards[rank], schedule) for rank in range(len(schedule.tasks))),
    )


def _rank(
    rank: int,
    graph: Graph,
    stages: tuple[ShardedStage, ...],
    pieces: tuple[Piece, ...],
    shards: tuple[Shard, ...],
    schedule: Schedule,
) -> RankCode:
    wired = tuple(
        _wire(rank, graph, number, stage, pieces) for number, stage in enumerate(stages) if rank in stage.code.devices
    )
    flat = instructions(schedule.tasks[rank], _talking(rank, wired))
    warm_up, repetend, cool_down = sections(flat)
    return RankCode(rank, wired, shards, warm_up, repetend, cool_down)


def _wire(rank: int, graph: Graph, number: int, stage: ShardedStage, pieces: tuple[Piece, ...]) -> StageOnRank:
    position = stage.code.devices.index(rank)
    group = len(stage.code.devices)
    given = {value.name for value in graph.inputs}
    return StageOnRank(
        stage=number,
        data=tuple(DataInput(name, need.box(position, group)) for name, need in stage.inputs.items() if name in given),
        receives=tuple(piece for piece in pieces if piece.target_stage == number and piece.target_rank == rank),
        sends=tuple(piece for piece in pieces if piece.source_stage == number and piece.source_rank == rank),
    )


def _talking(rank: int, wired: tuple[StageOnRank, ...]) -> frozenset[tuple[int, Verb]]:
    """Which verbs have anything to do on this rank: pieces within a rank are handed over, not sent."""
    found: set[tuple[int, Verb]] = set()
    for stage in wired:
        receives = [piece for piece in stage.receives if piece.source_rank != rank]
        sends = [piece for piece in stage.sends if piece.target_rank != rank]
        if receives:
            found.add((stage.stage, Verb.RECEIVE))
        if sends:
            found.add((stage.stage, Verb.SEND))
        if any(piece.needs_gradient for piece in sends):
            found.add((stage.stage, Verb.RECEIVE_GRADIENT))
        if any(piece.needs_gradient for piece in receives):
            found.add((stage.stage, Verb.SEND_GRADIENT))
    return frozenset(found)


def _parameter_shards(
    graph: Graph, placement: Placement, stages: tuple[ShardedStage, ...]
) -> tuple[tuple[Shard, ...], ...]:
    """For each rank its blocks of parameters; ranks with the same block of a parameter share its gradient."""
    indices = {parameter.value.name: index for index, parameter in enumerate(graph.parameters)}
    blocks: dict[tuple[int, int], Box] = {}
    holders: dict[tuple[int, Box], list[int]] = {}
    for stage in stages:
        devices = stage.code.devices
        for name, layout in stage.parameters.items():
            for position, rank in enumerate(devices):
                key = (rank, indices[name])
                box = layout.box(position, len(devices))
                if blocks.setdefault(key, box) != box:
                    raise CodegenError(f"rank {rank} would hold {name!r} in two layouts")
                ranks = holders.setdefault((indices[name], box), [])
                if rank not in ranks:
                    ranks.append(rank)
    shards: list[list[Shard]] = [[] for _ in range(placement.devices)]
    for (index, box), ranks in sorted(holders.items(), key=lambda item: (item[0][0], item[1])):
        for rank in ranks:
            shards[rank].append(Shard(index, box, tuple(sorted(ranks))))
    return tuple(tuple(each) for each in shards)


def _output(graph: Graph, name: str, placement: Placement, stages: tuple[ShardedStage, ...]) -> Output:
    producer = graph.producer(name)
    if producer is None:
        raise CodegenError(f"output {name!r} is an input or a constant", hint="remove it from the model's outputs")
    number = placement.stage_of()[producer]
    layout = stages[number].outputs[name]
    devices = placement.stages[number].devices
    boxes = tuple(OutputShard(rank, layout.box(position, len(devices))) for position, rank in enumerate(devices))
    return Output(graph.type_of(name), number, boxes, _combine(layout), _batch_dimension(graph, name))


def _combine(layout: Layout) -> str:
    if layout.partial is None:
        return "concat"
    return "mean" if layout.partial is Partial.MEAN else "sum"


def _batch_dimension(graph: Graph, name: str) -> int | None:
    """The axis of an output that counts samples."""
    return 0 if graph.type_of(name).shape else None
