"""Stages that recompute, with the segments that run again each by itself."""

from __future__ import annotations

from dataclasses import replace

from autopipe.ir.graph import Graph
from autopipe.ir.program import Compute, Segment, StageCode
from autopipe.passes.lower.flowing import flowing_values
from autopipe.passes.lower.segments import cutter


def with_segments(graph: Graph, code: StageCode, differentiable: frozenset[str], held: int) -> StageCode:
    """A stage of a program that trains, in segments if it recomputes, with `held` micro-batches in flight.

    `graph` is that of its own micro-batches, and gradients flow through the values that are `differentiable`.
    """
    if not code.recompute:
        return code
    flowing = flowing_values(code, differentiable)
    nodes = tuple(each.node for each in code.operations if isinstance(each, Compute))
    cut = replace(code, segments=tuple(Segment(own, frozenset()) for own in cutter(graph)(nodes, held).nodes))
    written = (frozenset(name for each in own for name in each.writes) for own in cut.by_segment())
    segments = zip(cut.segments, written, strict=True)
    return replace(cut, segments=tuple(replace(each, flowing=names & flowing) for each, names in segments))


def running_again(code: StageCode) -> frozenset[int]:
    """The segments that run again for their backward: gradients come back to something that they give."""
    found: set[int] = set()
    wanted = {value.name for value in code.outputs}
    for number, operations in reversed(list(enumerate(code.by_segment()))):
        if code.segments and not wanted.isdisjoint(code.segments[number].flowing):
            found.add(number)
        wanted |= {name for each in operations for name in each.reads}
    return frozenset(found)
