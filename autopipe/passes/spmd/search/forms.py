"""The layouts in which a node's configurations read its operands and leave its results."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.graph import Graph, Node
from autopipe.ir.layout import Layout, operand_under, result_under
from autopipe.ir.space import Dimension, Space, Windowed
from autopipe.passes.spmd.search.configurations import Splits
from autopipe.passes.spmd.search.lying import Axes, MeshPositions, mesh_positions
from autopipe.passes.spmd.search.numbering import Integers, combined, numbered


@dataclass(frozen=True, slots=True, eq=False)
class TensorLayouts:
    """One tensor under each configuration of a node: few different layouts, and which of them each one has."""

    layouts: tuple[Layout, ...]
    of: NDArray[np.int64]
    elements: Integers
    """Of one device's block of each layout."""


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The different layouts of one dimension alone, or of no dimension with shares; and which each configuration has.

    How a dimension is cut does not depend on the others, so that a tensor's layouts are put together from few parts.
    """

    layouts: list[Layout]
    of: Integers


@dataclass(frozen=True, slots=True, eq=False)
class LayoutTable:
    """The forms of nodes on `group` devices.

    But for windows how a tensor is cut does not depend on its extents: those cut alike are worked out once. Equal
    configurations are to be the same object.
    """

    group: int
    _lying: dict[int, tuple[tuple[Splits, ...], MeshPositions]] = field(default_factory=dict)
    """Configurations, held so that their place stays their own, and where axes lie in them."""
    _known: dict[Hashable, TensorLayouts] = field(default_factory=dict)

    def operand(
        self, graph: Graph, node: Node, position: int, space: Space, configurations: tuple[Splits, ...]
    ) -> TensorLayouts:
        """How a node wants its operand at `position`."""
        shape, dimensions = graph.type_of(node.inputs[position]).shape, space.operands[position] or ()
        windows = space.windows_of(position)
        alike = id(configurations), dimensions, windows, shape if windows else ()
        lying = self.mesh_positions_of(configurations)
        return self._form(alike, shape, lying, lambda: _parts(lying, dimensions, shape, windows))

    def result(
        self, graph: Graph, node: Node, position: int, space: Space, configurations: tuple[Splits, ...]
    ) -> TensorLayouts:
        """How a node leaves its result at `position`, shares of sums and means included."""
        shape, dimensions = graph.type_of(node.outputs[position]).shape, space.results[position] or ()
        kinds = tuple((axis.name, axis.kind) for axis in space.axes)
        lying = self.mesh_positions_of(configurations)

        def parts() -> list[_Part]:
            present = {name for dimension in dimensions for name in dimension}
            reduced = [name for name, _ in kinds if name not in present]
            shares = _part(lying, reduced, lambda axes: result_under(space, (), (), axes))
            return [*_parts(lying, dimensions, shape), shares]

        return self._form((id(configurations), dimensions, kinds), shape, lying, parts)

    def mesh_positions_of(self, configurations: tuple[Splits, ...]) -> MeshPositions:
        """Where axes lie in each of `configurations`."""
        if id(configurations) not in self._lying:
            self._lying[id(configurations)] = configurations, mesh_positions(configurations, self.group)
        return self._lying[id(configurations)][1]

    def _form(
        self, alike: Hashable, shape: tuple[int, ...], lying: MeshPositions, parts: Callable[[], list[_Part]]
    ) -> TensorLayouts:
        """The layouts of a tensor of `shape`; tensors that are cut `alike` are worked out once."""
        key = alike, shape
        if key not in self._known:
            if alike not in self._known:
                self._known[alike] = _together(shape, parts(), lying.configurations)
            form = self._known[alike]
            if form.layouts[0].shape != shape:
                layouts = (Layout(shape, each.cuts, each.sums, each.means) for each in form.layouts)
                more = math.prod(shape), max(1, math.prod(form.layouts[0].shape))
                form = TensorLayouts(tuple(layouts), form.of, form.elements * more[0] // more[1])
            self._known[key] = form
        return self._known[key]


def _parts(
    lying: MeshPositions, dimensions: tuple[Dimension, ...], shape: tuple[int, ...], windows: Sequence[Windowed] = ()
) -> list[_Part]:
    """How each dimension is cut."""
    found = []
    for place, (dimension, extent) in enumerate(zip(dimensions, shape, strict=True)):
        own = tuple(replace(each, dimension=0) for each in windows if each.dimension == place)
        names = [*dimension, *(each.axis for each in own)]
        found.append(_part(lying, names, _one_dimension(dimension, extent, own)))
    return found


def _one_dimension(dimension: Dimension, extent: int, windows: Sequence[Windowed]) -> Callable[[Axes], Layout]:
    return lambda axes: operand_under((dimension,), (extent,), axes, windows)


def _part(lying: MeshPositions, names: Iterable[str], make: Callable[[Axes], Layout]) -> _Part:
    """The layouts that `make` gives, which depend on where the axes `names` lie."""
    cases, case_of = lying.cases(names)
    layouts, of = numbered(map(make, cases))
    return _Part(layouts, of[case_of])


def _together(shape: tuple[int, ...], parts: Sequence[_Part], configurations: int) -> TensorLayouts:
    """The layouts of a tensor whose dimensions, and then whose shares if it has any, are `parts`."""
    firsts, of = combined(((len(part.layouts), part.of) for part in parts), configurations)
    elements = np.ones(len(firsts), dtype=np.int64)
    for part in parts:
        elements *= np.array([each.local_elements for each in part.layouts], dtype=np.int64)[part.of[firsts]]
    columns = [[part.layouts[number] for number in part.of[firsts].tolist()] for part in parts]
    cut, shared = columns[: len(shape)], columns[len(shape) :]
    ways = zip(*([each.cuts[0] for each in column] for column in cut), strict=True) if cut else [()] * len(firsts)
    layouts = [Layout(shape, cuts) for cuts in ways]
    for shares in shared:
        layouts = [
            Layout(shape, layout.cuts, share.sums, share.means) if share.is_partial else layout
            for layout, share in zip(layouts, shares, strict=True)
        ]
    if any(each.windows for part in parts for each in part.layouts):
        rows = zip(*cut, strict=True)
        layouts = [_windowed(layout, row) for layout, row in zip(layouts, rows, strict=True)]
    return TensorLayouts(tuple(layouts), of, elements)


def _windowed(layout: Layout, dimensions: Sequence[Layout]) -> Layout:
    """The layout read through the windows of its dimensions."""
    windows = tuple(each.windows[0] if each.windows else None for each in dimensions)
    if not any(windows):
        return layout
    fill = next((each.fill for each in dimensions if each.fill), 0.0)
    return Layout(layout.shape, layout.cuts, windows=windows, fill=fill)
