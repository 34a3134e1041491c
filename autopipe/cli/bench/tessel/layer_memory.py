"""Memory where each transformer layer is recomputed by itself, as in the paper.

autopipe's own stages recompute as a whole: they keep less, and hold more while they do. For the comparison not to hang
on that, stages are cut into layers when their memory is counted.
"""

from __future__ import annotations

from dataclasses import replace

from autopipe.ir.placement import Placement, Stage
from autopipe.ir.prediction import Prediction
from autopipe.ir.problem import Problem
from autopipe.passes.cost.chain import Chain, make_chain
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.placement.tessel_shapes.cuts import line_of
from autopipe.passes.placement.tessel_shapes.model import CostedModel, costed_model
from autopipe.passes.schedule.predict import predict

_LAYER_NODES = 25
"""About the nodes of a transformer layer; a table or a head with its loss has fewer than four times as many."""

_MOST_BLOCKS = 224


def with_layers_recomputed(placement: Placement) -> Placement:
    """Recomputation where transformer layers are, as the paper has it: in all stages but the tables' and heads' own."""
    return replace(placement, stages=tuple(replace(stage, recompute=_has_layers(stage)) for stage in placement.stages))


def predict_by_layer(problem: Problem, placement: Placement) -> Prediction:
    """The cost model's prediction, with what the layers of each stage keep in all and what the largest needs itself."""
    model = costed_model(problem)
    chain = make_chain(model.graph, model.seconds, _MOST_BLOCKS)
    pieces = [_pieces(model, chain, stage) for stage in placement.stages]
    costs = iter(stage_costs(problem, Placement(tuple(piece for each in pieces for piece in each))))
    prediction = predict(problem, placement)
    stages = []
    for stage, own in zip(prediction.stages, pieces, strict=True):
        found = [next(costs) for _ in own]
        kept = sum(cost.kept_bytes for cost in found)
        stages.append(replace(stage, kept_bytes=kept, transient_bytes=max(cost.transient_bytes for cost in found)))
    return replace(prediction, stages=tuple(stages))


def _has_layers(stage: Stage) -> bool:
    return len(stage.devices) == 1 or len(stage.nodes) > 4 * _LAYER_NODES


def _pieces(model: CostedModel, chain: Chain, stage: Stage) -> list[Stage]:
    """A stage's layers as stages of the same devices."""
    blocks = len({int(chain.block_of[node]) for node in stage.nodes})
    count = min(len(stage.nodes) // _LAYER_NODES, blocks) if _has_layers(stage) else 1
    if count < 2:
        return [stage]
    runs = line_of(model, chain, stage.nodes).even(count)
    splits = dict(stage.splits)
    return [
        replace(stage, nodes=run, splits=tuple((node, splits[node]) for node in run if node in splits)) for run in runs
    ]
