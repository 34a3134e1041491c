"""Search for a block schedule: the steady state with the shortest period, its warm-up and
cool-down, and, for few micro-batches, all blocks at once.

Lin et al., "Tessel" (HPCA 2024), sections IV and V. The paper solves one problem per assignment of
micro-batch indices to the blocks of the repetend, the repeated part of the schedule (Algorithm 1).
Here the repetend is one modulo schedule (`periodic`), in which the indices are variables.
Repetition r contains block i of micro-batch r - k(i), where k(i) is the modulo stage of block i.
Repetitions from max k to the last micro-batch are complete. Warm-up and cool-down are two small
problems in which these repetitions are fixed (section IV-C).

A list schedule replaces the result if it is shorter. With split backwards, weight gradients can
fill warm-up and cool-down, as in Qi et al., "Zero Bubble Pipeline Parallelism" (2024), section 3.
List schedules do this and are then often optimal; a search that considers only the period does not.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from autopipe.ir.block_schedule import BlockGraph, BlockSchedule, check_start_times
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.passes.schedule.tessel import model, periodic
from autopipe.passes.schedule.tessel.model import Budget, PeriodicStarts, SearchOptions, Starts
from autopipe.passes.solvers.cp_sat import CpResult, Limit, OnSolution, Status, solve

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar


def best_steady_state(
    graph: BlockGraph, micro_batches: int, budget: Budget
) -> tuple[PeriodicStarts, int]:
    """Return (steady state, lower bound of the period) for `micro_batches` micro-batches: the best
    steady state found within the budget.

    Objectives in this order: shortest period, shortest latency (time from the first start to the
    last end of a micro-batch), minimum memory. Raises InfeasibleError if the memory does not
    suffice even for one block after another.
    """
    best, bound = shortest_steady_state(graph, micro_batches, budget)
    budget.report(best.period, bound)
    reduced = model.with_reserved_memory(graph, micro_batches)
    best = periodic.shorten_period(reduced, best, best.period)
    found = _solve_within(
        reduced, budget, 0.2, lambda limit: periodic.minimize_latency(reduced, best, limit)
    )
    best = found.cyclic or best
    latency = best.latency(reduced)
    found = _solve_within(
        reduced, budget, 0.1, lambda limit: periodic.minimize_memory(reduced, best, limit, latency)
    )
    best = found.cyclic or best
    budget.report(best.period, bound)
    return best, bound


def shortest_steady_state(
    graph: BlockGraph, micro_batches: int, budget: Budget
) -> tuple[PeriodicStarts, int]:
    """Return (steady state, lower bound of the period) as `best_steady_state` does, but minimise
    only the period.
    """
    serial = one_by_one_order(graph, micro_batches, budget.limit(0.2))
    graph = model.with_reserved_memory(graph, micro_batches)
    bound = model.period_bound(graph)
    budget.report(None, bound)
    best = periodic.construct_steady_state(graph, bound, serial, budget)
    budget.report(best.period, bound)
    if best.period > bound:
        best = _improve_with_rounded_times(graph, best, bound, budget)
    if best.period > bound:
        best, proven = _improve_with_exact_times(graph, best, bound, budget)
        # The improved bound was proven for `balanced_changes`, in which the memory changes of a
        # micro-batch add up to 0. Unless `frees_all_memory`, real schedules may need less memory
        # and beat it, so it is not used.
        if model.frees_all_memory(graph):
            bound = proven
    return best, bound


def _improve_with_rounded_times(
    graph: BlockGraph, best: PeriodicStarts, bound: int, budget: Budget
) -> PeriodicStarts:
    """Return the steady state with the shorter period: `best`, or one whose order was found with
    rounded times. `bound` is a lower bound of the period.
    """
    rounded = periodic.round_times(graph, bound)
    if rounded is None:
        return best
    low = model.period_bound(rounded)
    found = _solve_within(
        graph, budget, 0.1, lambda limit: periodic.find_with_period(rounded, low, limit)
    )
    if found.cyclic is None:
        known = periodic.shorten_period(rounded, best, low)
        found = _solve_within(
            graph, budget, 0.35, lambda limit: periodic.minimize_period(rounded, low, known, limit)
        )
    if found.cyclic is None:
        return best
    exact = periodic.shorten_period(graph, found.cyclic, bound)
    return min(best, exact, key=lambda each: each.period)


def _improve_with_exact_times(
    graph: BlockGraph, best: PeriodicStarts, bound: int, budget: Budget
) -> tuple[PeriodicStarts, int]:
    """Return (steady state, lower bound of the period), searched with exact times. The period is at
    most that of `best`, and the bound at least `bound`.
    """
    found = _solve_within(
        graph, budget, 0.15, lambda limit: periodic.find_with_period(graph, bound, limit)
    )
    if found.cyclic is not None:
        return found.cyclic, bound
    low = bound + 1 if found.status is Status.INFEASIBLE else bound
    if best.period == low:
        return best, low
    found = _solve_within(
        graph,
        budget,
        0.6,
        lambda limit: periodic.minimize_period(graph, low, best, limit, budget.report),
    )
    if found.status is Status.INFEASIBLE:
        return best, best.period
    if found.cyclic is not None:
        best = periodic.shorten_period(graph, found.cyclic, low)
    return best, min(best.period, max(low, found.bound or 0))


_PAIRS_PER_SECOND = 4000
"""Maximum number of pairs of blocks that share a device, per second of the time limit, for which a
solver model is built. Building a model of this size takes about a tenth of the time limit.
"""


def _solve_within(
    graph: BlockGraph,
    budget: Budget,
    fraction: float,
    run: Callable[[Limit], periodic.SteadyState],
) -> periodic.SteadyState:
    """Return the result of `run`, a solver run that may spend `fraction` of the remaining work.
    Return a result without a steady state if no time is left or if building the model would take
    too long.
    """
    pairs = sum(math.comb(len(members), 2) for members in graph.members)
    if budget.left < 0 or pairs > _PAIRS_PER_SECOND * budget.options.time_limit:
        return periodic.SteadyState(Status.UNKNOWN, None, None, 0.0)
    found = run(budget.limit(fraction))
    budget.work += found.work
    return found


BlockTask = tuple[int, int]
"""A block of one micro-batch: (micro-batch, index of the block)."""


class StartWindow(NamedTuple):
    """Interval from `first` to `last` in which a block may start."""

    first: int
    last: int
    known: int
    """Start of the block in a known schedule, which is the solver's hint."""


