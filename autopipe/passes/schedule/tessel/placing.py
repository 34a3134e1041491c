"""Putting the blocks of one unit into a period, one after the other, without taking any back."""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.ir.block_schedule import BlockGraph
from autopipe.passes.schedule.tessel.cyclic import PeriodicStarts
from autopipe.passes.schedule.tessel.options import Budget


@dataclass(frozen=True, slots=True)
class PlacementRule:
    """How blocks are put down."""

    order: tuple[int, ...]
    """The blocks in turn."""
    reserve: bool
    """True if the blocks on most devices have their phases beforehand, one behind the other."""
    touch: bool
    """True if blocks stand against a neighbour, so that gaps stay whole."""


class Placing:
    """The blocks and who meets whom, for many ways of putting them down."""

    def __init__(self, graph: BlockGraph, budget: Budget) -> None:
        self.budget = budget
        self.blocks = graph.blocks
        sets = [set(block.devices) for block in graph.blocks]
        count = range(len(sets))
        self.neighbours = [
            [other for other in count if other != index and sets[other] & sets[index]] for index in count
        ]
        self.before = [
            [(other, graph.blocks[other].time + block.delay(at)) for at, other in enumerate(block.after)]
            for block in graph.blocks
        ]
        self.behind: list[list[tuple[int, int]]] = [[] for _ in count]
        for index, waits in enumerate(self.before):
            for other, wait in waits:
                self.behind[other].append((index, wait))
        most, end = max(len(each) for each in sets), 0
        self.reserved: dict[int, int] = {}
        for index in graph.order:
            if 1 < most == len(sets[index]):
                self.reserved[index] = end
                end += graph.blocks[index].time

    def place(self, period: int, way: PlacementRule) -> PeriodicStarts | None:
        """Each block as near as there is a gap to those that it waits for, or else to those that wait for it."""
        starts: dict[int, int] = {}
        phases = dict(self.reserved) if way.reserve else {}
        for index in way.order:
            if self.budget.over:
                return None
            first = max((starts[other] + wait for other, wait in self.before[index] if other in starts), default=None)
            last = min((starts[other] - wait for other, wait in self.behind[index] if other in starts), default=None)
            onward = first is not None or last is None
            near = first or 0 if onward else last or 0
            distances = self._distances(phases, index, near, period, onward, way.touch)
            sign = 1 if onward else -1
            start = next(
                (near + sign * far for far in distances if self._free(phases, index, near + sign * far, period)), None
            )
            if start is None or (onward and last is not None and start > last):
                return None
            starts[index], phases[index] = start, start % period
        turns = min(starts.values()) // period
        return PeriodicStarts(period, tuple(starts[index] - turns * period for index in range(len(starts))))

    def _distances(
        self, phases: dict[int, int], index: int, near: int, period: int, onward: bool, touch: bool
    ) -> list[int]:
        """How far from `near` the block may stand: right there, and where it is before or behind a neighbour."""
        if index in phases:
            return [(phases[index] - near) % period if onward else (near - phases[index]) % period]
        time = self.blocks[index].time
        taken = [(phases[other], self.blocks[other].time) for other in self.neighbours[index] if other in phases]
        meeting = {phase + other for phase, other in taken} | {phase - time for phase, _ in taken}
        found = {(phase - near) % period if onward else (near - phase) % period for phase in meeting}
        return sorted(found if touch and taken else found | {0})

    def _free(self, phases: dict[int, int], index: int, start: int, period: int) -> bool:
        """True if the block overlaps none of its neighbours in any period."""
        time = self.blocks[index].time
        if time > period:
            return False
        for other in self.neighbours[index]:
            if other in phases:
                gap = (phases[other] - start) % period
                if gap < time or period - gap < self.blocks[other].time:
                    return False
        return True
