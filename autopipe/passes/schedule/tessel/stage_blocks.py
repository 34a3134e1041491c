"""Conversion of the stages of a placement into blocks, whose schedule is then searched, and of the
found block schedule into a schedule of tasks.

A block is a phase of a stage. The block graph contains one micro-batch of each pipeline. A stage
with a ratio r (`StageGraph.ratios`) runs r smaller micro-batches per micro-batch of the problem and
has r blocks per phase. These run in order; no schedule is lost thereby, because tasks of equal
length can be sorted by their samples. A message is either a delay between two blocks, or a block on
a link, which runs one message at a time. Times are integers in ticks. Memory is an integer in parts
of the smallest memory that a device has left besides its static memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopipe.ir.block_schedule import Block, BlockGraph, BlockSchedule
from autopipe.ir.schedule import Phase, Schedule, StageGraph, Task
from autopipe.ir.timeline import Message, Prediction, StagePrediction
from autopipe.passes.schedule.orders import find_repetends

BlockKind = tuple[int, Phase, int]
"""Task that a block stands for: (stage, phase, index of the stage's micro-batch within the block
graph).
"""

StageMicroBatch = tuple[int, int]
"""A micro-batch of a stage: (stage, index of the stage's micro-batch within the block graph)."""

_MEMORY_PARTS = 1 << 16
"""Number of units of memory into which the smallest free memory of a device is divided."""


@dataclass(frozen=True, slots=True)
class StageBlocks:
    """The blocks of stages, followed by the blocks of links if messages are blocks. A link is the
    directed connection of two devices and counts as an additional device. The devices of links
    follow the devices of stages.
    """

    graph: BlockGraph
    kinds: tuple[BlockKind, ...]
    """For each block of a stage, the task that it stands for: (stage, phase, index of the stage's
    micro-batch within the block graph). Blocks of links have no entry.
    """
    tick_s: float
    """Seconds per tick."""

    @property
    def rounding(self) -> float:
        """Upper bound of the fraction by which a period may be overstated, because the time of each
        block of the busiest device may be rounded up by up to one tick.
        """
        pairs = zip(self.graph.members, self.graph.loads, strict=True)
        busiest = max(self.graph.loads)
        return max(len(members) / load for members, load in pairs if load == busiest)


def stage_blocks(
    stages: StageGraph,
    prediction: Prediction,
    train: bool,
    tick_s: float,
    *,
    split: bool = False,
    round_up: bool = True,
) -> StageBlocks:
    """Return the blocks of the stages, without memory limits. A tick has `tick_s` seconds.

    Times are rounded up to whole ticks, so that a schedule in ticks is valid in seconds. If
    `round_up` is False, they are rounded down, for lower bounds. Each block takes at least one
    tick. With `train`, there are blocks of backwards; if `split`, each backward has two blocks, for
    its two halves.
    """
    backwards = (Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT) if split else (Phase.BACKWARD,)
    kinds = tuple(
        (stage, phase, number)
        for phase in (Phase.FORWARD, *(backwards if train else ()))
        for stage in range(len(stages.stage_devices))
        for number in range(stages.micro_batch_ratio_at(stage))
    )
    index = {kind: position for position, kind in enumerate(kinds)}
    delays: dict[tuple[StageMicroBatch, StageMicroBatch], float] = {}
    # Seconds of the slowest message between two stages, by (sender, receiver) of the message.
    for message, source, target in _all_messages(stages, prediction.messages):
        if message.source != message.target:
            for pair, seconds in (
                ((source, target), message.forward_s),
                ((target, source), message.backward_s),
            ):
                delays[pair] = max(delays.get(pair, 0.0), seconds)
    round_ticks = math.ceil if round_up else math.floor
    blocks = []
    for stage, phase, number in kinds:
        after = []
        after_delays = []
        for kind in _predecessors(stages, stage, phase, number):
            after.append(index[kind])
            delay_s = delays.get(((kind[0], kind[2]), (stage, number)), 0.0)
            after_delays.append(round_ticks(delay_s / tick_s))
        time = max(1, round_ticks(prediction.stages[stage].seconds(phase) / tick_s))
        name = f"{stage}{phase.value}"
        if stages.micro_batch_ratio_at(stage) > 1:
            name += f".{number}"
        devices = stages.stage_devices[stage]
        blocks.append(Block(name, devices, time, 0, tuple(after), tuple(after_delays)))
    graph = BlockGraph(
        stages.devices, tuple(blocks), (None,) * stages.devices, stages.pipeline_count
    )
    return StageBlocks(graph, kinds, tick_s)


def add_links(blocks: StageBlocks, stages: StageGraph, messages: Sequence[Message]) -> StageBlocks:
    """Return the blocks with messages as blocks on links instead of delays, so that messages over
    one link run one after another. Each directed link becomes one additional device.
    """
    index = {kind: position for position, kind in enumerate(blocks.kinds)}
    backward = next((phase for _, phase, _ in blocks.kinds if phase is not Phase.FORWARD), None)
    extended = [replace(block, delays=()) for block in blocks.graph.blocks]
    links: dict[tuple[int, int], int] = {}
    for message, source, target in _all_messages(stages, messages):
        ends = (message.source, message.target)
        directions = [(source, target, Phase.FORWARD, message.forward_s, ends)]
        if backward is not None:
            directions.append((target, source, backward, message.backward_s, ends[::-1]))
        for (sender, own), (receiver, other), phase, seconds, link in directions:
            if link[0] == link[1] or not seconds:
                continue
            device = links.setdefault(link, blocks.graph.devices + len(links))
            time = max(1, math.ceil(seconds / blocks.tick_s))
            sending = index[sender, phase, own]
            name = f"{extended[sending].name} to {receiver} on {link[0]}-{link[1]}"
            waiting = index[receiver, phase, other]
            after = (*extended[waiting].after, len(extended))
            extended[waiting] = replace(extended[waiting], after=after)
            extended.append(Block(name, (device,), time, 0, (sending,)))
    memory = blocks.graph.memory + (None,) * len(links)
    graph = replace(blocks.graph, devices=len(memory), blocks=tuple(extended), memory=memory)
    return replace(blocks, graph=graph)


def busiest_seconds(stages: StageGraph, prediction: Prediction) -> float:
    """Return the seconds for which the busiest device computes for one micro-batch of each
    pipeline.
    """
    loads = [0.0] * stages.devices
    for stage, (devices, cost) in enumerate(
        zip(stages.stage_devices, prediction.stages, strict=True)
    ):
        for device in devices:
            loads[device] += (cost.forward_s + cost.backward_s) * stages.micro_batch_ratio_at(stage)
    return max(loads)


def add_memory(
    blocks: StageBlocks, costs: Sequence[StagePrediction], free: Sequence[int], micro_batches: int
) -> StageBlocks:
    """Return the blocks with the memory that each adds or frees, and with memory limits of the
    devices.

    `free` contains the bytes of each device that are available for saved activations and temporary
    memory. Saved activations are rounded up and limits are rounded down. A device has no limit if
    its memory suffices for all `micro_batches` at once.
    """
    used = {
        device for block in blocks.graph.blocks[: len(blocks.kinds)] for device in block.devices
    }
    smallest = min((max(0, free[device]) for device in used), default=0)
    part_bytes = max(1, smallest // _MEMORY_PARTS)
    # Bytes are rounded per stage, not per block, so that the changes of a micro-batch still add up
    # to 0.
    rounded = [
        replace(
            cost,
            kept_bytes=-(-cost.kept_bytes // part_bytes),
            weight_kept_bytes=-(-cost.weight_kept_bytes // part_bytes),
        )
        for cost in costs
    ]
    changes = [rounded[stage].added_bytes(phase) for stage, phase, _ in blocks.kinds]
    changes += [0] * (len(blocks.graph.blocks) - len(changes))
    with_changes = tuple(
        replace(block, memory=change)
        for block, change in zip(blocks.graph.blocks, changes, strict=True)
    )
    limits: list[int | None] = [None] * blocks.graph.devices
    for device in used:
        members = blocks.graph.members[device]
        temporary = max(costs[blocks.kinds[index][0]].transient_bytes for index in members)
        limit = max(0, free[device] - temporary) // part_bytes
        if micro_batches * sum(max(0, changes[index]) for index in members) > limit:
            limits[device] = limit
    graph = replace(blocks.graph, blocks=with_changes, memory=tuple(limits))
    return replace(blocks, graph=graph)


def stage_schedule(
    blocks: StageBlocks, found: BlockSchedule, stages: StageGraph, micro_batches: int
) -> Schedule:
    """Return the schedule of tasks in which each device runs its tasks in the order in which their
    blocks start in `found`. Micro-batches from number `micro_batches` on are omitted; the last
    repetition may contain them.

    If a stage has several micro-batches per repetition, the search may start the first micro-batch
    of a repetition before the last micro-batch of the previous repetition. In the result, each
    stage runs its micro-batches in order. This is valid: when a task starts, each neighbouring
    stage has completed as many tasks as in the block schedule, and these are its first tasks.
    """
    pipelines = stages.pipelines or (0,) * len(stages.stage_devices)
    orders = []
    for tasks in found.tasks[: stages.devices]:
        order = []
        for _, repetition, index in tasks:
            stage, phase, number = blocks.kinds[index]
            micro_batch = repetition * stages.pipeline_count + pipelines[stage]
            if micro_batch < micro_batches:
                order.append(
                    Task(stage, phase, micro_batch * stages.micro_batch_ratio_at(stage) + number)
                )
        # Sort the micro-batches of each stage and phase. The positions at which the stage and phase
        # run do not change.
        ascending: dict[tuple[int, Phase], list[Task]] = {}
        for task in sorted(order, key=lambda task: -task.micro_batch):
            ascending.setdefault((task.stage, task.phase), []).append(task)
        orders.append(tuple(ascending[task.stage, task.phase].pop() for task in order))
    period = None if found.period is None else found.period * blocks.tick_s
    return Schedule(micro_batches, tuple(orders), find_repetends(orders), period)


def _all_messages(
    stages: StageGraph, messages: Sequence[Message]
) -> Iterator[tuple[Message, StageMicroBatch, StageMicroBatch]]:
    """Yield (message, sender, receiver) for all messages of one micro-batch of each pipeline.
    Sender and receiver are (stage, micro-batch) of the message in the forward direction; in
    backward they are swapped.
    """
    for each in messages:
        for number in range(stages.micro_batch_ratio_at(each.source_stage) // each.source_slice.of):
            source = each.source_stage, each.source_slice.micro_batch(number)
            yield each, source, (each.target_stage, each.target_slice.micro_batch(number))


def _predecessors(stages: StageGraph, stage: int, phase: Phase, number: int) -> list[BlockKind]:
    """Return the tasks that a task waits for, as (stage, phase, micro-batch): the tasks that it
    depends on, and the task of the same stage and phase on the previous micro-batch. Only tasks of
    the block graph count.
    """
    dependencies = stages.dependencies_of(stage, phase, number)
    # Number of dependencies, at the start of the list, that are tasks of the stage itself: 1 for a
    # backward, because it waits for its forward, and 0 for a forward.
    own = int(phase is not Phase.FORWARD)
    previous = [(stage, phase, number - 1)] if number else []
    return [*dependencies[:own], *previous, *dependencies[own:]]
