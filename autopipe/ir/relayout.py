"""A change of layout that one collective makes."""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.ir.layout import Layout, MeshAxes, degree_of


@dataclass(frozen=True, slots=True)
class Relayout:
    """One change of a value's layout: what a group does together, over the axes `over` of its mesh.

    `kind` is `all_reduce` (shares of a sum → the sum), `reduce_scatter` (shares → blocks of the sum along `dimension`),
    `all_gather` (blocks along `dimension` → all of it), `slice` (of a copy this device's block; nothing is sent),
    `all_to_all` (blocks along `origin` → blocks along `dimension`) or `redistribute` (any blocks → any blocks: what a
    device lacks is sent by a device near by that has it). `slice` and `redistribute` also lead to blocks that are read
    through windows; a slice is then over no axes in particular.
    """

    kind: str
    source: Layout
    result: Layout
    over: MeshAxes = ()
    dimension: int = 0
    origin: int = 0

    @property
    def divisor(self) -> int:
        """Divisor of a sum that stands for a mean."""
        return degree_of(self.source.means) // degree_of(self.result.means)
