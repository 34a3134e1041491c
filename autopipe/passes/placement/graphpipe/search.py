"""The dynamic programme: the fewest devices on which every stage meets a target, by how much its source keeps.

Jeon et al., "GraphPipe" (2024), Algorithm 1, asks for the fewest samples in flight on a given number of devices. Here
it is the other way round, which is the same question: for each number of micro-batches in flight at the source (its
*level*, under 1F1B one more than the highest level of its successors) the fewest devices. Devices of parts in series
and in parallel then both add up, and one table serves all numbers of devices. Where devices are of several kinds, which
stand in runs, their number is counted from the last device on: the number taken tells which run is next, and fewer
taken are never worse. A stage has devices of one run; those that are left over where a run goes on to the one before
count as taken.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.passes.placement.graphpipe.series_parallel import BlockRun, Region

Devices = NDArray[np.int16]

NEVER = 10_000
"""More devices than there are, and so few that two of them add up in 16 bits."""


@dataclass(frozen=True, slots=True)
class PartitionStage:
    """A stage of an answer: blocks `start` to `stop - 1`, with at most `level` micro-batches in flight."""

    start: int
    stop: int
    level: int
    run: int
    """The run of its devices."""


class DownstreamStages:
    """Stages to the right of a place in the line, as a stage that ends there sees them.

    `devices[level, place]` is the fewest devices for all that lies from `place` on, in such a way that the highest
    level among the successors of a stage that ends at `place` is `level`. An entry that needs no fewer devices than one
    of a lower level is left out.
    """

    def __init__(self, levels: int, places: int, traced: bool) -> None:
        self.devices: Devices = np.full((levels + 1, places), NEVER, dtype=np.int16)
        self.ways = np.full((levels + 1, places), -1, dtype=np.int32) if traced else None

    def masked(self, level: int, stop: int) -> DownstreamStages:
        """View of the branches of a fork that ends at `stop`, if the join has `level`: in a stage that begins there, or
        in one that begins in a branch.
        """
        found = DownstreamStages(len(self.devices) - 1, self.devices.shape[1], self.ways is not None)
        found.take(self, slice(level, level + 1), slice(stop, stop + 1))
        if level:
            found.take(self, slice(level - 1, level), slice(stop + 1, None))
        return found

    def copy(self) -> DownstreamStages:
        """The same, to be changed."""
        found = DownstreamStages(0, 0, False)
        found.devices = self.devices.copy()
        found.ways = None if self.ways is None else self.ways.copy()
        return found

    def reset(self, place: int, level: int) -> None:
        """Make whatever lies at `place` be seen as of `level`: the stages there are no successors."""
        best = int(self.devices[:, place].argmin())
        devices = self.devices[best, place]
        self.devices[:, place] = NEVER
        self.devices[level, place] = devices
        if self.ways is not None:
            self.ways[level, place] = self.ways[best, place]

    def is_as(self, other: DownstreamStages, most: int, stop: int) -> bool:
        """True if all from `stop` on is the same on levels up to `most`."""
        mine, others = self.devices[: most + 1, stop:], other.devices[: most + 1, stop:]
        return mine.tobytes() == others.tobytes()

    def take(self, other: DownstreamStages, levels: slice, places: slice) -> None:
        """Have what another has at some levels and places."""
        self.devices[levels, places] = other.devices[levels, places]
        if self.ways is not None and other.ways is not None:
            self.ways[levels, places] = other.ways[levels, places]


class TargetProbe:
    """One probe: `needs(level)[run][start, stop]` are the fewest devices of a run on which blocks `start` to `stop - 1`
    meet the target as one stage with `level` micro-batches in flight; `NEVER` where they do not. `runs` says how many
    devices there are of each."""

    def __init__(
        self,
        needs: Callable[[int], tuple[Devices, ...]],
        places: int,
        runs: Sequence[int],
        levels: int,
        traced: bool = False,
    ) -> None:
        self.needs, self.places, self.levels, self.traced = needs, places, levels, traced
        self.ends = tuple(itertools.accumulate(reversed(runs)))
        """How many devices are taken at most with those of each run, the last run first."""
        room = self.ends[-1] - _before(needs(min(1, levels)), places)
        self.limit: Devices = np.minimum(room + 1, NEVER).astype(np.int16)
        """Exclusive bound on the devices for all that lies from a place on: what lies before it takes the others."""
        self.pieces: list[tuple[PartitionStage, int]] = []
        """Stages of ways, each with the number of the next one on its way; -1 at the end."""

    def least(self, regions: tuple[Region, ...]) -> tuple[int, int]:
        """The fewest devices for a whole line, and the number of a way (-1 where ways are not traced)."""
        front = DownstreamStages(self.levels, self.places, self.traced)
        front.devices[0, self.places - 1] = 0
        self._line(regions, front, self.levels)
        best = int(front.devices[:, 0].argmin())
        return int(front.devices[best, 0]), -1 if front.ways is None else int(front.ways[best, 0])

    def way(self, number: int) -> tuple[PartitionStage, ...]:
        """The stages of a way, from left to right."""
        found = []
        while number >= 0:
            piece, number = self.pieces[number]
            found.append(piece)
        return tuple(found)

    def _line(self, regions: tuple[Region, ...], front: DownstreamStages, most: int) -> None:
        """Go on from what lies to the right of `regions` to their first place; no level is above `most`."""
        for region in reversed(regions):
            if isinstance(region, BlockRun):
                self._run(region, front, most)
            else:
                self._fork(region.branches, region.start, region.stop, front, most)

    def _run(self, run: BlockRun, front: DownstreamStages, most: int) -> None:
        places = slice(run.start, run.stop)
        limit = self.limit[places]
        behind = front.devices[:most, run.start + 1 :]
        filled = _filled(behind)
        for level in range(1, most + 1):
            if not filled[level - 1]:
                continue
            seen = behind[level - 1]
            stops = (seen < NEVER).nonzero()[0]
            if not len(stops):
                continue
            sums = self._taken(level, run, stops + (run.start + 1), seen[stops])
            devices = np.minimum.reduce(sums, axis=1)
            better = devices < limit
            if not np.count_nonzero(better):
                continue
            if level < most:
                filled[level] = True
            limit = np.where(better, devices, limit)
            front.devices[level, places] = np.where(better, devices, NEVER)
            if front.ways is not None:
                chosen = stops[sums.argmin(axis=1)] + run.start + 1
                for place in np.flatnonzero(better):
                    stop = int(chosen[place])
                    front.ways[level, run.start + place] = len(self.pieces)
                    turn = bisect.bisect_left(self.ends, int(devices[place]))
                    piece = PartitionStage(run.start + int(place), stop, level, len(self.ends) - 1 - turn)
                    self.pieces.append((piece, int(front.ways[level - 1, stop])))

    def _taken(self, level: int, run: BlockRun, stops: NDArray[np.int64], seen: Devices) -> Devices:
        """The devices taken with a stage from each place of a run of blocks to `stops`, where `seen` are behind it."""
        found: list[Devices] = []
        start = 0
        for needs, end in zip(reversed(self.needs(level)), self.ends, strict=True):
            sums = needs[run.start : run.stop].take(stops, axis=1)
            sums += np.maximum(seen, start) if start else seen
            found.append(sums if end == self.ends[-1] else np.where(sums > end, NEVER, sums).astype(np.int16))
            start = end
        return found[0] if len(found) == 1 else np.minimum.reduce(found)

    def _fork(
        self, branches: tuple[tuple[Region, ...], ...], start: int, stop: int, front: DownstreamStages, most: int
    ) -> None:
        """Whatever joins the branches has one level; a stage before them sees the highest level of their sources."""
        found = DownstreamStages(self.levels, self.places, self.traced)
        filled = _filled(front.devices[: most + 1, stop + 1 :])
        for level in range(most + 1):
            if front.devices[level, stop] == NEVER and not (level and filled[level - 1]):
                continue
            inside = front.masked(level, stop)
            passed: list[DownstreamStages] = []
            ends = self._branches(branches, inside.copy(), level, most, passed)
            self._keep(found, ends, most, start, stop)
            if not start:
                continue  # Nothing lies before, which would see their levels.
            least = ends.devices[:, start:stop].min(axis=0)
            for highest in range(max(level, 1), most):
                ends = self._branches_again(branches, inside.copy(), level, highest, passed)
                self._keep(found, ends, highest, start, stop)
                if (ends.devices[:, start:stop].min(axis=0) == least).all():
                    break
        _leave_out(found, start, stop)
        front.devices[:, start:stop] = found.devices[:, start:stop]
        if front.ways is not None and found.ways is not None:
            front.ways[:, start:stop] = found.ways[:, start:stop]

    def _branches(
        self,
        branches: tuple[tuple[Region, ...], ...],
        front: DownstreamStages,
        level: int,
        most: int,
        passed: list[DownstreamStages],
    ) -> DownstreamStages:
        """The branches from the last to the first; what joins them has `level`. `passed` gets what each came to."""
        for number, branch in reversed(list(enumerate(branches))):
            if number < len(branches) - 1:
                front.reset(branches[number + 1][0].start, level)
            self._line(branch, front, most)
            passed.append(front.copy())
        return front

    def _branches_again(
        self,
        branches: tuple[tuple[Region, ...], ...],
        front: DownstreamStages,
        level: int,
        most: int,
        passed: list[DownstreamStages],
    ) -> DownstreamStages:
        """The same with fewer levels. A branch behind which all is as before has the same on those as it had."""
        for number, before in zip(reversed(range(len(branches))), passed, strict=True):
            branch = branches[number]
            if number < len(branches) - 1:
                front.reset(branches[number + 1][0].start, level)
            if front.is_as(before, most, branch[-1].stop):
                front.take(before, slice(most + 1), slice(branch[0].start, branch[-1].stop))
            else:
                self._line(branch, front, most)
        return front

    def _keep(self, found: DownstreamStages, ends: DownstreamStages, level: int, start: int, stop: int) -> None:
        """Note for each place of a fork the fewest devices, of any level up to `level`, as of that level."""
        best = ends.devices[:, start:stop].argmin(axis=0)
        columns = np.arange(start, stop)
        devices = ends.devices[best, columns]
        better = devices < found.devices[level, columns]
        found.devices[level, columns[better]] = devices[better]
        if found.ways is not None and ends.ways is not None:
            found.ways[level, columns[better]] = ends.ways[best, columns][better]


def _filled(devices: Devices) -> list[bool]:
    """For each level whether it has an entry."""
    found: list[bool] = np.logical_or.reduce(devices < NEVER, axis=1).tolist()
    return found


def _before(needs: Sequence[Devices], places: int) -> Devices:
    """For each place the fewest devices for all that lies before it, however many micro-batches its stages keep."""
    least = np.minimum.reduce(needs)
    found = np.full(places, NEVER, dtype=np.int16)
    found[0] = 0
    for stop in range(1, places):
        found[stop] = min(NEVER, int((found[:stop] + least[:stop, stop]).min()))
    return found


def _leave_out(front: DownstreamStages, start: int, stop: int) -> None:
    """Leave out entries that need no fewer devices than one of a lower level."""
    devices = front.devices[:, start:stop]
    lower = np.minimum.accumulate(devices, axis=0)[:-1]
    devices[1:][devices[1:] >= lower] = NEVER
