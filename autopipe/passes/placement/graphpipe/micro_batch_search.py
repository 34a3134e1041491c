"""The search over lines, sizes of micro-batches and targets, and the choice among the partitions
that it finds.

For each line and size a binary search over what a micro-batch may take on the slowest stage (Jeon
et al., "GraphPipe" (2024), Algorithm 1) gives the best stages by their depth. Steps that promise
about the same are simulated.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import StageGraph, depths_to_end
from autopipe.passes.analysis.chain import Blocks
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.cost.measured import resized
from autopipe.passes.cost.memory import state_of
from autopipe.passes.cost.memory_check import equal_device_runs, out_of_memory
from autopipe.passes.cost.range_tables import Tables, make_tables
from autopipe.passes.cost.roofline import accumulate_per_byte
from autopipe.passes.placement.graphpipe.search import TargetProbe, fewest_devices
from autopipe.passes.placement.graphpipe.series_parallel import FEW, BlockLine, Tree, make_line
from autopipe.passes.placement.graphpipe.stage_costs import (
    DraftStage,
    NodeSeconds,
    StagePrices,
    stage_prices,
)
from autopipe.passes.schedule.limits import predicted_step
from autopipe.passes.schedule.predict import predict

_PERIODS = 3  # Micro-batches, times the stages' depth, after which a step goes on as it did.


def _step_seconds(seconds: Callable[[int], float], depth: int, micro_batches: int) -> float:
    """Seconds of a step, given those by number of micro-batches: of many the first are looked at.
    The others take as long as the last of those.
    """
    enough = _PERIODS * depth + 2
    if micro_batches <= enough + depth:
        return seconds(micro_batches)
    first = seconds(enough)
    second = seconds(enough + depth)
    return second + (second - first) / depth * (micro_batches - enough - depth)


def trial(problem: Problem, placement: Placement) -> tuple[float, float]:
    """Seconds of a simulated step under 1F1B, and the share of its memory that the fullest device
    needs. `problem` is that of the placement's micro-batches.
    """
    graph = StageGraph.of(problem, placement)
    prediction = predict(problem, placement)
    shares = [0.0]

    def seconds(micro_batches: int) -> float:
        step = predicted_step(graph, prediction, micro_batches, problem.train)
        shares.extend(
            peak / problem.memory_of(device) for device, peak in enumerate(step.peak_memory)
        )
        return step.end

    return _step_seconds(seconds, graph.depth, problem.micro_batches), max(shares)


def _drafted_seconds(
    drafts: Sequence[DraftStage],
    edges: Sequence[tuple[int, int]],
    depths: Sequence[int],
    count: int,
    train: bool,
) -> float:
    """Seconds of a step of `count` micro-batches under 1F1B, from the search's own prices. Tasks
    start when their stage is free and all messages are there. F(s, m) is at place 2m - depth(s) and
    B(s, m) at 2m + depth(s) - 1, which is 1F1B's order on each stage and comes after all that a
    task waits for.
    """
    before: list[list[int]] = [[] for _ in drafts]
    after: list[list[int]] = [[] for _ in drafts]
    for source, target in edges:
        before[target].append(source)
        after[source].append(target)
    every = [(stage, depth, m) for stage, depth in enumerate(depths) for m in range(count)]
    tasks = [(2 * m - depth, 0, stage, m) for stage, depth, m in every]
    tasks += [(2 * m + depth - 1, 1, stage, m) for stage, depth, m in every if train]
    free = [0.0] * len(drafts)
    done = [[[0.0] * count for _ in drafts] for _ in range(2)]
    for _, phase, stage, m in sorted(tasks):
        draft = drafts[stage]
        message, seconds = (
            (draft.returning, draft.backward) if phase else (draft.arriving, draft.forward)
        )
        start = free[stage]
        for other in (after if phase else before)[stage]:
            start = max(start, done[phase][other][m] + message)
        free[stage] = done[phase][stage][m] = start + seconds
    return max(end + draft.end for end, draft in zip(free, drafts, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """Stages of a line on micro-batches of `size` samples, in the line's order."""

    line: BlockLine
    drafts: tuple[DraftStage, ...]
    size: int
    depth: int
    step_s: float  # Seconds of a step, as far as the search's own prices tell.
    memory: float  # Share of the memory limit that the fullest device needs, as far as they tell.


