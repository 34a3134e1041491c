"""True if what a model computes depends on which samples are together in a micro-batch."""

from __future__ import annotations

from autopipe.ir.batch import batch_axes_of
from autopipe.ir.graph import Graph, Node
from autopipe.ir.ops import operator_of, signature_of


def mixing_nodes(graph: Graph) -> tuple[Node, ...]:
    """The nodes that let a sample's result depend on other samples, so that micro-batches change what is computed.

    Operators that say so themselves (batch statistics, means over labels that may be ignored), and products of two
    batches, such as the scores of a contrastive loss.
    """
    axes = batch_axes_of(graph)
    found = []
    for node, samples in zip(graph.nodes, axes.nodes, strict=True):
        operator = operator_of(node)
        together = max((len(axes.values.get(name, ())) for name in node.inputs), default=0)
        meets = len({each.axis for each in samples}) > max(together, 1)
        if meets or (operator is not None and operator.mixes_samples(signature_of(graph, node))):
            found.append(node)
    return tuple(found)
