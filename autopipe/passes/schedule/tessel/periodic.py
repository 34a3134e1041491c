"""The steady state of a block schedule: Tessel's repetend, as a modulo schedule.

Block i of unit n starts at phase(i) + period x (stage(i) + n). This is modulo scheduling, as of
loops in Lam, "Software pipelining" (PLDI 1988), with the memory limit of Lin et al., "Tessel" (HPCA
2024), section III; the greatest stage less a block's is the index of micro-batch that Tessel gives
it in the repetend. Tessel tries assignments of these indices one after the other (Algorithm 1) and
solves each; here stages are variables, so that one model holds all assignments. `construct` finds
steady states without a solver: an answer always, and a place for CP-SAT to begin from.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from autopipe.ir.block_schedule import BlockGraph
from autopipe.ir.errors import AutopipeError
from autopipe.passes.schedule.tessel.model import (
    Budget,
    PeriodicStarts,
    changes,
    is_valid,
    sharing_pairs,
    topological,
    unit_bound,
)
from autopipe.passes.solvers.cp_sat import Limit, OnSolution, Status, solve

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar, LinearExprT


@dataclass(frozen=True, slots=True)
class SteadyState:
    """A steady state, None where none was found, and what was proven of what the run minimised."""

    status: Status
    cyclic: PeriodicStarts | None
    bound: int | None
    work: float


@dataclass(frozen=True, slots=True)
class CyclicModel:
    """Steady states as variables, a phase and a stage a block."""

    graph: BlockGraph
    model: CpModel
    period: IntVar
    phases: list[IntVar]
    stages: list[IntVar]
    before: dict[tuple[int, int], IntVar]
    """True if the first of a pair that shares a device has the smaller phase."""

    def start(self, index: int, period: int) -> LinearExprT:
        return self.phases[index] + period * self.stages[index]

    def order_pairs(self) -> None:
        """Two blocks that share a device are in one of two orders within the period. The second
        ends before the first is due again, so that neither overlaps the other in any repetition.
        """
        for (left, right), before in self.before.items():
            for one, other, holds in ((left, right, before), (right, left, before.negated())):
                end = self.phases[one] + self.graph.blocks[one].time
                due = self.phases[one] + self.period
                self.model.add(end <= self.phases[other]).only_enforce_if(holds)
                self.model.add(
                    self.phases[other] + self.graph.blocks[other].time <= due
                ).only_enforce_if(holds)

    def memory_in_use(self, device: int) -> list[tuple[LinearExprT, int]]:
        """Memory in use on a device right after each block that allocates there, with the step it
        is counted in.

        Right after block i of unit n, block j has run for the units up to n + stage(i) - stage(j),
        the last of them only if its phase is the smaller one or j is i. As the changes c add up to
        0 over a unit, what is in use is the sum over j of c(j) (is_before(j, i) - stage(j)), with
        is_before(i, i) = 1: Tessel's memory constraint for endless repetition.
        """
        from ortools.sat.python import cp_model

        added = changes(self.graph, device)
        step = math.gcd(*added.values()) or 1
        memory = {index: change // step for index, change in added.items() if change}
        in_flight = [-memory[index] * self.stages[index] for index in memory]

        def is_before(first: int, second: int) -> LinearExprT:
            return self.before[first, second] if first < second else 1 - self.before[second, first]

        found: list[tuple[LinearExprT, int]] = []
        for index, change in memory.items():
            if change > 0:
                earlier = [
                    memory[other] * is_before(other, index) for other in memory if other != index
                ]
                found.append((cp_model.LinearExpr.sum([change, *earlier, *in_flight]), step))
        return found

    def limit_memory(self) -> None:
        for device, room in enumerate(self.graph.memory):
            if room is not None:
                for used, step in self.memory_in_use(device):
                    self.model.add(used <= room // step)

    def anchor(self) -> None:
        """Put the first block of each connected part in stage 0, if it is the only first one: units
        are equal.
        """
        blocks = self.graph.blocks
        part = list(range(len(blocks)))
        for index, block in enumerate(blocks):
            for other in block.after:
                old = part[index]
                new = part[other]
                part = [new if each == old else each for each in part]
        for name in set(part):
            sources = [
                index for index, each in enumerate(part) if each == name and not blocks[index].after
            ]
            if len(sources) == 1:
                self.model.add(self.stages[sources[0]] == 0)

    def hint(self, known: PeriodicStarts) -> None:
        """Let the solver begin from a known answer."""
        start = known.starts[widest(self.graph)]
        turned = PeriodicStarts(known.period, tuple(each - start for each in known.starts))
        for index, (stage, phase) in enumerate(zip(turned.stages, turned.phases, strict=True)):
            self.model.add_hint(self.stages[index], stage)
            self.model.add_hint(self.phases[index], phase)

    def latency(self, known: PeriodicStarts) -> IntVar:
        """A variable that is at least a unit's time from its first start to its last end."""
        period = known.period
        least = unit_bound(self.graph)
        latency = self.model.new_int_var(least, max(least, known.latency(self.graph)), "")
        first = self.model.new_int_var(0, period - 1, "")
        for index, block in enumerate(self.graph.blocks):
            self.model.add(self.start(index, period) >= first)
            self.model.add(self.start(index, period) + block.time <= first + latency)
        return latency

    def solve(
        self, limit: Limit, on_solution: OnSolution | None = None, relax: bool = False
    ) -> SteadyState:
        """Raises AutopipeError where the solver's answer breaks a rule."""
        answer = solve(
            self.model, [self.period, *self.phases, *self.stages], limit, on_solution, relax
        )
        if not answer.found:
            return SteadyState(answer.status, None, answer.bound, answer.work)
        (period, *values) = answer.values
        count = len(self.graph.blocks)
        starts = [
            phase + period * stage
            for phase, stage in zip(values[:count], values[count:], strict=True)
        ]
        cyclic = PeriodicStarts(period, tuple(start - min(starts) for start in starts))
        if not is_valid(self.graph, cyclic):
            raise AutopipeError("the solver's steady state breaks a rule of its own model")
        return SteadyState(answer.status, cyclic, answer.bound, answer.work)


