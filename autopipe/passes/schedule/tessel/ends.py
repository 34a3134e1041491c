"""Warm-up and cool-down of a steady state, as short as they can be while the repetitions between stand as they are.

Lin et al., "Tessel" (HPCA 2024), section IV.B: each is a small problem of its own. Repetition r holds block i of unit
r - stage(i); the complete ones are those from the greatest stage to the last unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopipe.ir.block_schedule import BlockGraph
from autopipe.passes.schedule.tessel.bounds import makespan_bound
from autopipe.passes.schedule.tessel.cyclic import PeriodicStarts
from autopipe.passes.schedule.tessel.options import Budget
from autopipe.passes.schedule.tessel.task_model import StartWindow, Task, TaskModel, model_tasks
from autopipe.passes.schedule.tessel.unroll import Starts, compact, makespan, peaks, unroll
from autopipe.passes.solvers.cp_sat import solve

_MOST = 300
"""Most blocks of one end that are given to the solver; more of them start as early as their order allows."""
_SHARE = 0.03
"""Of the work that is left, for one end."""


def complete(graph: BlockGraph, cyclic: PeriodicStarts, units: int, budget: Budget) -> Starts:
    """Starts of `units` units in this steady state: the shortest found, and of these the one of least memory."""
    early = unroll(graph, cyclic, units)
    stages = cyclic.stages
    sizes = sum(max(stages) - stage for stage in stages), sum(stages)
    if budget.over or max(stages) >= units or max(sizes) > _MOST:
        return early
    found, used = [early], peaks(graph, early)
    found.append(_solved(replace(graph, memory=used), cyclic, units, budget))
    more_room = any(room is None or room > peak for room, peak in zip(graph.memory, used, strict=True))
    if more_room and makespan(graph, found[-1]) > makespan_bound(graph, units):
        found.append(_solved(graph, cyclic, units, budget))
    return min(
        found, key=lambda starts: (makespan(graph, starts), max(peaks(graph, starts)), sum(peaks(graph, starts)))
    )


def _solved(graph: BlockGraph, cyclic: PeriodicStarts, units: int, budget: Budget) -> Starts:
    """With both ends as short as the solver makes them."""
    plain = _plain(cyclic, units)
    moved = {**plain, **_warm_up(graph, cyclic, plain, budget), **_cool_down(graph, cyclic, plain, budget)}
    first = min(moved.values())
    rows = (tuple(moved[unit, index] - first for index in range(len(graph.blocks))) for unit in range(units))
    return compact(graph, tuple(rows))


def _plain(cyclic: PeriodicStarts, units: int) -> dict[Task, int]:
    """Starts that repeat from the first unit to the last."""
    period, rows = cyclic.period, zip(cyclic.stages, cyclic.phases, strict=True)
    once = [stage * period + phase for stage, phase in rows]
    return {(unit, index): start + unit * period for unit in range(units) for index, start in enumerate(once)}


def _warm_up(graph: BlockGraph, cyclic: PeriodicStarts, plain: Mapping[Task, int], budget: Budget) -> dict[Task, int]:
    """Better starts of the blocks before the first complete repetition, the first of which is as late as can be.

    Where no unit has blocks in both ends, they may even start later than before, into gaps of that repetition.
    """
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
    return _moved(made, budget)


def _cool_down(graph: BlockGraph, cyclic: PeriodicStarts, plain: Mapping[Task, int], budget: Budget) -> dict[Task, int]:
    """Better starts of the blocks behind the last complete repetition, whose end is as early as can be."""
    period, last = cyclic.period, max(unit for unit, _ in plain)
    given = {task: start for task, start in plain.items() if last - 1 <= start // period <= last}
    horizon = max(start + graph.blocks[index].time for (_, index), start in plain.items())
    free = {}
    for (unit, index), start in plain.items():
        if start // period > last:
            earliest = max(last * period, _ready(graph, plain, (unit, index), last * period + period))
            free[unit, index] = StartWindow(earliest, horizon - graph.blocks[index].time, start)
    in_use = [0] * graph.devices
    for (_, index), start in plain.items():
        if start // period < last - 1:
            for device in graph.blocks[index].devices:
                in_use[device] += graph.blocks[index].memory
    made = model_tasks(graph, given, free, in_use)
    end = made.model.new_int_var(0, horizon, "")
    for (_, index), where in made.starts.items():
        made.model.add(end >= where + graph.blocks[index].time)
    made.model.minimize(end)
    return _moved(made, budget)


def _ready(graph: BlockGraph, plain: Mapping[Task, int], task: Task, end: int) -> int:
    """When all that a block waits for and that starts before `end` is there."""
    unit, index = task
    block, found = graph.blocks[index], 0
    for position, other in enumerate(block.after):
        if plain[unit, other] < end:
            found = max(found, plain[unit, other] + graph.blocks[other].time + block.delay(position))
    return found


def _latest(graph: BlockGraph, plain: Mapping[Task, int], end: int, period: int) -> dict[Task, int]:
    """Latest starts of the blocks before `end`: done within a period after it, and for what stands behind it."""
    free = {task for task, start in plain.items() if start < end}
    found = {task: end + period - graph.blocks[task[1]].time for task in free}
    for (unit, index), start in plain.items():
        block = graph.blocks[index]
        for position, other in enumerate(block.after):
            if (unit, other) in free and (unit, index) not in free:
                latest = start - graph.blocks[other].time - block.delay(position)
                found[unit, other] = min(found[unit, other], latest)
    return found


def _moved(made: TaskModel, budget: Budget) -> dict[Task, int]:
    """The solver's starts of the free blocks; none where it found none."""
    answer = solve(made.model, made.variables, budget.limit(_SHARE))
    budget.spend(answer.work)
    return dict(zip(made.free, answer.values, strict=True)) if answer.found else {}
