"""Layers of convolutional networks. The spatial axes of a convolution stay whole, as in the prototype."""

from __future__ import annotations

from autopipe.passes.placement.pase.paper.costs import Norm, Pooling, Product, Reduction
from autopipe.passes.placement.pase.paper.drafting import LayerGraphBuilder, Pattern, Words

SPATIAL = "hwd"
KERNEL = "rst"


def convolve(draft: LayerGraphBuilder, index: int) -> None:
    """Conv over (b, c, h, w, r, s, n): rows b h w, summed c r s, columns n."""
    node, graph = draft.graph.nodes[index], draft.graph
    weight, result = graph.type_of(node.inputs[1]).shape, graph.type_of(node.outputs[0]).shape
    rank = len(weight) - 2
    spatial, kernel = tuple(SPATIAL[:rank]), tuple(KERNEL[:rank])
    extents = (result[0], weight[1], *result[2:], *weight[2:], weight[0])
    channels = ("c",) if node.integer("group", 1) == 1 else ()
    places = draft.lay(
        node.name,
        (index,),
        ((draft.places.get(node.inputs[0]), (("b",), channels, *((),) * rank)),),
        Pattern(
            tuple(zip(("b", "c", *spatial, *kernel, "n"), extents, strict=True)),
            (((("b",), ("n",), *((),) * rank), result),),
            lambda found: Product(
                batch=(),
                rows=tuple(axis for word in ("b", *spatial) for axis in found[word]),
                columns=found["n"],
                summed=tuple(axis for word in ("c", *kernel) for axis in found[word]),
            ),
            whole=frozenset(spatial),
        ),
    )
    draft.places[node.outputs[0]] = places[0]


def pool(draft: LayerGraphBuilder, index: int) -> None:
    """A window moved over an image: every axis of the result may be cut."""
    node, graph = draft.graph.nodes[index], draft.graph
    source, result = graph.type_of(node.inputs[0]).shape, graph.type_of(node.outputs[0]).shape
    words: Words = tuple((word,) for word in ("b", "c", *SPATIAL[: len(result) - 2]))
    pattern = Pattern(
        tuple((word[0], extent) for word, extent in zip(words, result, strict=True)),
        ((words, result),),
        lambda _: Pooling(2, source, node.integers("kernel_shape")),
    )
    places = draft.lay(node.name, (index,), ((draft.places.get(node.inputs[0]), words),), pattern)
    draft.places[node.outputs[0]] = places[0]


def mean_image(draft: LayerGraphBuilder, index: int) -> None:
    """GlobalAveragePool: a mean over all spatial axes."""
    node, graph = draft.graph.nodes[index], draft.graph
    source, result = graph.type_of(node.inputs[0]).shape, graph.type_of(node.outputs[0]).shape
    words: Words = tuple((word,) for word in ("b", "c", *SPATIAL[: len(source) - 2]))
    pattern = Pattern(
        tuple((word[0], extent) for word, extent in zip(words, source, strict=True)),
        (((*words[:2], *((),) * (len(source) - 2)), result),),
        lambda _: Reduction(tuple(range(2, len(source)))),
    )
    places = draft.lay(node.name, (index,), ((draft.places.get(node.inputs[0]), words),), pattern)
    draft.places[node.outputs[0]] = places[0]


def batch_norm(draft: LayerGraphBuilder, index: int) -> None:
    """BatchNormalization: for the paper a norm over the batch, whatever statistics the model uses."""
    node, graph = draft.graph.nodes[index], draft.graph
    shape = graph.type_of(node.outputs[0]).shape
    words: Words = tuple((word,) for word in ("b", "c", *SPATIAL[: len(shape) - 2]))
    pattern = Pattern(
        tuple((word[0], extent) for word, extent in zip(words, shape, strict=True)),
        ((words, shape),),
        lambda found: Norm(found["b"][0]),
    )
    places = draft.lay(node.name, (index,), ((draft.places.get(node.inputs[0]), words),), pattern)
    draft.places[node.outputs[0]] = places[0]
