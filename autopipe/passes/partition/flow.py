"""A model as stage division sees it (operators with their work, values with their bytes and
readers), the stages that an operator can be in, and divisions by dynamic programming: over a line
of operators, and over all downsets.
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
from autopipe.passes.analysis.chain import linear_order, values_between
from autopipe.passes.analysis.gradients import differentiable_values, sent_bytes
from autopipe.passes.cost.roofline import mean_seconds
from autopipe.passes.partition.downsets import closed, downset_levels, membership

Floats = NDArray[np.float64]
Places = NDArray[np.int64]
"""One entry an operator, or a list of operators, which are counted in a topological order."""


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """Operators 0, 1, … in a topological order, and the values that go from one to others.
    `work[v]` is what operator v takes, in any unit. Value a is made by operator `source[a]`, has
    `size[a]` bytes and is read by `readers[starts[a] : starts[a + 1]]`: later operators, each once,
    ascending.
    """

    work: Floats
    source: Places
    size: Floats
    starts: Places
    readers: Places

    @property
    def operators(self) -> int:
        return len(self.work)

    def edges(self) -> tuple[Places, Places, Places]:
        """Of each reader of each value: the value, its producer, the reader."""
        value = np.repeat(np.arange(len(self.source)), np.diff(self.starts))
        return value, self.source[value], self.readers

    def pairs(self) -> list[tuple[int, int]]:
        """Producer and reader of each edge, by reader."""
        _, sources, readers = self.edges()
        order = np.argsort(readers, kind="stable")
        return list(zip(sources[order].tolist(), readers[order].tolist(), strict=True))

    def needs(self) -> list[int]:
        """For each operator those that it reads from, as bits."""
        found = [0] * self.operators
        for source, reader in self.pairs():
            found[reader] |= 1 << source
        return found

    def crossing(self, stage: Places) -> float:
        """Bytes that travel between stages: each value once to every other stage that reads it."""
        value, source, reader = self.edges()
        away = stage[source] != stage[reader]
        pairs = np.unique(np.stack((value[away], stage[reader[away]])), axis=1)
        return float(self.size[pairs[0]].sum())

    def loads(self, stage: Places, stages: int) -> Floats:
        return np.bincount(stage, self.work, minlength=stages).astype(float)

    def readers_of(self, value: int) -> Places:
        return self.readers[self.starts[value] : self.starts[value + 1]]

    def reordered(self, order: Places) -> Flow:
        place = np.empty(self.operators, dtype=np.int64)
        place[order] = np.arange(self.operators)
        value, _, readers = self.edges()
        read = np.lexsort((place[readers], value))
        return Flow(
            self.work[order], place[self.source], self.size, self.starts, place[readers][read]
        )


def make_flow(work: Floats, values: list[tuple[int, float, list[int]]]) -> Flow:
    """The flow of values given as producer, bytes and readers; those that nobody else reads are
    left out. Values of one producer for the same readers are one.
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


def flow_of(problem: Problem) -> tuple[Flow, Places]:
    """The flow of a problem's operators, and the node that each of them is. Work is in seconds of a
    micro-batch's forward and backward, on average over kinds of devices: FLOPs alone would count a
    stage of lookups and normalisations as idle. A value's bytes are those of its message, at the
    problem's precision, and of the gradient that comes back where it has one. Nodes that every
    stage computes for itself are left out.
    """
    graph = problem.graph
    shared = recomputed_nodes(problem.graph)
    order = np.array([node for node in linear_order(graph) if node not in shared], dtype=np.int64)
    place = {int(node): index for index, node in enumerate(order)}
    forward, backward = mean_seconds(problem)
    turns = 2.0 if problem.recompute == "full" and problem.train else 1.0
    seconds = turns * forward + (backward if problem.train else 0.0)
    sizes = sent_bytes(graph, problem.precision)
    returned = differentiable_values(graph) if problem.train else frozenset()
    values = []
    for name, source, readers in values_between(graph, place):
        values.append((source, sizes[name] * (2.0 if name in returned else 1.0), readers))
    return make_flow(seconds[order], values), order


_ROUNDING = 1e-9
_ROWS = 1024
"""Of a table of bits, unpacked at a time."""

Members = NDArray[np.bool_]
"""At [d, v] whether downset d has operator v."""


