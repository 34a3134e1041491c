"""Facts of any schedule of blocks: bounds on period and makespan, memory, starts, and when they
repeat.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from autopipe.ir.block_schedule import Block, BlockGraph, BlockRepetend, BlockSchedule
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.words import plural
from autopipe.passes.solvers.cp_sat import Limit

Progress = Callable[[int | None, int, float], None]
"""Called with the best value so far (None before the first), its lower bound and the seconds used.
"""

WORK_PER_SECOND = 0.35
"""CP-SAT's deterministic time that a second of the limit stands for. One worker does more than this
in a second, so that the work runs out before the clock does and the answer depends on the seed
alone.
"""
# Share of the seconds that is searched; the rest is for completing and checking what was found.
_USABLE = 0.95
_BETWEEN_REPORTS_S = 0.1


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How many seconds a search may take, and whom it tells. They stand for deterministic time of
    the solver: the same input and seed give the same answer wherever that ends before the clock.
    """

    time_limit: float = 10.0
    seed: int = 0
    progress: Progress | None = None
    """Told of better values and bounds, at most ten times a second."""
    patience: float = 1.0
    """How many times its seconds a search may take where a busy machine needs them for the same
    work.
    """
    unrolled: int | None = None
    """Most blocks of a device that a program should write out: schedules with more of them repeat
    from there on. None for two units a device, or a schedule of 2000 blocks in all.
    """


@dataclass(slots=True)
class Budget:
    """Rest of a search's budget: seconds of the clock, and `work`, the solver's deterministic time
    spent so far.
    """

    options: SearchOptions
    start: float = field(default_factory=time.perf_counter)
    work: float = 0.0
    reported: float = float("-inf")

    @property
    def used(self) -> float:
        return time.perf_counter() - self.start

    @property
    def left(self) -> float:
        """Seconds, but for what it takes to finish."""
        return _USABLE * self.options.time_limit * self.options.patience - self.used

    def limit(self, share: float) -> Limit:
        """A limit of a share of the work that is left, and of all seconds that are."""
        work = self.options.time_limit * WORK_PER_SECOND - self.work
        return Limit(self.left, work * share, self.options.seed)

    def report(self, value: int | None, bound: int) -> None:
        if self.options.progress and self.used >= self.reported + _BETWEEN_REPORTS_S:
            self.reported = self.used
            self.options.progress(value, bound, self.used)


def heads(graph: BlockGraph) -> tuple[int, ...]:
    """Earliest start of each block in a unit that is alone and has all devices to itself."""
    found = [0] * len(graph.blocks)
    for index in graph.order:
        found[index] = max((found[other] + wait for other, wait in graph.waits[index]), default=0)
    return tuple(found)


def tails(graph: BlockGraph) -> tuple[int, ...]:
    """Least time from the end of each block to the end of its unit."""
    found = [block.time for block in graph.blocks]  # From its start.
    for index in reversed(graph.order):
        for other, wait in graph.waits[index]:
            found[other] = max(found[other], wait + found[index])
    return tuple(least - block.time for least, block in zip(found, graph.blocks, strict=True))


def unit_bound(graph: BlockGraph) -> int:
    return max(head + block.time for head, block in zip(heads(graph), graph.blocks, strict=True))


def makespan_bound(graph: BlockGraph, units: int) -> int:
    """Return a lower bound on the makespan of `units` units.

    It is the maximum of `_load_bound` and, if some blocks are wide, of

        units · W + _load_bound(narrow blocks)

    D: the devices of the block with the most devices. Wide blocks run on all of D, W is their time
    in one unit, and narrow blocks run on a part of D. While a wide block runs, no narrow block
    does: without these intervals, a schedule is one of the narrow blocks alone, in which blocks
    that wait for each other through other blocks keep their order.
    """
    found = _load_bound(graph, units)
    widest = set(max(graph.blocks, key=lambda block: len(block.devices)).devices)
    wide = [index for index, block in enumerate(graph.blocks) if widest.issubset(block.devices)]
    narrow = _narrow_blocks(graph, widest)
    if narrow is None:
        return found
    return max(
        found, units * sum(graph.blocks[index].time for index in wide) + _load_bound(narrow, units)
    )


