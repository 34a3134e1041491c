"""The search for a division of a flow's operators: the best line, then an integer program that may do better."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from autopipe.ir.errors import InfeasibleError
from autopipe.passes.placement.tepdist.division.downsets import (
    Members,
    best_over_downsets,
    downsets,
    evenest_over_downsets,
    possible_stages,
)
from autopipe.passes.placement.tepdist.division.flow import Flow, Places
from autopipe.passes.placement.tepdist.division.groups import coarsened, grouped
from autopipe.passes.placement.tepdist.division.line import best_line, is_any_line, least_limit
from autopipe.passes.placement.tepdist.division.program import balance_program, crossing_program
from autopipe.passes.placement.tepdist.division.windows import Windows
from autopipe.passes.solvers.milp import SolverName, solve

_CHEAP = 0.01
"""Operators that take at most this share of a stage's mean work may join a neighbour."""
_MOST_OPEN = 5000
"""Questions of "is it in a later stage than this?" up to which an integer program has all of them."""
_MOST_DOWNSETS = 6000
_MOST_PAIRS = 2_000_000
"""Downsets, and pairs of them that may begin and end a stage, up to which all are gone through."""
_NODES = 1000
"""Of an integer program's search tree: what ends it on a machine that is fast enough."""
_SAME = 1e-9
"""Bytes and work that differ by no more than this share are equal."""
_ROUNDING = 1e-6
"""Share of its limit by which an integer program's answer may leave a stage above it."""


@dataclass(frozen=True, slots=True)
class Division:
    """The stage of each operator, and what is known of it: see `StageDivision`."""

    stage: Places
    bound: float
    line_bytes: float
    groups: int


