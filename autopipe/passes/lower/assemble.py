"""A `Program` from a plan: the only place that knows all of its parts."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from autopipe.ir.batch import BatchAxes, batch_axes_of
from autopipe.ir.errors import CodegenError
from autopipe.ir.graph import Graph
from autopipe.ir.layout import degree_of
from autopipe.ir.placement import Placement
from autopipe.ir.program import (
    DataInput,
    MessageBlock,
    Output,
    OutputPlace,
    OutputShard,
    Program,
    RankCode,
    Section,
    StageOnRank,
    Verb,
)
from autopipe.ir.schedule import Schedule, Task
from autopipe.passes.lower.channels import HeldMessages, channels_of, held_messages
from autopipe.passes.lower.executable import check_tasks
from autopipe.passes.lower.halves import split_backwards
from autopipe.passes.lower.inputs import input_ranges
from autopipe.passes.lower.order import instructions, sections
from autopipe.passes.lower.parts import Parts, parts_of, wanted_values
from autopipe.passes.lower.portions import check_portions
from autopipe.passes.lower.posting import RankPeers, sending_orders
from autopipe.passes.lower.proof import prove
from autopipe.passes.lower.shard import ShardedStage
from autopipe.passes.lower.sizes import micro_batch_size


def lower(
    graph: Graph,
    placement: Placement,
    schedule: Schedule,
    loss: str | None,
    shard: bool = False,
    proven: bool = True,
) -> Program:
    """The program that runs `schedule`. With `loss` it trains; without, it gives all of the graph's outputs.

    With `shard` ranks that hold the same parameters share out the optimizer's state (`Optimizer.shard`). Unless
    `proven` is false it is shown that all ranks come to their ends, which takes long where they are many.

    Raises CodegenError where the placement or the schedule cannot be executed, or the program could not run to its end,
    InfeasibleError where stages' own micro-batches would change what is computed.
    """
    _check_loss(graph, loss)
    check_tasks(placement, schedule)
    check_portions(graph, placement)
    parts = parts_of(graph, placement, schedule.devices, loss)
    stages, codes = parts.stages, tuple(stage.code for stage in parts.stages)
    batch = batch_axes_of(graph)
    wired = _wired(graph, stages, parts.pieces, schedule.devices)
    steps = _steps(wired, schedule, tuple(code.turns for code in codes))
    program = Program(
        world_size=schedule.devices,
        train=loss is not None,
        micro_batches=schedule.micro_batches,
        micro_batch_size=micro_batch_size(graph, placement),
        loss=loss,
        parameters=graph.parameters,
        inputs=input_ranges(graph),
        outputs=tuple(_output(parts, name, batch) for name in wanted_values(graph, loss)),
        stages=split_backwards(graph, codes, schedule),
        ranks=tuple(
            RankCode(rank, tuple(wired[rank]), parts.shards[rank], *step.sections) for rank, step in enumerate(steps)
        ),
        channels=channels_of(parts.pieces, codes, [step.held for step in steps]),
        shard=shard and loss is not None,
    )
    if proven:
        prove(program)
    return program


def _check_loss(graph: Graph, loss: str | None) -> None:
    if loss is None:
        return
    if math.prod(graph.type_of(loss).shape) != 1:
        raise CodegenError(
            f"the loss {loss!r} has shape {list(graph.type_of(loss).shape)}", hint="it must be one number"
        )
    if graph.producer(loss) is None:
        raise CodegenError(f"the loss {loss!r} is not computed by the model", hint="name a value that a node writes")


@dataclass(frozen=True, slots=True)
class _Step:
    """A rank's step in three sections, and what it holds of messages."""

    sections: tuple[Section, Section, Section]
    held: HeldMessages


def _steps(wired: list[list[StageOnRank]], schedule: Schedule, turns: tuple[int, ...]) -> list[_Step]:
    """The step of every rank."""
    orders = sending_orders(schedule, turns)
    known: dict[tuple[tuple[Task, ...], RankPeers], _Step] = {}
    found = []
    for rank, tasks in enumerate(schedule.tasks):
        key = (tasks, _talking(rank, wired[rank]))
        if key not in known:  # The ranks of a group mostly do the same.
            flat = instructions(*key, orders)
            known[key] = _Step(sections(flat, turns), held_messages(flat))
        found.append(known[key])
    return found


def _wired(
    graph: Graph, stages: tuple[ShardedStage, ...], pieces: tuple[MessageBlock, ...], devices: int
) -> list[list[StageOnRank]]:
    """For each rank its stages, each with what it reads, receives and sends."""
    given = {value.name for value in graph.inputs}
    receives: dict[tuple[int, int], list[MessageBlock]] = defaultdict(list)
    sends: dict[tuple[int, int], list[MessageBlock]] = defaultdict(list)
    for piece in pieces:
        receives[piece.target_stage, piece.target_rank].append(piece)
        sends[piece.source_stage, piece.source_rank].append(piece)
    found: list[list[StageOnRank]] = [[] for _ in range(devices)]
    for number, stage in enumerate(stages):
        for position, rank in enumerate(stage.code.devices):
            data = (DataInput(name, need.box(position)) for name, need in stage.inputs.items() if name in given)
            wires = tuple(receives[number, rank]), tuple(sends[number, rank])
            found[rank].append(StageOnRank(number, tuple(data), *wires))
    return found


def _talking(rank: int, wired: list[StageOnRank]) -> RankPeers:
    """Peers of the rank."""
    sends: set[tuple[int, Verb]] = set()
    receives: set[tuple[int, Verb, int]] = set()
    for stage in wired:
        for piece in stage.receives:
            if piece.source_rank != rank:
                receives.add((stage.stage, Verb.RECEIVE, piece.source_stage))
                if piece.needs_gradient:
                    sends.add((stage.stage, Verb.SEND_GRADIENT))
        for piece in stage.sends:
            if piece.target_rank != rank:
                sends.add((stage.stage, Verb.SEND))
                if piece.needs_gradient:
                    receives.add((stage.stage, Verb.RECEIVE_GRADIENT, piece.target_stage))
    return RankPeers(frozenset(sends), frozenset(receives))


def _output(parts: Parts, name: str, batch: BatchAxes) -> Output:
    giving = sorted((stage for stage in parts.stages if name in stage.outputs), key=lambda stage: stage.code.pipeline)
    places = {stage.code.pipeline: _place(stage, name) for stage in reversed(giving)}
    graph = parts.graphs[giving[0].code.stage]
    return Output(graph.type_of(name), tuple(places[each] for each in sorted(places)), _batch_axis(graph, name, batch))


def _place(stage: ShardedStage, name: str) -> OutputPlace:
    layout, devices = stage.outputs[name], stage.code.devices
    boxes = tuple(OutputShard(rank, layout.box(position)) for position, rank in enumerate(devices))
    different = layout.parts * degree_of(layout.sums)
    return OutputPlace(stage.code.stage, boxes, "sum" if layout.is_partial else "concat", len(devices) // different)


def _batch_axis(graph: Graph, name: str, batch: BatchAxes) -> int | None:
    """The axis of an output along which micro-batches follow one another; None where it counts no samples.

    Micro-batches of one sample leave no extent to follow through the graph: there it is taken to be the first axis of
    what has one of extent one.
    """
    if batch.batch > 1:
        samples = batch.of(name)
        return samples.dimension if samples is not None and samples.outer == 1 else None
    return 0 if graph.type_of(name).shape[:1] == (1,) else dict(graph.batch_axes).get(name)
