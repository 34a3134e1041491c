"""Scatter-gather of activations between stages, after Narayanan et al., "Efficient Large-Scale
Language Model Training on GPU Clusters Using Megatron-LM" (2021), section 4.1.

If both the sending and the receiving stage hold copies of a value on several devices, each sender
could send the full value to one receiver. With scatter-gather, each receiver gets only one slice of
the value, and the receivers gather the slices from each other. This is faster if the links inside
the receiving stage are faster than the links between the stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from autopipe.ir.layout import Layout, full_slice, shard_copies
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import EVERY_MICRO_BATCH
from autopipe.passes.analysis.gradients import message_types
from autopipe.passes.analysis.micro_batches import SharedPart, part_transfers
from autopipe.passes.analysis.resharding import redistribution_steps
from autopipe.passes.cost.communication import redistribution_seconds
from autopipe.passes.cost.stage_work import StageWork, stage_work
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.schedule.limits import quick_step


def choose_gathers(problem: Problem, placement: Placement) -> Placement:
    """Return the placement with `Stage.gathers` set: the values of other stages that each stage
    receives in slices and gathers.

    A value is gathered if it arrives sooner in this way. If the step under 1F1B with all of these
    gathers is not shorter than without any, the returned placement has none.
    """
    plain = replace(
        placement, stages=tuple(replace(stage, gathers=()) for stage in placement.stages)
    )
    if len(placement.stages) < 2 or all(len(stage.devices) == 1 for stage in placement.stages):
        return plain
    works = stage_work(problem, plain)
    gathers = [tuple(_values_worth_gathering(problem, works, work)) for work in works]
    if not any(gathers):
        return plain
    stages = (
        replace(stage, gathers=names) for stage, names in zip(plain.stages, gathers, strict=True)
    )
    gathering = replace(plain, stages=tuple(stages))
    plain_s, gathering_s = (
        quick_step(problem, each, stage_costs(problem, each)).end for each in (plain, gathering)
    )
    return gathering if gathering_s < plain_s else plain


def _values_worth_gathering(
    problem: Problem, works: tuple[StageWork, ...], work: StageWork
) -> Iterator[str]:
    """Yield the names of the values that the stage of `work` holds in full sooner if it receives
    them in slices and gathers the slices. `works` is the work of all stages.
    """
    cluster = problem.cluster
    devices = work.stage.devices
    graph = work.problem.graph
    if len(devices) < 2:
        return
    inner_link = cluster.slowest_link(devices)
    for name, need in work.received.items():
        source = next(
            (
                each
                for each in works
                if each.stage.pipeline == work.stage.pipeline and name in each.given
            ),
            None,
        )
        slices = shard_copies(need, len(devices))
        if (
            source is None
            or slices == need
            or source.stage.micro_batch_size != work.stage.micro_batch_size
            or not set(devices).isdisjoint(source.stage.devices)
            or inner_link.bandwidth_bytes_per_s
            <= cluster.link(source.stage.devices[0], devices[0]).bandwidth_bytes_per_s
        ):
            continue
        width = graph.type_of(name).dtype.itemsize
        gather_s = sum(
            redistribution_seconds(cluster, devices, step, width)
            for step in redistribution_steps(slices, need)
        )
        unsliced_s = _message_seconds(work.problem, source, name, devices, need)
        sliced_s = _message_seconds(work.problem, source, name, devices, slices)
        if sliced_s + gather_s < unsliced_s:
            yield name


def _message_seconds(
    problem: Problem, source: StageWork, name: str, devices: tuple[int, ...], need: Layout
) -> float:
    """Return the seconds until each of `devices` has received its shard of the value `name` from
    the stage of `source`. `need` is the layout of the value on `devices`. A device receives its
    messages one after another.
    """
    width = message_types(problem.graph, problem.precision)[name].itemsize
    full_value = full_slice(problem.graph.type_of(name).shape)
    shared = SharedPart(EVERY_MICRO_BATCH, EVERY_MICRO_BATCH, full_value, full_value)
    seconds: defaultdict[int, float] = defaultdict(float)
    for sender, receiver, sent, _ in part_transfers(
        source.given[name], need, source.stage.devices, devices, shared
    ):
        seconds[receiver] += problem.cluster.link(sender, receiver).seconds(sent.elements * width)
    return max(seconds.values(), default=0.0)