def start_model(
    graph: BlockGraph,
    fixed: Mapping[BlockTask, int],
    free: Mapping[BlockTask, StartWindow],
    in_use: Sequence[int],
) -> tuple[CpModel, dict[BlockTask, int | IntVar], list[IntVar]]:
    """Return (model, starts, variables): a CP-SAT model that places the `free` tasks around the
    `fixed` tasks.

    - starts: the start of each task, an integer or a variable.
    - variables: the variables of the free tasks, in the order of `free`.

    `in_use` is the memory in use on each device before all of these tasks. Micro-batches are equal,
    so the model requires that each block runs them in order (Property IV.1 of the Tessel paper).
    """
    from ortools.sat.python import cp_model

    program = cp_model.CpModel()
    variables = {
        task: program.new_int_var(window.first, window.last, "") for task, window in free.items()
    }
    for task, window in free.items():
        program.add_hint(variables[task], window.known)
    starts: dict[BlockTask, int | IntVar] = {**fixed, **variables}
    for micro_batch, index in starts:
        follows = [
            ((micro_batch, other), (micro_batch, index), wait) for other, wait in graph.waits[index]
        ]
        for before, after, wait in (
            *follows,
            ((micro_batch, index), (micro_batch + 1, index), graph.blocks[index].time),
        ):
            if before in starts and after in starts and (before in free or after in free):
                program.add(starts[after] >= starts[before] + wait)
    for device, (memory_limit, used) in enumerate(zip(graph.memory, in_use, strict=True)):
        tasks = [task for task in starts if device in graph.blocks[task[1]].devices]
        program.add_no_overlap(
            program.new_fixed_size_interval_var(starts[task], graph.blocks[task[1]].time, "")
            for task in tasks
        )
        # The memory in use changes only when a block starts, and no two blocks of a device start at
        # one time. The level after each start is therefore the memory in use.
        changing = [task for task in tasks if graph.blocks[task[1]].memory]
        if memory_limit is not None and changing:
            memory = [graph.blocks[index].memory for _, index in changing]
            lowest_level = -sum(map(abs, memory))
            program.add_reservoir_constraint(
                [starts[task] for task in changing], memory, lowest_level, memory_limit - used
            )
    return program, starts, list(variables.values())


