"""Different things told apart by small numbers, and which of them each one is."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

_Item = TypeVar("_Item", bound=Hashable)


def numbered(items: Iterable[_Item]) -> tuple[list[_Item], Integers]:
    """The different ones of `items`, in order, and which of them each one is."""
    known: dict[_Item, int] = {}
    of = [known.setdefault(item, len(known)) for item in items]
    return list(known), np.array(of, dtype=np.int64)


def distinct(codes: Integers) -> tuple[Integers, Integers]:
    """The different ones of small numbers, ascending, and which of them each one is."""
    present = np.zeros(int(codes.max(initial=0)) + 1, dtype=bool)
    present[codes] = True
    numbers = np.cumsum(present) - 1
    return np.flatnonzero(present), numbers[codes]


def combined(columns: Iterable[tuple[int, Integers]], rows: int) -> tuple[Integers, Integers]:
    """The different rows of columns of numbers, each given with how many numbers it has.

    The places of first occurrences, ascending, and which of them each of the `rows` equals.
    """
    codes, count = np.zeros(rows, dtype=np.int64), 1
    for most, column in columns:
        known, codes = distinct(codes * most + column)
        count = len(known)
    firsts = np.empty(count, dtype=np.int64)
    firsts[codes[::-1]] = np.arange(rows)[::-1]
    order = np.argsort(firsts)
    renumbered = np.empty(count, dtype=np.int64)
    renumbered[order] = np.arange(count)
    return firsts[order], renumbered[codes]