_WORTH_WIDENING = 1.2
"""Partitions that take no longer than this many times the best are given the devices that they
leave over.
"""

_FEW_STAGES = 6  # Of more stages, cuts stay where the search puts them.
_ROUNDING = (
    1e-9  # Share of what stages take at least by which sums in another order may be below it.
)


@dataclass(frozen=True, slots=True)
class Solver:
    """Search on one line with at most `devices` devices."""

    line: BlockLine
    devices: int
    train: bool

    def answers(self, prices: StagePrices, least: float, limit: float) -> Iterator[Partition]:
        """The fastest line of stages, then the fastest of less depth, and so on, as long as they
        promise to be better. No stage takes less than `least` seconds a micro-batch; a step must
        take less than `limit`.
        """
        levels = self.levels(prices)
        while levels:
            target = self.fastest(prices, least, limit / prices.micro_batches, levels)
            if target is None:
                return
            answer = self.answer(prices, target, levels)
            yield answer
            if answer.step_s < limit * _WORTH_WIDENING:
                answer = self._widened(answer, prices)
                yield answer
            limit = min(limit, answer.step_s)
            levels = answer.depth - 1
            least = target

    def whole(self, prices: StagePrices) -> Partition | None:
        """The fastest single stage; None where memory holds none."""
        at = (0, prices.places - 1)
        fitting = (option for option in prices.options if option.holds(*at, 1))
        best = min(fitting, key=lambda option: float(option.seconds[at]), default=None)
        return None if best is None else self._judged((best.stage(*at, 1),), prices)

    def levels(self, prices: StagePrices) -> int:
        """The most stages that follow one another."""
        return min(self.devices, prices.places - 1)

    def fastest(self, prices: StagePrices, low: float, high: float, levels: int) -> float | None:
        """The least number of seconds, between two, that every stage of some line of this depth
        takes at most.
        """
        slowest = (
            np.max(each.seconds, where=each.seconds < np.inf, initial=0.0)
            for each in prices.options
        )
        high = min(high, float(max(slowest)))
        # One stage less has the others take about so much more.
        step = low / levels
        while 0 < step < high - low:
            if self.meets(prices, low + step, levels):
                high = low + step
                break
            low += step
            step *= 2
        else:
            if high < low or not self.meets(prices, high, levels):
                return None
        low *= 1 - _ROUNDING
        found = (
            each.seconds[(each.seconds >= low) & (each.seconds <= high) & (each.most > 0)]
            for each in prices.options
        )
        values = np.unique(np.concatenate(list(found)))
        best = bisect.bisect_left(
            range(len(values) - 1),
            True,
            key=lambda place: self.meets(prices, float(values[place]), levels),
        )
        return float(values[best])

    def meets(self, prices: StagePrices, target: float, levels: int) -> bool:
        """True if the devices are enough; mostly it is told without levels."""
        needs = prices.needs(target, levels)
        if fewest_devices(needs[1], prices.runs) > self.devices:
            return False
        if needs[1] is needs[-1] and levels == self.levels(prices):
            return (
                True  # No line has more levels than devices or blocks, and it keeps what it will.
            )
        probe = TargetProbe(needs.__getitem__, prices.places, prices.runs, levels)
        return probe.least(self.line.regions)[0] <= self.devices

    def answer(self, prices: StagePrices, target: float, levels: int) -> Partition:
        """The line that meets the target with the fewest micro-batches in flight."""
        # Mostly no fewer do: from the most downwards.
        fewer = 1
        while fewer < levels and self.meets(prices, target, levels - fewer):
            levels -= fewer
            fewer *= 2
        low = max(levels - fewer, 0) + 1
        levels = low + bisect.bisect_left(
            range(low, levels), True, key=lambda middle: self.meets(prices, target, middle)
        )
        needs = prices.needs(target, levels)
        probe = TargetProbe(needs.__getitem__, prices.places, prices.runs, levels, traced=True)
        _, stages = probe.least(self.line.regions)
        return self._judged(tuple(prices.stage(stage, target) for stage in stages), prices)

    def _widened(self, answer: Partition, prices: StagePrices) -> Partition:
        """The answer with devices that it leaves over given to the stages where they shorten the
        step most. Of few stages the cuts are moved too, where that does: the target of the search
        does not ask for it.
        """
        best = answer
        while True:
            drafts = best.drafts
            spare = list(prices.runs)
            for draft in drafts:
                spare[draft.run] -= draft.degree
            others = [
                self._judged((*drafts[:index], wider, *drafts[index + 1 :]), prices)
                for index, draft in enumerate(drafts)
                for wider in _variants(draft, prices, more=range(1, spare[draft.run] + 1))
            ]
            if len(drafts) <= _FEW_STAGES:
                others += (self._judged(moved, prices) for moved in self._moved(drafts, prices))
            better = min(others, key=lambda other: other.step_s, default=best)
            if better.step_s >= best.step_s:
                return best
            best = better

    def _moved(
        self, drafts: tuple[DraftStage, ...], prices: StagePrices
    ) -> Iterator[tuple[DraftStage, ...]]:
        """The stages with one cut a block further on or back, where depths and memory stay as they
        are.
        """
        depths = depths_to_end(len(drafts), self._edges(drafts))
        for index, (one, other) in enumerate(itertools.pairwise(drafts)):
            for cut in (one.stop - 1, one.stop + 1):
                if not one.start < cut < other.stop:
                    continue
                ends = (
                    _variants(replace(one, stop=cut), prices),
                    _variants(replace(other, start=cut), prices),
                )
                for first, second in itertools.product(*ends):
                    found = (*drafts[:index], first, second, *drafts[index + 2 :])
                    same = (first.recompute, second.recompute) == (one.recompute, other.recompute)
                    if same and depths_to_end(len(found), self._edges(found)) == depths:
                        yield found

    def _judged(self, drafts: tuple[DraftStage, ...], prices: StagePrices) -> Partition:
        edges = self._edges(drafts)
        depths = depths_to_end(len(drafts), edges)
        step = _step_seconds(
            lambda count: _drafted_seconds(drafts, edges, depths, count, self.train),
            max(depths),
            prices.micro_batches,
        )
        memory = max(draft.memory / prices.limits[draft.run] for draft in drafts)
        return Partition(self.line, drafts, prices.size, max(depths), step, memory)

    def _edges(self, drafts: Sequence[DraftStage]) -> list[tuple[int, int]]:
        """(source, target) of every two stages of which the second reads from the first."""
        masks = [(1 << draft.stop) - (1 << draft.start) for draft in drafts]
        read = [
            functools.reduce(operator.or_, self.line.needs[draft.start : draft.stop])
            for draft in drafts
        ]
        pairs = itertools.product(range(len(drafts)), repeat=2)
        return [
            (source, target)
            for target, source in pairs
            if masks[source] & read[target] and source != target
        ]


