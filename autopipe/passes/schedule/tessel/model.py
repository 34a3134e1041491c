"""Lower bounds on any schedule, from the blocks alone.

Budget and callbacks of a search.

A cyclic schedule: one unit's starts, repeated every period; and whether it keeps all rules.

Start times of every block of all units, from a steady state or any order.

The steady state that the starts of blocks show.

Memory changes of a unit that frees as much as it allocates, whatever the blocks given do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import combinations

from autopipe.ir.block_schedule import BlockGraph, BlockRepetend, BlockSchedule
from autopipe.passes.solvers.cp_sat import Limit

Progress = Callable[[int | None, int, float], None]
"""Called with the best value so far (None before the first), its lower bound and the seconds used."""

WORK_PER_SECOND = 0.35
"""CP-SAT's deterministic time that a second of the limit stands for: one worker does more than this in a second, so
that the work runs out before the clock does and the answer depends on the seed alone."""

_USABLE = 0.95
"""Share of the seconds that is searched; the rest is for completing and checking what was found."""
_BETWEEN_REPORTS_S = 0.1
"""Seconds between two calls of `progress`."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Options of a search."""

    time_limit: float = 10.0
    """Seconds in all.

    The solver's work is limited in its own deterministic time, for which the seconds stand: the same input and seed
    give the same answer wherever that ends before the clock. On machines slower than that the clock ends it.
    """
    seed: int = 0
    progress: Progress | None = None
    """Told of better values and bounds, at most ten times a second."""
    patience: float = 1.0
    """How many times its seconds a search may take where a busy machine needs them for the same work, and so for the
    same answer."""
    unrolled: int | None = None
    """Most blocks of a device that a program should write out: schedules with more of them repeat from there on. None
    for two units a device, or a schedule of 2000 blocks in all."""


@dataclass(slots=True)
class Budget:
    """Rest of a search's budget."""

    options: SearchOptions
    start: float = field(default_factory=time.perf_counter)
    work: float = 0.0
    """Deterministic time spent so far."""
    reported: float = float("-inf")

    @property
    def used(self) -> float:
        """Seconds since the search began."""
        return time.perf_counter() - self.start

    @property
    def over(self) -> bool:
        """True if the seconds are used up but for what it takes to finish."""
        return self.used > self._usable

    def limit(self, share: float) -> Limit:
        """A limit of a share of the work that is left, and of all seconds that are."""
        work = self.options.time_limit * WORK_PER_SECOND - self.work
        return Limit(self._usable - self.used, work * share, self.options.seed)

    @property
    def _usable(self) -> float:
        return _USABLE * self.options.time_limit * self.options.patience

    def spend(self, work: float) -> None:
        """Count work that was done."""
        self.work += work

    def report(self, value: int | None, bound: int) -> None:
        """Tell whoever wants to know."""
        if self.options.progress and self.used >= self.reported + _BETWEEN_REPORTS_S:
            self.reported = self.used
            self.options.progress(value, bound, self.used)


def period_bound(graph: BlockGraph) -> int:
    """No steady state has a shorter period: the largest load of a device, and Little's law where memory is limited."""
    return max(*graph.loads, *(_little(graph, device) for device in range(graph.devices)), 1)


def heads(graph: BlockGraph) -> tuple[int, ...]:
    """Earliest start of each block in a unit that is alone and has all devices to itself."""
    found = [0] * len(graph.blocks)
    for index in graph.order:
        block = graph.blocks[index]
        for position, other in enumerate(block.after):
            found[index] = max(found[index], found[other] + graph.blocks[other].time + block.delay(position))
    return tuple(found)


def tails(graph: BlockGraph) -> tuple[int, ...]:
    """Least time from the end of each block to the end of its unit."""
    found = [0] * len(graph.blocks)
    for index in reversed(graph.order):
        block = graph.blocks[index]
        for position, other in enumerate(block.after):
            found[other] = max(found[other], found[index] + block.time + block.delay(position))
    return tuple(found)


def unit_bound(graph: BlockGraph) -> int:
    """No unit takes less from its first start to its last end."""
    return max(head + block.time for head, block in zip(heads(graph), graph.blocks, strict=True))


def makespan_bound(graph: BlockGraph, units: int) -> int:
    """Lower bound on the makespan of `units` units: one unit's longest way, and each device's load between its ends."""
    first, last = heads(graph), tails(graph)
    found = unit_bound(graph)
    on_device: list[list[int]] = [[] for _ in range(graph.devices)]
    for index, block in enumerate(graph.blocks):
        for device in block.devices:
            on_device[device].append(index)
    for members, load in zip(on_device, graph.loads, strict=True):
        if members:
            ends = min(first[index] for index in members) + min(last[index] for index in members)
            found = max(found, units * load + ends)
    return found


