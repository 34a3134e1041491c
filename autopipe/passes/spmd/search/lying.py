"""Where the axes of a space lie in a group's mesh under each of many configurations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autopipe.ir.layout import MeshAxis
from autopipe.passes.spmd.search.configurations import Splits
from autopipe.passes.spmd.search.numbering import Integers, combined, distinct

Axes = dict[str, MeshAxis]
"""Axes of the mesh, outer to inner, by the axes of a space that lie along them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """Where one axis lies: the different places, the first of them nowhere, and which each configuration has."""

    known: list[MeshAxis | None]
    of: Integers


@dataclass(frozen=True, slots=True, eq=False)
class MeshPositions:
    """Axes that any of the configurations splits."""

    configurations: int
    _places: dict[str, _Places]

    def degrees(self, axes: Iterable[str]) -> Integers:
        """Into how many parts `axes` are cut together, [configurations]."""
        found = np.ones(self.configurations, dtype=np.int64)
        for name in axes:
            if name in self._places:
                places = self._places[name]
                found *= np.array([1 if each is None else each.degree for each in places.known])[places.of]
        return found

    @property
    def degree(self) -> Integers:
        """Into how many parts a whole space is cut, [configurations]."""
        return self.degrees(self._places)

    def cases(self, names: Iterable[str]) -> tuple[list[Axes], Integers]:
        """The different ways in which axes of these names lie, and which of them each configuration has."""
        own = {name: self._places[name] for name in names if name in self._places}
        columns = ((len(places.known), places.of) for places in own.values())
        firsts, of = combined(columns, self.configurations)
        ways = []
        for row in firsts.tolist():
            lying = ((name, places.known[places.of[row]]) for name, places in own.items())
            split = [(name, axis) for name, axis in lying if axis is not None]
            ways.append(dict(sorted(split, key=lambda each: -each[1].stride)))
        return ways, of


def mesh_positions(configurations: Sequence[Splits], group: int) -> MeshPositions:
    """The axes of `configurations`, each outer to inner over `group` devices (`ir.layout.mesh_of`)."""
    rows: dict[str, list[int]] = defaultdict(list)
    marks: dict[str, list[int]] = defaultdict(list)
    for row, splits in enumerate(configurations):
        stride = group
        for split in splits:
            stride //= split.degree
            rows[split.axis].append(row)
            marks[split.axis].append(split.degree * (group + 1) + stride)
    found = {}
    for name, where in rows.items():
        of = np.zeros(len(configurations), dtype=np.int64)
        known, numbers = distinct(np.array(marks[name], dtype=np.int64))
        of[where] = numbers + 1
        found[name] = _Places([None, *(MeshAxis(*divmod(mark, group + 1)) for mark in known.tolist())], of)
    return MeshPositions(len(configurations), found)