_MAX_SOLVED_BLOCKS = 300
"""Maximum number of blocks of a warm-up or cool-down for which CP-SAT runs. In a longer one, blocks
start as early as the order of the steady state permits.
"""
_END_WORK_FRACTION = 0.03
"""Fraction of the remaining solver work for one warm-up or cool-down."""


def complete_schedule(
    graph: BlockGraph, cyclic: PeriodicStarts, micro_batches: int, budget: Budget
) -> Starts:
    """Return the starts of `micro_batches` micro-batches in this steady state, with warm-up and
    cool-down. The result is the shortest schedule found; of equally short schedules, the one with
    the smallest peak memory.
    """
    early = model.unroll_steady_state(graph, cyclic, micro_batches)
    modulo_stages = cyclic.modulo_stages
    warm_up_blocks = sum(max(modulo_stages) - stage for stage in modulo_stages)
    cool_down_blocks = sum(modulo_stages)
    largest = max(warm_up_blocks, cool_down_blocks)
    if budget.left < 0 or max(modulo_stages) >= micro_batches or largest > _MAX_SOLVED_BLOCKS:
        return early
    found = [early]
    used = BlockSchedule(graph, early).peak_memory
    found.append(_with_solved_ends(replace(graph, memory=used), cyclic, micro_batches, budget))
    has_free_memory = any(
        limit is None or limit > peak for limit, peak in zip(graph.memory, used, strict=True)
    )
    bound = model.makespan_bound(graph, micro_batches)
    if has_free_memory and model.makespan(graph, found[-1]) > bound:
        found.append(_with_solved_ends(graph, cyclic, micro_batches, budget))

    def cost(starts: Starts) -> tuple[int, int, int]:
        """Return (makespan, highest peak memory, sum of the peaks), by which schedules are
        compared.
        """
        schedule = BlockSchedule(graph, starts)
        peaks = schedule.peak_memory
        return schedule.makespan, max(peaks), sum(peaks)

    return min(found, key=cost)


def _with_solved_ends(
    graph: BlockGraph, cyclic: PeriodicStarts, micro_batches: int, budget: Budget
) -> Starts:
    """Return the starts of the steady state, with warm-up and cool-down as the solver
    places them.
    """
    rows = zip(cyclic.modulo_stages, cyclic.phases, strict=True)
    first_starts = [stage * cyclic.period + phase for stage, phase in rows]
    periodic_starts = {
        (micro_batch, index): start + micro_batch * cyclic.period
        for micro_batch in range(micro_batches)
        for index, start in enumerate(first_starts)
    }
    moved = {
        **periodic_starts,
        **_solved_warm_up(graph, cyclic, periodic_starts, budget),
        **_solved_cool_down(graph, cyclic, periodic_starts, budget),
    }
    origin = min(moved.values())
    starts = [
        [moved[micro_batch, index] - origin for index in range(len(first_starts))]
        for micro_batch in range(micro_batches)
    ]
    return model.compact_starts(graph, starts)


