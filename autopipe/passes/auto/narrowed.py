"""Finer forms of the best grid, in place of a search that is left out as a whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from autopipe.passes.auto.budget import LeftOutError
from autopipe.passes.auto.candidate import Candidate
from autopipe.passes.placement.grid import Grid

if TYPE_CHECKING:
    from autopipe.passes.auto.search import PlanSearch


def refine(search: PlanSearch) -> Iterator[Candidate]:
    """Grids with chunks that were left out, with the pipeline, micro-batches and the rest of the best grid without."""
    best = search.best
    if best is None or best.placed is None or not isinstance(best.candidate.strategy, Grid):
        return
    pipeline, count = len(best.placed.placement.stages), best.placed.problem.micro_batches
    for each in search.tried:
        form = each.candidate.strategy
        is_left_out = isinstance(each.refused, LeftOutError) and each.candidate == Candidate(form)
        if is_left_out and isinstance(form, Grid) and pipeline > 1:
            yield dataclasses.replace(
                best.candidate, strategy=dataclasses.replace(form, pipeline=pipeline), micro_batches=count
            )
