"""Partition into pipeline stages by an integer program over the graph, without a linear order of
the operators (Alibaba PAI, "TePDist", 2023).

Objective: the fewest bytes between stages, over all partitions in which no stage has more than (1 +
imbalance tolerance) times the mean work. The search starts from the best contiguous partition, so
its result never sends more bytes than that one. To make the program smaller, operators that share a
stage in some best partition are first merged into groups.
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
from autopipe.passes.partition.downsets import transitive_needs
from autopipe.passes.partition.flow import (
    Flow,
    Indices,
    Members,
    PartitionSpace,
    downset_members,
    partition_space,
    problem_flow,
)
from autopipe.passes.solvers.milp import Builder, Model, solve
from autopipe.passes.solvers.pulp_client import AUTO

Term = tuple[int, float]
"""A term of a linear expression: (variable, factor). Variable -1 is the constant 1."""


class Program:
    """Integer program for the stages of operators in a space of partitions.

    The binary variable y[v, s] is 1 if operator v is in stage s or a later one. It exists for each
    stage after the first stage that v permits, up to the last. Rows:

        y[v, s] >= y[v, s+1]                                  for each operator v
        y[w, s] >= y[v, s]                                    for each edge v -> w, stage s
        sum over v with work of (y[v, s] - y[v, s+1]) >= 1    each stage s has work

    Operator v is in stage s if y[v, s] - y[v, s+1] = 1. The rows for edges have a tighter linear
    relaxation than stage(v) <= stage(w) with integer variables.
    """

    def __init__(self, space: PartitionSpace) -> None:
        """Create the variables and rows for the partitions in `space`."""
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
                self.add_row(
                    [
                        self.at_or_after_term(operator, stage),
                        self.at_or_after_term(operator, stage + 1, -1.0),
                    ],
                    0.0,
                )
        _, sources, readers = flow.edges()
        for source, reader in np.unique(np.stack((sources, readers), axis=1), axis=0).tolist():
            for stage in range(first[reader] + 1, last[source] + 1):
                self.add_row(
                    [
                        self.at_or_after_term(reader, stage),
                        self.at_or_after_term(source, stage, -1.0),
                    ],
                    0.0,
                )
        for stage in range(space.stages):
            working = [each for each in self.possible_operators(stage) if flow.work[each] > 0]
            self.add_row(
                [term for each in working for term in self.in_stage_terms(each, stage)], 1.0
            )

    def at_or_after_term(self, operator: int, stage: int, factor: float = 1.0) -> Term:
        """Return the term `factor` · y[operator, stage], where y is 1 if the operator is in the
        stage or a later one, otherwise 0. The term is a constant if the stages that the operator
        permits decide y.
        """
        first = self.space.first[operator]
        if stage <= first:
            return -1, factor
        if stage > self.space.last[operator]:
            return -1, 0.0
        return int(self._begin[operator] + stage - first - 1), factor

    def in_stage_terms(self, operator: int, stage: int, factor: float = 1.0) -> list[Term]:
        """Return the terms of `factor` · (1 if the operator is in the stage, otherwise 0)."""
        return [
            self.at_or_after_term(operator, stage, factor),
            self.at_or_after_term(operator, stage + 1, -factor),
        ]

    def negative_load_terms(self, stage: int, unit: float) -> list[Term]:
        """Return the terms of the linear expression -(work of the stage) / `unit`."""
        work = self.space.flow.work
        return [
            term
            for each in self.possible_operators(stage)
            for term in self.in_stage_terms(each, stage, -float(work[each]) / unit)
        ]

    def add_row(self, terms: list[Term], least: float) -> None:
        """Add a row: sum of `terms` >= `least`."""
        self._least.append(least - sum(factor for variable, factor in terms if variable < 0))
        self._rows.append([term for term in terms if term[0] >= 0])

    def model(self) -> Model:
        """Return the integer program with all rows."""
        numbers = np.repeat(np.arange(len(self._rows)), [len(row) for row in self._rows])
        terms = [term for row in self._rows for term in row]
        columns = [variable for variable, _ in terms]
        values = [factor for _, factor in terms]
        self.builder.add_rows(numbers, columns, values, self._least, count=len(self._rows))
        return self.builder.model()

    def possible_operators(self, stage: int) -> list[int]:
        """Return the operators that may be in a stage."""
        found: list[int] = np.flatnonzero(
            (self.space.first <= stage) & (self.space.last >= stage)
        ).tolist()
        return found

    def stages_of_operators(self, values: NDArray[np.float64]) -> Indices:
        """Return the stage of each operator if the variables have these values."""
        chosen = np.concatenate(([0.0], np.cumsum(values[: self._begin[-1]])))
        found: Indices = self.space.first + np.rint(np.diff(chosen[self._begin])).astype(np.int64)
        return found


def crossing_program(space: PartitionSpace, limit: float) -> Program:
    """Return the program that minimises the bytes between stages, with at most `limit` work per
    stage.

    Let in(v, t) be 1 if operator v is in stage t, otherwise 0. For each value a with producer v,
    each stage t, and each reader w of a, a variable c[a, t] with cost size[a] satisfies

        c[a, t] >= in(w, t) - in(v, t)

    The bytes of a value therefore count once in each stage that reads the value and does not
    produce it.
    """
    program = Program(space)
    flow = space.flow
    first = space.first
    last = space.last
    for stage in range(space.stages):
        program.add_row(program.negative_load_terms(stage, max(limit, 1e-300)), -1.0)
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
                terms = [
                    *program.in_stage_terms(each, stage, -1.0),
                    *program.in_stage_terms(source, stage),
                ]
                program.add_row([(crossing, 1.0), *terms], 0.0)
    return program


def group_operators(space: PartitionSpace, cheap: float, ceiling: float) -> Indices:
    """Return the group of each operator. Groups are numbered in a topological order.

    Operators are merged if some best partition has them in one stage:

    - The producer and the readers of a value of more than `ceiling` bytes are merged, with all
      operators between them. `ceiling` is the bytes that a known partition sends.
    - An operator of at most `cheap` work is merged with a neighbour that permits the same stages,
      if separating the two never saves bytes (`_earlier_merge_target`, `_later_merge_target`).
    """
    value, sources, readers = space.flow.edges()
    large = space.flow.size[value] > ceiling
    group = _merge_pairs(space.flow, sources[large], readers[large])
    while True:
        coarse = space.coarsened(group)
        into = _merge_targets(coarse.flow, cheap)
        same = (coarse.first == coarse.first[into]) & (coarse.last == coarse.last[into])
        joins = np.flatnonzero(same & (into != np.arange(coarse.flow.operators)))
        if not len(joins):
            return group
        group = _merge_pairs(coarse.flow, joins, into[joins])[group]


def _merge_targets(flow: Flow, cheap: float) -> Indices:
    """Return, for each operator, the operator into which it is merged: itself if it is not merged,
    otherwise an operator that it reads or that reads it. Only operators of at most `cheap` work are
    merged.
    """
    before = transitive_needs(flow.needs())
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
        other = _earlier_merge_target(flow, before, operator, *values)
        other = _later_merge_target(flow, before, *values) if other is None else other
        # Several merges in one round could together create a cycle. An operator is therefore merged
        # only into an operator that is not merged itself, and only if no operator was merged into
        # it in this round.
        if other is not None and into[other] == other and not joined[operator]:
            into[operator] = other
            joined[other] = True
    return into


def _earlier_merge_target(
    flow: Flow, before: Sequence[int], operator: int, reads: list[int], gives: list[int]
) -> int | None:
    """Return an operator u such that moving `operator` into the stage of u, which is not later,
    never adds bytes between stages. None if there is none.

    u is the last operator that `operator` reads from. All other producers and all other readers of
    the operands must be ancestors of u. After the move, the results of `operator` are sent instead
    of the values that u produces for it, so the results must not be larger. `before` has the
    ancestors of each operator; `reads` and `gives` are the operands and results of `operator`.
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


