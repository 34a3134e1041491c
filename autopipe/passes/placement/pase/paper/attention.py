"""Attention as the paper has it: one product for queries, keys and values, two products and a softmax between them."""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.ir.graph import Graph
from autopipe.passes.placement.pase.paper.costs import Movement, Softmax
from autopipe.passes.placement.pase.paper.drafting import LayerGraphBuilder, Pattern, Words
from autopipe.passes.placement.pase.paper.generic import by_space
from autopipe.passes.placement.pase.paper.layers import Place
from autopipe.passes.placement.pase.paper.products import product_of

HEADS: Words = (("b",), ("h",), ("l",), ("k",))
KEYS: Words = (("b",), ("h",), ("m",), ("k",))
SCORES: Words = (("b",), ("h",), ("l",), ("m",))


@dataclass(frozen=True, slots=True)
class Projections:
    """The nodes between an attention and what its queries, keys and values are projected from.

    `sources` are those three values, each [batch, length, width].
    """

    nodes: tuple[int, ...]
    sources: tuple[str, str, str]


def projections(graph: Graph) -> dict[int, Projections]:
    """Inputs of each attention, where they are three equal projections, by weights, of values of one shape."""
    readers = graph.consumers()
    found = {}
    for index, node in enumerate(graph.nodes):
        if node.op != "Attention" or len(graph.type_of(node.inputs[0]).shape) != 4 or any(node.outputs[1:]):
            continue
        traced = [_traced(graph, name, readers) for name in node.inputs[:3]]
        shapes = {graph.type_of(name).shape for name in node.inputs[:3]}
        sources = [each[1] for each in traced if each is not None]
        if len(sources) < 3 or len(shapes) > 1 or len({graph.type_of(name).shape for name in sources}) > 1:
            continue
        nodes = tuple(sorted(node for each in traced if each is not None for node in each[0]))
        if len(graph.type_of(sources[0]).shape) == 3:
            found[index] = Projections(nodes, (sources[0], sources[1], sources[2]))
    return found


def _traced(graph: Graph, name: str, readers: dict[str, tuple[int, ...]]) -> tuple[list[int], str] | None:
    """The chain of nodes from a product with a weight to `name`, each read by the next alone, and what it projects."""
    nodes: list[int] = []
    for _ in range(4):
        producer = graph.producer(name)
        if producer is None or len(readers.get(name, ())) != 1:
            return None
        node = graph.nodes[producer]
        nodes.append(producer)
        if node.op == "MatMul" and graph.parameter(node.inputs[1]) is not None:
            return nodes, node.inputs[0]
        data = [each for each in node.inputs if graph.parameter(each) is None]
        if node.op not in ("Add", "Transpose", "Reshape") or (node.op == "Add" and len(data) != 1):
            return None
        name = data[0]
    return None


def attend(draft: LayerGraphBuilder, index: int, projected: Projections | None) -> None:
    """The layers of an attention, with its projections where they are equal; masks are free and cost nothing."""
    node, graph = draft.graph.nodes[index], draft.graph
    queries, keys, values = (graph.type_of(name).shape for name in node.inputs[:3])
    if len(queries) != 4 or queries[:2] != keys[:2] or queries[3] != values[3] or any(node.outputs[1:]):
        by_space(draft, index)
        return
    if projected is None:
        operands = [draft.places.get(name) for name in node.inputs[:3]]
    else:
        operands = list(_project(draft, node.name, projected, queries))
    batch, heads, length, width = queries
    score_shape = (batch, heads, length, keys[2])
    axes = (("b", batch), ("h", heads), ("l", length))
    (scores,) = draft.lay(
        f"{node.name}/scores",
        (),
        ((operands[0], HEADS), (operands[1], KEYS)),
        Pattern(
            (*axes, ("m", keys[2]), ("k", width)),
            ((SCORES, score_shape),),
            lambda found: product_of(HEADS, KEYS, SCORES, found),
            inside=index,
        ),
    )
    (weights,) = draft.lay(
        f"{node.name}/softmax",
        (),
        ((scores, SCORES),),
        Pattern((*axes, ("m", keys[2])), ((SCORES, score_shape),), lambda found: Softmax(found["m"][0]), inside=index),
    )
    (draft.places[node.outputs[0]],) = draft.lay(
        node.name,
        (index,),
        ((weights, SCORES), (operands[2], KEYS)),
        Pattern(
            (*axes, ("k", width), ("m", keys[2])),
            ((HEADS, queries),),
            lambda found: product_of(SCORES, KEYS, HEADS, found),
        ),
    )


def _project(draft: LayerGraphBuilder, name: str, projected: Projections, shape: tuple[int, ...]) -> tuple[Place, ...]:
    """Queries, keys and values by one product: of one value with three weights, or of three values stacked."""
    batch, heads, length, width = shape
    inner = draft.graph.type_of(projected.sources[0]).shape[2]
    sources = [draft.places.get(each) for each in projected.sources]
    stack = (("s",), ("b",), ("l",), ("e",))
    read: Words = stack[1:]
    operand = sources[0]
    if len(set(projected.sources)) > 1:
        pattern = Pattern(
            (("s", 3), ("b", batch), ("l", length), ("e", inner)),
            ((stack, (3, batch, length, inner)),),
            lambda _: Movement(),
            whole=frozenset({"s"}),
        )
        (operand,) = draft.lay(f"{name}/stack", (), [(each, read) for each in sources], pattern)
        read = stack
    weight: Words = (("s",), ("h",), ("e",), ("k",))
    heads_of_three: Words = (("s",), *HEADS)
    axes = (("s", 3), ("b", batch), ("h", heads), ("l", length), ("k", width))
    stacked_shape = (3, *shape)
    (product,) = draft.lay(
        f"{name}/projections",
        projected.nodes,
        ((operand, read),),
        Pattern(
            (*axes, ("e", inner)),
            ((heads_of_three, stacked_shape),),
            lambda found: product_of(read, weight, heads_of_three, found),
            aliases=(("e", "k"),),
        ),
    )
    draft.places.update(_inside(draft.graph, projected, product))
    return draft.lay(
        f"{name}/unstack",
        (),
        ((product, heads_of_three),),
        Pattern(axes, ((HEADS, shape),) * 3, lambda _: Movement(), whole=frozenset({"s"})),
    )


def _inside(graph: Graph, projected: Projections, product: Place) -> dict[str, Place]:
    """Where the values between a projection and its heads lie in the stacked product, [3, b, h, l, k]."""
    merged, apart = ((1,), (3,), (2, 4)), ((1,), (3,), (2,), (4,))
    found = {}
    for index in projected.nodes:
        node = graph.nodes[index]
        groups = merged if len(graph.type_of(node.outputs[0]).shape) == 3 else apart
        if node.op == "Transpose":
            groups = ((1,), (2,), (3,), (4,))
        found[node.outputs[0]] = Place(product.layer, product.result, groups)
    return found