def _narrow_blocks(graph: BlockGraph, widest: set[int]) -> BlockGraph | None:
    """Return the blocks on a part of the devices `widest`, without delays and memory; None if there
    are none.
    """
    narrow = [
        index
        for index, block in enumerate(graph.blocks)
        if not widest.isdisjoint(block.devices) and not widest.issubset(block.devices)
    ]
    if not narrow:
        return None
    renumbered = {index: position for position, index in enumerate(narrow)}
    before: dict[int, set[int]] = {}  # Of each block, the nearest narrow blocks that it waits for.
    for index in graph.order:
        waits = (
            {other} if other in renumbered else before[other] for other in graph.blocks[index].after
        )
        before[index] = set[int]().union(*waits)
    blocks = (
        replace(
            graph.blocks[index],
            memory=0,
            after=tuple(renumbered[other] for other in before[index]),
            delays=(),
        )
        for index in narrow
    )
    return replace(graph, blocks=tuple(blocks), memory=(None,) * graph.devices)


def _load_bound(graph: BlockGraph, units: int) -> int:
    """Return the maximum of one unit's critical path and each device's load between its ends."""
    first = heads(graph)
    last = tails(graph)
    found = unit_bound(graph)
    for members, load in zip(graph.members, graph.loads, strict=True):
        if members:
            ends = min(first[index] for index in members) + min(last[index] for index in members)
            found = max(found, units * load + ends)
    return found


def period_bound(graph: BlockGraph) -> int:
    """No steady state has a shorter period: the largest load of a device, and Little's law where
    memory is limited.
    """
    return max(*graph.loads, *(_little(graph, device) for device in range(graph.devices)), 1)