def _later_merge_target(
    flow: Flow, before: Sequence[int], reads: list[int], gives: list[int]
) -> int | None:
    """Return an operator w such that moving an operator v into the stage of w, which is not
    earlier, never adds bytes between stages. None if there is none. `reads` and `gives` are the
    operands and results of v, and `before` contains the ancestors of each operator.

    w is the first reader of the results. All other readers of the results must depend on w. After
    the move, the operands are sent instead of the results, so the operands must not be larger.
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


def _merge_pairs(flow: Flow, one: Indices, other: Indices) -> Indices:
    """Return the group of each operator, such that the two operators of each pair (`one[i]`,
    `other[i]`) and all operators between them are in one group.

    Groups are the strongly connected components of the graph in which each pair has edges in both
    directions. They are numbered in a topological order; ties go to the group with the smaller last
    operator.
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
    missing = np.bincount(pairs[1], minlength=count)
    after: list[list[int]] = [[] for _ in range(count)]
    for source, reader in pairs.T.tolist():
        after[source].append(reader)
    ready = [(int(rank[each]), each) for each in np.flatnonzero(missing == 0).tolist()]
    heapq.heapify(ready)
    position = np.zeros(count, dtype=np.int64)
    for number in range(count):
        _, each = heapq.heappop(ready)
        position[each] = number
        for reader in after[each]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (int(rank[reader]), reader))
    found: Indices = position[label]
    return found


