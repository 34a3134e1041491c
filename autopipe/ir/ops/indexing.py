"""Operators that read or write at places given by another tensor."""

from __future__ import annotations

from autopipe.ir.ops.lines import marked, names, opaque, positive, spell, unindexed
from autopipe.ir.ops.row import NotationLine, Operator, Signature


def indexed_axis(signature: Signature) -> int:
    """The attribute `axis`, counted from the front of the first operand."""
    return positive(signature.node.integer("axis"), len(signature.operand(0).shape))


def _gather(signature: Signature) -> NotationLine:
    """`a v& b, i -> a i b`: a device with some rows of the table gives those, and zeros for the others.

    Rows that are known while compiling are spelled as such, and those that are no numbers do not add up: v is whole.
    """
    mark = "&" if signature.constant(1) is None and signature.operand(0).dtype.is_floating else "!"
    axis = indexed_axis(signature)
    data = names(len(signature.operand(0).shape))
    indices = names(len(signature.operand(1).shape), "i")
    result = [*data[:axis], *indices, *data[axis + 1 :]]
    return spell([marked(data, [axis], mark), indices], [result])


def _along_axis(signature: Signature, scatter: bool) -> NotationLine:
    """GatherElements and ScatterElements: dimensions of equal extent away from the axis go together.

    A device with some rows of the table gives those, and zeros for the others.
    """
    axis = indexed_axis(signature)
    data, indices = signature.operand(0).shape, signature.operand(1).shape
    shared = [
        extent == other and place != axis for place, (extent, other) in enumerate(zip(data, indices, strict=True))
    ]
    words = names(len(data))
    table = [word if same else "1" for word, same in zip(words, shared, strict=True)]
    if scatter:
        return spell([table, table, table], [table])
    if data[axis] > 1 and signature.operand(0).dtype.is_floating:
        table[axis] = "v&"
    picked = [
        word if same or place == axis else "1" for place, (word, same) in enumerate(zip(words, shared, strict=True))
    ]
    return spell([table, picked], [picked])


def _gather_elements(signature: Signature) -> NotationLine:
    return _along_axis(signature, scatter=False)


def _scatter_elements(signature: Signature) -> NotationLine:
    return _along_axis(signature, scatter=True)


def _gather_nd(signature: Signature) -> NotationLine:
    """`b v! t, b i 1 -> b i t`: the last dimension of the indices addresses as many of the data."""
    batch = signature.node.integer("batch_dims")
    data, indices = signature.operand(0).shape, signature.operand(1).shape
    depth = batch + indices[-1]
    shared = names(batch, "b")
    places = [*shared, *names(len(indices) - 1 - batch, "i")]
    rest = names(len(data) - depth, "t")
    table = [*shared, *unindexed(data[batch:depth]), *rest]
    return spell([table, [*places, "1"]], [[*places, *rest]])


def _scatter_nd(signature: Signature) -> NotationLine:
    """`1 t, 1 1, 1 t -> 1 t`."""
    data, indices = signature.operand(0).shape, signature.operand(1).shape
    depth = indices[-1]
    rest = names(len(data) - depth, "t")
    table = [*unindexed(data[:depth]), *rest]
    return spell([table, unindexed(indices), [*unindexed(indices[:-1]), *rest]], [table])


def _one_hot(signature: Signature) -> NotationLine:
    """`*i, 1, 1 -> *i v&`: a device with some of the classes knows which they are."""
    rank = len(signature.result().shape)
    axis = positive(signature.node.integer("axis", -1), rank)
    words = names(rank - 1, "i")
    rest = [unindexed(signature.operand(index).shape) for index in (1, 2)]
    return spell([words, *rest], [[*words[:axis], "v&", *words[axis:]]])


def _tensor_scatter(signature: Signature) -> NotationLine:
    """A cache `b … s! …` written at one place a sample."""
    data = names(len(signature.operand(0).shape))
    axis = positive(signature.node.integer("axis", -2), len(data))
    cache = [word if place != axis else "1" for place, word in enumerate(data)]
    indices = [["d0"]] if signature.present(2) else []
    return spell([cache, cache, *indices], [cache])


INDEXING = (
    Operator("Gather", _gather, "memory", keeps=("1",), weights=(0,)),
    Operator("GatherElements", _gather_elements, "memory", keeps=("1",)),
    Operator("GatherND", _gather_nd, "memory", keeps=("1",)),
    Operator("Scatter", _scatter_elements, "memory", keeps=("1",)),
    Operator("ScatterElements", _scatter_elements, "memory", keeps=("1",)),
    Operator("ScatterND", _scatter_nd, "memory", keeps=("1",)),
    Operator("TensorScatter", _tensor_scatter, "memory", keeps=("2",)),
    Operator("OneHot", _one_hot, "memory", keeps=("0",), static=(1,)),
    Operator("NonZero", opaque, "memory", static=(0,), differentiable=False),
)
