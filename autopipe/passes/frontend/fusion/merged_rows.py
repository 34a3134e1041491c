"""A rule for matrix products between a Reshape that merges several dimensions into rows and a
Reshape that separates them again: the product is computed on separate dimensions instead.
"""

from __future__ import annotations

import itertools
import math

from autopipe.ir.graph import Node
from autopipe.passes.frontend.fusion.view import View
from autopipe.passes.frontend.rewriter import Rewriter


def separate_merged_rows(view: View, node: Node) -> tuple[Node, ...] | None:
    """Match a matrix product between a Reshape that merges dimensions into rows and the Reshape
    `node`, which separates them. Return nodes that compute the product on separate dimensions; None
    if the pattern does not match.

    nn.MultiheadAttention projects sequences [positions, samples, features] as rows [positions ·
    samples, features]. Merged rows cannot be sharded over devices by samples, because consecutive
    rows belong to different samples. The rule applies only if a Transpose moved the first
    dimension, mostly the samples, elsewhere before the merge.
    """
    product = view.producer_of(node.inputs[0], "Gemm", "MatMul")
    if (
        product is None
        or view.readers[product.outputs[0]] != 1
        or len(view.shape(product.inputs[1])) != 2
    ):
        return None
    merge = view.producer_of(product.inputs[0], "Reshape", "Flatten")
    if (
        merge is None
        or view.readers[merge.outputs[0]] != 1
        or len(view.shape(merge.outputs[0])) != 2
    ):
        return None
    if not _moves_first_axis(view, merge.inputs[0]) or not _is_unscaled_product(product):
        return None
    rows, width = view.shape(merge.outputs[0])
    target = view.shape(node.outputs[0])
    row_axes = _count_leading_axes(target, rows)
    if row_axes < 2:
        return None
    separate = target[:row_axes]
    rewriter = Rewriter(view, node)
    shape = (*separate, width)
    data = rewriter.add(
        "Reshape",
        [merge.inputs[0], view.shape_constant(shape)],
        shape,
        dtype=view.type_of(merge.outputs[0]).dtype,
        results=[view.unique_name(f"{merge.outputs[0]}_separate")],
        name=merge.name,
    )
    weight = product.inputs[1]
    if product.integer("transB"):
        weight = rewriter.add(
            "Transpose",
            [weight],
            view.shape(weight)[::-1],
            results=[view.unique_name(f"{weight}_transposed")],
            name=f"{product.name}/transpose",
            perm=(1, 0),
        )
    shape = (*separate, view.shape(product.outputs[0])[1])
    result = rewriter.add(
        "MatMul",
        [data, weight],
        shape,
        results=[view.unique_name(f"{product.outputs[0]}_separate")],
        name=product.name,
    )
    if len(product.inputs) > 2 and product.inputs[2]:
        result = rewriter.add(
            "Add",
            [result, product.inputs[2]],
            shape,
            results=[view.unique_name(f"{product.outputs[0]}_biased")],
            name=f"{product.name}/bias",
        )
    operands = [result, view.shape_constant(target)]
    rewriter.add("Reshape", operands, target, result=0, name=node.name)
    return tuple(rewriter.nodes)


def _count_leading_axes(shape: tuple[int, ...], elements: int) -> int:
    """Return the number of leading sizes of `shape` whose product is `elements`; 0 if there is
    none.
    """
    sizes = itertools.accumulate(shape, int.__mul__)
    return next((count for count, size in enumerate(sizes, 1) if size == elements), 0)


def _moves_first_axis(view: View, name: str) -> bool:
    """True if the value `name` has elements and is the result of a Transpose that moves the first
    axis elsewhere.
    """
    node = view.producer_of(name, "Transpose")
    if node is None or math.prod(view.shape(name)) == 0:
        return False
    order = node.integers("perm", tuple(reversed(range(len(view.shape(name))))))
    return order[0] != 0


def _is_unscaled_product(product: Node) -> bool:
    """True if a MatMul or Gemm has no scale factor other than 1 and does not transpose its first
    operand.
    """
    if product.op == "MatMul":
        return True
    factors = product.number("alpha", 1.0), product.number("beta", 1.0)
    return factors == (1.0, 1.0) and not product.integer("transA")
