"""Pipeline stages by integer program, without putting operators in one line (Alibaba PAI,
"TePDist", 2023).

Of all divisions whose stages take at most (1 + unbalance) times the mean work, that which sends the
fewest bytes between stages. The best line of operators is where it begins, so that what is found
never crosses more. Operators that some best division has in one stage anyway are joined before the
program is written.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import recomputed_nodes
from autopipe.ir.problem import Problem
from autopipe.ir.words import plural
from autopipe.passes.partition.downsets import closed
from autopipe.passes.partition.flow import (
    DivisionSpace,
    Flow,
    Members,
    Places,
    division_space,
    downsets,
    flow_of,
)
from autopipe.passes.solvers.milp import Builder, Model, solve
from autopipe.passes.solvers.pulp_client import AUTO

Term = tuple[int, float]
"""A variable and what it is multiplied by; variable -1 is the number 1."""


class Program:
    """The variables of operators' stages in a space of divisions, and rows that are still
    collected. Asked of operator v and stage s is "is v in stage s or a later one?", y[v, s]: 0 or
    1, and it never grows with s. An edge u → v says y[u, s] <= y[v, s] for every s; stage(u) <=
    stage(v) in whole numbers says the same much more loosely once numbers need not be whole.
    Operator v is in stage s where y[v, s] - y[v, s + 1] is 1.
    """

    def __init__(self, space: DivisionSpace) -> None:
        """Stages are counted upwards, edges lead to no earlier one, and each stage has work."""
        self.space = space
        flow = space.flow
        first = space.first
        last = space.last
        self._begin = np.concatenate(([0], np.cumsum(last - first)))
        self.builder = Builder()
        self.builder.add_variables(int(self._begin[-1]))
        self._rows: list[list[Term]] = []
        self._least: list[float] = []
        for operator in range(flow.operators):
            for stage in range(first[operator] + 1, last[operator]):
                self.at_least(
                    [
                        self.in_or_after(operator, stage),
                        self.in_or_after(operator, stage + 1, -1.0),
                    ],
                    0.0,
                )
        _, sources, readers = flow.edges()
        for source, reader in np.unique(np.stack((sources, readers), axis=1), axis=0).tolist():
            for stage in range(first[reader] + 1, last[source] + 1):
                self.at_least(
                    [self.in_or_after(reader, stage), self.in_or_after(source, stage, -1.0)], 0.0
                )
        for stage in range(space.stages):
            working = [each for each in self.members(stage) if flow.work[each] > 0]
            self.at_least([term for each in working for term in self.within(each, stage)], 1.0)

    def in_or_after(self, operator: int, stage: int, factor: float = 1.0) -> Term:
        """Is the operator in this stage or a later one?"""
        first = self.space.first[operator]
        if stage <= first:
            return -1, factor
        if stage > self.space.last[operator]:
            return -1, 0.0
        return int(self._begin[operator] + stage - first - 1), factor

    def within(self, operator: int, stage: int, factor: float = 1.0) -> list[Term]:
        """Is the operator in this stage?"""
        return [
            self.in_or_after(operator, stage, factor),
            self.in_or_after(operator, stage + 1, -factor),
        ]

    def loads(self, stage: int, unit: float) -> list[Term]:
        """The work of the stage in `unit`, taken away."""
        work = self.space.flow.work
        return [
            term
            for each in self.members(stage)
            for term in self.within(each, stage, -float(work[each]) / unit)
        ]

    def at_least(self, terms: list[Term], least: float) -> None:
        """A row: the sum of the terms is at least this."""
        self._least.append(least - sum(factor for variable, factor in terms if variable < 0))
        self._rows.append([term for term in terms if term[0] >= 0])

    def model(self) -> Model:
        numbers = np.repeat(np.arange(len(self._rows)), [len(row) for row in self._rows])
        terms = [term for row in self._rows for term in row]
        columns = [variable for variable, _ in terms]
        values = [factor for _, factor in terms]
        self.builder.add_rows(numbers, columns, values, self._least, count=len(self._rows))
        return self.builder.model()

    def members(self, stage: int) -> list[int]:
        found: list[int] = np.flatnonzero(
            (self.space.first <= stage) & (self.space.last >= stage)
        ).tolist()
        return found

    def stage(self, values: NDArray[np.float64]) -> Places:
        """The stage of each operator that the variables' values say."""
        chosen = np.concatenate(([0.0], np.cumsum(values[: self._begin[-1]])))
        found: Places = self.space.first + np.rint(np.diff(chosen[self._begin])).astype(np.int64)
        return found


