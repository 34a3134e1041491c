"""Schedule search: the steady state of least period, its ends, and all units at once where they are few.

Lin et al., "Tessel" (HPCA 2024), sections IV and V, with the repetend as a modulo schedule instead of one problem for
each assignment of micro-batches.

The steady state: least period first, then the shortest way of a unit, then least memory.

The best repetend of few units: what Tessel's own search looks for at each number of micro-batches in turn.

All units at once: the schedule of least makespan, for few of them.

The whole schedule at once, without a steady state to begin from: what search by repetends is measured against.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from autopipe.ir.block_schedule import BlockGraph, BlockRepetend, BlockSchedule, check_blocks
from autopipe.ir.errors import ConfigurationError
from autopipe.passes.schedule.tessel.list_schedule import shortest_greedy
from autopipe.passes.schedule.tessel.model import (
    Budget,
    PeriodicStarts,
    SearchOptions,
    Starts,
    compact,
    fits,
    frees_all,
    heads,
    makespan,
    makespan_bound,
    observed_state,
    period_bound,
    reserved,
    tails,
    turn_of,
    unroll,
)
from autopipe.passes.schedule.tessel.periodic import (
    Repetend,
    coarse,
    construct,
    least_latency,
    least_memory,
    least_period,
    one_at_a_time,
    tighten,
    with_period,
)
from autopipe.passes.schedule.tessel.warmup_cooldown import StartWindow, complete, model_tasks, serial_order
from autopipe.passes.solvers.cp_sat import Limit, OnSolution, Status, solve

_PAIRS_PER_SECOND = 4000
"""Pairs of blocks on one device, for each second of the time limit, of which models are made: a tenth of a second's."""


@dataclass(frozen=True, slots=True)
class PeriodicResult:
    """A steady state, and what no period is less than."""

    cyclic: PeriodicStarts
    bound: int


def steady_state(graph: BlockGraph, units: int, budget: Budget) -> PeriodicResult:
    """The best steady state found in the budget, for `units` units.

    Raises InfeasibleError where memory does not suffice for them even one after the other.
    """
    found = least_steady_period(graph, units, budget)
    budget.report(found.cyclic.period, found.bound)
    best = _shorter(reserved(graph, units), found.cyclic, budget)
    budget.report(best.period, found.bound)
    return PeriodicResult(best, found.bound)


def least_steady_period(graph: BlockGraph, units: int, budget: Budget) -> PeriodicResult:
    """A steady state of the least period found, whatever its way and memory. Raises as `steady_state` does."""
    serial = serial_order(graph, units, budget.limit(0.2))
    graph = reserved(graph, units)
    bound = period_bound(graph)
    budget.report(None, bound)
    best = construct(graph, bound, serial, budget)
    budget.report(best.period, bound)
    if best.period > bound:
        best = _rounded(graph, best, bound, budget)
    if best.period > bound:
        best, proven = _exact(graph, best, bound, budget)
        bound = proven if frees_all(graph) else bound  # Other units may need less than `changes` say.
    return PeriodicResult(best, bound)


def _rounded(graph: BlockGraph, best: PeriodicStarts, bound: int, budget: Budget) -> PeriodicStarts:
    """A better steady state by way of rounded times, if there is one."""
    rounded = coarse(graph, bound)
    if rounded is None:
        return best
    low = period_bound(rounded)
    found = _ask(graph, budget, 0.1, lambda limit: with_period(rounded, low, limit))
    if found.cyclic is None:
        known = tighten(rounded, best, low)
        found = _ask(graph, budget, 0.35, lambda limit: least_period(rounded, low, known, limit))
    if found.cyclic is None:
        return best
    return min(best, tighten(graph, found.cyclic, bound), key=lambda each: each.period)


def _exact(graph: BlockGraph, best: PeriodicStarts, bound: int, budget: Budget) -> tuple[PeriodicStarts, int]:
    """The least period, or one closer to it, and a bound closer to it."""
    found = _ask(graph, budget, 0.15, lambda limit: with_period(graph, bound, limit))
    if found.cyclic is not None:
        return found.cyclic, bound
    low = bound + 1 if found.status is Status.INFEASIBLE else bound
    if best.period == low:
        return best, low
    found = _ask(graph, budget, 0.6, lambda limit: least_period(graph, low, best, limit, budget.report))
    if found.status is Status.INFEASIBLE:
        return best, best.period
    if found.cyclic is not None:
        best = tighten(graph, found.cyclic, low)
    return best, min(best.period, max(low, found.bound or 0))


def _shorter(graph: BlockGraph, best: PeriodicStarts, budget: Budget) -> PeriodicStarts:
    """The same period with a shorter way of a unit, and then with less memory."""
    best = tighten(graph, best, best.period)
    best = _ask(graph, budget, 0.2, lambda limit: least_latency(graph, best, limit)).cyclic or best
    latency = best.latency(graph)
    return _ask(graph, budget, 0.1, lambda limit: least_memory(graph, best, limit, latency)).cyclic or best