def distances(graph: BlockGraph, source: int) -> dict[int, int]:
    """Least time from the start of a block to the start of each that waits for it, itself included."""
    found = {source: 0}
    for index in graph.order:
        block = graph.blocks[index]
        for position, other in enumerate(block.after):
            if other in found:
                way = found[other] + graph.blocks[other].time + block.delay(position)
                found[index] = max(found.get(index, 0), way)
    return found


def _little(graph: BlockGraph, device: int) -> int:
    """Little's law: memory in use on average is what a unit holds times how long it holds it, over the period."""
    limit = graph.memory[device]
    step = math.gcd(*(block.memory for block in graph.blocks if device in block.devices))
    if limit is None or step == 0 or limit < step:
        return 0
    return math.ceil(_held(graph, device) / (limit // step * step))


def _held(graph: BlockGraph, device: int) -> int:
    """Least sum over the memory of one unit on a device of the time that it is held; 0 where nothing can be said.

    The least of -sum(memory x start) under the dependencies. Each way of sending what is allocated to where it is freed
    is a solution of the dual problem and so gives a lower bound: here the longest ways first.
    """
    left = {index: block.memory for index, block in enumerate(graph.blocks) if device in block.devices}
    held = 0
    for index in [index for index, memory in left.items() if memory > 0]:
        away = distances(graph, index)
        for other in sorted((each for each in away if left.get(each, 0) < 0), key=lambda each: -away[each]):
            amount = min(left[index], -left[other])
            left[index] -= amount
            left[other] += amount
            held += amount * away[other]
    return held if not any(left.values()) else 0


def changes(graph: BlockGraph, device: int) -> dict[int, int]:
    """Change of the memory in use on a device by each block there, with the sum 0.

    Memory that a unit never frees is taken off its last allocations; memory it frees without having it, off its first
    frees.
    """
    found = {index: block.memory for index, block in enumerate(graph.blocks) if device in block.devices}
    left = sum(found.values())
    for index in reversed(graph.order) if left > 0 else graph.order:
        if index in found and found[index] * left > 0:
            taken = min(abs(found[index]), abs(left)) * (1 if left > 0 else -1)
            found[index] -= taken
            left -= taken
    return found


def kept(graph: BlockGraph, device: int) -> int:
    """Memory that a unit adds on a device and never frees; negative where it frees more."""
    return sum(block.memory for block in graph.blocks if device in block.devices)


def frees_all(graph: BlockGraph) -> bool:
    """True if a unit frees on each limited device what it allocates there, so that `changes` are its own."""
    return not any(kept(graph, device) for device, room in enumerate(graph.memory) if room is not None)


def reserved(graph: BlockGraph, units: int) -> BlockGraph:
    """The same blocks, with the memory that `units` units never free taken from the room from the start."""
    rooms = enumerate(graph.memory)
    memory = (None if room is None else room - units * max(0, kept(graph, device)) for device, room in rooms)
    return replace(graph, memory=tuple(memory))


@dataclass(frozen=True, slots=True)
class PeriodicStarts:
    """Block i of unit n starts at `starts[i] + period * n`, for every whole n."""

    period: int
    starts: tuple[int, ...]

    @property
    def stages(self) -> tuple[int, ...]:
        """Periods that each block starts after the period of the first one."""
        first = min(self.starts) // self.period
        return tuple(start // self.period - first for start in self.starts)

    @property
    def phases(self) -> tuple[int, ...]:
        """Start of each block within its period."""
        return tuple(start % self.period for start in self.starts)

    def latency(self, graph: BlockGraph) -> int:
        """Time of one unit from its first start to its last end."""
        ends = [start + block.time for start, block in zip(self.starts, graph.blocks, strict=True)]
        return max(ends) - min(self.starts)


def steady_peak(graph: BlockGraph, cyclic: PeriodicStarts, device: int) -> int:
    """Most memory in use on a device while units follow one another without end."""
    added = changes(graph, device)
    phases, stages = cyclic.phases, cyclic.stages
    used = -sum(change * stages[index] for index, change in added.items())
    peak = 0
    for index in sorted(added, key=lambda each: phases[each]):
        used += added[index]
        peak = max(peak, used)
    return peak


def is_valid(graph: BlockGraph, cyclic: PeriodicStarts) -> bool:
    """True if dependencies are kept, no two blocks of any units overlap on a device, and memory suffices."""
    starts, period = cyclic.starts, cyclic.period
    for index, block in enumerate(graph.blocks):
        for position, other in enumerate(block.after):
            if starts[index] < starts[other] + graph.blocks[other].time + block.delay(position):
                return False
        if block.time > period:
            return False
    for first, second in sharing_pairs(graph):
        gap = (starts[second] - starts[first]) % period
        if gap < graph.blocks[first].time or period - gap < graph.blocks[second].time:
            return False
    limits = enumerate(graph.memory)
    return all(limit is None or steady_peak(graph, cyclic, device) <= limit for device, limit in limits)


def sharing_pairs(graph: BlockGraph) -> list[tuple[int, int]]:
    """Pairs of blocks that share a device, each once."""
    pairs: set[tuple[int, int]] = set()
    for device in range(graph.devices):
        members = [index for index, block in enumerate(graph.blocks) if device in block.devices]
        pairs.update(combinations(members, 2))
    return sorted(pairs)


Starts = tuple[tuple[int, ...], ...]
"""`starts[n][i]`: start of block i of unit n."""


def unroll(graph: BlockGraph, cyclic: PeriodicStarts, units: int) -> Starts:
    """Units in the steady state's order on each device, each block as soon as this order and its own waits allow.

    Memory is as in the steady state or less: it depends on the order of starts alone.
    """
    return compact(
        graph, tuple(tuple(start + cyclic.period * unit for start in cyclic.starts) for unit in range(units))
    )


def compact(graph: BlockGraph, starts: Starts) -> Starts:
    """The same order of starts on each device, each block as early as it allows."""
    order = sorted((start, unit, index) for unit, each in enumerate(starts) for index, start in enumerate(each))
    return in_order(graph, len(starts), ((unit, index) for _, unit, index in order))


def in_order(graph: BlockGraph, units: int, order: Iterable[tuple[int, int]]) -> Starts:
    """Starts as early as possible for (unit, block) in an order in which each comes after all that it waits for."""
    blocks = graph.blocks
    free = [0] * graph.devices
    starts = [[0] * len(blocks) for _ in range(units)]
    for unit, index in order:
        block = blocks[index]
        start = max(free[device] for device in block.devices)
        for position, other in enumerate(block.after):
            start = max(start, starts[unit][other] + blocks[other].time + block.delay(position))
        starts[unit][index] = start
        for device in block.devices:
            free[device] = start + block.time
    return tuple(tuple(each) for each in starts)


def makespan(graph: BlockGraph, starts: Starts) -> int:
    """End of the last block."""
    return max(start + block.time for unit in starts for start, block in zip(unit, graph.blocks, strict=True))


def peaks(graph: BlockGraph, starts: Starts) -> tuple[int, ...]:
    """Most memory in use on each device."""
    return BlockSchedule(graph, starts).peak_memory


def fits(graph: BlockGraph, starts: Starts) -> bool:
    """True if memory suffices on all devices."""
    rooms = zip(peaks(graph, starts), graph.memory, strict=True)
    return all(room is None or peak <= room for peak, room in rooms)


def observed_state(graph: BlockGraph, starts: Starts) -> BlockSchedule:
    """The schedule with the steady state that is found in its middle, if any.

    A steady state is there where, over the middle third, every block of a unit a fixed number of units further starts
    later by one distance. The period is its share a unit; a repetend is given where it holds one unit.
    """
    busiest, count = max(graph.loads), len(starts)
    first, last = count // 3, count - count // 3
    for group in range(1, (last - first) // 2 + 1):
        distance = turn_of(starts, group, first, last)
        if distance is None or distance % group:
            continue
        period = distance // group
        if group > 1:
            return BlockSchedule(graph, starts, period, busiest * count)
        return BlockSchedule(graph, starts, period, busiest, period == busiest, _repetend(starts[first], period))
    return BlockSchedule(graph, starts, None, busiest * count)


def turn_of(starts: Starts, group: int, first: int, last: int) -> int | None:
    """By how much later each unit from `first` on, up to `last`, is than the one `group` before; None if it varies."""
    distances = {
        later - start
        for unit in range(first, last - group)
        for start, later in zip(starts[unit], starts[unit + group], strict=True)
    }
    return distances.pop() if len(distances) == 1 else None


def _repetend(starts: tuple[int, ...], period: int) -> BlockRepetend:
    """One repetition: starts of a unit brought to within a period of the first one's start.

    A block that starts k periods after its unit's first one stands, beside that first one, for a unit k earlier.
    """
    first = min(starts)
    turns = [(start - first) // period for start in starts]
    offsets = tuple(max(turns) - turn for turn in turns)
    return BlockRepetend(tuple((start - first) % period for start in starts), offsets)
