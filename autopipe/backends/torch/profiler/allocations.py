"""Memory that a rank allocates: torch's own record of it, and the parameters, which torch does not allocate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.profiler import ProfilerActivity, profile


class Allocations:
    """The most bytes that torch had allocated at once in this thread since recording began; 0 before it has ended."""

    def __init__(self) -> None:
        self.peak_bytes = 0

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record for the length of the block; what runs in it is slower."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
            yield
        self.peak_bytes = _peak(run)


def _peak(run: profile) -> int:
    assert run.profiler is not None and run.profiler.kineto_results is not None
    events: list[Any] = [each for each in run.profiler.kineto_results.events() if each.name() == "[memory]"]
    used = most = 0
    for event in sorted(events, key=lambda each: int(each.start_ns())):
        used += int(event.nbytes())
        most = max(most, used)
    return most


def parameter_bytes(rank: Any) -> int:
    """Bytes of a rank's parameters that are numpy's: all but those that have moved into rows of shares."""
    moved = {id(each) for bucket in rank.reduction.shared for each in bucket.parameters}
    return sum(int(each.nbytes) for each in rank.parameters.values() if id(each) not in moved)
