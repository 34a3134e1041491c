"""Stages that a strategy shares out by samples, split further where that makes them faster."""

from __future__ import annotations

from dataclasses import replace

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.cost.resized import resized
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.schedule.messages import stage_messages
from autopipe.passes.spmd.search.exact import Exact
from autopipe.passes.spmd.search.fitting import step_seconds
from autopipe.passes.spmd.search.stages import inside_of


def split_further(problem: Problem, placement: Placement) -> Placement:
    """`placement` with the splits of its stages of several devices found by the search for the best ones.

    Nodes, devices, micro-batches and recomputation stay. A stage keeps its splits where the search knows none that fit
    into memory and are faster, messages to its neighbours included, and where the slowest stage would become slower.
    """
    inside = inside_of(problem, placement, {})
    solver = Exact(problem.time_limit)
    sizes = {stage.micro_batch_size for stage in placement.stages}
    own = {size: resized(problem, size) for size in sizes}
    seconds = _stage_seconds(problem, placement)
    for index, stage in enumerate(placement.stages):
        if len(stage.devices) == 1:
            continue
        try:
            found = inside.split(placement, index, solver, own=own[stage.micro_batch_size]).placement
        except InfeasibleError:
            continue
        changed = _stage_seconds(problem, found)
        if changed[index] < seconds[index] and max(changed) <= max(seconds):
            placement, seconds = found, changed
    return replace(placement, proof=None)


def _stage_seconds(problem: Problem, placement: Placement) -> list[float]:
    """For each stage what its busiest device does in a step, one thing after the other, its messages included."""
    sent: dict[tuple[int, int], float] = {}
    for message in stage_messages(problem, placement):
        ends = (message.source_stage, message.source), (message.target_stage, message.target)
        for end in ends:
            sent[end] = sent.get(end, 0.0) + message.forward_s + message.backward_s
    found = []
    costs = stage_costs(problem, placement)
    for index, (stage, cost) in enumerate(zip(placement.stages, costs, strict=True)):
        most = max(sent.get((index, device), 0.0) for device in stage.devices)
        own = step_seconds(cost, problem.batch_size // stage.micro_batch_size)
        found.append(own + problem.micro_batches * most)
    return found
