"""Products whose rows are several dimensions that a Reshape merges before and another one separates
behind.
"""

from __future__ import annotations

import itertools
import math

from autopipe.ir.graph import Node
from autopipe.passes.frontend.fusion.view import View


def unmerged(view: View, node: Node) -> tuple[Node, ...] | None:
    """Return the nodes of a product of separate dimensions, for a Reshape that separates the rows
    of a product.

    Sequences of nn.MultiheadAttention have positions outside of samples, and a projection of merged
    rows. Merged rows cannot be shared over devices by samples, which are an inner part of them. A
    merge that keeps the dimension in front, mostly the samples, stays as it is.
    """
    product = view.made_by(node.inputs[0], "Gemm", "MatMul")
    if (
        product is None
        or view.readers[product.outputs[0]] != 1
        or len(view.shape(product.inputs[1])) != 2
    ):
        return None
    merge = view.made_by(product.inputs[0], "Reshape", "Flatten")
    if (
        merge is None
        or view.readers[merge.outputs[0]] != 1
        or len(view.shape(merge.outputs[0])) != 2
    ):
        return None
    if not _moves_the_front(view, merge.inputs[0]) or not _is_plain(product):
        return None
    rows, width = view.shape(merge.outputs[0])
    target = view.shape(node.outputs[0])
    lead = next(
        (
            count
            for count, size in enumerate(itertools.accumulate(target, int.__mul__), 1)
            if size == rows
        ),
        0,
    )
    if lead < 2:
        return None
    separate = target[:lead]
    dtype = view.type_of(merge.outputs[0]).dtype
    data = view.add(f"{merge.outputs[0]}_separate", dtype, (*separate, width))
    nodes = [
        Node(
            merge.name,
            "Reshape",
            (merge.inputs[0], view.shape_constant((*separate, width))),
            (data,),
        )
    ]
    weight = product.inputs[1]
    if product.integer("transB"):
        turned = view.add(
            f"{weight}_transposed", view.type_of(weight).dtype, view.shape(weight)[::-1]
        )
        nodes.append(
            Node(
                f"{product.name}/transpose", "Transpose", (weight,), (turned,), (("perm", (1, 0)),)
            )
        )
        weight = turned
    columns = view.shape(product.outputs[0])[1]
    result = view.add(f"{product.outputs[0]}_separate", dtype, (*separate, columns))
    nodes.append(Node(product.name, "MatMul", (data, weight), (result,)))
    if len(product.inputs) > 2 and product.inputs[2]:
        biased = view.add(f"{product.outputs[0]}_biased", dtype, (*separate, columns))
        nodes.append(Node(f"{product.name}/bias", "Add", (result, product.inputs[2]), (biased,)))
        result = biased
    return (*nodes, Node(node.name, "Reshape", (result, view.shape_constant(target)), node.outputs))


def _moves_the_front(view: View, name: str) -> bool:
    """True if a Transpose makes a value and puts another dimension in front."""
    node = view.made_by(name, "Transpose")
    if node is None or math.prod(view.shape(name)) == 0:
        return False
    order = node.integers("perm", tuple(reversed(range(len(view.shape(name))))))
    return order[0] != 0


def _is_plain(product: Node) -> bool:
    """True if a product is one of the operands as they are, but for a transposed weight."""
    factors = product.number("alpha", 1.0), product.number("beta", 1.0)
    return product.op == "MatMul" or (factors == (1.0, 1.0) and not product.integer("transA"))
