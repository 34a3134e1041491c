"""Costs of a layer under the paper's model: operations on one device's part, and the layer's exchanges as operations.

Every cost is a function of the axes' degrees, vectorised over configurations. A multiply-add counts one operation;
forward and backward are counted together. Volumes are words. Where a degree does not divide what it cuts (the input of
a pooling), parts are fractions of an element, as in the authors' prototype.

How the paper's graph is put together: layers are laid one after the other, and values know where they come from.

Dimensions that a reshape has merged stay apart here: a value remembers which dimensions of a layer's result make up
each of its own, and a layer that reads it gets an axis for each of them. So a product over merged heads has two summed
axes, as the paper writes it (`bhlk,hek->ble`), and a loss over flattened positions still knows batch and position.

The paper's graph: layers with an iteration space each, and the tensors that flow between them.

The paper's costs as tables: one vector a layer, one matrix an edge; what is equal is built once and shared.

The configurations of a layer: how many parts each axis of its iteration space is cut into (PaSE, section II).

Cost of moving a tensor from one layer to the next under the paper's model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from autopipe.ir.graph import Graph

Degrees = npt.NDArray[np.int64]
"""[configurations, axes]: parts of each axis."""


def divisors(extent: int, cutoff: int, devices: int) -> list[int]:
    """Ascending divisors c ≤ `devices` of `extent` that leave parts of at least `cutoff`; 1 where there is none."""
    found = [c for c in range(1, min(extent, devices) + 1) if extent % c == 0 and extent >= c * cutoff]
    return found or [1]


def configurations(extents: Sequence[int], devices: int, cutoff: int) -> Degrees:
    """All degrees, axis by axis, whose product is at most `devices`, in lexicographic order; [count, axes].

    An axis of extent 1 is never cut. The first row cuts nothing.
    """
    degrees = np.ones((1, 0), dtype=np.int64)
    used = np.ones(1, dtype=np.int64)
    for extent in extents:
        choices = np.array(divisors(extent, cutoff, devices), dtype=np.int64)
        product = used[:, None] * choices
        before, choice = np.nonzero(product <= devices)
        degrees = np.concatenate((degrees[before], choices[choice, None]), axis=1)
        used = product[before, choice]
    return degrees


def contiguous(degrees: Degrees, extents: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Which configurations cut a row-major tensor of `extents` into contiguous pieces; [configurations].

    Outer axes are cut into single elements, the next one into any parts, those inside it not at all.
    """
    single = degrees == np.array(extents, dtype=np.int64)
    outer = np.cumprod(single, axis=1, dtype=bool)
    inside = np.ones_like(outer)
    inside[:, 1:] = outer[:, :-1]
    return np.asarray(((degrees == 1) | inside).all(axis=1))


Floats = npt.NDArray[np.float64]

WORD_OPERATIONS = 5000.0
"""r: operations in the time of a word of 8 bytes, for 10 TFLOP/s a device and links of 16 GB/s."""


def all_reduce(words: Floats, degree: Degrees, rate: float) -> Floats:
    """Operations in the time of a ring all-reduce of `words` on each of `degree` devices: 2 r (w / c)(c - 1)."""
    return 2.0 * rate * (words / degree) * (degree - 1)


class Cost(Protocol):
    """The cost of one kind of layer."""

    def of(self, extents: tuple[int, ...], degrees: Degrees, rate: float) -> Floats:
        """Operations for each configuration, given the axes' extents; `rate` is r. [configurations]"""


