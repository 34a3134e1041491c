"""The fusion rules, by the operator at which a pattern ends, and the pass that applies them."""

from __future__ import annotations

from collections.abc import Callable

from autopipe.ir.graph import Graph, Node
from autopipe.passes.frontend.cleanup import merge_equal_nodes, remove_unread
from autopipe.passes.frontend.fusion.assignments import scatter_along_dimension
from autopipe.passes.frontend.fusion.attention import fuse_attention
from autopipe.passes.frontend.fusion.experts import fuse_gathered_experts, fuse_masked_experts
from autopipe.passes.frontend.fusion.gated_units import fuse_gated_unit, fuse_swish
from autopipe.passes.frontend.fusion.layers import (
    fuse_gelu,
    fuse_normalization,
    fuse_normalization_bias,
)
from autopipe.passes.frontend.fusion.merged_rows import separate_merged_rows
from autopipe.passes.frontend.fusion.rotary import (
    fuse_rotary_concat,
    fuse_rotary_reshape,
    fuse_rotary_sum,
)
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
"""Operators that fusion writes. `fusion.cross_entropy` writes LinearCrossEntropy in a separate
pass, after the loss is chosen.
"""
Rule = Callable[[View, Node], tuple[Node, ...] | None]
"""A rule gets the last node of a possible pattern, and returns the nodes in its place, or None if
the pattern does not match. The last of these nodes writes the results of the replaced node.
"""
RULES: dict[str, tuple[Rule, ...]] = {
    "Mul": (fuse_gelu, fuse_normalization, fuse_swish, fuse_gated_unit),
    "Add": (fuse_normalization_bias, fuse_rotary_sum, fuse_masked_experts),
    "Concat": (fuse_rotary_concat,),
    "Reshape": (fuse_rotary_reshape, separate_merged_rows),
    "ReduceSum": (fuse_gathered_experts,),
    "MatMul": (fuse_attention,),
    "ScatterND": (scatter_along_dimension,),
}
"""Rules by the operator of the node at which a pattern ends. They are tried in order, and the first
match wins.
"""


def fuse_operators(graph: Graph) -> Graph:
    """Return the graph with operators of `FUSED` in place of nodes that compute the same; the graph
    itself if no rule matches.

    Fused operators have the meaning of opset 23, or of the opset that introduced them, even if
    `graph.opset` is lower.
    """
    view = View(graph)
    nodes: list[Node] = []
    is_changed = False
    for node in graph.nodes:
        view.writers.update({name: node for name in node.outputs if name})
        replacement = None if node.domain else _apply_first_rule(view, node)
        if replacement is None:
            nodes.append(node)
            continue
        is_changed = True
        for each in replacement:
            view.writers.update({name: each for name in each.outputs if name})
        nodes.extend(replacement)
    return remove_unread(merge_equal_nodes(view.build(nodes))) if is_changed else graph


def _apply_first_rule(view: View, node: Node) -> tuple[Node, ...] | None:
    """Return the nodes in place of `node` by the first rule that matches; None if none does."""
    for rule in RULES.get(node.op, ()):
        found = rule(view, node)
        if found is not None:
            return found
    return None
