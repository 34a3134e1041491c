"""A `Program` from a plan: stages on local shards, messages between them, and each rank's instructions in its
schedule's order with communication placed around them, rolled up into loops.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopipe.ir.batch import BatchAxes, batch_axes_of
from autopipe.ir.errors import CodegenError
from autopipe.ir.graph import Graph
from autopipe.ir.layout import degree_of
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.program import (
    DataInput,
    Instruction,
    Loop,
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
    SendingOrders,
    channels_of,
    held_messages,
    postings,
    sending_orders,
    transfer_pieces,
)
from autopipe.passes.lower.shard import Demands, ShardedStage, parameter_shards, shard_stage, torn_parameters


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
    if placement.devices > schedule.devices:
        raise CodegenError(f"the placement uses {placement.devices} devices, the schedule has {schedule.devices}")
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
    return Output(graph.type_of(name), _batch_axis(graph, name, batch), tuple(places[each] for each in sorted(places)))


def _place(stage: ShardedStage, name: str) -> OutputPlace:
    layout, devices = stage.outputs[name], stage.code.devices
    boxes = tuple(OutputShard(rank, layout.box(position)) for position, rank in enumerate(devices))
    different = layout.parts * degree_of(layout.sums)
    position = [value.name for value in stage.code.outputs].index(name)
    combine = "sum" if layout.is_partial else "concat"
    return OutputPlace(stage.code.stage, position, combine, len(devices) // different, boxes)


def _batch_axis(graph: Graph, name: str, batch: BatchAxes) -> int | None:
    """The axis of an output along which micro-batches follow one another; None where it counts no samples.

    Micro-batches of one sample leave no extent to follow through the graph: there it is taken to be the first axis of
    what has one of extent one.
    """
    if batch.batch > 1:
        samples = batch.of(name)
        return samples.dimension if samples is not None and samples.outer == 1 else None
    return 0 if graph.type_of(name).shape[:1] == (1,) else dict(graph.batch_axes).get(name)


_COMPUTE = {
    Phase.FORWARD: Verb.FORWARD,
    Phase.BACKWARD: Verb.BACKWARD,
    Phase.INPUT_GRADIENT: Verb.INPUT_GRADIENT,
    Phase.WEIGHT_GRADIENT: Verb.WEIGHT_GRADIENT,
}
_AFTER = {
    Phase.FORWARD: Verb.SEND,
    Phase.BACKWARD: Verb.SEND_GRADIENT,
    Phase.INPUT_GRADIENT: Verb.SEND_GRADIENT,
}
"""How a task's results leave; the gradients of parameters stay."""


def instructions(tasks: Sequence[Task], talking: RankPeers, orders: SendingOrders) -> tuple[Instruction, ...]:
    """The rank's instructions for a step: its tasks, with receives before them (see `postings`) and sends behind."""
    found: list[Instruction] = []
    for task, asked in zip(tasks, postings(tasks, talking, orders), strict=True):
        found += asked
        found.append(Instruction(_COMPUTE[task.phase], task.stage, task.micro_batch))
        after = _AFTER.get(task.phase)
        if after is not None and (task.stage, after) in talking.sends:
            found.append(Instruction(after, task.stage, task.micro_batch))
    return tuple(found)


def sections(flat: Sequence[Instruction], turns: Sequence[int] = ()) -> tuple[Section, Section, Section]:
    """Warm-up, repetend and cool-down: the loop that covers most, what stands before it and after, rolled up too.

    `turns` are the micro-batches that each stage makes of one of the program's, where that is not one.
    """
    period = math.lcm(*turns)
    units = {stage: period // each for stage, each in enumerate(turns)}
    before, loop, after = _parted(flat, units)
    if loop is None:
        return tuple(flat), (), ()
    return _rolled(before, units), (loop,), _rolled(after, units)


def _rolled(flat: Sequence[Instruction], units: Mapping[int, int]) -> Section:
    before, loop, after = _parted(flat, units)
    if loop is None:
        return tuple(flat)
    return (*_rolled(before, units), loop, *_rolled(after, units))


def _parted(
    flat: Sequence[Instruction], units: Mapping[int, int]
) -> tuple[Sequence[Instruction], Loop | None, Sequence[Instruction]]:
    """The loop that covers most, and what stands before it and after.

    `units` are the lengths of stages' micro-batches, so that what moves on together moves by one distance.
    """
    found = _longest_loop(flat, units)
    if found is None:
        return flat, None, ()
    start, length, count, distance = found
    body = tuple(flat[start : start + length])
    strides = tuple(distance // units.get(each.stage, 1) for each in body)
    loop = Loop(body, count, strides[0], () if len(set(strides)) == 1 else strides)
    return flat[:start], loop, flat[start + length * count :]


_LONGEST_BODY = 2048
"""A group of micro-batches of Chimera or of interleaved 1F1B on 32 devices takes some hundred instructions."""


def _longest_loop(flat: Sequence[Instruction], units: Mapping[int, int]) -> tuple[int, int, int, int] | None:
    """(start, body length, count, distance) of the loop that covers most, the shortest body among equals."""
    kinds: dict[tuple[int, Verb, int | None], int] = {}
    keys = ((each.stage, each.verb, each.source) for each in flat)
    codes = np.array([kinds.setdefault(key, len(kinds)) for key in keys], np.int32)
    indices = np.array([each.micro_batch * units.get(each.stage, 1) for each in flat], np.int64)
    best: tuple[int, int, int, int] | None = None
    covered = 0
    for length in range(1, min(_LONGEST_BODY, len(flat) // 2) + 1):
        same = codes[length:] == codes[:-length]
        if np.count_nonzero(same) < max(length, covered + 1 - length):
            continue  # too few for a loop that covers more
        start, count, distance = _longest_run(same, indices, length)
        if length * count > covered:
            best, covered = (start, length, count, distance), length * count
    return best


def _longest_run(same: np.ndarray, indices: np.ndarray, length: int) -> tuple[int, int, int]:
    """(start, count, distance) of the longest run of bodies of `length`, the first among equals; count 0 for none.

    In a run each instruction is the `same` as the one `length` before it but for its index, which is moved on by one
    same distance.
    """
    distances = np.where(same, np.maximum(indices[length:] - indices[:-length], 0), 0)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(distances)) + 1))
    spans = np.diff(np.concatenate((starts, [len(distances)])))
    counts = np.where((distances[starts] > 0) & (spans >= length), 1 + spans // length, 0)
    found = int(np.argmax(counts))
    return int(starts[found]), int(counts[found]), int(distances[starts[found]])


def one_device_program(graph: Graph, micro_batches: int, micro_batch_size: int, loss: str | None) -> Program:
    """Program of `micro_batches` micro-batches in one stage, one after the other: training with `loss`, forwards
    without. Raises CodegenError as `lower` does.
    """
    stage = Stage(tuple(range(len(graph.nodes))), (0,), micro_batch_size)
    phases = (Phase.FORWARD, Phase.BACKWARD) if loss is not None else (Phase.FORWARD,)
    order = tuple(Task(0, phase, index) for index in range(micro_batches) for phase in phases)
    return lower(graph, Placement((stage,)), Schedule(micro_batches, (order,)), loss)
