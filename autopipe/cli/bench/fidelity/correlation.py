"""How far two figures order the same things alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """The correlation of ranks, equal values sharing the mean of theirs; None where one figure is the same for all.

    Spearman, "The proof and measurement of association between two things", American Journal of Psychology 15(1), 1904.
    """
    ranks = [_ranks(np.asarray(each, dtype=float)) for each in (first, second)]
    centred = [each - each.mean() for each in ranks]
    spread = float(np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum()))
    return float((centred[0] * centred[1]).sum()) / spread if spread else None


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[places], dtype=float)
