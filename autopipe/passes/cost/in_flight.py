"""How many samples a stage keeps between forward and backward under kFkB schedules, whatever its successors run.

A kFkB schedule starts with some forwards, goes on with k backwards and k forwards alternately, and drains. Jeon et al.,
"GraphPipe" (2024), section 6 and appendix A.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def table_2(k: int, size: int, next_k: int, next_size: int, next_in_flight: int) -> int:
    """Samples in flight at a stage with `k` and micro-batches of `size`, before one successor: the paper's Table 2."""
    most = max(size, next_size)
    own, following = k * size, next_k * next_size
    if own == following:
        more = following if most == following else 2 * most
    elif own < following:
        if own < next_size:
            more = next_size
        else:
            more = most if most == own else 2 * most
    elif size > following:
        more = own - following + size
    elif most == following:
        more = own
    else:
        more = own - following + 2 * most
    return next_in_flight + more


def in_flight_samples(k: int, size: int, next_k: int, next_size: int, next_in_flight: int) -> int:
    """As Table 2 has it, in whole micro-batches of the stage, and never fewer than the successor has to see to go on.

    Where a table's figure is no whole number of micro-batches the next larger one keeps the pipeline busy. The
    successor runs `next_k` micro-batches backward only after as many forward; where neither k * size divides the other,
    the table can have too few for that, and both stages would wait for each other.
    """
    together = math.gcd(k * size, next_k * next_size)
    least = next_in_flight + k * size - together
    most = max(least, table_2(k, size, next_k, next_size, next_in_flight))
    return -(-most // size) * size


def last_in_flight(k: int, size: int) -> int:
    """Samples in flight at a stage without successors: its k micro-batches."""
    return k * size


def stages_in_flight(ks: Sequence[int], sizes: Sequence[int], edges: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Samples in flight at each stage of a graph whose edges lead to larger indices: the most that a successor asks."""
    found = [last_in_flight(k, size) for k, size in zip(ks, sizes, strict=True)]
    for stage, following in sorted(edges, reverse=True):
        asked = in_flight_samples(ks[stage], sizes[stage], ks[following], sizes[following], found[following])
        found[stage] = max(found[stage], asked)
    return tuple(found)
