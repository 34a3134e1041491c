"""The cost model of the PaSE paper: layers, what each of their configurations costs, and the tables
of a whole graph.

A configuration says into how many parts each axis of a layer's iteration space is cut (section II).
Costs are in operations, of one device's part, forward and backward together; a multiply-add counts
as one, and communication as the operations in its time. Volumes are words. Where a degree does not
divide what it cuts (the input of a pooling), parts are fractions of an element, as in the authors'
prototype.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from autopipe.passes.solvers.min_sum import Edge, MinSum

Degrees = npt.NDArray[np.int64]
"""[configurations, axes]: parts of each axis."""
Floats = npt.NDArray[np.float64]
Extents = tuple[int, ...]
Axes = tuple[int, ...]
"""Positions of axes in a layer's iteration space."""

WORD_OPERATIONS = 5000.0
"""r: operations in the time of a word of 8 bytes, for 10 TFLOP/s a device and links of 16 GB/s."""


def configurations(extents: Sequence[int], devices: int, cutoff: int) -> Degrees:
    """All degrees, axis by axis, whose product is at most `devices`, in lexicographic order;
    [count, axes].

    An axis is cut into any number of parts that divides it and leaves each at least `cutoff`. The
    first row cuts nothing.
    """
    degrees = np.ones((1, 0), dtype=np.int64)
    used = np.ones(1, dtype=np.int64)
    for extent in extents:
        most = min(extent, devices)
        divisors = [
            each for each in range(1, most + 1) if extent % each == 0 and extent >= each * cutoff
        ] or [1]
        choices = np.array(divisors, dtype=np.int64)
        product = used[:, None] * choices
        before, choice = np.nonzero(product <= devices)
        degrees = np.concatenate((degrees[before], choices[choice, None]), axis=1)
        used = product[before, choice]
    return degrees


