"""Warm-up and cool-down of a steady state, as short as they can be while the repetitions between stand as they are.

Lin et al., "Tessel" (HPCA 2024), section IV.B: each is a small problem of its own. Repetition r holds block i of unit
r - stage(i); the complete ones are those from the greatest stage to the last unit. `serial_order` is what every search
begins from: an order of one unit's blocks, one at a time, that memory suffices for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from autopipe.ir.block_schedule import BlockGraph, BlockSchedule
from autopipe.ir.errors import InfeasibleError
from autopipe.passes.schedule.tessel.model import (
    Budget,
    PeriodicStarts,
    Starts,
    compact,
    fits,
    in_order,
    makespan,
    makespan_bound,
    require_room,
    reserved,
    sharing_pairs,
    topological,
    unroll,
)
from autopipe.passes.solvers.cp_sat import CpResult, Limit, Status, solve

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar


Task = tuple[int, int]
"""(unit, block)"""


class StartWindow(NamedTuple):
    """Where a block may start, and where it is known to fit."""

    first: int
    last: int
    known: int


@dataclass(frozen=True, slots=True)
class TaskModel:
    """A model with a start of each task: a number, or a variable where it is free."""

    model: CpModel
    starts: dict[Task, int | IntVar]
    variables: list[IntVar]
    """Starts of the free tasks, in their order."""


def model_tasks(
    graph: BlockGraph, given: Mapping[Task, int], free: Mapping[Task, StartWindow], in_use: Sequence[int]
) -> TaskModel:
    """All ways to place the free tasks among the given ones, with `in_use` memory in use on each device before. Units
    are equal, so that a unit may be taken to start each block before the next unit does."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    variables = {task: model.new_int_var(window.first, window.last, "") for task, window in free.items()}
    for task, window in free.items():
        model.add_hint(variables[task], window.known)
    starts: dict[Task, int | IntVar] = {**given, **variables}
    for unit, index in starts:
        follows = [((unit, other), (unit, index), wait) for other, wait in graph.waits[index]]
        for before, after, wait in (*follows, ((unit, index), (unit + 1, index), graph.blocks[index].time)):
            if before in starts and after in starts and (before in free or after in free):
                model.add(starts[after] >= starts[before] + wait)
    for device, (room, used) in enumerate(zip(graph.memory, in_use, strict=True)):
        tasks = [task for task in starts if device in graph.blocks[task[1]].devices]
        model.add_no_overlap(
            model.new_fixed_size_interval_var(starts[task], graph.blocks[task[1]].time, "") for task in tasks
        )
        # Memory changes at starts, of which no two on a device are at the same time.
        changing = [task for task in tasks if graph.blocks[task[1]].memory]
        if room is not None and changing:
            memory = [graph.blocks[index].memory for _, index in changing]
            least = -sum(map(abs, memory))
            model.add_reservoir_constraint([starts[task] for task in changing], memory, least, room - used)
    return TaskModel(model, starts, list(variables.values()))


_MOST = 300  # Most blocks of one end that are given to the solver; more of them start as early as their order allows.
_SHARE = 0.03  # Of the work that is left, for one end.


def complete(graph: BlockGraph, cyclic: PeriodicStarts, units: int, budget: Budget) -> Starts:
    """Starts of `units` units in this steady state: the shortest found, and of these the one of least memory."""
    early = unroll(graph, cyclic, units)
    stages = cyclic.stages
    sizes = sum(max(stages) - stage for stage in stages), sum(stages)
    if budget.left < 0 or max(stages) >= units or max(sizes) > _MOST:
        return early
    found, used = [early], BlockSchedule(graph, early).peak_memory
    found.append(_with_ends(replace(graph, memory=used), cyclic, units, budget))
    more_room = any(room is None or room > peak for room, peak in zip(graph.memory, used, strict=True))
    if more_room and makespan(graph, found[-1]) > makespan_bound(graph, units):
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
    plain = {(unit, index): start + unit * cyclic.period for unit in range(units) for index, start in enumerate(once)}
    moved = {**plain, **_warm_up(graph, cyclic, plain, budget), **_cool_down(graph, cyclic, plain, budget)}
    first = min(moved.values())
    return compact(graph, [[moved[unit, index] - first for index in range(len(once))] for unit in range(units)])


