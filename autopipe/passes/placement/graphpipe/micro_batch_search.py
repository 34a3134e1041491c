"""The search over lines and sizes of micro-batches, and the choice among their answers.

The binary search over what a sample may take, and its answers: the best line of stages by their depth.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.cost.measured import resized
from autopipe.passes.cost.memory import state_of
from autopipe.passes.cost.memory_check import equal_device_runs, out_of_memory
from autopipe.passes.cost.range_tables import Tables, make_tables
from autopipe.passes.cost.roofline import accumulate_per_byte
from autopipe.passes.placement.graphpipe.estimate import (
    DraftStage,
    fewest_devices,
    stage_depths,
    stages_of,
    step_seconds,
    trial,
)
from autopipe.passes.placement.graphpipe.search import TargetProbe
from autopipe.passes.placement.graphpipe.series_parallel import FEW, BlockLine, Tree, Units, make_line
from autopipe.passes.placement.graphpipe.stage_costs import NodeSeconds, StagePrices, make_prices, ways_of

_WORTH_WIDENING = 1.2
"""Partitions that take no longer than this many times the best are given the devices that they leave over."""

_FEW_STAGES = 6
"""Of more stages, cuts stay where the search puts them."""

_ROUNDING = 1e-9
"""Share of what stages take at least by which sums in another order may be below it."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A line of stages on micro-batches of `size` samples."""

    drafts: tuple[DraftStage, ...]
    size: int
    depth: int
    step_s: float
    """Seconds of a step, as far as the search's own prices tell."""
    memory: float
    """Share of the memory limit that the fullest device needs, as far as they tell."""