@dataclass(frozen=True, slots=True)
class DivisionProblem:
    """Problem of a division: stages within `windows` that take at most (1 + `unbalance`) times the mean work."""

    flow: Flow
    stages: int
    windows: Windows
    unbalance: float
    end: float
    """When integer programs end, by `time.monotonic`."""
    solver: SolverName

    def run(self) -> Division:
        """The division that crosses least. Raises InfeasibleError, with the smallest unbalance that has one."""
        working = int((self.flow.work > 0).sum())
        if working < self.stages:
            raise InfeasibleError(
                f"{working} operators cannot be divided into {self.stages} stages", hint="take fewer stages"
            )
        limit = float(self.flow.work.sum()) / self.stages * (1 + self.unbalance)
        start = line = best_line(self.flow, self.stages, limit, self.windows.first, self.windows.last)
        if start is None:
            start = self._balanced(limit)
        ceiling = self.flow.crossing(start)
        line_bytes = np.inf if line is None else ceiling
        group = self._groups(limit, ceiling, line is not None)
        coarse, windows = coarsened(self.flow, group), self.windows.of_groups(group)
        stage, bound = self._divided(coarse, windows, limit, group, start)
        if line is not None and self.flow.crossing(stage) >= line_bytes * (1 - _SAME):
            stage = self._evenest(limit, line, coarse, group)
        crossing = self.flow.crossing(stage)
        # A line of single operators may cross less than any division of the groups, which then proves nothing of it.
        bound = min(bound, crossing) if bound <= crossing * (1 + _SAME) else 0.0
        return Division(stage, bound, line_bytes, coarse.operators)

    def _groups(self, limit: float, ceiling: float, is_line: bool) -> Places:
        """Groups that can be divided under the limit, as far as that is seen by their line."""
        for cheap in (_CHEAP * limit, 0.0):
            group = grouped(self.flow, self.windows, cheap, ceiling)
            coarse, windows = coarsened(self.flow, group), self.windows.of_groups(group)
            if not is_line or is_any_line(coarse, self.stages, limit, windows.first, windows.last):
                break
        return group

    def _divided(
        self, coarse: Flow, windows: Windows, limit: float, group: Places, start: Places
    ) -> tuple[Places, float]:
        """The best division of the groups that is found, `start` if that is none worse, and what is proven."""
        full = windows.under(coarse, self.stages, limit)
        if (full.last < full.first).any():
            return start, 0.0
        members, bound = few_downsets(coarse, limit), 0.0
        if full.open <= _MOST_OPEN:
            stage, bound = self._programmed(coarse, full, limit, group, 1.0 if members is None else 1 / 3)
            start = self._better(start, stage, limit)
        if self.flow.crossing(start) <= bound * (1 + _SAME):
            return start, bound
        if members is not None and time.monotonic() < self.end:
            best = best_over_downsets(coarse, members, self.stages, limit, windows)
            if best is not None:
                return self._better(start, best[group], limit), coarse.crossing(best)
        if full.open > _MOST_OPEN:
            centre = np.zeros(coarse.operators, dtype=np.int64)
            np.maximum.at(centre, group, start)
            stage, _ = self._programmed(coarse, full.near(centre, 1), limit, group, 1.0)
            start = self._better(start, stage, limit)
        return start, bound

    def _programmed(
        self, coarse: Flow, windows: Windows, limit: float, group: Places, share: float
    ) -> tuple[Places | None, float]:
        """Solve an integer program in a share of the time; returns the division, and the bound proven for these
        windows.
        """
        program, model = crossing_program(coarse, self.stages, windows, limit)
        answer = solve(model, share * (self.end - time.monotonic()), solver=self.solver, nodes=_NODES)
        return program.stage(answer.values)[group] if answer.found else None, max(answer.bound, 0.0)

    def _better(self, one: Places, other: Places | None, limit: float) -> Places:
        """The other division, if it crosses less and keeps the limit."""
        if other is None or self.flow.loads(other, self.stages).max() > limit * (1 + _ROUNDING):
            return one
        return other if self.flow.crossing(other) < self.flow.crossing(one) * (1 - _SAME) else one

    def _balanced(self, limit: float) -> Places:
        """A division under the limit that is no line.

        Raises InfeasibleError where there is none, with the smallest unbalance that has one.
        """
        mean = float(self.flow.work.sum()) / self.stages
        least = least_limit(self.flow, self.stages, self.windows.first, self.windows.last)
        group = grouped(self.flow, self.windows, 0.0, np.inf)
        stage, proven = self._evenest_groups(group, min(least * (1 + _SAME), float(self.flow.work.sum())))
        if stage is not None:
            largest = float(self.flow.loads(stage[group], self.stages).max())
            if largest <= limit * (1 + _ROUNDING):
                return stage[group]
            least = min(least, largest)
        if not np.isfinite(least):
            raise InfeasibleError(f"no division into {self.stages} stages was found that keeps the constraints")
        smallest = "smallest unbalance" if proven else "smallest unbalance that was found"
        raise InfeasibleError(
            f"operators cannot be divided into {self.stages} stages that take at most {self.unbalance:.1%} more than "
            f"the mean: the {smallest} is {np.ceil((least / mean - 1) * 1000 - 0.002) / 10:.1f}%",
            hint="allow it, or take another number of stages",
        )

    def _evenest_groups(self, group: Places, limit: float) -> tuple[Places | None, bool]:
        """The stages of the groups, none above the limit, whose largest takes least, and whether that is proven."""
        coarse = coarsened(self.flow, group)
        windows = self.windows.of_groups(group).under(coarse, self.stages, limit)
        members = few_downsets(coarse, limit)
        if members is not None:
            return evenest_over_downsets(coarse, members, self.stages, limit, windows), True
        if windows.open > _MOST_OPEN:
            return None, False
        program, model = balance_program(coarse, self.stages, windows)
        answer = solve(model, (self.end - time.monotonic()) / 2, solver=self.solver, nodes=_NODES)
        return program.stage(answer.values) if answer.found else None, answer.proven

    def _evenest(self, limit: float, line: Places, coarse: Flow, group: Places) -> Places:
        """Of the lines that cross no more than the best, one of groups whose largest stage is about smallest."""
        windows = self.windows.of_groups(group)
        low, most = least_limit(coarse, self.stages, windows.first, windows.last), self.flow.crossing(line)
        limit = min(limit, float(self.flow.loads(line, self.stages).max()))
        while limit - low > 0.005 * limit:
            middle = (low + limit) / 2
            found = best_line(coarse, self.stages, middle, windows.first, windows.last)
            if found is not None and coarse.crossing(found) <= most * (1 + _SAME):
                line, limit = found[group], float(coarse.loads(found, self.stages).max())
            else:
                low = middle
        return line


def few_downsets(flow: Flow, limit: float) -> Members | None:
    """All downsets, where they are few enough to go through all stages of at most `limit` between them."""
    members = downsets(flow, _MOST_DOWNSETS)
    return members if members is not None and possible_stages(flow, members, limit) <= _MOST_PAIRS else None
