"""One pass from the front, linear in the number of nodes: each rule looks at one node and the few
that lead to it; what a fused operator replaces is dropped where nothing else reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from autopipe.ir.graph import Graph, Node
from autopipe.passes.frontend.cleanup import without_repeats, without_unread
from autopipe.passes.frontend.fusion.attention import attention
from autopipe.passes.frontend.fusion.experts import looked_up, masked
from autopipe.passes.frontend.fusion.gated import gated, swish
from autopipe.passes.frontend.fusion.layers import gelu, normalization, offset
from autopipe.passes.frontend.fusion.rotary import joined, stacked, summed
from autopipe.passes.frontend.fusion.unmerged import unmerged
from autopipe.passes.frontend.fusion.view import View

FUSED = frozenset(
    {
        "Attention",
        "Experts",
        "GatedUnit",
        "Gelu",
        "LayerNormalization",
        "LinearCrossEntropy",
        "ListedExperts",
        "RMSNormalization",
        "Rotary",
        "SwiGLU",
        "Swish",
    }
)
"""Operators that rules put together; a loss only once it is known what is wanted
(`fusion.cross_entropy`).
"""
RULES: dict[str, tuple[Callable[[View, Node], tuple[Node, ...] | None], ...]] = {
    "Mul": (gelu, normalization, swish, gated),
    "Add": (offset, summed, masked),
    "Concat": (joined,),
    "Reshape": (stacked, unmerged),
    "ReduceSum": (looked_up,),
    "MatMul": (attention,),
}
"""By the operator at which a pattern ends: from a node and what leads to it to those in its place,
or None.

The last of them writes the node's result; a rule puts the types of what the others write into
`View.made`.
"""


def fused(graph: Graph) -> Graph:
    """The same function in terms of the operators `FUSED` where it spells them out.

    Fused operators have the meaning of opset 23, or of the opset that introduced them, whatever
    `graph.opset` is.
    """
    view = View(graph)
    nodes: list[Node] = []
    for node in graph.nodes:
        view.writers.update({name: node for name in node.outputs if name})
        rules = RULES.get(node.op, ()) if not node.domain else ()
        found = next(
            (replacement for rule in rules if (replacement := rule(view, node)) is not None),
            (node,),
        )
        for each in found:
            view.writers.update({name: each for name in each.outputs if name})
        nodes.extend(found)
    if len(nodes) == len(graph.nodes) and all(map(lambda new, old: new is old, nodes, graph.nodes)):
        return graph
    values = tuple(view.type_of(name) for node in nodes for name in node.outputs if name)
    constants = (*graph.constants, *view.constants.values())
    made = dataclasses.replace(graph, nodes=tuple(nodes), values=values, constants=constants)
    return without_unread(without_repeats(made))
