"""The dynamic program of GraphPipe: the minimum number of devices on which all stages meet a target
time, for each number of micro-batches in flight.

Objective: given a target t (seconds per micro-batch), partition the chain of blocks into stages,
each a contiguous range, so that each stage takes at most t seconds on its devices and fits their
memory, with the minimum number of devices in total.

The *level* of a stage is its number of micro-batches in flight under 1F1B (micro-batches whose
forward has run and whose backward has not): one more than the highest level of its successors. Jeon
et al., "GraphPipe" (2024), Algorithm 1, minimise the samples in flight for a given number of
devices. This module exchanges the two quantities: it minimises the number of devices for each level
of the first stage. Then the devices of parts in series and of parts in parallel both add up, and
one table serves all numbers of devices.

Recurrence for a chain without forks. Let need(l, i, j) be the minimum number of devices for blocks
i to j - 1 as one stage with l micro-batches in flight, and D(l, i) the minimum number of devices
for all blocks from i on if a stage that ends at i has a successor of level l:

    D(0, end) = 0
    D(l, i) = min over j > i of need(l, i, j) + D(l - 1, j)

At a fork, the branches are solved from the last to the first. All stages before the fork see the
maximum level over the branches, and all branches end at the level of the stage that joins them.

Clusters with several device types: the devices form *runs* of equal devices, and a stage uses
devices of one run. Devices are counted from the last run to the first, so that the number of
devices in use determines the current run. If a stage moves on to the next run, the unused devices
of the current run count as used.
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
UNREACHABLE = 10_000
"""Number of devices that stands for "impossible". It exceeds the size of any cluster, and the sum
of two such numbers fits in 16 bits.
"""
Front = NDArray[np.int32]
"""The table of the dynamic program, of shape [1 or 2, levels, block boundaries]. The level of a
stage is its number of micro-batches in flight.