@dataclass(frozen=True, slots=True)
class Product:
    """A (batched) matrix product over groups of axes, forward and both of its backward products.

    `pointwise` operations follow each element of the result; each counts forward, its derivative, and the chain rule's
    product.
    """

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    summed: tuple[int, ...]
    pointwise: int = 0

    def of(self, extents: tuple[int, ...], degrees: Degrees, rate: float) -> Floats:
        """β (3 MNK + 3 q MN + AR(MN, c_k) + AR(MK, c_n) + AR(NK, c_m)), all of a device's part."""
        beta = _part(extents, degrees, self.batch)
        return beta * _product(
            (
                _part(extents, degrees, self.rows),
                _part(extents, degrees, self.columns),
                _part(extents, degrees, self.summed),
            ),
            (_parts(degrees, self.rows), _parts(degrees, self.columns), _parts(degrees, self.summed)),
            self.pointwise,
            rate,
        )


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Equal LSTM layers on axes (layer, step, batch, units out, units in): layers cut apart work as a wavefront."""

    def of(self, extents: tuple[int, ...], degrees: Degrees, rate: float) -> Floats:
        """One product of 4n columns and 2k summed, three pointwise operations, and each step's output made an input."""
        layers, steps, batch, outs, ins = (extents[axis] / degrees[:, axis] for axis in range(5))
        rows = _parts(degrees, (1, 2))
        cell = _product(
            (steps * batch, 4 * outs, 2 * ins), (rows, degrees[:, 3], degrees[:, 4]), pointwise=3, rate=rate
        )
        common = np.where(degrees[:, 4] > degrees[:, 3], 0.0, batch * np.minimum(outs, ins))
        moved = np.maximum(batch * ins - common, 0.0)
        return layers * cell + rate * extents[0] * extents[1] * moved


