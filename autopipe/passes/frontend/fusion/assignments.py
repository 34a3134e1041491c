"""A rule for assignments to a part of one dimension, such as `y[:, 1:] = x`, that exporters write
with the indices of all dimensions.
"""

from __future__ import annotations

import math

import numpy as np

from autopipe.ir.graph import Node
from autopipe.passes.frontend.fusion.view import View
from autopipe.passes.frontend.rewriter import Rewriter

_OPERATIONS_PER_INDEX = 8
"""Number of operations that the analysis of a ScatterND costs per index. They are subtracted from
the number of operations that may be used to evaluate constants.
"""


def scatter_along_dimension(view: View, node: Node) -> tuple[Node, ...] | None:
    """Match a ScatterND whose constant indices address complete dimensions, in order, except for
    one dimension. Return nodes with a ScatterND that addresses only this dimension, which
    Transposes move to the front; None if the pattern does not match.

    A dimension that the indices do not address is an axis of the ScatterND. Samples are then kept
    apart, and devices can split the ScatterND by samples.
    """
    found = _assigned_dimension(view, node)
    if found is None:
        return None
    dimension, indices = found
    rewriter = Rewriter(view, node)
    data, _, updates = node.inputs
    shape = view.shape(data)
    updated = (*shape[:dimension], len(indices), *shape[dimension + 1 :])
    if view.shape(updates) != updated:
        updates = rewriter.add(
            "Reshape",
            [updates, view.shape_constant(updated)],
            updated,
            results=[view.unique_name(f"{node.outputs[0]}_updates")],
            name=view.unique_name(f"{node.name}/separate"),
        )
    column = view.constant(f"{node.outputs[0]}_indices", indices[:, None])
    attributes = rewriter.attributes()
    if dimension == 0:
        operands = [data, column, updates]
        rewriter.add("ScatterND", operands, shape, result=0, name=node.name, **attributes)
        return tuple(rewriter.nodes)
    order = (dimension, *(axis for axis in range(len(shape)) if axis != dimension))
    data = _write_transpose(rewriter, data, order, "data")
    updates = _write_transpose(rewriter, updates, order, "updates")
    moved = rewriter.add(
        "ScatterND",
        [data, column, updates],
        rewriter.shape(data),
        name=view.unique_name(f"{node.name}/scatter"),
        **attributes,
    )
    back = tuple(map(int, np.argsort(order)))
    rewriter.add("Transpose", [moved], shape, result=0, name=node.name, perm=back)
    return tuple(rewriter.nodes)


def _write_transpose(rewriter: Rewriter, name: str, order: tuple[int, ...], title: str) -> str:
    """Return the name of a value whose axis i is axis `order[i]` of the value `name`: a new
    constant if the data of `name` are known, otherwise the result of a new Transpose, whose name
    ends in `title`.
    """
    value = rewriter.type_of(name)
    array = rewriter.scope.array(name)
    if array is not None:
        return rewriter.constant(array.transpose(order), value.dtype)
    return rewriter.add(
        "Transpose",
        [name],
        [value.shape[axis] for axis in order],
        name=rewriter.scope.unique_name(f"{rewriter.node.name}/{title}"),
        perm=order,
    )


def _assigned_dimension(view: View, node: Node) -> tuple[int, np.ndarray] | None:
    """Return (dimension, indices) for a ScatterND whose constant indices address complete
    dimensions, in order, except for one dimension.

    - dimension: this dimension; the last dimension that the indices address if they address all
      dimensions completely and in order.
    - indices: the nonnegative index of each assigned part along the dimension, in shape [parts].

    Returns None for other nodes, for a ScatterND that addresses one dimension only or whose
    operands do not fit, and if the analysis of the indices would take more operations than
    `view.known` may still use.
    """
    indices = view.array(node.inputs[1])
    if indices is None or not indices.size or not indices.ndim:
        return None
    shape = view.shape(node.inputs[0])
    depth = indices.shape[-1]
    limits = shape[:depth]
    updated = (*indices.shape[:-1], *shape[depth:])
    if not 2 <= depth <= len(shape) or view.shape(node.inputs[2]) != updated:
        return None
    if not view.known.inference.operations.spend(_OPERATIONS_PER_INDEX * indices.size):
        return None
    if (indices < np.negative(limits)).any() or (indices >= limits).any():
        return None
    rows = (indices % limits).reshape(-1, depth)
    for dimension in reversed(range(depth)):
        others = math.prod(limits) // limits[dimension]
        if len(rows) % others:
            continue
        sizes = (*limits[:dimension], len(rows) // others, *limits[dimension + 1 :])
        # Along each dimension, only the index of this dimension changes.
        grid = rows.reshape(*sizes, depth)
        line = np.moveaxis(grid, dimension, 0).reshape(sizes[dimension], -1, depth)[:, 0]
        columns: list[np.ndarray] = [np.arange(limit) for limit in limits]
        columns[dimension] = line[:, dimension]
        if np.array_equal(grid, np.stack(np.meshgrid(*columns, indexing="ij"), axis=-1)):
            return dimension, columns[dimension]
    return None
