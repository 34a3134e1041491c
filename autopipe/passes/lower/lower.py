"""A `Program` from a plan: the only place that knows all of its parts.

Parts of a program from the stages of a placement: their local forwards, the message blocks between them, and the
ranks' parameters.

A whole model on one device.

Requirements on a plan for generated programs to run it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopipe.ir.batch import BatchAxes, batch_axes_of
from autopipe.ir.errors import CodegenError
from autopipe.ir.graph import Graph
from autopipe.ir.layout import degree_of
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.program import (
    DataInput,
    MessageBlock,
    Output,
    OutputPlace,
    OutputShard,
    Program,
    RankCode,
    Section,
    Shard,
    StageOnRank,
    Verb,
)
from autopipe.ir.schedule import Phase, Schedule, Task
from autopipe.passes.analysis.gradients import differentiable_values, split_backwards
from autopipe.passes.analysis.micro_batches import (
    check_portions,
    input_ranges,
    micro_batch_size,
    stage_graphs,
    stage_micro_batches,
    with_numbered_constants,
)
from autopipe.passes.analysis.recompute import with_segments
from autopipe.passes.analysis.stage_nodes import assign_nodes
from autopipe.passes.lower.deadlock_check import prove
from autopipe.passes.lower.messages import (
    HeldMessages,
    RankPeers,
    channels_of,
    held_messages,
    sending_orders,
    transfer_pieces,
)
from autopipe.passes.lower.order import instructions, sections
from autopipe.passes.lower.shard import Demands, ShardedStage, parameter_shards, shard_stage, torn_parameters


def check_tasks(placement: Placement, schedule: Schedule) -> None:
    """Raise CodegenError unless the schedule has a row for each device of the placement."""
    if placement.devices > schedule.devices:
        raise CodegenError(f"the placement uses {placement.devices} devices, the schedule has {schedule.devices}")


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
        key = (tasks, _peers(rank, wired[rank]))
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


def _peers(rank: int, wired: list[StageOnRank]) -> RankPeers:
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


def one_device_program(graph: Graph, micro_batches: int, micro_batch_size: int, loss: str | None) -> Program:
    """Program of `micro_batches` micro-batches in one stage, one after the other: training with `loss`, forwards
    without. Raises CodegenError as `lower` does.
    """
    stage = Stage(tuple(range(len(graph.nodes))), (0,), micro_batch_size)
    phases = (Phase.FORWARD, Phase.BACKWARD) if loss is not None else (Phase.FORWARD,)
    order = tuple(Task(0, phase, index) for index in range(micro_batches) for phase in phases)
    return lower(graph, Placement((stage,)), Schedule(micro_batches, (order,)), loss)
