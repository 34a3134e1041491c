"""Schedule search: the steady state of least period, its ends, and all units at once where they are
few.

Lin et al., "Tessel" (HPCA 2024), sections IV and V, with the repetend as a modulo schedule instead
of one problem for each assignment of micro-batches. Warm-up and cool-down are small problems of
their own, while the repetitions between stand as they are (IV.B): repetition r holds block i of
unit r - stage(i), and the complete ones are those from the greatest stage to the last unit. Where
list schedules are shorter, they take the place of the ends: where backwards are split, weight
gradients fill these so well that they are often the shortest that can be, as in Qi et al., "Zero
Bubble Pipeline Parallelism" (2024), section 3, which a search for the steady state alone does not
see.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from autopipe.ir.block_schedule import BlockGraph, BlockSchedule, check_blocks
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.words import plural
from autopipe.passes.schedule.tessel import model, periodic
from autopipe.passes.schedule.tessel.model import Budget, PeriodicStarts, SearchOptions, Starts
from autopipe.passes.solvers.cp_sat import CpResult, Limit, OnSolution, Status, solve

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar


def steady_state(graph: BlockGraph, units: int, budget: Budget) -> tuple[PeriodicStarts, int]:
    """The best steady state found in the budget for `units` units (least period, then way of a
    unit, then memory), and what no period is less than. Raises InfeasibleError where memory does
    not suffice for them even one after the other.
    """
    best, bound = least_steady_period(graph, units, budget)
    budget.report(best.period, bound)
    roomy = model.reserved(graph, units)
    best = periodic.tighten(roomy, best, best.period)
    best = (
        _ask(roomy, budget, 0.2, lambda limit: periodic.least_latency(roomy, best, limit)).cyclic
        or best
    )
    latency = best.latency(roomy)
    best = (
        _ask(
            roomy, budget, 0.1, lambda limit: periodic.least_memory(roomy, best, limit, latency)
        ).cyclic
        or best
    )
    budget.report(best.period, bound)
    return best, bound


def least_steady_period(
    graph: BlockGraph, units: int, budget: Budget
) -> tuple[PeriodicStarts, int]:
    """The same without regard to a unit's way and memory."""
    serial = serial_order(graph, units, budget.limit(0.2))
    graph = model.reserved(graph, units)
    bound = model.period_bound(graph)
    budget.report(None, bound)
    best = periodic.construct(graph, bound, serial, budget)
    budget.report(best.period, bound)
    if best.period > bound:
        best = _rounded(graph, best, bound, budget)
    if best.period > bound:
        best, proven = _exact(graph, best, bound, budget)
        bound = (
            proven if model.frees_all(graph) else bound
        )  # Other units may need less than `changes` say.
    return best, bound


def _rounded(graph: BlockGraph, best: PeriodicStarts, bound: int, budget: Budget) -> PeriodicStarts:
    """A better steady state by way of rounded times, if there is one."""
    rounded = periodic.coarse(graph, bound)
    if rounded is None:
        return best
    low = model.period_bound(rounded)
    found = _ask(graph, budget, 0.1, lambda limit: periodic.with_period(rounded, low, limit))
    if found.cyclic is None:
        known = periodic.tighten(rounded, best, low)
        found = _ask(
            graph, budget, 0.35, lambda limit: periodic.least_period(rounded, low, known, limit)
        )
    if found.cyclic is None:
        return best
    return min(best, periodic.tighten(graph, found.cyclic, bound), key=lambda each: each.period)


def _exact(
    graph: BlockGraph, best: PeriodicStarts, bound: int, budget: Budget
) -> tuple[PeriodicStarts, int]:
    """The least period, or one closer to it, and a bound closer to it."""
    found = _ask(graph, budget, 0.15, lambda limit: periodic.with_period(graph, bound, limit))
    if found.cyclic is not None:
        return found.cyclic, bound
    low = bound + 1 if found.status is Status.INFEASIBLE else bound
    if best.period == low:
        return best, low
    found = _ask(
        graph,
        budget,
        0.6,
        lambda limit: periodic.least_period(graph, low, best, limit, budget.report),
    )
    if found.status is Status.INFEASIBLE:
        return best, best.period
    if found.cyclic is not None:
        best = periodic.tighten(graph, found.cyclic, low)
    return best, min(best.period, max(low, found.bound or 0))


