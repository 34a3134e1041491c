"""Results of passes as text."""

from __future__ import annotations

import pprint

from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, node_ranges
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Schedule
from autopipe.passes.frontend import Model


def dumped(value: object) -> str:
    """A graph node by node, a placement stage by stage, a schedule as its grid; anything else field by field."""
    match value:
        case Model():
            return _graph(value.graph)
        case Problem():
            return _work(value)
        case Placement():
            return _placement(value)
        case Schedule():
            return value.grid()
        case _:
            return pprint.pformat(value, width=120, compact=True)


def _graph(graph: Graph) -> str:
    lines = [f"graph {graph.name!r}, opset {graph.opset}"]
    lines += [f"input {value.name!r} {value.dtype.value} {list(value.shape)}" for value in graph.inputs]
    for index, node in enumerate(graph.nodes):
        shapes = ", ".join(str(list(graph.type_of(name).shape)) for name in node.outputs if name)
        lines.append(f"{index:5} {node.op} {node.name!r} ({', '.join(map(repr, node.inputs))}) -> {shapes}")
    lines.append(f"outputs {', '.join(map(repr, graph.outputs))}")
    return "\n".join(lines)


def _work(problem: Problem) -> str:
    lines = ["  node  class          forward GFLOP  backward GFLOP  forward MB  kept MB"]
    for index, work in enumerate(problem.work):
        lines.append(
            f"{index:6}  {work.kind:13}  {work.forward_flops / 1e9:13.4f}  {work.backward_flops / 1e9:14.4f}"
            f"  {work.forward_bytes / 1e6:10.3f}  {work.kept_bytes / 1e6:7.3f}"
        )
    return "\n".join(lines)


def _placement(placement: Placement) -> str:
    lines = []
    for index, stage in enumerate(placement.stages):
        ranges = " ".join(f"{first}-{last - 1}" for first, last in node_ranges(stage.nodes))
        lines.append(f"stage {index}: devices {list(stage.devices)}, nodes {ranges}")
        lines += [f"  node {node}: {' '.join(map(str, splits))}" for node, splits in stage.splits]
    return "\n".join(lines)
