"""Products: each becomes a tile of a matrix product over groups of axes."""

from __future__ import annotations

from autopipe.ir.graph import Graph
from autopipe.ir.ops import space_of
from autopipe.ir.space import Space
from autopipe.passes.placement.pase.paper.costs import Cost, Product
from autopipe.passes.placement.pase.paper.drafting import Indices, LayerGraphBuilder, Pattern, Words
from autopipe.passes.placement.pase.paper.generic import by_space


def multiply(draft: LayerGraphBuilder, index: int) -> None:
    """MatMul and Gemm over the axes of their own iteration space; columns that a reshape takes apart are axes each."""
    node = draft.graph.nodes[index]
    columns = divided_columns(draft.graph, index)
    _lay_product(draft, index, space_of(draft.graph, node), (("n", columns),) if columns else ())


def multiply_by_equation(draft: LayerGraphBuilder, index: int) -> None:
    """Einsum of two factors; other equations count elementwise."""
    node = draft.graph.nodes[index]
    if len(node.inputs) == 2:
        _lay_product(draft, index, space_of(draft.graph, node), ())
    else:
        by_space(draft, index)


def product_of(left: Words, right: Words, result: Words, indices: Indices, pointwise: int = 0) -> Cost:
    """The tile of a product whose factors and result are indexed by these axes."""
    first, second, written = ({word for words in tensor for word in words} for tensor in (left, right, result))

    def group(words: set[str]) -> tuple[int, ...]:
        return tuple(axis for word in indices if word in words for axis in indices[word])

    return Product(
        batch=group(first & second & written),
        rows=group((first & written) - second),
        columns=group((second & written) - first),
        summed=group((first | second) - written),
        pointwise=pointwise,
    )


def _lay_product(
    draft: LayerGraphBuilder, index: int, space: Space, divided: tuple[tuple[str, tuple[int, ...]], ...]
) -> None:
    node, graph = draft.graph.nodes[index], draft.graph
    left, right, result = space.operands[0], space.operands[1], space.results[0]
    assert left is not None and right is not None and result is not None
    order = [word for dimension in result for word in dimension]
    order += [axis.name for axis in space.axes if axis.name not in order]
    shape = graph.type_of(node.outputs[0]).shape
    places = [(draft.places.get(name), words) for name, words in zip(node.inputs, (left, right), strict=False)]
    pattern = Pattern(
        tuple((word, space.axis(word).extent) for word in order),
        ((result, shape),),
        lambda indices: product_of(left, right, result, indices),
        divided=divided,
    )
    (draft.places[node.outputs[0]],) = draft.lay(node.name, (index,), places, pattern)


def divided_columns(graph: Graph, index: int) -> tuple[int, ...]:
    """The extents that a reshape takes a product's columns apart into (heads); () where none does.

    A bias may stand between them.
    """
    name, consumers = graph.nodes[index].outputs[0], graph.consumers()
    for _ in range(2):
        readers = consumers.get(name, ())
        if len(readers) != 1:
            return ()
        reader = graph.nodes[readers[0]]
        shape = graph.type_of(name).shape
        if reader.op == "Add" and any(graph.parameter(each) is not None for each in reader.inputs):
            name = reader.outputs[0]
            continue
        divided = graph.type_of(reader.outputs[0]).shape
        lead = len(shape) - 1
        if reader.op == "Reshape" and len(divided) > len(shape) and divided[:lead] == shape[:lead]:
            return divided[lead:]
    return ()


def embed(draft: LayerGraphBuilder, index: int) -> None:
    """A lookup of rows of a table that is a parameter: a product with one-hot rows, which are free to read."""
    node, graph = draft.graph.nodes[index], draft.graph
    table, indices = (graph.type_of(name).shape for name in node.inputs[:2])
    if graph.parameter(node.inputs[0]) is None or len(table) != 2 or node.integer("axis") != 0:
        by_space(draft, index)
        return
    rows = tuple((f"i{position}",) for position in range(len(indices)))
    axes = (*((word[0], extent) for word, extent in zip(rows, indices, strict=True)), ("e", table[1]), ("v", table[0]))
    one_hot: Words = (*rows, ("v",))
    result: Words = (*rows, ("e",))
    pattern = Pattern(
        axes,
        ((result, (*indices, table[1])),),
        lambda found: product_of(one_hot, (("v",), ("e",)), result, found),
        aliases=(("v", "d0"),),
    )
    (draft.places[node.outputs[0]],) = draft.lay(node.name, (index,), (), pattern)
