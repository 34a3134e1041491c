"""The fewest devices for a line, however many micro-batches its stages keep: what no number of them gets below."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from autopipe.passes.placement.graphpipe.line import BlockRun, Region
from autopipe.passes.placement.graphpipe.search import NEVER, Devices


def fewest_devices(regions: tuple[Region, ...], needs: Sequence[Devices], runs: Sequence[int]) -> int:
    """Result of `Search.least` where `needs`, one a run of `runs` devices, are the same at all levels.

    It is `NEVER` where there is no line. Without levels each place has one number, and branches are a line like all
    else.
    """
    ends = tuple(itertools.accumulate(reversed(runs)))
    kinds = tuple(zip(reversed(needs), (0, *ends), ends, strict=False))
    front = np.full(len(needs[0]), NEVER, dtype=np.int16)
    front[-1] = 0
    for place in _places(regions):
        seen = front[place + 1 :]
        for own, start, end in kinds:
            least = int((own[place, place + 1 :] + (np.maximum(seen, start) if start else seen)).min())
            if least <= end:
                front[place] = min(front[place], least)
    return int(front[0])


def _places(regions: tuple[Region, ...]) -> Iterator[int]:
    """All places where a stage may begin, from the last to the first."""
    for region in reversed(regions):
        if isinstance(region, BlockRun):
            yield from range(region.stop - 1, region.start - 1, -1)
        else:
            for branch in reversed(region.branches):
                yield from _places(branch)
