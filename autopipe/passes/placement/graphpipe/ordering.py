"""Where to cut a region that is not series-parallel, at the least loss of what could run at the same time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MOST_CUTS = 2**18
"""Places of cuts that are compared at once, times units."""


def least_ordering_cut(units: list[int], above: Sequence[int], weights: Sequence[float]) -> list[int]:
    """The first of two parts of `units`, ascending, the second of which is then to wait for all of the first.

    Of the cuts below or above one unit, and of those along the given order, it is the one that puts the smallest share
    of the pairs across it, by weight, in an order that they do not have.
    """
    count = len(units)
    earlier = _matrix(units, above)
    free = ~(earlier | earlier.T | np.eye(count, dtype=bool))
    weight = np.array([weights[unit] for unit in units])
    weight = weight / max(float(weight.sum()), 1e-30) + 1e-6 / count
    firsts = _first_parts(earlier)
    lost = ((firsts * weight) @ free * weight * ~firsts).sum(axis=1)
    pairs = (firsts @ weight) * (~firsts @ weight)
    best = int(np.argmin(lost / pairs))
    return [unit for unit, inside in zip(units, firsts[best].tolist(), strict=True) if inside]


def _matrix(units: list[int], above: Sequence[int]) -> NDArray[np.bool_]:
    """`[i, j]`: whether unit j waits for unit i."""
    size = (max(units) + 8) // 8
    rows = [
        np.frombuffer(above[unit].to_bytes(-(-max(above[unit].bit_length(), 1) // 8), "little")[:size], np.uint8)
        for unit in units
    ]
    found = np.zeros((len(units), size), dtype=np.uint8)
    for place, row in enumerate(rows):
        found[place, : len(row)] = row
    waits: NDArray[np.bool_] = np.unpackbits(found, axis=1, bitorder="little")[:, units].astype(bool).T
    return waits


def _first_parts(earlier: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """First parts of possible cuts, a row each: neither empty nor all, and each with all that its units wait for."""
    count = len(earlier)
    own = np.eye(count, dtype=bool)
    along = np.tri(count, count, -1, dtype=bool)[1:]
    found = np.concatenate((along, earlier.T | own, earlier.T, ~(earlier | own), ~earlier))
    sizes = found.sum(axis=1)
    found = np.unique(found[(sizes > 0) & (sizes < count)], axis=0)
    step = -(-len(found) * count // _MOST_CUTS)
    chosen: NDArray[np.bool_] = found[::step]
    return chosen