`front[0, level, i]` is D(level, i): the minimum number of devices for all blocks from i on, if
`level` is the highest level among the successors of a stage that ends at i. An entry is omitted
(`UNREACHABLE`) if an entry of a lower level needs at most as many devices. If stages are recorded
(`TargetProbe.traced`), `front[1, level, i]` is the number, counted from 1, of the first stage of
this solution in `TargetProbe.stages`, and 0 at the end of the chain.
"""


@dataclass(frozen=True, slots=True)
class PartitionStage:
    """A stage of a solution: blocks `start` to `stop - 1`, with at most `level` micro-batches in
    flight, on devices of the run (range of equal devices) with index `run`.
    """

    start: int
    stop: int
    level: int
    run: int


class TargetProbe:
    """The dynamic program for one target time.

    A run is a range of equal devices, and the level of a stage is its number of micro-batches in
    flight.

    needs: `needs(level)[run][start, stop]` is the minimum number of devices of a run on which
    blocks `start` to `stop - 1` meet the target as one stage with `level` micro-batches in flight,
    or `UNREACHABLE`.
    places: number of block boundaries, one more than the number of blocks.
    runs: number of devices of each run.
    levels: maximum level of a stage.
    traced: True to record the stages of the solution.
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
        self.nothing: Front = np.full((1 + traced, levels + 1, places), UNREACHABLE, dtype=np.int32)
        self.ends = tuple(itertools.accumulate(reversed(runs)))
        """For each run (range of equal devices), from the last to the first: number of devices in
        use if this run and all later runs are fully used.
        """
        least = np.minimum.reduce(needs(min(1, levels)))
        before = np.full(places, UNREACHABLE, dtype=np.int16)
        before[0] = 0
        for stop in range(1, places):
            before[stop] = min(UNREACHABLE, int((before[:stop] + least[:stop, stop]).min()))
        self.limit: Devices = np.minimum(self.ends[-1] - before + 1, UNREACHABLE).astype(np.int16)
        """For each block boundary: a number of devices that the blocks after it must not reach,
        because otherwise too few devices remain for the blocks before it.
        """
        self.stages: list[tuple[PartitionStage, int]] = []
        """Recorded stages, each with the number, counted from 1, of the next stage of its solution;
        0 after the last stage.
        """

    def solve(self, regions: tuple[Region, ...]) -> tuple[int, tuple[PartitionStage, ...]]:
        """Return (devices, stages) for a chain that consists of `regions`: sequences of blocks in
        series, and forks into parallel branches.

        devices: the minimum number of devices; `UNREACHABLE` if the chain cannot meet the target.
        stages: the stages of the solution in order; () unless they are recorded.
        """
        front = self.nothing.copy()
        front[:, 0, -1] = 0
        self._fill_regions(regions, front, self.levels)
        best = int(front[0, :, 0].argmin())
        devices = int(front[0, best, 0])
        number = int(front[1, best, 0]) if len(front) > 1 and devices < UNREACHABLE else 0
        found = []
        while number:
            stage, number = self.stages[number - 1]
            found.append(stage)
        return devices, tuple(found)

    def _fill_regions(self, regions: tuple[Region, ...], front: Front, most: int) -> None:
        """Fill the entries of the table `front` for all blocks of `regions`, from the last block to
        the first. No stage has a level (number of micro-batches in flight) above `most`.
        """
        for region in reversed(regions):
            if isinstance(region, BlockRun):
                self._fill_run(region, front, most)
            else:
                self._fill_fork(region, front, most)

    def _fill_run(self, run: BlockRun, front: Front, most: int) -> None:
        """Fill the entries of the table `front` for `run`, a sequence of blocks in series. The
        entries for the blocks after it must be present. No stage has a level (number of
        micro-batches in flight) above `most`.
        """
        places = slice(run.start, run.stop)
        limit = self.limit[places]
        behind = front[0, :most, run.start + 1 :]
        filled = _reachable_levels(behind)
        for level in range(1, most + 1):
            if not filled[level - 1]:
                continue
            seen = behind[level - 1]
            stops = (seen < UNREACHABLE).nonzero()[0]
            if not len(stops):
                continue
            sums = self._devices_in_use(
                level, run, stops + (run.start + 1), seen[stops].astype(np.int16)
            )
            devices = np.minimum.reduce(sums, axis=1)
            better = devices < limit
            if not np.count_nonzero(better):
                continue
            if level < most:
                filled[level] = True
            limit = np.where(better, devices, limit)
            front[0, level, places] = np.where(better, devices, UNREACHABLE)
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

    def _devices_in_use(
        self, level: int, run: BlockRun, stops: NDArray[np.int64], seen: Devices
    ) -> Devices:
        """Return a matrix with the number of devices in use after a stage was added.

        The stage has `level` micro-batches in flight. It starts at a block of `run` (rows), and
        ends at one of the block boundaries `stops` (columns). `seen` contains, for each of `stops`,
        the number of devices that the blocks after it use.
        """
        found: list[Devices] = []
        start = 0
        for needs, end in zip(reversed(self.needs(level)), self.ends, strict=True):
            sums = needs[run.start : run.stop].take(stops, axis=1)
            sums += np.maximum(seen, start) if start else seen
            found.append(
                sums
                if end == self.ends[-1]
                else np.where(sums > end, UNREACHABLE, sums).astype(np.int16)
            )
            start = end
        return found[0] if len(found) == 1 else np.minimum.reduce(found)

    def _fill_fork(self, fork: Fork, front: Front, most: int) -> None:
        """Fill the entries of the table `front` for a fork: parallel branches, whose results the
        block after them (the join) reads.

        The level of a stage is its number of micro-batches in flight. All possible levels of the
        stage that contains the join are tried. For a stage before the fork, the maximum level over
        the branches counts. No stage has a level above `most`.
        """
        places = slice(fork.start, fork.stop)
        stop = fork.stop
        columns = np.arange(fork.start, fork.stop)
        found = self.nothing.copy()

        def copy_minimum(ends: Front, level: int) -> None:
            """Copy entries from the table `ends` to the table `found`.

            For each block boundary, the entry of `ends` with the fewest devices over all levels
            replaces the entry of `found` at level `level`, if it needs fewer devices.
            """
            best = ends[0, :, places].argmin(axis=0)
            better = ends[0, best, columns] < found[0, level, columns]
            found[:, level, columns[better]] = ends[:, best[better], columns[better]]

        filled = _reachable_levels(front[0, : most + 1, stop + 1 :])
        for level in range(most + 1):
            if front[0, level, stop] == UNREACHABLE and not (level and filled[level - 1]):
                continue
            # The join is in a stage of level `level`. The stage starts at the join or inside the
            # last branch.
            behind = self.nothing.copy()
            behind[:, level, stop] = front[:, level, stop]
            if level:
                behind[:, level - 1, stop + 1 :] = front[:, level - 1, stop + 1 :]
            passed: list[Front] = []
            ends = self._fill_branches(fork, behind.copy(), level, most, passed)
            copy_minimum(ends, most)
            if not fork.start:
                # If the chain starts with the fork, no stage precedes it. The maximum level over
                # the branches then affects no other stage, so lower values of `highest` need no
                # trial.
                continue
            least = ends[0, :, places].min(axis=0)
            for highest in range(max(level, 1), most):
                ends = self._fill_branches(fork, behind.copy(), level, highest, passed)
                copy_minimum(ends, highest)
                if (ends[0, :, places].min(axis=0) == least).all():
                    break
        devices = found[0, :, places]
        devices[1:][devices[1:] >= np.minimum.accumulate(devices, axis=0)[:-1]] = UNREACHABLE
        front[:, :, places] = found[:, :, places]

    def _fill_branches(
        self, fork: Fork, front: Front, level: int, most: int, passed: list[Front]
    ) -> Front:
        """Fill the entries of the table `front` for the branches of a fork, from the last to the
        first, and return the table. The level of a stage is its number of micro-batches in flight.

        level: level of the stage that joins the branches.
        most: maximum level inside the branches.
        passed: the tables after each branch. The first call for this `level` appends them. Later
        calls have a smaller `most`, and copy the entries of a branch from `passed` if the entries
        after the branch are equal.
        """
        known = iter(tuple(passed))
        for branch in reversed(fork.branches):
            places = slice(branch[0].start, branch[-1].stop)
            stop = branch[-1].stop
            if stop < fork.stop:
                # Stages of the next branch do not succeed the stages of this branch, so their
                # levels do not matter. The only successor is the join, so the best entry over all
                # levels becomes the entry at the join's level.
                best = front[:, front[0, :, stop].argmin(), stop].copy()
                front[0, :, stop] = UNREACHABLE
                front[:, level, stop] = best
            before = next(known, None)
            if before is not None and np.array_equal(
                front[0, : most + 1, stop:], before[0, : most + 1, stop:]
            ):
                front[:, : most + 1, places] = before[:, : most + 1, places]
            else:
                self._fill_regions(branch, front, most)
            if before is None:
                passed.append(front.copy())
        return front


def _reachable_levels(devices: Front) -> list[bool]:
    """Return a list with one value per level (row of `devices`): True if a number of devices in the
    row is not `UNREACHABLE`.
    """
    found: list[bool] = np.logical_or.reduce(devices < UNREACHABLE, axis=1).tolist()
    return found


def minimum_devices(needs: Sequence[Devices], runs: Sequence[int]) -> int:
    """Return the minimum number of devices that `TargetProbe.solve` returns if `needs` is equal at
    all levels (numbers of micro-batches in flight).

    A run is a range of equal devices. `needs` contains one matrix [start, stop] per run: the
    minimum number of its devices for blocks `start` to `stop - 1` as one stage. `runs` contains the
    number of devices of each run. Without levels, the table has one entry per block boundary, and
    forks need no special treatment, so this function is faster than `TargetProbe`.
    """
    ends = tuple(itertools.accumulate(reversed(runs)))
    kinds = tuple(zip(reversed(needs), (0, *ends), ends, strict=False))
    front = np.full(len(needs[0]), UNREACHABLE, dtype=np.int16)
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
