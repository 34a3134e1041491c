"""Finding the steady state of a device's list of tasks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopipe.ir.schedule import Phase, Repetend, Task

_PHASES = list(Phase)
_LARGEST_STRIDE = 8
"""Micro-batches that one repetition may advance by; a body runs each of its kinds of task that many times."""


def find_repetends(orders: Sequence[Sequence[Task]]) -> tuple[Repetend, ...]:
    """The repetition of each list; those of devices that share one are found once."""
    known = {id(order): order for order in orders}
    found = {number: find_repetend(order) for number, order in known.items()}
    return tuple(found[id(order)] for order in orders)


def find_repetend(order: Sequence[Task]) -> Repetend:
    """The repetition that leaves the fewest lines when it is written once; the shortest, then the earliest of equals.

    The list is warm-up, `count` repetitions of `length` tasks that move on by `stride` micro-batches, cool-down.
    A repetend of length 0 says that nothing repeats.
    """
    best, fewest = Repetend(0, 0, 0), len(order)
    kinds = np.array([task.stage * len(_PHASES) + _PHASES.index(task.phase) for task in order], dtype=np.int64)
    micro_batches = np.array([task.micro_batch for task in order], dtype=np.int64)
    longest = min(len(order) // 2, _LARGEST_STRIDE * len(set(kinds.tolist())))
    for length in range(1, longest + 1):
        strides = micro_batches[length:] - micro_batches[:-length]
        strides = np.where((kinds[length:] == kinds[:-length]) & (strides > 0), strides, 0)
        for start, size, stride in _runs(strides):
            count = 1 + size // length
            lines = len(order) - length * (count - 1)
            if count > 1 and lines < fewest:
                best, fewest = Repetend(start, length, count, stride), lines
    return best


def _runs(strides: np.ndarray) -> list[tuple[int, int, int]]:
    """Maximal runs of one stride above 0 as (start, length, stride)."""
    edges = np.flatnonzero(np.diff(strides)) + 1
    starts = np.concatenate(([0], edges))
    ends = np.concatenate((edges, [len(strides)]))
    return [
        (int(start), int(end - start), int(strides[start]))
        for start, end in zip(starts, ends, strict=True)
        if strides[start] > 0
    ]
