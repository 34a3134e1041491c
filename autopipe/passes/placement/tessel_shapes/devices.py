"""Which devices each part of a shape gets."""

from __future__ import annotations

from collections.abc import Sequence


def shared_out(weights: Sequence[float], devices: int) -> tuple[tuple[int, ...], ...]:
    """Neighbouring devices for each part, one at least: each further one to the part with most work a device."""
    counts = [1] * len(weights)
    for _ in range(devices - len(weights)):
        counts[max(range(len(weights)), key=lambda part: weights[part] / counts[part])] += 1
    starts = [sum(counts[:part]) for part in range(len(weights))]
    return tuple(tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=True))
