"""Search for the steady state of a block schedule (Tessel's repetend) as a modulo schedule.

Block i of micro-batch n starts at phase(i) + period * (k(i) + n), where 0 <= phase(i) < period. The
integer k(i) is the modulo stage of block i. This is modulo scheduling, as for loops in Lam,
"Software pipelining" (PLDI 1988), with the memory limit of Lin et al., "Tessel" (HPCA 2024),
section III. The micro-batch index that Tessel gives block i in the repetend is max k - k(i).

Tessel enumerates assignments of these indices (Algorithm 1) and solves one problem for each. Here
the k(i) are variables, so one CP-SAT model contains all assignments. `construct_steady_state` finds
a steady state without a solver. If the solver finds no steady state, that one is the result;
otherwise it is the solver's hint.
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
    balanced_changes,
    critical_path,
    is_valid,
    pairs_sharing_a_device,
    topological_order,
)
from autopipe.passes.solvers.cp_sat import Limit, OnSolution, Status, solve

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar, LinearExprT


@dataclass(frozen=True, slots=True)
class SteadyState:
    """Result of a solver run that searches a steady state."""

    status: Status
    cyclic: PeriodicStarts | None
    """The steady state that the run found, or None."""
    bound: int | None
    """Lower bound of the objective that the run proved; None if there is no objective or no bound.
    """
    work: float
    """Deterministic time of the solver that the run spent."""


@dataclass(frozen=True, slots=True)
class CyclicModel:
    """CP-SAT model of steady states. It has two variables per block, its phase (start mod period)
    and its modulo stage (start // period).
    """

    graph: BlockGraph
    model: CpModel
    period: IntVar
    phases: list[IntVar]
    modulo_stages: list[IntVar]
    before: dict[tuple[int, int], IntVar]
    """For each pair of blocks that share a device, a variable that is true if the first block has
    the smaller phase.
    """

    def start(self, index: int, period: int) -> LinearExprT:
        """Return the start of the block `index` in micro-batch 0, as an expression of the model."""
        return self.phases[index] + period * self.modulo_stages[index]

    def order_pairs(self) -> None:
        """Require that two blocks that share a device do not overlap: the block with the larger
        phase (start mod period) starts after the other block ends.

        It must also end before the other block starts again one period later.
        """
        blocks = self.graph.blocks
        for (left, right), before in self.before.items():
            for first, second, holds in ((left, right, before), (right, left, before.negated())):
                first_end = self.phases[first] + blocks[first].time
                second_end = self.phases[second] + blocks[second].time
                next_start = self.phases[first] + self.period
                self.model.add(first_end <= self.phases[second]).only_enforce_if(holds)
                self.model.add(second_end <= next_start).only_enforce_if(holds)

    def memory_in_use(self, device: int) -> list[tuple[LinearExprT, int]]:
        """Return (expression, step) for each block that allocates memory on the device according to
        `balanced_changes`. The memory in use directly after the block starts is expression * step.

        Let phase(i) be the start of block i mod period, and k(i) its start // period. Directly
        after block i of micro-batch n starts, block j has started for the micro-batches up to n +
        k(i) - k(j), and for the last of these only if j = i or phase(j) < phase(i). Let c(j) be the
        change of memory by block j in `balanced_changes`; the c(j) add up to 0. The memory in use
        is then

            sum over j of c(j) * (b(j, i) - k(j))

        where b(j, i) is 1 if j = i or phase(j) < phase(i), and 0 otherwise. This is Tessel's memory
        constraint for endless repetition.
        """
        from ortools.sat.python import cp_model

        changes = balanced_changes(self.graph, device)
        step = math.gcd(*changes.values()) or 1
        memory = {index: change // step for index, change in changes.items() if change}
        in_flight = [-memory[index] * self.modulo_stages[index] for index in memory]

        def is_before(first: int, second: int) -> LinearExprT:
            """Return an expression that is 1 if block `first` has a smaller phase than block
            `second`, otherwise 0.
            """
            return self.before[first, second] if first < second else 1 - self.before[second, first]

        expressions: list[tuple[LinearExprT, int]] = []
        for index, change in memory.items():
            if change > 0:
                earlier = [
                    memory[other] * is_before(other, index) for other in memory if other != index
                ]
                expressions.append((cp_model.LinearExpr.sum([change, *earlier, *in_flight]), step))
        return expressions

    def limit_memory(self) -> None:
        """Add the memory limits of all devices to the model."""
        for device, limit in enumerate(self.graph.memory):
            if limit is not None:
                for used, step in self.memory_in_use(device):
                    self.model.add(used <= limit // step)

    def fix_first_blocks(self) -> None:
        """Set the modulo stage (start // period) of the first block of each connected component to
        0, if only one block of the component has no predecessors. This removes equivalent
        solutions, which exist because micro-batches are equal.
        """
        blocks = self.graph.blocks
        component = list(range(len(blocks)))
        for index, block in enumerate(blocks):
            for other in block.after:
                old = component[index]
                new = component[other]
                component = [new if each == old else each for each in component]
        for component_name in set(component):
            sources = [
                index
                for index, each in enumerate(component)
                if each == component_name and not blocks[index].after
            ]
            if len(sources) == 1:
                self.model.add(self.modulo_stages[sources[0]] == 0)

    def hint(self, known: PeriodicStarts) -> None:
        """Give the solver a known steady state as hint, shifted in time so that the `widest_block`
        has phase (start mod period) 0.
        """
        start = known.starts[widest_block(self.graph)]
        shifted = PeriodicStarts(known.period, tuple(other - start for other in known.starts))
        for index, (stage, phase) in enumerate(
            zip(shifted.modulo_stages, shifted.phases, strict=True)
        ):
            self.model.add_hint(self.modulo_stages[index], stage)
            self.model.add_hint(self.phases[index], phase)

    def latency(self, known: PeriodicStarts) -> IntVar:
        """Return a variable for the latency of a micro-batch. It is at least the time from the
        first start to the last end of a micro-batch, and at most the latency of `known`, or the
        critical path if that is longer. The period of the model must be that of `known`.
        """
        period = known.period
        low = critical_path(self.graph)
        latency = self.model.new_int_var(low, max(low, known.latency(self.graph)), "")
        first = self.model.new_int_var(0, period - 1, "")
        for index, block in enumerate(self.graph.blocks):
            self.model.add(self.start(index, period) >= first)
            self.model.add(self.start(index, period) + block.time <= first + latency)
        return latency

    def solve(
        self, limit: Limit, on_solution: OnSolution | None = None, relax: bool = False
    ) -> SteadyState:
        """Solve the model and return the result. `relax` and `on_solution` are passed on to
        `solve`, which runs CP-SAT. Raises AutopipeError if the solver's steady state violates a
        constraint.
        """
        result = solve(
            self.model, [self.period, *self.phases, *self.modulo_stages], limit, on_solution, relax
        )
        if not result.found:
            return SteadyState(result.status, None, result.bound, result.work)
        (period, *values) = result.values
        count = len(self.graph.blocks)
        starts = [
            phase + period * stage
            for phase, stage in zip(values[:count], values[count:], strict=True)
        ]
        cyclic = PeriodicStarts(period, tuple(start - min(starts) for start in starts))
        if not is_valid(self.graph, cyclic):
            raise AutopipeError("the solver's steady state violates a constraint of its model")
        return SteadyState(result.status, cyclic, result.bound, result.work)


def widest_block(graph: BlockGraph) -> int:
    """Return the index of the block whose phase is fixed to 0: of the blocks on the most devices,
    the longest. This block usually excludes more positions of other blocks than another block
    would.
    """
    blocks = graph.blocks
    return max(
        range(len(blocks)), key=lambda index: (len(blocks[index].devices), blocks[index].time)
    )


def _sufficient_gap(wait: int, period: int) -> int:
    """Return a difference of the modulo stages (start // period) of two blocks with which their
    starts are at least `wait` ticks apart, whatever their phases (start mod period) are.
    """
    return math.ceil((wait + period - 1) / period)


def build_model(graph: BlockGraph, low: int, high: int) -> CyclicModel:
    """Return the model of all steady states with periods from `low` to `high`."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    blocks = range(len(graph.blocks))
    first = widest_block(graph)
    # Upper bound of the modulo stages. If no block can be moved closer to another block, the
    # dependencies without slack form a spanning tree of n - 1 edges. Hence the sum of the n - 1
    # largest gaps suffices.
    gaps = sorted(
        (_sufficient_gap(wait, low) for waits in graph.waits for _, wait in waits), reverse=True
    )
    cyclic_model = CyclicModel(
        graph,
        model,
        model.new_int_var(low, high, ""),
        [model.new_int_var(0, 0 if index == first else high - 1, "") for index in blocks],
        [model.new_int_var(0, sum(gaps[: len(blocks) - 1]), "") for _ in blocks],
        {pair: model.new_bool_var("") for pair in pairs_sharing_a_device(graph)},
    )
    if low < high:
        for phase in cyclic_model.phases:
            model.add(phase < cyclic_model.period)
    cyclic_model.order_pairs()
    for index, waits in enumerate(graph.waits):
        for other, wait in waits:
            model.add(cyclic_model.modulo_stages[index] >= cyclic_model.modulo_stages[other])
            if low == high:
                model.add(cyclic_model.start(index, low) >= cyclic_model.start(other, low) + wait)
                continue
            # The start of a block contains the product of the period and its modulo stage. This
            # product of two variables is not linear, so the possible differences of modulo stages
            # are enumerated.
            enough = _sufficient_gap(wait, low)
            between = cyclic_model.modulo_stages[index] - cyclic_model.modulo_stages[other]
            chosen = [model.new_bool_var("") for _ in range(enough + 1)]
            model.add_exactly_one(chosen)
            for size, gap in enumerate(chosen[:-1]):
                model.add(between == size).only_enforce_if(gap)
                end = cyclic_model.phases[other] + wait
                model.add(
                    cyclic_model.phases[index] + size * cyclic_model.period >= end
                ).only_enforce_if(gap)
            model.add(between >= enough).only_enforce_if(chosen[-1])
    cyclic_model.limit_memory()
    return cyclic_model


def find_with_period(graph: BlockGraph, period: int, limit: Limit) -> SteadyState:
    """Search for a steady state with the given period."""
    cyclic_model = build_model(graph, period, period)
    cyclic_model.fix_first_blocks()
    return cyclic_model.solve(limit)


def minimize_period(
    graph: BlockGraph,
    low: int,
    known: PeriodicStarts,
    limit: Limit,
    on_solution: OnSolution | None = None,
) -> SteadyState:
    """Search for the steady state with the shortest period, from `low` to one tick below the period
    of `known`. The steady state `known` is the solver's hint. The status INFEASIBLE means that no
    period in this range is possible.
    """
    cyclic_model = build_model(graph, low, known.period - 1)
    cyclic_model.fix_first_blocks()
    cyclic_model.hint(known)
    cyclic_model.model.minimize(cyclic_model.period)
    return cyclic_model.solve(limit, on_solution)


def minimize_latency(graph: BlockGraph, known: PeriodicStarts, limit: Limit) -> SteadyState:
    """Search for the steady state with the period of `known` and the shortest latency, the time
    from the first start to the last end of a micro-batch.
    """
    cyclic_model = build_model(graph, known.period, known.period)
    cyclic_model.model.minimize(cyclic_model.latency(known))
    cyclic_model.hint(known)
    return cyclic_model.solve(limit)


def minimize_memory(
    graph: BlockGraph, known: PeriodicStarts, limit: Limit, latency: int | None = None
) -> SteadyState:
    """Search for the steady state with the period of `known` and the minimum memory.

    The first objective is the highest peak of all devices, the second the sum of the peaks. The
    latency, the time from the first start to the last end of a micro-batch, is at most `latency`,
    if given.
    """
    cyclic_model = build_model(graph, known.period, known.period)
    model = cyclic_model.model
    if latency is not None:
        model.add(cyclic_model.latency(known) <= latency)
    upper_bound = sum(abs(block.memory) for block in graph.blocks) * len(graph.blocks)
    highest_peak = model.new_int_var(0, upper_bound, "")
    peaks = []
    for device in range(graph.devices):
        peaks.append(model.new_int_var(0, upper_bound, ""))
        model.add(highest_peak >= peaks[-1])
        for used, step in cyclic_model.memory_in_use(device):
            model.add(peaks[-1] >= step * used)
    model.minimize(graph.devices * highest_peak + sum(peaks))
    cyclic_model.hint(known)
    return cyclic_model.solve(limit, relax=True)


_ROUNDED_PERIOD = 96
"""Number of time steps into which the lower bound of the period is divided to round times. Fewer
steps make smaller models; more steps make smaller rounding errors.
"""


def round_times(graph: BlockGraph, bound: int) -> BlockGraph | None:
    """Return the graph with times rounded up to steps of `bound` / `_ROUNDED_PERIOD`; None if a
    step would be shorter than 4 ticks. A good order of blocks for rounded times is usually good for
    exact times, and is found sooner.
    """
    step = -(-bound // _ROUNDED_PERIOD)
    if step < 4:
        return None
    blocks = (
        replace(
            block,
            time=-(-block.time // step),
            delays=tuple(-(-delay // step) for delay in block.delays),
        )
        for block in graph.blocks
    )
    return replace(graph, blocks=tuple(blocks))


_PlacingOptions = tuple[tuple[int, ...], bool, bool]
"""(order of the blocks, reserve, adjacent). If `reserve` is True, the blocks on the most devices
get consecutive phases (start mod period) before all other blocks are placed. If `adjacent` is True,
a block is placed directly before or after another block of its devices, so that idle time is not
divided.
"""


class _GreedyPlacement:
    """Greedy placement of the blocks of one micro-batch into a period, one block after another and
    without backtracking. It is a simple form of Rau, "Iterative modulo scheduling" (MICRO 1994),
    used for many orders of the blocks.
    """

    def __init__(self, graph: BlockGraph, budget: Budget) -> None:
        self.graph = graph
        self.budget = budget
        device_sets = [set(block.devices) for block in graph.blocks]
        # For each block: the other blocks that share a device with it.
        self.neighbours = [
            [other for other, theirs in enumerate(device_sets) if other != index and theirs & own]
            for index, own in enumerate(device_sets)
        ]
        # For each block: pairs (block that waits for it, minimum time between the starts of the
        # two).
        self.followers: list[list[tuple[int, int]]] = [[] for _ in device_sets]
        for index, waits in enumerate(graph.waits):
            for other, wait in waits:
                self.followers[other].append((index, wait))
        largest = max(map(len, device_sets))
        end = 0
        self.reserved: dict[int, int] = {}
        """Phase (start mod period) of each block on the most devices, by block; empty if each block
        is on one device.
        """
        for index in graph.order:
            if 1 < largest == len(device_sets[index]):
                self.reserved[index] = end
                end += graph.blocks[index].time

    def place(
        self, period: int, order: Sequence[int], reserve: bool, adjacent: bool
    ) -> PeriodicStarts | None:
        """Return a steady state with the given period, or None if a block does not fit. Blocks are
        placed in the order `order`. With `reserve`, the blocks on the most devices get consecutive
        times first. With `adjacent`, a block is placed directly before or after another block of
        its devices. Memory is not checked.

        Each block is placed as close as possible after the placed blocks that it depends on. If
        none of these is placed, the block is placed as close as possible before the placed blocks
        that depend on it.
        """
        blocks = self.graph.blocks
        starts = dict[int, int]()
        phases = dict(self.reserved) if reserve else {}
        for index in order:
            time = blocks[index].time
            if self.budget.left < 0 or time > period:
                return None
            waits = self.graph.waits[index]
            followers = self.followers[index]
            earliest = max(
                (starts[other] + wait for other, wait in waits if other in starts), default=None
            )
            latest = min(
                (starts[other] - wait for other, wait in followers if other in starts),
                default=None,
            )
            is_forward = earliest is not None or latest is None
            target, sign = (earliest or 0, 1) if is_forward else (latest or 0, -1)
            occupied = [
                (phases[other], blocks[other].time)
                for other in self.neighbours[index]
                if other in phases
            ]
            if index in phases:
                candidates = {phases[index]}
            # Candidates: the target, and the times directly before or after a block on a common
            # device.
            else:
                candidates = {
                    candidate
                    for phase, length in occupied
                    for candidate in (phase + length, phase - time)
                }
                candidates |= set() if adjacent and occupied else {target}
            distances = {sign * (candidate - target) % period for candidate in candidates}
            for distance in sorted(distances):
                start = target + sign * distance
                if all(
                    time <= (phase - start) % period <= period - length
                    for phase, length in occupied
                ):
                    break
            else:
                return None
            if is_forward and latest is not None and start > latest:
                return None
            starts[index] = start
            phases[index] = start % period
        periods = min(starts.values()) // period
        return PeriodicStarts(
            period, tuple(starts[index] - periods * period for index in range(len(starts)))
        )


_Wait = tuple[int, int, int, int]
"""A constraint (before, after, time, periods) for two blocks of a steady state: start of `after` >=
start of `before` + time - periods * period. `time` is in ticks, and `periods` is a number of
periods.
"""


def shorten_period(graph: BlockGraph, order: PeriodicStarts, low: int) -> PeriodicStarts:
    """Return the steady state with the order of blocks of `order` and the shortest period of at
    least `low` that this order permits.

    The order of blocks on each device and their modulo stages (start // period) determine all
    constraints, called waits,

        start(after) >= start(before) + time - periods * period

    Starts that keep all waits exist exactly if no cycle of waits has sum of time > period * sum of
    periods, where each wait consists of a time and a number of periods. The period is therefore
    raised to ceil(sum of time / sum of periods) of a violated cycle until there is no violated
    cycle: the recurrence bound of modulo scheduling. Each block then starts as early as possible,
    which minimises the latency for this order and period. The memory in use is that of `order`,
    because it depends only on the order. The times of `order` may be those of another graph with
    equal blocks, such as the result of `round_times`.
    """
    waits: list[_Wait] = []
    for index, before in enumerate(graph.waits):
        waits += [(other, index, wait, 0) for other, wait in before]
    modulo_stages = order.modulo_stages
    phases = order.phases
    for own in graph.members:
        members = sorted(own, key=lambda index: phases[index])
        for index, following in zip(members, [*members[1:], *members[:1]], strict=True):
            periods = modulo_stages[index] - modulo_stages[following] + (following == members[0])
            waits.append((index, following, graph.blocks[index].time, periods))
    waits = list(dict.fromkeys(waits))
    period = low
    while True:
        starts, cycle = _earliest_starts(len(graph.blocks), waits, period)
        if cycle is None:
            return PeriodicStarts(period, starts)
        period = -(-sum(wait[2] for wait in cycle) // sum(wait[3] for wait in cycle))


def _earliest_starts(
    count: int, waits: Sequence[_Wait], period: int
) -> tuple[tuple[int, ...], list[_Wait] | None]:
    """Return (starts, None) or ((), cycle). `starts` are the minimum starts, at least 0, of `count`
    blocks that keep all waits. If no starts keep them, `cycle` is a violated cycle of waits. The
    algorithm is Bellman-Ford.
    """
    starts = [0] * count
    last: list[_Wait | None] = [None] * count
    while True:
        changed = False
        for wait in waits:
            before, after, time, periods = wait
            start = starts[before] + time - periods * period
            if start > starts[after]:
                starts[after] = start
                last[after] = wait
                changed = True
        if not changed:
            return tuple(starts), None
        cycle = _find_cycle(last)
        if cycle is not None:
            return (), cycle


def _find_cycle(last: Sequence[_Wait | None]) -> list[_Wait] | None:
    """Return a cycle of waits, or None if there is none. `last` has, for each block, the wait that
    last delayed it.
    """
    seen = [-1] * len(last)
    for begin in range(len(last)):
        block = begin
        while seen[block] < 0 and (wait := last[block]) is not None:
            seen[block] = begin
            block = wait[0]
        if seen[block] == begin and (wait := last[block]) is not None:
            cycle = [wait]
            while cycle[-1][0] != block and (wait := last[cycle[-1][0]]) is not None:
                cycle.append(wait)
            return cycle
    return None


_PERIOD_FACTOR = 1.04
"""Ratio of each period that `construct_steady_state` tries to the previous one."""
_MAX_ORDERS = 32
"""Maximum number of random orders of each kind that are tried for one period."""
_HALVINGS = 4
"""Number of bisection steps between the longest period into which no order was placed and the best
period, with random orders.
"""


def construct_steady_state(
    graph: BlockGraph, low: int, serial: Sequence[int], budget: Budget
) -> PeriodicStarts:
    """Return a steady state with a period of at least `low`, found without a solver.

    `serial` is an order of the blocks of one micro-batch that keeps the memory limits if blocks run
    one at a time. The steady state of this order is the first result. Two fixed orders of the
    blocks are then placed greedily into periods from `low` on, each `_PERIOD_FACTOR` times as long
    as the previous one. Finally, random orders are placed, with bisection between the longest
    period that failed and the best period.
    """
    best = serial_steady_state(graph, serial)
    placing = _GreedyPlacement(graph, budget)
    options = _option_combinations([tuple(serial), graph.order])
    period: float = low
    while period < best.period:
        best = _best_placement(placing, round(period), options) or best
        period *= _PERIOD_FACTOR
    best = shorten_period(graph, best, low)
    generator = random.Random(budget.options.seed)
    count = max(4, min(_MAX_ORDERS, 4000 // len(graph.blocks)))
    orders = [_random_topological_order(graph, generator) for _ in range(count)]
    orders += [_random_connected_order(graph, generator) for _ in range(count)]
    options += _option_combinations(orders)
    period = low
    failed = low
    for _ in range(1 + _HALVINGS):
        found = _best_placement(placing, period, options)
        if found is None:
            failed = period
        elif (found.period, found.latency(graph)) < (best.period, best.latency(graph)):
            best = shorten_period(graph, found, low)
        period = (failed + best.period) // 2
        if failed in {best.period, period}:
            break
    return best


def serial_steady_state(graph: BlockGraph, serial: Sequence[int]) -> PeriodicStarts:
    """Return the steady state in which only one block at a time runs on all devices together, in
    the order `serial`, and one micro-batch after another.
    """
    starts = [0] * len(graph.blocks)
    now = 0
    for index in serial:
        starts[index] = max(now, *(starts[other] + wait for other, wait in graph.waits[index]), 0)
        now = starts[index] + graph.blocks[index].time
    return PeriodicStarts(now, tuple(starts))


def _best_placement(
    placing: _GreedyPlacement, period: int, options: Sequence[_PlacingOptions]
) -> PeriodicStarts | None:
    """Return the steady state with the shortest latency (time from the first start to the last end
    of a micro-batch) of all `options`, each placed into `period` and then compacted by
    `shorten_period`. None if no option results in a valid steady state.
    """
    best: PeriodicStarts | None = None
    graph = placing.graph
    for each in options:
        if placing.budget.left < 0:
            break
        found = placing.place(period, *each)
        if found is not None and is_valid(graph, found):
            found = shorten_period(graph, found, period)
            if best is None or found.latency(graph) < best.latency(graph):
                best = found
    return best


def _option_combinations(orders: Sequence[tuple[int, ...]]) -> list[_PlacingOptions]:
    """Return each distinct order with all combinations of `reserve` and `adjacent`."""
    return list(product(dict.fromkeys(orders), (False, True), (False, True)))


def _random_topological_order(graph: BlockGraph, generator: random.Random) -> tuple[int, ...]:
    """Return a random topological order of the blocks."""
    priorities = [generator.random() for _ in graph.blocks]
    return topological_order(graph, lambda index, _: priorities[index])


def _random_connected_order(graph: BlockGraph, generator: random.Random) -> tuple[int, ...]:
    """Return a random order in which each block, if possible, depends on an earlier block, or an
    earlier block depends on it. These blocks are placed close together, so that little memory is in
    use between them, as in Llosa et al., "Swing modulo scheduling" (PACT 1996).
    """
    adjacent = [
        {*others, *block.after} for others, block in zip(graph.following, graph.blocks, strict=True)
    ]
    remaining = set(range(len(adjacent)))
    frontier = list[int]()
    order = list[int]()
    while remaining:
        if frontier:
            index = frontier.pop(generator.randrange(len(frontier)))
        else:
            index = generator.choice(sorted(remaining))
        if index in remaining:
            remaining.discard(index)
            order.append(index)
            frontier += sorted(adjacent[index] & remaining)
    return tuple(order)