def _little(graph: BlockGraph, device: int) -> int:
    """Little's law: memory in use on average is what a unit holds times how long it holds it, over
    the period. The least that a unit holds is the minimum of -sum(memory x start) under the
    dependencies. Each way of sending what is allocated to where it is freed is a solution of the
    dual problem and so gives a lower bound: here the longest ways first. 0 where nothing can be
    said.
    """
    limit = graph.memory[device]
    left = {index: graph.blocks[index].memory for index in graph.members[device]}
    step = math.gcd(*left.values())
    if limit is None or step == 0 or limit < step:
        return 0
    held = 0
    for index in [index for index, memory in left.items() if memory > 0]:
        away = {
            index: 0
        }  # Least time from the block's start to the start of each that waits for it.
        for target in graph.order:
            ways = [away[other] + wait for other, wait in graph.waits[target] if other in away]
            if ways:
                away[target] = max(ways)
        for other in sorted(
            (each for each in away if left.get(each, 0) < 0), key=lambda each: -away[each]
        ):
            amount = min(left[index], -left[other])
            left[index] -= amount
            left[other] += amount
            held += amount * away[other]
    return 0 if any(left.values()) else math.ceil(held / (limit // step * step))


def topological(graph: BlockGraph, rank: Callable[[int, int], Any]) -> tuple[int, ...]:
    """The blocks, each after all that it waits for; of those that may start, the one of least
    rank(block, started). `started` is how many had started when the block might.
    """
    left = [len(set(block.after)) for block in graph.blocks]
    ready = [(rank(index, 0), index) for index, count in enumerate(left) if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        order.append(heapq.heappop(ready)[1])
        for other in graph.following[order[-1]]:
            left[other] -= 1
            if left[other] == 0:
                heapq.heappush(ready, (rank(other, len(order)), other))
    return tuple(order)


def kept(graph: BlockGraph, device: int) -> int:
    """Memory that a unit adds on a device and never frees; negative where it frees more."""
    return sum(graph.blocks[index].memory for index in graph.members[device])


def changes(graph: BlockGraph, device: int) -> dict[int, int]:
    """Change of the memory in use on a device by each block there, with the sum 0. Memory that a
    unit never frees is taken off its last allocations; memory it frees without having it, off its
    first frees.
    """
    found = {index: graph.blocks[index].memory for index in graph.members[device]}
    left = sum(found.values())
    for index in reversed(graph.order) if left > 0 else graph.order:
        if index in found and found[index] * left > 0:
            taken = min(abs(found[index]), abs(left)) * (1 if left > 0 else -1)
            found[index] -= taken
            left -= taken
    return found


def frees_all(graph: BlockGraph) -> bool:
    """True if a unit frees on each limited device what it allocates there, so that `changes` are
    its own.
    """
    return not any(
        kept(graph, device) for device, room in enumerate(graph.memory) if room is not None
    )


def reserved(graph: BlockGraph, units: int) -> BlockGraph:
    """The same blocks, with the memory that `units` units never free taken from the room from the
    start.
    """
    rooms = enumerate(graph.memory)
    memory = (
        None if room is None else room - units * max(0, kept(graph, device))
        for device, room in rooms
    )
    return replace(graph, memory=tuple(memory))


_MOST_STEPS = 1_000_000  # Blocks looked at for one question, after which it stays open.


def require_room(graph: BlockGraph, units: int) -> None:
    """Raise InfeasibleError, naming the device and the least that would do, where no order keeps
    the memory limits.

    Memory changes when blocks start, so what a device needs depends on the order of starts alone;
    and units that free no more than they have allocated only add to one another's needs, so that
    one unit's order decides. The device is one that would not do on its own if there is any,
    otherwise one that would not do beside the limits of the others. Silence is no promise:
    questions that take too long stay open.
    """

    def refusal(device: int, room: int, least: float, why: str) -> InfeasibleError:
        message = f"there is room for {room}, but {least} is the least that would do, {why}"
        return InfeasibleError(
            message, hint=f"give it a memory of {least} or more", where=f"device {device}"
        )

    limited = [(device, room) for device, room in enumerate(graph.memory) if room is not None]
    for device, room in limited:
        if (least := units * kept(graph, device)) > room:
            raise refusal(
                device,
                room,
                least,
                f"as {units} {plural(units, 'unit leaves', 'units leave')} as much in use",
            )
    if not limited or (
        units > 1 and not all(_frees_its_own(graph, device) for device, _ in limited)
    ):
        return
    least_here = least_room(graph, limited[0][0], graph.memory)
    if least_here is None or least_here <= limited[0][1]:
        return
    beside = "while the others keep to their limits"
    for rooms, why in (
        ((None,) * graph.devices, "whatever the order of blocks"),
        (graph.memory, beside),
    ):
        for device, room in limited:
            found = least_room(graph, device, rooms)
            if found is not None and room < found < math.inf:
                raise refusal(device, room, found, why)
    raise InfeasibleError(
        "no order of the blocks keeps to the memory limits of all devices", hint="raise several"
    )


def _frees_its_own(graph: BlockGraph, device: int) -> bool:
    """True if each block that frees comes after blocks of its own that allocated as much: a unit is
    never below 0.
    """
    left = {index: graph.blocks[index].memory for index in graph.members[device]}
    earlier: list[int] = [0] * len(graph.blocks)
    for index in graph.order:
        earlier[index] = 1 << index
        for other in graph.blocks[index].after:
            earlier[index] |= earlier[other]
        for other in left if left.get(index, 0) < 0 else ():
            if left[other] > 0 and earlier[index] >> other & 1:
                taken = min(left[other], -left[index])
                left[other] -= taken
                left[index] += taken
    return all(each >= 0 for each in left.values())


def least_room(graph: BlockGraph, device: int, rooms: Sequence[int | None]) -> float | None:
    """The least room that `device` needs for one unit, with `rooms` on the other devices (None for
    no limit). Infinite where no order keeps to those rooms, None where it is not found out in time.
    Best first over the sets of blocks that have started, as bits: they tell the memory in use. A
    block that allocates nowhere starts as soon as it can: that never does harm.
    """
    blocks = graph.blocks
    steps = 0
    before = [sum(1 << other for other in set(block.after)) for block in blocks]

    def can_start(index: int, started: int) -> bool:
        nonlocal steps
        steps += 1
        return not started >> index & 1 and before[index] & started == before[index]

    def settled(started: int) -> int:
        """The set with all blocks that can start and allocate nowhere."""
        for index in graph.order:
            if blocks[index].memory <= 0 and can_start(index, started):
                started |= 1 << index
        return started

    def fits(block: Block, used: Sequence[int]) -> bool:
        others = [(used[each], rooms[each]) for each in block.devices if each != device]
        return all(room is None or have + block.memory <= room for have, room in others)

    heap = [(0, 0, settled(0))]
    seen = set[int]()
    while heap:
        peak, _, started = heapq.heappop(heap)
        if started in seen:
            continue
        seen.add(started)
        if started == (1 << len(blocks)) - 1:
            return peak
        if steps > _MOST_STEPS:
            return None
        used = [
            sum(blocks[index].memory for index in own if started >> index & 1)
            for own in graph.members
        ]
        for index, block in enumerate(blocks):
            if can_start(index, started) and fits(block, used):
                now = used[device] + (block.memory if device in block.devices else 0)
                following = settled(started | 1 << index)
                if following not in seen:
                    heapq.heappush(heap, (max(peak, now), -following.bit_count(), following))
    return math.inf


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
        return tuple(start % self.period for start in self.starts)

    def latency(self, graph: BlockGraph) -> int:
        """Time of one unit from its first start to its last end."""
        ends = [start + block.time for start, block in zip(self.starts, graph.blocks, strict=True)]
        return max(ends) - min(self.starts)


def steady_peak(graph: BlockGraph, cyclic: PeriodicStarts, device: int) -> int:
    """Most memory in use on a device while units follow one another without end."""
    added = changes(graph, device)
    phases = cyclic.phases
    stages = cyclic.stages
    used = -sum(change * stages[index] for index, change in added.items())
    peak = 0
    for index in sorted(added, key=lambda each: phases[each]):
        used += added[index]
        peak = max(peak, used)
    return peak


def is_valid(graph: BlockGraph, cyclic: PeriodicStarts) -> bool:
    """True if dependencies are kept, no two blocks of any units overlap on a device, and memory
    suffices.
    """
    starts = cyclic.starts
    period = cyclic.period
    if any(
        starts[index] < starts[other] + wait
        for index, waits in enumerate(graph.waits)
        for other, wait in waits
    ):
        return False
    if any(block.time > period for block in graph.blocks):
        return False
    for first, second in sharing_pairs(graph):
        gap = (starts[second] - starts[first]) % period
        if gap < graph.blocks[first].time or period - gap < graph.blocks[second].time:
            return False
    limits = enumerate(graph.memory)
    return all(
        limit is None or steady_peak(graph, cyclic, device) <= limit for device, limit in limits
    )


def sharing_pairs(graph: BlockGraph) -> list[tuple[int, int]]:
    return sorted({pair for members in graph.members for pair in combinations(members, 2)})


Starts = tuple[tuple[int, ...], ...]
"""`starts[n][i]`: start of block i of unit n."""


def unroll(graph: BlockGraph, cyclic: PeriodicStarts, units: int) -> Starts:
    """Units in the steady state's order on each device, each block as soon as this order and its
    own waits allow. Memory is as in the steady state or less: it depends on the order of starts
    alone.
    """
    return compact(
        graph, [[start + cyclic.period * unit for start in cyclic.starts] for unit in range(units)]
    )


def compact(graph: BlockGraph, starts: Sequence[Sequence[int]]) -> Starts:
    """The same order of starts on each device, each block as early as it allows."""
    order = sorted(
        (start, unit, index) for unit, each in enumerate(starts) for index, start in enumerate(each)
    )
    return in_order(graph, len(starts), ((unit, index) for _, unit, index in order))


def in_order(graph: BlockGraph, units: int, order: Iterable[tuple[int, int]]) -> Starts:
    """Starts as early as possible for (unit, block) in an order in which each comes after all that
    it waits for.
    """
    free = [0] * graph.devices
    starts = [[0] * len(graph.blocks) for _ in range(units)]
    for unit, index in order:
        block = graph.blocks[index]
        own = starts[unit]
        start = max(free[device] for device in block.devices)
        for other, wait in graph.waits[index]:
            start = max(start, own[other] + wait)
        own[index] = start
        for device in block.devices:
            free[device] = start + block.time
    return tuple(map(tuple, starts))


def makespan(graph: BlockGraph, starts: Starts) -> int:
    return BlockSchedule(graph, starts).makespan


def fits(graph: BlockGraph, starts: Starts) -> bool:
    rooms = zip(BlockSchedule(graph, starts).peak_memory, graph.memory, strict=True)
    return all(room is None or peak <= room for peak, room in rooms)


def observed_state(graph: BlockGraph, starts: Starts) -> BlockSchedule:
    """The schedule with the steady state that is found in its middle, if any. A steady state is
    there where, over the middle third, every block of a unit a fixed number of units further starts
    later by one distance. The period is its share a unit; a repetend is given where it holds one
    unit.
    """
    busiest = max(graph.loads)
    count = len(starts)
    first = count // 3
    last = count - count // 3
    for group in range(1, (last - first) // 2 + 1):
        distance = turn_of(starts, group, first, last)
        if distance is None or distance % group:
            continue
        period = distance // group
        if group > 1:
            return BlockSchedule(graph, starts, period, busiest * count)
        repetend = repetend_of(PeriodicStarts(period, starts[first]))
        return BlockSchedule(graph, starts, period, busiest, period == busiest, repetend)
    return BlockSchedule(graph, starts, None, busiest * count)


def turn_of(starts: Starts, group: int, first: int, last: int) -> int | None:
    """By how much later each unit from `first` on, up to `last`, is than the one `group` before;
    None if it varies.
    """
    distances = {
        further - start
        for unit in range(first, last - group)
        for start, further in zip(starts[unit], starts[unit + group], strict=True)
    }
    return distances.pop() if len(distances) == 1 else None


def repetend_of(cyclic: PeriodicStarts) -> BlockRepetend:
    """One repetition, with starts counted from the first of a unit's. A block that starts k periods
    after its unit's first one stands, beside that first one, for a unit k earlier.
    """
    first = min(cyclic.starts)
    periods = [divmod(start - first, cyclic.period) for start in cyclic.starts]
    last = max(period for period, _ in periods)
    return BlockRepetend(
        tuple(phase for _, phase in periods), tuple(last - period for period, _ in periods)
    )
