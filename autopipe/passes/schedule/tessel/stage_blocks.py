"""Stages as blocks, so that their schedule can be searched; and the schedule found back as tasks of
stages.

A block is a phase of a stage, a unit one micro-batch of each pipeline. A stage that runs several of
its own for that has a block for each, in order: no schedule is lost, since tasks of one length can
be sorted by their samples. Messages are delays or blocks on links, times whole ticks, memory whole
shares of what devices have left all through a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopipe.ir.block_schedule import Block, BlockGraph, BlockSchedule
from autopipe.ir.schedule import Phase, Schedule, StageGraph, Task
from autopipe.ir.timeline import Message, Prediction, StagePrediction
from autopipe.passes.schedule.orders import find_repetends

Kind = tuple[int, Phase, int]
"""A stage, what it does, and in which of its turns."""

Turned = tuple[int, int]
"""A stage and one of its turns."""

_SHARES = 1 << 16  # Parts that the room of the device with the least of it is counted in.


@dataclass(frozen=True, slots=True)
class StageBlocks:
    """The blocks of stages: block i is `kinds[i]`; blocks and devices behind those of the stages
    are links'.
    """

    graph: BlockGraph
    kinds: tuple[Kind, ...]
    tick_s: float

    @property
    def rounding(self) -> float:
        """Share by which a period may be overstated, as each of a device's blocks takes up to a
        tick more than said.
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
    up: bool = True,
) -> StageBlocks:
    """The blocks of one unit, with no memory limit. Times are rounded up to whole ticks, so that
    what fits in ticks fits in seconds, or down (`up=False`) for bounds that nothing is shorter
    than; a block takes one tick at least. `split` takes each backward as two blocks.
    """
    backwards = (Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT) if split else (Phase.BACKWARD,)
    kinds = tuple(
        (stage, phase, turn)
        for phase in (Phase.FORWARD, *(backwards if train else ()))
        for stage in range(len(stages.stage_devices))
        for turn in range(stages.micro_batch_ratio_at(stage))
    )
    index = {kind: position for position, kind in enumerate(kinds)}
    delays: dict[tuple[Turned, Turned], float] = {}
    # Seconds from the end of a stage's task to when another may start: its slowest message, forward
    # or backward.
    for each, source, target in _in_unit(stages, prediction.messages):
        if each.source != each.target:
            for pair, seconds in (
                ((source, target), each.forward_s),
                ((target, source), each.backward_s),
            ):
                delays[pair] = max(delays.get(pair, 0.0), seconds)
    whole = math.ceil if up else math.floor
    blocks = []
    for stage, phase, turn in kinds:
        waits = [
            (index[kind], whole(delays.get(((kind[0], kind[2]), (stage, turn)), 0.0) / tick_s))
            for kind in _before(stages, stage, phase, turn)
        ]
        time = max(1, whole(prediction.stages[stage].seconds(phase) / tick_s))
        after = tuple(each for each, _ in waits)
        late = tuple(each for _, each in waits)
        name = f"{stage}{phase.value}" + (
            f".{turn}" if stages.micro_batch_ratio_at(stage) > 1 else ""
        )
        blocks.append(Block(name, stages.stage_devices[stage], time, 0, after, late))
    graph = BlockGraph(
        stages.devices, tuple(blocks), (None,) * stages.devices, stages.pipeline_count
    )
    return StageBlocks(graph, kinds, tick_s)


def with_links(blocks: StageBlocks, stages: StageGraph, messages: Sequence[Message]) -> StageBlocks:
    """The same blocks with messages that take turns on their links: each directed link is one more
    device.
    """
    index = {kind: position for position, kind in enumerate(blocks.kinds)}
    backward = next((phase for _, phase, _ in blocks.kinds if phase is not Phase.FORWARD), None)
    made = [replace(block, delays=()) for block in blocks.graph.blocks]
    links: dict[tuple[int, int], int] = {}
    for each, source, target in _in_unit(stages, messages):
        ways = [(source, target, Phase.FORWARD, each.forward_s, (each.source, each.target))]
        if backward is not None:
            ways.append((target, source, backward, each.backward_s, (each.target, each.source)))
        for (sender, own), (receiver, other), phase, seconds, link in ways:
            if link[0] == link[1] or not seconds:
                continue
            device = links.setdefault(link, blocks.graph.devices + len(links))
            time = max(1, math.ceil(seconds / blocks.tick_s))
            sending = index[sender, phase, own]
            name = f"{made[sending].name} to {receiver} on {link[0]}-{link[1]}"
            waiting = index[receiver, phase, other]
            made[waiting] = replace(made[waiting], after=(*made[waiting].after, len(made)))
            made.append(Block(name, (device,), time, 0, (sending,)))
    rooms = blocks.graph.memory + (None,) * len(links)
    graph = replace(blocks.graph, devices=len(rooms), blocks=tuple(made), memory=rooms)
    return replace(blocks, graph=graph)


