"""The cost model of the PaSE paper: layers, the costs of their configurations, and the cost tables
of a graph.

A configuration gives the number of parts into which each axis of a layer's iteration space is split
(section II). The objective is equation 1 of the paper: the sum of the layer costs t_l over all
layers and of the transfer costs t_x over all edges.

Units: costs are operations on one device's part, forward and backward together. A multiply-add is
one operation, and communication counts as the operations that a device executes in the same time.
Volumes are words of 8 bytes. If a degree does not divide a size (the input of a pooling), parts are
fractions of an element, as in the authors' prototype.

Symbols: r = `WORD_OPERATIONS`; T = elements of one device's part of the result; c = number of parts
of an axis; AR(w, c) = cost of an all-reduce of w words on each of c devices (`all_reduce_cost`).
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
"""Number of parts of each axis for each configuration, of shape [configurations, axes]."""
Floats = npt.NDArray[np.float64]
Extents = tuple[int, ...]
Axes = tuple[int, ...]
"""Positions of axes in a layer's iteration space."""

WORD_OPERATIONS = 5000.0
"""r: number of operations that a device executes while one 8-byte word is transferred, for devices
of 10 TFLOP/s and links of 16 GB/s.
"""


def enumerate_configurations(extents: Sequence[int], devices: int, cutoff: int) -> Degrees:
    """Return all configurations with at most `devices` parts in total, of shape [configurations,
    axes], in lexicographic order.

    The number of parts of an axis divides its size, and each part has at least `cutoff` elements;
    otherwise the axis has one part. The first configuration splits nothing.
    """
    degrees = np.ones((1, 0), dtype=np.int64)
    used = np.ones(1, dtype=np.int64)
    for size in extents:
        most = min(size, devices)
        divisors = [
            each for each in range(1, most + 1) if size % each == 0 and size >= each * cutoff
        ] or [1]
        choices = np.array(divisors, dtype=np.int64)
        product = used[:, None] * choices
        before, choice = np.nonzero(product <= devices)
        degrees = np.concatenate((degrees[before], choices[choice, None]), axis=1)
        used = product[before, choice]
    return degrees


