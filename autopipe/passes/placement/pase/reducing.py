"""From what a node leaves to what its readers want: shares are added up on the way, as lowering does it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.layout import Layout, MeshAxes, degree_of, merged
from autopipe.passes.cost.communication import Cost
from autopipe.passes.cost.relayout import reduction_cost
from autopipe.passes.lower.relayout import scattered, scattered_along
from autopipe.passes.placement.pase.lack import Pair, pairs_by_dimension
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

    def to_reader(self, sources: Sequence[Layout], targets: Sequence[Layout], size_bytes: float) -> Floats:
        """From each of `sources`, shares of sums among them, to each of `targets`, which nobody but it wants.

        Shares are scattered where the target cuts further. Of a tensor of `size_bytes`; [sources, targets].
        """
        if not any(source.is_partial for source in sources):
            return self.moves.seconds(sources, targets, size_bytes)
        evens = [target.even() for target in targets]
        key = tuple((each.cuts, each.sums, each.means) for each in sources), tuple(each.cuts for each in evens)
        if key not in self._ways:
            self._ways[key] = _found(sources, evens)
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


def _found(sources: Sequence[Layout], targets: Sequence[Layout]) -> _Ways:
    """How shares are added up for each pair: equally for all targets along whose cuts they scatter equally."""
    additions: dict[_Addition, int] = {}
    held: dict[Layout, int] = {}
    addition_of = np.zeros((len(sources), len(targets)), dtype=np.int64)
    held_of = np.zeros_like(addition_of)
    pairs = pairs_by_dimension(sources, targets)
    for row, source in enumerate(sources):
        of = _alike(source.partial_over, pairs, row, len(targets))
        for first in np.unique(of, return_index=True)[1].tolist():
            addition, left = _addition(source, targets[first])
            alike = of == of[first]
            addition_of[row, alike] = additions.setdefault(addition, len(additions))
            held_of[row, alike] = held.setdefault(left, len(held))
    return _Ways(list(additions), list(held), addition_of, held_of)


def _alike(shares: MeshAxes, pairs: Sequence[Pair], row: int, targets: int) -> NDArray[np.int64]:
    """A number for each target, the same for those along whose dimensions the source of a row is scattered equally."""
    found = np.zeros(targets, dtype=np.int64)
    for pair in pairs if shares else ():
        now = pair.held.axes[pair.held.of[row]]
        known: dict[MeshAxes, int] = {}
        ways = [known.setdefault(scattered_along(now, wanted, shares), len(known)) for wanted in pair.wanted.axes]
        if len(known) > 1:
            found = found * len(known) + np.array(ways)[pair.wanted.of]
    return found


def _addition(source: Layout, target: Layout) -> tuple[_Addition, Layout]:
    """What adds up the shares of `source` on the way to `target`, and what is held then (see `reductions`)."""
    if not source.is_partial:
        return (), source
    cuts, parts, left = list(source.cuts), source.parts, source.partial_over
    steps = []
    for inside, dimension, rest in scattered(source.cuts, left, target.cuts):
        steps.append(("reduce_scatter", inside, parts))
        cuts[dimension], left = merged(cuts[dimension] + inside), rest
        parts *= degree_of(inside)
    if left:
        steps.append(("all_reduce", merged(left), parts))
    return tuple(steps), Layout(source.shape, tuple(cuts))
