"""For each node of a graph: its operator definition, iteration space and batch axis. For each
value: its bytes per element.

With precision `bf16` or `fp16`, parameters stay in fp32. Autocast converts the operands and results
of matmuls, convolutions and recurrent operators to 16 bits, including a bias that is added in the
same call. Normalizations, reductions and losses compute in fp32, other operators in the widest type
of their operands (PyTorch documentation, "Automatic Mixed Precision package").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from autopipe.ir.batch import BatchAxes, batch_axes_of
from autopipe.ir.equality import node_labels
from autopipe.ir.errors import InfeasibleError, ModelError
from autopipe.ir.graph import DType, Graph
from autopipe.ir.layout import is_even_split
from autopipe.ir.memo import MAX_CACHED_GRAPHS, memoize
from autopipe.ir.ops import operator_of, qualified_name, signature_of
from autopipe.ir.ops.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from autopipe.ir.ops.matmul_conv import can_fuse_bias, is_matmul_of_matrices
from autopipe.ir.ops.operator import Operator
from autopipe.ir.placement import Split
from autopipe.ir.space import Space
from autopipe.ir.words import plural


@dataclass(frozen=True, slots=True)
class OpInstance:
    """An operator definition applied to operands of given types and shapes, with its iteration
    space. `flops` are the FLOPs of one forward of the unsplit node.
    """

    row: Operator
    space: Space
    flops: float


@memoize(MAX_CACHED_GRAPHS)
def op_instances(graph: Graph) -> tuple[OpInstance, ...]:
    """Return the `OpInstance` of each node, in graph order.

    Equal nodes (`node_labels`) share one object, so that equal layers are analysed once. Raises
    ModelError for an operator without a definition.
    """
    known: dict[int, OpInstance] = {}
    found = []
    for node, label in zip(graph.nodes, node_labels(graph), strict=True):
        if label not in known:
            row = operator_of(node)
            if row is None:
                raise ModelError(
                    f"operator {qualified_name(node)} is not supported", where=repr(node.name)
                )
            signature = signature_of(graph, node)
            space = row.space(signature)
            known[label] = OpInstance(row, space, row.flops(signature, space))
        found.append(known[label])
    return tuple(found)


@dataclass(frozen=True, slots=True)
class SampleAxes:
    """The batch axes of the nodes of a graph, along which data parallelism splits the nodes.

    `axes[i]` is the name of the batch axis in the iteration space of node i; None if the node has
    no samples.
    """

    graph: Graph
    uses: tuple[OpInstance, ...]
    batch: BatchAxes
    axes: tuple[str | None, ...]

    def has_batch_dimension(self, value: str) -> bool:
        """True if the value has a batch dimension, so that each replica has only a part of it."""
        return value in self.batch.values

    def can_divide(self, node: int, degree: int) -> bool:
        """True if `degree` replicas can divide the samples of the node equally, or the node has no
        samples.
        """
        axis = self.axes[node]
        return axis is None or degree == 1 or is_even_split(self.uses[node].space, axis, degree)

    def splits(
        self, nodes: Iterable[int], degree: int
    ) -> tuple[tuple[int, tuple[Split, ...]], ...]:
        """Return pairs (node, splits) that divide the samples of each of the `nodes` equally among
        `degree` devices.

        Nodes without samples are omitted, and all nodes if `degree` is 1. Raises InfeasibleError,
        with the node, if the samples of a node cannot be divided equally.
        """
        if degree == 1:
            return ()
        found = []
        for index in nodes:
            if (axis := self.axes[index]) is None:
                continue
            if not self.can_divide(index, degree):
                raise InfeasibleError(
                    f"{degree} {plural(degree, 'device')} cannot divide the {self.batch.batch} "
                    f"{plural(self.batch.batch, 'sample')} of a micro-batch equally",
                    hint=(
                        "choose a micro-batch size that the number of devices divides, or fewer "
                        "devices"
                    ),
                    where=repr(self.graph.nodes[index].name),
                )
            found.append((index, (Split(axis, degree),)))
        return tuple(found)


@memoize(MAX_CACHED_GRAPHS)
def sample_axes(graph: Graph) -> SampleAxes:
    """Return the batch axes of the nodes of a graph."""
    batch = batch_axes_of(graph)
    return SampleAxes(
        graph, op_instances(graph), batch, tuple(map(batch.axis, range(len(graph.nodes))))
    )


@memoize(MAX_CACHED_GRAPHS)
def bias_additions(graph: Graph) -> dict[int, int]:
    """Return a mapping from each MatMul by a matrix to the Add of its bias, as indices of nodes. It
    has the MatMuls whose only reader is an Add of a bias vector of equal type, because torch
    computes these two nodes in one call.
    """
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
            if is_matmul_of_matrices(signature_of(graph, graph.nodes[producer])) and can_fuse_bias(
                graph.type_of(product), graph.type_of(bias)
            ):
                found[producer] = index
                break
    return found


PRODUCT_KINDS = frozenset({"matmul", "convolution", "recurrent"})
"""Kinds of operators (`Operator.kind`) that autocast runs in 16 bits."""

_FULL_KINDS = frozenset({"normalization", "reduction"})


def is_autocast(precision: str) -> bool:
    """True if matmuls run in 16 bits at this precision: `bf16` or `fp16`."""
    return precision in ("bf16", "fp16")


@memoize(MAX_CACHED_GRAPHS)
def low_precision_copies(graph: Graph, precision: str) -> frozenset[str]:
    """Return the names of the fp32 parameters of which ranks keep a 16-bit copy. The copy is
    updated once per step, and all nodes read it instead of the parameter.

    These are the parameters of at least two dimensions that only matmuls and convolutions read and
    that are no outputs of the graph. At precision `fp32` there are none. Autocast copies other
    parameters in each forward.
    """
    if not is_autocast(precision):
        return frozenset()
    found = {
        each.value.name
        for each in graph.parameters
        if each.value.dtype is DType.FLOAT32
        and len(each.value.shape) > 1
        and each.value.name not in graph.outputs
    }
    read = set()
    for node in graph.nodes:
        row = operator_of(node)
        for place, name in enumerate(node.inputs):
            # Generated programs multiply a stack of matrices (a weight with more than two
            # dimensions) by einsum, without a 16-bit copy. Such a weight is therefore removed from
            # the result.
            stacked = name in found and node.op == "MatMul" and len(graph.type_of(name).shape) > 2
            if stacked or row is None or place not in row.copied_weights:
                found.discard(name)
            read.add(name)
    return frozenset(found & read)


def collective_element_bytes(graph: Graph, precision: str, name: str, *, is_received: bool) -> int:
    """Return the bytes per element of the value `name` in a collective among the devices of one
    stage. Gradients are sent in the type of their value.

    `is_received` is True if the stage does not compute the value. A value from another stage is
    sent in its declared type, to which it is converted on arrival. A value that the stage computes
    is sent in the type of its operator's result, which is often 16 bits under autocast. A parameter
    of which the stage keeps a 16-bit copy is sent as the copy.
    """
    if is_received and graph.parameter(name) is None:
        return graph.type_of(name).dtype.itemsize
    return element_bytes(graph, precision)[name]


@memoize(MAX_CACHED_GRAPHS)
def element_bytes(graph: Graph, precision: str) -> dict[str, int]:
    """Return the bytes per element of each input, parameter, constant and value of the graph, as
    they are in memory if the graph runs at `precision`.
    """
    held = [each.value for each in graph.parameters] + [each.value for each in graph.constants]
    widths = {value.name: value.dtype.itemsize for value in (*graph.inputs, *held, *graph.values)}
    if not is_autocast(precision):
        return widths
    widths |= dict.fromkeys(low_precision_copies(graph, precision), 2)
    floating = {name for name in widths if graph.type_of(name).dtype.is_floating}
    with_product = frozenset(bias_additions(graph).values())
    for index, (node, use) in enumerate(zip(graph.nodes, op_instances(graph), strict=True)):
        if use.row.kind in _FULL_KINDS or use.row.name == LINEAR_CROSS_ENTROPY:
            continue
        width = 2
        if use.row.kind not in PRODUCT_KINDS and index not in with_product:
            read = [name for name in node.inputs if name in floating]
            # A scalar operand does not widen the result unless all operands are scalars (PyTorch's
            # type promotion).
            wide = [widths[name] for name in read if graph.type_of(name).shape] or [
                widths[name] for name in read
            ]
            width = max(wide, default=4)
        for name in node.outputs:
            if name in floating:
                widths[name] = min(width, widths[name])
    return widths
