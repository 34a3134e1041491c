"""Properties of block schedules that do not depend on the search: lower bounds of period and
makespan, memory limits, earliest starts, and detection of a steady state.

A block is one phase of one stage. The period of a steady state is the time between the starts of a
block in consecutive micro-batches. The load of a device is the total time of its blocks in one
micro-batch. Times are integers in ticks.
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
"""Called with the best value so far (None before the first), its lower bound, and the seconds since
the start of the search.
"""

WORK_PER_SECOND = 0.35
"""Deterministic time of CP-SAT, which counts its work, per second of the time limit. One solver
worker usually does more work than this per second. The work limit therefore ends a search before
the clock does, and the result depends only on the seed.
"""
_SEARCHED_FRACTION = 0.95
"""Fraction of the time limit that is used for the search. The rest is for completing and checking
the schedule.
"""
_REPORT_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Time limit and other options of a search.

    The time limit is converted to deterministic time of the solver (`WORK_PER_SECOND`). If the
    deterministic time ends before the clock reaches the time limit, equal inputs and seeds give
    equal results on any machine.
    """

    time_limit: float = 10.0
    """Time limit of the search in seconds."""
    seed: int = 0
    progress: Progress | None = None
    """Called when the search finds better values and bounds, at most ten times per second. None: no
    reports.
    """
    patience: float = 1.0
    """Factor on the time limit of the clock, so that a busy machine can do the work of an idle one.
    The limit on the solver's work does not change.
    """
    unrolled: int | None = None
    """Maximum number of blocks per device that a program may list outside of a loop, for a list
    schedule that replaces the result of the search. The limit holds for the blocks before the
    steady state, or for all blocks if the schedule does not repeat.

    None: two micro-batches per device of the graph before the steady state, or 2,000 blocks of all
    devices in total.
    """


@dataclass(slots=True)
class Budget:
    """Time and solver work that remain for a search."""

    options: SearchOptions
    start: float = field(default_factory=time.perf_counter)
    """Value of `time.perf_counter` at the start of the search, in seconds."""
    work: float = 0.0
    """Deterministic time of the solver that is spent."""
    reported: float = float("-inf")
    """Seconds since the start of the search at the last progress report."""

    @property
    def used(self) -> float:
        """Seconds since the start of the search."""
        return time.perf_counter() - self.start

    @property
    def left(self) -> float:
        """Seconds that are left for the search; negative if the time is over."""
        return _SEARCHED_FRACTION * self.options.time_limit * self.options.patience - self.used

    def limit(self, fraction: float) -> Limit:
        """Return the limit of a solver run: `fraction` of the remaining work, in deterministic time
        of the solver, and all remaining seconds.
        """
        work = self.options.time_limit * WORK_PER_SECOND - self.work
        return Limit(self.left, work * fraction, self.options.seed)

    def report(self, value: int | None, bound: int) -> None:
        """Report the best value so far (None if there is none) and its lower bound, unless the last
        report was less than `_REPORT_INTERVAL_S` ago.
        """
        if self.options.progress and self.used >= self.reported + _REPORT_INTERVAL_S:
            self.reported = self.used
            self.options.progress(value, bound, self.used)


def release_times(graph: BlockGraph) -> tuple[int, ...]:
    """Return the earliest start of each block of a micro-batch if each block starts as soon as its
    dependencies permit.
    """
    found = [0] * len(graph.blocks)
    for index in graph.order:
        found[index] = max((found[other] + wait for other, wait in graph.waits[index]), default=0)
    return tuple(found)


def times_after(graph: BlockGraph) -> tuple[int, ...]:
    """Return, for each block, the minimum time from its end to the end of its micro-batch."""
    from_start = [block.time for block in graph.blocks]
    for index in reversed(graph.order):
        for other, wait in graph.waits[index]:
            from_start[other] = max(from_start[other], wait + from_start[index])
    return tuple(time - block.time for time, block in zip(from_start, graph.blocks, strict=True))