_CHEAP_WORK = 0.01
"""Maximum work of an operator that may be merged with a neighbour, as a fraction of the work limit
of a stage.
"""
_MAXIMUM_OPEN = 5000
"""Maximum number of variables (`PartitionSpace.undecided_count`) for which one integer program
covers the full space.
"""
_MAXIMUM_DOWNSETS = 6000
"""Maximum number of downsets (sets of operators that contain, with each operator, all operators
that it depends on) for an exhaustive search.
"""
_MAXIMUM_PAIRS = 2_000_000
"""Maximum number of pairs of downsets (sets of operators that contain, with each operator, all
operators that it depends on) that differ by the work of one stage, for an exhaustive search.
"""
_NODES = 1000
"""Maximum number of branch-and-bound nodes of an integer program. On a fast machine, this limit
ends the search before the time limit does, so the result does not depend on the machine's speed.
"""
_SAME = 1e-9
"""Relative difference below which two numbers of bytes count as equal."""
_ROUNDING = 1e-6
"""Relative amount by which the work of a stage may exceed the limit, because solvers round."""


@dataclass(frozen=True, slots=True)
class StagePartition:
    """A partition into stages, and its quality. `nodes` contains the indices of the nodes of each
    stage, in ascending order.
    """

    stage: Indices = field(compare=False)
    """For each operator of the flow, its stage."""
    crossing_bytes: float
    """Bytes that are sent between stages per micro-batch: values, and gradients in the opposite
    direction.
    """
    bound: float
    """Lower bound of the bytes between stages over all partitions that divide no group of
    operators; 0 if no bound is proven.
    """
    imbalance: float
    """Work of the largest stage minus the mean work, as a fraction of the mean."""
    contiguous_bytes: float
    """Bytes of the best contiguous partition under the same work limit; infinite if there is none.
    """
    groups: int
    """Number of groups of operators, which are the operators of the integer program."""

    nodes: tuple[tuple[int, ...], ...] = ()

    @property
    def proven(self) -> bool:
        """True if this partition is proven optimal among the partitions that divide no group of
        operators: `crossing_bytes` equals `bound`.
        """
        return self.crossing_bytes <= self.bound * (1 + _SAME)


