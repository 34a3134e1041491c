"""Stages of nodes without a required stage, which follow from the nodes that they read and that
read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopipe.ir.graph import Graph
from autopipe.ir.placement import recomputed_nodes


@dataclass(frozen=True, slots=True)
class InheritedStage:
    """The stage of a node."""

    stage: int
    source: int | None
    """The node in the last stage from which the node reads; None if it reads from no stage."""


def inherited_stages(graph: Graph, wanted: Mapping[int, int]) -> list[InheritedStage]:
    """Return the stage of each node. `wanted` contains the required stages by node.

    A node without a required stage joins the last of the stages from which it reads values; values
    of nodes that each stage recomputes do not count. A node that reads no values of other nodes is
    in stage 0 if it reads an input of the model, and otherwise joins the first stage that reads its
    result. A node with a required stage can be in an earlier stage than its source; callers check
    this.
    """
    recomputed = recomputed_nodes(graph)
    first = _first_reading_stages(graph, wanted)
    inputs = {value.name for value in graph.inputs}
    sources = graph.sources()
    found: list[InheritedStage] = []
    for index, node in enumerate(graph.nodes):
        placed = [source for _, source in sources[index] if source not in recomputed]
        source = max(placed, key=lambda each: found[each].stage, default=None)
        alone = first[index] if inputs.isdisjoint(node.inputs) else 0
        stage = wanted.get(index, alone if source is None else found[source].stage)
        found.append(InheritedStage(stage, source))
    return found


def _first_reading_stages(graph: Graph, wanted: Mapping[int, int]) -> list[int]:
    """Return, for each node, its required stage, or the first stage that reads its result.

    A result can be read directly or through nodes without a required stage. A node whose result
    reaches no node with a required stage gets the last required stage, or 0 if there is none.
    """
    first = [max(wanted.values(), default=0)] * len(graph.nodes)
    sources = graph.sources()
    for index in range(len(graph.nodes) - 1, -1, -1):
        first[index] = wanted.get(index, first[index])
        for _, source in sources[index]:
            first[source] = min(first[source], first[index])
    return first