_PAIRS_PER_SECOND = 4000
"""Pairs of blocks on one device, for each second of the time limit, of which models are made: a
tenth of a second's.
"""


def _ask(
    graph: BlockGraph,
    budget: Budget,
    share: float,
    question: Callable[[Limit], periodic.SteadyState],
) -> periodic.SteadyState:
    """The answer to a question that may take a share of what is left; none where its model alone
    would take long.
    """
    pairs = sum(math.comb(len(members), 2) for members in graph.members)
    if budget.left < 0 or pairs > _PAIRS_PER_SECOND * budget.options.time_limit:
        return periodic.SteadyState(Status.UNKNOWN, None, None, 0.0)
    found = question(budget.limit(share))
    budget.work += found.work
    return found


Task = tuple[int, int]
"""(unit, block)"""


class StartWindow(NamedTuple):
    """Where a block may start, and where it is known to fit."""

    first: int
    last: int
    known: int


def model_tasks(
    graph: BlockGraph,
    given: Mapping[Task, int],
    free: Mapping[Task, StartWindow],
    in_use: Sequence[int],
) -> tuple[CpModel, dict[Task, int | IntVar], list[IntVar]]:
    """All ways to place the free tasks among the given ones, with `in_use` memory in use on each
    device before; with the start of each task, and of these the variables, those of the free tasks
    in their order. Units are equal, so that a unit may be taken to start each block before the next
    unit does.
    """
    from ortools.sat.python import cp_model

    program = cp_model.CpModel()
    variables = {
        task: program.new_int_var(window.first, window.last, "") for task, window in free.items()
    }
    for task, window in free.items():
        program.add_hint(variables[task], window.known)
    starts: dict[Task, int | IntVar] = {**given, **variables}
    for unit, index in starts:
        follows = [((unit, other), (unit, index), wait) for other, wait in graph.waits[index]]
        for before, after, wait in (
            *follows,
            ((unit, index), (unit + 1, index), graph.blocks[index].time),
        ):
            if before in starts and after in starts and (before in free or after in free):
                program.add(starts[after] >= starts[before] + wait)
    for device, (room, used) in enumerate(zip(graph.memory, in_use, strict=True)):
        tasks = [task for task in starts if device in graph.blocks[task[1]].devices]
        program.add_no_overlap(
            program.new_fixed_size_interval_var(starts[task], graph.blocks[task[1]].time, "")
            for task in tasks
        )
        # Memory changes at starts, of which no two on a device are at the same time.
        changing = [task for task in tasks if graph.blocks[task[1]].memory]
        if room is not None and changing:
            memory = [graph.blocks[index].memory for _, index in changing]
            least = -sum(map(abs, memory))
            program.add_reservoir_constraint(
                [starts[task] for task in changing], memory, least, room - used
            )
    return program, starts, list(variables.values())


# Most blocks of one end that are given to the solver; more of them start as early as their order
# allows.
_MOST_IN_AN_END = 300
_SHARE_OF_AN_END = 0.03  # Of the work that is left, for one end.


def complete(graph: BlockGraph, cyclic: PeriodicStarts, units: int, budget: Budget) -> Starts:
    """Starts of `units` units in this steady state: the shortest found, and of these the one of
    least memory.
    """
    early = model.unroll(graph, cyclic, units)
    stages = cyclic.stages
    sizes = sum(max(stages) - stage for stage in stages), sum(stages)
    if budget.left < 0 or max(stages) >= units or max(sizes) > _MOST_IN_AN_END:
        return early
    found = [early]
    used = BlockSchedule(graph, early).peak_memory
    found.append(_with_ends(replace(graph, memory=used), cyclic, units, budget))
    more_room = any(
        room is None or room > peak for room, peak in zip(graph.memory, used, strict=True)
    )
    if more_room and model.makespan(graph, found[-1]) > model.makespan_bound(graph, units):
        found.append(_with_ends(graph, cyclic, units, budget))

    def cost(starts: Starts) -> tuple[int, int, int]:
        schedule = BlockSchedule(graph, starts)
        peaks = schedule.peak_memory
        return schedule.makespan, max(peaks), sum(peaks)

    return min(found, key=cost)


