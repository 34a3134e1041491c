"""Interface of TePDist's levels of the search for splits: a solver of the tables that every search shares."""

from __future__ import annotations

import copy
import math
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial
from typing import Self

from autopipe.passes.placement.tepdist.critical import ranks
from autopipe.passes.placement.tepdist.pricing import PricedSearch, search_price
from autopipe.passes.placement.tepdist.program import Programs
from autopipe.passes.sharding.tables import Tables
from autopipe.passes.solvers import milp
from autopipe.passes.solvers.min_sum import Assignment, MinSum
from autopipe.passes.solvers.min_sum.model import counted, memory_alone

_PATIENCE_S = 60.0
"""For one integer program, where there is no time limit."""
_LEAST_S = 0.1
"""For one integer program, where time is over."""


class Level(ABC):
    """Answers tables, its integer programs solved by `solver`.

    Of `time_limit` seconds, counted from now on, an answer within memory may take what is left; when they are over, it
    is the best that is known.
    """

    def __init__(self, time_limit: float | None = None, solver: milp.SolverName = "auto") -> None:
        self._end = None if time_limit is None else time.monotonic() + time_limit
        self._solver = solver
        self._enough = math.inf

    def below(self, cost: float) -> Self:
        """The same, but within memory an answer that costs as much is good enough: no better one is looked for."""
        other = copy.copy(self)
        other._enough = cost
        return other

    def __call__(self, tables: Tables, limit: float | None) -> Assignment:
        """The best choice that is found, of those that need at most `limit` bytes where that is given.

        Cost and memory are counted in the tables' own model. Raises InfeasibleError where every choice is forbidden.
        """
        model = tables.model
        if not model.costs:  # A stage may compute nothing but what others compute, too.
            return Assignment((), 0.0, 0.0, proven=True, memory=0)
        if limit is None:
            return counted(self.least(model), model)
        # Least memory is found sooner than least cost, and says where that need not be looked for.
        least = self.least(memory_alone(model))
        fitting = counted(replace(least, proven=False), model)
        beyond = replace(fitting, bound=fitting.cost, proven=least.proven, fits=False)
        if fitting.memory > limit and least.proven:
            return beyond
        free = counted(self.least(model), model)
        if free.memory <= limit:
            return free
        if fitting.memory > limit:
            return beyond
        if free.bound >= self._enough:
            return replace(fitting, bound=free.bound)
        at_price = partial(self.at_price, model)
        found = search_price(model, ranks(model), limit, free, fitting.choice, at_price, self._end, self._enough)
        return counted(self.within(model, found), model)

    @abstractmethod
    def least(self, model: MinSum) -> Assignment:
        """The choice of least cost, whatever memory it needs."""

    @abstractmethod
    def at_price(self, model: MinSum, rate: float) -> Assignment:
        """A choice that costs little when a byte costs `rate`; its bound is one of all choices' cost and price."""

    @abstractmethod
    def within(self, model: MinSum, found: PricedSearch) -> Assignment:
        """The best within the limit, prices being searched."""

    @property
    def end(self) -> float | None:
        """Of the clock."""
        return self._end

    @property
    def programs(self) -> Programs:
        """How integer programs are solved in the time that is left."""
        left = _PATIENCE_S if self._end is None else max(_LEAST_S, self._end - time.monotonic())
        return Programs(self._solver, left)
