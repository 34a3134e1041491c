"""The best division of a graph that is nearly a line, by dynamic programming over all its downsets.

What is done after some stages is a downset: operators with all that they depend on. A deep model without branches has
few of them, and then this is exact, whatever the number of stages; where there are many branches, there are too many.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from autopipe.passes.placement.tepdist.division.flow import Floats, Flow, Places
from autopipe.passes.placement.tepdist.division.windows import Windows

Members = NDArray[np.bool_]
"""At [d, v] whether downset d has operator v."""

_ROUNDING = 1e-9


def downsets(flow: Flow, most: int) -> Members | None:
    """All downsets, smaller ones first; None where there are more than `most`."""
    needs = [0] * flow.operators
    readers: list[list[int]] = [[] for _ in range(flow.operators)]
    for _, source, reader in zip(*map(np.ndarray.tolist, flow.edges()), strict=True):
        needs[reader] |= 1 << source
        readers[source].append(reader)
    free = frozenset(operator for operator in range(flow.operators) if not needs[operator])
    layer = {0: free}
    found = [0]
    for _ in range(flow.operators):
        following: dict[int, frozenset[int]] = {}
        for downset, ready in layer.items():
            for operator in ready:
                larger = downset | 1 << operator
                if larger not in following:
                    new = [each for each in readers[operator] if needs[each] & ~larger == 0]
                    following[larger] = ready - {operator} | frozenset(new)
        found += sorted(following)
        if len(found) > most:
            return None
        layer = following
    width = -(-flow.operators // 8)
    packed = np.frombuffer(b"".join(each.to_bytes(width, "little") for each in found), dtype=np.uint8)
    return np.unpackbits(packed.reshape(len(found), width), axis=1, count=flow.operators, bitorder="little").astype(
        bool
    )


def possible_stages(flow: Flow, members: Members, limit: float) -> int:
    """How many pairs of downsets differ by work of at most `limit`: what `best_over_downsets` takes grows with them."""
    done = np.sort(members @ flow.work)
    return int((np.searchsorted(done, done + limit, side="right") - np.arange(len(done))).sum())


def best_over_downsets(flow: Flow, members: Members, stages: int, limit: float, windows: Windows) -> Places | None:
    """The stage of each operator where least crosses, as `best_line` says it, but of lines in any order."""

    def received(members: Members, before: int, after: Places) -> Floats:
        return _received(flow, members[before], members, after)

    return _best(flow, members, stages, limit, windows, received, np.add)


def evenest_over_downsets(flow: Flow, members: Members, stages: int, limit: float, windows: Windows) -> Places | None:
    """The stage of each operator where the largest stage takes least work; None where that is more than `limit`."""

    def work(members: Members, before: int, after: Places) -> Floats:
        taken: Floats = (members[after] & ~members[before]) @ flow.work
        return taken

    return _best(flow, members, stages, limit, windows, work, np.maximum)


def _best(
    flow: Flow,
    members: Members,
    stages: int,
    limit: float,
    windows: Windows,
    price: Callable[[Members, int, Places], Floats],
    join: np.ufunc,
) -> Places | None:
    """The stages whose prices, joined, are least; a price is that of all stages from one downset to several others."""
    done = members @ flow.work
    order = np.argsort(done, kind="stable")
    members, done = members[order], done[order]
    packed = np.packbits(members, axis=1)
    best = np.full((stages + 1, len(members)), np.inf)
    best[0] = np.where(members.any(axis=1), np.inf, 0.0)
    origin = np.zeros((stages + 1, len(members)), dtype=np.int64)
    for before in range(len(members)):
        if not np.isfinite(best[:stages, before]).any():
            continue
        low, high = np.searchsorted(done, [done[before], done[before] + limit * (1 + _ROUNDING)], side="right")
        after = low + np.flatnonzero(~(packed[before] & ~packed[low:high]).any(axis=1))
        cost = join(best[:stages, before, None], price(members, before, after)[None, :])
        cost[~_allowed(windows, stages, members[before], members, after)] = np.inf
        better = cost < best[1:, after]
        best[1:, after] = np.where(better, cost, best[1:, after])
        origin[1:, after] = np.where(better, before, origin[1:, after])
    whole = int(np.flatnonzero(members.all(axis=1))[0])
    if not np.isfinite(best[stages, whole]):
        return None
    found = np.zeros(flow.operators, dtype=np.int64)
    for number in range(stages, 0, -1):
        start = int(origin[number, whole])
        found[members[whole] & ~members[start]] = number - 1
        whole = start
    return found


def _received(flow: Flow, before: NDArray[np.bool_], members: Members, after: Places) -> Floats:
    """Bytes that the stage from downset `before` to each of `after` reads of what was made before."""
    received = np.zeros(len(after))
    for value in np.flatnonzero(before[flow.source]).tolist():
        readers = flow.readers[flow.starts[value] : flow.starts[value + 1]]
        readers = readers[~before[readers]]
        if len(readers):
            received += flow.size[value] * members[np.ix_(after, readers)].any(axis=1)
    return received


def _allowed(
    windows: Windows, stages: int, before: NDArray[np.bool_], members: Members, after: Places
) -> NDArray[np.bool_]:
    """At [s, i] whether all operators from downset `before` to number i of `after` may be in stage s."""
    stage = np.arange(stages)[:, None]
    early = np.flatnonzero(~before & (windows.first > 0))
    late = np.flatnonzero(~before & (windows.last < stages - 1))
    first = np.where(members[np.ix_(after, early)], windows.first[early], 0).max(axis=1, initial=0)
    last = np.where(members[np.ix_(after, late)], windows.last[late], stages).min(axis=1, initial=stages)
    allowed: NDArray[np.bool_] = (stage >= first) & (stage <= last)
    return allowed
