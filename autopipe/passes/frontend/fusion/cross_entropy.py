"""Fusion of a matrix product and the cross-entropy of its scores into one operator that recomputes
the scores.

The scores of tokens by vocabulary (logits) are the largest tensor of a language model's training.
The fused operator (`autopipe.LinearCrossEntropy`) never holds all of them: backward computes them
again. It replaces the product and the loss if nothing else reads the scores. Between both, files
have casts, a softcap (Gemma Team, "Gemma 2", 2024, section 2), slices of tokens and reshapes to
rows; nodes that move rows of scores move rows of x instead.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from autopipe.ir.graph import Attribute, DType, Graph, Node
from autopipe.ir.ops import qualified_name
from autopipe.ir.ops.linear_cross_entropy import LINEAR_CROSS_ENTROPY, classes_of
from autopipe.ir.ops.movement import slices
from autopipe.ir.ops.operator import positive, signature_of
from autopipe.passes.frontend.cleanup import Additions, without_unread
from autopipe.passes.frontend.fusion.view import View, near

FEWEST_CLASSES = 16_384
"""Minimum number of classes for which `loss.scores: auto` considers to recompute scores: fewer save
little memory.
"""
_LOSSES = frozenset({"SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"})
_NARROW = frozenset({DType.FLOAT16, DType.BFLOAT16})
_ATTRIBUTES = frozenset({"ignore_index", "reduction"})


@dataclasses.dataclass(frozen=True, slots=True)
class _Product:
    """x @ weight + bias; `softcap` is 0 where there is none."""

    x: str
    weight: str
    bias: str = ""
    transposed: bool = False
    softcap: float = 0.0


def is_large(graph: Graph) -> bool:
    """True if a fused loss of the graph has at least `FEWEST_CLASSES` classes."""
    losses = (node for node in graph.nodes if qualified_name(node) == LINEAR_CROSS_ENTROPY)
    return any(classes_of(signature_of(graph, node)) >= FEWEST_CLASSES for node in losses)


def with_linear_losses(graph: Graph, wanted: Iterable[str]) -> Graph:
    """Return the graph with each cross-entropy that the values `wanted` depend on fused with the
    product of its scores.

    The graph's other outputs, such as the scores, stay. Return `graph` itself if there is no such
    cross-entropy.
    """
    if all(node.op not in _LOSSES for node in graph.nodes):
        return graph
    view = View(graph)
    added = Additions(graph)
    nodes = list[Node]()
    view.readers = _readers(graph, wanted)
    changed = False
    for node in graph.nodes:
        view.writers.update({name: node for name in node.outputs if name})
        own = _loss(view, added, node) if view.readers[node.outputs[0]] else ()
        changed |= bool(own)
        nodes.extend(own or (node,))
    return without_unread(added.graph(nodes)) if changed else graph


def _readers(graph: Graph, wanted: Iterable[str]) -> Counter[str]:
    """How often each value is read on the way to what is wanted."""
    found = Counter(wanted)
    for node in reversed(graph.nodes):
        if any(found[name] for name in node.outputs):
            found.update(name for name in node.inputs if name)
    return found


def _loss(view: View, added: Additions, node: Node) -> tuple[Node, ...]:
    """The nodes in place of a loss; () where they are no others."""
    scores = _scores(view, node) if node.op in _LOSSES else ""
    if not scores or len(view.shape(scores)) < 2:
        return ()
    name, labels = _classes_last(view, node, scores)
    moves: list[Node] = []
    while (move := _row_move(view, name)) is not None:
        name = move.inputs[0]
        if move.op != "Cast":
            moves.append(move)
    product = _product(view, name) if name else None
    # A slice that takes all classes takes all of no more features.
    if product is None or view.shape(product.x)[-1] > view.shape(scores)[1]:
        return ()
    nodes = _moved(view, added, product.x, moves[::-1])
    x = nodes[-1].outputs[0] if nodes else product.x
    attributes: list[tuple[str, Attribute]] = [
        each for each in node.attributes if each[0] in _ATTRIBUTES
    ]
    attributes += [("softcap", product.softcap)] * bool(product.softcap) + [
        ("transB", 1)
    ] * product.transposed
    weight = node.inputs[2] if len(node.inputs) > 2 else ""
    inputs = (x, labels, weight, product.weight, product.bias)[: 5 if product.bias else 4]
    return (
        *nodes,
        Node(
            node.name, "LinearCrossEntropy", inputs, node.outputs[:1], tuple(attributes), "autopipe"
        ),
    )


def _classes_last(view: View, node: Node, scores: str) -> tuple[str, str]:
    """The scores of a loss with classes in their last dimension, "" where there are none such, and
    labels of the same other dimensions: those before both became rows, where they did and the
    result does not show it.
    """
    labels = node.inputs[1]
    rank = len(view.shape(scores))
    if rank > 2:
        turned = _alone(view, scores, "Transpose")
        is_turned = turned is not None and turned.integers("perm") == (
            0,
            rank - 1,
            *range(1, rank - 1),
        )
        return turned.inputs[0] if turned is not None and is_turned else "", labels
    rows = _alone(view, scores, "Reshape")
    before = view.made_by(labels, "Reshape")
    if rows is not None and before is not None and node.text("reduction", "mean") != "none":
        (given, *_) = rows.inputs
        (own, *_) = before.inputs
        if view.shape(given) == (*view.shape(own), view.shape(scores)[-1]):
            return given, own
    return scores, labels


def _moved(view: View, added: Additions, x: str, moves: Iterable[Node]) -> list[Node]:
    """Nodes that move the rows of x as `moves` do those of scores."""
    nodes = list[Node]()
    value = view.type_of(x)
    for move in moves:
        shape = (*view.shape(move.outputs[0])[:-1], value.shape[-1])
        name = added.value(f"{x}_rows", value.dtype, shape)
        inputs = (x, added.shape(name, shape)) if move.op == "Reshape" else (x, *move.inputs[1:])
        nodes.append(
            dataclasses.replace(
                move, inputs=inputs, outputs=(name,), name=f"autopipe/{move.op}/{name}"
            )
        )
        x = name
    return nodes


def _scores(view: View, node: Node) -> str:
    """The scores of a loss that nothing else reads, "" for another node."""
    if node.domain or any(view.readers[name] for name in node.outputs[1:] if name):
        return ""
    if node.op == "SoftmaxCrossEntropyLoss":
        return node.inputs[0]
    softmax = (
        _alone(view, node.inputs[0], "LogSoftmax")
        if node.op == "NegativeLogLikelihoodLoss"
        else None
    )
    if softmax is None or view.graph.opset < 13:
        return ""
    rank = len(view.shape(softmax.inputs[0]))
    return softmax.inputs[0] if positive(softmax.integer("axis", -1), rank) == 1 else ""


def _alone(view: View, name: str, *operators: str) -> Node | None:
    """The node of one of the operators that writes a value which is read once."""
    return view.made_by(name, *operators) if view.readers[name] == 1 else None


def _row_move(view: View, name: str) -> Node | None:
    """A node that widens scores to single precision, or moves or takes rows of them, whose last
    dimension is the classes.
    """
    node = _alone(view, name, "Cast", "Reshape", "Slice")
    if node is None:
        return None
    before = view.type_of(node.inputs[0])
    after = view.type_of(name)
    if node.op == "Cast":
        widens = before.dtype in _NARROW and after.dtype is DType.FLOAT32
        return node if widens or before.dtype is after.dtype else None
    if len(before.shape) < 2 or before.shape[-1] != after.shape[-1]:
        return None
    whole = 0, before.shape[-1], 1
    return (
        node
        if node.op == "Reshape" or slices(signature_of(view.graph, node))[-1] == whole
        else None
    )


def _product(view: View, name: str) -> _Product | None:
    """The product that makes scores, with its bias and the softcap over both."""
    softcap, inner = _capped(view, name)
    node = _alone(view, inner, "MatMul", "Gemm", "Add")
    found = None
    if node is not None and node.op == "Add":
        for product, bias in (node.inputs, node.inputs[::-1]):
            made = _alone(view, product, "MatMul")
            if made is not None and view.shape(bias) == view.shape(product)[-1:]:
                found = _Product(made.inputs[0], made.inputs[1], bias, softcap=softcap)
    elif node is not None and node.op == "MatMul":
        found = _Product(node.inputs[0], node.inputs[1], softcap=softcap)
    elif node is not None:
        bias = node.inputs[2] if len(node.inputs) > 2 else ""
        plain = not node.integer("transA") and all(
            node.number(name, 1.0) == 1.0 for name in ("alpha", "beta")
        )
        if plain and (not bias or view.shape(bias) == view.shape(inner)[-1:]):
            found = _Product(
                node.inputs[0], node.inputs[1], bias, bool(node.integer("transB")), softcap
            )
    if found is None or len(view.shape(found.weight)) != 2 or len(view.shape(found.x)) < 2:
        return None
    types = {view.type_of(each).dtype for each in (found.x, found.weight, found.bias) if each}
    return found if len(types) == 1 and types <= {*_NARROW, DType.FLOAT32, DType.FLOAT64} else None


def _capped(view: View, name: str) -> tuple[float, str]:
    """c and s where a value is c · tanh(s / c), else 0 and the value."""
    softcap, bent = view.scaled(name)
    bend = _alone(view, bent, "Tanh") if view.readers[name] == 1 else None
    if bend is None:
        return 0.0, name
    share, inner = view.scaled(bend.inputs[0])
    while (widened := _row_move(view, inner)) is not None and widened.op == "Cast":
        inner = widened.inputs[0]
    return (softcap, inner) if near(share * softcap, 1.0) else (0.0, name)
