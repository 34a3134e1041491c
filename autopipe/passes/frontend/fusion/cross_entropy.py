"""Fusion of a matrix product and the cross-entropy of its logits into one operator that recomputes
the logits.

The logits [tokens, vocabulary] are the largest tensor in the training of a language model. The
fused operator (`autopipe.LinearCrossEntropy`) never stores all logits: the backward pass computes
them again. It replaces the product and the loss if nothing else reads the logits.

Between the product and the loss, files have casts, a softcap (Gemma Team, "Gemma 2", 2024, section
2), slices of tokens and reshapes to rows. Slices and reshapes of the logits are applied to the
product's first operand x instead.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from autopipe.ir.graph import Attribute, DType, Graph, Node
from autopipe.ir.ops import qualified_name
from autopipe.ir.ops.linear_cross_entropy import LINEAR_CROSS_ENTROPY, classes_of
from autopipe.ir.ops.movement import slice_ranges
from autopipe.ir.ops.operator import nonnegative_axis, signature_of
from autopipe.passes.frontend.cleanup import remove_unread
from autopipe.passes.frontend.fusion.view import View, is_near

MIN_CLASSES = 16_384
"""Minimum number of classes for which `loss.scores: auto` considers recomputing the logits. With
fewer classes, this saves little memory.
"""
_LOSS_OPERATORS = frozenset({"SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"})
_NARROW = frozenset({DType.FLOAT16, DType.BFLOAT16})
"""Element types of logits that files cast to float32 before the loss."""
_ATTRIBUTES = frozenset({"ignore_index", "reduction"})
"""Attributes of the loss that the fused operator has, too."""


@dataclasses.dataclass(frozen=True, slots=True)
class _CappedProduct:
    """Logits softcap · tanh((x @ weight + bias) / softcap), or x @ weight + bias if `softcap` is 0.
    `bias` is "" if there is none.
    """

    x: str
    weight: str
    bias: str = ""
    transposed: bool = False
    """True if `weight` is [classes, features], False if it is [features, classes]."""
    softcap: float = 0.0


def has_large_loss(graph: Graph) -> bool:
    """True if any LinearCrossEntropy of the graph has at least `MIN_CLASSES` classes."""
    losses = (node for node in graph.nodes if qualified_name(node) == LINEAR_CROSS_ENTROPY)
    return any(classes_of(signature_of(graph, node)) >= MIN_CLASSES for node in losses)


def fuse_linear_losses(graph: Graph, wanted: Iterable[str]) -> Graph:
    """Return the graph in which cross-entropies that the values `wanted` depend on are fused with
    the products that compute their logits; the graph itself if there is no cross-entropy to fuse.

    Outputs of the graph that are not in `wanted`, such as the logits, are still computed.
    """
    if all(node.op not in _LOSS_OPERATORS for node in graph.nodes):
        return graph
    view = View(graph)
    nodes = list[Node]()
    view.readers = _count_reads(graph, wanted)
    changed = False
    for node in graph.nodes:
        view.writers.update({name: node for name in node.outputs if name})
        own = _fuse_loss(view, node) if view.readers[node.outputs[0]] else ()
        changed |= bool(own)
        nodes.extend(own or (node,))
    return remove_unread(view.build(nodes)) if changed else graph


def _count_reads(graph: Graph, wanted: Iterable[str]) -> Counter[str]:
    """Return how often each value is read, counting only nodes on which the values `wanted` depend.
    Each of `wanted` counts as read once more.
    """
    found = Counter(wanted)
    for node in reversed(graph.nodes):
        if any(found[name] for name in node.outputs):
            found.update(name for name in node.inputs if name)
    return found


def _fuse_loss(view: View, node: Node) -> tuple[Node, ...]:
    """Return the nodes that replace the loss `node` and the product of its logits by a
    LinearCrossEntropy; () if the pattern does not match.
    """
    logits = _find_logits(view, node) if node.op in _LOSS_OPERATORS else ""
    if not logits or len(view.shape(logits)) < 2:
        return ()
    name, labels = _move_classes_last(view, node, logits)
    moves: list[Node] = []
    while (move := _find_row_move(view, name)) is not None:
        name = move.inputs[0]
        if move.op != "Cast":
            moves.append(move)
    product = _match_product(view, name) if name else None
    # A Slice of the logits is copied to x with its bounds along the last axis, which include all
    # classes. They include all features of x only if the number of features is at most the number
    # of classes.
    if product is None or view.shape(product.x)[-1] > view.shape(logits)[1]:
        return ()
    nodes = _copy_row_moves(view, product.x, moves[::-1])
    x = nodes[-1].outputs[0] if nodes else product.x
    attributes: list[tuple[str, Attribute]] = [
        each for each in node.attributes if each[0] in _ATTRIBUTES
    ]
    if product.softcap:
        attributes.append(("softcap", product.softcap))
    if product.transposed:
        attributes.append(("transB", 1))
    weight = node.inputs[2] if len(node.inputs) > 2 else ""
    inputs = (x, labels, weight, product.weight, product.bias)[: 5 if product.bias else 4]
    return (
        *nodes,
        Node(
            node.name, "LinearCrossEntropy", inputs, node.outputs[:1], tuple(attributes), "autopipe"
        ),
    )


def _move_classes_last(view: View, node: Node, logits: str) -> tuple[str, str]:
    """Return (logits, labels) of a loss such that the last dimension of the logits counts classes
    and the other dimensions are those of the labels. The name of the logits is "" if there are no
    such tensors.

    If Reshapes merged several dimensions of both into rows, return the tensors before the Reshapes,
    unless the loss returns one value per row.
    """
    labels = node.inputs[1]
    rank = len(view.shape(logits))
    if rank > 2:
        transpose = _find_sole_producer(view, logits, "Transpose")
        classes_second = (0, rank - 1, *range(1, rank - 1))
        if transpose is None or transpose.integers("perm") != classes_second:
            return "", labels
        return transpose.inputs[0], labels
    rows = _find_sole_producer(view, logits, "Reshape")
    before = view.producer_of(labels, "Reshape")
    if rows is not None and before is not None and node.text("reduction", "mean") != "none":
        (given, *_) = rows.inputs
        (own, *_) = before.inputs
        if view.shape(given) == (*view.shape(own), view.shape(logits)[-1]):
            return given, own
    return logits, labels


def _copy_row_moves(view: View, x: str, moves: Iterable[Node]) -> list[Node]:
    """Return copies of the Reshapes and Slices `moves` of logits that apply to x instead: they keep
    the features of x as the last dimension.
    """
    nodes = list[Node]()
    value = view.type_of(x)
    for move in moves:
        shape = (*view.shape(move.outputs[0])[:-1], value.shape[-1])
        name = view.value(f"{x}_rows", value.dtype, shape)
        inputs = (
            (x, view.shape_operand(name, shape)) if move.op == "Reshape" else (x, *move.inputs[1:])
        )
        nodes.append(
            dataclasses.replace(
                move, inputs=inputs, outputs=(name,), name=f"autopipe/{move.op}/{name}"
            )
        )
        x = name
    return nodes


def _find_logits(view: View, node: Node) -> str:
    """Return the name of the logits of a cross-entropy node; "" if the node is no cross-entropy of
    unnormalised logits, or if its second result is read.
    """
    if node.domain or any(view.readers[name] for name in node.outputs[1:] if name):
        return ""
    if node.op == "SoftmaxCrossEntropyLoss":
        return node.inputs[0]
    softmax = (
        _find_sole_producer(view, node.inputs[0], "LogSoftmax")
        if node.op == "NegativeLogLikelihoodLoss"
        else None
    )
    if softmax is None or view.graph.opset < 13:
        return ""
    rank = len(view.shape(softmax.inputs[0]))
    return softmax.inputs[0] if nonnegative_axis(softmax.integer("axis", -1), rank) == 1 else ""


def _find_sole_producer(view: View, name: str, *operators: str) -> Node | None:
    """Return the node that writes the value `name` if its operator is one of `operators` and the
    value is read exactly once; otherwise None.
    """
    return view.producer_of(name, *operators) if view.readers[name] == 1 else None


def _find_row_move(view: View, name: str) -> Node | None:
    """Return the node that writes the logits `name` if it casts them to float32, or reshapes or
    slices them and keeps their last dimension, the classes; otherwise None. The logits must be read
    once.
    """
    node = _find_sole_producer(view, name, "Cast", "Reshape", "Slice")
    if node is None:
        return None
    before = view.type_of(node.inputs[0])
    after = view.type_of(name)
    if node.op == "Cast":
        widens = before.dtype in _NARROW and after.dtype is DType.FLOAT32
        return node if widens or before.dtype is after.dtype else None
    if len(before.shape) < 2 or before.shape[-1] != after.shape[-1]:
        return None
    all_classes = 0, before.shape[-1], 1
    if node.op == "Reshape" or slice_ranges(signature_of(view.graph, node))[-1] == all_classes:
        return node
    return None


def _match_product(view: View, name: str) -> _CappedProduct | None:
    """Return the product that computes the logits `name`, with its bias and softcap; None if they
    are not computed in a form that the fused operator supports.
    """
    softcap, inner = _match_softcap(view, name)
    node = _find_sole_producer(view, inner, "MatMul", "Gemm", "Add")
    found = None
    if node is not None and node.op == "Add":
        for product, bias in (node.inputs, node.inputs[::-1]):
            made = _find_sole_producer(view, product, "MatMul")
            if made is not None and view.shape(bias) == view.shape(product)[-1:]:
                found = _CappedProduct(made.inputs[0], made.inputs[1], bias, softcap=softcap)
    elif node is not None and node.op == "MatMul":
        found = _CappedProduct(node.inputs[0], node.inputs[1], softcap=softcap)
    elif node is not None:
        bias = node.inputs[2] if len(node.inputs) > 2 else ""
        plain = not node.integer("transA") and all(
            node.number(name, 1.0) == 1.0 for name in ("alpha", "beta")
        )
        if plain and (not bias or view.shape(bias) == view.shape(inner)[-1:]):
            found = _CappedProduct(
                node.inputs[0], node.inputs[1], bias, bool(node.integer("transB")), softcap
            )
    if found is None or len(view.shape(found.weight)) != 2 or len(view.shape(found.x)) < 2:
        return None
    types = {view.type_of(each).dtype for each in (found.x, found.weight, found.bias) if each}
    return found if len(types) == 1 and types <= {*_NARROW, DType.FLOAT32, DType.FLOAT64} else None


def _match_softcap(view: View, name: str) -> tuple[float, str]:
    """Return (c, s) if the value `name` is c · tanh(s / c), otherwise (0, `name`)."""
    softcap, inner = view.split_scale(name)
    tanh = _find_sole_producer(view, inner, "Tanh") if view.readers[name] == 1 else None
    if tanh is None:
        return 0.0, name
    scale, inner = view.split_scale(tanh.inputs[0])
    while (cast := _find_row_move(view, inner)) is not None and cast.op == "Cast":
        inner = cast.inputs[0]
    return (softcap, inner) if is_near(scale * softcap, 1.0) else (0.0, name)