@dataclass(frozen=True, slots=True)
class Solver:
    """Search on one line with at most `devices` devices."""

    line: BlockLine
    devices: int
    train: bool

    def answers(self, prices: StagePrices, least: float, limit: float) -> Iterator[Partition]:
        """The fastest line of stages, then the fastest of less depth, and so on, as long as they promise to be better.

        No stage takes less than `least` seconds a micro-batch; a step must take less than `limit`.
        """
        levels = self._levels(prices)
        while levels:
            target = self.fastest(prices, least, limit / prices.micro_batches, levels)
            if target is None:
                return
            answer = self._answer(prices, target, levels)
            yield answer
            if answer.step_s < limit * _WORTH_WIDENING:
                answer = self.widened(answer, prices)
                yield answer
            limit = min(limit, answer.step_s)
            levels = answer.depth - 1
            least = target

    def whole(self, prices: StagePrices) -> Partition | None:
        """The fastest single stage; None where memory holds none."""
        at = (0, prices.places - 1)
        fitting = [price for price in prices.each if price.seconds[at] < np.inf and price.most[at]]
        if not fitting:
            return None
        way = min(fitting, key=lambda price: float(price.seconds[at])).way
        return self._judged((DraftStage.of(way, *at, 1),), prices)

    def widened(self, answer: Partition, prices: StagePrices) -> Partition:
        """The answer with devices that it leaves over given to the stages where they shorten the step most.

        Of few stages the cuts are moved too, where that does: the target of the search does not ask for it.
        """
        best = answer
        while True:
            spare = list(prices.runs)
            for draft in best.drafts:
                spare[draft.run] -= draft.degree
            others = [
                self._judged((*best.drafts[:stage], wider, *best.drafts[stage + 1 :]), prices)
                for stage, draft in enumerate(best.drafts)
                for wider in self._wider(draft, prices, spare[draft.run])
            ]
            if len(best.drafts) <= _FEW_STAGES:
                others += (self._judged(drafts, prices) for drafts in self._moved(best.drafts, prices))
            better = min(others, key=lambda other: other.step_s, default=best)
            if better.step_s >= best.step_s:
                return best
            best = better

    def _moved(self, drafts: tuple[DraftStage, ...], prices: StagePrices) -> Iterator[tuple[DraftStage, ...]]:
        """The stages with one cut a block further on or back, where depths and memory stay as they are."""
        depths = stage_depths(self._before(drafts))
        for stage, (one, other) in enumerate(itertools.pairwise(drafts)):
            for cut in (one.stop - 1, one.stop + 1):
                if not one.start < cut < other.stop:
                    continue
                first = self._resized(one, one.start, cut, prices)
                second = self._resized(other, cut, other.stop, prices)
                if first is not None and second is not None:
                    found = (*drafts[:stage], first, second, *drafts[stage + 2 :])
                    if stage_depths(self._before(found)) == depths:
                        yield found

    def _resized(self, draft: DraftStage, start: int, stop: int, prices: StagePrices) -> DraftStage | None:
        """A stage of other blocks on as many devices; None where they cannot be shared or memory does not hold it."""
        at = (start, stop)
        for price in prices.each:
            way = price.way
            alike = (way.run, way.degree, way.recompute) == (draft.run, draft.degree, draft.recompute)
            if alike and price.seconds[at] < np.inf and price.most[at] >= draft.in_flight:
                return DraftStage.of(price.way, start, stop, draft.in_flight)
        return None

    def _wider(self, draft: DraftStage, prices: StagePrices, spare: int) -> Iterator[DraftStage]:
        """A stage on more devices of its run, `spare` at most, with what it keeps in flight."""
        for price in prices.each:
            at = (draft.start, draft.stop)
            more = price.way.degree - draft.degree if price.way.run == draft.run else 0
            if 0 < more <= spare and price.seconds[at] < np.inf and price.most[at] >= draft.in_flight:
                yield DraftStage.of(price.way, draft.start, draft.stop, draft.in_flight)

    def is_held(self, prices: StagePrices) -> bool:
        """True if memory holds some line of stages, however long they take."""
        return self._meets(prices, np.inf, self._levels(prices))

    def any_answer(self, prices: StagePrices) -> Partition:
        """A line of stages that memory holds, however long they take, where there is one."""
        return self._answer(prices, np.inf, self._levels(prices))

    def _levels(self, prices: StagePrices) -> int:
        """The most stages that follow one another."""
        return min(self.devices, prices.places - 1)

    def fastest(self, prices: StagePrices, low: float, high: float, levels: int) -> float | None:
        """The least number of seconds, between two, that every stage of some line of this depth takes at most."""
        slowest = (np.max(price.seconds, where=price.seconds < np.inf, initial=0.0) for price in prices.each)
        high = min(high, float(max(slowest)))
        # One stage less has the others take about so much more.
        step = low / levels
        while 0 < step < high - low:
            if self._meets(prices, low + step, levels):
                high = low + step
                break
            low += step
            step *= 2
        else:
            if high < low or not self._meets(prices, high, levels):
                return None
        low *= 1 - _ROUNDING
        found = [each.seconds[(each.seconds >= low) & (each.seconds <= high) & (each.most > 0)] for each in prices.each]
        values = np.unique(np.concatenate(found))
        first, last = 0, len(values) - 1
        while first < last:
            middle = (first + last) // 2
            if self._meets(prices, float(values[middle]), levels):
                last = middle
            else:
                first = middle + 1
        return float(values[first])

    def _meets(self, prices: StagePrices, target: float, levels: int) -> bool:
        """True if the devices are enough; mostly it is told without levels."""
        needs = prices.needs(target, levels)
        if fewest_devices(self.line.regions, needs[1], prices.runs) > self.devices:
            return False
        if needs[1] is needs[-1] and levels == self._levels(prices):
            return True  # No line has more levels than devices or blocks, and it keeps what it will.
        search = TargetProbe(needs.__getitem__, prices.places, prices.runs, levels)
        return search.least(self.line.regions)[0] <= self.devices

    def _answer(self, prices: StagePrices, target: float, levels: int) -> Partition:
        """The line that meets the target with the fewest micro-batches in flight."""
        # Mostly no fewer do: from the most downwards.
        fewer = 1
        while fewer < levels and self._meets(prices, target, levels - fewer):
            levels -= fewer
            fewer *= 2
        low = max(levels - fewer, 0) + 1
        while low < levels:
            middle = (low + levels) // 2
            if self._meets(prices, target, middle):
                levels = middle
            else:
                low = middle + 1
        needs = prices.needs(target, levels)
        search = TargetProbe(needs.__getitem__, prices.places, prices.runs, levels, traced=True)
        drafts = []
        for piece in search.way(search.least(self.line.regions)[1]):
            way = prices.way(piece, target)
            drafts.append(DraftStage.of(way, piece.start, piece.stop, min(piece.level, prices.micro_batches)))
        return self._judged(tuple(drafts), prices)

    def _judged(self, drafts: tuple[DraftStage, ...], prices: StagePrices) -> Partition:
        memory = max(draft.memory / prices.limits[draft.run] for draft in drafts)
        before = self._before(drafts)
        step = step_seconds(drafts, before, prices.micro_batches, self.train)
        return Partition(drafts, prices.size, max(stage_depths(before)), step, memory)

    def _before(self, drafts: Sequence[DraftStage]) -> list[list[int]]:
        """For each stage the stages that it reads from."""
        masks = [(1 << draft.stop) - (1 << draft.start) for draft in drafts]
        found = []
        for draft in drafts:
            read = 0
            for block in range(draft.start, draft.stop):
                read |= self.line.needs[block]
            found.append([stage for stage, mask in enumerate(masks) if mask & read and masks[stage] < 1 << draft.start])
        return found


