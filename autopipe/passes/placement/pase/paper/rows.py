"""Layers that work along one axis of every row: softmax, losses, norms."""

from __future__ import annotations

from collections.abc import Callable

from autopipe.passes.placement.pase.paper.costs import Cost, CrossEntropy, Norm, Softmax
from autopipe.passes.placement.pase.paper.drafting import LayerGraphBuilder, Pattern, Words


def softmax(draft: LayerGraphBuilder, index: int) -> None:
    """Softmax over its axis."""
    node = draft.graph.nodes[index]
    _lay_rows(draft, index, node.integer("axis", -1), Softmax)


def normalise(draft: LayerGraphBuilder, index: int) -> None:
    """LayerNormalization: the paper's norm over the last axis."""
    _lay_rows(draft, index, -1, Norm)


def classify(draft: LayerGraphBuilder, index: int) -> None:
    """SoftmaxCrossEntropyLoss over the classes, dimension 1; nothing reads its result."""
    _lay_rows(draft, index, 1, CrossEntropy)


def _lay_rows(draft: LayerGraphBuilder, index: int, axis: int, kind: Callable[[int], Cost]) -> None:
    """A layer over every axis of the first operand, with special costs along one."""
    node, graph = draft.graph.nodes[index], draft.graph
    shape, result = graph.type_of(node.inputs[0]).shape, graph.type_of(node.outputs[0]).shape
    words: Words = tuple((f"d{position}",) for position in range(len(shape)))
    along = words[axis][0]
    written: Words = words if result == shape else ((),) * len(result)
    pattern = Pattern(
        tuple((word[0], extent) for word, extent in zip(words, shape, strict=True)),
        ((written, result),),
        lambda found: kind(found[along][-1]),
    )
    places = draft.lay(node.name, (index,), ((draft.places.get(node.inputs[0]), words),), pattern)
    draft.places[node.outputs[0]] = places[0]
