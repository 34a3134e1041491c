"""The input of a partition into stages: operators with their work, and values with their bytes and
readers.

`PartitionSpace` restricts the stages of operators. It also partitions by dynamic programming, over
contiguous ranges of operators or over all downsets. A downset is a set of operators that contains,
with each operator, all operators that it depends on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import recomputed_nodes
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.chain import linear_order, values_between_blocks
from autopipe.passes.analysis.gradients import differentiable_values, sent_bytes
from autopipe.passes.cost.roofline import mean_node_seconds
from autopipe.passes.partition.downsets import downset_levels, membership, transitive_needs

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
"""One index per operator, or a list of operators. Operators are numbered in a topological order."""


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """The operators 0, 1, … of a problem in a topological order, and the values that they exchange.

    `work[v]` is the work of operator v, in any unit. Value a is produced by operator `source[a]`,
    has `size[a]` bytes, and is read by the operators `readers[starts[a] : starts[a + 1]]`. These
    are later operators in ascending order, without repetition.
    """

    work: Floats
    source: Indices
    size: Floats
    starts: Indices
    readers: Indices

    @property
    def operators(self) -> int:
        """Number of operators."""
        return len(self.work)

    def edges(self) -> tuple[Indices, Indices, Indices]:
        """Return three arrays (value, producer, reader) with one entry per pair of a value and one
        of its readers.
        """
        value = np.repeat(np.arange(len(self.source)), np.diff(self.starts))
        return value, self.source[value], self.readers

    def pairs(self) -> list[tuple[int, int]]:
        """Return the list of (producer, reader) of all edges, ordered by reader."""
        _, sources, readers = self.edges()
        order = np.argsort(readers, kind="stable")
        return list(zip(sources[order].tolist(), readers[order].tolist(), strict=True))

    def needs(self) -> list[int]:
        """Return, for each operator, the set of the operators that it reads from, as an integer
        with one bit per operator.
        """
        found = [0] * self.operators
        for source, reader in self.pairs():
            found[reader] |= 1 << source
        return found

    def crossing_bytes(self, stage: Indices) -> float:
        """Return the bytes that are sent between stages, if `stage` is the stage of each operator.
        A value is sent once to each other stage that reads it.
        """
        value, source, reader = self.edges()
        crosses = stage[source] != stage[reader]
        pairs = np.unique(np.stack((value[crosses], stage[reader[crosses]])), axis=1)
        return float(self.size[pairs[0]].sum())

    def loads(self, stage: Indices, stages: int) -> Floats:
        """Return the work of each of `stages` stages, if `stage` is the stage of each operator."""
        return np.bincount(stage, self.work, minlength=stages).astype(float)

    def readers_of(self, value: int) -> Indices:
        """Return the operators that read a value."""
        return self.readers[self.starts[value] : self.starts[value + 1]]

    def reordered(self, order: Indices) -> Flow:
        """Return the flow with its operators renumbered in the order `order`, which must be
        topological.
        """
        position = np.empty(self.operators, dtype=np.int64)
        position[order] = np.arange(self.operators)
        value, _, readers = self.edges()
        read = np.lexsort((position[readers], value))
        return Flow(
            self.work[order], position[self.source], self.size, self.starts, position[readers][read]
        )


def make_flow(work: Floats, values: list[tuple[int, float, list[int]]]) -> Flow:
    """Return the flow of operators with the given work. `values` are triples (producer, bytes,
    readers).

    Values without a reader other than their producer, and values of 0 bytes, are dropped. Values
    with the same producer and equal readers are merged.
    """
    sizes: dict[tuple[int, tuple[int, ...]], float] = {}
    for source, size, readers in values:
        others = tuple(sorted({reader for reader in readers if reader != source}))
        if others and size > 0:
            sizes[source, others] = sizes.get((source, others), 0.0) + size
    kept = sorted(sizes)
    return Flow(
        work,
        np.array([source for source, _ in kept], dtype=np.int64),
        np.array([sizes[each] for each in kept], dtype=float),
        np.concatenate(([0], np.cumsum([len(readers) for _, readers in kept]))).astype(np.int64),
        np.array([reader for _, readers in kept for reader in readers], dtype=np.int64),
    )


def problem_flow(problem: Problem) -> tuple[Flow, Indices]:
    """Return (flow, nodes): the flow of a problem, and the graph's node for each operator of the
    flow.

    Work is in seconds of forward and backward of one micro-batch, averaged over device types. (With
    FLOPs, stages of gathers and normalisations would count as idle.) The bytes of a value are the
    bytes of its message at the problem's precision, plus those of its gradient if it has one. Nodes
    that each stage recomputes (`recomputed_nodes`) are not part of the flow.
    """
    graph = problem.graph
    recomputed = recomputed_nodes(problem.graph)
    order = np.array(
        [node for node in linear_order(graph) if node not in recomputed], dtype=np.int64
    )
    operator_of = {int(node): index for index, node in enumerate(order)}
    forward, backward = mean_node_seconds(problem)
    forwards = 2.0 if problem.recompute == "full" and problem.train else 1.0
    seconds = forwards * forward + (backward if problem.train else 0.0)
    sizes = sent_bytes(graph, problem.precision)
    returned = differentiable_values(graph) if problem.train else frozenset()
    values = []
    for name, source, readers in values_between_blocks(graph, operator_of):
        values.append((source, sizes[name] * (2.0 if name in returned else 1.0), readers))
    return make_flow(seconds[order], values), order


_ROUNDING = 1e-9
"""Relative tolerance in comparisons of work."""
_ROWS = 1024
"""Number of bit sets that are unpacked at a time, to bound the memory."""

Members = NDArray[np.bool_]
"""Boolean array [d, v] that is true if downset d contains operator v. A downset is a set of
operators that contains, with each operator, all operators that it depends on.
"""


@dataclass(frozen=True, slots=True, eq=False)
class PartitionSpace:
    """The permitted partitions of a flow into `stages` stages. Each stage must have work.

    Operator v may be in the stages `first[v]` … `last[v]`. Along an edge from producer to reader,
    neither bound decreases.
    """

    flow: Flow
    stages: int
    first: Indices
    last: Indices

    @property
    def undecided_count(self) -> int:
        """Number of pairs (operator, stage s) for which the space permits the operator both up to
        stage s and after it.
        """
        return int((self.last - self.first).sum())

    def coarsened(self, group: Indices) -> PartitionSpace:
        """Return the space in which each group of operators is replaced by one operator. `group` is
        the index of the group of each operator. A group may be in the stages in which all of its
        operators may be.
        """
        flow = self.flow
        count = int(group.max(initial=-1)) + 1
        first = np.zeros(count, dtype=np.int64)
        last = np.full(count, np.iinfo(np.int64).max)
        np.maximum.at(first, group, self.first)
        np.minimum.at(last, group, self.last)
        values = zip(group[flow.source].tolist(), flow.size.tolist(), strict=True)
        readers = (group[flow.readers_of(value)].tolist() for value in range(len(flow.source)))
        work = np.bincount(group, flow.work).astype(float)
        coarse = make_flow(
            work,
            [(source, size, each) for (source, size), each in zip(values, readers, strict=True)],
        )
        return PartitionSpace(coarse, self.stages, first, last)

    def within_limit(self, limit: float) -> PartitionSpace:
        """Return the space with tighter bounds, which still contains all partitions without a stage
        of more work than `limit`. The result may be empty.

        With W_before(v) = work of operator v and of all operators that it depends on, and
        W_after(v) = work of v and of all operators that depend on it:

            first[v] >= ceil(W_before(v) / limit) - 1
            last[v] <= stages - ceil(W_after(v) / limit)
        """
        flow = self.flow
        masks = [mask | 1 << each for each, mask in enumerate(transitive_needs(self.flow.needs()))]
        before = np.empty(flow.operators)
        after = np.zeros(flow.operators)
        for start in range(0, flow.operators, _ROWS):
            rows = membership(masks[start : start + _ROWS], flow.operators)
            before[start : start + _ROWS] = rows @ flow.work
            after += flow.work[start : start + _ROWS] @ rows
        soonest = np.ceil(before / limit * (1 - _ROUNDING)).astype(np.int64) - 1
        latest = self.stages - np.ceil(after / limit * (1 - _ROUNDING)).astype(np.int64)
        return replace(
            self, first=np.maximum(self.first, soonest), last=np.minimum(self.last, latest)
        )

    def best_contiguous(self, limit: float) -> Indices | None:
        """Return the stage of each operator in the contiguous partition that sends the fewest
        bytes; None if there is none.

        A contiguous partition assigns consecutive operators to each stage, with at most `limit`
        work per stage. Let W(b, e) be the work of operators b … e-1, and R(b, e) the bytes of the
        values that are produced before b and read in b … e-1, each counted once. With best[s, e]
        the minimum bytes of a partition of operators 0 … e-1 into s stages:

            best[s, e] = min over b < e, W(b, e) <= limit of best[s-1, b] + R(b, e)

        Time O(stages · operators²).
        """
        count = self.flow.operators
        done = np.concatenate(([0.0], np.cumsum(self.flow.work)))
        best = np.full((self.stages + 1, count + 1), np.inf)
        best[0, 0] = 0.0
        origin = np.zeros((self.stages + 1, count + 1), dtype=np.int64)
        # arriving[r]: bytes that a stage receives because its operator r reads them first.
        # changes[b]: changes of `arriving`, as (reader, bytes), when the first operator of the
        # stage becomes b. A stage that begins between two readers of a value receives the value
        # because of the second reader.
        arriving = np.zeros(count)
        changes: list[list[tuple[int, float]]] = [[] for _ in range(count + 1)]
        for value, size in enumerate(self.flow.size.tolist()):
            readers = self.flow.readers_of(value).tolist()
            for begin, reader in zip(
                [int(self.flow.source[value]), *readers], readers, strict=False
            ):
                changes[begin + 1].append((reader, size))
                changes[reader + 1].append((reader, -size))
        for start in range(count):
            for reader, size in changes[start]:
                arriving[reader] += size
            if not np.isfinite(best[: self.stages, start]).any():
                continue
            stop = (
                int(np.searchsorted(done, done[start] + limit * (1 + _ROUNDING), side="right")) - 1
            )
            if stop <= start:
                continue
            received = np.cumsum(arriving[start:stop])
            low = np.maximum.accumulate(self.first[start:stop])
            high = np.minimum.accumulate(self.last[start:stop])
            cost = best[: self.stages, start, None] + received[None, :]
            stage = np.arange(self.stages)[:, None]
            cost[(stage < low) | (stage > high) | (done[start + 1 : stop + 1] <= done[start])] = (
                np.inf
            )
            ends = slice(start + 1, stop + 1)
            better = cost < best[1:, ends]
            best[1:, ends][better] = cost[better]
            origin[1:, ends][better] = start
        if not np.isfinite(best[self.stages, count]):
            return None
        found = np.zeros(count, dtype=np.int64)
        end = count
        for number in range(self.stages, 0, -1):
            begin = int(origin[number, end])
            found[begin:end] = number - 1
            end = begin
        return found

    def minimum_limit(self) -> float:
        """Return the minimum over contiguous partitions of the work of the largest stage, with a
        relative error of up to 1e-6. Return infinity if there is no contiguous partition.
        """
        total = float(self.flow.work.sum())
        low = max(total / self.stages, float(self.flow.work.max(initial=0.0)))
        high = total
        if not self.has_contiguous(high):
            return np.inf
        if self.has_contiguous(low):
            return low
        while high - low > 1e-6 * high:
            middle = (low + high) / 2
            if self.has_contiguous(middle):
                high = middle
            else:
                low = middle
        return high

    def has_contiguous(self, limit: float) -> bool:
        """True if there is a contiguous partition (see `best_contiguous`) with at most `limit` work
        per stage.
        """
        count = self.flow.operators
        done = np.concatenate(([0.0], np.cumsum(self.flow.work)))
        furthest = np.searchsorted(done, done[:-1] + limit * (1 + _ROUNDING), side="right") - 1
        nearest = np.searchsorted(done, done[:-1], side="right")
        reached = np.zeros(count + 1, dtype=bool)
        reached[0] = True
        for stage in range(self.stages):
            forbidden = np.flatnonzero((self.first > stage) | (self.last < stage))
            next_forbidden = np.append(forbidden, count)[
                np.searchsorted(forbidden, np.arange(count))
            ]
            ends = np.minimum(furthest, next_forbidden)
            starts = np.flatnonzero(reached[:-1] & (ends >= nearest))
            change = np.zeros(count + 2, dtype=np.int64)
            np.add.at(change, nearest[starts], 1)
            np.add.at(change, ends[starts] + 1, -1)
            reached = np.cumsum(change)[: count + 1] > 0
        return bool(reached[count])

    def best_over_downsets(
        self, members: Members, limit: float, evenest: bool = False
    ) -> Indices | None:
        """Return the stage of each operator in the best partition with at most `limit` work per
        stage, whether it is contiguous or not. None if there is none.

        A downset is a set of operators that contains, with each operator, all operators that it
        depends on. The recurrence is that of `best_contiguous`, with downsets instead of the
        operators before an index. `members` are all downsets of the flow. The best partition sends
        the fewest bytes or, if `evenest`, has the smallest work of the largest stage. Time O(stages
        · pairs of nested downsets).
        """
        done = members @ self.flow.work
        order = np.argsort(done, kind="stable")
        members = members[order]
        done = done[order]

        def stage_cost(before: int, after: Indices) -> Floats:
            """Return, for each downset in `after`, the cost of a stage that consists of the
            operators that are in this downset but not in the downset `before`.

            The cost is the work of the stage if `evenest`, and otherwise the bytes of the values
            that operators in `before` produce and the stage reads.
            """
            if evenest:
                work: Floats = (members[after] & ~members[before]) @ self.flow.work
                return work
            found = np.zeros(len(after))
            for value in np.flatnonzero(members[before][self.flow.source]).tolist():
                readers = self.flow.readers_of(value)
                readers = readers[~members[before][readers]]
                if len(readers):
                    found += self.flow.size[value] * members[np.ix_(after, readers)].any(axis=1)
            return found

        packed = np.packbits(members, axis=1)
        best = np.full((self.stages + 1, len(members)), np.inf)
        best[0] = np.where(members.any(axis=1), np.inf, 0.0)
        origin = np.zeros((self.stages + 1, len(members)), dtype=np.int64)
        join = np.maximum if evenest else np.add
        stage = np.arange(self.stages)[:, None]
        for before in range(len(members)):
            if not np.isfinite(best[: self.stages, before]).any():
                continue
            low, high = np.searchsorted(
                done, [done[before], done[before] + limit * (1 + _ROUNDING)], side="right"
            )
            after = low + np.flatnonzero(~(packed[before] & ~packed[low:high]).any(axis=1))
            cost = join(best[: self.stages, before, None], stage_cost(before, after)[None, :])
            # Each operator permits only stages in a range, from `self.first` to `self.last`. A
            # stage number outside of the range of one of the stage's operators is therefore
            # excluded.
            early = np.flatnonzero(~members[before] & (self.first > 0))
            late = np.flatnonzero(~members[before] & (self.last < self.stages - 1))
            first = np.where(members[np.ix_(after, early)], self.first[early], 0).max(
                axis=1, initial=0
            )
            last = np.where(members[np.ix_(after, late)], self.last[late], self.stages).min(
                axis=1, initial=self.stages
            )
            cost[(stage < first) | (stage > last)] = np.inf
            better = cost < best[1:, after]
            best[1:, after] = np.where(better, cost, best[1:, after])
            origin[1:, after] = np.where(better, before, origin[1:, after])
        all_operators = int(np.flatnonzero(members.all(axis=1))[0])
        if not np.isfinite(best[self.stages, all_operators]):
            return None
        found = np.zeros(self.flow.operators, dtype=np.int64)
        for number in range(self.stages, 0, -1):
            start = int(origin[number, all_operators])
            found[members[all_operators] & ~members[start]] = number - 1
            all_operators = start
        return found


def partition_space(
    graph: Graph, flow: Flow, nodes: Indices, stages: int, fixed_stages: Mapping[int, int]
) -> PartitionSpace:
    """Return the partitions in which each node in `fixed_stages` is in its required stage, and no
    edge leads to an earlier stage. `nodes` is the graph's node for each operator of the flow.

    Raises ConfigurationError, with the names of two nodes, if there is no such partition.
    """
    required = np.array([fixed_stages.get(node, -1) for node in nodes.tolist()], dtype=np.int64)
    first = np.maximum(required, 0)
    last = np.where(required < 0, stages - 1, required)
    cause = np.arange(flow.operators)
    for source, reader in flow.pairs():
        if first[source] > first[reader]:
            first[reader] = first[source]
            cause[reader] = cause[source]
        if 0 <= required[reader] < first[reader]:
            late, early = (
                repr(graph.nodes[int(nodes[operator])].name) for operator in (reader, cause[reader])
            )
            raise ConfigurationError(
                (
                    f"constraints require {late} in stage {required[reader]}, but it depends on "
                    f"{early} in stage {first[reader]}"
                ),
                hint="move one of the two operators, so that stages read from earlier stages only",
                where="constraints",
            )
    for source, reader in sorted(flow.pairs(), reverse=True):
        last[source] = min(last[source], last[reader])
    return PartitionSpace(flow, stages, first, last)


def downset_members(flow: Flow, most: int) -> Members | None:
    """Return all downsets of a flow (sets of operators that contain, with each operator, all
    operators that it depends on) as a `Members` array, in ascending order of size. Return None if
    there are more than `most`.
    """
    levels = downset_levels(flow.needs(), most)
    return (
        None
        if levels is None
        else membership([mask for level in levels for mask in level], flow.operators)
    )
