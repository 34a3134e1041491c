"""How the paper's graph is put together: layers are laid one after the other, and values know where they come from.

Dimensions that a reshape has merged stay apart here: a value remembers which dimensions of a layer's result make up
each of its own, and a layer that reads it gets an axis for each of them. So a product over merged heads has two summed
axes, as the paper writes it (`bhlk,hek->ble`), and a loss over flattened positions still knows batch and position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopipe.ir.graph import Graph
from autopipe.passes.placement.pase.paper.costs import Cost, Elementwise, Product
from autopipe.passes.placement.pase.paper.layers import Axis, Layer, LayerEdge, LayerGraph, Place, PlacedLayer, Tensor

Words = tuple[tuple[str, ...], ...]
"""For each dimension of a tensor, the names of the axes that index it, outer to inner; () where none may cut it."""

Indices = Mapping[str, tuple[int, ...]]
"""For each named axis, the layer's axes that it became: several where what is read has it in several dimensions."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A layer as a rule describes it, before it is known how what it reads is divided.

    `axes` are names and extents in the layer's order; `divided` says of some how their extent is to be taken apart.
    """

    axes: tuple[tuple[str, int], ...]
    results: tuple[tuple[Words, tuple[int, ...]], ...]
    """Of each result, its words and its shape."""
    cost: Callable[[Indices], Cost]
    whole: frozenset[str] = frozenset()
    divided: tuple[tuple[str, tuple[int, ...]], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    """Names in the nodes of an axis that neither they nor the layer show in a tensor that has a place."""
    inside: int | None = None
    """The node that computes this on its way to what another layer stands for."""


class LayerGraphBuilder:
    """The paper's graph while it grows. `places` holds the values that layers make; all others are free to read."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.places: dict[str, Place] = {}
        self.layers: list[PlacedLayer] = []
        self._edges: dict[tuple[int, int], LayerEdge] = {}
        self._pointwise: dict[int, int] = {}

    def lay(
        self, name: str, nodes: Sequence[int], operands: Sequence[tuple[Place | None, Words]], pattern: Pattern
    ) -> tuple[Place, ...]:
        """Append a layer and the edges to it; the places of its results. An operand without a place is free."""
        factors = self._factors(operands, pattern)
        axes: list[Axis] = []
        indices: dict[str, tuple[int, ...]] = {}
        for word, _ in pattern.axes:
            parts = factors[word]
            indices[word] = tuple(range(len(axes), len(axes) + len(parts)))
            names = [word] if len(parts) == 1 else [f"{word}{position}" for position in range(len(parts))]
            axes += [Axis(each, extent, word in pattern.whole) for each, extent in zip(names, parts, strict=True)]
        extents = tuple(axis.extent for axis in axes)
        placed = [(place, words) for place, words in operands if place is not None]
        layer = Layer(
            tuple(axes),
            tuple(self._operand(place, words, indices, extents) for place, words in placed),
            tuple(_result(words, shape, indices, extents) for words, shape in pattern.results),
            pattern.cost(indices),
        )
        index = self.append(
            PlacedLayer(name, layer, tuple(nodes), pattern.aliases, pattern.inside), [place for place, _ in placed]
        )
        return tuple(Place(index, result, _groups(words, indices)) for result, (words, _) in enumerate(pattern.results))

    def append(self, layer: PlacedLayer, operands: Sequence[Place]) -> int:
        """Append a layer that reads `operands`; its index. Of several edges from one layer, the last stands for all."""
        index = len(self.layers)
        self.layers.append(layer)
        for operand, place in enumerate(operands):
            self._edges[place.layer, index] = LayerEdge(place.layer, index, place.result, operand)
        return index

    def replace(self, index: int, layer: Layer, node: int) -> None:
        """Make `layer` of the layer at `index`, which stands for `node` too."""
        before = self.layers[index]
        self.layers[index] = replace(before, layer=layer, nodes=(*before.nodes, node))

    def absorb(self, place: Place, node: int) -> None:
        """Let the layer at `place` stand for `node` too, which costs nothing."""
        self.replace(place.layer, self.layers[place.layer].layer, node)

    def fuse(self, place: Place, node: int, activates: bool) -> None:
        """Let the layer at `place` stand for a pointwise operation on its result.

        Products and elementwise layers count those up to the last activation: a bias or a scale alone belongs to them.
        """
        layer = self.layers[place.layer].layer
        count = self._pointwise[place.layer] = self._pointwise.get(place.layer, 0) + 1
        if activates and isinstance(layer.cost, Product | Elementwise):
            layer = replace(layer, cost=replace(layer.cost, pointwise=count))
        self.replace(place.layer, layer, node)

    def tensor(self, place: Place) -> Tensor:
        """The result that a place speaks of."""
        return self.layers[place.layer].layer.results[place.result]

    def finished(self, cutoff: int) -> LayerGraph:
        """The graph."""
        edges = tuple(self._edges[pair] for pair in sorted(self._edges))
        return LayerGraph(tuple(self.layers), edges, dict(self.places), cutoff)

    def _factors(self, operands: Sequence[tuple[Place | None, Words]], pattern: Pattern) -> dict[str, tuple[int, ...]]:
        """How each axis is taken apart: as finely as some operand or the pattern has it."""
        factors: dict[str, tuple[int, ...]] = {word: (extent,) for word, extent in pattern.axes}
        factors.update(pattern.divided)
        for place, words in operands:
            if place is None:
                continue
            extents = self.tensor(place).extents
            for dimension, group in zip(words, place.groups, strict=True):
                parts = tuple(extents[each] for each in group)
                if len(dimension) == 1 and len(parts) > len(factors[dimension[0]]):
                    factors[dimension[0]] = parts
        return factors

    def _operand(self, place: Place, words: Words, indices: Indices, extents: tuple[int, ...]) -> Tensor:
        """Operand of the layer, by the dimensions of the result that it comes from."""
        source = self.tensor(place).extents
        axes: list[tuple[int, ...]] = [()] * len(source)
        for dimension, group in zip(words, place.groups, strict=True):
            cuts = tuple(axis for word in dimension for axis in indices[word])
            if len(group) == 1:
                axes[group[0]] = cuts
            elif tuple(source[each] for each in group) == tuple(extents[axis] for axis in cuts):
                for each, axis in zip(group, cuts, strict=True):
                    axes[each] = (axis,)
        return Tensor(source, tuple(axes))