def crossing_program(space: DivisionSpace, limit: float) -> Program:
    """Least bytes that cross, where no stage takes more work than `limit`. A value costs its bytes
    in stage t where a reader is in t and its producer is not.
    """
    program = Program(space)
    flow = space.flow
    first = space.first
    last = space.last
    for stage in range(space.stages):
        program.at_least(program.loads(stage, max(limit, 1e-300)), -1.0)
    for value, source in enumerate(flow.source.tolist()):
        readers = flow.readers_of(value)
        for stage in range(first[source], int(last[readers].max()) + 1):
            away = [each for each in readers.tolist() if first[each] <= stage <= last[each]]
            if last[source] == first[source] == stage or not away:
                continue
            crossing = int(
                program.builder.add_variables(1, cost=flow.size[value], integral=False)[0]
            )
            for each in away:
                terms = [*program.within(each, stage, -1.0), *program.within(source, stage)]
                program.at_least([(crossing, 1.0), *terms], 0.0)
    return program


def grouped(space: DivisionSpace, cheap: float, ceiling: float) -> Places:
    """The group of each operator; groups are counted in a topological order of theirs.

    An operator without much work joins a neighbour where no division crosses less for keeping them
    apart. Operators that share more bytes than all of a division that is already known crosses are
    one, too, with all that lies between. Operators that take at most `cheap` work may join others
    with equal windows. `ceiling` is what some division crosses: a value with more bytes stays in
    its stage.
    """
    value, sources, readers = space.flow.edges()
    large = space.flow.size[value] > ceiling
    group = _joined(space.flow, sources[large], readers[large])
    while True:
        coarse = space.coarsened(group)
        into = _neighbours(coarse.flow, cheap)
        same = (coarse.first == coarse.first[into]) & (coarse.last == coarse.last[into])
        joins = np.flatnonzero(same & (into != np.arange(coarse.flow.operators)))
        if not len(joins):
            return group
        group = _joined(coarse.flow, joins, into[joins])[group]


def _neighbours(flow: Flow, cheap: float) -> Places:
    """For each operator the one that it joins: itself, one it reads, or one that reads it."""
    before = closed(flow.needs())
    reads: list[list[int]] = [[] for _ in range(flow.operators)]
    for value, _, reader in zip(*flow.edges(), strict=True):
        reads[reader].append(int(value))
    gives: list[list[int]] = [[] for _ in range(flow.operators)]
    for value, source in enumerate(flow.source.tolist()):
        gives[source].append(value)
    into = np.arange(flow.operators)
    joined = np.zeros(flow.operators, dtype=bool)
    for operator in np.flatnonzero(flow.work <= cheap).tolist():
        values = reads[operator], gives[operator]
        other = _earlier(flow, before, operator, *values)
        other = _sole_reader(flow, before, *values) if other is None else other
        # Two that join one another at once might close a circle: what is joined stays where it is,
        # this time.
        if other is not None and into[other] == other and not joined[operator]:
            into[operator] = other
            joined[other] = True
    return into


def _earlier(
    flow: Flow, before: Sequence[int], operator: int, reads: list[int], gives: list[int]
) -> int | None:
    """The operator that `operator` may follow into an earlier stage: the last it reads, with all it
    shares behind it. What it gives then crosses in place of what the other gives it, which is no
    less; nobody else needs in the later stage what it read there.
    """
    if not reads:
        return None
    last = max(int(flow.source[value]) for value in reads)
    others = {int(flow.source[value]) for value in reads}.union(
        *(flow.readers_of(value).tolist() for value in reads)
    )
    if any(not before[last] >> other & 1 for other in others - {last, operator}):
        return None
    saved = sum(flow.size[value] for value in reads if flow.source[value] == last)
    return last if sum(flow.size[value] for value in gives) <= saved else None