def has_contiguous_parts(degrees: Degrees, extents: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Return a boolean array of shape [configurations]: True if a configuration splits a row-major
    tensor of shape `extents` into parts that are contiguous in memory.

    This holds if the outer axes are split into single elements, the next axis into any number of
    parts, and the remaining inner axes are not split.
    """
    single = degrees == np.array(extents, dtype=np.int64)
    outer = np.cumprod(single, axis=1, dtype=bool)
    inside = np.ones_like(outer)
    inside[:, 1:] = outer[:, :-1]
    return np.asarray(((degrees == 1) | inside).all(axis=1))


def all_reduce_cost(words: Floats, degree: Degrees) -> Floats:
    """Return AR(w, c), the cost of a ring all-reduce of w = `words` on each of c = `degree`
    devices, for each configuration: 2 r (w / c)(c - 1).
    """
    return 2.0 * WORD_OPERATIONS * (words / degree) * (degree - 1)


def _part_count(degrees: Degrees, axes: Axes) -> Degrees:
    """Return the total number of parts along `axes`, of shape [configurations]."""
    return np.asarray(degrees[:, axes].prod(axis=1, dtype=np.int64))


def _part_size(extents: Extents, degrees: Degrees, axes: Iterable[int] | None = None) -> Floats:
    """Return the number of elements of one device's part along `axes` (None: along all axes), of
    shape [configurations].
    """
    axes = tuple(range(len(extents)) if axes is None else axes)
    return np.asarray(math.prod(extents[axis] for axis in axes) / _part_count(degrees, axes))


def _other_axes(extents: Extents, axis: int) -> Axes:
    """Return the positions of all axes except `axis`."""
    return tuple(each for each in range(len(extents)) if each != axis)


class Cost(Protocol):
    """The cost t_l of one kind of layer."""

    def operations(self, extents: Extents, degrees: Degrees) -> Floats:
        """Return the cost, in operations, of each configuration in `degrees` for axes of the sizes
        `extents`; of shape [configurations].
        """


@dataclass(frozen=True, slots=True)
class MatmulCost:
    """The cost of a (batched) matmul over groups of axes, for its forward and both matmuls of its
    backward.

        cost = β (3 MNK + 3 q MN + AR(MN, c_k) + AR(MK, c_n) + AR(NK, c_m))

    β, M, N and K are the sizes of a device's part along the batch, row, column and summed axes;
    c_m, c_n and c_k are the numbers of parts along rows, columns and summed axes. q = `pointwise`
    is the number of operations that are applied to each element of the result. Each of them counts
    three times: forward, its derivative, and the multiplication of the chain rule.
    """

    batch: Axes
    rows: Axes
    columns: Axes
    summed: Axes
    pointwise: int = 0

    def operations(self, extents: Extents, degrees: Degrees) -> Floats:
        m, n, k = (
            _part_size(extents, degrees, axes) for axes in (self.rows, self.columns, self.summed)
        )
        cut_m, cut_n, cut_k = (
            _part_count(degrees, axes) for axes in (self.rows, self.columns, self.summed)
        )
        tile = _matmul_cost(m, n, k, cut_m, cut_n, cut_k, self.pointwise)
        return np.asarray(_part_size(extents, degrees, self.batch) * tile)


def _matmul_cost(
    m: Floats, n: Floats, k: Floats, cut_m: Degrees, cut_n: Degrees, cut_k: Degrees, pointwise: int
) -> Floats:
    """Return the cost of `MatmulCost` for β = 1. `m`, `n` and `k` are the sizes of a device's part,
    and `cut_m`, `cut_n` and `cut_k` the numbers of parts.
    """
    work = 3.0 * m * n * k + 3.0 * pointwise * m * n
    return (
        work
        + all_reduce_cost(m * n, cut_k)
        + all_reduce_cost(m * k, cut_n)
        + all_reduce_cost(n * k, cut_m)
    )


@dataclass(frozen=True, slots=True)
class LSTMCost:
    """The cost of equal stacked LSTM layers with axes (layer, step, batch, output units, input
    units).

    Each cell is a matmul with 4n columns and 2k summed elements, for n output and k input units of
    a device's part, and three pointwise operations. Layers on different devices run as a wavefront:
    a layer starts a step when the preceding layer has finished it. The cost includes the transfer
    of each step's output to the next input.
    """

    def operations(self, extents: Extents, degrees: Degrees) -> Floats:
        layers, steps, batch, outs, ins = (extents[axis] / degrees[:, axis] for axis in range(5))
        _, _, _, cut_outs, cut_ins = degrees.T
        rows = _part_count(degrees, (1, 2))
        cell = _matmul_cost(steps * batch, 4 * outs, 2 * ins, rows, cut_outs, cut_ins, pointwise=3)
        common = np.where(cut_ins > cut_outs, 0.0, batch * np.minimum(outs, ins))
        moved = np.maximum(batch * ins - common, 0.0)
        return np.asarray(layers * cell + WORD_OPERATIONS * extents[0] * extents[1] * moved)


@dataclass(frozen=True, slots=True)
class SoftmaxCost:
    """The cost of a softmax over `axis`: 4 T + T D + 2 AR(R, c) + AR(R D, c).

    R is the number of rows of a device's part, D the full size of the axis, and c its number of
    parts.
    """

    axis: int

    def operations(self, extents: Extents, degrees: Degrees) -> Floats:
        rows = _part_size(extents, degrees, _other_axes(extents, self.axis))
        full = extents[self.axis]
        degree = degrees[:, self.axis]
        sums = 2.0 * all_reduce_cost(rows, degree) + all_reduce_cost(rows * full, degree)
        return (4.0 + full) * (rows * (full / degree)) + sums


@dataclass(frozen=True, slots=True)
class CrossEntropyCost:
    """The cost of a softmax over `axis` (the classes) and the cross-entropy of its result: 4 T + 2
    R, plus 2 r R if the classes are split.

    T is the number of logits and R the number of rows of a device's part.
    """

    axis: int

    def operations(self, extents: Extents, degrees: Degrees) -> Floats:
        rows = _part_size(extents, degrees, _other_axes(extents, self.axis))
        degree = degrees[:, self.axis]
        part = rows * (extents[self.axis] / degree)
        return 4.0 * part + 2.0 * rows + np.where(degree > 1, 2.0 * WORD_OPERATIONS * rows, 0.0)


@dataclass(frozen=True, slots=True)
class NormCost:
    """The cost of a normalisation over `axis`: 16 T + 4 AR(T / t, c) + 4 AR(t, number of parts
    along all other axes).

    t is the size of the device's part of the axis, and c the axis's number of parts. The paper
    models batch normalisation as a normalisation over the batch.
    """

    axis: int

    def operations(self, extents: Extents, degrees: Degrees) -> Floats:
        others = _other_axes(extents, self.axis)
        rows = _part_size(extents, degrees, others)
        along = extents[self.axis] / degrees[:, self.axis]
        statistics = all_reduce_cost(rows, degrees[:, self.axis])
        weights = all_reduce_cost(along, _part_count(degrees, others))
        return np.asarray(16.0 * rows * along + 4.0 * (statistics + weights))


@dataclass(frozen=True, slots=True)
class PoolingCost:
    """The cost of a window that moves over the axes from number `spatial` on: T + r · halo.

    Along each split spatial axis, a device needs `window` more elements of the operand than its own
    part has. The halo is the number of these elements. `source` is the shape of the operand.
    """

    spatial: int
    source: Extents
    window: tuple[int, ...]

    def operations(self, extents: Extents, degrees: Degrees) -> Floats:
        axes = range(self.spatial, len(extents))
        inner = _part_size(self.source, degrees, axes)
        outer = np.ones(len(degrees))
        for axis, width in zip(axes, self.window, strict=True):
            outer *= self.source[axis] / degrees[:, axis] + np.where(degrees[:, axis] > 1, width, 0)
        halo = (outer - inner) * _part_size(self.source, degrees, range(self.spatial))
        return np.asarray(_part_size(extents, degrees) + WORD_OPERATIONS * halo)


@dataclass(frozen=True, slots=True)
class ElementwiseCost:
    """The cost of an elementwise operation followed by q = `pointwise` further ones: (1 + q) T."""

    pointwise: int = 0

    def operations(self, extents: Extents, degrees: Degrees) -> Floats:
        return (1.0 + self.pointwise) * _part_size(extents, degrees)


@dataclass(frozen=True, slots=True)
class ReductionCost:
    """The cost of a mean or another reduction over `axes`. The paper counts only its all-reduce:
    AR(T, number of parts along `axes`), where T is the number of elements of the operand's part.
    """

    axes: Axes

    def operations(self, extents: Extents, degrees: Degrees) -> Floats:
        return all_reduce_cost(_part_size(extents, degrees), _part_count(degrees, self.axes))


@dataclass(frozen=True, slots=True)
class FreeCost:
    """The cost 0 of an operation that only rearranges data, such as concatenation, stacking and
    flattening.
    """

    def operations(self, extents: Extents, degrees: Degrees) -> Floats:
        return np.zeros(len(degrees))


def transfer_cost(extents: Extents, source: Degrees, target: Degrees) -> Floats:
    """Return the transfer cost t_x of an edge, forward and backward, of shape [source
    configurations, target configurations].

        t_x = 2 r · max(0, |part that the target needs| − |overlap with the source's part|)

    `extents` is the shape of the transferred tensor. `source` and `target` are the numbers of parts
    of each dimension, of shape [configurations, dimensions]. The model assumes the device
    assignment with the largest overlap. If the target uses more devices than the source, the
    overlap is 0, because some device of the target has no part of the source.
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
    """An axis of a layer's iteration space. An axis with `unsplit` has one part in all
    configurations.
    """

    name: str
    size: int
    unsplit: bool = False


@dataclass(frozen=True, slots=True)
class Tensor:
    """An operand or result of a layer. `extents` contains the size of each dimension, and `axes`,
    for each dimension, the layer's axes that split it.
    """

    extents: Extents
    axes: tuple[Axes, ...]

    def degrees(self, layer: Degrees) -> Degrees:
        """Return the number of parts of each dimension, of shape [configurations, dimensions],
        given the number of parts of each axis of the layer.
        """
        columns = [_part_count(layer, axes) for axes in self.axes]
        return np.stack(columns, axis=1) if columns else np.ones((len(layer), 0), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of the paper's model. Layers that compare equal have equal costs; names and nodes are
    not compared.

    - `contiguous`: True if only configurations that split the row-major axes into contiguous parts
      are permitted (for flattening).
    - `nodes`: the ONNX nodes that the layer represents.
    - `aliases`: (axis name of the layer, axis name of the nodes) pairs that cannot be inferred from
      tensors that both have.
    - `inside`: the ONNX node that computes this layer as an intermediate result, if the node's
      result belongs to another layer.
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
        """The size of each axis."""
        return tuple(axis.size for axis in self.axes)


@dataclass(frozen=True, slots=True)
class LayerEdge:
    """An edge of the layer graph: result number `result` of layer `source` is operand number
    `operand` of layer `target`.
    """

    source: int
    target: int
    result: int
    operand: int


@dataclass(frozen=True, slots=True)
class ValueLocation:
    """Where an ONNX value is found: in result number `result` of layer `layer`.

    `groups` contains, for each dimension of the value, the dimensions of the result that are merged
    into it, from the outermost to the innermost.
    """

    layer: int
    result: int
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """The computation graph of the paper. There is at most one edge between two layers, and it
    leads from the lower to the higher layer number.
    """

    layers: tuple[Layer, ...]
    edges: tuple[LayerEdge, ...]
    locations: Mapping[str, ValueLocation]
    """The locations of ONNX values by name. Inputs, parameters, and values whose computation the
    paper does not count have no location.
    """
    cutoff: int
    """Minimum size of a part along an axis: 4 for networks with convolutions, otherwise 1, as in
    the authors' prototype.
    """

    def edge_tensors(self, edge: LayerEdge) -> tuple[Tensor, Tensor]:
        """Return (written, read): the tensor of an edge as a result of its source, and as an
        operand of its target.
        """
        return self.layers[edge.source].results[edge.result], self.layers[edge.target].operands[
            edge.operand
        ]


@dataclass(frozen=True, slots=True, eq=False)
class PaperTables:
    """The configurations of each layer of a graph, and the costs of layers and edges as a min-sum
    model.
    """

    graph: LayerGraph
    configurations: tuple[Degrees, ...]
    model: MinSum


def build_tables(graph: LayerGraph, devices: int) -> PaperTables:
    """Return the cost tables of `graph` on `devices` devices. Equal layers share their cost
    vectors, and equal edges share their cost matrices.
    """
    layer_classes: dict[Layer, int] = {}
    class_of = [layer_classes.setdefault(layer, len(layer_classes)) for layer in graph.layers]
    degrees = []
    for layer in layer_classes:
        found = enumerate_configurations(
            [1 if axis.unsplit else axis.size for axis in layer.axes], devices, graph.cutoff
        )
        degrees.append(
            found[has_contiguous_parts(found, layer.extents)] if layer.contiguous else found
        )
    costs = [
        layer.cost.operations(layer.extents, found)
        for layer, found in zip(layer_classes, degrees, strict=True)
    ]
    matrices: dict[Hashable, Floats] = {}
    edges = []
    for edge in graph.edges:
        source = class_of[edge.source]
        target = class_of[edge.target]
        key = (source, edge.result, target, edge.operand)
        if key not in matrices:
            written, read = graph.edge_tensors(edge)
            matrices[key] = transfer_cost(
                written.extents, written.degrees(degrees[source]), read.degrees(degrees[target])
            )
        edges.append(Edge(edge.source, edge.target, matrices[key]))
    model = MinSum(tuple(costs[layer_class] for layer_class in class_of), tuple(edges))
    return PaperTables(graph, tuple(degrees[layer_class] for layer_class in class_of), model)
