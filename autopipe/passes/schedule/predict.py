"""Predict the times of a placement's stages by the cost model, and the messages from stage to
stage.
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
from autopipe.passes.analysis.micro_batches import Shared, block_transfers, shared_blocks
from autopipe.passes.cost.stage_work import StageWork, stage_work
from autopipe.passes.cost.stages import StageCost, stage_costs
from autopipe.passes.schedule.orders import Ticks

_Way = tuple[int, int, tuple[int, int], tuple[int, int], int, int]
"""The ends of a message: stages, turns as (index, of how many), devices; of each the source's and
the target's.
"""


def stage_messages(problem: Problem, placement: Placement) -> tuple[Message, ...]:
    """All messages of one micro-batch, sorted by their stages, their turns, then their devices.

    A value that a group holds in n parts lies in equal slices, in order, each on an equal number of
    neighbouring devices; a device that needs a slice asks one of those that hold it, in turn, and
    itself where it does. Where stages have micro-batches of different sizes, blocks are compared as
    in lowering. Raises InfeasibleError for values that cannot be shared out among those.
    """
    graph = problem.graph
    works = stage_work(problem, placement)
    gradients = differentiable_values(graph) if problem.train else frozenset()
    held = {
        (work.stage.pipeline, name): index
        for index, work in enumerate(works)
        for name in work.given
    }
    unequal = bool(micro_batch_ratios(placement, problem.micro_batch_size))
    shared = partial(
        shared_blocks, graph, batch_axes_of(graph) if unequal else BatchAxes(0, (), {})
    )
    forward: defaultdict[_Way, list[int]] = defaultdict(list)
    backward: defaultdict[_Way, list[int]] = defaultdict(list)
    for target, work in enumerate(works):
        for name in work.received:
            source = held.get((work.stage.pipeline, name))
            if source is None:
                continue
            sizes = (
                (each.stage.micro_batch_size, each.problem.graph.type_of(name).shape)
                for each in (works[source], work)
            )
            for block in shared(name, *sizes):
                turns = [(turn.index, turn.of) for turn in (block.source_slice, block.target_slice)]
                for sender, receiver, size in _parts(works[source], work, name, block):
                    way = (source, target, turns[0], turns[1], sender, receiver)
                    forward[way].append(size)
                    if name in gradients:
                        backward[way].append(size)

    def seconds(source: int, target: int, sizes: list[int]) -> float:
        """Of sending values of these sizes, each a message of its own; a device sends itself
        nothing.
        """
        return (
            0.0
            if source == target
            else sum(problem.cluster.link(source, target).seconds(size) for size in sizes)
        )

    messages = []
    for way in sorted(forward):
        source, target, source_slice, target_slice, sender, receiver = way
        there = forward[way]
        back = backward[way]
        times = seconds(sender, receiver, there), seconds(receiver, sender, back)
        slices = MicroBatchSlice(*source_slice), MicroBatchSlice(*target_slice)
        messages.append(
            Message(source, target, sender, receiver, sum(there), sum(back), *times, *slices)
        )
    return tuple(messages)


def _parts(
    sender: StageWork, receiver: StageWork, name: str, shared: Shared
) -> Iterator[tuple[int, int, int]]:
    """(sender, receiver, bytes) for each part of what two turns share."""
    size = sent_bytes(sender.problem.graph, sender.problem.precision)[name]
    is_equal = sender.stage.micro_batch_size == receiver.stage.micro_batch_size
    if is_equal and name not in receiver.stage.gathers:
        groups = (
            sender.stage.devices,
            sender.parts[name],
            receiver.stage.devices,
            receiver.parts[name],
        )
        for source, target, share in _slices(*groups):
            yield source, target, round(size * share)
        return
    layouts = sender.given[name], receiver.received[name]
    width = message_types(sender.problem.graph, sender.problem.precision)[name].itemsize
    for source, target, sent, _ in block_transfers(
        *layouts, sender.stage.devices, receiver.stage.devices, shared
    ):
        yield source, target, sent.elements * width


def _slices(
    senders: tuple[int, ...], held: int, receivers: tuple[int, ...], needed: int
) -> Iterator[tuple[int, int, Fraction]]:
    """(sender, receiver, share of the value) for each slice that moves from one group to
    another.
    """
    copies = len(senders) // held
    for position, receiver in enumerate(receivers):
        wanted = position * needed // len(receivers)
        start = Fraction(wanted, needed)
        stop = Fraction(wanted + 1, needed)
        for part in range(int(start * held), held):
            share = min(stop, Fraction(part + 1, held)) - max(start, Fraction(part, held))
            if share <= 0:
                break
            holders = senders[part * copies : (part + 1) * copies]
            yield receiver if receiver in holders else holders[position % copies], receiver, share


_figures = attrgetter(*(field.name for field in fields(StagePrediction)))


def predict(problem: Problem, placement: Placement) -> Prediction:
    return predicted(problem, placement, stage_costs(problem, placement))


def predicted(problem: Problem, placement: Placement, costs: Sequence[StageCost]) -> Prediction:
    """The prediction for stages whose costs are known."""
    return Prediction(
        tuple(StagePrediction(*_figures(cost)) for cost in costs),
        stage_messages(problem, placement),
    )


def task_ticks(problem: Problem, placement: Placement) -> Ticks:
    """The length of each task by the cost model. Whole numbers, so that a steady state repeats
    exactly.
    """
    return ticks_of(stage_costs(problem, placement))


def ticks_of(stages: Sequence[StagePrediction]) -> Ticks:
    """The length of each task in nanoseconds, at least 1."""

    def ticks(task: Task) -> int:
        return max(1, round(stages[task.stage].seconds(task.phase) * 1e9))

    return ticks
