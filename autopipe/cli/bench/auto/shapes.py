"""What a placement looks like: Tessel's letters, branches beside one another, parts of tables."""

from __future__ import annotations

import re
from math import prod

from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import StageGraph
from autopipe.passes.analysis.operators import uses_of

_AROUND = re.compile("T1+(T1*)*T")


def outline(problem: Problem, placement: Placement) -> str:
    """A letter a stage: `T` for one on all devices, `1` for one on a single device, `g` for one on some."""
    words = {problem.cluster.size: "T", 1: "1"}
    return "".join(words.get(len(stage.devices), "g") for stage in placement.stages)


def is_around_tables(problem: Problem, placement: Placement) -> bool:
    """Whether it is an M, or an NN: first and last stage on all devices, between them stages on single ones.

    Of an NN further stages on all devices stand between those.
    """
    return problem.cluster.size > 1 and _AROUND.fullmatch(outline(problem, placement)) is not None


def stages_beside(problem: Problem, placement: Placement) -> int:
    """By how many stages the longest way through the stages is shorter than their number: 0 for a chain."""
    return len(placement.stages) - StageGraph.of(problem, placement).depth


def row_parts(problem: Problem, placement: Placement) -> int:
    """The most parts into which the rows of a table are split, where it is looked up."""
    graph, uses = problem.graph, uses_of(problem.graph)
    found = [1]
    for number, node in enumerate(graph.nodes):
        if node.op == "Gather" and graph.parameter(node.inputs[0]):
            dimensions = uses[number].space.operands[0]
            assert dimensions is not None, "a table has dimensions"
            splits = next(stage.splits_of(number) for stage in placement.stages if number in stage.nodes)
            found.append(prod(split.degree for split in splits if split.axis in dimensions[0]))
    return max(found)