def _warm_up(graph: BlockGraph, cyclic: PeriodicStarts, plain: Mapping[Task, int], budget: Budget) -> dict[Task, int]:
    """Better starts of the blocks before the first complete repetition, the first of which is as late as can be. Where
    no unit has blocks in both ends, they may even start later than before, into gaps of that repetition."""
    period, first = cyclic.period, max(cyclic.stages)
    apart = max(unit for unit, _ in plain) >= 2 * first
    given = {task: start for task, start in plain.items() if start // period == first}
    latest = _latest(graph, plain, first * period, period) if apart else plain
    free = {task: StartWindow(0, latest[task], start) for task, start in plain.items() if start // period < first}
    made = model_tasks(graph, given, free, (0,) * graph.devices)
    begin = made.model.new_int_var(0, first * period, "")
    for start in made.variables:
        made.model.add(begin <= start)
    made.model.maximize(begin)
    return _moved(free, made, budget)


def _latest(graph: BlockGraph, plain: Mapping[Task, int], end: int, period: int) -> dict[Task, int]:
    """Latest starts of the blocks before `end`: done within a period after it, and for what stands behind it."""
    free = {task for task, start in plain.items() if start < end}
    found = {task: end + period - graph.blocks[task[1]].time for task in free}
    for (unit, index), start in plain.items():
        for other, wait in graph.waits[index]:
            if (unit, other) in free and (unit, index) not in free:
                found[unit, other] = min(found[unit, other], start - wait)
    return found


def _cool_down(graph: BlockGraph, cyclic: PeriodicStarts, plain: Mapping[Task, int], budget: Budget) -> dict[Task, int]:
    """Better starts of the blocks behind the last complete repetition, whose end is as early as can be."""
    period, last = cyclic.period, max(unit for unit, _ in plain)
    given = {task: start for task, start in plain.items() if last - 1 <= start // period <= last}
    horizon = max(start + graph.blocks[index].time for (_, index), start in plain.items())
    free, in_use = {}, [0] * graph.devices
    for (unit, index), start in plain.items():
        if start // period > last:
            waits = [(plain[unit, other], wait) for other, wait in graph.waits[index]]
            ready = (began + wait for began, wait in waits if began < (last + 1) * period)
            window = StartWindow(max(last * period, *ready, 0), horizon - graph.blocks[index].time, start)
            free[unit, index] = window
        elif start // period < last - 1:
            for device in graph.blocks[index].devices:
                in_use[device] += graph.blocks[index].memory
    made = model_tasks(graph, given, free, in_use)
    end = made.model.new_int_var(0, horizon, "")
    for (_, index), where in made.starts.items():
        made.model.add(end >= where + graph.blocks[index].time)
    made.model.minimize(end)
    return _moved(free, made, budget)


def _moved(free: Mapping[Task, StartWindow], made: TaskModel, budget: Budget) -> dict[Task, int]:
    """The solver's starts of the free blocks; none where it found none."""
    answer = solve(made.model, made.variables, budget.limit(_SHARE))
    budget.work += answer.work
    return dict(zip(free, answer.values, strict=True)) if answer.found else {}


def serial_order(graph: BlockGraph, units: int, limit: Limit) -> tuple[int, ...]:
    """An order within the room on all devices for `units` units, one after the other. Raises InfeasibleError, with the
    device and the least room that would do, where there is none."""
    last = reserved(graph, units - 1)
    # Of the blocks that may start, one that allocates nothing if there is any, otherwise the one readied last.
    order = topological(graph, lambda index, started: (graph.blocks[index].memory > 0, -started))
    if fits(last, in_order(last, 1, ((0, index) for index in order))):
        return order
    answer = _serial_places(last, limit)
    if answer.found:
        return tuple(sorted(range(len(graph.blocks)), key=lambda index: (answer.values[index], index)))
    require_room(graph, units)
    if answer.status is Status.INFEASIBLE:
        raise InfeasibleError("no order of one unit's blocks keeps to the memory limits of all devices")
    raise InfeasibleError(
        "no order of one unit's blocks was found that keeps to the memory limits", hint="search longer, or raise them"
    )


def _serial_places(graph: BlockGraph, limit: Limit) -> CpResult:
    """The place of each block in an order that fits memory."""
    from ortools.sat.python import cp_model

    model, blocks = cp_model.CpModel(), graph.blocks
    places = [model.new_int_var(0, len(blocks) - 1, "") for _ in blocks]
    for index, block in enumerate(blocks):
        for other in block.after:
            model.add(places[other] < places[index])
    before: dict[tuple[int, int], IntVar] = {}
    for first, second in sharing_pairs(graph):
        holds = before[first, second] = model.new_bool_var("")
        model.add(places[first] < places[second]).only_enforce_if(holds)
        model.add(places[second] < places[first]).only_enforce_if(holds.negated())
    for members, room in zip(graph.members, graph.memory, strict=True):
        for index in members:
            if room is not None and blocks[index].memory > 0:
                earlier = (
                    blocks[other].memory * (before[other, index] if other < index else 1 - before[index, other])
                    for other in members
                    if other != index
                )
                model.add(blocks[index].memory + sum(earlier) <= room)
    return solve(model, places, limit)
