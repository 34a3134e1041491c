"""All units at once: the schedule of least makespan, for few of them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from autopipe.ir.blocks import BlockGraph
from autopipe.passes.schedule.tessel.bounds import heads, makespan_bound, tails
from autopipe.passes.schedule.tessel.unroll import Starts, compact, makespan
from autopipe.passes.solvers.cp_sat import Limit, OnSolution, Status, solve

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar


@dataclass(frozen=True, slots=True)
class Whole:
    """The shortest schedule found, and the least makespan that may yet be possible."""

    starts: Starts
    bound: int
    work: float


def shortest(graph: BlockGraph, known: Starts, limit: Limit, on_solution: OnSolution | None = None) -> Whole:
    """The schedule of least makespan for the units of `known`, which it is no longer than.

    Units are alike, so that unit n may be taken to start each block before unit n + 1 does.
    """
    from ortools.sat.python import cp_model

    units = len(known)
    horizon = makespan(graph, known)
    low = makespan_bound(graph, units)
    if low >= horizon:
        return Whole(known, horizon, 0.0)
    model = cp_model.CpModel()
    end = model.new_int_var(low, horizon, "end")
    first, last = heads(graph), tails(graph)
    starts = [
        [
            model.new_int_var(first[index], horizon - block.time - last[index], f"{block.name}.{unit}")
            for index, block in enumerate(graph.blocks)
        ]
        for unit in range(units)
    ]
    for index, block in enumerate(graph.blocks):
        for unit in range(units):
            model.add(starts[unit][index] + block.time + last[index] <= end)
            model.add_hint(starts[unit][index], known[unit][index])
            for position, other in enumerate(block.after):
                wait = graph.blocks[other].time + block.delay(position)
                model.add(starts[unit][index] >= starts[unit][other] + wait)
        for one, next_one in pairwise(range(units)):
            model.add(starts[next_one][index] >= starts[one][index] + block.time)
    for device, room in enumerate(graph.memory):
        _take_turns(graph, model, starts, device)
        if room is not None:
            _keep_memory(graph, model, starts, device, room, horizon)
    model.minimize(end)
    answer = solve(model, [start for unit in starts for start in unit], limit, on_solution)
    if not answer.found:
        return Whole(known, max(low, answer.bound or 0) if answer.status is Status.UNKNOWN else horizon, answer.work)
    count = len(graph.blocks)
    found = compact(graph, tuple(answer.values[unit * count : (unit + 1) * count] for unit in range(units)))
    better = found if makespan(graph, found) < horizon else known
    return Whole(better, max(low, answer.bound or 0), answer.work)


def _take_turns(graph: BlockGraph, model: CpModel, starts: list[list[IntVar]], device: int) -> None:
    model.add_no_overlap(
        model.new_fixed_size_interval_var(unit[index], block.time, "")
        for unit in starts
        for index, block in enumerate(graph.blocks)
        if device in block.devices
    )


def _keep_memory(
    graph: BlockGraph, model: CpModel, starts: list[list[IntVar]], device: int, room: int, horizon: int
) -> None:
    """Memory changes at starts, of which no two on a device are at the same time."""
    members = [index for index, block in enumerate(graph.blocks) if device in block.devices and block.memory]
    if not members:
        return
    times = [unit[index] for unit in starts for index in members]
    changes = [graph.blocks[index].memory for _ in starts for index in members]
    model.add_reservoir_constraint(times, changes, -sum(abs(each) for each in changes), room)
