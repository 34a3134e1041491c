"""The steady state as a model for CP-SAT: cyclic scheduling.

Block i of unit n starts at phase(i) + period x (stage(i) + n), with 0 <= phase < period. Two blocks that share a device
are ordered by one boolean within the period, wrap-around allowed. This is modulo scheduling of loops, as in Lam,
"Software Pipelining" (1988), with the memory limit of Lin et al., "Tessel" (HPCA 2024), section III.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopipe.ir.blocks import BlockGraph
from autopipe.ir.errors import AutopipeError
from autopipe.passes.schedule.tessel.cyclic import Cyclic, is_valid, sharing_pairs
from autopipe.passes.solvers.cp_sat import Limit, OnSolution, Status, solve

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar, LinearExprT


@dataclass(frozen=True, slots=True)
class Steady:
    """A cyclic schedule, None where none was found, and what was proven of what the run minimised."""

    status: Status
    cyclic: Cyclic | None
    bound: int | None
    work: float


@dataclass(frozen=True, slots=True)
class _Model:
    """Variables of the cyclic schedule."""

    model: CpModel
    period: IntVar
    phases: list[IntVar]
    stages: list[IntVar]
    before: dict[tuple[int, int], IntVar]
    """Whether the first of a pair that shares a device has the smaller phase."""

    def starts(self, index: int, period: int) -> LinearExprT:
        """Start of a block for a period that is known."""
        return self.phases[index] + period * self.stages[index]


def with_period(graph: BlockGraph, period: int, limit: Limit) -> Steady:
    """Any cyclic schedule of this period."""
    made = _build(graph, period, period)
    _anchor(graph, made)
    return _run(graph, made, limit)


def least_period(
    graph: BlockGraph, low: int, known: Cyclic, limit: Limit, on_solution: OnSolution | None = None
) -> Steady:
    """The cyclic schedule of least period from `low` to less than that of `known`, from which the search begins.

    INFEASIBLE says that no period is shorter than the known one.
    """
    made = _build(graph, low, known.period - 1)
    _anchor(graph, made)
    _hint(made, known)
    made.model.minimize(made.period)
    return _run(graph, made, limit, on_solution)


def least_latency(graph: BlockGraph, known: Cyclic, limit: Limit) -> Steady:
    """The cyclic schedule of the known period with the least time from a unit's first start to its last end."""
    period = known.period
    made = _build(graph, period, period)
    model = made.model
    horizon = known.latency(graph) + period
    first = model.new_int_var(0, period - 1, "first")
    last = model.new_int_var(0, horizon, "last")
    for index, block in enumerate(graph.blocks):
        model.add(made.starts(index, period) >= first)
        model.add(made.starts(index, period) + block.time <= last)
    model.minimize(last - first)
    _hint(made, known)
    return _run(graph, made, limit)


def _build(graph: BlockGraph, low: int, high: int) -> _Model:
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    count = len(graph.blocks)
    most = _most_stages(graph, low)
    made = _Model(
        model,
        model.new_int_var(low, high, "period"),
        [model.new_int_var(0, high - 1, f"phase{index}") for index in range(count)],
        [model.new_int_var(0, most, f"stage{index}") for index in range(count)],
        {pair: model.new_bool_var(f"before{pair}") for pair in sharing_pairs(graph)},
    )
    if low < high:
        for phase in made.phases:
            model.add(phase < made.period)
    _take_turns(graph, made)
    for index, block in enumerate(graph.blocks):
        for position, other in enumerate(block.after):
            wait = graph.blocks[other].time + block.delay(position)
            if low == high:
                model.add(made.starts(index, low) >= made.starts(other, low) + wait)
                model.add(made.stages[index] >= made.stages[other])
            else:
                _wait_in_gaps(made, other, index, wait, low)
    for device, room in enumerate(graph.memory):
        if room is not None:
            _keep_memory(graph, made, device, room)
    widest = max(range(count), key=lambda index: (len(graph.blocks[index].devices), graph.blocks[index].time))
    model.add(made.phases[widest] == 0)
    return made