def widest(graph: BlockGraph) -> int:
    """The block whose phase is 0: one on most devices, as its place rules out most."""
    blocks = graph.blocks
    return max(
        range(len(blocks)), key=lambda index: (len(blocks[index].devices), blocks[index].time)
    )


def _most_gap(wait: int, period: int) -> int:
    """Stages between two blocks that leave time for the wait whatever their phases."""
    return math.ceil((wait + period - 1) / period)


def model_cyclic(graph: BlockGraph, low: int, high: int) -> CyclicModel:
    """A model of all steady states of periods from `low` to `high`."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    blocks = range(len(graph.blocks))
    first = widest(graph)
    # Where no block can be moved towards the others, a tree of tight dependencies holds them: its
    # gaps are enough.
    gaps = sorted(
        (_most_gap(wait, low) for waits in graph.waits for _, wait in waits), reverse=True
    )
    made = CyclicModel(
        graph,
        model,
        model.new_int_var(low, high, ""),
        [model.new_int_var(0, 0 if index == first else high - 1, "") for index in blocks],
        [model.new_int_var(0, sum(gaps[: len(blocks) - 1]), "") for _ in blocks],
        {pair: model.new_bool_var("") for pair in sharing_pairs(graph)},
    )
    if low < high:
        for phase in made.phases:
            model.add(phase < made.period)
    made.order_pairs()
    for index, waits in enumerate(graph.waits):
        for other, wait in waits:
            model.add(made.stages[index] >= made.stages[other])
            if low == high:
                model.add(made.start(index, low) >= made.start(other, low) + wait)
                continue
            # The product of period and stages is spelled out, gap by gap.
            enough = _most_gap(wait, low)
            between = made.stages[index] - made.stages[other]
            chosen = [model.new_bool_var("") for _ in range(enough + 1)]
            model.add_exactly_one(chosen)
            for size, gap in enumerate(chosen[:-1]):
                model.add(between == size).only_enforce_if(gap)
                end = made.phases[other] + wait
                model.add(made.phases[index] + size * made.period >= end).only_enforce_if(gap)
            model.add(between >= enough).only_enforce_if(chosen[-1])
    made.limit_memory()
    return made


def with_period(graph: BlockGraph, period: int, limit: Limit) -> SteadyState:
    made = model_cyclic(graph, period, period)
    made.anchor()
    return made.solve(limit)


def least_period(
    graph: BlockGraph,
    low: int,
    known: PeriodicStarts,
    limit: Limit,
    on_solution: OnSolution | None = None,
) -> SteadyState:
    """The steady state of least period from `low` to less than that of `known`, from which the
    search begins. INFEASIBLE says that no period is shorter than the known one.
    """
    made = model_cyclic(graph, low, known.period - 1)
    made.anchor()
    made.hint(known)
    made.model.minimize(made.period)
    return made.solve(limit, on_solution)


def least_latency(graph: BlockGraph, known: PeriodicStarts, limit: Limit) -> SteadyState:
    """The steady state of the known period with the least time from a unit's first start to its
    last end.
    """
    made = model_cyclic(graph, known.period, known.period)
    made.model.minimize(made.latency(known))
    made.hint(known)
    return made.solve(limit)


def least_memory(
    graph: BlockGraph, known: PeriodicStarts, limit: Limit, latency: int | None = None
) -> SteadyState:
    """The steady state of the known period whose fullest device uses least, and `latency` at most;
    then the others.
    """
    made = model_cyclic(graph, known.period, known.period)
    model = made.model
    if latency is not None:
        model.add(made.latency(known) <= latency)
    most = sum(abs(block.memory) for block in graph.blocks) * len(graph.blocks)
    fullest = model.new_int_var(0, most, "")
    peaks = []
    for device in range(graph.devices):
        peaks.append(model.new_int_var(0, most, ""))
        model.add(fullest >= peaks[-1])
        for used, step in made.memory_in_use(device):
            model.add(peaks[-1] >= step * used)
    model.minimize(graph.devices * fullest + sum(peaks))
    made.hint(known)
    return made.solve(limit, relax=True)


_STEPS = 96
"""Steps of the least period to which times are rounded up. Few make small models, many keep the
error small.
"""


def coarse(graph: BlockGraph, bound: int) -> BlockGraph | None:
    """The same blocks with times in steps of `bound` / 96, rounded up; None where times are no
    finer than that. An order of blocks that is good for rounded times is good for exact ones, and
    found sooner.
    """
    step = -(-bound // _STEPS)
    if step < 4:
        return None
    blocks = (
        replace(
            each,
            time=-(-each.time // step),
            delays=tuple(-(-delay // step) for delay in each.delays),
        )
        for each in graph.blocks
    )
    return replace(graph, blocks=tuple(blocks))


_Way = tuple[tuple[int, ...], bool, bool]
"""How blocks are put down: their order; True if those on most devices have their phases beforehand,
one behind the other; True if blocks stand against a neighbour, so that gaps stay whole.
"""


class _Placing:
    """Puts the blocks of one unit into a period, one after the other, without taking any back. A
    simple form of Rau, "Iterative modulo scheduling" (MICRO 1994): many orders are tried instead.
    """

    def __init__(self, graph: BlockGraph, budget: Budget) -> None:
        self.graph = graph
        self.budget = budget
        sets = [set(block.devices) for block in graph.blocks]
        self.neighbours = [
            [other for other, its in enumerate(sets) if other != index and its & own]
            for index, own in enumerate(sets)
        ]
        self.behind: list[list[tuple[int, int]]] = [[] for _ in sets]
        for index, waits in enumerate(graph.waits):
            for other, wait in waits:
                self.behind[other].append((index, wait))
        most = max(map(len, sets))
        end = 0
        self.reserved: dict[int, int] = {}
        for index in graph.order:
            if 1 < most == len(sets[index]):
                self.reserved[index] = end
                end += graph.blocks[index].time

    def place(
        self, period: int, order: Sequence[int], reserve: bool, touch: bool
    ) -> PeriodicStarts | None:
        """Each block as near as there is a gap to those that it waits for, or else to those that
        wait for it.
        """
        blocks = self.graph.blocks
        starts = dict[int, int]()
        phases = dict(self.reserved) if reserve else {}
        for index in order:
            time = blocks[index].time
            if self.budget.left < 0 or time > period:
                return None
            waits = self.graph.waits[index]
            behind = self.behind[index]
            first = max(
                (starts[other] + wait for other, wait in waits if other in starts), default=None
            )
            last = min(
                (starts[other] - wait for other, wait in behind if other in starts), default=None
            )
            onward = first is not None or last is None
            near, sign = (first or 0, 1) if onward else (last or 0, -1)
            taken = [
                (phases[other], blocks[other].time)
                for other in self.neighbours[index]
                if other in phases
            ]
            if index in phases:
                edges = {phases[index]}
            else:  # Right there, or just before or behind a neighbour.
                edges = {edge for phase, its in taken for edge in (phase + its, phase - time)}
                edges |= set() if touch and taken else {near}
            for far in sorted({sign * (edge - near) % period for edge in edges}):
                start = near + sign * far
                if all(time <= (phase - start) % period <= period - its for phase, its in taken):
                    break
            else:
                return None
            if onward and last is not None and start > last:
                return None
            starts[index], phases[index] = start, start % period
        periods = min(starts.values()) // period
        return PeriodicStarts(
            period, tuple(starts[index] - periods * period for index in range(len(starts)))
        )


_Wait = tuple[int, int, int, int]
"""(before, after, time, periods): `after` starts no earlier than `before` plus time, less that many
periods.
"""


def tighten(graph: BlockGraph, order: PeriodicStarts, low: int) -> PeriodicStarts:
    """The blocks in the order of `order`, at the least period of `low` or more that this order
    allows.

    Each block starts as early as it can, so that no other starts in this order and period make a
    unit's way shorter. Memory in use is that of `order`, whose times may be those of another graph.
    An order and a period fix all waits; starts keep them exactly if no circle of waits takes longer
    than its periods. So the period is raised to what the slowest circle needs until there is none
    left: the recurrence bound of modulo scheduling.
    """
    waits: list[_Wait] = []
    for index, before in enumerate(graph.waits):
        waits += [(other, index, wait, 0) for other, wait in before]
    stages = order.stages
    phases = order.phases
    for own in graph.members:
        members = sorted(own, key=lambda index: phases[index])
        for one, next_one in zip(members, [*members[1:], *members[:1]], strict=True):
            periods = stages[one] - stages[next_one] + (next_one == members[0])
            waits.append((one, next_one, graph.blocks[one].time, periods))
    waits = list(dict.fromkeys(waits))
    period = low
    while True:
        starts, circle = _earliest(len(graph.blocks), waits, period)
        if circle is None:
            return PeriodicStarts(period, starts)
        period = -(-sum(wait[2] for wait in circle) // sum(wait[3] for wait in circle))


def _earliest(
    count: int, waits: Sequence[_Wait], period: int
) -> tuple[tuple[int, ...], list[_Wait] | None]:
    """Least starts of 0 or more that keep all waits, or a circle of waits that takes longer than
    its periods.
    """
    starts = [0] * count
    last: list[_Wait | None] = [None] * count
    while True:
        changed = False
        for wait in waits:
            before, after, time, periods = wait
            start = starts[before] + time - periods * period
            if start > starts[after]:
                starts[after], last[after], changed = start, wait, True
        if not changed:
            return tuple(starts), None
        circle = _circle(last)
        if circle is not None:
            return (), circle


def _circle(last: Sequence[_Wait | None]) -> list[_Wait] | None:
    """A circle among the waits that each block was last put off by."""
    seen = [-1] * len(last)
    for begin in range(len(last)):
        at = begin
        while seen[at] < 0 and (wait := last[at]) is not None:
            seen[at] = begin
            at = wait[0]
        if seen[at] == begin and (wait := last[at]) is not None:
            circle = [wait]
            while circle[-1][0] != at and (wait := last[circle[-1][0]]) is not None:
                circle.append(wait)
            return circle
    return None


_STEP = 1.04  # Factor from one period that is tried to the next.
# Random orders of each kind that are tried at one period; fewer where there are many blocks.
_MOST_ORDERS = 32
_HALVINGS = 4  # Periods between the least and the best known that are tried with random orders.


def construct(graph: BlockGraph, low: int, serial: Sequence[int], budget: Budget) -> PeriodicStarts:
    """A steady state of a period of `low` or more. `serial` is an order of one unit's blocks that
    fits memory.
    """
    best = one_at_a_time(graph, serial)
    placing = _Placing(graph, budget)
    ways = _ways([tuple(serial), graph.order])
    period: float = low
    while period < best.period:
        best = _best_of(placing, round(period), ways) or best
        period *= _STEP
    best = tighten(graph, best, low)
    draw = random.Random(budget.options.seed)
    count = max(4, min(_MOST_ORDERS, 4000 // len(graph.blocks)))
    orders = [_forward_order(graph, draw) for _ in range(count)]
    ways += _ways(orders + [_outward_order(graph, draw) for _ in range(count)])
    period = low
    known = low
    for _ in range(1 + _HALVINGS):
        found = _best_of(placing, period, ways)
        if found is None:
            known = period
        elif (found.period, found.latency(graph)) < (best.period, best.latency(graph)):
            best = tighten(graph, found, low)
        period = (known + best.period) // 2
        if known in {best.period, period}:
            break
    return best


def one_at_a_time(graph: BlockGraph, serial: Sequence[int]) -> PeriodicStarts:
    """One block at a time on all devices together, and each unit after the one before."""
    starts = [0] * len(graph.blocks)
    now = 0
    for index in serial:
        starts[index] = max(now, *(starts[other] + wait for other, wait in graph.waits[index]), 0)
        now = starts[index] + graph.blocks[index].time
    return PeriodicStarts(now, tuple(starts))


def _best_of(placing: _Placing, period: int, ways: Sequence[_Way]) -> PeriodicStarts | None:
    """Of all steady states of this period that these ways lead to the one with the shortest way of
    a unit.
    """
    best: PeriodicStarts | None = None
    graph = placing.graph
    for way in ways:
        if placing.budget.left < 0:
            break
        found = placing.place(period, *way)
        if found is not None and is_valid(graph, found):
            found = tighten(graph, found, period)
            if best is None or found.latency(graph) < best.latency(graph):
                best = found
    return best


def _ways(orders: Sequence[tuple[int, ...]]) -> list[_Way]:
    return list(product(dict.fromkeys(orders), (False, True), (False, True)))


def _forward_order(graph: BlockGraph, draw: random.Random) -> tuple[int, ...]:
    """Any order in which each block comes after all that it waits for."""
    rank = [draw.random() for _ in graph.blocks]
    return topological(graph, lambda index, _: rank[index])


def _outward_order(graph: BlockGraph, draw: random.Random) -> tuple[int, ...]:
    """Any order in which each block waits for one before it or is waited for, as far as there is
    one. What is put down first stands close together, so that little memory is held between: as in
    Llosa and others, "Swing modulo scheduling" (PACT 1996).
    """
    near = [
        {*others, *block.after} for others, block in zip(graph.following, graph.blocks, strict=True)
    ]
    left = set(range(len(near)))
    edge = list[int]()
    order = list[int]()
    while left:
        index = edge.pop(draw.randrange(len(edge))) if edge else draw.choice(sorted(left))
        if index in left:
            left.discard(index)
            order.append(index)
            edge += sorted(near[index] & left)
    return tuple(order)