def _solved_warm_up(
    graph: BlockGraph,
    cyclic: PeriodicStarts,
    periodic_starts: Mapping[BlockTask, int],
    budget: Budget,
) -> dict[BlockTask, int]:
    """Return new starts of the blocks before the first complete repetition (the first that contains
    every block), or {} if the solver found none. `periodic_starts` are the starts in the steady
    state.

    The starts of this repetition are fixed, and the first start of the warm-up is as late as
    possible. If no micro-batch has blocks in both warm-up and cool-down, blocks of the warm-up may
    also run in idle times of this repetition.
    """
    period = cyclic.period
    first = max(cyclic.modulo_stages)
    is_separate = max(micro_batch for micro_batch, _ in periodic_starts) >= 2 * first
    fixed = {task: start for task, start in periodic_starts.items() if start // period == first}
    latest = periodic_starts
    if is_separate:
        latest = _latest_starts(graph, periodic_starts, first * period, period)
    free = {
        task: StartWindow(0, latest[task], start)
        for task, start in periodic_starts.items()
        if start // period < first
    }
    program, _, variables = start_model(graph, fixed, free, (0,) * graph.devices)
    begin = program.new_int_var(0, first * period, "")
    for start in variables:
        program.add(begin <= start)
    program.maximize(begin)
    return _solved_starts(free, program, variables, budget)


def _latest_starts(
    graph: BlockGraph, periodic_starts: Mapping[BlockTask, int], end: int, period: int
) -> dict[BlockTask, int]:
    """Return the latest permitted start of each block that starts before `end` in
    `periodic_starts`, the starts in the steady state.

    Started then, the block ends at most one period after `end`. It also ends early enough for the
    blocks that depend on it and start at `end` or later in the steady state.
    """
    free = {task for task, start in periodic_starts.items() if start < end}
    found = {task: end + period - graph.blocks[task[1]].time for task in free}
    for (micro_batch, index), start in periodic_starts.items():
        for other, wait in graph.waits[index]:
            if (micro_batch, other) in free and (micro_batch, index) not in free:
                found[micro_batch, other] = min(found[micro_batch, other], start - wait)
    return found


def _solved_cool_down(
    graph: BlockGraph,
    cyclic: PeriodicStarts,
    periodic_starts: Mapping[BlockTask, int],
    budget: Budget,
) -> dict[BlockTask, int]:
    """Return new starts of the blocks after the last complete repetition (the last that contains
    every block), or {} if the solver found none. `periodic_starts` are the starts in the steady
    state. The starts of the last two complete repetitions are fixed, and the end of the schedule is
    as early as possible.
    """
    period = cyclic.period
    last = max(micro_batch for micro_batch, _ in periodic_starts)
    fixed = {
        task: start
        for task, start in periodic_starts.items()
        if last - 1 <= start // period <= last
    }
    horizon = max(start + graph.blocks[index].time for (_, index), start in periodic_starts.items())
    free = {}
    in_use = [0] * graph.devices
    for (micro_batch, index), start in periodic_starts.items():
        if start // period > last:
            waits = [
                (periodic_starts[micro_batch, other], wait) for other, wait in graph.waits[index]
            ]
            ready = (began + wait for began, wait in waits if began < (last + 1) * period)
            window = StartWindow(
                max(last * period, *ready, 0), horizon - graph.blocks[index].time, start
            )
            free[micro_batch, index] = window
        elif start // period < last - 1:
            for device in graph.blocks[index].devices:
                in_use[device] += graph.blocks[index].memory
    program, starts, variables = start_model(graph, fixed, free, in_use)
    end = program.new_int_var(0, horizon, "")
    for (_, index), start_variable in starts.items():
        program.add(end >= start_variable + graph.blocks[index].time)
    program.minimize(end)
    return _solved_starts(free, program, variables, budget)


def _solved_starts(
    free: Mapping[BlockTask, StartWindow],
    program: CpModel,
    variables: Sequence[IntVar],
    budget: Budget,
) -> dict[BlockTask, int]:
    """Return the start that the solver found for each block of `free`, or {} if it found no
    solution. `program` is the model, `variables` its variables in the order of `free`.
    """
    result = solve(program, variables, budget.limit(_END_WORK_FRACTION))
    budget.work += result.work
    return dict(zip(free, result.values, strict=True)) if result.found else {}


def one_by_one_order(graph: BlockGraph, micro_batches: int, limit: Limit) -> tuple[int, ...]:
    """Return an order of the blocks of one micro-batch that keeps the memory limits if blocks run
    one at a time and `micro_batches` micro-batches run one after another. Each search starts from
    this order.

    Raises InfeasibleError if no order is found, if possible with a device and the memory that it
    needs.
    """
    last = model.with_reserved_memory(graph, micro_batches - 1)
    # Among the blocks whose ancestors ran, blocks that allocate no memory come first, then the
    # block that became available last.
    order = model.topological_order(
        graph, lambda index, started: (graph.blocks[index].memory > 0, -started)
    )
    if model.fits_in_memory(last, model.earliest_starts(last, 1, ((0, index) for index in order))):
        return order
    result = _serial_positions(last, limit)
    if result.found:
        return tuple(
            sorted(range(len(graph.blocks)), key=lambda index: (result.values[index], index))
        )
    model.require_memory(graph, micro_batches)
    if result.status is Status.INFEASIBLE:
        raise InfeasibleError(
            "every order of the blocks of one micro-batch exceeds the memory limit of a device",
            hint="raise the memory limits",
        )
    raise InfeasibleError(
        "the search found no order of the blocks of one micro-batch within the memory limits",
        hint="raise the time limit or the memory limits",
    )


def _serial_positions(graph: BlockGraph, limit: Limit) -> CpResult:
    """Return the solver's result for the position of each block in an order of one micro-batch that
    keeps the memory limits.
    """
    from ortools.sat.python import cp_model

    program = cp_model.CpModel()
    blocks = graph.blocks
    positions = [program.new_int_var(0, len(blocks) - 1, "") for _ in blocks]
    for index, block in enumerate(blocks):
        for other in block.after:
            program.add(positions[other] < positions[index])
    before: dict[tuple[int, int], IntVar] = {}
    for first, second in model.pairs_sharing_a_device(graph):
        is_before = before[first, second] = program.new_bool_var("")
        program.add(positions[first] < positions[second]).only_enforce_if(is_before)
        program.add(positions[second] < positions[first]).only_enforce_if(is_before.negated())
    for members, memory_limit in zip(graph.members, graph.memory, strict=True):
        for index in members:
            if memory_limit is not None and blocks[index].memory > 0:
                earlier = (
                    blocks[other].memory
                    * (before[other, index] if other < index else 1 - before[index, other])
                    for other in members
                    if other != index
                )
                program.add(blocks[index].memory + sum(earlier) <= memory_limit)
    return solve(program, positions, limit)


def shortest_schedule(
    graph: BlockGraph, known: Starts, limit: Limit, on_solution: OnSolution | None = None
) -> tuple[Starts, int, float]:
    """Return (starts, lower bound of the makespan, solver work spent): the shortest schedule found
    for the micro-batches of `known`, with all blocks in one model. The schedule is not longer than
    `known`.
    """
    horizon = model.makespan(graph, known)
    low = model.makespan_bound(graph, len(known))
    if low >= horizon:
        return known, horizon, 0.0
    release = model.release_times(graph)
    after = model.times_after(graph)
    windows = {
        (micro_batch, index): StartWindow(
            release[index], horizon - block.time - after[index], known[micro_batch][index]
        )
        for micro_batch in range(len(known))
        for index, block in enumerate(graph.blocks)
    }
    program, starts, variables = start_model(graph, {}, windows, (0,) * graph.devices)
    end = program.new_int_var(low, horizon, "")
    for (_, index), start in starts.items():
        program.add(start + graph.blocks[index].time + after[index] <= end)
    program.minimize(end)
    result = solve(program, variables, limit, on_solution)
    bound = max(low, result.bound or 0)
    if not result.found:
        return known, bound if result.status is Status.UNKNOWN else horizon, result.work
    count = len(graph.blocks)
    found = model.compact_starts(
        graph, [result.values[at : at + count] for at in range(0, len(result.values), count)]
    )
    return min(known, found, key=lambda each: model.makespan(graph, each)), bound, result.work


_ALWAYS_SOLVED_BLOCKS = 64
"""Maximum number of blocks of all micro-batches up to which CP-SAT always places all blocks at
once.
"""
_MAX_BLOCKS_AT_ONCE = 400
"""Maximum number of blocks of all micro-batches that CP-SAT places at once."""
_MAX_UNROLLED_BLOCKS = 2000
"""Maximum number of blocks of all micro-batches for a schedule without a steady state. A program
lists each of these blocks.
"""
_WARM_UP_PER_DEVICE = 2
"""Number of micro-batches per device after which a schedule with more micro-batches must repeat."""
_MAX_GROUP = 4
"""Maximum number of micro-batches in one repetition of a list schedule."""
_MIN_SAVING = 0.02
"""Minimum fraction of the makespan that a schedule must save if it does not repeat, or if one
repetition contains several micro-batches.
"""


def search(
    graph: BlockGraph, micro_batches: int, options: SearchOptions | None = None
) -> BlockSchedule:
    """Return the best schedule found for `micro_batches` micro-batches.

    Objectives in this order: shortest period, shortest warm-up and cool-down, minimum memory. A
    schedule without a steady state can replace the result if its makespan is shorter. For each n
    and k with n * k = `micro_batches`, the result is not longer than the schedule of n
    micro-batches run k times, unless the clock ends the search.

    Raises ConfigurationError for invalid blocks, and InfeasibleError if the memory does not suffice
    for one micro-batch.
    """
    graph.verify()
    if micro_batches < 1:
        raise ConfigurationError(
            f"the number of micro-batches is {micro_batches}, expected at least 1"
        )
    budget = Budget(options or SearchOptions())
    schedule = _search_together(graph, micro_batches, budget)
    schedule = _repeated_if_shorter(schedule, budget, {})
    check_start_times(schedule)
    return replace(schedule, search_time_s=budget.used)


def _search_together(graph: BlockGraph, micro_batches: int, budget: Budget) -> BlockSchedule:
    """Return the best schedule found for `micro_batches` micro-batches. Schedules that repeat the
    schedule of fewer micro-batches are not considered.
    """
    cyclic, bound = best_steady_state(graph, micro_batches, budget)
    starts = complete_schedule(graph, cyclic, micro_batches, budget)
    if not model.fits_in_memory(graph, starts):
        # A micro-batch that frees memory before it allocates memory can help the previous
        # micro-batch to respect the limits. No micro-batch follows the last, so the steady state
        # may exceed the limits there, and a serial one replaces it.
        cyclic = periodic.serial_steady_state(
            graph, one_by_one_order(graph, micro_batches, budget.limit(1.0))
        )
        starts = model.unroll_steady_state(graph, cyclic, micro_batches)
    schedule = BlockSchedule(
        graph, starts, cyclic.period, bound, cyclic.period == bound, model.repetend_from(cyclic)
    )
    return _shorten(schedule, cyclic, budget)


def _repeated_if_shorter(
    schedule: BlockSchedule, budget: Budget, known: dict[int, BlockSchedule]
) -> BlockSchedule:
    """Return the shorter of `schedule` and of repeated schedules of fewer micro-batches. A repeated
    schedule of n micro-batches runs k times, where n * k is the number of micro-batches of
    `schedule`.

    A number n is skipped if a lower bound shows that no schedule of n micro-batches can help. The
    search for n may spend as much solver work as the search for `schedule`. It therefore finds the
    schedule that a separate request for n micro-batches would find, unless the clock, which all
    searches share, ends it. `known` caches schedules by number of micro-batches.
    """
    graph = schedule.graph
    micro_batches = schedule.units
    bound = model.makespan_bound(graph, micro_batches)
    for fewer in range(micro_batches // 2, 0, -1):
        repetitions = micro_batches // fewer
        if (
            micro_batches % fewer
            or repetitions * model.makespan_bound(graph, fewer) >= schedule.makespan
            or budget.left < 0
        ):
            continue
        if fewer not in known:
            inner_budget = replace(budget, options=replace(budget.options, progress=None), work=0.0)
            try:
                known[fewer] = _repeated_if_shorter(
                    _search_together(graph, fewer, inner_budget), inner_budget, known
                )
            except InfeasibleError:
                continue
        starts = _repeat_starts(known[fewer], repetitions)
        length = model.makespan(graph, starts)
        if length < schedule.makespan and model.fits_in_memory(graph, starts):
            schedule = BlockSchedule(graph, starts, None, bound, length == bound)
    return schedule


def _repeat_starts(schedule: BlockSchedule, times: int) -> Starts:
    """Return the starts of the schedule run `times` times in succession. Each block starts as early
    as the order on each device permits.
    """
    length = schedule.makespan
    return model.compact_starts(
        schedule.graph,
        [
            [start + length * number for start in starts]
            for number in range(times)
            for starts in schedule.starts
        ],
    )


def _shorten(schedule: BlockSchedule, cyclic: PeriodicStarts, budget: Budget) -> BlockSchedule:
    """Return `schedule`, or a shorter schedule of its micro-batches. The shorter schedule may start
    to repeat later, have repetitions of several micro-batches, or not repeat.

    A list schedule is tried if each block runs on one device. Then, if there are few blocks, CP-SAT
    places all blocks at once. Both are skipped if the schedule reaches its lower bound or no time
    is left. `cyclic` is the steady state of `schedule`.
    """
    graph = schedule.graph
    micro_batches = schedule.units
    unrolled = budget.options.unrolled
    bound = model.makespan_bound(graph, micro_batches)
    count = micro_batches * len(graph.blocks)
    # True if CP-SAT may place all blocks in one model: there are very few, or there are few and
    # warm-up and cool-down are a large part of the schedule.
    solve_all = count <= _ALWAYS_SOLVED_BLOCKS or (
        count <= _MAX_BLOCKS_AT_ONCE and micro_batches <= 2 * max(cyclic.modulo_stages) + 2
    )
    # Numbers of micro-batches that a program may list: before the steady state, and in total if the
    # schedule does not repeat.
    max_warm_up = _WARM_UP_PER_DEVICE * graph.devices
    max_unrolled = _MAX_UNROLLED_BLOCKS // len(graph.blocks)
    if unrolled is not None:
        max_unrolled = unrolled // max(map(len, graph.members))
        max_warm_up = min(max_warm_up, max_unrolled)
    # A list schedule lets a device idle while it waits for the other devices of a block. It is
    # therefore tried only if each block runs on a single device.
    single_device = all(len(block.devices) == 1 for block in graph.blocks)
    if schedule.makespan > bound and budget.left >= 0 and max_warm_up and single_device:
        may_unroll = solve_all or micro_batches <= max_unrolled
        schedule = _shorter_list_schedule(schedule, may_unroll, max_warm_up) or schedule
    if schedule.makespan > bound and budget.left >= 0 and solve_all:
        starts, lower_bound, work = shortest_schedule(graph, schedule.starts, budget.limit(0.8))
        budget.work += work
        length = model.makespan(graph, starts)
        if length < schedule.makespan:
            return BlockSchedule(graph, starts, None, lower_bound, length == lower_bound)
    return schedule


def _shorter_list_schedule(
    known: BlockSchedule, may_unroll: bool, max_warm_up: int
) -> BlockSchedule | None:
    """Return a list schedule of the micro-batches of `known` that has a shorter makespan, or None.

    `may_unroll` is True if a program may list all blocks. If it is False, the list schedule must
    repeat with the period of `known` after at most `max_warm_up` micro-batches. A list schedule
    whose repetitions do not consist of one micro-batch each, with the period of `known`, must also
    save `_MIN_SAVING` of the makespan.
    """
    graph = known.graph
    bound = model.makespan_bound(known.graph, known.units)
    starts = best_list_schedule(graph, known.units)
    if starts is None or model.makespan(graph, starts) >= known.makespan:
        return None
    middle = len(starts) // 2

    def repeats_by(group: int) -> bool:
        """True if the list schedule repeats every `group` micro-batches, in the range from
        micro-batch `max_warm_up` to the middle of the schedule.
        """
        return (
            max_warm_up + group < middle
            and model.constant_distance(starts, group, max_warm_up, middle) is not None
        )

    observed = model.with_observed_period(graph, starts)
    if (
        observed.repetend is not None
        and observed.period == known.period
        and (may_unroll or repeats_by(1))
    ):
        return replace(known, starts=starts, repetend=observed.repetend)
    repeats = observed.period == known.period and any(map(repeats_by, range(2, _MAX_GROUP + 1)))
    if not (may_unroll or repeats) or observed.makespan > (1 - _MIN_SAVING) * known.makespan:
        return None
    return BlockSchedule(graph, starts, observed.period, bound, observed.makespan == bound)


_TRIALS = 8
"""Approximate number of different limits on the micro-batches in flight that `best_list_schedule`
tries.
"""
_TRIAL_LENGTH = 6
"""Number of micro-batches of a trial, as a multiple of its limit on the micro-batches in flight."""


def best_list_schedule(graph: BlockGraph, micro_batches: int) -> Starts | None:
    """Return the best of several list schedules of `micro_batches` micro-batches, or None if none
    keeps the memory limits.

    They differ in the limit on micro-batches in flight (begun and not ended) per device. The limits
    are n, ..., 2n + 1, at most about `_TRIALS` of them at equal distances, where n = ceil(longest
    time after a block / largest load). Each limit is tried with `_TRIAL_LENGTH` times as many
    micro-batches as the limit, or with all micro-batches if these are fewer. The best limit has the
    smallest difference between makespan and lower bound; ties go to the smallest limit.
    """
    smallest = math.ceil(max(model.times_after(graph)) / max(graph.loads))
    step = max(1, math.ceil((smallest + 2) / _TRIALS))
    best: tuple[int, int] | None = None
    for in_flight in range(smallest, 2 * smallest + 2, step):
        trial = min(micro_batches, _TRIAL_LENGTH * in_flight)
        starts = list_schedule(graph, trial, in_flight)
        if starts is None:
            continue
        excess = model.makespan(graph, starts) - model.makespan_bound(graph, trial)
        if best is None or excess < best[0]:
            best = excess, in_flight
        if not excess:
            break
    return list_schedule(graph, micro_batches, best[1]) if best is not None else None


def list_schedule(graph: BlockGraph, micro_batches: int, in_flight: int) -> Starts | None:
    """Return a list schedule in which each device has at most `in_flight` micro-batches that have
    begun and not ended on it. Return None if this limit or the memory limits make blocks wait for
    each other.

    An idle device starts the ready block with the highest priority:

    1. blocks that others depend on and that neither allocate memory nor start a micro-batch;
    2. blocks that allocate memory or start a micro-batch;
    3. other blocks, which no block depends on.

    Ties go to the older micro-batch, then to the longest time after the block. A block on several
    devices reserves its idle devices until all of them are idle. For each block, only the oldest
    micro-batch that has not run it is considered, because micro-batches are equal.
    """
    blocks = graph.blocks
    members = graph.members
    priorities = []
    for index, (block, time_after) in enumerate(zip(blocks, model.times_after(graph), strict=True)):
        if block.memory > 0 or not block.after:
            level = 1
        else:
            level = 0 if graph.following[index] else 2
        priorities.append((level, -time_after))
    starts = [[-1] * len(blocks) for _ in range(micro_batches)]
    next_micro_batch = [0] * len(blocks)
    # Heap of (time, device): times at which a device may become able to start a block.
    moments = [(0, device) for device in range(graph.devices)]
    free = [0] * graph.devices
    used = [0] * graph.devices
    # not_started[device][micro_batch]: number of the micro-batch's blocks on the device that have
    # not started.
    not_started = [[len(own)] * micro_batches for own in members]
    # For each device: the number of micro-batches in flight, which began on the device and have not
    # ended on it.
    begun = [0] * graph.devices

    def fits_limits(micro_batch: int, index: int) -> bool:
        """True if the block may start on its devices under the memory limits and the limit on
        micro-batches in flight.
        """
        for device in blocks[index].devices:
            limit = graph.memory[device]
            if limit is not None and used[device] + blocks[index].memory > limit:
                return False
            if (
                not_started[device][micro_batch] == len(members[device])
                and begun[device] == in_flight
            ):
                return False
        return True

    def start(micro_batch: int, index: int, now: int) -> None:
        """Start the block of a micro-batch at time `now`, and update memory and counts of its
        devices.
        """
        block = blocks[index]
        starts[micro_batch][index] = now
        next_micro_batch[index] += 1
        for device in block.devices:
            free[device] = now + block.time
            used[device] += block.memory
            begun[device] += not_started[device][micro_batch] == len(members[device])
            not_started[device][micro_batch] -= 1
            begun[device] -= not_started[device][micro_batch] == 0
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
        # Idle devices that are reserved for a block while its other devices are still busy.
        reserved = set[int]()
        choices = {index for device in devices if free[device] <= now for index in members[device]}
        for index in sorted(
            choices,
            key=lambda block: (
                priorities[block][0],
                next_micro_batch[block],
                priorities[block][1],
            ),
        ):
            micro_batch = next_micro_batch[index]
            if micro_batch == micro_batches or not all(
                0 <= starts[micro_batch][other] <= now - wait for other, wait in graph.waits[index]
            ):
                continue
            if any(free[device] > now or device in reserved for device in blocks[index].devices):
                reserved.update(blocks[index].devices)
            elif fits_limits(micro_batch, index):
                start(micro_batch, index, now)
    return (
        tuple(map(tuple, starts))
        if all(micro_batch == micro_batches for micro_batch in next_micro_batch)
        else None
    )