def _sole_reader(
    flow: Flow, before: Sequence[int], reads: list[int], gives: list[int]
) -> int | None:
    """The operator that one may wait for which reads and gives these values: its first reader, of
    which all other readers come after. What it reads then crosses in place of what it gives, which
    is no less.
    """
    if not gives:
        return None
    first, *others = sorted(
        {reader for value in gives for reader in flow.readers_of(value).tolist()}
    )
    if any(not before[reader] >> first & 1 for reader in others):
        return None
    saved = sum(flow.size[value] for value in gives if first in flow.readers_of(value))
    return first if sum(flow.size[value] for value in reads) <= saved else None


def _joined(flow: Flow, one: Places, other: Places) -> Places:
    """The groups, where each of these pairs of operators is in one, and with them what lies
    between: the strongly connected parts of the graph in which a pair is joined both ways. They are
    numbered in a topological order in which a group comes as early as its last operator lets it.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    _, sources, readers = flow.edges()
    rows = np.concatenate((sources, one, other))
    columns = np.concatenate((readers, other, one))
    matrix = csr_array(
        (np.ones(len(rows)), (rows, columns)), shape=(flow.operators, flow.operators)
    )
    count, label = connected_components(matrix, directed=True, connection="strong")
    rank = np.zeros(count, dtype=np.int64)
    np.maximum.at(rank, label, np.arange(len(label)))
    pairs = np.unique(np.stack((label[sources], label[readers])), axis=1)
    pairs = pairs[:, pairs[0] != pairs[1]]
    waiting = np.bincount(pairs[1], minlength=count)
    after: list[list[int]] = [[] for _ in range(count)]
    for source, reader in pairs.T.tolist():
        after[source].append(reader)
    ready = [(int(rank[each]), each) for each in np.flatnonzero(waiting == 0).tolist()]
    heapq.heapify(ready)
    place = np.zeros(count, dtype=np.int64)
    for number in range(count):
        _, each = heapq.heappop(ready)
        place[each] = number
        for reader in after[each]:
            waiting[reader] -= 1
            if not waiting[reader]:
                heapq.heappush(ready, (int(rank[reader]), reader))
    found: Places = place[label]
    return found


_CHEAP = 0.01
"""Operators that take at most this share of a stage's mean work may join a neighbour."""
_MOST_OPEN = 5000
"""Questions of "is it in a later stage than this?" up to which an integer program has all of them.
"""
_MOST_DOWNSETS = 6000
_MOST_PAIRS = 2_000_000
"""Downsets, and pairs of them that may begin and end a stage, up to which all are gone through."""
_NODES = 1000
"""Of an integer program's search tree: what ends it on a machine that is fast enough."""
_SAME = 1e-9
"""Bytes that differ by no more than this share are equal."""
_ROUNDING = 1e-6
"""Share of its limit by which an integer program's answer may leave a stage above it."""


@dataclass(frozen=True, slots=True)
class StageDivision:
    """The nodes of each stage, ascending, and what is known of how good that is."""

    stage: Places = field(compare=False)
    """Of each operator of the flow that was divided."""
    crossing_bytes: float
    """Bytes between stages for each micro-batch: every message, and the gradient that comes back
    for it.
    """
    bound: float
    """No division, of the groups of operators that were kept together, crosses less; 0 where
    nothing is proven.
    """
    unbalance: float
    """By how much, as a share of the mean, the largest stage takes more work than the mean."""
    line_bytes: float
    """Bytes that cross in the best line of operators under the same limit; infinite where there is
    none.
    """
    groups: int
    """Groups of operators that the integer program divided."""

    nodes: tuple[tuple[int, ...], ...] = ()

    @property
    def proven(self) -> bool:
        """True if the groups cannot be divided better."""
        return self.crossing_bytes <= self.bound * (1 + _SAME)


