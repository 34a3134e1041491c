"""All units at once: the schedule of least makespan, for few of them."""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.ir.block_schedule import BlockGraph
from autopipe.passes.schedule.tessel.bounds import heads, makespan_bound, tails
from autopipe.passes.schedule.tessel.task_model import StartWindow, model_tasks
from autopipe.passes.schedule.tessel.unroll import Starts, compact, makespan
from autopipe.passes.solvers.cp_sat import Limit, OnSolution, Status, solve


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
