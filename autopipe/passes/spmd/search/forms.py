"""The layouts in which a node's configurations read its operands and leave its results."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.graph import Graph, Node
from autopipe.ir.layout import Layout, MeshAxis, axes_of, operand_under, result_under
from autopipe.ir.space import Space
from autopipe.passes.spmd.search.configurations import Splits

_Axes = dict[str, MeshAxis]
"""Those of the mesh, by the axes of a space that lie along them."""


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """One tensor under each configuration of a node: few different layouts, and which of them each one has."""

    layouts: tuple[Layout, ...]
    of: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Forms:
    """The forms of nodes on `group` devices.

    But for windows how a tensor is cut does not depend on its extents: those cut alike are worked out once. Equal
    configurations are to be the same object.
    """

    group: int
    _lying: dict[int, tuple[tuple[Splits, ...], _Lying]] = field(default_factory=dict)
    """Configurations, held so that their place stays their own, and where axes lie in them."""
    _known: dict[Hashable, Form] = field(default_factory=dict)

    def operand(
        self, graph: Graph, node: Node, position: int, space: Space, configurations: tuple[Splits, ...]
    ) -> Form:
        """How a node wants its operand at `position`."""
        shape, dimensions = graph.type_of(node.inputs[position]).shape, space.operands[position] or ()
        windows = space.windows_of(position)
        own = {name for dimension in dimensions for name in dimension} | {each.axis for each in windows}

        def make(axes: _Axes) -> Layout:
            return operand_under(dimensions, shape, axes, windows)

        return self._form(configurations, shape, (dimensions, windows, shape if windows else ()), own, make)

    def result(self, graph: Graph, node: Node, position: int, space: Space, configurations: tuple[Splits, ...]) -> Form:
        """How a node leaves its result at `position`, shares of sums and means included."""
        shape, dimensions = graph.type_of(node.outputs[position]).shape, space.results[position] or ()
        kinds = tuple((axis.name, axis.kind) for axis in space.axes)

        def make(axes: _Axes) -> Layout:
            return result_under(space, dimensions, shape, axes)

        return self._form(configurations, shape, (dimensions, kinds), {name for name, _ in kinds}, make)

    def _form(
        self,
        configurations: tuple[Splits, ...],
        shape: tuple[int, ...],
        cutting: Hashable,
        own: set[str],
        make: Callable[[_Axes], Layout],
    ) -> Form:
        """The layouts that `make` gives, which depend on `cutting` and on where the axes `own` lie."""
        alike = id(configurations), cutting
        key = (*alike, shape)
        if key not in self._known:
            if alike not in self._known:
                self._known[alike] = self._made(configurations, own, make)
            form = self._known[alike]
            if form.layouts[0].shape != shape:
                layouts = (Layout(shape, each.cuts, each.sums, each.means) for each in form.layouts)
                form = Form(tuple(layouts), form.of)
            self._known[key] = form
        return self._known[key]

    def _made(self, configurations: tuple[Splits, ...], own: set[str], make: Callable[[_Axes], Layout]) -> Form:
        lying = self._lying_of(configurations)
        firsts, case_of = lying.cases(own)
        found: dict[Layout, int] = {}
        places = [found.setdefault(make(lying.axes[first]), len(found)) for first in firsts.tolist()]
        return Form(tuple(found), np.array(places, dtype=np.int64)[case_of])

    def _lying_of(self, configurations: tuple[Splits, ...]) -> _Lying:
        if id(configurations) not in self._lying:
            self._lying[id(configurations)] = configurations, _lying_in(configurations, self.group)
        return self._lying[id(configurations)][1]


@dataclass(frozen=True, slots=True, eq=False)
class _Lying:
    """Where the axes of a space lie in each of its configurations."""

    axes: list[_Axes]
    numbers: dict[str, NDArray[np.int64]]
    """For each axis that some configuration splits, a number for where it lies, [configurations]."""
    different: int
    """How many numbers there are."""

    def cases(self, own: set[str]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first configurations of those in which the axes `own` lie alike, ascending; and of which each one is."""
        codes = np.zeros(len(self.axes), dtype=np.int64)
        for name in sorted(own & self.numbers.keys()):
            codes = np.unique(codes * self.different + self.numbers[name], return_inverse=True)[1]
        _, firsts, of = np.unique(codes, return_index=True, return_inverse=True)
        order = np.argsort(firsts)
        return firsts[order], np.argsort(order)[of]


def _lying_in(configurations: Sequence[Splits], group: int) -> _Lying:
    axes = [axes_of(each, group) for each in configurations]
    known: dict[MeshAxis | None, int] = {None: 0}
    numbers = {
        name: np.array([known.setdefault(each.get(name), len(known)) for each in axes], dtype=np.int64)
        for name in dict.fromkeys(name for each in axes for name in each)
    }
    return _Lying(axes, numbers, len(known))