_BLOCKS_A_DEVICE = 24
_FEWEST_BLOCKS, _MOST_BLOCKS = 96, 224
"""Into how many blocks a graph is joined: the search's time grows with their square."""

_CLOSE = 1.005
"""Steps that differ by no more than this factor are simulated: the search's own prices are no better than that."""

_CLOSE_AMONG_NODES = 1.01
"""The same where devices are in several nodes: the search does not know which link a message takes."""

_MOST_TRIALS = 4

_HALVINGS = 14
"""How closely the least excess over the memory limit is found: to a ten thousandth of it, as it is told."""

_ROOM = 0.9
"""Share of the memory up to which the search's own count of it is trusted."""

_NEAR = 1.2
"""Another line is looked at where a step takes more than this many times the step of devices that only compute."""


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """An answer on the line it is about. Each is its own: answers of arrays cannot be compared."""

    answer: Partition
    line: BlockLine


class MicroBatchSearch:
    """The search over lines and sizes of micro-batches."""

    def __init__(self, problem: Problem, units: Units, weights: NDArray[np.float64]) -> None:
        self.problem, self.units, self.weights = problem, units, weights
        self.samples = sample_axes(problem.graph)
        self.seconds = NodeSeconds(problem, self.samples)
        devices = problem.cluster.size
        self.degrees = range(1, devices + 1)
        self.loads = {
            size: self._load(size) / devices for size in problem.micro_batch_sizes or (problem.micro_batch_size,)
        }
        """For each size the least that a micro-batch takes: all devices compute all the time."""
        self.bound = min(load * (problem.batch_size // size) for size, load in self.loads.items())
        self._problems: dict[int, Problem] = {}
        several = problem.cluster.node_count > 1
        self.close = _CLOSE_AMONG_NODES if several else _CLOSE

    def _load(self, size: int) -> float:
        """Seconds of a micro-batch on the fastest device, at least once for each parameter and each operator.

        The measured time of a share may be less than that share of the whole: then all shares of it count.
        """
        problem, kinds = self.problem, self.problem.cluster.kinds
        some = self.seconds.measured.any()
        degrees = [degree for degree in self.degrees if size % degree == 0] if some else [1]
        shares = (
            [degree * each for each in self.seconds.of(size, degree, (kind,))] for kind in kinds for degree in degrees
        )
        phases = zip(*shares, strict=True)
        every = float(sum(np.minimum.reduce(each).sum() for each in phases))
        names = ((parameter.value.name, 1) for parameter in problem.graph.parameters)
        added = min(map(accumulate_per_byte, kinds)) * state_of(problem, names).gradient_bytes
        return every + added * (1 - size / problem.batch_size)

    def best(self, trees: Iterable[Tree]) -> Placement:
        """The best answer's placement; of those that promise about the same, the one whose simulated step is best.

        Trees after the first are looked at where its answers leave something to gain.
        """
        found: list[_Found] = []
        near = _NEAR if len(self.units.nodes) > FEW else 1.0
        first: BlockLine | None = None
        least = np.inf
        for tree in trees:
            line = self._line(tree)
            first = first or line
            found += (_Found(answer, line) for answer in self._answers(line, least))
            least = min((each.answer.step_s for each in found), default=np.inf)
            if least <= self.bound * near:
                break
        chosen = self._chosen(found)
        if chosen is None:
            assert first is not None, "there is a tree"
            raise self._too_little_memory(first)
        return chosen

    def _line(self, tree: Tree) -> BlockLine:
        devices = self.problem.cluster.size
        limit = min(max(_BLOCKS_A_DEVICE * devices, _FEWEST_BLOCKS), _MOST_BLOCKS)
        return make_line(self.problem.graph, self.units, tree, self.weights, limit, devices)

    def _chosen(self, found: list[_Found]) -> Placement | None:
        """None where memory holds none."""
        # Several lines may have one and the same answer.
        found = list({(each.answer.size, each.answer.step_s): each for each in reversed(found)}.values())
        found.sort(key=lambda each: each.answer.step_s)
        least = found[0].answer.step_s if found else 0.0
        close = [each for each in found if self._at_best(each.answer) <= least]
        best: tuple[float, Placement] | None = None
        for tried, each in enumerate((*close, *(other for other in found if other not in close))):
            if best is not None and tried >= min(len(close), _MOST_TRIALS):
                break
            placement = self._placement(each)
            if len(close) == 1 and best is None and each.answer.memory <= _ROOM:
                return placement
            seconds, used = trial(self._resized(each.answer.size), placement)
            if used <= 1 and (best is None or seconds < best[0]):
                best = seconds, placement
        return None if best is None else best[1]

    def _resized(self, size: int) -> Problem:
        if size not in self._problems:
            self._problems[size] = resized(self.problem, size)
        return self._problems[size]

    def _at_best(self, answer: Partition) -> float:
        """Lower bound of a step; nothing overlaps in one stage, whose time is known."""
        return answer.step_s / (self.close if len(answer.drafts) > 1 else 1)

    def _answers(self, line: BlockLine, best: float) -> Iterator[Partition]:
        """Answers of a line that promise to be better than `best`, or close."""
        batch = self.problem.batch_size
        solver = self._solver(line)
        tables = make_tables(self.problem, line.chain, self.samples)
        if best == np.inf:
            for answer in self._replicas(solver, tables):
                best = answer.step_s
                yield answer
        # Filling and draining a pipeline takes about as long as a few micro-batches.
        for size in sorted(self.loads, key=lambda size: self.loads[size] * (batch // size + 2)):
            limit = best * self.close
            if self.loads[size] * (batch // size) > limit:
                continue
            for answer in solver.answers(self._prices(tables, size, self.degrees), self.loads[size], limit):
                best = min(best, answer.step_s)
                yield answer

    def _replicas(self, solver: Solver, tables: Tables) -> Iterator[Partition]:
        """One stage on all devices, with the largest micro-batches that memory takes: known at once, and often good."""
        for size in sorted(self.loads, reverse=True):
            prices = self._prices(tables, size, (self.problem.cluster.size,))
            answer = solver.whole(prices) if prices.each else None
            if answer is not None:
                yield answer
                return

    def _solver(self, line: BlockLine) -> Solver:
        return Solver(line, self.problem.cluster.size, self.problem.train)

    def _prices(self, tables: Tables, size: int, degrees: Iterable[int], spare: float = 0.0) -> StagePrices:
        """The prices of a size; each device has its memory limit, and `spare` bytes more."""
        problem, devices = self.problem, self.problem.cluster.size
        shared = bool(problem.graph.batch_axes)
        allowed = [degree for degree in degrees if size % degree == 0 and (shared or degree == 1)]
        runs = equal_device_runs(problem.cluster)
        ways = [
            way
            for index, run in enumerate(runs)
            for degree in allowed
            if degree <= len(run)
            for way in ways_of(tables, self.seconds, size, degree, index)
        ]
        limits = [min(map(problem.memory_of, run)) + spare for run in runs]
        return make_prices(ways, size, problem.batch_size // size, [len(run) for run in runs], limits, devices)

    def _placement(self, found: _Found) -> Placement:
        drafts, size = found.answer.drafts, found.answer.size
        return Placement(stages_of(found.line.chain, self.samples, self.problem.cluster, drafts, size))

    def _too_little_memory(self, line: BlockLine) -> InfeasibleError:
        """The error for the stages that exceed the memory limit by least, on the smallest micro-batches."""
        problem = self.problem
        tables = make_tables(problem, line.chain, self.samples)
        solver = self._solver(line)

        def prices(spare: float) -> StagePrices:
            return self._prices(tables, min(self.loads), self.degrees, spare)

        low, high = 0.0, float(problem.memory_of(0))
        while not solver.is_held(prices(high)):
            low, high = high, 2 * high
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if solver.is_held(prices(middle)) else (middle, high)
        found = solver.any_answer(prices(high))
        firsts = [stage.devices[0] for stage in self._placement(_Found(found, line)).stages]
        excess = [draft.memory - problem.memory_of(first) for draft, first in zip(found.drafts, firsts, strict=True)]
        worst = max(range(len(firsts)), key=excess.__getitem__)
        device = firsts[worst]
        need = max(found.drafts[worst].memory, problem.memory_of(device) + 1)
        return out_of_memory(problem, [worst], len(found.drafts), device, need, least=True)
