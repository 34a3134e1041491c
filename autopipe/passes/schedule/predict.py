"""Predictions for the stages of a placement from the cost model: the times of tasks, and the sizes
and times of the messages between stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import fields
from fractions import Fraction
from functools import partial
from operator import attrgetter

from autopipe.ir.batch import BatchAxes, batch_axes_of
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import MicroBatchSlice, Task, micro_batch_ratios
from autopipe.ir.timeline import Message, Prediction, StagePrediction
from autopipe.passes.analysis.gradients import differentiable_values, message_types, sent_bytes
from autopipe.passes.analysis.micro_batches import SharedPart, part_transfers, shared_parts
from autopipe.passes.cost.stage_work import StageWork, stage_work
from autopipe.passes.cost.stages import StageCost, stage_costs
from autopipe.passes.schedule.orders import Ticks

_Endpoints = tuple[int, int, tuple[int, int], tuple[int, int], int, int]
"""Endpoints of a message: (sending stage, receiving stage, micro-batch slice of the sender,
micro-batch slice of the receiver, sending device, receiving device). A micro-batch slice is (index,
of): every `of`-th micro-batch, starting at `index`.
"""


def stage_messages(problem: Problem, placement: Placement) -> tuple[Message, ...]:
    """Return the messages that stages exchange for one micro-batch of the problem, sorted by
    stages, micro-batch slices and devices. A micro-batch slice is every n-th micro-batch of a
    stage, from a first index on.

    A value that the devices of a stage hold in n shards is divided into n equal slices in order.
    Consecutive devices of the stage hold copies of one slice, and each slice has the same number of
    copies. A device that needs a slice uses its local copy, if it has one. Otherwise it receives
    the slice from one of the devices that hold it, chosen in rotation. If the stages have different
    micro-batch sizes, or the receiving stage gathers the value, the messages follow instead from
    the layouts of the value in both stages, as in the lowered program.

    Raises InfeasibleError if a value cannot be sent between stages with different micro-batch
    sizes.
    """
    graph = problem.graph
    works = stage_work(problem, placement)
    gradients = differentiable_values(graph) if problem.train else frozenset()
    producers = {
        (work.stage.pipeline, name): index
        for index, work in enumerate(works)
        for name in work.given
    }
    unequal = bool(micro_batch_ratios(placement, problem.micro_batch_size))
    shared = partial(shared_parts, graph, batch_axes_of(graph) if unequal else BatchAxes(0, (), {}))
    forward: defaultdict[_Endpoints, list[int]] = defaultdict(list)
    backward: defaultdict[_Endpoints, list[int]] = defaultdict(list)
    for target, work in enumerate(works):
        for name in work.received:
            source = producers.get((work.stage.pipeline, name))
            if source is None:
                continue
            sizes = (
                (stage.stage.micro_batch_size, stage.problem.graph.type_of(name).shape)
                for stage in (works[source], work)
            )
            for block in shared(name, *sizes):
                source_slice = (block.source_slice.index, block.source_slice.of)
                target_slice = (block.target_slice.index, block.target_slice.of)
                for sender, receiver, size in _transfers(works[source], work, name, block):
                    ends = (source, target, source_slice, target_slice, sender, receiver)
                    forward[ends].append(size)
                    if name in gradients:
                        backward[ends].append(size)

    def seconds(source: int, target: int, sizes: list[int]) -> float:
        """Return the seconds of messages from one device to another, one message per entry of
        `sizes` (bytes). Return 0 if both are one device.
        """
        if source == target:
            return 0.0
        return sum(problem.cluster.link(source, target).seconds(size) for size in sizes)

    messages = []
    for ends in sorted(forward):
        source, target, source_slice, target_slice, sender, receiver = ends
        forward_sizes = forward[ends]
        backward_sizes = backward[ends]
        messages.append(
            Message(
                source,
                target,
                sender,
                receiver,
                sum(forward_sizes),
                sum(backward_sizes),
                seconds(sender, receiver, forward_sizes),
                seconds(receiver, sender, backward_sizes),
                MicroBatchSlice(*source_slice),
                MicroBatchSlice(*target_slice),
            )
        )
    return tuple(messages)


def _transfers(
    sender: StageWork, receiver: StageWork, name: str, shared: SharedPart
) -> Iterator[tuple[int, int, int]]:
    """Yield (sending device, receiving device, bytes) for each transfer of the value `name`.
    `shared` is the part of the value that a micro-batch of the sending stage and a micro-batch of
    the receiving stage have in common.
    """
    size = sent_bytes(sender.problem.graph, sender.problem.precision)[name]
    is_equal = sender.stage.micro_batch_size == receiver.stage.micro_batch_size
    if is_equal and name not in receiver.stage.gathers:
        groups = (
            sender.stage.devices,
            sender.parts[name],
            receiver.stage.devices,
            receiver.parts[name],
        )
        for source, target, share in _slice_transfers(*groups):
            yield source, target, round(size * share)
        return
    layouts = sender.given[name], receiver.received[name]
    width = message_types(sender.problem.graph, sender.problem.precision)[name].itemsize
    for source, target, sent, _ in part_transfers(
        *layouts, sender.stage.devices, receiver.stage.devices, shared
    ):
        yield source, target, sent.elements * width


def _slice_transfers(
    senders: tuple[int, ...], held: int, receivers: tuple[int, ...], needed: int
) -> Iterator[tuple[int, int, Fraction]]:
    """Yield (sending device, receiving device, fraction of the value) for each slice that a
    receiving device needs. A device that holds the slice itself is both sender and receiver.

    The senders hold the value in `held` shards, the receivers need it in `needed` shards.
    """
    copies = len(senders) // held
    for position, receiver in enumerate(receivers):
        wanted = position * needed // len(receivers)
        start = Fraction(wanted, needed)
        stop = Fraction(wanted + 1, needed)
        for shard in range(int(start * held), held):
            fraction = min(stop, Fraction(shard + 1, held)) - max(start, Fraction(shard, held))
            if fraction <= 0:
                break
            holders = senders[shard * copies : (shard + 1) * copies]
            sender = receiver if receiver in holders else holders[position % copies]
            yield sender, receiver, fraction


_prediction_fields = attrgetter(*(field.name for field in fields(StagePrediction)))


def predict(problem: Problem, placement: Placement) -> Prediction:
    """Return the predicted times of the stages and of the messages between them, with stage costs
    from the cost model.
    """
    return prediction_from_costs(problem, placement, stage_costs(problem, placement))


def prediction_from_costs(
    problem: Problem, placement: Placement, costs: Sequence[StageCost]
) -> Prediction:
    """Return the prediction for stages whose costs are given as `costs`."""
    return Prediction(
        tuple(StagePrediction(*_prediction_fields(cost)) for cost in costs),
        stage_messages(problem, placement),
    )


def task_ticks(problem: Problem, placement: Placement) -> Ticks:
    """Return a function that returns the predicted length of a task in integer nanoseconds. With
    integers, the tasks of a steady state repeat exactly.
    """
    return make_ticks(stage_costs(problem, placement))


def make_ticks(stages: Sequence[StagePrediction]) -> Ticks:
    """Return a function that returns the length of a task in nanoseconds, rounded to an integer of
    at least 1.
    """

    def ticks(task: Task) -> int:
        return max(1, round(stages[task.stage].seconds(task.phase) * 1e9))

    return ticks
