"""Lowering of a plan to a `Program`.

The program has the stages on local shards, the messages between stages, and the instructions of
each rank: the tasks in the order of the schedule, with receives before and sends after the tasks.
Repeated instructions are folded into loops, so that the size of a rank's code does not depend on
the number of micro-batches.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from autopipe.ir.batch import BatchAxes, batch_axes_of
from autopipe.ir.errors import CodegenError
from autopipe.ir.graph import COUNTED_LABELS, Graph
from autopipe.ir.layout import total_degree
from autopipe.ir.ops.normalization import uses_batch_statistics
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import AVERAGED_LOSS, LossDivision
from autopipe.ir.program import (
    Compute,
    DataInput,
    Instruction,
    Loop,
    MessageSlice,
    Opcode,
    Output,
    OutputShard,
    OutputStage,
    ParameterShard,
    Program,
    RankCode,
    RunningStatisticCalls,
    Section,
    StageCode,
    StageOnRank,
)
from autopipe.ir.repetition import longest_run
from autopipe.ir.schedule import Phase, Schedule, Task
from autopipe.ir.words import plural
from autopipe.passes.analysis.gradients import (
    differentiable_values,
    message_types,
    weight_operands,
)
from autopipe.passes.analysis.input_ranges import input_ranges
from autopipe.passes.analysis.micro_batches import (
    check_micro_batch_sizes,
    micro_batch_size,
    stage_graphs,
    stage_micro_batches,
)
from autopipe.passes.analysis.operators import low_precision_copies
from autopipe.passes.analysis.recompute import with_segments
from autopipe.passes.analysis.resharding import parameters_to_replicate
from autopipe.passes.analysis.stage_nodes import assign_nodes
from autopipe.passes.lower.deadlock_check import prove_no_deadlock
from autopipe.passes.lower.hardware_queues import check_hardware_queues
from autopipe.passes.lower.messages import (
    BufferedMessages,
    RankPeers,
    RankStep,
    SendingOrders,
    make_channels,
    make_message_slices,
    receives_before_tasks,
)
from autopipe.passes.lower.shard import ShardedStage, parameter_shards, shard_stage


@dataclass(frozen=True, slots=True)
class ProgramParts:
    """The parts of a program that do not depend on its schedule."""

    graphs: tuple[Graph, ...]
    """For each stage, the graph with the micro-batch size of the stage."""
    stages: tuple[ShardedStage, ...]
    pieces: tuple[MessageSlice, ...]
    shards: tuple[tuple[ParameterShard, ...], ...]
    """For each rank, its shards of parameters."""
    differentiable: frozenset[str]
    """Names of the values that have a gradient; empty for inference."""


def program_parts(
    graph: Graph, placement: Placement, devices: int, loss: str | None, precision: str = "fp32"
) -> ProgramParts:
    """Return the parts of a program that do not depend on its schedule. The program trains with the
    value `loss`, or computes all outputs of the graph if `loss` is None. `devices` is the number of
    ranks.

    If stages would shard a parameter differently, it is replicated in all of them, so that its
    gradient is a sum over equal shards. Raises CodegenError for splits and micro-batch sizes that
    cannot be executed.
    """
    wanted = wanted_values(graph, loss)
    ratios = stage_micro_batches(graph, placement)
    graphs = stage_graphs(graph, placement)
    assigned = assign_nodes(graph, placement, wanted)
    unread = frozenset(wanted) - graph.consumers().keys()
    batch = batch_axes_of(graph)

    def shard_stages(replicated: frozenset[str]) -> tuple[ShardedStage, ...]:
        """Return the local code of all stages. The parameters in `replicated` are not sharded."""
        return tuple(
            shard_stage(own, number, stage, nodes, replicated, unread, batch, precision)
            for number, (own, stage, nodes) in enumerate(
                zip(graphs, placement.stages, assigned, strict=True)
            )
        )

    stages = shard_stages(frozenset())
    torn = parameters_to_replicate([(stage.code.devices, stage.parameters) for stage in stages])
    stages = shard_stages(torn) if torn else stages
    differentiable = differentiable_values(graph) if loss is not None else frozenset()
    numbers = {id(constant): index for index, constant in enumerate(graph.constants)}
    finished = []
    for own, stage, ratio in zip(graphs, stages, ratios, strict=True):
        code = replace(stage.code, ratio=ratio)
        if own is not graph:
            # Graphs for other micro-batch sizes have other constants. Constants are numbered over
            # all graphs, and the indices of constants of `graph` do not change.
            constants = [
                (numbers.setdefault(id(each), len(numbers)), each) for _, each in code.constants
            ]
            code = replace(code, constants=tuple(sorted(constants, key=lambda each: each[0])))
        if loss is not None:
            code = with_segments(own, code, differentiable, placement.length)
        finished.append(replace(stage, code=code))
    stages = tuple(finished)
    pieces = make_message_slices(
        graph, placement, stages, differentiable, message_types(graph, precision)
    )
    return ProgramParts(
        graphs, stages, pieces, parameter_shards(graph, devices, stages), differentiable
    )


def wanted_values(graph: Graph, loss: str | None) -> tuple[str, ...]:
    """Return the names of the values that a program computes.

    A training program computes `loss` and, if the graph counts labels that are not ignored, their
    number (`COUNTED_LABELS`). An inference program, whose `loss` is None, computes all outputs of
    the graph.
    """
    if loss is None:
        return tuple(dict.fromkeys(graph.outputs))
    return (loss, COUNTED_LABELS) if graph.has(COUNTED_LABELS) else (loss,)


def labels_per_micro_batch(graph: Graph) -> int | None:
    """Return the number of labels of one micro-batch, including ignored labels. Return None if the
    graph does not count labels, or if no node computes their number.
    """
    index = graph.producer(COUNTED_LABELS) if graph.has(COUNTED_LABELS) else None
    return None if index is None else graph.type_of(graph.nodes[index].inputs[0]).elements


def lower(
    graph: Graph,
    placement: Placement,
    schedule: Schedule,
    loss: str | None,
    shard: bool = False,
    proven: bool = True,
    precision: str = "fp32",
    loss_division: LossDivision = AVERAGED_LOSS,
) -> Program:
    """Return the program that runs `graph` with `placement` and `schedule`.

    loss: name of the value with which to train; None for inference, which computes all outputs of
    the graph.
    shard: shard the optimizer state over the ranks that hold equal parameters (ZeRO stage 1).
    proven: check that no rank waits forever. The check takes long for many ranks.
    precision: the precision of the program, which determines the types of messages.
    loss_division: how the loss of the step is computed from the losses of its micro-batches.

    Raises CodegenError if the placement or the schedule cannot be executed, or if a rank would wait
    forever. Raises InfeasibleError if the micro-batch sizes of stages would change the result.
    """
    if loss is not None and math.prod(graph.type_of(loss).shape) != 1:
        shape = list(graph.type_of(loss).shape)
        raise CodegenError(
            f"the loss {loss!r} has shape {shape}, expected a scalar", hint="choose a scalar output"
        )
    if loss is not None and graph.producer(loss) is None:
        raise CodegenError(
            f"the loss {loss!r} is not computed by the model",
            hint="choose an output that a node computes",
        )
    if placement.devices > schedule.devices:
        raise CodegenError(
            f"the placement uses {placement.devices} {plural(placement.devices, 'device')}, but "
            f"the schedule is for {schedule.devices}"
        )
    check_micro_batch_sizes(graph, placement)
    parts = program_parts(graph, placement, schedule.devices, loss, precision)
    codes = tuple(stage.code for stage in parts.stages)
    batch = batch_axes_of(graph)
    wired = _stages_by_rank(graph, parts, schedule.devices)
    copies = low_precision_copies(graph, precision)
    running = running_statistic_calls(graph, codes) if loss is not None else ()
    casting = (
        code for code, stage in zip(codes, placement.stages, strict=True) if not stage.holds_copies
    )
    recast = {
        index
        for code in casting
        if code.recompute and loss is not None
        for index, _ in code.parameters
    }
    steps = _rank_steps(wired, schedule, tuple(code.ratio for code in codes))
    program = Program(
        world_size=schedule.devices,
        train=loss is not None,
        micro_batches=schedule.micro_batches,
        micro_batch_size=micro_batch_size(graph, placement),
        loss=loss,
        parameters=graph.parameters,
        inputs=input_ranges(graph),
        outputs=tuple(_program_output(parts, name, batch) for name in wanted_values(graph, loss)),
        stages=_split_backwards(graph, codes, schedule),
        ranks=tuple(
            RankCode(rank, tuple(wired[rank]), parts.shards[rank], *step.sections)
            for rank, step in enumerate(steps)
        ),
        channels=make_channels(wired, codes, steps),
        shard=shard and loss is not None,
        loss_division=loss_division if loss is not None else AVERAGED_LOSS,
        labels=labels_per_micro_batch(graph) if loss is not None else None,
        running_calls=running,
        low_precision=tuple(
            index
            for index, each in enumerate(graph.parameters)
            if each.value.name in copies and index not in recast
        ),
    )
    if proven:
        check_hardware_queues(program, prove_no_deadlock(program))
    return program


def running_statistic_calls(
    graph: Graph, codes: Sequence[StageCode]
) -> tuple[RunningStatisticCalls, ...]:
    """Return the calls of BatchNormalization that update the running statistics held by several
    stages of one pipeline. There is one entry per pair of a running statistic and a pipeline.
    """
    indices = {each.value.name: index for index, each in enumerate(graph.parameters)}
    holders: dict[tuple[int, int], set[int]] = defaultdict(set)
    calls: dict[tuple[int, int], list[tuple[int, int, float]]] = defaultdict(list)
    for code in codes:
        for parameter, _ in code.parameters:
            holders[parameter, code.pipeline].add(code.stage)
        for each in code.operations:
            if not isinstance(each, Compute):
                continue
            node = graph.nodes[each.node]
            if uses_batch_statistics(each.signature):
                momentum = float(str(np.float32(node.number("momentum", 0.9))))
                for name in node.inputs[3:5]:
                    if name in indices:
                        calls[indices[name], code.pipeline].append(
                            (each.node, code.stage, momentum)
                        )
    found = []
    for key, own in sorted(calls.items()):
        if len(holders[key]) > 1:
            own.sort()
            stages = tuple(stage for _, stage, _ in own)
            found.append(
                RunningStatisticCalls(key[0], stages, tuple(momentum for *_, momentum in own))
            )
    return tuple(found)


def _split_backwards(
    graph: Graph, codes: tuple[StageCode, ...], schedule: Schedule
) -> tuple[StageCode, ...]:
    """Return the stages, with `deferred` set for each stage whose backward the schedule divides
    into two tasks.

    `deferred` are the nodes whose weight gradients the second task computes.
    """
    split = {
        task.stage
        for order in schedule.tasks
        for task in order
        if task.phase is Phase.INPUT_GRADIENT
    }
    waiting = weight_operands(graph)

    def deferred(code: StageCode) -> tuple[int, ...]:
        """Return the nodes of the stage whose weight gradients can be computed in a
        separate task.
        """
        computed = (each.node for each in code.operations if isinstance(each, Compute))
        return tuple(node for node in computed if waiting[node])

    return tuple(
        replace(code, deferred=deferred(code)) if code.stage in split else code for code in codes
    )


def _rank_steps(
    wired: list[list[StageOnRank]], schedule: Schedule, ratios: tuple[int, ...]
) -> list[RankStep]:
    """Return the instructions of each rank for one step. `ratios` contains the number of
    micro-batches of each stage per micro-batch of the program.
    """
    orders = SendingOrders(schedule)

    # Ranks of one stage usually run equal tasks with equal peers, so the cache avoids computing
    # equal instructions again.
    @cache
    def step(tasks: tuple[Task, ...], peers: RankPeers) -> RankStep:
        flat = rank_instructions(tasks, peers, orders)
        return RankStep(flat, fold_into_sections(flat, ratios), BufferedMessages(flat))

    return [
        step(tasks, RankPeers.of(stages))
        for stages, tasks in zip(wired, schedule.tasks, strict=True)
    ]


def _stages_by_rank(graph: Graph, parts: ProgramParts, devices: int) -> list[list[StageOnRank]]:
    """Return the stages of each of `devices` ranks, with the graph inputs that they read, the
    messages that they receive and the messages that they send.
    """
    given = {value.name for value in graph.inputs}
    receives: dict[tuple[int, int], list[MessageSlice]] = defaultdict(list)
    sends: dict[tuple[int, int], list[MessageSlice]] = defaultdict(list)
    for piece in parts.pieces:
        receives[piece.target_stage, piece.target_rank].append(piece)
        sends[piece.source_stage, piece.source_rank].append(piece)
    found: list[list[StageOnRank]] = [[] for _ in range(devices)]
    for number, stage in enumerate(parts.stages):
        for position, rank in enumerate(stage.code.devices):
            data = (
                DataInput(name, need.shard(position))
                for name, need in stage.inputs.items()
                if name in given
            )
            wires = tuple(receives[number, rank]), tuple(sends[number, rank])
            found[rank].append(StageOnRank(number, tuple(data), *wires))
    return found


def _program_output(parts: ProgramParts, name: str, batch: BatchAxes) -> Output:
    """Return the output `name` of the program: its type, its batch dimension, and the stages and
    shards that provide it. `batch` contains the batch dimensions of the values.
    """
    giving: dict[int, ShardedStage] = {}
    for stage in parts.stages:
        if name in stage.outputs:
            giving.setdefault(stage.code.pipeline, stage)
    places = []
    for _, stage in sorted(giving.items()):
        layout = stage.outputs[name]
        devices = stage.code.devices
        boxes = tuple(
            OutputShard(rank, layout.shard(position)) for position, rank in enumerate(devices)
        )
        copies = len(devices) // (layout.shard_count * total_degree(layout.sums))
        position = [value.name for value in stage.code.outputs].index(name)
        combine = "sum" if layout.is_partial else "concat"
        places.append(OutputStage(stage.code.stage, position, combine, copies, boxes))
    graph = parts.graphs[places[0].stage]
    samples = batch.of(name)
    if batch.batch > 1:
        axis = samples.dimension if samples is not None and samples.outer == 1 else None
    else:
        # The batch has one sample, so its dimension cannot be identified by the size. A first axis
        # of size 1 is assumed to be the batch dimension.
        axis = 0 if graph.type_of(name).shape[:1] == (1,) else dict(graph.batch_axes).get(name)
    return Output(graph.type_of(name), axis, tuple(places))


_TASK_VERBS = {
    Phase.FORWARD: (Opcode.FORWARD, Opcode.SEND),
    Phase.BACKWARD: (Opcode.BACKWARD, Opcode.SEND_GRADIENT),
    Phase.INPUT_GRADIENT: (Opcode.BACKWARD_INPUT, Opcode.SEND_GRADIENT),
    Phase.WEIGHT_GRADIENT: (Opcode.BACKWARD_WEIGHT, None),
}
"""For each phase: (instruction that runs the task, instruction that sends its results or None)."""


def rank_instructions(
    tasks: Sequence[Task], peers: RankPeers, orders: SendingOrders
) -> tuple[Instruction, ...]:
    """Return the instructions of a rank for one step. They are its tasks in order, with receives
    before the tasks (see `receives_before_tasks`) and sends after them.
    """
    found: list[Instruction] = []
    for task, received in zip(tasks, receives_before_tasks(tasks, peers, orders), strict=True):
        compute, send = _TASK_VERBS[task.phase]
        found += received
        found.append(Instruction(compute, task.stage, task.micro_batch))
        if send is not None and (task.stage, send) in peers.sends:
            found.append(Instruction(send, task.stage, task.micro_batch))
    return tuple(found)


def fold_into_sections(
    flat: Sequence[Instruction], ratios: Sequence[int] = ()
) -> tuple[Section, Section, Section]:
    """Return (warm-up, steady state, cool-down) of a sequence of instructions.

    The steady state is the loop that covers the most instructions, or () if nothing repeats.
    Repeated instructions before and after it are folded into further loops.

    `ratios` contains the number of micro-batches of each stage per micro-batch of the program; ()
    if it is 1 for all stages.
    """
    units = {stage: math.lcm(*ratios) // each for stage, each in enumerate(ratios)}
    before, loop, after = _largest_loop(flat, units)
    return (_fold(before, units), loop, _fold(after, units)) if loop else (tuple(flat), (), ())


def _fold(flat: Sequence[Instruction], units: Mapping[int, int]) -> Section:
    """Return the instructions with repeated instructions folded into loops. `units` contains, by
    stage, the size of its micro-batches in a unit that is common to all stages.
    """
    before, loop, after = _largest_loop(flat, units)
    return (*_fold(before, units), *loop, *_fold(after, units)) if loop else tuple(flat)


_MAX_BODY = 2048
"""Maximum number of instructions in the body of a loop. One group of micro-batches of Chimera or
interleaved 1F1B on 32 devices has a few hundred instructions.
"""


def _largest_loop(
    flat: Sequence[Instruction], units: Mapping[int, int]
) -> tuple[Sequence[Instruction], tuple[Loop, ...], Sequence[Instruction]]:
    """Return (instructions before, loop, instructions after) for the loop that covers the most
    instructions. Ties go to the shortest body. The loop is () if nothing repeats.

    A body of n instructions repeats if each instruction equals the instruction n positions earlier
    except for its micro-batch, and all micro-batches advance by one distance. `units` contains, by
    stage, the size of its micro-batches in a unit that is common to all stages. The index of a
    micro-batch is multiplied by this size before distances are compared, because stages may have
    micro-batches of different sizes. Time O(length of `flat` times `_MAX_BODY`).
    """
    kinds: dict[tuple[int, Opcode, int | None, int | None], int] = {}
    keys = ((each.stage, each.opcode, each.source, each.part) for each in flat)
    codes = np.array([kinds.setdefault(key, len(kinds)) for key in keys], np.int32)
    indices = np.array([each.micro_batch * units.get(each.stage, 1) for each in flat], np.int64)
    covered = start = size = distance = 0
    for length in range(1, min(_MAX_BODY, len(flat) // 2) + 1):
        same = codes[length:] == codes[:-length]
        if np.count_nonzero(same) < max(length, covered + 1 - length):
            # Too few instructions recur after `length` instructions. No loop with a body of this
            # length can cover more instructions than the best loop so far.
            continue
        first, count, moved = longest_run(same, indices, length)
        if length * count > covered:
            covered = length * count
            start = first
            size = length
            distance = moved
    if not covered:
        return flat, (), ()
    body = tuple(flat[start : start + size])
    strides = tuple(distance // units.get(each.stage, 1) for each in body)
    loop = Loop(body, covered // size, strides[0], () if len(set(strides)) == 1 else strides)
    return flat[:start], (loop,), flat[start + covered :]


def one_device_program(
    graph: Graph,
    micro_batches: int,
    micro_batch_size: int,
    loss: str | None,
    loss_division: LossDivision = AVERAGED_LOSS,
) -> Program:
    """Return the program that runs `micro_batches` micro-batches one after another on one device.
    It trains with the value `loss`, or only runs forwards if `loss` is None.

    `micro_batch_size` is in samples. Raises CodegenError as `lower` does.
    """
    stage = Stage(tuple(range(len(graph.nodes))), (0,), micro_batch_size)
    phases = (Phase.FORWARD, Phase.BACKWARD) if loss is not None else (Phase.FORWARD,)
    order = tuple(Task(0, phase, index) for index in range(micro_batches) for phase in phases)
    return lower(
        graph,
        Placement((stage,)),
        Schedule(micro_batches, (order,)),
        loss,
        loss_division=loss_division,
    )
