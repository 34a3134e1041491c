"""The exact search within a time limit that several searches share."""

from __future__ import annotations

import time

from autopipe.passes.solvers.min_sum import Assignment, MinSum, solve
from autopipe.passes.spmd.search.tables import Tables

_PATIENCE_S = 2.0
"""Of work within a memory limit, where there is no time limit: several limits are tried, and for a Llama of 80 layers
on 64 devices five times the work finds steps shorter by a thousandth."""


class Exact:
    """Answers tables by a dual bound, pruning, and elimination of what is left; within memory where that is asked for.

    Of `time_limit` seconds, counted from now on, a search within memory takes half of what is left: others follow.
    """

    def __init__(self, time_limit: float | None) -> None:
        self._end = None if time_limit is None else time.monotonic() + time_limit

    def __call__(self, tables: Tables, limit: float | None) -> Assignment:
        """The best choice, of those that need at most `limit` bytes where that is given."""
        return self.solved(tables.model, limit)

    def solved(self, model: MinSum, limit: float | None) -> Assignment:
        """The same of a model."""
        left = None if self._end is None else max(0.01, self._end - time.monotonic())
        if limit is None:
            return solve(model, None, left)
        return solve(model, limit, None if left is None else left / 2, _PATIENCE_S)
