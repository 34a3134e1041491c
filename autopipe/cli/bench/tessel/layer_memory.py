"""Memory where each transformer layer is recomputed by itself, as in the paper.

autopipe's own stages recompute as a whole: they keep less, and hold more while they do. For the comparison not to hang
on that, stages are cut into layers when their memory is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Phase, Schedule
from autopipe.passes.cost.chain import Chain, make_chain
from autopipe.passes.cost.memory import static_memory
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.placement.tessel_shapes.cuts import even_stages
from autopipe.passes.placement.tessel_shapes.model import CostedModel, costed_model

_LAYER_NODES = 25
"""About the nodes of a transformer layer; a table or a head with its loss has fewer than four times as many."""

_MOST_BLOCKS = 224


def layer_memory(problem: Problem, placement: Placement, in_flight: Sequence[int]) -> list[int]:
    """Most bytes on each device: its state, what micro-batches in flight keep, and the largest piece's own need.

    `in_flight` has the most micro-batches of each stage between their forward and their backward.
    """
    model = costed_model(problem)
    chain = make_chain(model.graph, model.seconds, _MOST_BLOCKS)
    pieces = [_pieces(model, chain, stage) for stage in placement.stages]
    costs = iter(stage_costs(problem, Placement(tuple(piece for each in pieces for piece in each))))
    kept = [0] * problem.cluster.size
    largest = [0] * problem.cluster.size
    for stage, own, count in zip(placement.stages, pieces, in_flight, strict=True):
        found = [next(costs) for _ in own]
        for device in stage.devices:
            kept[device] += count * sum(cost.kept_bytes for cost in found)
            largest[device] = max(largest[device], *(cost.transient_bytes + cost.buffer_bytes for cost in found))
    state = static_memory(problem, placement)
    return [sum(each) for each in zip(state, kept, largest, strict=True)]


def with_layers_recomputed(placement: Placement) -> Placement:
    """Recomputation where transformer layers are, as the paper has it: in all stages but the tables' and heads' own."""
    return replace(placement, stages=tuple(replace(stage, recompute=_has_layers(stage)) for stage in placement.stages))


def _has_layers(stage: Stage) -> bool:
    return len(stage.devices) == 1 or len(stage.nodes) > 4 * _LAYER_NODES


def _pieces(model: CostedModel, chain: Chain, stage: Stage) -> list[Stage]:
    """A stage's layers as stages of the same devices."""
    blocks = len({int(chain.block_of[node]) for node in stage.nodes})
    count = min(len(stage.nodes) // _LAYER_NODES, blocks) if _has_layers(stage) else 1
    if count < 2:
        return [stage]
    runs = even_stages(model, chain, stage.nodes, count)
    splits = dict(stage.splits)
    return [
        replace(stage, nodes=run, splits=tuple((node, splits[node]) for node in run if node in splits)) for run in runs
    ]


def most_in_flight(placement: Placement, schedule: Schedule) -> list[int]:
    """Most micro-batches of each stage between their forward and their backward."""
    found = []
    for index, stage in enumerate(placement.stages):
        now = most = 0
        for task in schedule.tasks[stage.devices[0]]:
            if task.stage == index and task.phase in (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT_GRADIENT):
                now += 1 if task.phase is Phase.FORWARD else -1
                most = max(most, now)
        found.append(most)
    return found
