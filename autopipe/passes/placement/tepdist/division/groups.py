"""Coarsening: operators that some best division has in one stage anyway become one.

An operator without much work joins a neighbour where no division crosses less for keeping them apart. Operators that
share more bytes than all of a division that is already known crosses are one, too, with all that lies between.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from autopipe.passes.placement.tepdist.division.flow import Bits, Flow, Places, ancestors, make_flow
from autopipe.passes.placement.tepdist.division.windows import Windows

Bools = NDArray[np.bool_]


def grouped(flow: Flow, windows: Windows, cheap: float, ceiling: float) -> Places:
    """The group of each operator; groups are counted in a topological order of theirs.

    Operators that take at most `cheap` work may join others with equal windows. `ceiling` is what some division
    crosses: a value with more bytes stays in its stage.
    """
    group = _joined(flow, flow.source[flow.edges()[0]], flow.readers, flow.size[flow.edges()[0]] > ceiling)
    while True:
        coarse = coarsened(flow, group)
        into, own = _neighbours(coarse, cheap), windows.of_groups(group)
        same = (own.first == own.first[into]) & (own.last == own.last[into])
        joins = np.flatnonzero(same & (into != np.arange(coarse.operators)))
        if not len(joins):
            return group
        group = _joined(coarse, joins, into[joins], np.ones(len(joins), dtype=bool))[group]


def coarsened(flow: Flow, group: Places) -> Flow:
    """The flow of the groups."""
    work = np.bincount(group, flow.work).astype(float)
    readers = [flow.readers[start:stop] for start, stop in zip(flow.starts[:-1], flow.starts[1:], strict=True)]
    values = zip(group[flow.source].tolist(), flow.size.tolist(), readers, strict=True)
    return make_flow(work, [(source, size, group[each].tolist()) for source, size, each in values])


def _neighbours(flow: Flow, cheap: float) -> Places:
    """For each operator the one that it joins: itself, one it reads, or one that reads it."""
    before = ancestors(flow)
    reads: list[list[int]] = [[] for _ in range(flow.operators)]
    for value, _, reader in zip(*flow.edges(), strict=True):
        reads[reader].append(int(value))
    gives: list[list[int]] = [[] for _ in range(flow.operators)]
    for value, source in enumerate(flow.source.tolist()):
        gives[source].append(value)
    into = np.arange(flow.operators)
    joined = np.zeros(flow.operators, dtype=bool)
    for operator in np.flatnonzero(flow.work <= cheap).tolist():
        earlier = _earlier(flow, before, operator, reads[operator], gives[operator])
        # Two that join one another at once might close a circle: what is joined stays where it is, this time.
        other = (
            earlier if earlier is not None else _sole_reader(flow, before, operator, reads[operator], gives[operator])
        )
        if other is not None and into[other] == other and not joined[operator]:
            into[operator] = other
            joined[other] = True
    return into


def _earlier(flow: Flow, before: Bits, operator: int, reads: list[int], gives: list[int]) -> int | None:
    """The operator that `operator` may follow into an earlier stage: the last it reads, with all it shares behind it.

    What it gives then crosses in place of what the other gives it, which is no less; nobody else needs in the later
    stage what it read there.
    """
    if not reads:
        return None
    last = max(int(flow.source[value]) for value in reads)
    for value in reads:
        others = [int(flow.source[value]), *_readers(flow, value)]
        if any(other not in (last, operator) and not _depends(before, last, other) for other in others):
            return None
    saved = sum(flow.size[value] for value in reads if flow.source[value] == last)
    return last if sum(flow.size[value] for value in gives) <= saved else None


def _sole_reader(flow: Flow, before: Bits, operator: int, reads: list[int], gives: list[int]) -> int | None:
    """The operator that `operator` may wait for: its first reader, of which all other readers come after.

    What it reads then crosses in place of what it gives, which is no less.
    """
    if not gives:
        return None
    readers = sorted({reader for value in gives for reader in _readers(flow, value)})
    if any(not _depends(before, reader, readers[0]) for reader in readers[1:]):
        return None
    saved = sum(flow.size[value] for value in gives if readers[0] in _readers(flow, value))
    return readers[0] if sum(flow.size[value] for value in reads) <= saved else None


def _readers(flow: Flow, value: int) -> list[int]:
    found: list[int] = flow.readers[flow.starts[value] : flow.starts[value + 1]].tolist()
    return found


def _depends(before: Bits, operator: int, other: int) -> bool:
    return bool(before[operator, other >> 3] & 0x80 >> (other & 7))


def _joined(flow: Flow, one: Places, other: Places, together: Bools) -> Places:
    """The groups, where pairs of operators with `together` are in one, and with them what lies between."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    _, sources, readers = flow.edges()
    rows = np.concatenate((sources, one[together], other[together]))
    columns = np.concatenate((readers, other[together], one[together]))
    size = flow.operators
    matrix = csr_array((np.ones(len(rows)), (rows, columns)), shape=(size, size))
    count, label = connected_components(matrix, directed=True, connection="strong")
    return _in_order(count, label.astype(np.int64), sources, readers)


def _in_order(count: int, label: Places, sources: Places, readers: Places) -> Places:
    """The labels, numbered in a topological order in which a group comes as early as its last operator lets it."""
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
    return place[label]
