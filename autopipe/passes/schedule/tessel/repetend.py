"""Questions about the steady state, each put to CP-SAT once and its answer checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopipe.ir.block_schedule import BlockGraph
from autopipe.ir.errors import AutopipeError
from autopipe.passes.schedule.tessel.bounds import unit_bound
from autopipe.passes.schedule.tessel.cyclic import PeriodicStarts, is_valid
from autopipe.passes.schedule.tessel.cyclic_model import CyclicModel, anchor, hint, memory_in_use, model_cyclic
from autopipe.passes.solvers.cp_sat import Limit, OnSolution, Status, solve

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import IntVar


@dataclass(frozen=True, slots=True)
class Repetend:
    """A steady state, None where none was found, and what was proven of what the run minimised."""

    status: Status
    cyclic: PeriodicStarts | None
    bound: int | None
    work: float
    stages: tuple[int, ...] = ()
    """Of the blocks, as the model counts them."""


def with_period(graph: BlockGraph, period: int, limit: Limit, in_flight: int | None = None) -> Repetend:
    """Any steady state of this period."""
    made = model_cyclic(graph, period, period, in_flight)
    anchor(graph, made)
    return _run(graph, made, limit)


def least_period(
    graph: BlockGraph,
    low: int,
    known: PeriodicStarts,
    limit: Limit,
    on_solution: OnSolution | None = None,
    in_flight: int | None = None,
) -> Repetend:
    """The steady state of least period from `low` to less than that of `known`, from which the search begins.

    INFEASIBLE says that no period is shorter than the known one.
    """
    made = model_cyclic(graph, low, known.period - 1, in_flight)
    anchor(graph, made)
    if in_flight is None:
        hint(graph, made, known)
    made.model.minimize(made.period)
    return _run(graph, made, limit, on_solution)


def least_latency(graph: BlockGraph, known: PeriodicStarts, limit: Limit) -> Repetend:
    """The steady state of the known period with the least time from a unit's first start to its last end."""
    made = model_cyclic(graph, known.period, known.period)
    latency = _latency(graph, made, known)
    made.model.minimize(latency)
    hint(graph, made, known)
    return _run(graph, made, limit)


def least_memory(graph: BlockGraph, known: PeriodicStarts, limit: Limit, latency: int | None = None) -> Repetend:
    """The steady state of the known period whose fullest device uses least, and `latency` at most; then the others."""
    made = model_cyclic(graph, known.period, known.period)
    model = made.model
    if latency is not None:
        model.add(_latency(graph, made, known) <= latency)
    most = sum(abs(block.memory) for block in graph.blocks) * len(graph.blocks)
    fullest, peaks = model.new_int_var(0, most, ""), []
    for device in range(graph.devices):
        peaks.append(model.new_int_var(0, most, ""))
        model.add(fullest >= peaks[-1])
        for used, step in memory_in_use(graph, made, device):
            model.add(peaks[-1] >= step * used)
    model.minimize(graph.devices * fullest + sum(peaks))
    hint(graph, made, known)
    return _run(graph, made, limit, relax=True)


def _latency(graph: BlockGraph, made: CyclicModel, known: PeriodicStarts) -> IntVar:
    """A variable that is at least a unit's time from its first start to its last end."""
    period = known.period
    latency = made.model.new_int_var(unit_bound(graph), max(unit_bound(graph), known.latency(graph)), "")
    first = made.model.new_int_var(0, period - 1, "")
    for index, block in enumerate(graph.blocks):
        made.model.add(made.starts(index, period) >= first)
        made.model.add(made.starts(index, period) + block.time <= first + latency)
    return latency


def _run(
    graph: BlockGraph, made: CyclicModel, limit: Limit, on_solution: OnSolution | None = None, relax: bool = False
) -> Repetend:
    answer = solve(made.model, [made.period, *made.phases, *made.stages], limit, on_solution, relax)
    if not answer.found:
        return Repetend(answer.status, None, answer.bound, answer.work)
    period, values = answer.values[0], answer.values[1:]
    count = len(graph.blocks)
    starts = [phase + period * stage for phase, stage in zip(values[:count], values[count:], strict=True)]
    cyclic = PeriodicStarts(period, tuple(start - min(starts) for start in starts))
    if not is_valid(graph, cyclic):
        raise AutopipeError("the solver's steady state breaks a rule of its own model")
    return Repetend(answer.status, cyclic, answer.bound, answer.work, values[count:])