@dataclass(frozen=True, slots=True)
class DivisionProblem:
    """Division into stages of a space that take at most (1 + `unbalance`) times the mean work."""

    space: DivisionSpace
    unbalance: float
    end: float
    """When integer programs end, by `time.monotonic`."""
    solver: str = AUTO
    """The solver of integer programs, a name of `pulp_client.SOLVER_NAMES`."""

    @property
    def flow(self) -> Flow:
        return self.space.flow

    def run(self) -> StageDivision:
        """The division that crosses least. Raises InfeasibleError, with the smallest unbalance that
        has one.
        """
        space = self.space
        flow = self.flow
        working = int((flow.work > 0).sum())
        if working < space.stages:
            raise InfeasibleError(
                f"{working} {plural(working, 'operator')} cannot be divided into "
                f"{space.stages} {plural(space.stages, 'stage')}",
                hint="take fewer stages",
            )
        limit = float(flow.work.sum()) / space.stages * (1 + self.unbalance)
        start = line = space.best_line(limit)
        if start is None:
            start = self._balanced(limit)
        ceiling = flow.crossing(start)
        # Groups that can be divided under the limit, as far as that is seen by their line.
        for cheap in (_CHEAP * limit, 0.0):
            group = grouped(space, cheap, ceiling)
            coarse = space.coarsened(group)
            if line is None or coarse.is_any_line(limit):
                break
        stage, bound = self._divided(coarse, limit, group, start)
        if line is not None and flow.crossing(stage) >= ceiling * (1 - _SAME):
            stage = self._evenest(limit, line, coarse, group)
        crossing = flow.crossing(stage)
        # A line of single operators may cross less than any division of the groups, which then
        # proves nothing of it.
        bound = min(bound, crossing) if bound <= crossing * (1 + _SAME) else 0.0
        unbalance = (
            float(flow.loads(stage, space.stages).max()) / (float(flow.work.sum()) / space.stages)
            - 1
        )
        best_line = np.inf if line is None else ceiling
        return StageDivision(stage, crossing, bound, unbalance, best_line, coarse.flow.operators)

    def _divided(
        self, coarse: DivisionSpace, limit: float, group: Places, start: Places
    ) -> tuple[Places, float]:
        """The best division of the groups that is found, `start` if that is none worse, and what is
        proven.
        """
        full = coarse.under(limit)
        if (full.last < full.first).any():
            return start, 0.0
        members = few_downsets(coarse.flow, limit)
        bound = 0.0
        if full.open <= _MOST_OPEN:
            stage, bound = self._programmed(full, limit, group, 1.0 if members is None else 1 / 3)
            start = self._better(start, stage, limit)
        if self.flow.crossing(start) <= bound * (1 + _SAME):
            return start, bound
        if members is not None and time.monotonic() < self.end:
            best = coarse.best_over_downsets(members, limit)
            if best is not None:
                return self._better(start, best[group], limit), coarse.flow.crossing(best)
        if full.open > _MOST_OPEN:
            centre = np.zeros(coarse.flow.operators, dtype=np.int64)
            np.maximum.at(centre, group, start)
            near = replace(
                full,
                first=np.maximum(full.first, centre - 1),
                last=np.minimum(full.last, centre + 1),
            )
            stage, _ = self._programmed(near, limit, group, 1.0)
            start = self._better(start, stage, limit)
        return start, bound

    def _programmed(
        self, coarse: DivisionSpace, limit: float, group: Places, share: float
    ) -> tuple[Places | None, float]:
        """Solve an integer program in a share of the time; returns the division, and the bound
        proven for its space.
        """
        program = crossing_program(coarse, limit)
        answer = solve(
            program.model(), share * (self.end - time.monotonic()), nodes=_NODES, solver=self.solver
        )
        return program.stage(answer.values)[group] if answer.found else None, max(answer.bound, 0.0)

    def _better(self, one: Places, other: Places | None, limit: float) -> Places:
        """The other division, if it crosses less and keeps the limit."""
        if other is None or self.flow.loads(other, self.space.stages).max() > limit * (
            1 + _ROUNDING
        ):
            return one
        return other if self.flow.crossing(other) < self.flow.crossing(one) * (1 - _SAME) else one

    def _balanced(self, limit: float) -> Places:
        """A division under the limit that is no line. Raises InfeasibleError where there is none,
        with the smallest unbalance that has one.
        """
        total = float(self.flow.work.sum())
        stages = self.space.stages
        least = self.space.least_limit()
        group = grouped(self.space, 0.0, np.inf)
        stage, proven = self._evenest_groups(group, min(least * (1 + _SAME), total))
        if stage is not None:
            largest = float(self.flow.loads(stage[group], stages).max())
            if largest <= limit * (1 + _ROUNDING):
                return stage[group]
            least = min(least, largest)
        if not np.isfinite(least):
            raise InfeasibleError(
                f"no division into {stages} {plural(stages, 'stage')} was found that keeps the "
                "constraints"
            )
        smallest = "smallest unbalance" if proven else "smallest unbalance that was found"
        raise InfeasibleError(
            f"operators cannot be divided into {stages} {plural(stages, 'stage')} "
            f"that take at most {self.unbalance:.1%} more than "
            f"the mean: the {smallest} is "
            f"{np.ceil((least / (total / stages) - 1) * 1000 - 0.002) / 10:.1f}%",
            hint="allow it, or take another number of stages",
        )

    def _evenest_groups(self, group: Places, limit: float) -> tuple[Places | None, bool]:
        """The stages of the groups, none above the limit, whose largest takes least, and whether
        that is proven.
        """
        coarse = self.space.coarsened(group).under(limit)
        members = few_downsets(coarse.flow, limit)
        if members is not None:
            return coarse.best_over_downsets(members, limit, evenest=True), True
        if coarse.open > _MOST_OPEN:
            return None, False
        # The least work of the largest stage, in means.
        program = Program(coarse)
        most = float(coarse.stages)
        mean = max(float(coarse.flow.work.sum()) / coarse.stages, 1e-300)
        largest = int(
            program.builder.add_variables(1, cost=1.0, lower=1.0, upper=most, integral=False)[0]
        )
        for stage in range(coarse.stages):
            program.at_least([(largest, 1.0), *program.loads(stage, mean)], 0.0)
        answer = solve(
            program.model(), (self.end - time.monotonic()) / 2, nodes=_NODES, solver=self.solver
        )
        return program.stage(answer.values) if answer.found else None, answer.proven

    def _evenest(self, limit: float, line: Places, coarse: DivisionSpace, group: Places) -> Places:
        """Of the lines that cross no more than the best, one of groups whose largest stage is about
        smallest.
        """
        low = coarse.least_limit()
        most = self.flow.crossing(line)
        limit = min(limit, float(self.flow.loads(line, self.space.stages).max()))
        while limit - low > 0.005 * limit:
            middle = (low + limit) / 2
            found = coarse.best_line(middle)
            if found is not None and coarse.flow.crossing(found) <= most * (1 + _SAME):
                line = found[group]
                limit = float(coarse.flow.loads(found, coarse.stages).max())
            else:
                low = middle
        return line