def critical_path(graph: BlockGraph) -> int:
    """Return the length of the critical path of one micro-batch, in ticks."""
    releases = release_times(graph)
    return max(start + block.time for start, block in zip(releases, graph.blocks, strict=True))


def makespan_bound(graph: BlockGraph, micro_batches: int) -> int:
    """Return a lower bound of the makespan of `micro_batches` micro-batches.

    Let D be the devices of the block with the most devices. Wide blocks use all of D, and W is
    their total time per micro-batch. Narrow blocks use some, but not all, devices of D. The bound
    is the maximum of `_load_bound` of all blocks and of

        micro_batches * W + _load_bound(narrow blocks)

    Proof: no narrow block runs while a wide block runs. If the intervals of wide blocks are removed
    from a schedule, a valid schedule of the narrow blocks remains, because narrow blocks that
    depend on each other through other blocks keep their order.
    """
    all_blocks_bound = _load_bound(graph, micro_batches)
    widest = set(max(graph.blocks, key=lambda block: len(block.devices)).devices)
    wide = [index for index, block in enumerate(graph.blocks) if widest.issubset(block.devices)]
    narrow = _narrow_blocks(graph, widest)
    if narrow is None:
        return all_blocks_bound
    wide_time = sum(graph.blocks[index].time for index in wide)
    narrow_bound = _load_bound(narrow, micro_batches)
    return max(all_blocks_bound, micro_batches * wide_time + narrow_bound)


def _narrow_blocks(graph: BlockGraph, widest: set[int]) -> BlockGraph | None:
    """Return the graph of the blocks that use some, but not all, of the devices `widest`; None if
    there are none. A block of the result waits for the narrow blocks that it depends on through
    other blocks. The result has no delays, and its blocks use no memory.
    """
    narrow = [
        index
        for index, block in enumerate(graph.blocks)
        if not widest.isdisjoint(block.devices) and not widest.issubset(block.devices)
    ]
    if not narrow:
        return None
    renumbered = {index: position for position, index in enumerate(narrow)}
    # Nearest narrow ancestors of each block: narrow blocks that it reaches without passing another
    # narrow block.
    before: dict[int, set[int]] = {}
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


def _load_bound(graph: BlockGraph, micro_batches: int) -> int:
    """Return a lower bound of the makespan: the maximum of the critical path of one micro-batch
    and, for each device, of its load in all micro-batches plus the minimum earliest start of its
    blocks (`release_times`) plus the minimum time after them (`times_after`).
    """
    release = release_times(graph)
    after = times_after(graph)
    bound = critical_path(graph)
    for members, load in zip(graph.members, graph.loads, strict=True):
        if members:
            idle = min(release[index] for index in members) + min(after[index] for index in members)
            bound = max(bound, micro_batches * load + idle)
    return bound


def period_bound(graph: BlockGraph) -> int:
    """Return a lower bound of the period of a steady state: the maximum of 1, of the loads of the
    devices, and of the bounds from memory limits (`_memory_period_bound`).
    """
    return max(
        *graph.loads, *(_memory_period_bound(graph, device) for device in range(graph.devices)), 1
    )