def _result(words: Words, shape: tuple[int, ...], indices: Indices, extents: tuple[int, ...]) -> Tensor:
    """A result with a dimension for each axis that indexes it, and one for each dimension that none does."""
    found: list[tuple[int, tuple[int, ...]]] = []
    for dimension, extent in zip(words, shape, strict=True):
        cuts = [axis for word in dimension for axis in indices[word]]
        found += [(extents[axis], (axis,)) for axis in cuts] if cuts else [(extent, ())]
    return Tensor(tuple(extent for extent, _ in found), tuple(axes for _, axes in found))


def _groups(words: Words, indices: Indices) -> tuple[tuple[int, ...], ...]:
    counts = [max(1, sum(len(indices[word]) for word in dimension)) for dimension in words]
    starts = [sum(counts[:position]) for position in range(len(counts))]
    return tuple(tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=True))


def regrouped(extents: Sequence[int], shape: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
    """Positions in `extents` that make up each dimension of `shape`, in order; None where one would have to be cut.

    Positions of extent 1 are left out.
    """
    rest = [position for position, extent in enumerate(extents) if extent != 1]
    groups = []
    for wanted in shape:
        group: list[int] = []
        while math.prod(extents[each] for each in group) < wanted and rest:
            group.append(rest.pop(0))
        if math.prod(extents[each] for each in group) != wanted:
            return None
        groups.append(tuple(group))
    return tuple(groups)