def _ask(graph: BlockGraph, budget: Budget, share: float, question: Callable[[Limit], Repetend]) -> Repetend:
    """The answer to a question that may take a share of what is left; none where its model alone would take long."""
    shares = [sum(device in block.devices for block in graph.blocks) for device in range(graph.devices)]
    pairs = sum(count * (count - 1) // 2 for count in shares)
    if budget.over or pairs > _PAIRS_PER_SECOND * budget.options.time_limit:
        return Repetend(Status.UNKNOWN, None, None, 0.0)
    found = question(budget.limit(share))
    budget.spend(found.work)
    return found


@dataclass(frozen=True, slots=True)
class FullSolve:
    """The shortest schedule found, and the least makespan that may yet be possible."""

    starts: Starts
    bound: int
    work: float


def shortest(graph: BlockGraph, known: Starts, limit: Limit, on_solution: OnSolution | None = None) -> FullSolve:
    """The schedule of least makespan for the units of `known`, which it is no longer than."""
    horizon, low = makespan(graph, known), makespan_bound(graph, len(known))
    if low >= horizon:
        return FullSolve(known, horizon, 0.0)
    first, last = heads(graph), tails(graph)
    windows = {
        (unit, index): StartWindow(first[index], horizon - block.time - last[index], known[unit][index])
        for unit in range(len(known))
        for index, block in enumerate(graph.blocks)
    }
    made = model_tasks(graph, {}, windows, (0,) * graph.devices)
    end = made.model.new_int_var(low, horizon, "")
    for (_, index), start in made.starts.items():
        made.model.add(start + graph.blocks[index].time + last[index] <= end)
    made.model.minimize(end)
    answer = solve(made.model, made.variables, limit, on_solution)
    if not answer.found:
        return FullSolve(
            known, max(low, answer.bound or 0) if answer.status is Status.UNKNOWN else horizon, answer.work
        )
    count = len(graph.blocks)
    found = compact(graph, tuple(answer.values[at : at + count] for at in range(0, len(answer.values), count)))
    return FullSolve(
        min(known, found, key=lambda each: makespan(graph, each)), max(low, answer.bound or 0), answer.work
    )


_FEW_BLOCKS = 64
"""Blocks of all units together that are always solved at once as well."""
_MOST_BLOCKS = 400
"""Most blocks that are solved at once."""
_MOST_UNROLLED = 2000
"""Most blocks of a schedule that need not repeat: programs write them out."""
_SETTLED_AFTER = 2
"""Units a device after which others do, a few units together."""
_MOST_TOGETHER = 4
_WORTH = 0.02
"""Share of the makespan that a schedule without a repetend of one unit must save."""


def search(graph: BlockGraph, units: int, options: SearchOptions | None = None) -> BlockSchedule:
    """The best schedule found for `units` units: least period, then shortest warm-up and cool-down, then least memory.

    Raises ConfigurationError for blocks that make no sense, InfeasibleError where memory does not suffice for one unit.
    """
    graph.verify()
    if units < 1:
        raise ConfigurationError(f"{units} units; there must be at least one")
    budget = Budget(options or SearchOptions())
    steady = steady_state(graph, units, budget)
    cyclic = steady.cyclic
    starts = complete(graph, cyclic, units, budget)
    if not fits(graph, starts):
        # Units that free before they allocate can lean on the next ones in the steady state; the last one cannot.
        cyclic = one_at_a_time(graph, serial_order(graph, units, budget.limit(1.0)))
        starts = unroll(graph, cyclic, units)
    proven = cyclic.period == steady.bound
    schedule = BlockSchedule(graph, starts, cyclic.period, steady.bound, proven, _repetend(cyclic))
    schedule = _shortened(schedule, cyclic, budget)
    check_blocks(schedule)
    return replace(schedule, search_time_s=budget.used)


def _shortened(schedule: BlockSchedule, cyclic: PeriodicStarts, budget: Budget) -> BlockSchedule:
    """A shorter schedule that repeats later or not at all, where there is one and few enough units do not repeat."""
    graph, units = schedule.graph, schedule.units
    bound, few = makespan_bound(graph, units), _few(graph, cyclic, units)
    early, all_early = _written_out(graph, units, budget.options.unrolled)
    single = all(len(block.devices) == 1 for block in graph.blocks)  # Lists leave the devices of wide blocks waiting.
    if schedule.makespan > bound and not budget.over and early and single:
        schedule = _list_schedule(schedule, few or all_early, early) or schedule
    if schedule.makespan > bound and not budget.over and few:
        schedule = _all_at_once(schedule, budget)
    return schedule


def _written_out(graph: BlockGraph, units: int, unrolled: int | None) -> tuple[int, bool]:
    """Units that programs may write out before a steady state, and whether they may write out all that there are."""
    early = _SETTLED_AFTER * graph.devices
    if unrolled is None:
        return early, units * len(graph.blocks) <= _MOST_UNROLLED
    counts = Counter(device for block in graph.blocks for device in block.devices)
    most = unrolled // max(counts.values())
    return min(early, most), units <= most


def _list_schedule(known: BlockSchedule, few: bool, early: int) -> BlockSchedule | None:
    """The list schedule of the same units, where it is shorter and comes to the same period, or need not repeat."""
    graph, bound = known.graph, makespan_bound(known.graph, known.units)
    starts = shortest_greedy(graph, known.units)
    if starts is None or makespan(graph, starts) >= known.makespan:
        return None
    seen = observed_state(graph, starts)
    if seen.repetend is not None and seen.period == known.period and (few or _settles(starts, early, 1)):
        return replace(known, starts=starts, repetend=seen.repetend)
    together = range(2, _MOST_TOGETHER + 1)
    repeats = seen.period == known.period and any(_settles(starts, early, group) for group in together)
    if not (few or repeats) or seen.makespan > (1 - _WORTH) * known.makespan:
        return None
    return BlockSchedule(graph, starts, seen.period, bound, seen.makespan == bound)


def _settles(starts: Starts, early: int, group: int) -> bool:
    """True if a steady state of `group` units together begins after `early` units."""
    middle = len(starts) // 2
    return early + group < middle and turn_of(starts, group, early, middle) is not None


def _few(graph: BlockGraph, cyclic: PeriodicStarts, units: int) -> bool:
    """True if so few units repeat that all of them at once may do better, and so few blocks that they can be solved."""
    count = units * len(graph.blocks)
    return count <= _FEW_BLOCKS or (count <= _MOST_BLOCKS and units <= 2 * max(cyclic.stages) + 2)


def _all_at_once(schedule: BlockSchedule, budget: Budget) -> BlockSchedule:
    """The shortest schedule of all units, where that is shorter than the steady state with its ends."""
    graph = schedule.graph
    whole = shortest(graph, schedule.starts, budget.limit(0.8))
    budget.spend(whole.work)
    length = makespan(graph, whole.starts)
    if length >= schedule.makespan:
        return schedule
    return BlockSchedule(graph, whole.starts, None, whole.bound, length == whole.bound)


def _repetend(cyclic: PeriodicStarts) -> BlockRepetend:
    """Each block's start within the period, and its unit in that repetition."""
    last = max(cyclic.stages)
    return BlockRepetend(cyclic.phases, tuple(last - stage for stage in cyclic.stages))


def search_whole(graph: BlockGraph, units: int, options: SearchOptions | None = None) -> BlockSchedule:
    """The schedule of least makespan, all units in one problem: the time-optimal search of Tessel's Figure 9.

    Begins from a steady state that is constructed without a solver. Raises ConfigurationError for blocks that make no
    sense, InfeasibleError where memory does not suffice for one unit.
    """
    graph.verify()
    if units < 1:
        raise ConfigurationError(f"{units} units; there must be at least one")
    budget = Budget(options or SearchOptions())
    roomy = reserved(graph, units)
    known = construct(roomy, period_bound(roomy), serial_order(graph, units, budget.limit(0.2)), budget)
    found = shortest(graph, unroll(graph, known, units), budget.limit(1.0), budget.report)
    optimal = makespan(graph, found.starts) == found.bound
    schedule = BlockSchedule(graph, found.starts, None, found.bound, optimal, None, budget.used)
    check_blocks(schedule)
    return schedule


def search_in_flight(
    graph: BlockGraph, units: int, in_flight: int, options: SearchOptions | None = None
) -> BlockSchedule:
    """The schedule whose repetend has blocks of at most `in_flight` units and the least period of all such.

    This is N_R of Lin et al., "Tessel" (HPCA 2024), Algorithm 1 and Figure 11: each device may begin its repetition at
    a time of its own. `optimal` and `lower_bound` are said of such repetends alone. The ends are as early as the order
    of blocks allows. Raises ConfigurationError for blocks that make no sense, InfeasibleError where memory does not
    suffice.
    """
    graph.verify()
    if units < 1 or in_flight < 1:
        raise ConfigurationError(f"{units} units, {in_flight} of them in flight; there must be at least one")
    budget, roomy = Budget(options or SearchOptions()), reserved(graph, units)
    known = one_at_a_time(graph, serial_order(graph, units, budget.limit(0.2)))
    bound = period_bound(roomy)
    best = Repetend(Status.FEASIBLE, known, None, 0.0, (0,) * len(graph.blocks))
    if known.period > bound:
        found = with_period(roomy, bound, budget.limit(0.4), in_flight)
        budget.spend(found.work)
        if found.cyclic is None:
            found = least_period(roomy, bound, known, budget.limit(1.0), budget.report, in_flight)
            if frees_all(graph):
                bound = known.period if found.status is Status.INFEASIBLE else max(bound, found.bound or 0)
        best = found if found.cyclic is not None else best
    cyclic = best.cyclic or known
    phases = tuple(start - cyclic.period * stage for start, stage in zip(cyclic.starts, best.stages, strict=True))
    repetend = BlockRepetend(
        tuple(phase - min(phases) for phase in phases), tuple(max(best.stages) - stage for stage in best.stages)
    )
    starts, least = unroll(graph, cyclic, units), cyclic.period == bound
    schedule = BlockSchedule(graph, starts, cyclic.period, bound, least, repetend, budget.used)
    check_blocks(schedule)
    return schedule
