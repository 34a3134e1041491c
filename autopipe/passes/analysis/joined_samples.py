"""Detection of nodes in an inference graph that compute an output of the model from several
samples.

Dividing the batch into micro-batches would change such an output. The complete batch is then run as
one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from autopipe.ir.batch import BatchAxes, BatchAxis, batch_axes_of
from autopipe.ir.graph import Graph, Node
from autopipe.ir.memo import MAX_CACHED_GRAPHS, memoize
from autopipe.ir.ops import is_label_loss, operator_of, signature_of
from autopipe.ir.ops.movement import slice_ranges
from autopipe.ir.ops.normalization import loss_reduction
from autopipe.ir.space import AxisKind

_PLACING: Final = frozenset({"Concat", "GatherND", "Pad", "ScatterElements", "ScatterND", "Tile"})
"""Operators that move samples by constant indices or sizes. If the result has no recognisable batch
dimension, micro-batches change the result; for example, each micro-batch would be padded.
"""
_JOINT: Final = (AxisKind.SUM, AxisKind.JOINT, AxisKind.AGREED)
_APPROXIMATE: Final = frozenset({"DynamicQuantizeLinear"})
"""Operators whose result depends on other samples only through rounding."""


@memoize(MAX_CACHED_GRAPHS)
def first_joining_node(graph: Graph) -> Node | None:
    """Return the first node that computes an output of the model from several samples; None if no
    node certainly does.

    `graph` has at least two samples. These cases do not count:
    - a mean over samples that is an output, or that an output depends on linearly, because the
      mean over equal micro-batches is the mean over the batch;
    - a value without samples that is computed from samples and read together with samples, because
      the frontend warns about it;
    - a Gather by computed indices from a dimension that samples and other axes share, because the
      indices of a sample can address only its own elements, as those of `x[arange(n), i]` do.
    """
    axes = batch_axes_of(graph)
    joined: dict[str, Node] = {}
    averaged: dict[str, Node] = {}
    for node, samples in zip(graph.nodes, axes.nodes, strict=True):
        if _mixes_samples(graph, node, samples, axes):
            return node
        source = next((joined[name] for name in node.inputs if name in joined), None)
        if source is None and _combines_samples(graph, node, samples):
            source = node
        mean = next((averaged[name] for name in node.inputs if name in averaged), None)
        if mean is None and any(each.kind is AxisKind.MEAN for each in samples):
            mean = node
        elif mean is not None and not _is_linear_in_means(graph, node, averaged):
            source = source or mean
        for name in node.outputs:
            if name and name not in axes.values:
                if source is not None:
                    joined[name] = source
                elif mean is not None:
                    averaged[name] = mean
    return next((joined[name] for name in graph.outputs if name in joined), None)


def _mixes_samples(graph: Graph, node: Node, samples: Sequence[BatchAxis], axes: BatchAxes) -> bool:
    """True if the node mixes samples so that the output of the model certainly depends on the
    division of the batch: its results contain samples computed from other samples, indices into the
    batch, or only some of the samples.
    """
    row = operator_of(node)
    if row is None or is_label_loss(node) or node.op in _APPROXIMATE:
        return False
    together = max((len(axes.values.get(name, ())) for name in node.inputs), default=0)
    if len({each.axis for each in samples}) > max(together, 1):
        return not _gathers_from_merged_samples(graph, node, axes)
    if row.kind != "memory" and any(
        each.kind in _JOINT and _has_samples(node, axes) for each in samples
    ):
        return True
    if row.reads_axis and any(each.kind is AxisKind.UNSPLITTABLE for each in samples):
        return True
    return _selects_some_samples(graph, node, axes) or _uses_batch_indices(graph, node, axes)


def _gathers_from_merged_samples(graph: Graph, node: Node, axes: BatchAxes) -> bool:
    """True if the node is a lookup by computed indices along a dimension that contains the batch
    and other axes, for example the merged batch and sequence.
    """
    row = operator_of(node)
    if row is None or not row.lookup:
        return False
    signature = signature_of(graph, node)
    places = axes.values.get(node.inputs[0], ())
    merged = {each.dimension for each in places if (each.outer, each.inner) != (1, 1)}
    return signature.constant(1) is None and signature.axis() in merged


def _uses_batch_indices(graph: Graph, node: Node, axes: BatchAxes) -> bool:
    """True if a node returns indices into the full batch, or joins or moves samples by constant
    indices or sizes so that its results have no batch dimension. Index tuples that select equal
    elements of each sample do not count.
    """
    placed = node.inputs if node.op == "Concat" else node.inputs[:1]
    if node.domain or axes.values.keys().isdisjoint(placed):
        return False
    if node.op == "MaxPool" and len(node.outputs) > 1 and node.outputs[1]:
        # Indices that only MaxUnpool reads do not count: MaxUnpool runs on the same micro-batch as
        # the MaxPool, so the indices refer to the correct elements.
        readers = {graph.nodes[index].op for index in graph.consumers().get(node.outputs[1], ())}
        return node.outputs[1] in graph.outputs or bool(readers - {"MaxUnpool"})
    if node.op not in _PLACING or _has_samples(node, axes):
        return False
    signature = signature_of(graph, node)
    if node.op == "Concat":
        return True
    places = signature.constant(1)
    if places is None:
        return False
    if node.op not in ("GatherND", "ScatterND"):
        return True
    return not _selects_equally(places.reshape(-1, places.shape[-1]), signature.operand(0).shape[0])


def _selects_equally(places: np.ndarray, samples: int) -> bool:
    """True if the index tuples in `places`, whose first column is the sample, select equal elements
    of each sample. `samples` is the size of the batch.
    """
    first = places[:, 0] % samples
    inside = [places[first == sample, 1:] for sample in range(samples)]
    return all(np.array_equal(inside[0], each) for each in inside[1:])


def _has_samples(node: Node, axes: BatchAxes) -> bool:
    """True if a result of the node has a batch dimension."""
    return any(name in axes.values for name in node.outputs)


def _selects_some_samples(graph: Graph, node: Node, axes: BatchAxes) -> bool:
    """True if a node selects samples by constant indices: a Slice of a part of the batch dimension,
    a Gather by constants, or a Split of the batch dimension.
    """
    dimensions = [
        each.dimension
        for each in axes.values.get(node.inputs[0], ())
        if (each.outer, each.inner) == (1, 1)
    ]
    if node.domain or not dimensions:
        return False
    signature = signature_of(graph, node)
    if node.op == "Slice":
        taken = slice_ranges(signature)
        shape = signature.operand(0).shape
        return any(taken[dimension] != (0, shape[dimension], 1) for dimension in dimensions)
    if node.op == "Gather":
        return signature.constant(1) is not None and signature.axis() in dimensions
    return node.op == "Split" and signature.axis() in dimensions


def _combines_samples(graph: Graph, node: Node, samples: Sequence[BatchAxis]) -> bool:
    """True if a node computes its results from all samples together, as a sum does. Means, and
    operators that depend on other samples only through rounding, do not count.
    """
    row = operator_of(node)
    if row is None or row.kind == "memory" or node.op in _APPROXIMATE:
        return False
    if is_label_loss(node) and loss_reduction(signature_of(graph, node)) == "mean":
        return False
    return any(each.kind in _JOINT for each in samples)


def _is_linear_in_means(graph: Graph, node: Node, averaged: dict[str, Node]) -> bool:
    """True if the results of a node are linear in the operands in `averaged`, which are means over
    samples. The mean of the results over equal micro-batches then is the result for the full batch.
    """
    own = [place for place, name in enumerate(node.inputs) if name in averaged]
    row = operator_of(node)
    if row is None or not row.linear:
        return False
    if (row.linear == "first" and own != [0]) or (row.linear == "each" and len(own) > 1):
        return False
    return all(graph.type_of(name).dtype.is_floating for name in node.outputs if name)
