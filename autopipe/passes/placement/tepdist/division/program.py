"""Stage division as an integer linear program.

What is asked of operator v and stage s is "is v in stage s or later?", y[v, s]: 0 or 1, and it never grows with s. An
edge u → v says y[u, s] <= y[v, s] for every s; stage(u) <= stage(v) in whole numbers says the same much more loosely
once numbers need not be whole. Operator v is in stage s where y[v, s] - y[v, s + 1] is 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopipe.passes.placement.tepdist.division.flow import Flow, Places
from autopipe.passes.placement.tepdist.division.windows import Windows
from autopipe.passes.solvers.milp import Builder, Model

Term = tuple[int, float]
"""A variable and what it is multiplied by; variable -1 is the number 1."""


@dataclass(slots=True)
class Program:
    """The variables of operators' stages under `windows`, and rows that are still collected."""

    flow: Flow
    stages: int
    windows: Windows
    builder: Builder = field(default_factory=Builder)
    _begin: Places = field(init=False)
    _entries: tuple[list[int], list[int], list[float], list[float]] = field(default_factory=lambda: ([], [], [], []))

    def __post_init__(self) -> None:
        counts = self.windows.last - self.windows.first
        self._begin = np.concatenate(([0], np.cumsum(counts)))
        self.builder.add_variables(int(counts.sum()))
        self._order_rows()

    def in_or_after(self, operator: int, stage: int, factor: float = 1.0) -> Term:
        """Is the operator in this stage or a later one?"""
        if stage <= self.windows.first[operator]:
            return -1, factor
        if stage > self.windows.last[operator]:
            return -1, 0.0
        return int(self._begin[operator] + stage - self.windows.first[operator] - 1), factor

    def within(self, operator: int, stage: int, factor: float = 1.0) -> list[Term]:
        """Is the operator in this stage?"""
        return [self.in_or_after(operator, stage, factor), self.in_or_after(operator, stage + 1, -factor)]

    def at_least(self, terms: list[Term], least: float) -> None:
        """A row: the sum of the terms is at least this."""
        rows, columns, values, lower = self._entries
        constant = sum(factor for variable, factor in terms if variable < 0)
        own = [(variable, factor) for variable, factor in terms if variable >= 0]
        rows.extend([len(lower)] * len(own))
        columns.extend(variable for variable, _ in own)
        values.extend(factor for _, factor in own)
        lower.append(least - constant)

    def model(self) -> Model:
        """The program."""
        rows, columns, values, lower = self._entries
        self.builder.add_rows(rows, columns, values, lower, count=len(lower))
        return self.builder.model()

    def members(self, stage: int) -> list[int]:
        """The operators that can be in this stage."""
        found: list[int] = np.flatnonzero((self.windows.first <= stage) & (self.windows.last >= stage)).tolist()
        return found

    def stage(self, values: NDArray[np.float64]) -> Places:
        """The stage of each operator that the variables' values say."""
        chosen = np.concatenate(([0.0], np.cumsum(values[: self._begin[-1]])))
        found: Places = self.windows.first + np.rint(np.diff(chosen[self._begin])).astype(np.int64)
        return found

    def _order_rows(self) -> None:
        """Stages are counted upwards, edges lead to no earlier one, and each stage has work."""
        first, last = self.windows.first, self.windows.last
        for operator in range(self.flow.operators):
            for stage in range(first[operator] + 1, last[operator]):
                self.at_least([self.in_or_after(operator, stage), self.in_or_after(operator, stage + 1, -1.0)], 0.0)
        _, sources, readers = self.flow.edges()
        for source, reader in np.unique(np.stack((sources, readers), axis=1), axis=0).tolist():
            for stage in range(first[reader] + 1, last[source] + 1):
                self.at_least([self.in_or_after(reader, stage), self.in_or_after(source, stage, -1.0)], 0.0)
        for stage in range(self.stages):
            working = [each for each in self.members(stage) if self.flow.work[each] > 0]
            self.at_least([term for each in working for term in self.within(each, stage)], 1.0)


def crossing_program(flow: Flow, stages: int, windows: Windows, limit: float) -> tuple[Program, Model]:
    """Least bytes that cross, where no stage takes more work than `limit`.

    A value costs its bytes in stage t where a reader is in t and its producer is not.
    """
    program = Program(flow, stages, windows)
    unit = max(limit, 1e-300)
    for stage in range(stages):
        members = program.members(stage)
        program.at_least(
            [term for each in members for term in program.within(each, stage, -float(flow.work[each]) / unit)], -1.0
        )
    for value, source in enumerate(flow.source.tolist()):
        readers = flow.readers[flow.starts[value] : flow.starts[value + 1]]
        for stage in range(windows.first[source], int(windows.last[readers].max()) + 1):
            away = [each for each in readers.tolist() if windows.first[each] <= stage <= windows.last[each]]
            if windows.last[source] == windows.first[source] == stage or not away:
                continue
            crossing = int(program.builder.add_variables(1, cost=flow.size[value], integral=False)[0])
            for each in away:
                terms = [*program.within(each, stage, -1.0), *program.within(source, stage)]
                program.at_least([(crossing, 1.0), *terms], 0.0)
    return program, program.model()


def balance_program(flow: Flow, stages: int, windows: Windows) -> tuple[Program, Model]:
    """Least work of the largest stage, in means."""
    program = Program(flow, stages, windows)
    mean = max(float(flow.work.sum()) / stages, 1e-300)
    largest = int(program.builder.add_variables(1, cost=1.0, lower=1.0, upper=float(stages), integral=False)[0])
    for stage in range(stages):
        members = program.members(stage)
        loads = [term for each in members for term in program.within(each, stage, -float(flow.work[each]) / mean)]
        program.at_least([(largest, 1.0), *loads], 0.0)
    return program, program.model()