@dataclass(frozen=True, slots=True)
class PartitionProblem:
    """Search for a partition in `space` whose stages have at most (1 + `imbalance_tolerance`) times
    the mean work.
    """

    space: PartitionSpace
    imbalance_tolerance: float
    end: float
    """Time on the clock `time.monotonic` at which integer programs must end."""
    solver: str = AUTO
    """Name of the integer-program solver, one of `pulp_client.SOLVER_NAMES`."""

    @property
    def flow(self) -> Flow:
        """The flow that is partitioned."""
        return self.space.flow

    def run(self) -> StagePartition:
        """Return the partition with the fewest bytes that is found. Raises InfeasibleError, with
        the minimum imbalance, if no partition within the work limit is found.
        """
        space = self.space
        flow = self.flow
        working = int((flow.work > 0).sum())
        if working < space.stages:
            raise InfeasibleError(
                f"{working} {plural(working, 'operator')} cannot be partitioned into "
                f"{space.stages} {plural(space.stages, 'stage')}",
                hint="use fewer stages",
            )
        limit = float(flow.work.sum()) / space.stages * (1 + self.imbalance_tolerance)
        start = line = space.best_contiguous(limit)
        if start is None:
            start = self._balanced_partition(limit)
        ceiling = flow.crossing_bytes(start)
        # Merge operators of little work first. If a contiguous partition is known, but the groups
        # permit none within the limit, repeat and merge only operators without work.
        for cheap in (_CHEAP_WORK * limit, 0.0):
            group = group_operators(space, cheap, ceiling)
            coarse = space.coarsened(group)
            if line is None or coarse.has_contiguous(limit):
                break
        stage, bound = self._best_of_groups(coarse, limit, group, start)
        if line is not None and flow.crossing_bytes(stage) >= ceiling * (1 - _SAME):
            stage = self._most_even_contiguous(limit, line, coarse, group)
        crossing = flow.crossing_bytes(stage)
        # `bound` applies to partitions that do not divide groups. A contiguous partition may divide
        # groups and send fewer bytes than `bound`; then the bound is invalid and is set to 0.
        bound = min(bound, crossing) if bound <= crossing * (1 + _SAME) else 0.0
        imbalance = (
            float(flow.loads(stage, space.stages).max()) / (float(flow.work.sum()) / space.stages)
            - 1
        )
        best_contiguous = np.inf if line is None else ceiling
        return StagePartition(
            stage, crossing, bound, imbalance, best_contiguous, coarse.flow.operators
        )

    def _best_of_groups(
        self, coarse: PartitionSpace, limit: float, group: Indices, start: Indices
    ) -> tuple[Indices, float]:
        """Return (stage of each operator, proven lower bound of the bytes). The partition is the
        best one found that divides no group of operators, or `start` if the best one found does not
        send fewer bytes than `start`. `group` is the index of the group of each operator, and
        `coarse` is the space in which each group is one operator.

        Tried in this order: an integer program over the full space if it is small; a search over
        all downsets if there are few; and, for a large space, an integer program in which each
        group may move by one stage from `start`.
        """
        full = coarse.within_limit(limit)
        if (full.last < full.first).any():
            return start, 0.0
        members = downsets_if_few(coarse.flow, limit)
        bound = 0.0
        if full.undecided_count <= _MAXIMUM_OPEN:
            stage, bound = self._solve_program(
                full, limit, group, 1.0 if members is None else 1 / 3
            )
            start = self._better(start, stage, limit)
        if self.flow.crossing_bytes(start) <= bound * (1 + _SAME):
            return start, bound
        if members is not None and time.monotonic() < self.end:
            best = coarse.best_over_downsets(members, limit)
            if best is not None:
                return self._better(start, best[group], limit), coarse.flow.crossing_bytes(best)
        if full.undecided_count > _MAXIMUM_OPEN:
            centre = np.zeros(coarse.flow.operators, dtype=np.int64)
            np.maximum.at(centre, group, start)
            near = replace(
                full,
                first=np.maximum(full.first, centre - 1),
                last=np.minimum(full.last, centre + 1),
            )
            stage, _ = self._solve_program(near, limit, group, 1.0)
            start = self._better(start, stage, limit)
        return start, bound

    def _solve_program(
        self, coarse: PartitionSpace, limit: float, group: Indices, fraction: float
    ) -> tuple[Indices | None, float]:
        """Return (stage of each operator or None, lower bound of the bytes between stages), as
        found by an integer program in `fraction` of the remaining time. In the space `coarse` of
        the program, each group of operators is one operator; `group` is the index of the group of
        each operator.
        """
        program = crossing_program(coarse, limit)
        result = solve(
            program.model(),
            fraction * (self.end - time.monotonic()),
            nodes=_NODES,
            solver=self.solver,
        )
        return program.stages_of_operators(result.values)[group] if result.found else None, max(
            result.bound, 0.0
        )

    def _better(self, one: Indices, other: Indices | None, limit: float) -> Indices:
        """Return `other` if it keeps the work limit and sends fewer bytes than `one`, otherwise
        `one`.
        """
        if other is None or self.flow.loads(other, self.space.stages).max() > limit * (
            1 + _ROUNDING
        ):
            return one
        return (
            other
            if self.flow.crossing_bytes(other) < self.flow.crossing_bytes(one) * (1 - _SAME)
            else one
        )

    def _balanced_partition(self, limit: float) -> Indices:
        """Return a partition within the work limit, for a space without a contiguous partition
        within the limit. Raises InfeasibleError, with the minimum imbalance, if no partition is
        found.
        """
        total = float(self.flow.work.sum())
        stages = self.space.stages
        minimum = self.space.minimum_limit()
        group = group_operators(self.space, 0.0, np.inf)
        stage, proven = self._most_even_groups(group, min(minimum * (1 + _SAME), total))
        if stage is not None:
            largest = float(self.flow.loads(stage[group], stages).max())
            if largest <= limit * (1 + _ROUNDING):
                return stage[group]
            minimum = min(minimum, largest)
        if not np.isfinite(minimum):
            raise InfeasibleError(
                f"the search found no partition into {stages} {plural(stages, 'stage')} that "
                "satisfies the constraints"
            )
        smallest = "minimum imbalance" if proven else "minimum imbalance found"
        raise InfeasibleError(
            f"the operators cannot be partitioned into {stages} {plural(stages, 'stage')} whose "
            f"work exceeds the mean by at most {self.imbalance_tolerance:.1%}: the {smallest} is "
            f"{np.ceil((minimum / (total / stages) - 1) * 1000 - 0.002) / 10:.1f}%",
            hint="increase strategy.imbalance_tolerance, or set another number of stages",
        )

    def _most_even_groups(self, group: Indices, limit: float) -> tuple[Indices | None, bool]:
        """Return (stage of each group, proven): the partition whose largest stage has the minimum
        work, among those with at most `limit` work per stage, and True if this minimum is proven.
        The stages are None if no partition is found.
        """
        coarse = self.space.coarsened(group).within_limit(limit)
        members = downsets_if_few(coarse.flow, limit)
        if members is not None:
            return coarse.best_over_downsets(members, limit, evenest=True), True
        if coarse.undecided_count > _MAXIMUM_OPEN:
            return None, False
        # The objective is the work of the largest stage, as a multiple of the mean.
        program = Program(coarse)
        most = float(coarse.stages)
        mean = max(float(coarse.flow.work.sum()) / coarse.stages, 1e-300)
        largest = int(
            program.builder.add_variables(1, cost=1.0, lower=1.0, upper=most, integral=False)[0]
        )
        for stage in range(coarse.stages):
            program.add_row([(largest, 1.0), *program.negative_load_terms(stage, mean)], 0.0)
        answer = solve(
            program.model(), (self.end - time.monotonic()) / 2, nodes=_NODES, solver=self.solver
        )
        return program.stages_of_operators(answer.values) if answer.found else None, answer.proven

    def _most_even_contiguous(
        self, limit: float, contiguous: Indices, coarse: PartitionSpace, group: Indices
    ) -> Indices:
        """Return a contiguous partition that sends at most the bytes of `contiguous`, and whose
        largest stage has about the minimum work.

        The minimum is found by bisection over the work limit, with a relative error of about 0.5%.
        Except for `contiguous` itself, only partitions that divide no group of operators are tried.
        `group` is the index of the group of each operator, and `coarse` is the space in which each
        group is one operator.
        """
        low = coarse.minimum_limit()
        bytes_of_best = self.flow.crossing_bytes(contiguous)
        limit = min(limit, float(self.flow.loads(contiguous, self.space.stages).max()))
        while limit - low > 0.005 * limit:
            middle = (low + limit) / 2
            found = coarse.best_contiguous(middle)
            if found is not None and coarse.flow.crossing_bytes(found) <= bytes_of_best * (
                1 + _SAME
            ):
                contiguous = found[group]
                limit = float(coarse.flow.loads(found, coarse.stages).max())
            else:
                low = middle
        return contiguous


