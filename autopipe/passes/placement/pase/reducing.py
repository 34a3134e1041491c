"""From what a node leaves to what its readers want: shares are added up on the way, as lowering does it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.layout import Layout, MeshAxes
from autopipe.passes.cost.communication import Cost
from autopipe.passes.cost.relayout import reduction_cost
from autopipe.passes.lower.relayout import reductions
from autopipe.passes.placement.pase.moves import Floats, Moves

_Addition = tuple[tuple[str, MeshAxes, int], ...]
"""The collectives that add up shares: kind, over which axes, and into how many parts the tensor is cut before."""


@dataclass(frozen=True, slots=True, eq=False)
class _Ways:
    """How each source comes to each target: what adds up its shares, and what is held after that."""

    additions: list[_Addition]
    held: list[Layout]
    addition_of: NDArray[np.int64]
    """[sources, targets]"""
    held_of: NDArray[np.int64]
    """[sources, targets]"""


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """Seconds of changes of layout, with what has to be added up before."""

    moves: Moves
    _costs: dict[tuple[str, MeshAxes], Cost] = field(default_factory=dict)
    _ways: dict[Hashable, _Ways] = field(default_factory=dict)
    _scattered: dict[Hashable, MeshAxes] = field(default_factory=dict)

    def to_reader(self, sources: Sequence[Layout], targets: Sequence[Layout], size_bytes: float) -> Floats:
        """From each of `sources`, shares of sums among them, to each of `targets`, which nobody but it wants.

        Shares are scattered where the target cuts further. Of a tensor of `size_bytes`; [sources, targets].
        """
        if not any(source.is_partial for source in sources):
            return self.moves.seconds(sources, targets, size_bytes)
        evens = [target.even() for target in targets]
        key = tuple((each.cuts, each.sums, each.means) for each in sources), tuple(each.cuts for each in evens)
        if key not in self._ways:
            self._ways[key] = self._found(sources, evens)
        ways = self._ways[key]
        adding = np.array([self._seconds(addition, size_bytes) for addition in ways.additions])
        moving = self.moves.seconds(ways.held, targets, size_bytes)
        return adding[ways.addition_of] + np.take_along_axis(moving, ways.held_of, axis=0)

    def to_all(self, sources: Sequence[Layout], targets: Sequence[Layout], size_bytes: float) -> Floats:
        """The same where others want the value, too: shares are added up to copies first."""
        adding = np.array([self._seconds(_addition(each, each.reduced())[0], size_bytes) for each in sources])
        return adding[:, None] + self.moves.seconds([each.reduced() for each in sources], targets, size_bytes)

    def _seconds(self, addition: _Addition, size_bytes: float) -> float:
        return sum(self._cost(kind, over).seconds(size_bytes / parts) for kind, over, parts in addition)

    def _cost(self, kind: str, over: MeshAxes) -> Cost:
        if (kind, over) not in self._costs:
            self._costs[kind, over] = reduction_cost(self.moves.cluster, self.moves.devices, kind, over)
        return self._costs[kind, over]

    def _found(self, sources: Sequence[Layout], targets: Sequence[Layout]) -> _Ways:
        """How shares are added up for each pair: equally for all targets along whose cuts they scatter equally."""
        additions: dict[_Addition, int] = {}
        held: dict[Layout, int] = {}
        addition_of = np.zeros((len(sources), len(targets)), dtype=np.int64)
        held_of = np.zeros_like(addition_of)
        for row, source in enumerate(sources):
            of = self._alike(source, targets)
            for first in np.unique(of, return_index=True)[1].tolist():
                addition, left = _addition(source, targets[first])
                alike = of == of[first]
                addition_of[row, alike] = additions.setdefault(addition, len(additions))
                held_of[row, alike] = held.setdefault(left, len(held))
        return _Ways(list(additions), list(held), addition_of, held_of)

    def _alike(self, source: Layout, targets: Sequence[Layout]) -> NDArray[np.int64]:
        """A number for each target, the same for those along whose dimensions `source` is scattered equally."""
        if not source.is_partial:
            return np.zeros(len(targets), dtype=np.int64)
        shares = source.partial_over
        numbers: dict[tuple[MeshAxes, ...], int] = {}
        columns = []
        for now, wanted in zip(source.cuts, zip(*(target.cuts for target in targets), strict=True), strict=True):
            inside = {each: self._inside(shares, now, each) for each in set(wanted)}
            columns.append([inside[each] for each in wanted])
        return np.array([numbers.setdefault(key, len(numbers)) for key in zip(*columns, strict=True)], dtype=np.int64)

    def _inside(self, shares: MeshAxes, now: MeshAxes, wanted: MeshAxes) -> MeshAxes:
        """Along which axes one dimension is scattered on the way from `now` to `wanted`."""
        key = shares, now, wanted
        if key not in self._scattered:
            (step, *_) = reductions(Layout((1,), (now,), shares), Layout((1,), (wanted,)))
            self._scattered[key] = step.over if step.kind == "reduce_scatter" else ()
        return self._scattered[key]


def _addition(source: Layout, target: Layout) -> tuple[_Addition, Layout]:
    """What adds up the shares of `source` on the way to `target`, and what is held then."""
    if not source.is_partial:
        return (), source
    steps = reductions(source, target)
    return tuple((step.kind, step.over, step.source.parts) for step in steps), steps[-1].result
