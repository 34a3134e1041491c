"""Biases that programs add in the same call as a matrix product."""

from __future__ import annotations

from collections import Counter

from autopipe.ir.graph import Graph
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.ops import signature_of
from autopipe.ir.ops.products import is_matrix_product, takes_bias


@remembered(GRAPHS)
def bias_additions(graph: Graph) -> dict[int, int]:
    """Additions of a bias to a product that nothing else reads, by product."""
    reads = Counter(name for node in graph.nodes for name in node.inputs)
    reads.update(graph.outputs)
    found: dict[int, int] = {}
    for index, node in enumerate(graph.nodes):
        if node.op != "Add" or node.domain:
            continue
        for product, bias in (node.inputs, node.inputs[::-1]):
            producer = graph.producer(product)
            if producer is None or reads[product] != 1 or producer in found:
                continue
            if is_matrix_product(signature_of(graph, graph.nodes[producer])) and takes_bias(
                graph.type_of(product), graph.type_of(bias)
            ):
                found[producer] = index
                break
    return found
