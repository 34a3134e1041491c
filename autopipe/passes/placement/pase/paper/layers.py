"""The paper's graph: layers with an iteration space each, and the tensors that flow between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autopipe.passes.placement.pase.paper.configurations import Degrees, configurations, contiguous
from autopipe.passes.placement.pase.paper.costs import Cost, Floats


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