def downsets_if_few(flow: Flow, limit: float) -> Members | None:
    """Return all downsets of the flow if an exhaustive search over them is feasible, otherwise
    None. A downset is a set of operators that contains, with each operator, all operators that it
    depends on. Both the downsets and the pairs of downsets that differ by at most `limit` work must
    be few.
    """
    members = downset_members(flow, _MAXIMUM_DOWNSETS)
    if members is None:
        return None
    done = np.sort(members @ flow.work)
    pairs = np.searchsorted(done, done + limit, side="right") - np.arange(len(done))
    return members if pairs.sum() <= _MAXIMUM_PAIRS else None


def partition_nodes(
    problem: Problem,
    stages: int,
    imbalance_tolerance: float,
    fixed_stages: Mapping[int, int] | None = None,
    time_limit: float = 30.0,
) -> StagePartition:
    """Return a partition of the problem's nodes into `stages` stages, each with at most (1 +
    `imbalance_tolerance`) times the mean work.

    The nodes in `fixed_stages` are in the required stages. Each stage reads only from earlier
    stages. `time_limit` is in seconds. Raises ConfigurationError if `fixed_stages` permits no
    partition, and InfeasibleError, with the minimum imbalance, if the tolerance permits none.
    """
    flow, nodes = problem_flow(problem)
    fixed_stages = fixed_stages or {}
    space = partition_space(problem.graph, flow, nodes, stages, fixed_stages)
    # Order operators by their permitted stages, so that contiguous partitions can satisfy the fixed
    # stages.
    order = np.lexsort((np.arange(flow.operators), space.last, space.first))
    flow = flow.reordered(order)
    nodes = nodes[order]
    space = PartitionSpace(flow, stages, space.first[order], space.last[order])
    found = PartitionProblem(
        space, imbalance_tolerance, time.monotonic() + time_limit, problem.solver
    ).run()
    stage_of = dict(zip(nodes.tolist(), found.stage.tolist(), strict=True))
    # Assign each recomputed node to its fixed stage, or otherwise to the first stage that reads it.
    graph = problem.graph
    consumers = problem.graph.consumers()
    for node in sorted(recomputed_nodes(graph), reverse=True):
        readers = (
            stage_of[reader]
            for name in graph.nodes[node].outputs
            for reader in consumers.get(name, ())
        )
        stage_of[node] = fixed_stages.get(node, min(readers, default=0))
    members: list[list[int]] = [[] for _ in range(stages)]
    for node in sorted(stage_of):
        members[stage_of[node]].append(node)
    return replace(found, nodes=tuple(map(tuple, members)))