def _most_stages(graph: BlockGraph, period: int) -> int:
    """Stages that suffice: along each dependency no more than the wait takes, whatever the phases."""
    found = [0] * len(graph.blocks)
    for index in graph.order:
        block = graph.blocks[index]
        for position, other in enumerate(block.after):
            wait = graph.blocks[other].time + block.delay(position)
            found[index] = max(found[index], found[other] + _most_gap(wait, period))
    return max(found) + 1


def _most_gap(wait: int, period: int) -> int:
    """Stages between two blocks that leave time for the wait whatever their phases."""
    return math.ceil((wait + period - 1) / period)


def _take_turns(graph: BlockGraph, made: _Model) -> None:
    for (first, second), before in made.before.items():
        for one, other, holds in ((first, second, before), (second, first, before.negated())):
            made.model.add(made.phases[one] + graph.blocks[one].time <= made.phases[other]).only_enforce_if(holds)
            end = made.phases[other] + graph.blocks[other].time
            made.model.add(end <= made.phases[one] + made.period).only_enforce_if(holds)


def _wait_in_gaps(made: _Model, first: int, second: int, wait: int, low: int) -> None:
    """A dependency for an unknown period: the product of period and stages is spelled out, gap by gap."""
    model, most = made.model, _most_gap(wait, low)
    gaps = [model.new_bool_var(f"gap{first}-{second}-{size}") for size in range(most + 1)]
    model.add_exactly_one(gaps)
    between = made.stages[second] - made.stages[first]
    for size, gap in enumerate(gaps):
        if size < most:
            model.add(between == size).only_enforce_if(gap)
            end = made.phases[first] + wait
            model.add(made.phases[second] + size * made.period >= end).only_enforce_if(gap)
        else:
            model.add(between >= size).only_enforce_if(gap)


def _keep_memory(graph: BlockGraph, made: _Model, device: int, room: int) -> None:
    """Memory in use right after each block that allocates; exact, as a unit frees what it allocates."""
    members = [index for index, block in enumerate(graph.blocks) if device in block.devices]
    memory = {index: graph.blocks[index].memory for index in members}
    in_flight = sum(-memory[index] * made.stages[index] for index in members)
    for index in members:
        if memory[index] <= 0:
            continue
        earlier = sum(memory[other] * _is_before(made, other, index) for other in members if other != index)
        made.model.add(memory[index] + earlier + in_flight <= room)


def _is_before(made: _Model, first: int, second: int) -> LinearExprT:
    return made.before[first, second] if first < second else 1 - made.before[second, first]


def _anchor(graph: BlockGraph, made: _Model) -> None:
    """Units are alike, so the first block of each connected part may be put in stage 0, if it is the only first one."""
    part = list(range(len(graph.blocks)))
    for index, block in enumerate(graph.blocks):
        for other in block.after:
            old, new = part[index], part[other]
            part = [new if each == old else each for each in part]
    for name in set(part):
        sources = [index for index, each in enumerate(part) if each == name and not graph.blocks[index].after]
        if len(sources) == 1:
            made.model.add(made.stages[sources[0]] == 0)


def _hint(made: _Model, known: Cyclic) -> None:
    for index, stage in enumerate(known.stages):
        made.model.add_hint(made.stages[index], stage)
        made.model.add_hint(made.phases[index], known.starts[index] % known.period)


def _run(graph: BlockGraph, made: _Model, limit: Limit, on_solution: OnSolution | None = None) -> Steady:
    answer = solve(made.model, [made.period, *made.phases, *made.stages], limit, on_solution)
    if not answer.found:
        return Steady(answer.status, None, answer.bound, answer.work)
    period, *values = answer.values
    count = len(graph.blocks)
    starts = [phase + period * stage for phase, stage in zip(values[:count], values[count:], strict=True)]
    cyclic = Cyclic(period, tuple(start - min(starts) for start in starts))
    if not is_valid(graph, cyclic):
        raise AutopipeError("the solver's cyclic schedule breaks a rule of its own model")
    return Steady(answer.status, cyclic, answer.bound, answer.work)