@dataclass(frozen=True, slots=True, eq=False)
class DivisionSpace:
    """A flow to be divided into `stages`, each with work: operator v may be in stages `first[v]` to
    `last[v]`. Both never fall along an edge.
    """

    flow: Flow
    stages: int
    first: Places
    last: Places

    @property
    def open(self) -> int:
        """How many questions "is it in a later stage than this?" there are."""
        return int((self.last - self.first).sum())

    def coarsened(self, group: Places) -> DivisionSpace:
        """The space of groups of operators, each where all of its operators may be."""
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
        return DivisionSpace(coarse, self.stages, first, last)

    def under(self, limit: float) -> DivisionSpace:
        """The part where no stage takes more work than `limit`; it may be empty. All predecessors
        of an operator are in no later stage, all its successors in no earlier one: as soon as
        possible and as late as possible are by work, not by number of operators.
        """
        flow = self.flow
        masks = [mask | 1 << each for each, mask in enumerate(closed(self.flow.needs()))]
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

    def best_line(self, limit: float) -> Places | None:
        """The stage of each operator in the line that least crosses; None where there is no line.
        No stage takes more work than `limit`. What a stage receives depends on where it begins and
        ends alone, and all stages receive together what crosses: so the best line follows from the
        best lines of fewer stages.
        """
        count = self.flow.operators
        done = np.concatenate(([0.0], np.cumsum(self.flow.work)))
        best = np.full((self.stages + 1, count + 1), np.inf)
        best[0, 0] = 0.0
        origin = np.zeros((self.stages + 1, count + 1), dtype=np.int64)
        # Bytes that a stage receives, by the operator at which it does, and how they change as its
        # first operator moves on: a stage that begins after one reader of a value and before the
        # next receives it for the next.
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

    def least_limit(self) -> float:
        """The least work that the largest stage of a line can have, to a millionth; infinite where
        there is no line.
        """
        total = float(self.flow.work.sum())
        low = max(total / self.stages, float(self.flow.work.max(initial=0.0)))
        high = total
        if not self.is_any_line(high):
            return np.inf
        if self.is_any_line(low):
            return low
        while high - low > 1e-6 * high:
            middle = (low + high) / 2
            if self.is_any_line(middle):
                high = middle
            else:
                low = middle
        return high

    def is_any_line(self, limit: float) -> bool:
        """True if there is a line at all, as `best_line` asks for it."""
        count = self.flow.operators
        done = np.concatenate(([0.0], np.cumsum(self.flow.work)))
        furthest = np.searchsorted(done, done[:-1] + limit * (1 + _ROUNDING), side="right") - 1
        nearest = np.searchsorted(done, done[:-1], side="right")
        reached = np.zeros(count + 1, dtype=bool)
        reached[0] = True
        for stage in range(self.stages):
            refused = np.flatnonzero((self.first > stage) | (self.last < stage))
            barrier = np.append(refused, count)[np.searchsorted(refused, np.arange(count))]
            ends = np.minimum(furthest, barrier)
            starts = np.flatnonzero(reached[:-1] & (ends >= nearest))
            change = np.zeros(count + 2, dtype=np.int64)
            np.add.at(change, nearest[starts], 1)
            np.add.at(change, ends[starts] + 1, -1)
            reached = np.cumsum(change)[: count + 1] > 0
        return bool(reached[count])

    def best_over_downsets(
        self, members: Members, limit: float, evenest: bool = False
    ) -> Places | None:
        """The stage of each operator where least crosses, as `best_line` says it, but of lines in
        any order; with `evenest` where the largest stage takes least work.
        """
        done = members @ self.flow.work
        order = np.argsort(done, kind="stable")
        members = members[order]
        done = done[order]

        def price(before: int, after: Places) -> Floats:
            """Of the stages from one downset to several others: their work, or the bytes that they
            read of what was made before them.
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
            cost = join(best[: self.stages, before, None], price(before, after)[None, :])
            # All operators in between have to be allowed in the stage.
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
        whole = int(np.flatnonzero(members.all(axis=1))[0])
        if not np.isfinite(best[self.stages, whole]):
            return None
        found = np.zeros(self.flow.operators, dtype=np.int64)
        for number in range(self.stages, 0, -1):
            start = int(origin[number, whole])
            found[members[whole] & ~members[start]] = number - 1
            whole = start
        return found


def division_space(
    graph: Graph, flow: Flow, nodes: Places, stages: int, settled: Mapping[int, int]
) -> DivisionSpace:
    """Divisions under which `settled` nodes are in the stages that are asked for, and every edge
    leads to no earlier stage. Raises ConfigurationError, naming two nodes, where there are none.
    """
    own = np.array([settled.get(node, -1) for node in nodes.tolist()], dtype=np.int64)
    first = np.maximum(own, 0)
    last = np.where(own < 0, stages - 1, own)
    cause = np.arange(flow.operators)
    for source, reader in flow.pairs():
        if first[source] > first[reader]:
            first[reader], cause[reader] = first[source], cause[source]
        if 0 <= own[reader] < first[reader]:
            late, early = (
                repr(graph.nodes[int(nodes[place])].name) for place in (reader, cause[reader])
            )
            raise ConfigurationError(
                (
                    f"constraints put {late} into stage {own[reader]}, but it depends on "
                    f"{early} in "
                    f"stage {first[reader]}"
                ),
                hint="a stage may read from earlier stages only",
                where="constraints",
            )
    for source, reader in sorted(flow.pairs(), reverse=True):
        last[source] = min(last[source], last[reader])
    return DivisionSpace(flow, stages, first, last)


def downsets(flow: Flow, most: int) -> Members | None:
    """All downsets, smaller ones first; None where there are more than `most`."""
    levels = downset_levels(flow.needs(), most)
    return (
        None
        if levels is None
        else membership([mask for level in levels for mask in level], flow.operators)
    )