def busiest_seconds(stages: StageGraph, prediction: Prediction) -> float:
    """Seconds that one unit takes on the device that has most to do."""
    loads = [0.0] * stages.devices
    for stage, (devices, cost) in enumerate(
        zip(stages.stage_devices, prediction.stages, strict=True)
    ):
        for device in devices:
            loads[device] += (cost.forward_s + cost.backward_s) * stages.micro_batch_ratio_at(stage)
    return max(loads)


def with_memory(
    blocks: StageBlocks, costs: Sequence[StagePrediction], free: Sequence[int], units: int
) -> StageBlocks:
    """The same blocks with what they keep, and `free` bytes on each device for that and for what
    comes and goes. What they keep is rounded up, the room down. A device that has room for all
    units at once gets no limit.
    """
    used = {
        device for block in blocks.graph.blocks[: len(blocks.kinds)] for device in block.devices
    }
    unit = max(1, min((max(0, free[device]) for device in used), default=0) // _SHARES)
    rounded = [
        replace(
            each,
            kept_bytes=-(-each.kept_bytes // unit),
            weight_kept_bytes=-(-each.weight_kept_bytes // unit),
        )
        for each in costs
    ]  # The parts of a micro-batch add up to nothing.
    changed = [rounded[stage].added_bytes(phase) for stage, phase, _ in blocks.kinds]
    changed += [0] * (len(blocks.graph.blocks) - len(changed))
    made = tuple(
        replace(block, memory=change)
        for block, change in zip(blocks.graph.blocks, changed, strict=True)
    )
    rooms: list[int | None] = [None] * blocks.graph.devices
    for device in used:
        members = blocks.graph.members[device]
        fleeting = max(costs[blocks.kinds[index][0]].transient_bytes for index in members)
        room = max(0, free[device] - fleeting) // unit
        if units * sum(max(0, changed[index]) for index in members) > room:
            rooms[device] = room
    return replace(blocks, graph=replace(blocks.graph, blocks=made, memory=tuple(rooms)))


def stage_schedule(
    blocks: StageBlocks, found: BlockSchedule, stages: StageGraph, micro_batches: int
) -> Schedule:
    """The order of the blocks' starts as an order of tasks; of the last unit only the micro-batches
    there are. The search may begin a unit's first micro-batch before the last one of the unit
    before. Each stage takes its micro-batches in order nevertheless: as many of a neighbour's tasks
    as a stage waits for are done by then, whichever they are.
    """
    pipelines = stages.pipelines or (0,) * len(stages.stage_devices)
    orders = []
    for tasks in found.tasks[: stages.devices]:
        order = []
        for _, unit, index in tasks:
            stage, phase, turn = blocks.kinds[index]
            micro_batch = unit * stages.pipeline_count + pipelines[stage]
            if micro_batch < micro_batches:
                order.append(
                    Task(stage, phase, micro_batch * stages.micro_batch_ratio_at(stage) + turn)
                )
        # The same tasks of each stage in the same places, micro-batches ascending.
        ascending: dict[tuple[int, Phase], list[Task]] = {}
        for task in sorted(order, key=lambda task: -task.micro_batch):
            ascending.setdefault((task.stage, task.phase), []).append(task)
        orders.append(tuple(ascending[task.stage, task.phase].pop() for task in order))
    period = None if found.period is None else found.period * blocks.tick_s
    return Schedule(micro_batches, tuple(orders), find_repetends(orders), period)


def _in_unit(
    stages: StageGraph, messages: Sequence[Message]
) -> Iterator[tuple[Message, Turned, Turned]]:
    """Each message of a unit, with the stage and the turn that sends it forwards, and those that
    receive it.
    """
    for each in messages:
        for number in range(stages.micro_batch_ratio_at(each.source_stage) // each.source_slice.of):
            source = each.source_stage, each.source_slice.micro_batch(number)
            yield each, source, (each.target_stage, each.target_slice.micro_batch(number))


def _before(stages: StageGraph, stage: int, phase: Phase, turn: int) -> list[Kind]:
    """Tasks that a task waits for in its unit: those its micro-batch needs, and its stage's last
    one of the kind.
    """
    needs = stages.needs(stage, phase, turn)
    own = int(phase is not Phase.FORWARD)
    return [*needs[:own], *([(stage, phase, turn - 1)] if turn else []), *needs[own:]]
