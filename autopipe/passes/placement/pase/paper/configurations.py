"""The configurations of a layer: how many parts each axis of its iteration space is cut into (PaSE, section II)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Degrees = npt.NDArray[np.int64]
"""[configurations, axes]: parts of each axis."""


def divisors(extent: int, cutoff: int, devices: int) -> list[int]:
    """Ascending divisors c ≤ `devices` of `extent` that leave parts of at least `cutoff`; 1 where there is none."""
    found = [c for c in range(1, min(extent, devices) + 1) if extent % c == 0 and extent >= c * cutoff]
    return found or [1]


def configurations(extents: Sequence[int], devices: int, cutoff: int) -> Degrees:
    """All degrees, axis by axis, whose product is at most `devices`, in lexicographic order; [count, axes].

    An axis of extent 1 is never cut. The first row cuts nothing.
    """
    degrees = np.ones((1, 0), dtype=np.int64)
    used = np.ones(1, dtype=np.int64)
    for extent in extents:
        choices = np.array(divisors(extent, cutoff, devices), dtype=np.int64)
        product = used[:, None] * choices
        before, choice = np.nonzero(product <= devices)
        degrees = np.concatenate((degrees[before], choices[choice, None]), axis=1)
        used = product[before, choice]
    return degrees


def contiguous(degrees: Degrees, extents: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Which configurations cut a row-major tensor of `extents` into contiguous pieces; [configurations].

    Outer axes are cut into single elements, the next one into any parts, those inside it not at all.
    """
    single = degrees == np.array(extents, dtype=np.int64)
    outer = np.cumprod(single, axis=1, dtype=bool)
    inside = np.ones_like(outer)
    inside[:, 1:] = outer[:, :-1]
    return np.asarray(((degrees == 1) | inside).all(axis=1))
