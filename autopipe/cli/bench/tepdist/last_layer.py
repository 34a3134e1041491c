"""How a classifier's last layer is split."""

from __future__ import annotations

from math import prod

from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.operators import uses_of


def class_parts(problem: Problem, placement: Placement) -> int:
    """Parts into which the classes are split in the layer that gives the logits: the last that reads parameters."""
    graph = problem.graph
    last = max(number for number, node in enumerate(graph.nodes) if any(map(graph.parameter, node.inputs)))
    dimensions = uses_of(graph)[last].space.results[0]
    assert dimensions is not None, "it gives the logits"
    splits = next(stage.splits_of(last) for stage in placement.stages if last in stage.nodes)
    return prod(split.degree for split in splits if split.axis in dimensions[-1])
