"""The steady state as a model for CP-SAT: cyclic scheduling.

Block i of unit n starts at phase(i) + period x (stage(i) + n). Two blocks that share a device are ordered by one
boolean within the period, wrap-around allowed. This is modulo scheduling, as of loops in Lam, "Software pipelining"
(PLDI 1988), with the memory limit of Lin et al., "Tessel" (HPCA 2024), section III; the greatest stage less a block's
is the index of micro-batch that Tessel gives it in the repetend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopipe.ir.block_schedule import BlockGraph
from autopipe.passes.schedule.tessel.cyclic import PeriodicStarts, sharing_pairs
from autopipe.passes.schedule.tessel.memory import changes

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar, LinearExprT


@dataclass(frozen=True, slots=True)
class CyclicModel:
    """Variables of a steady state."""

    model: CpModel
    period: IntVar
    phases: list[IntVar]
    stages: list[IntVar]
    before: dict[tuple[int, int], IntVar]
    """True if the first of a pair that shares a device has the smaller phase."""

    def starts(self, index: int, period: int) -> LinearExprT:
        """Start of a block for a period that is known."""
        return self.phases[index] + period * self.stages[index]


def model_cyclic(graph: BlockGraph, low: int, high: int, in_flight: int | None = None) -> CyclicModel:
    """A model of all steady states of periods from `low` to `high`.

    With `in_flight`, stages are fewer than that, and phases are not held within [0, period): each device may begin its
    repetition at a time of its own, as in Tessel's repetends.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    count, widest = len(graph.blocks), _widest(graph)
    furthest = high * (count + 1)
    most = _most_stages(graph, low) if in_flight is None else in_flight - 1
    first, last = (0, high - 1) if in_flight is None else (-furthest, furthest)
    made = CyclicModel(
        model,
        model.new_int_var(low, high, ""),
        [model.new_int_var(*((0, 0) if index == widest else (first, last)), "") for index in range(count)],
        [model.new_int_var(0, most, "") for _ in range(count)],
        {pair: model.new_bool_var("") for pair in sharing_pairs(graph)},
    )
    if low < high and in_flight is None:
        for phase in made.phases:
            model.add(phase < made.period)
    _order_on_devices(graph, made)
    for index, block in enumerate(graph.blocks):
        for position, other in enumerate(block.after):
            wait = graph.blocks[other].time + block.delay(position)
            model.add(made.stages[index] >= made.stages[other])
            if low == high:
                model.add(made.starts(index, low) >= made.starts(other, low) + wait)
            else:
                _wait_in_gaps(made, other, index, wait, (_most_gap(wait, low), in_flight))
    for device, room in enumerate(graph.memory):
        if room is not None:
            for used, step in memory_in_use(graph, made, device):
                model.add(used <= room // step)
    return made


def anchor(graph: BlockGraph, made: CyclicModel) -> None:
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


def hint(graph: BlockGraph, made: CyclicModel, known: PeriodicStarts) -> None:
    """Let the solver begin from a known answer."""
    start = known.starts[_widest(graph)]
    turned = PeriodicStarts(known.period, tuple(each - start for each in known.starts))
    for index, (stage, phase) in enumerate(zip(turned.stages, turned.phases, strict=True)):
        made.model.add_hint(made.stages[index], stage)
        made.model.add_hint(made.phases[index], phase)


def memory_in_use(graph: BlockGraph, made: CyclicModel, device: int) -> list[tuple[LinearExprT, int]]:
    """Memory in use on a device right after each block that allocates there, with the step it is counted in.

    Exact in the steady state, as each unit frees what it allocates.
    """
    added = changes(graph, device)
    step = math.gcd(*added.values()) or 1
    memory = {index: change // step for index, change in added.items() if change}
    in_flight = [-memory[index] * made.stages[index] for index in memory]
    found = []
    for index, change in memory.items():
        if change > 0:
            earlier = [memory[other] * _is_before(made, other, index) for other in memory if other != index]
            found.append((_total([change, *earlier, *in_flight]), step))
    return found


def _widest(graph: BlockGraph) -> int:
    """The block whose phase is 0: one on most devices, as its place rules out most."""
    blocks = graph.blocks
    return max(range(len(blocks)), key=lambda index: (len(blocks[index].devices), blocks[index].time))


def _total(terms: Sequence[LinearExprT]) -> LinearExprT:
    from ortools.sat.python import cp_model

    return cp_model.LinearExpr.sum(list(terms))


def _is_before(made: CyclicModel, first: int, second: int) -> LinearExprT:
    return made.before[first, second] if first < second else 1 - made.before[second, first]


def _most_stages(graph: BlockGraph, period: int) -> int:
    """Stages that suffice: where no block can be moved towards the others, a tree of tight dependencies holds them."""
    gaps = []
    for block in graph.blocks:
        for position, other in enumerate(block.after):
            gaps.append(_most_gap(graph.blocks[other].time + block.delay(position), period))
    return sum(sorted(gaps, reverse=True)[: len(graph.blocks) - 1])


def _most_gap(wait: int, period: int) -> int:
    """Stages between two blocks that leave time for the wait whatever their phases."""
    return math.ceil((wait + period - 1) / period)


def _order_on_devices(graph: BlockGraph, made: CyclicModel) -> None:
    for (first, second), before in made.before.items():
        for one, other, holds in ((first, second, before), (second, first, before.negated())):
            made.model.add(made.phases[one] + graph.blocks[one].time <= made.phases[other]).only_enforce_if(holds)
            end = made.phases[other] + graph.blocks[other].time
            made.model.add(end <= made.phases[one] + made.period).only_enforce_if(holds)


def _wait_in_gaps(made: CyclicModel, first: int, second: int, wait: int, most: tuple[int, int | None]) -> None:
    """A dependency for an unknown period: the product of period and stages is spelled out, gap by gap.

    `most` is the gap that suffices whatever the phases, and the number of stages where phases may be any.
    """
    enough, in_flight = most
    model, count = made.model, enough + 1 if in_flight is None else in_flight
    gaps = [model.new_bool_var("") for _ in range(count)]
    model.add_exactly_one(gaps)
    between = made.stages[second] - made.stages[first]
    for size, gap in enumerate(gaps):
        if in_flight is None and size == enough:
            model.add(between >= size).only_enforce_if(gap)
        else:
            model.add(between == size).only_enforce_if(gap)
            end = made.phases[first] + wait
            model.add(made.phases[second] + size * made.period >= end).only_enforce_if(gap)
