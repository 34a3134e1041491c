"""From an ONNX graph to the paper's: a small rewriting, by rules that know operators and no model by name.

Views drop out. Pointwise operations join what they follow. Three projections that one attention reads are one product,
and stacked LSTMs of equal shape one layer. What no rule knows runs elementwise over its own iteration space.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopipe.ir.graph import Graph
from autopipe.ir.ops import operator_of
from autopipe.ir.placement import recomputed_nodes
from autopipe.passes.placement.pase.paper.attention import attend, projections
from autopipe.passes.placement.pase.paper.drafting import LayerGraphBuilder
from autopipe.passes.placement.pase.paper.generic import by_space, pointwise, transpose
from autopipe.passes.placement.pase.paper.images import batch_norm, convolve, mean_image, pool
from autopipe.passes.placement.pase.paper.layers import LayerGraph
from autopipe.passes.placement.pase.paper.products import embed, multiply, multiply_by_equation
from autopipe.passes.placement.pase.paper.recurrence import recur
from autopipe.passes.placement.pase.paper.reshaping import reshape
from autopipe.passes.placement.pase.paper.rows import classify, normalise, softmax

RULES: Mapping[str, Callable[[LayerGraphBuilder, int], None]] = {
    "AveragePool": pool,
    "BatchNormalization": batch_norm,
    "Conv": convolve,
    "Einsum": multiply_by_equation,
    "Flatten": reshape,
    "Gather": embed,
    "Gemm": multiply,
    "GlobalAveragePool": mean_image,
    "LSTM": recur,
    "LayerNormalization": normalise,
    "LogSoftmax": softmax,
    "MatMul": multiply,
    "MaxPool": pool,
    "RMSNormalization": normalise,
    "Reshape": reshape,
    "Softmax": softmax,
    "SoftmaxCrossEntropyLoss": classify,
    "Squeeze": reshape,
    "Transpose": transpose,
    "Unsqueeze": reshape,
}
"""The rules for operators that the paper knows."""


def layer_graph(graph: Graph) -> LayerGraph:
    """The paper's graph of a model on one batch.

    Values that depend on no parameter and on no costly operator (inputs, masks, positions), and parameters, are free to
    read: they have no edges.
    """
    draft = LayerGraphBuilder(graph)
    attentions = projections(graph)
    absorbed = {node for each in attentions.values() for node in each.nodes}
    skipped = recomputed_nodes(graph) | absorbed | _of_weights(graph)
    for index, node in enumerate(graph.nodes):
        if index in skipped:
            continue
        row = operator_of(node)
        if node.op == "Attention":
            attend(draft, index, attentions.get(index))
        elif node.op in RULES:
            RULES[node.op](draft, index)
        elif row is not None and row.kind == "elementwise":
            pointwise(draft, index)
        else:
            by_space(draft, index)
    convolutional = any(node.op == "Conv" for node in graph.nodes)
    return draft.finished(4 if convolutional else 1)


def _of_weights(graph: Graph) -> frozenset[int]:
    """Nodes that read nothing but parameters, constants and what such nodes write."""
    data = {value.name for value in graph.inputs}
    found = set()
    for index, node in enumerate(graph.nodes):
        if any(name in data for name in node.inputs):
            data.update(node.outputs)
        else:
            found.add(index)
    return frozenset(found)
