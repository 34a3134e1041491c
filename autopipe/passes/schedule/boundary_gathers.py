"""Values that go from stage to stage in slices, and are gathered where they arrive: scatter-gather
of Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM" (2021), section 4.1.

Where two groups hold copies of a value each device would send all of it to one of the other group.
A slice each is enough if the group's own links, over which the slices are gathered, are faster than
those between the stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from autopipe.ir.layout import Layout, full_slice, sliced
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import EVERY
from autopipe.passes.analysis.gradients import message_types
from autopipe.passes.analysis.micro_batches import Shared, block_transfers
from autopipe.passes.analysis.resharding import steps_between
from autopipe.passes.cost.communication import relayout_seconds
from autopipe.passes.cost.stage_work import StageWork, stage_work
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.schedule.limits import quick_step


def with_gathers(problem: Problem, placement: Placement) -> Placement:
    """The placement whose stages gather what that makes faster: message by message, and all
    together the step under 1F1B. Else the same without any.
    """
    plain = replace(
        placement, stages=tuple(replace(stage, gathers=()) for stage in placement.stages)
    )
    if len(placement.stages) < 2 or all(len(stage.devices) == 1 for stage in placement.stages):
        return plain
    works = stage_work(problem, plain)
    chosen = [tuple(_worth_gathering(problem, works, work)) for work in works]
    if not any(chosen):
        return plain
    stages = (
        replace(stage, gathers=names) for stage, names in zip(plain.stages, chosen, strict=True)
    )
    gathering = replace(plain, stages=tuple(stages))
    before, after = (
        quick_step(problem, each, stage_costs(problem, each)).end for each in (plain, gathering)
    )
    return gathering if after < before else plain


def _worth_gathering(
    problem: Problem, works: tuple[StageWork, ...], work: StageWork
) -> Iterator[str]:
    """The values that a stage receives sooner, gathered, than whole."""
    cluster = problem.cluster
    devices = work.stage.devices
    graph = work.problem.graph
    if len(devices) < 2:
        return
    inside = cluster.slowest_link(devices)
    for name, need in work.received.items():
        source = next(
            (
                each
                for each in works
                if each.stage.pipeline == work.stage.pipeline and name in each.given
            ),
            None,
        )
        slices = sliced(need, len(devices))
        if (
            source is None
            or slices == need
            or source.stage.micro_batch_size != work.stage.micro_batch_size
            or not set(devices).isdisjoint(source.stage.devices)
            or inside.bandwidth_bytes_per_s
            <= cluster.link(source.stage.devices[0], devices[0]).bandwidth_bytes_per_s
        ):
            continue
        width = graph.type_of(name).dtype.itemsize
        gather = sum(
            relayout_seconds(cluster, devices, step, width) for step in steps_between(slices, need)
        )
        direct, cut = (
            _message_seconds(work.problem, source, name, devices, layout)
            for layout in (need, slices)
        )
        if cut + gather < direct:
            yield name


def _message_seconds(
    problem: Problem, source: StageWork, name: str, devices: tuple[int, ...], need: Layout
) -> float:
    """Seconds until each of `devices` has its block from the stage `source`, one message after the
    other.
    """
    width = message_types(problem.graph, problem.precision)[name].itemsize
    everything = full_slice(problem.graph.type_of(name).shape)
    shared = Shared(EVERY, EVERY, everything, everything)
    seconds: defaultdict[int, float] = defaultdict(float)
    for sender, receiver, sent, _ in block_transfers(
        source.given[name], need, source.stage.devices, devices, shared
    ):
        seconds[receiver] += problem.cluster.link(sender, receiver).seconds(sent.elements * width)
    return max(seconds.values(), default=0.0)
