"""List schedules of all units: blocks that others wait for first, and what nothing waits for wherever a device idles.

Where backwards are split, weight gradients fill the ends so well that these are often the shortest that can be, as in
Qi et al., "Zero Bubble Pipeline Parallelism" (2024), section 3. A search for the steady state alone does not see that.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from autopipe.ir.block_schedule import BlockGraph
from autopipe.passes.schedule.tessel.model import Starts, makespan, makespan_bound, tails

_TRIED = 8
"""Numbers of units in flight that are tried."""
_TRIAL_UNITS = 6
"""Units of a trial, as a multiple of those in flight."""


def shortest_greedy(graph: BlockGraph, units: int) -> Starts | None:
    """The shortest of the list schedules, and of equal ones that with fewest units in flight; None where none fits.

    Numbers in flight are compared by fewer units where there are many.
    """
    best: tuple[int, int] | None = None
    for in_flight in _numbers_in_flight(graph):
        trial = min(units, _TRIAL_UNITS * in_flight)
        starts = greedy(graph, trial, in_flight)
        if starts is None:
            continue
        excess = makespan(graph, starts) - makespan_bound(graph, trial)
        if best is None or excess < best[0]:
            best = excess, in_flight
        if not excess:
            break
    return greedy(graph, units, best[1]) if best is not None else None


def _numbers_in_flight(graph: BlockGraph) -> Iterator[int]:
    """From what one unit's length needs at full load to more than twice that."""
    least = math.ceil(max(tails(graph)) / max(graph.loads))
    step = max(1, math.ceil((least + 2) / _TRIED))
    yield from range(least, 2 * least + 2, step)


def greedy(graph: BlockGraph, units: int, in_flight: int) -> Starts | None:
    """A list schedule with at most `in_flight` units begun and not ended on any device.

    None where limits leave units waiting for each other.
    """
    state = _State(graph, units, in_flight)
    while state.moments:
        now = state.moments[0][0]
        devices: set[int] = set()
        while state.moments and state.moments[0][0] == now:
            devices.add(heapq.heappop(state.moments)[1])
        state.start_ready(now, devices)
    return None if state.left else tuple(map(tuple, state.starts))


class _State:
    """State of a list schedule: the blocks started, and when devices are looked at again.

    Units are equal, so of each block only the oldest unit that has not started it is looked at.
    """

    def __init__(self, graph: BlockGraph, units: int, in_flight: int) -> None:
        count, devices = len(graph.blocks), range(graph.devices)
        self.graph, self.units, self.in_flight = graph, units, in_flight
        self.starts = [[-1] * count for _ in range(units)]
        self.left = units * count
        self.next_unit = [0] * count
        self.moments = [(0, device) for device in devices]
        self.free = [0] * graph.devices
        self.used = [0] * graph.devices
        self.members = [
            [index for index, block in enumerate(graph.blocks) if device in block.devices] for device in devices
        ]
        self.waiting = [[len(members)] * units for members in self.members]
        """Of each device and unit, how many of its blocks have not started."""
        self.open = [0] * graph.devices
        """Units begun and not ended on each device."""
        self.followers: list[list[int]] = [[] for _ in range(count)]
        for index, block in enumerate(graph.blocks):
            for other in block.after:
                self.followers[other].append(index)
        self.ranks = [(self._rank(index), -far) for index, far in enumerate(tails(graph))]

    def _rank(self, index: int) -> int:
        """Priority: blocks that others wait for come before blocks that allocate, and these before the rest."""
        block = self.graph.blocks[index]
        if block.memory > 0 or not block.after:
            return 1
        return 0 if self.followers[index] else 2

    def start_ready(self, now: int, devices: set[int]) -> None:
        """Start what can on some devices; what waits for one of several keeps the others from what comes behind it."""
        kept: set[int] = set()
        choices = {index for device in devices if self.free[device] <= now for index in self.members[device]}
        for index in sorted(choices, key=lambda each: (self.ranks[each][0], self.next_unit[each], self.ranks[each][1])):
            unit, block = self.next_unit[index], self.graph.blocks[index]
            if unit == self.units or not self._ready(unit, index, now):
                continue
            if any(self.free[device] > now or device in kept for device in block.devices):
                kept.update(block.devices)
            elif self._has_room(unit, index):
                self._start(unit, index, now)

    def _ready(self, unit: int, index: int, now: int) -> bool:
        blocks, starts = self.graph.blocks, self.starts[unit]
        for position, other in enumerate(blocks[index].after):
            if starts[other] < 0 or starts[other] + blocks[other].time + blocks[index].delay(position) > now:
                return False
        return True

    def _has_room(self, unit: int, index: int) -> bool:
        """True if memory and the number of units in flight allow it."""
        for device in self.graph.blocks[index].devices:
            room = self.graph.memory[device]
            if room is not None and self.used[device] + self.graph.blocks[index].memory > room:
                return False
            if self.waiting[device][unit] == len(self.members[device]) and self.open[device] == self.in_flight:
                return False
        return True

    def _start(self, unit: int, index: int, now: int) -> None:
        block = self.graph.blocks[index]
        end = now + block.time
        self.starts[unit][index] = now
        self.next_unit[index] += 1
        self.left -= 1
        for device in block.devices:
            self.free[device] = end
            self.used[device] += block.memory
            self.open[device] += self.waiting[device][unit] == len(self.members[device])
            self.waiting[device][unit] -= 1
            self.open[device] -= self.waiting[device][unit] == 0
            heapq.heappush(self.moments, (end, device))
        for follower in self.followers[index]:
            after = self.graph.blocks[follower]
            delay = after.delay(after.after.index(index))
            for device in after.devices:
                heapq.heappush(self.moments, (end + delay, device))
