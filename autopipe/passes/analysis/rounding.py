"""Estimate of the number of successive roundings on the paths of a graph in forward and backward,
from which the numerical error of a step is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from autopipe.ir.graph import DType, Graph, Node, Value
from autopipe.ir.ops.linear_cross_entropy import LINEAR_CROSS_ENTROPY, local_label_and_class_counts
from autopipe.ir.rounding import Rounding
from autopipe.passes.analysis.gradients import differentiable_values, trained_body
from autopipe.passes.analysis.operators import (
    PRODUCT_KINDS,
    OpInstance,
    element_bytes,
    op_instances,
)

Type = Literal["float64", "float32", "float16", "bfloat16"]

_COARSEST: tuple[Type, ...] = ("bfloat16", "float16", "float32")
_AUTOCAST: dict[str, Type] = {"bf16": "bfloat16", "fp16": "float16"}


def count_roundings(
    graph: Graph, precision: str, train: bool, added: int, boundaries: int
) -> Rounding:
    """Return the number of successive roundings of a step of `graph` at `precision`.

    train: True if the step has a backward pass.
    added: number of gradients that are summed, over micro-batches and ranks.
    boundaries: number of successive messages between stages in each direction.

    A matmul is assumed to add its terms one after the other in fp32. Other sums use pairwise
    summation in torch and CUDA (Higham, "The accuracy of floating point summation", SIAM Journal on
    Scientific Computing 14(4), 1993). The gradient of an operand is a sum over the axes that the
    operand lacks.
    """
    dtype = _least_precise_type(graph, precision)
    flowing = differentiable_values(graph) if train else frozenset[str]()
    sums, narrow = _max_successive_roundings(graph, precision, flowing)
    sent = boundaries * (1 + train) if dtype in ("bfloat16", "float16") else 0
    return Rounding(dtype, max(sums + added, 1), narrow, sent)


def _max_successive_roundings(
    graph: Graph, precision: str, flowing: frozenset[str]
) -> tuple[int, int]:
    """Return (sums, narrow), maxima over all paths of the graph: the number of successive roundings
    in sums, and the number of successive roundings of results to 16 bits. `flowing` are the values
    with a gradient; empty for inference.
    """
    widths = element_bytes(graph, precision)
    sums: dict[str, int] = {}
    narrow: dict[str, int] = {}
    for node, use in zip(graph.nodes, op_instances(graph), strict=True):
        result = next((graph.type_of(name) for name in node.outputs if name), None)
        if result is None or not result.dtype.is_floating:
            continue
        rounds = use.row.kind not in ("view", "memory") or bool(use.row.interpolation)
        own_narrow = int(rounds and widths[result.name] == 2)
        loop = 0
        if node.body is not None:
            body = trained_body(graph, node)
            inside = differentiable_values(body) if flowing else flowing
            loop, own_narrow = (
                node.integer("count") * each
                for each in _max_successive_roundings(body, precision, inside)
            )
        forward = (
            _roundings_per_element(node, use, graph, result)
            if rounds and node.body is None
            else loop
        )
        most_sums = most_narrow = 0
        for operand in _floating_operands(graph, node):
            back = operand.name in flowing
            more = back and use.row.kind != "view" and node.body is None
            own = forward + (_roundings_per_element(node, use, graph, operand) if more else 0)
            most_sums = max(most_sums, sums.get(operand.name, 0) + own)
            most_narrow = max(
                most_narrow, narrow.get(operand.name, 0) + own_narrow * (1 + (back and not loop))
            )
        for name in filter(None, node.outputs):
            sums[name] = most_sums
            narrow[name] = most_narrow
    return max(sums.values(), default=0), max(narrow.values(), default=0)


def _least_precise_type(graph: Graph, precision: str) -> Type:
    """Return the least precise floating-point type to which values of the graph are rounded at
    `precision`.
    """
    held = (*graph.values, *graph.inputs, *(each.value for each in graph.parameters))
    types = {value.dtype for value in held if value.dtype.is_floating}
    own: Type = next(
        (name for name in _COARSEST if DType(name) in types), "float64" if types else "float32"
    )
    return _AUTOCAST.get(precision, own) if own == "float32" else own


def _floating_operands(graph: Graph, node: Node) -> Iterator[Value]:
    """Yield the floating-point operands of a node."""
    found = (graph.type_of(name) for name in node.inputs if name)
    return (value for value in found if value.dtype.is_floating)


def _roundings_per_element(node: Node, use: OpInstance, graph: Graph, tensor: Value) -> int:
    """Return the number of successive roundings in the computation of one element of `tensor`,
    which is a result of the node or an operand whose gradient the node computes.

    A sum of n terms counts as n roundings in a matmul, and as 1 + log2(n) in most other operators.
    An interpolation computes its coordinates in fp32: the error of a coordinate up to n is as large
    as the error of n numbers near 1, and so is the error of the interpolation weights. Each
    dimension of size n therefore counts as 2 n² roundings, n² for the coordinate and n² for the
    scale.
    """
    elements = max(tensor.elements, 1)
    default = use.row.interpolation
    if default and node.text("mode", default) != "nearest":
        return 1 + 2 * sum(extent**2 for extent in _inexact_sizes(node, graph))
    if use.row.kind in PRODUCT_KINDS:
        if use.row.name == LINEAR_CROSS_ENTROPY and tensor.name in node.outputs:
            elements = math.prod(local_label_and_class_counts(use.space, {}))
        repeats = graph.type_of(node.inputs[0]).shape[0] if use.row.kind == "recurrent" else 1
        return max(1, math.ceil(use.flops / 2 / elements)) * repeats
    shared = math.prod(axis.size for axis in use.space.axes if axis.kind.is_joint)
    return 1 + math.ceil(math.log2(max(use.space.points / elements, shared, 1)))


def _inexact_sizes(node: Node, graph: Graph) -> Iterator[int]:
    """Yield the sizes before resizing of the dimensions along which the coordinates of an
    interpolation are rounded.

    A dimension of a Resize or Upsample that keeps its size, or that is resized by a power of two
    without aligned corners, has exact coordinates and is omitted.
    """
    before, after = (graph.type_of(name).shape for name in (node.inputs[0], node.outputs[0]))
    places = node.text("coordinate_transformation_mode", "half_pixel")
    for old, new in zip(before[2:], after[2:], strict=False):
        exact = places != "align_corners" and math.frexp(new / max(old, 1))[0] == 0.5
        if node.op not in ("Resize", "Upsample") or (new != old and not exact):
            yield old
