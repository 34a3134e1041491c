"""Operators that a graph spells out, put back together: one pass from the front, linear in the number of nodes.

Each rule looks at one node and the few that lead to it. What a fused operator replaces is dropped where nothing else
reads it.
"""

from __future__ import annotations

import dataclasses

from autopipe.ir.graph import Graph, Node
from autopipe.passes.frontend.clean import without_repeats, without_unread
from autopipe.passes.frontend.fuse.attention import attention
from autopipe.passes.frontend.fuse.gelu import gelu
from autopipe.passes.frontend.fuse.normalization import normalization, offset
from autopipe.passes.frontend.fuse.view import Rule, View

RULES: dict[str, tuple[Rule, ...]] = {"Mul": (gelu, normalization), "Add": (offset,), "MatMul": (attention,)}
"""By the operator of the node at which a pattern ends."""


def fused(graph: Graph) -> Graph:
    """The same function in terms of Attention, LayerNormalization, RMSNormalization and Gelu where it is spelt out.

    Fused operators have the meaning of opset 23, or of the opset that introduced them, whatever `graph.opset` is.
    """
    view = View.of(graph)
    nodes: list[Node] = []
    for node in graph.nodes:
        view.writers.update({name: node for name in node.outputs if name})
        rules = RULES.get(node.op, ()) if not node.domain else ()
        found = next((replacement for rule in rules if (replacement := rule(view, node)) is not None), None)
        written = (node,) if found is None else found.nodes
        if found is not None:
            view.made.update({value.name: value for value in found.values})
        for each in written:
            view.writers.update({name: each for name in each.outputs if name})
        nodes.extend(written)
    if len(nodes) == len(graph.nodes) and all(map(lambda new, old: new is old, nodes, graph.nodes)):
        return graph
    values = tuple(view.type_of(name) for node in nodes for name in node.outputs if name)
    return without_unread(without_repeats(dataclasses.replace(graph, nodes=tuple(nodes), values=values)))
