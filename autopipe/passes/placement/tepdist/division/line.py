"""The best division of operators in one line: every stage a run of them (dynamic programming)."""

from __future__ import annotations

import numpy as np

from autopipe.passes.placement.tepdist.division.flow import Floats, Flow, Places

_ROUNDING = 1e-9
"""Share of a limit that sums of work may be above it."""


def best_line(flow: Flow, stages: int, limit: float, first: Places, last: Places) -> Places | None:
    """The stage of each operator in the line that least crosses; None where there is no line.

    No stage takes more work than `limit`, each has some, and operator v is in one of the stages
    `first[v]` to `last[v]`. What a stage receives depends on where it begins and ends alone, and all stages receive
    together what crosses: so the best line follows from the best lines of fewer stages.
    """
    count = flow.operators
    done = np.concatenate(([0.0], np.cumsum(flow.work)))
    best = np.full((stages + 1, count + 1), np.inf)
    best[0, 0] = 0.0
    origin = np.zeros((stages + 1, count + 1), dtype=np.int64)
    arrivals = _Arrivals(flow)
    for start in range(count):
        arriving = arrivals.at(start)
        if not np.isfinite(best[:stages, start]).any():
            continue
        stop = int(np.searchsorted(done, done[start] + limit * (1 + _ROUNDING), side="right")) - 1
        if stop <= start:
            continue
        received = np.cumsum(arriving[start:stop])
        low, high = np.maximum.accumulate(first[start:stop]), np.minimum.accumulate(last[start:stop])
        cost = best[:stages, start, None] + received[None, :]
        stage = np.arange(stages)[:, None]
        cost[(stage < low) | (stage > high) | (done[start + 1 : stop + 1] <= done[start])] = np.inf
        ends = slice(start + 1, stop + 1)
        better = cost < best[1:, ends]
        best[1:, ends][better] = cost[better]
        origin[1:, ends][better] = start
    if not np.isfinite(best[stages, count]):
        return None
    found = np.zeros(count, dtype=np.int64)
    end = count
    for number in range(stages, 0, -1):
        begin = int(origin[number, end])
        found[begin:end] = number - 1
        end = begin
    return found


class _Arrivals:
    """Values that a stage receives, by the operator at which it does, as the stage's first operator moves on."""

    def __init__(self, flow: Flow) -> None:
        self._bytes = np.zeros(flow.operators)
        self._changes: list[list[tuple[int, float]]] = [[] for _ in range(flow.operators + 1)]
        for value, size in enumerate(flow.size.tolist()):
            readers = flow.readers[flow.starts[value] : flow.starts[value + 1]].tolist()
            # A stage that begins after one reader and before the next receives the value for the next.
            for begin, reader in zip([int(flow.source[value]), *readers], readers, strict=False):
                self._changes[begin + 1].append((reader, size))
                self._changes[reader + 1].append((reader, -size))

    def at(self, start: int) -> Floats:
        """Bytes that a stage beginning with operator `start` receives for each operator, if it is in the stage."""
        for reader, size in self._changes[start]:
            self._bytes[reader] += size
        return self._bytes


def least_limit(flow: Flow, stages: int, first: Places, last: Places) -> float:
    """The least work that the largest stage of a line can have, to a millionth; infinite where there is no line."""
    total = float(flow.work.sum())
    low, high = max(total / stages, float(flow.work.max(initial=0.0))), total
    if not is_any_line(flow, stages, high, first, last):
        return np.inf
    if is_any_line(flow, stages, low, first, last):
        return low
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        if is_any_line(flow, stages, middle, first, last):
            high = middle
        else:
            low = middle
    return high


def is_any_line(flow: Flow, stages: int, limit: float, first: Places, last: Places) -> bool:
    """True if there is a line at all, as `best_line` asks for it."""
    count = flow.operators
    done = np.concatenate(([0.0], np.cumsum(flow.work)))
    furthest = np.searchsorted(done, done[:-1] + limit * (1 + _ROUNDING), side="right") - 1
    nearest = np.searchsorted(done, done[:-1], side="right")
    reached = np.zeros(count + 1, dtype=bool)
    reached[0] = True
    for stage in range(stages):
        refused = np.flatnonzero((first > stage) | (last < stage))
        barrier = np.append(refused, count)[np.searchsorted(refused, np.arange(count))]
        ends = np.minimum(furthest, barrier)
        starts = np.flatnonzero(reached[:-1] & (ends >= nearest))
        change = np.zeros(count + 2, dtype=np.int64)
        np.add.at(change, nearest[starts], 1)
        np.add.at(change, ends[starts] + 1, -1)
        reached = np.cumsum(change)[: count + 1] > 0
    return bool(reached[count])
