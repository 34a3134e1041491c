"""Level O2: cones, segments between critical nodes by integer programs, dynamic programming over segments."""

from __future__ import annotations

from dataclasses import replace

from autopipe.passes.placement.tepdist.by_segments import SAME, by_segments
from autopipe.passes.placement.tepdist.critical import ranks
from autopipe.passes.placement.tepdist.filling import fill_cones
from autopipe.passes.placement.tepdist.level import Level
from autopipe.passes.placement.tepdist.pricing import CLOSE, PricedSearch
from autopipe.passes.solvers.min_sum import Assignment, MinSum
from autopipe.passes.solvers.min_sum.model import priced


class O2(Level):
    """Three levels: cones, segments, the whole graph. Within a memory limit bytes have a price."""

    def least(self, model: MinSum) -> Assignment:
        """The choice of least cost; proven, but for time, and for many wide variables."""
        return self.at_price(model, 0.0)

    def at_price(self, model: MinSum, rate: float) -> Assignment:
        """The same with a price for bytes."""
        cones = fill_cones(model, rate)
        rank, close = ranks(model)[list(cones.roots)], CLOSE / 2 if rate else SAME
        found = by_segments(priced(cones.model, rate), rank, self.programs, self.end, close)
        return replace(found, choice=cones.expanded(found.choice))

    def within(self, model: MinSum, found: PricedSearch) -> Assignment:
        """Result of the search for a price."""
        return found.answer