def _memory_period_bound(graph: BlockGraph, device: int) -> int:
    """Return the lower bound of the period that follows from the memory limit of a device. Return 0
    if none follows: for example, if the device has no limit, or if its blocks do not free all
    memory that they allocate.

    Little's law: the average memory in use equals the integral of the memory of one micro-batch
    over time, divided by the period. The average is at most the limit, so

        period >= sum over i, j of amount(i, j) * distance(i, j) / limit

    distance(i, j) is the length of the longest path from the start of block i, which allocates
    memory, to the start of block j, which frees memory. amount(i, j) is the memory that is assigned
    from i to j. Each assignment of all allocated memory to frees is a solution of the dual of
    "minimise the integral under the dependencies", and so gives a valid bound. The assignment is
    greedy: longest distances first.
    """
    limit = graph.memory[device]
    unassigned = {index: graph.blocks[index].memory for index in graph.members[device]}
    step = math.gcd(*unassigned.values())
    if limit is None or step == 0 or limit < step:
        return 0
    integral = 0
    for index in [index for index, memory in unassigned.items() if memory > 0]:
        distance = {index: 0}
        for target in graph.order:
            paths = [
                distance[other] + wait for other, wait in graph.waits[target] if other in distance
            ]
            if paths:
                distance[target] = max(paths)
        frees = [other for other in distance if unassigned.get(other, 0) < 0]
        for other in sorted(frees, key=lambda other: -distance[other]):
            amount = min(unassigned[index], -unassigned[other])
            unassigned[index] -= amount
            unassigned[other] += amount
            integral += amount * distance[other]
    return 0 if any(unassigned.values()) else math.ceil(integral / (limit // step * step))


def topological_order(graph: BlockGraph, priority: Callable[[int, int], Any]) -> tuple[int, ...]:
    """Return the blocks in a topological order. The next block is always the one with the smallest
    priority(block, position) of the blocks whose predecessors are all in the order. `position` is
    the length of the order at the time when the block became available.
    """
    waiting = [len(set(block.after)) for block in graph.blocks]
    ready = [(priority(index, 0), index) for index, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        order.append(heapq.heappop(ready)[1])
        for other in graph.following[order[-1]]:
            waiting[other] -= 1
            if waiting[other] == 0:
                heapq.heappush(ready, (priority(other, len(order)), other))
    return tuple(order)


def net_memory(graph: BlockGraph, device: int) -> int:
    """Return the memory that one micro-batch allocates on a device and never frees. The result is
    negative if the micro-batch frees more than it allocates.
    """
    return sum(graph.blocks[index].memory for index in graph.members[device])


def balanced_changes(graph: BlockGraph, device: int) -> dict[int, int]:
    """Return, for each block of a device, the change of the memory in use on the device, adjusted
    so that the sum over all blocks is 0. Memory that is never freed is subtracted from the last
    allocations. Memory that is freed without an allocation is subtracted from the first frees.
    """
    change = {index: graph.blocks[index].memory for index in graph.members[device]}
    excess = sum(change.values())
    for index in reversed(graph.order) if excess > 0 else graph.order:
        if index in change and change[index] * excess > 0:
            removed = min(abs(change[index]), abs(excess)) * (1 if excess > 0 else -1)
            change[index] -= removed
            excess -= removed
    return change


def frees_all_memory(graph: BlockGraph) -> bool:
    """True if a micro-batch frees exactly the memory that it allocates on each device with a memory
    limit. `balanced_changes` are the real changes then.
    """
    return not any(
        net_memory(graph, device) for device, limit in enumerate(graph.memory) if limit is not None
    )


def with_reserved_memory(graph: BlockGraph, micro_batches: int) -> BlockGraph:
    """Return the graph with each memory limit reduced by the memory that `micro_batches`
    micro-batches never free.
    """
    memory = (
        None if limit is None else limit - micro_batches * max(0, net_memory(graph, device))
        for device, limit in enumerate(graph.memory)
    )
    return replace(graph, memory=tuple(memory))


_MAX_STEPS = 1_000_000
"""Maximum number of checks whether a block can start, after which one search for the minimum memory
gives up.
"""


def require_memory(graph: BlockGraph, micro_batches: int) -> None:
    """Raise InfeasibleError, with a device and the memory it needs, if no order of blocks keeps the
    memory limits.

    Memory changes when a block starts, so the memory that a device needs depends only on the order
    of starts. If a micro-batch never frees more than it has allocated, further micro-batches only
    add to the memory in use, so the order of one micro-batch decides.

    If possible, the error names a device that exceeds its limit even if other devices have no
    limits. Otherwise it names a device that exceeds its limit while the other devices keep theirs.
    No error is raised if a search takes too long, or if one of several micro-batches may free
    memory that another micro-batch allocated.
    """

    def rejection(device: int, limit: int, needed: float, condition: str) -> InfeasibleError:
        """Return the error for a device that needs more memory than its limit. `condition`
        completes the message.
        """
        message = f"the memory limit is {limit}, but {needed} is needed {condition}"
        return InfeasibleError(
            message,
            hint=f"raise the memory limit of the device to at least {needed}",
            where=f"device {device}",
        )

    limited = [(device, limit) for device, limit in enumerate(graph.memory) if limit is not None]
    for device, limit in limited:
        if (needed := micro_batches * net_memory(graph, device)) > limit:
            count = f"{micro_batches} {plural(micro_batches, 'micro-batch')}"
            raise rejection(
                device, limit, needed, f"because {count} allocate memory that they never free"
            )
    if not limited or (
        micro_batches > 1
        and not all(_frees_only_its_allocations(graph, device) for device, _ in limited)
    ):
        return
    minimum = minimum_memory(graph, limited[0][0], graph.memory)
    if minimum is None or minimum <= limited[0][1]:
        return
    for limits, condition in (
        ((None,) * graph.devices, "by any order of blocks"),
        (graph.memory, "while the other devices keep their limits"),
    ):
        for device, limit in limited:
            found = minimum_memory(graph, device, limits)
            if found is not None and limit < found < math.inf:
                raise rejection(device, limit, found, condition)
    raise InfeasibleError(
        "every order of the blocks exceeds the memory limit of a device",
        hint="raise the memory limits of several devices",
    )


def _frees_only_its_allocations(graph: BlockGraph, device: int) -> bool:
    """True if all memory that a block frees on the device was allocated by blocks that it depends
    on. A micro-batch then never reduces the memory in use below its value before the micro-batch.
    """
    remaining = {index: graph.blocks[index].memory for index in graph.members[device]}
    # For each block: the bit set of the block and of all blocks that it depends on.
    ancestors: list[int] = [0] * len(graph.blocks)
    for index in graph.order:
        ancestors[index] = 1 << index
        for other in graph.blocks[index].after:
            ancestors[index] |= ancestors[other]
        for other in remaining if remaining.get(index, 0) < 0 else ():
            if remaining[other] > 0 and ancestors[index] >> other & 1:
                freed = min(remaining[other], -remaining[index])
                remaining[other] -= freed
                remaining[index] += freed
    return all(memory >= 0 for memory in remaining.values())


def minimum_memory(graph: BlockGraph, device: int, limits: Sequence[int | None]) -> float | None:
    """Return the minimum peak memory of `device` for one micro-batch, in an order in which the
    other devices keep the memory `limits` (None for no limit).

    Return infinity if no order keeps these limits, and None if the search takes too long. The
    search is best first over sets of started blocks, which are represented as bit sets. A set
    determines the memory in use. A block that allocates no memory starts as soon as it can, because
    this never increases the peak.
    """
    blocks = graph.blocks
    steps = 0
    before = [sum(1 << other for other in set(block.after)) for block in blocks]

    def can_start(index: int, started: int) -> bool:
        """True if the block has not started and all blocks that it waits for have started."""
        nonlocal steps
        steps += 1
        return not started >> index & 1 and before[index] & started == before[index]

    def with_frees(started: int) -> int:
        """Return the set `started` plus all blocks that can start and do not allocate memory."""
        for index in graph.order:
            if blocks[index].memory <= 0 and can_start(index, started):
                started |= 1 << index
        return started

    def fits_in_memory(block: Block, used: Sequence[int]) -> bool:
        """True if the other devices keep their limits when the block starts. `used` is the memory
        in use on each device.
        """
        others = [(used[other], limits[other]) for other in block.devices if other != device]
        return all(limit is None or in_use + block.memory <= limit for in_use, limit in others)

    heap = [(0, 0, with_frees(0))]
    seen = set[int]()
    while heap:
        peak, _, started = heapq.heappop(heap)
        if started in seen:
            continue
        seen.add(started)
        if started == (1 << len(blocks)) - 1:
            return peak
        if steps > _MAX_STEPS:
            return None
        used = [
            sum(blocks[index].memory for index in own if started >> index & 1)
            for own in graph.members
        ]
        for index, block in enumerate(blocks):
            if can_start(index, started) and fits_in_memory(block, used):
                in_use = used[device] + (block.memory if device in block.devices else 0)
                following = with_frees(started | 1 << index)
                if following not in seen:
                    entry = (max(peak, in_use), -following.bit_count(), following)
                    heapq.heappush(heap, entry)
    return math.inf


@dataclass(frozen=True, slots=True)
class PeriodicStarts:
    """An endless steady state: block i of micro-batch n starts at starts[i] + period * n, for each
    integer n.
    """

    period: int
    starts: tuple[int, ...]

    @property
    def modulo_stages(self) -> tuple[int, ...]:
        """For each block, start // period, minus the minimum over the blocks. Modulo scheduling
        calls this number the stage of a block; it is unrelated to pipeline stages.
        """
        first = min(self.starts) // self.period
        return tuple(start // self.period - first for start in self.starts)

    @property
    def phases(self) -> tuple[int, ...]:
        """For each block, start mod period."""
        return tuple(start % self.period for start in self.starts)

    def latency(self, graph: BlockGraph) -> int:
        """Return the time from the first start to the last end of a micro-batch."""
        ends = [start + block.time for start, block in zip(self.starts, graph.blocks, strict=True)]
        return max(ends) - min(self.starts)


def steady_state_peak(graph: BlockGraph, cyclic: PeriodicStarts, device: int) -> int:
    """Return the peak memory in use on a device in the endless steady state, with the memory
    changes of `balanced_changes`.
    """
    added = balanced_changes(graph, device)
    phases = cyclic.phases
    modulo_stages = cyclic.modulo_stages
    used = -sum(change * modulo_stages[index] for index, change in added.items())
    peak = 0
    for index in sorted(added, key=lambda block: phases[block]):
        used += added[index]
        peak = max(peak, used)
    return peak


def is_valid(graph: BlockGraph, cyclic: PeriodicStarts) -> bool:
    """True if the steady state keeps all dependencies and memory limits, and if no two blocks of
    any micro-batches overlap on a device.
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
    for first, second in pairs_sharing_a_device(graph):
        gap = (starts[second] - starts[first]) % period
        if gap < graph.blocks[first].time or period - gap < graph.blocks[second].time:
            return False
    limits = enumerate(graph.memory)
    return all(
        limit is None or steady_state_peak(graph, cyclic, device) <= limit
        for device, limit in limits
    )


def pairs_sharing_a_device(graph: BlockGraph) -> list[tuple[int, int]]:
    """Return the pairs of blocks that have a device in common, sorted. The smaller index comes
    first in each pair.
    """
    return sorted({pair for members in graph.members for pair in combinations(members, 2)})


Starts = tuple[tuple[int, ...], ...]
"""Start times: `starts[n][i]` is the start of block i of micro-batch n."""


def unroll_steady_state(graph: BlockGraph, cyclic: PeriodicStarts, micro_batches: int) -> Starts:
    """Return the starts of `micro_batches` micro-batches. On each device, blocks run in the order
    of the steady state, and each block starts as early as this order and its dependencies permit.

    The memory in use is at most that of the steady state, because it depends only on the order of
    starts.
    """
    return compact_starts(
        graph,
        [
            [start + cyclic.period * micro_batch for start in cyclic.starts]
            for micro_batch in range(micro_batches)
        ],
    )


def compact_starts(graph: BlockGraph, starts: Sequence[Sequence[int]]) -> Starts:
    """Return the earliest starts with which the blocks of each device have the order that they have
    in `starts`.
    """
    order = sorted(
        (start, micro_batch, index)
        for micro_batch, each in enumerate(starts)
        for index, start in enumerate(each)
    )
    return earliest_starts(
        graph, len(starts), ((micro_batch, index) for _, micro_batch, index in order)
    )


def earliest_starts(
    graph: BlockGraph, micro_batches: int, order: Iterable[tuple[int, int]]
) -> Starts:
    """Return the earliest starts if blocks are placed one after another in `order`, which contains
    pairs (micro-batch, block). In `order`, each block comes after the blocks that it depends on.
    """
    free = [0] * graph.devices
    starts = [[0] * len(graph.blocks) for _ in range(micro_batches)]
    for micro_batch, index in order:
        block = graph.blocks[index]
        own = starts[micro_batch]
        start = max(free[device] for device in block.devices)
        for other, wait in graph.waits[index]:
            start = max(start, own[other] + wait)
        own[index] = start
        for device in block.devices:
            free[device] = start + block.time
    return tuple(map(tuple, starts))


def makespan(graph: BlockGraph, starts: Starts) -> int:
    """Return the time at which the last block ends."""
    return BlockSchedule(graph, starts).makespan


def fits_in_memory(graph: BlockGraph, starts: Starts) -> bool:
    """True if no device exceeds its memory limit."""
    peaks = BlockSchedule(graph, starts).peak_memory
    return all(
        limit is None or peak <= limit for peak, limit in zip(peaks, graph.memory, strict=True)
    )


def with_observed_period(graph: BlockGraph, starts: Starts) -> BlockSchedule:
    """Return the schedule with these starts, and with the period at which blocks repeat in its
    middle third, if they do.

    Blocks repeat if, for some number g, each block of micro-batch n + g starts a constant time
    later than in micro-batch n. The period is this time / g. Small g are tried first. If no g has
    an integer period, the schedule has none. The schedule has a repetend (one repetition of the
    steady state, in which each block runs once) only if g = 1.
    """
    busiest = max(graph.loads)
    count = len(starts)
    first = count // 3
    last = count - count // 3
    for group in range(1, (last - first) // 2 + 1):
        distance = constant_distance(starts, group, first, last)
        if distance is None or distance % group:
            continue
        period = distance // group
        if group > 1:
            return BlockSchedule(graph, starts, period, busiest * count)
        repetend = repetend_from(PeriodicStarts(period, starts[first]))
        return BlockSchedule(graph, starts, period, busiest, period == busiest, repetend)
    return BlockSchedule(graph, starts, None, busiest * count)


def constant_distance(starts: Starts, group: int, first: int, last: int) -> int | None:
    """Return the time d such that each block of micro-batch n + `group` starts d later than in
    micro-batch n, where `first` <= n < `last` - `group`. Return None if there is no such time.
    """
    distances = {
        later - start
        for micro_batch in range(first, last - group)
        for start, later in zip(starts[micro_batch], starts[micro_batch + group], strict=True)
    }
    return distances.pop() if len(distances) == 1 else None


def repetend_from(cyclic: PeriodicStarts) -> BlockRepetend:
    """Return the repetend of a steady state: one repetition, in which each block runs once.

    Starts are counted from the first block of a micro-batch and taken modulo the period. A block
    that starts k whole periods after the first block of its micro-batch runs in the repetend for
    the micro-batch k before that of the first block.
    """
    first = min(cyclic.starts)
    split_starts = [divmod(start - first, cyclic.period) for start in cyclic.starts]
    last = max(modulo_stage for modulo_stage, _ in split_starts)
    return BlockRepetend(
        tuple(phase for _, phase in split_starts),
        tuple(last - modulo_stage for modulo_stage, _ in split_starts),
    )
