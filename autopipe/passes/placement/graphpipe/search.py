"""The dynamic programme: the fewest devices on which every stage meets a target, by how much its
source keeps.

Jeon et al., "GraphPipe" (2024), Algorithm 1, asks for the fewest samples in flight on a given
number of devices. Here it is the other way round, which is the same question: for each number of
micro-batches in flight at the source (its *level*, under 1F1B one more than the highest level of
its successors) the fewest devices. Devices of parts in series and in parallel then both add up, and
one table serves all numbers of devices. Where devices are of several kinds, which stand in runs,
their number is counted from the last device on: the number taken tells which run is next, and fewer
taken are never worse. A stage has devices of one run; those that are left over where a run goes on
to the one before count as taken.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.passes.placement.graphpipe.series_parallel import BlockRun, Fork, Region

Devices = NDArray[np.int16]
NEVER = 10_000  # More devices than there are, and so few that two of them add up in 16 bits.
Front = NDArray[np.int32]
"""Stages to the right of each place in the line, as a stage that ends there sees them.

`front[0, level, place]` is the fewest devices for all that lies from `place` on, in such a way that
the highest level among the successors of a stage that ends at `place` is `level`. An entry that
needs no fewer devices than one of a lower level is left out. Where stages are traced, `front[1,
level, place]` is the number of the first of them; 0 at the end of the line.
"""


@dataclass(frozen=True, slots=True)
class PartitionStage:
    """A stage of an answer: blocks `start` to `stop - 1`, with at most `level` micro-batches in
    flight.
    """

    start: int
    stop: int
    level: int
    run: int  # The run of its devices.


class TargetProbe:
    """One probe: `needs(level)[run][start, stop]` are the fewest devices of a run on which blocks
    `start` to `stop - 1` meet the target as one stage with `level` micro-batches in flight; `NEVER`
    where they do not. `runs` says how many devices there are of each.
    """

    def __init__(
        self,
        needs: Callable[[int], tuple[Devices, ...]],
        places: int,
        runs: Sequence[int],
        levels: int,
        traced: bool = False,
    ) -> None:
        self.needs = needs
        self.levels = levels
        self.nothing: Front = np.full((1 + traced, levels + 1, places), NEVER, dtype=np.int32)
        self.ends = tuple(itertools.accumulate(reversed(runs)))
        """How many devices are taken at most with those of each run, the last run first."""
        least = np.minimum.reduce(needs(min(1, levels)))
        before = np.full(places, NEVER, dtype=np.int16)
        before[0] = 0
        for stop in range(1, places):
            before[stop] = min(NEVER, int((before[:stop] + least[:stop, stop]).min()))
        self.limit: Devices = np.minimum(self.ends[-1] - before + 1, NEVER).astype(np.int16)
        """Exclusive bound on the devices for all that lies from a place on: what lies before it
        takes the others, at least, however many micro-batches its stages keep.
        """
        self.stages: list[tuple[PartitionStage, int]] = []
        """Stages, each with the number, counted from 1, of the one that follows on its way."""

    def least(self, regions: tuple[Region, ...]) -> tuple[int, tuple[PartitionStage, ...]]:
        """The fewest devices for a whole line, and its stages from left to right where they are
        traced.
        """
        front = self.nothing.copy()
        front[:, 0, -1] = 0
        self._line(regions, front, self.levels)
        best = int(front[0, :, 0].argmin())
        devices = int(front[0, best, 0])
        number = int(front[1, best, 0]) if len(front) > 1 and devices < NEVER else 0
        found = []
        while number:
            stage, number = self.stages[number - 1]
            found.append(stage)
        return devices, tuple(found)

    def _line(self, regions: tuple[Region, ...], front: Front, most: int) -> None:
        """Go on from what lies to the right of `regions` to their first place; no level is above
        `most`.
        """
        for region in reversed(regions):
            if isinstance(region, BlockRun):
                self._run(region, front, most)
            else:
                self._fork(region, front, most)

    def _run(self, run: BlockRun, front: Front, most: int) -> None:
        places = slice(run.start, run.stop)
        limit = self.limit[places]
        behind = front[0, :most, run.start + 1 :]
        filled = _filled(behind)
        for level in range(1, most + 1):
            if not filled[level - 1]:
                continue
            seen = behind[level - 1]
            stops = (seen < NEVER).nonzero()[0]
            if not len(stops):
                continue
            sums = self._taken(level, run, stops + (run.start + 1), seen[stops].astype(np.int16))
            devices = np.minimum.reduce(sums, axis=1)
            better = devices < limit
            if not np.count_nonzero(better):
                continue
            if level < most:
                filled[level] = True
            limit = np.where(better, devices, limit)
            front[0, level, places] = np.where(better, devices, NEVER)
            if len(front) > 1:
                chosen = stops[sums.argmin(axis=1)] + run.start + 1
                for place in np.flatnonzero(better):
                    stop = int(chosen[place])
                    taken = bisect.bisect_left(self.ends, int(devices[place]))
                    stage = PartitionStage(
                        run.start + int(place), stop, level, len(self.ends) - 1 - taken
                    )
                    self.stages.append((stage, int(front[1, level - 1, stop])))
                    front[1, level, run.start + place] = len(self.stages)

    def _taken(self, level: int, run: BlockRun, stops: NDArray[np.int64], seen: Devices) -> Devices:
        """The devices taken with a stage from each place of a run of blocks to `stops`, where
        `seen` are behind it.
        """
        found: list[Devices] = []
        start = 0
        for needs, end in zip(reversed(self.needs(level)), self.ends, strict=True):
            sums = needs[run.start : run.stop].take(stops, axis=1)
            sums += np.maximum(seen, start) if start else seen
            found.append(
                sums if end == self.ends[-1] else np.where(sums > end, NEVER, sums).astype(np.int16)
            )
            start = end
        return found[0] if len(found) == 1 else np.minimum.reduce(found)

    def _fork(self, fork: Fork, front: Front, most: int) -> None:
        """Whatever joins the branches has one level; a stage before them sees the highest level of
        their sources.
        """
        places = slice(fork.start, fork.stop)
        stop = fork.stop
        columns = np.arange(fork.start, fork.stop)
        found = self.nothing.copy()

        def keep(ends: Front, level: int) -> None:
            """Note for each place the fewest devices, of any level up to `level`, as of that
            level.
            """
            best = ends[0, :, places].argmin(axis=0)
            better = ends[0, best, columns] < found[0, level, columns]
            found[:, level, columns[better]] = ends[:, best[better], columns[better]]

        filled = _filled(front[0, : most + 1, stop + 1 :])
        for level in range(most + 1):
            if front[0, level, stop] == NEVER and not (level and filled[level - 1]):
                continue
            # The join has `level`: in a stage that begins there, or in one that begins in a branch.
            behind = self.nothing.copy()
            behind[:, level, stop] = front[:, level, stop]
            if level:
                behind[:, level - 1, stop + 1 :] = front[:, level - 1, stop + 1 :]
            passed: list[Front] = []
            ends = self._branches(fork, behind.copy(), level, most, passed)
            keep(ends, most)
            if not fork.start:
                continue  # Nothing lies before, which would see their levels.
            least = ends[0, :, places].min(axis=0)
            for highest in range(max(level, 1), most):
                ends = self._branches(fork, behind.copy(), level, highest, passed)
                keep(ends, highest)
                if (ends[0, :, places].min(axis=0) == least).all():
                    break
        devices = found[0, :, places]
        devices[1:][devices[1:] >= np.minimum.accumulate(devices, axis=0)[:-1]] = NEVER
        front[:, :, places] = found[:, :, places]

    def _branches(
        self, fork: Fork, front: Front, level: int, most: int, passed: list[Front]
    ) -> Front:
        """The branches from the last to the first; what joins them has `level`. At first `passed`
        gets what each came to. With fewer levels, a branch behind which all is as before has the
        same on those as it had.
        """
        known = iter(tuple(passed))
        for branch in reversed(fork.branches):
            places = slice(branch[0].start, branch[-1].stop)
            stop = branch[-1].stop
            if stop < fork.stop:
                # The stages of the branch that begins there are no successors: they are seen as of
                # `level`.
                best = front[:, front[0, :, stop].argmin(), stop].copy()
                front[0, :, stop] = NEVER
                front[:, level, stop] = best
            before = next(known, None)
            if before is not None and np.array_equal(
                front[0, : most + 1, stop:], before[0, : most + 1, stop:]
            ):
                front[:, : most + 1, places] = before[:, : most + 1, places]
            else:
                self._line(branch, front, most)
            if before is None:
                passed.append(front.copy())
        return front


def _filled(devices: Front) -> list[bool]:
    """For each level whether it has an entry."""
    found: list[bool] = np.logical_or.reduce(devices < NEVER, axis=1).tolist()
    return found


def fewest_devices(needs: Sequence[Devices], runs: Sequence[int]) -> int:
    """Result of `TargetProbe.least` where `needs`, one a run of `runs` devices, are the same at all
    levels. It is `NEVER` where there is no line. Without levels each place has one number, and
    branches are a line like all else.
    """
    ends = tuple(itertools.accumulate(reversed(runs)))
    kinds = tuple(zip(reversed(needs), (0, *ends), ends, strict=False))
    front = np.full(len(needs[0]), NEVER, dtype=np.int16)
    front[-1] = 0
    for place in range(len(front) - 2, -1, -1):
        seen = front[place + 1 :]
        for own, start, end in kinds:
            least = int(
                (own[place, place + 1 :] + (np.maximum(seen, start) if start else seen)).min()
            )
            if least <= end:
                front[place] = min(front[place], least)
    return int(front[0])