@dataclass(frozen=True, slots=True)
class Softmax:
    """A softmax over `axis`."""

    axis: int

    def of(self, extents: tuple[int, ...], degrees: Degrees, rate: float) -> Floats:
        """4 T + T D + 2 AR(R, c) + AR(R D, c), where T is the part, R its rows and D the full axis."""
        rows = _part(extents, degrees, _without(extents, self.axis))
        full, degree = extents[self.axis], degrees[:, self.axis]
        part = rows * (full / degree)
        sums = 2.0 * all_reduce(rows, degree, rate) + all_reduce(rows * full, degree, rate)
        return (4.0 + full) * part + sums


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """A softmax over `axis` and the cross-entropy of its result."""

    axis: int

    def of(self, extents: tuple[int, ...], degrees: Degrees, rate: float) -> Floats:
        """4 T + 2 R, and 2 r R where classes are cut."""
        rows = _part(extents, degrees, _without(extents, self.axis))
        degree = degrees[:, self.axis]
        part = rows * (extents[self.axis] / degree)
        return 4.0 * part + 2.0 * rows + np.where(degree > 1, 2.0 * rate * rows, 0.0)


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation over `axis`; the paper takes batch normalisation for one over the batch."""

    axis: int

    def of(self, extents: tuple[int, ...], degrees: Degrees, rate: float) -> Floats:
        """16 T + 4 AR(T / t, c) + 4 AR(t, Π of the others' c), where t is the part of the axis."""
        others = _without(extents, self.axis)
        rows, along = _part(extents, degrees, others), extents[self.axis] / degrees[:, self.axis]
        statistics = all_reduce(rows, degrees[:, self.axis], rate)
        weights = all_reduce(along, _parts(degrees, others), rate)
        return 16.0 * rows * along + 4.0 * (statistics + weights)


@dataclass(frozen=True, slots=True)
class Pooling:
    """A window moved over the axes from `spatial` on; `source` are the operand's extents."""

    spatial: int
    source: tuple[int, ...]
    window: tuple[int, ...]

    def of(self, extents: tuple[int, ...], degrees: Degrees, rate: float) -> Floats:
        """T + r · halo: a cut axis needs a window's width of elements more."""
        axes = tuple(range(len(extents)))
        part = _part(extents, degrees, axes)
        inner = _part(self.source, degrees, axes[self.spatial :])
        outer = np.ones(len(degrees))
        for axis, width in zip(axes[self.spatial :], self.window, strict=True):
            outer *= self.source[axis] / degrees[:, axis] + np.where(degrees[:, axis] > 1, width, 0)
        halo = (outer - inner) * _part(self.source, degrees, axes[: self.spatial])
        return part + rate * halo


@dataclass(frozen=True, slots=True)
class Elementwise:
    """One operation an element, and `pointwise` more."""

    pointwise: int = 0

    def of(self, extents: tuple[int, ...], degrees: Degrees, rate: float) -> Floats:
        """(1 + q) T."""
        return (1.0 + self.pointwise) * _part(extents, degrees, tuple(range(len(extents))))


@dataclass(frozen=True, slots=True)
class Reduction:
    """A mean (or another reduction) over `axes`, of which the paper counts the exchange alone."""

    axes: tuple[int, ...]

    def of(self, extents: tuple[int, ...], degrees: Degrees, rate: float) -> Floats:
        """AR(T, Π c of the axes)."""
        return all_reduce(_part(extents, degrees, tuple(range(len(extents)))), _parts(degrees, self.axes), rate)


@dataclass(frozen=True, slots=True)
class Movement:
    """Data put elsewhere, free in itself: concatenation, stacking, flattening."""

    def of(self, extents: tuple[int, ...], degrees: Degrees, rate: float) -> Floats:
        """Nothing."""
        return np.zeros(len(degrees))


def _product(
    parts: tuple[Floats, Floats, Floats], cuts: tuple[Degrees, Degrees, Degrees], pointwise: int, rate: float
) -> Floats:
    (m, n, k), (cut_m, cut_n, cut_k) = parts, cuts
    work = 3.0 * m * n * k + 3.0 * pointwise * m * n
    return work + all_reduce(m * n, cut_k, rate) + all_reduce(m * k, cut_n, rate) + all_reduce(n * k, cut_m, rate)


def _part(extents: tuple[int, ...], degrees: Degrees, axes: tuple[int, ...]) -> Floats:
    """Elements along `axes` of one device's part."""
    return np.asarray(math.prod(extents[axis] for axis in axes) / _parts(degrees, axes))


def _parts(degrees: Degrees, axes: tuple[int, ...]) -> Degrees:
    """Parts along `axes` together."""
    return np.asarray(degrees[:, axes].prod(axis=1, dtype=np.int64))


def _without(extents: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return tuple(each for each in range(len(extents)) if each != axis)


def transfer(extents: tuple[int, ...], source: Degrees, target: Degrees, rate: float) -> Floats:
    """2 r · max(0, |target's part| − |overlap|), forward and backward; [source configurations, target configurations].

    `source` and `target` are the parts of each dimension of the tensor, [configurations, dimensions]. Parts are taken
    to lie as well as they can; where the target is on more devices than the source, some device has no overlap.
    """
    sizes = np.array(extents, dtype=np.float64)
    have, want = sizes / source, sizes / target
    overlap = np.ones((len(source), len(target)))
    for dimension in range(len(extents)):
        overlap *= np.minimum(have[:, None, dimension], want[None, :, dimension])
    overlap[source.prod(axis=1)[:, None] < target.prod(axis=1)[None, :]] = 0.0
    return np.asarray(2.0 * rate * np.maximum(want.prod(axis=1)[None, :] - overlap, 0.0))


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a layer's iteration space; `whole` where the paper does not cut it."""

    name: str
    extent: int
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Tensor:
    """Operand or result of a layer: each dimension's extent, and the layer's axes that cut it together."""

    extents: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]

    def degrees(self, layer: Degrees) -> Degrees:
        """Parts of each dimension, [configurations, dimensions], given the parts of the layer's axes."""
        columns = [layer[:, list(axes)].prod(axis=1, dtype=np.int64) for axes in self.axes]
        return np.stack(columns, axis=1) if columns else np.ones((len(layer), 0), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Layer:
    """Computation of a layer, whatever its name: equal layers have equal costs.

    `contiguous` keeps configurations that cut the axes, taken row-major, into contiguous pieces (flattening).
    """

    axes: tuple[Axis, ...]
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    cost: Cost
    contiguous: bool = False

    @property
    def extents(self) -> tuple[int, ...]:
        """Extent of each axis."""
        return tuple(axis.extent for axis in self.axes)

    def configurations(self, devices: int, cutoff: int) -> Degrees:
        """All configurations on at most `devices` devices; [configurations, axes]."""
        degrees = configurations([1 if axis.whole else axis.extent for axis in self.axes], devices, cutoff)
        return degrees[contiguous(degrees, self.extents)] if self.contiguous else degrees

    def costs(self, degrees: Degrees, rate: float) -> Floats:
        """Operations for each configuration; [configurations]."""
        return self.cost.of(self.extents, degrees, rate)


@dataclass(frozen=True, slots=True)
class PlacedLayer:
    """A layer at its place in the model: its name, and the nodes of the ONNX graph that it stands for.

    `aliases` are pairs of a layer's axis and the name that its nodes have for it, where no tensor tells. `inside` is
    the node that computes the layer on its way to a result which is another layer's.
    """

    name: str
    layer: Layer
    nodes: tuple[int, ...]
    aliases: tuple[tuple[str, str], ...] = ()
    inside: int | None = None


@dataclass(frozen=True, slots=True)
class LayerEdge:
    """Result `result` of layer `source` is operand `operand` of layer `target`."""

    source: int
    target: int
    result: int
    operand: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value of the ONNX graph lies: a layer's result, and for each dimension of the value those of the result
    that make it up, outer to inner."""

    layer: int
    result: int
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """The paper's computation graph: at most one edge between two layers, ordered as the layers are."""

    layers: tuple[PlacedLayer, ...]
    edges: tuple[LayerEdge, ...]
    places: Mapping[str, Place]
    """Of values of the ONNX graph; inputs, parameters and what costs nothing to compute have none."""
    cutoff: int
    """The least extent of a part: 4 for networks with convolutions, 1 for others, as the prototype has it."""


@dataclass(frozen=True, slots=True, eq=False)
class PaperTables:
    """Configurations and costs of a graph on `devices` devices: entry i of each belongs to layer or edge i."""

    graph: LayerGraph
    devices: int
    configurations: tuple[Degrees, ...]
    layer_costs: tuple[Floats, ...]
    edge_costs: tuple[Floats, ...]
    """[source configurations, target configurations] of each edge."""

    def cost(self, choice: tuple[int, ...]) -> float:
        """Cost of a strategy: `choice` is a configuration of each layer."""
        layers = sum(float(costs[chosen]) for costs, chosen in zip(self.layer_costs, choice, strict=True))
        return layers + sum(
            float(costs[choice[edge.source], choice[edge.target]])
            for edge, costs in zip(self.graph.edges, self.edge_costs, strict=True)
        )


def build_tables(graph: LayerGraph, devices: int, rate: float = WORD_OPERATIONS) -> PaperTables:
    """The tables of `graph` on `devices` devices; `rate` is r, operations in the time of a word."""
    kinds: dict[Layer, int] = {}
    kind_of = [kinds.setdefault(placed.layer, len(kinds)) for placed in graph.layers]
    degrees = [layer.configurations(devices, graph.cutoff) for layer in kinds]
    costs = [layer.costs(found, rate) for layer, found in zip(kinds, degrees, strict=True)]
    matrices: dict[Hashable, Floats] = {}
    edge_costs = []
    for edge in graph.edges:
        source, target = kind_of[edge.source], kind_of[edge.target]
        key = (source, edge.result, target, edge.operand)
        if key not in matrices:
            written = graph.layers[edge.source].layer.results[edge.result]
            read = graph.layers[edge.target].layer.operands[edge.operand]
            matrices[key] = transfer(
                written.extents, written.degrees(degrees[source]), read.degrees(degrees[target]), rate
            )
        edge_costs.append(matrices[key])
    return PaperTables(
        graph,
        devices,
        tuple(degrees[kind] for kind in kind_of),
        tuple(costs[kind] for kind in kind_of),
        tuple(edge_costs),
    )


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