def _variants(
    draft: DraftStage, prices: StagePrices, more: range = range(1)
) -> Iterator[DraftStage]:
    """The stage, as it is priced, on some more devices of its run, where memory holds what it keeps
    in flight.
    """
    own = (draft.start, draft.stop, draft.in_flight)
    for option in prices.options:
        if option.run == draft.run and option.degree - draft.degree in more and option.holds(*own):
            yield option.stage(*own)


_BLOCKS_A_DEVICE = 24
_FEWEST_BLOCKS = 96
_MOST_BLOCKS = 224
"""Into how many blocks a graph is joined: the search's time grows with their square."""

_CLOSE = 1.005
"""Steps that differ by no more than this factor are simulated: the search's own prices are no
better than that.
"""

_CLOSE_AMONG_NODES = 1.01
"""The same where devices are in several nodes: the search does not know which link a message takes.
"""

_MOST_TRIALS = 4
# How closely the least excess over the memory limit is found: to a ten thousandth of it, as it is
# told.
_HALVINGS = 14
_ROOM = 0.9  # Share of the memory up to which the search's own count of it is trusted.
_NEAR = 1.2
"""Another line is looked at where a step takes more than this many times the step of devices that
only compute.
"""


class MicroBatchSearch:
    """The search over lines and sizes of micro-batches."""

    def __init__(self, problem: Problem, units: Blocks, weights: NDArray[np.float64]) -> None:
        self.problem = problem
        self.units = units
        self.weights = weights
        self.samples = sample_axes(problem.graph)
        self.seconds = NodeSeconds(problem, self.samples)
        self.devices = problem.cluster.size
        self.degrees = range(1, self.devices + 1)
        self.loads = {
            size: self._load(size) / self.devices
            for size in problem.micro_batch_sizes or (problem.micro_batch_size,)
        }
        """For each size the least that a micro-batch takes: all devices compute all the time."""
        self.close = _CLOSE_AMONG_NODES if problem.cluster.node_count > 1 else _CLOSE

    def _load(self, size: int) -> float:
        """Return the least seconds of a micro-batch on one device: on the fastest device, or on the
        fastest host.

        Each parameter and each operator counts once. If the measured time of a share of an operator
        is less than that share of the whole operator's, all shares count.
        """
        problem = self.problem
        kinds = self.problem.cluster.kinds
        some = self.seconds.measured.any()
        degrees = [degree for degree in self.degrees if size % degree == 0] if some else [1]
        shares = (
            [degree * each for each in self.seconds.of(size, degree, (kind,))]
            for kind in kinds
            for degree in degrees
        )
        phases = zip(*shares, strict=True)
        every = float(sum(np.minimum.reduce(each).sum() for each in phases))
        names = ((parameter.value.name, 1) for parameter in problem.graph.parameters)
        added = min(map(accumulate_per_byte, kinds)) * state_of(problem, names).gradient_bytes
        launch_s = min(kind.host_launch_s for kind in kinds)
        started = sum(
            each.operators + each.backward_operators * problem.train for each in problem.work
        )
        return max(every + added * (1 - size / problem.batch_size), started * launch_s)

    def best(self, trees: Iterable[Tree]) -> Placement:
        """The best answer's placement; of those that promise about the same, the one whose
        simulated step is best. Trees after the first are looked at where its answers leave
        something to gain. Raises InfeasibleError where memory holds no stages, saying by how much
        those that need least exceed it.
        """
        found: list[Partition] = []
        near = _NEAR if len(self.units.nodes) > FEW else 1.0
        bound = min(load * (self.problem.batch_size // size) for size, load in self.loads.items())
        blocks = min(max(_BLOCKS_A_DEVICE * self.devices, _FEWEST_BLOCKS), _MOST_BLOCKS)
        lines: list[BlockLine] = []
        least = np.inf
        for tree in trees:
            lines.append(
                make_line(self.problem.graph, self.units, tree, self.weights, blocks, self.devices)
            )
            found += self._answers(lines[-1], least)
            least = min((each.step_s for each in found), default=np.inf)
            if least <= bound * near:
                break
        chosen = self._chosen(found)
        if chosen is None:
            raise self._too_little_memory(lines[0])
        return chosen

    def _chosen(self, found: list[Partition]) -> Placement | None:
        """None where memory holds none."""
        # Several lines may have one and the same answer.
        found = list({(each.size, each.step_s): each for each in reversed(found)}.values())
        found.sort(key=lambda each: each.step_s)
        least = found[0].step_s if found else 0.0
        # Nothing overlaps in one stage, whose time is known.
        close = [
            each
            for each in found
            if each.step_s / (self.close if len(each.drafts) > 1 else 1) <= least
        ]
        best = None
        least_s = np.inf
        for number, each in enumerate((*close, *(other for other in found if other not in close))):
            if best is not None and number >= min(len(close), _MOST_TRIALS):
                break
            placement = self._placement(each)
            if len(close) == 1 and best is None and each.memory <= _ROOM:
                return placement
            seconds, used = trial(resized(self.problem, each.size), placement)
            if used <= 1 and seconds < least_s:
                best = placement
                least_s = seconds
        return best

    def _answers(self, line: BlockLine, best: float) -> Iterator[Partition]:
        """Answers of a line that promise to be better than `best`, or close."""
        batch = self.problem.batch_size
        solver, tables = self._solver(line)
        # One stage on all devices, with the largest micro-batches that memory takes: known at once,
        # and often good.
        for size in sorted(self.loads, reverse=True) if best == np.inf else ():
            prices = stage_prices(tables, self.seconds, size, (self.devices,))
            answer = solver.whole(prices) if prices.options else None
            if answer is not None:
                best = answer.step_s
                yield answer
                break
        # Filling and draining a pipeline takes about as long as a few micro-batches.
        for size in sorted(self.loads, key=lambda size: self.loads[size] * (batch // size + 2)):
            limit = best * self.close
            if self.loads[size] * (batch // size) > limit:
                continue
            prices = stage_prices(tables, self.seconds, size, self.degrees)
            for answer in solver.answers(prices, self.loads[size], limit):
                best = min(best, answer.step_s)
                yield answer

    def _solver(self, line: BlockLine) -> tuple[Solver, Tables]:
        return Solver(line, self.devices, self.problem.train), make_tables(
            self.problem, line.chain, self.samples
        )

    def _placement(self, found: Partition) -> Placement:
        """Stages on neighbouring devices of their runs, larger groups first. Where degrees and
        nodes are powers of two, no group that would fit into a node then lies in two. Among equal
        ones neighbours in the line are neighbours.
        """
        runs = equal_device_runs(self.problem.cluster)
        firsts = [run.start for run in runs]
        stages: dict[int, Stage] = {}
        for index, draft in sorted(enumerate(found.drafts), key=lambda each: -each[1].degree):
            nodes = found.line.chain.nodes(draft.start, draft.stop)
            devices = tuple(range(firsts[draft.run], firsts[draft.run] + draft.degree))
            stages[index] = Stage(
                nodes,
                devices,
                found.size,
                self.samples.splits(nodes, draft.degree),
                draft.recompute,
            )
            firsts[draft.run] += draft.degree
        assert all(first <= run.stop for first, run in zip(firsts, runs, strict=True)), (
            "more devices than there are"
        )
        return Placement(tuple(stages[index] for index in range(len(stages))))

    def _too_little_memory(self, line: BlockLine) -> InfeasibleError:
        """The error for the stages that exceed the memory limit by least, on the smallest
        micro-batches.
        """
        problem = self.problem
        solver, tables = self._solver(line)

        def prices(spare: float) -> StagePrices:
            return stage_prices(tables, self.seconds, min(self.loads), self.degrees, spare)

        def holds(spare: float) -> bool:
            """True if memory with `spare` bytes more holds some line of stages, however long they
            take.
            """
            found = prices(spare)
            return solver.meets(found, np.inf, solver.levels(found))

        low = 0.0
        high = float(problem.memory_of(0))
        while not holds(high):
            low = high
            high = 2 * high
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if holds(middle) else (middle, high)
        nearest = prices(high)
        found = solver.answer(nearest, np.inf, solver.levels(nearest))
        firsts = [stage.devices[0] for stage in self._placement(found).stages]
        excess = [
            draft.memory - problem.memory_of(first)
            for draft, first in zip(found.drafts, firsts, strict=True)
        ]
        worst = max(range(len(firsts)), key=excess.__getitem__)
        device = firsts[worst]
        need = max(found.drafts[worst].memory, problem.memory_of(device) + 1)
        return out_of_memory(problem, [worst], len(found.drafts), device, need, least=True)
