"""Nodes as a stage: on one device, or shared among several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopipe.ir.placement import Stage
from autopipe.ir.problem import Problem
from autopipe.passes.cost.communication import all_gather
from autopipe.passes.placement.tessel_shapes.model import CostedModel
from autopipe.passes.sharding.regions import tensor_splits


def stage_of(problem: Problem, nodes: Sequence[int], devices: tuple[int, ...]) -> Stage:
    """A stage whose nodes no device shares."""
    recompute = problem.train and problem.recompute == "full"
    return Stage(tuple(sorted(nodes)), devices, problem.micro_batch_size, recompute=recompute)


def stage_of_several(
    problem: Problem, model: CostedModel, nodes: Sequence[int], devices: tuple[int, ...], tables: frozenset[str]
) -> Stage:
    """A stage whose devices share `tables` and the products for which that saves more than gathering costs."""
    stage, degree = stage_of(problem, nodes, devices), len(devices)
    if degree == 1:
        return stage
    gather = all_gather(model.cluster, devices)

    def pays(node: int) -> bool:
        size = sum(model.graph.type_of(name).bytes for name in model.graph.nodes[node].outputs if name)
        return float(model.seconds[node]) * (1 - 1 / degree) > 2 * gather.seconds(size)

    return replace(stage, splits=tensor_splits(model, nodes, degree, tables, pays))