def _with_ends(graph: BlockGraph, cyclic: PeriodicStarts, units: int, budget: Budget) -> Starts:
    """The steady state with both ends as short as the solver makes them."""
    rows = zip(cyclic.stages, cyclic.phases, strict=True)
    once = [stage * cyclic.period + phase for stage, phase in rows]
    plain = {
        (unit, index): start + unit * cyclic.period
        for unit in range(units)
        for index, start in enumerate(once)
    }
    moved = {
        **plain,
        **_warm_up(graph, cyclic, plain, budget),
        **_cool_down(graph, cyclic, plain, budget),
    }
    first = min(moved.values())
    return model.compact(
        graph, [[moved[unit, index] - first for index in range(len(once))] for unit in range(units)]
    )


def _warm_up(
    graph: BlockGraph, cyclic: PeriodicStarts, plain: Mapping[Task, int], budget: Budget
) -> dict[Task, int]:
    """Better starts of the blocks before the first complete repetition, the first of which is as
    late as can be. Where no unit has blocks in both ends, they may even start later than before,
    into gaps of that repetition.
    """
    period = cyclic.period
    first = max(cyclic.stages)
    apart = max(unit for unit, _ in plain) >= 2 * first
    given = {task: start for task, start in plain.items() if start // period == first}
    latest = _latest(graph, plain, first * period, period) if apart else plain
    free = {
        task: StartWindow(0, latest[task], start)
        for task, start in plain.items()
        if start // period < first
    }
    program, _, variables = model_tasks(graph, given, free, (0,) * graph.devices)
    begin = program.new_int_var(0, first * period, "")
    for start in variables:
        program.add(begin <= start)
    program.maximize(begin)
    return _moved(free, program, variables, budget)


def _latest(graph: BlockGraph, plain: Mapping[Task, int], end: int, period: int) -> dict[Task, int]:
    """Latest starts of the blocks before `end`: done within a period after it, and for what stands
    behind it.
    """
    free = {task for task, start in plain.items() if start < end}
    found = {task: end + period - graph.blocks[task[1]].time for task in free}
    for (unit, index), start in plain.items():
        for other, wait in graph.waits[index]:
            if (unit, other) in free and (unit, index) not in free:
                found[unit, other] = min(found[unit, other], start - wait)
    return found


def _cool_down(
    graph: BlockGraph, cyclic: PeriodicStarts, plain: Mapping[Task, int], budget: Budget
) -> dict[Task, int]:
    """Better starts of the blocks behind the last complete repetition, whose end is as early as can
    be.
    """
    period = cyclic.period
    last = max(unit for unit, _ in plain)
    given = {task: start for task, start in plain.items() if last - 1 <= start // period <= last}
    horizon = max(start + graph.blocks[index].time for (_, index), start in plain.items())
    free = {}
    in_use = [0] * graph.devices
    for (unit, index), start in plain.items():
        if start // period > last:
            waits = [(plain[unit, other], wait) for other, wait in graph.waits[index]]
            ready = (began + wait for began, wait in waits if began < (last + 1) * period)
            window = StartWindow(
                max(last * period, *ready, 0), horizon - graph.blocks[index].time, start
            )
            free[unit, index] = window
        elif start // period < last - 1:
            for device in graph.blocks[index].devices:
                in_use[device] += graph.blocks[index].memory
    program, starts, variables = model_tasks(graph, given, free, in_use)
    end = program.new_int_var(0, horizon, "")
    for (_, index), where in starts.items():
        program.add(end >= where + graph.blocks[index].time)
    program.minimize(end)
    return _moved(free, program, variables, budget)


def _moved(
    free: Mapping[Task, StartWindow], program: CpModel, variables: Sequence[IntVar], budget: Budget
) -> dict[Task, int]:
    """The solver's starts of the free blocks; none where it found none."""
    answer = solve(program, variables, budget.limit(_SHARE_OF_AN_END))
    budget.work += answer.work
    return dict(zip(free, answer.values, strict=True)) if answer.found else {}


def serial_order(graph: BlockGraph, units: int, limit: Limit) -> tuple[int, ...]:
    """An order of one unit's blocks, one at a time, from which every search begins: within the room
    on all devices for `units` units, one after the other. Raises InfeasibleError, with the device
    and the least room that would do, where there is none.
    """
    last = model.reserved(graph, units - 1)
    # Of the blocks that may start, one that allocates nothing if there is any, otherwise the one
    # readied last.
    order = model.topological(
        graph, lambda index, started: (graph.blocks[index].memory > 0, -started)
    )
    if model.fits(last, model.in_order(last, 1, ((0, index) for index in order))):
        return order
    answer = _serial_places(last, limit)
    if answer.found:
        return tuple(
            sorted(range(len(graph.blocks)), key=lambda index: (answer.values[index], index))
        )
    model.require_room(graph, units)
    if answer.status is Status.INFEASIBLE:
        raise InfeasibleError(
            "no order of one unit's blocks keeps to the memory limits of all devices"
        )
    raise InfeasibleError(
        "no order of one unit's blocks was found that keeps to the memory limits",
        hint="search longer, or raise them",
    )


def _serial_places(graph: BlockGraph, limit: Limit) -> CpResult:
    """The place of each block in an order that fits memory."""
    from ortools.sat.python import cp_model

    program = cp_model.CpModel()
    blocks = graph.blocks
    places = [program.new_int_var(0, len(blocks) - 1, "") for _ in blocks]
    for index, block in enumerate(blocks):
        for other in block.after:
            program.add(places[other] < places[index])
    before: dict[tuple[int, int], IntVar] = {}
    for first, second in model.sharing_pairs(graph):
        holds = before[first, second] = program.new_bool_var("")
        program.add(places[first] < places[second]).only_enforce_if(holds)
        program.add(places[second] < places[first]).only_enforce_if(holds.negated())
    for members, room in zip(graph.members, graph.memory, strict=True):
        for index in members:
            if room is not None and blocks[index].memory > 0:
                earlier = (
                    blocks[other].memory
                    * (before[other, index] if other < index else 1 - before[index, other])
                    for other in members
                    if other != index
                )
                program.add(blocks[index].memory + sum(earlier) <= room)
    return solve(program, places, limit)


def shortest(
    graph: BlockGraph, known: Starts, limit: Limit, on_solution: OnSolution | None = None
) -> tuple[Starts, int, float]:
    """The schedule of least makespan for the units of `known`, which it is no longer than: all in
    one problem. With the least makespan that may yet be possible, and the solver's work.
    """
    horizon = model.makespan(graph, known)
    low = model.makespan_bound(graph, len(known))
    if low >= horizon:
        return known, horizon, 0.0
    first = model.heads(graph)
    last = model.tails(graph)
    windows = {
        (unit, index): StartWindow(
            first[index], horizon - block.time - last[index], known[unit][index]
        )
        for unit in range(len(known))
        for index, block in enumerate(graph.blocks)
    }
    program, starts, variables = model_tasks(graph, {}, windows, (0,) * graph.devices)
    end = program.new_int_var(low, horizon, "")
    for (_, index), start in starts.items():
        program.add(start + graph.blocks[index].time + last[index] <= end)
    program.minimize(end)
    answer = solve(program, variables, limit, on_solution)
    bound = max(low, answer.bound or 0)
    if not answer.found:
        return known, bound if answer.status is Status.UNKNOWN else horizon, answer.work
    count = len(graph.blocks)
    found = model.compact(
        graph, [answer.values[at : at + count] for at in range(0, len(answer.values), count)]
    )
    return min(known, found, key=lambda each: model.makespan(graph, each)), bound, answer.work


_FEW_BLOCKS = 64  # Blocks of all units together that are always solved at once as well.
_MOST_BLOCKS = 400  # Most blocks that are solved at once.
_MOST_UNROLLED = 2000  # Most blocks of a schedule that need not repeat: programs write them out.
_SETTLED_AFTER = 2  # Units a device after which others do, a few units together.
_MOST_TOGETHER = 4
_WORTH = 0.02  # Share of the makespan that a schedule without a repetend of one unit must save.


def search(graph: BlockGraph, units: int, options: SearchOptions | None = None) -> BlockSchedule:
    """Return the best schedule found for `units` units, by period, then warm-up and cool-down, then
    memory.

    It is no longer than the schedule for n units run k times, for each n·k = `units`, unless the
    clock ends the search. Raises ConfigurationError for invalid blocks, InfeasibleError if memory
    does not suffice for one unit.
    """
    graph.verify()
    if units < 1:
        raise ConfigurationError(f"{units} {plural(units, 'unit')}; there must be at least one")
    budget = Budget(options or SearchOptions())
    schedule = _search_units(graph, units, budget)
    schedule = _repeated_if_shorter(schedule, budget, {})
    check_blocks(schedule)
    return replace(schedule, search_time_s=budget.used)


def _search_units(graph: BlockGraph, units: int, budget: Budget) -> BlockSchedule:
    """Return the best schedule found for `units` units together."""
    cyclic, bound = steady_state(graph, units, budget)
    starts = complete(graph, cyclic, units, budget)
    if not model.fits(graph, starts):
        # Units that free before they allocate can lean on the next ones in the steady state; the
        # last one cannot.
        cyclic = periodic.one_at_a_time(graph, serial_order(graph, units, budget.limit(1.0)))
        starts = model.unroll(graph, cyclic, units)
    schedule = BlockSchedule(
        graph, starts, cyclic.period, bound, cyclic.period == bound, model.repetend_of(cyclic)
    )
    return _shortened(schedule, cyclic, budget)


def _repeated_if_shorter(
    schedule: BlockSchedule, budget: Budget, known: dict[int, BlockSchedule]
) -> BlockSchedule:
    """Return the shortest of `schedule` and the schedules for each smaller number of units that
    divides its own, each run as often as needed. `known` holds the schedules of smaller numbers
    that were found before.

    A smaller number is skipped if its lower bound shows that it cannot help. Its search may spend
    as much of the solver's work as the first one, so that it finds what a request for that number
    finds, but on the same clock.
    """
    graph = schedule.graph
    units = schedule.units
    bound = model.makespan_bound(graph, units)
    for part in range(units // 2, 0, -1):
        times = units // part
        if (
            units % part
            or times * model.makespan_bound(graph, part) >= schedule.makespan
            or budget.left < 0
        ):
            continue
        if part not in known:
            own = replace(budget, options=replace(budget.options, progress=None), work=0.0)
            try:
                known[part] = _repeated_if_shorter(_search_units(graph, part, own), own, known)
            except InfeasibleError:
                continue
        starts = _repeat(known[part], times)
        length = model.makespan(graph, starts)
        if length < schedule.makespan and model.fits(graph, starts):
            schedule = BlockSchedule(graph, starts, None, bound, length == bound)
    return schedule


def _repeat(schedule: BlockSchedule, times: int) -> Starts:
    """Return the starts of the schedule run `times` times in one order of each device, each block
    as early as it allows.
    """
    length = schedule.makespan
    return model.compact(
        schedule.graph,
        [
            [start + length * number for start in starts]
            for number in range(times)
            for starts in schedule.starts
        ],
    )


def _shortened(schedule: BlockSchedule, cyclic: PeriodicStarts, budget: Budget) -> BlockSchedule:
    """A shorter schedule that repeats further on or not at all, if there is one and few enough
    units do not repeat.
    """
    graph = schedule.graph
    units = schedule.units
    unrolled = budget.options.unrolled
    bound = model.makespan_bound(graph, units)
    count = units * len(graph.blocks)
    # So few units that all of them at once may do better, and so few blocks that they can be
    # solved.
    few = count <= _FEW_BLOCKS or (count <= _MOST_BLOCKS and units <= 2 * max(cyclic.stages) + 2)
    # Units that programs may write out before a steady state.
    early = _SETTLED_AFTER * graph.devices
    most = _MOST_UNROLLED // len(graph.blocks)
    if unrolled is not None:
        most = unrolled // max(map(len, graph.members))
        early = min(early, most)
    single = all(
        len(block.devices) == 1 for block in graph.blocks
    )  # Lists leave the devices of wide blocks waiting.
    if schedule.makespan > bound and budget.left >= 0 and early and single:
        schedule = _list_schedule(schedule, few or units <= most, early) or schedule
    if schedule.makespan > bound and budget.left >= 0 and few:
        starts, least, work = shortest(graph, schedule.starts, budget.limit(0.8))
        budget.work += work
        length = model.makespan(graph, starts)
        if length < schedule.makespan:
            return BlockSchedule(graph, starts, None, least, length == least)
    return schedule


def _list_schedule(known: BlockSchedule, few: bool, early: int) -> BlockSchedule | None:
    """The list schedule of the same units, where it is shorter and comes to the same period, or
    need not repeat.
    """
    graph = known.graph
    bound = model.makespan_bound(known.graph, known.units)
    starts = shortest_greedy(graph, known.units)
    if starts is None or model.makespan(graph, starts) >= known.makespan:
        return None
    middle = len(starts) // 2

    def settles(group: int) -> bool:
        return early + group < middle and model.turn_of(starts, group, early, middle) is not None

    seen = model.observed_state(graph, starts)
    if seen.repetend is not None and seen.period == known.period and (few or settles(1)):
        return replace(known, starts=starts, repetend=seen.repetend)
    repeats = seen.period == known.period and any(map(settles, range(2, _MOST_TOGETHER + 1)))
    if not (few or repeats) or seen.makespan > (1 - _WORTH) * known.makespan:
        return None
    return BlockSchedule(graph, starts, seen.period, bound, seen.makespan == bound)


_TRIALS = 8  # Numbers of units in flight that are tried.
_TRIAL_UNITS = 6  # Units of a trial, as a multiple of those in flight.


def shortest_greedy(graph: BlockGraph, units: int) -> Starts | None:
    """The shortest of the list schedules, and of equal ones that with fewest units in flight; None
    where none fits. Numbers in flight go from what one unit's length needs at full load to more
    than twice that; they are compared by fewer units where there are many.
    """
    least = math.ceil(max(model.tails(graph)) / max(graph.loads))
    best: tuple[int, int] | None = None
    for in_flight in range(least, 2 * least + 2, max(1, math.ceil((least + 2) / _TRIALS))):
        trial = min(units, _TRIAL_UNITS * in_flight)
        starts = greedy(graph, trial, in_flight)
        if starts is None:
            continue
        excess = model.makespan(graph, starts) - model.makespan_bound(graph, trial)
        if best is None or excess < best[0]:
            best = excess, in_flight
        if not excess:
            break
    return greedy(graph, units, best[1]) if best is not None else None


def greedy(graph: BlockGraph, units: int, in_flight: int) -> Starts | None:
    """A list schedule with at most `in_flight` units begun and not ended on any device. None where
    limits leave units waiting for each other. Units are equal, so of each block only the oldest
    unit that has not started it is looked at.
    """
    blocks = graph.blocks
    members = graph.members
    ranks = []
    for index, (block, tail) in enumerate(zip(blocks, model.tails(graph), strict=True)):
        # Blocks that others wait for come before blocks that allocate, and these before the rest.
        ranks.append(
            (
                1 if block.memory > 0 or not block.after else 0 if graph.following[index] else 2,
                -tail,
            )
        )
    starts = [[-1] * len(blocks) for _ in range(units)]
    next_unit = [0] * len(blocks)
    moments = [(0, device) for device in range(graph.devices)]  # When devices are looked at again.
    free = [0] * graph.devices
    used = [0] * graph.devices
    # Of each device and unit, how many of its blocks have not started.
    waiting = [[len(own)] * units for own in members]
    begun = [0] * graph.devices  # Units begun and not ended on each device.

    def has_room(unit: int, index: int) -> bool:
        for device in blocks[index].devices:
            room = graph.memory[device]
            if room is not None and used[device] + blocks[index].memory > room:
                return False
            if waiting[device][unit] == len(members[device]) and begun[device] == in_flight:
                return False
        return True

    def start(unit: int, index: int, now: int) -> None:
        block = blocks[index]
        starts[unit][index] = now
        next_unit[index] += 1
        for device in block.devices:
            free[device] = now + block.time
            used[device] += block.memory
            begun[device] += waiting[device][unit] == len(members[device])
            waiting[device][unit] -= 1
            begun[device] -= waiting[device][unit] == 0
            heapq.heappush(moments, (now + block.time, device))
        for follower in graph.following[index]:
            after = blocks[follower]
            delay = after.delay(after.after.index(index))
            for device in after.devices:
                heapq.heappush(moments, (now + block.time + delay, device))

    while moments:
        now = moments[0][0]
        devices = set[int]()
        while moments and moments[0][0] == now:
            devices.add(heapq.heappop(moments)[1])
        kept: set[int] = (
            set()
        )  # Devices that wait for others together with which they run what comes first.
        choices = {index for device in devices if free[device] <= now for index in members[device]}
        for index in sorted(
            choices, key=lambda each: (ranks[each][0], next_unit[each], ranks[each][1])
        ):
            unit = next_unit[index]
            if unit == units or not all(
                0 <= starts[unit][other] <= now - wait for other, wait in graph.waits[index]
            ):
                continue
            if any(free[device] > now or device in kept for device in blocks[index].devices):
                kept.update(blocks[index].devices)
            elif has_room(unit, index):
                start(unit, index, now)
    return tuple(map(tuple, starts)) if all(unit == units for unit in next_unit) else None