def contiguous(degrees: Degrees, extents: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Which configurations cut a row-major tensor of `extents` into contiguous pieces;
    [configurations].

    Outer axes are cut into single elements, the next one into any parts, those inside it not at
    all.
    """
    single = degrees == np.array(extents, dtype=np.int64)
    outer = np.cumprod(single, axis=1, dtype=bool)
    inside = np.ones_like(outer)
    inside[:, 1:] = outer[:, :-1]
    return np.asarray(((degrees == 1) | inside).all(axis=1))


def all_reduce(words: Floats, degree: Degrees) -> Floats:
    """AR: a ring all-reduce of `words` on each of `degree` devices, 2 r (w / c)(c - 1)."""
    return 2.0 * WORD_OPERATIONS * (words / degree) * (degree - 1)


def _parts(degrees: Degrees, axes: Axes) -> Degrees:
    """Parts along `axes` together."""
    return np.asarray(degrees[:, axes].prod(axis=1, dtype=np.int64))


def _part(extents: Extents, degrees: Degrees, axes: Iterable[int] | None = None) -> Floats:
    """Elements along `axes`, or all, of one device's part."""
    axes = tuple(range(len(extents)) if axes is None else axes)
    return np.asarray(math.prod(extents[axis] for axis in axes) / _parts(degrees, axes))


def _others(extents: Extents, axis: int) -> Axes:
    return tuple(each for each in range(len(extents)) if each != axis)


class Cost(Protocol):
    """The cost of one kind of layer. T are the elements of one device's part, c the parts of an
    axis.
    """

    def of(self, extents: Extents, degrees: Degrees) -> Floats:
        """Operations for each configuration, given the axes' extents; [configurations]."""


@dataclass(frozen=True, slots=True)
class Product:
    """A (batched) matrix product over groups of axes, forward and both of its backward products.

    β (3 MNK + 3 q MN + AR(MN, c_k) + AR(MK, c_n) + AR(NK, c_m)), all of a device's part.
    `pointwise`, q, operations follow each element of the result; each counts forward, its
    derivative, and the chain rule's product.
    """

    batch: Axes
    rows: Axes
    columns: Axes
    summed: Axes
    pointwise: int = 0

    def of(self, extents: Extents, degrees: Degrees) -> Floats:
        m, n, k = (_part(extents, degrees, axes) for axes in (self.rows, self.columns, self.summed))
        cut_m, cut_n, cut_k = (
            _parts(degrees, axes) for axes in (self.rows, self.columns, self.summed)
        )
        tile = _product(m, n, k, cut_m, cut_n, cut_k, self.pointwise)
        return np.asarray(_part(extents, degrees, self.batch) * tile)


def _product(
    m: Floats, n: Floats, k: Floats, cut_m: Degrees, cut_n: Degrees, cut_k: Degrees, pointwise: int
) -> Floats:
    work = 3.0 * m * n * k + 3.0 * pointwise * m * n
    return work + all_reduce(m * n, cut_k) + all_reduce(m * k, cut_n) + all_reduce(n * k, cut_m)


@dataclass(frozen=True, slots=True)
class Recurrent:
    """Equal LSTM layers on axes (layer, step, batch, units out, units in): layers cut apart work as
    a wavefront.

    One product of 4n columns and 2k summed, three pointwise operations, and each step's output made
    an input.
    """

    def of(self, extents: Extents, degrees: Degrees) -> Floats:
        layers, steps, batch, outs, ins = (extents[axis] / degrees[:, axis] for axis in range(5))
        _, _, _, cut_outs, cut_ins = degrees.T
        rows = _parts(degrees, (1, 2))
        cell = _product(steps * batch, 4 * outs, 2 * ins, rows, cut_outs, cut_ins, pointwise=3)
        common = np.where(cut_ins > cut_outs, 0.0, batch * np.minimum(outs, ins))
        moved = np.maximum(batch * ins - common, 0.0)
        return np.asarray(layers * cell + WORD_OPERATIONS * extents[0] * extents[1] * moved)


@dataclass(frozen=True, slots=True)
class Softmax:
    """A softmax over `axis`: 4 T + T D + 2 AR(R, c) + AR(R D, c), R being the part's rows and D the
    full axis.
    """

    axis: int

    def of(self, extents: Extents, degrees: Degrees) -> Floats:
        rows = _part(extents, degrees, _others(extents, self.axis))
        full = extents[self.axis]
        degree = degrees[:, self.axis]
        sums = 2.0 * all_reduce(rows, degree) + all_reduce(rows * full, degree)
        return (4.0 + full) * (rows * (full / degree)) + sums


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """A softmax over `axis` and the cross-entropy of its result: 4 T + 2 R, and 2 r R where classes
    are cut.
    """

    axis: int

    def of(self, extents: Extents, degrees: Degrees) -> Floats:
        rows = _part(extents, degrees, _others(extents, self.axis))
        degree = degrees[:, self.axis]
        part = rows * (extents[self.axis] / degree)
        return 4.0 * part + 2.0 * rows + np.where(degree > 1, 2.0 * WORD_OPERATIONS * rows, 0.0)


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation over `axis`: 16 T + 4 AR(T / t, c) + 4 AR(t, Π of the others' c), t being the
    part of the axis.

    The paper takes batch normalisation for one over the batch.
    """

    axis: int

    def of(self, extents: Extents, degrees: Degrees) -> Floats:
        others = _others(extents, self.axis)
        rows = _part(extents, degrees, others)
        along = extents[self.axis] / degrees[:, self.axis]
        statistics = all_reduce(rows, degrees[:, self.axis])
        weights = all_reduce(along, _parts(degrees, others))
        return np.asarray(16.0 * rows * along + 4.0 * (statistics + weights))


@dataclass(frozen=True, slots=True)
class Pooling:
    """A window moved over the axes from `spatial` on; `source` are the operand's extents.

    T + r · halo: a cut axis needs a window's width of elements more.
    """

    spatial: int
    source: Extents
    window: tuple[int, ...]

    def of(self, extents: Extents, degrees: Degrees) -> Floats:
        axes = range(self.spatial, len(extents))
        inner = _part(self.source, degrees, axes)
        outer = np.ones(len(degrees))
        for axis, width in zip(axes, self.window, strict=True):
            outer *= self.source[axis] / degrees[:, axis] + np.where(degrees[:, axis] > 1, width, 0)
        halo = (outer - inner) * _part(self.source, degrees, range(self.spatial))
        return np.asarray(_part(extents, degrees) + WORD_OPERATIONS * halo)


@dataclass(frozen=True, slots=True)
class Elementwise:
    """One operation an element, and `pointwise` more: (1 + q) T."""

    pointwise: int = 0

    def of(self, extents: Extents, degrees: Degrees) -> Floats:
        return (1.0 + self.pointwise) * _part(extents, degrees)


@dataclass(frozen=True, slots=True)
class Reduction:
    """A mean (or another reduction) over `axes`, of which the paper counts the exchange alone:
    AR(T, Π c of `axes`).
    """

    axes: Axes

    def of(self, extents: Extents, degrees: Degrees) -> Floats:
        return all_reduce(_part(extents, degrees), _parts(degrees, self.axes))


@dataclass(frozen=True, slots=True)
class Movement:
    """Data put elsewhere, free in itself: concatenation, stacking, flattening."""

    def of(self, extents: Extents, degrees: Degrees) -> Floats:
        return np.zeros(len(degrees))


def transfer(extents: Extents, source: Degrees, target: Degrees) -> Floats:
    """t_x of an edge: 2 r · max(0, |target's part| − |overlap|), forward and backward; [source,
    target configurations].

    `source` and `target` are the parts of each dimension of the tensor, [configurations,
    dimensions]. Parts are taken to lie as well as they can; where the target is on more devices
    than the source, some device has no overlap.
    """
    sizes = np.array(extents, dtype=np.float64)
    have = sizes / source
    want = sizes / target
    overlap = np.ones((len(source), len(target)))
    for dimension in range(len(extents)):
        overlap *= np.minimum(have[:, None, dimension], want[None, :, dimension])
    overlap[source.prod(axis=1)[:, None] < target.prod(axis=1)[None, :]] = 0.0
    return np.asarray(2.0 * WORD_OPERATIONS * np.maximum(want.prod(axis=1)[None, :] - overlap, 0.0))


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a layer's iteration space; `whole` where the paper does not cut it."""

    name: str
    extent: int
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Tensor:
    """Operand or result of a layer: each dimension's extent, and the layer's axes that cut it
    together.
    """

    extents: Extents
    axes: tuple[Axes, ...]

    def degrees(self, layer: Degrees) -> Degrees:
        """Parts of each dimension, [configurations, dimensions], given the parts of the layer's
        axes.
        """
        columns = [_parts(layer, axes) for axes in self.axes]
        return np.stack(columns, axis=1) if columns else np.ones((len(layer), 0), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Layer:
    """Computation of a layer at its place in the model. Layers are equal, and have equal costs,
    whatever their place.

    `contiguous` keeps configurations that cut the axes, taken row-major, into contiguous pieces
    (flattening). `nodes` of the ONNX graph are those it stands for. `aliases` are pairs of an axis
    and the name that its nodes have for it, where no tensor tells. `inside` is the node that
    computes the layer on its way to a result which is another layer's.
    """

    axes: tuple[Axis, ...]
    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]
    cost: Cost
    contiguous: bool = False
    name: str = field(default="", compare=False)
    nodes: tuple[int, ...] = field(default=(), compare=False)
    aliases: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    inside: int | None = field(default=None, compare=False)

    @property
    def extents(self) -> Extents:
        return tuple(axis.extent for axis in self.axes)


@dataclass(frozen=True, slots=True)
class LayerEdge:
    """Result `result` of layer `source` is operand `operand` of layer `target`."""

    source: int
    target: int
    result: int
    operand: int


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value of the ONNX graph lies: a layer's result, and for each dimension of the value
    those of the result that make it up, outer to inner.
    """

    layer: int
    result: int
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """The paper's computation graph: at most one edge between two layers, ordered as the layers
    are.
    """

    layers: tuple[Layer, ...]
    edges: tuple[LayerEdge, ...]
    places: Mapping[str, Place]
    """Of values of the ONNX graph; inputs, parameters and what costs nothing to compute have none.
    """
    cutoff: int
    """The least extent of a part: 4 for networks with convolutions, 1 for others, as the prototype
    has it.
    """

    def ends(self, edge: LayerEdge) -> tuple[Tensor, Tensor]:
        """The tensor of an edge as it is written and as it is read."""
        return self.layers[edge.source].results[edge.result], self.layers[edge.target].operands[
            edge.operand
        ]


@dataclass(frozen=True, slots=True, eq=False)
class PaperTables:
    """The configurations of each layer of a graph, and costs of layers and edges as solvers take
    them.
    """

    graph: LayerGraph
    configurations: tuple[Degrees, ...]
    model: MinSum


def build_tables(graph: LayerGraph, devices: int) -> PaperTables:
    """The tables of `graph` on `devices` devices; equal layers share their vectors, and equal edges
    their matrices.
    """
    kinds: dict[Layer, int] = {}
    kind_of = [kinds.setdefault(layer, len(kinds)) for layer in graph.layers]
    degrees = []
    for layer in kinds:
        found = configurations(
            [1 if axis.whole else axis.extent for axis in layer.axes], devices, graph.cutoff
        )
        degrees.append(found[contiguous(found, layer.extents)] if layer.contiguous else found)
    costs = [
        layer.cost.of(layer.extents, found) for layer, found in zip(kinds, degrees, strict=True)
    ]
    matrices: dict[Hashable, Floats] = {}
    edges = []
    for edge in graph.edges:
        source = kind_of[edge.source]
        target = kind_of[edge.target]
        key = (source, edge.result, target, edge.operand)
        if key not in matrices:
            written, read = graph.ends(edge)
            matrices[key] = transfer(
                written.extents, written.degrees(degrees[source]), read.degrees(degrees[target])
            )
        edges.append(Edge(edge.source, edge.target, matrices[key]))
    model = MinSum(tuple(costs[kind] for kind in kind_of), tuple(edges))
    return PaperTables(graph, tuple(degrees[kind] for kind in kind_of), model)