def few_downsets(flow: Flow, limit: float) -> Members | None:
    """All downsets, where they are few enough to go through all stages of at most `limit` between
    them.
    """
    members = downsets(flow, _MOST_DOWNSETS)
    if members is None:
        return None
    done = np.sort(members @ flow.work)
    pairs = np.searchsorted(done, done + limit, side="right") - np.arange(len(done))
    return members if pairs.sum() <= _MOST_PAIRS else None


def divide(
    problem: Problem,
    stages: int,
    unbalance: float,
    settled: Mapping[int, int] | None = None,
    time_limit: float = 30.0,
) -> StageDivision:
    """The nodes in `stages` stages, each with work, of which none takes over (1 + `unbalance`)
    times the mean. `settled` nodes are in the stages that are asked for. Stages are numbered so
    that each reads from earlier ones only. Raises ConfigurationError where `settled` allows no
    division, InfeasibleError where the limit allows none, with the smallest unbalance that does.
    """
    flow, nodes = flow_of(problem)
    settled = settled or {}
    space = division_space(problem.graph, flow, nodes, stages, settled)
    # In this order a line can have the settled operators where they belong.
    order = np.lexsort((np.arange(flow.operators), space.last, space.first))
    flow = flow.reordered(order)
    nodes = nodes[order]
    space = DivisionSpace(flow, stages, space.first[order], space.last[order])
    found = DivisionProblem(space, unbalance, time.monotonic() + time_limit, problem.solver).run()
    stage_of = dict(zip(nodes.tolist(), found.stage.tolist(), strict=True))
    # Nodes that every reader computes for itself are where they are asked for, or where they are
    # read first.
    graph = problem.graph
    consumers = problem.graph.consumers()
    for node in sorted(recomputed_nodes(graph), reverse=True):
        readers = (
            stage_of[reader]
            for name in graph.nodes[node].outputs
            for reader in consumers.get(name, ())
        )
        stage_of[node] = settled.get(node, min(readers, default=0))
    members: list[list[int]] = [[] for _ in range(stages)]
    for node in sorted(stage_of):
        members[stage_of[node]].append(node)
    return replace(found, nodes=tuple(map(tuple, members)))
