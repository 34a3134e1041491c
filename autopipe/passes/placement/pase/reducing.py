"""From what a node leaves to what its only reader wants: shares are added up on the way, as lowering does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopipe.ir.layout import Layout, MeshAxes
from autopipe.passes.cost.relayout import relayout_seconds
from autopipe.passes.lower.relayout import reductions
from autopipe.passes.placement.pase.moves import Floats, Moves


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """Seconds of changes of layout with what has to be added up before."""

    moves: Moves
    _toward: dict[Any, MeshAxes] = field(default_factory=dict)

    def to_reader(self, sources: Sequence[Layout], targets: Sequence[Layout], size_bytes: float) -> Floats:
        """From each of `sources`, shares of sums among them, to each of `targets`, which nobody but it wants.

        Shares are scattered where the target cuts further. Of a tensor of `size_bytes`; [sources, targets].
        """
        held: dict[Layout, int] = {}
        rows = np.zeros((len(sources), len(targets)), dtype=np.int64)
        adding = np.zeros((len(sources), len(targets)))
        for place, source in enumerate(sources):
            if not source.is_partial:
                rows[place] = held.setdefault(source, len(held))
                continue
            known: dict[tuple[MeshAxes, ...], tuple[int, float]] = {}
            for column, target in enumerate(targets):
                key = self._scattered(source, target)
                if key not in known:
                    left, seconds = self._added(source, target, size_bytes)
                    known[key] = held.setdefault(left, len(held)), seconds
                rows[place, column], adding[place, column] = known[key]
        moving = self.moves.seconds(list(held), targets, size_bytes)
        return adding + np.take_along_axis(moving, rows, axis=0)

    def to_all(self, sources: Sequence[Layout], targets: Sequence[Layout], size_bytes: float) -> Floats:
        """The same where others want the value, too: shares are added up to copies first."""
        whole = [self._added(source, source.reduced(), size_bytes) for source in sources]
        adding = np.array([seconds for _, seconds in whole])
        return adding[:, None] + self.moves.seconds([left for left, _ in whole], targets, size_bytes)

    def _added(self, source: Layout, target: Layout, size_bytes: float) -> tuple[Layout, float]:
        """What is held once shares have been added up on the way to `target`, and the seconds that took."""
        if not source.is_partial:
            return source, 0.0
        steps = reductions(source, target)
        width = size_bytes / max(1, int(np.prod(source.shape)))
        seconds = (relayout_seconds(self.moves.cluster, self.moves.devices, step, width) for step in steps)
        return steps[-1].result, sum(seconds)

    def _scattered(self, source: Layout, target: Layout) -> tuple[MeshAxes, ...]:
        """Along which axes each dimension is scattered, if it alone were: what tells targets apart for adding up."""
        return tuple(
            self._inside(source.partial_over, now, wanted) for now, wanted in zip(source.cuts, target.cuts, strict=True)
        )

    def _inside(self, shares: MeshAxes, now: MeshAxes, wanted: MeshAxes) -> MeshAxes:
        key = shares, now, wanted
        if key not in self._toward:
            line = Layout((1,), (now,), shares)
            steps = reductions(line, Layout((1,), (wanted,)))
            self._toward[key] = steps[0].over if steps[0].kind == "reduce_scatter" else ()
        return self._toward[key]
