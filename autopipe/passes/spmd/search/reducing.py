"""From what a node leaves to what its readers want: shares are added up on the way, as lowering does it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopipe.ir.layout import Layout
from autopipe.passes.spmd.search.adding import Addition, Collectives, SumReduction
from autopipe.passes.spmd.search.moves import Floats, ReshardTable
from autopipe.passes.spmd.search.scattering import ReductionPaths, reduction_paths


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """Seconds of changes of layout, with what has to be added up before."""

    moves: ReshardTable
    collectives: Collectives
    _ways: dict[Hashable, tuple[ReductionPaths, SumReduction]] = field(default_factory=dict)

    def to_reader(self, sources: Sequence[Layout], targets: Sequence[Layout], size_bytes: float) -> Floats:
        """From each of `sources`, shares of sums among them, to each of `targets`, which nobody but it wants.

        Shares are scattered where the target cuts further. Of a tensor of `size_bytes`; [sources, targets].
        """
        if not any(source.is_partial for source in sources):
            return self.moves.seconds(sources, targets, size_bytes)
        evens = [target.even() for target in targets]
        key = tuple([(each.cuts, each.sums, each.means) for each in sources]), tuple([each.cuts for each in evens])
        if key not in self._ways:
            found = reduction_paths(sources, evens)
            self._ways[key] = found, self.collectives.adding(found.additions)
        ways, adding = self._ways[key]
        moving = self.moves.seconds(ways.held, targets, size_bytes)
        return adding.seconds(size_bytes)[ways.addition_of] + np.take_along_axis(moving, ways.held_of, axis=0)

    def to_all(self, sources: Sequence[Layout], targets: Sequence[Layout], size_bytes: float) -> Floats:
        """The same where others want the value, too: shares are added up to copies first."""
        moving = self.moves.seconds([each.reduced() for each in sources], targets, size_bytes)
        return self.to_copies(sources, size_bytes)[:, None] + moving

    def to_copies(self, sources: Sequence[Layout], size_bytes: float) -> Floats:
        """Cost of adding up the partial sums of each of `sources`, cut as they are."""
        return self.collectives.adding([_all_reduced(each) for each in sources]).seconds(size_bytes)


def _all_reduced(layout: Layout) -> Addition:
    return (("all_reduce", layout.partial_over, layout.parts),) if layout.is_partial else ()
