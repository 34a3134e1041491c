"""The search over chains, micro-batch sizes and target times, and the choice among the partitions
that it finds.

For each chain and micro-batch size, a binary search over the time of the slowest stage (Jeon et
al., "GraphPipe" (2024), Algorithm 1) finds the best partition for each depth of the pipeline.
Partitions whose estimated steps are nearly equal are simulated.
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
from autopipe.passes.cost.roofline import mean_accumulate_seconds
from autopipe.passes.placement.graphpipe.search import TargetProbe, minimum_devices
from autopipe.passes.placement.graphpipe.series_parallel import (
    FEW_UNITS,
    BlockLine,
    Tree,
    make_line,
)
from autopipe.passes.placement.graphpipe.stage_costs import (
    DraftStage,
    NodeSeconds,
    OptionTable,
    option_table,
)
from autopipe.passes.schedule.limits import predicted_step
from autopipe.passes.schedule.predict import predict

_PERIODS = 3
"""Number of periods, each of as many micro-batches as the pipeline is deep, after which a step is
assumed to be periodic.
"""


def _step_seconds(seconds: Callable[[int], float], depth: int, micro_batches: int) -> float:
    """Return the seconds of a step with `micro_batches` micro-batches.

    `seconds` returns them for any number. For a large number, the result is extrapolated from two
    smaller numbers, because each further period takes equally long.
    """
    enough = _PERIODS * depth + 2
    if micro_batches <= enough + depth:
        return seconds(micro_batches)
    first = seconds(enough)
    second = seconds(enough + depth)
    return second + (second - first) / depth * (micro_batches - enough - depth)


def trial(problem: Problem, placement: Placement) -> tuple[float, float]:
    """Return (seconds, memory) of a simulated step under 1F1B.

    `memory` is the maximum over devices of used divided by available bytes. The problem must have
    the placement's micro-batch size.
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


def _estimated_seconds(
    drafts: Sequence[DraftStage],
    edges: Sequence[tuple[int, int]],
    depths: Sequence[int],
    count: int,
    train: bool,
) -> float:
    """Return the estimated seconds of a step of `count` micro-batches under 1F1B.

    A task starts when its stage is free and its messages have arrived. Tasks are visited in the
    order of slots: forward m of stage s has slot 2m - depth(s), backward m has slot
    2m + depth(s) - 1. This is the order of 1F1B on each stage, and each task follows the tasks that
    it depends on.
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
    """A partition of a chain into stages, for micro-batches of `size` samples.

    step_s: estimated seconds of a step.
    memory: estimated maximum over devices of used divided by available bytes.
    """

    line: BlockLine
    drafts: tuple[DraftStage, ...]
    size: int
    depth: int
    step_s: float
    memory: float


_WORTH_WIDENING = 1.2
"""A partition whose step is at most this factor longer than the best is improved with its unused
devices.
"""

_FEW_STAGES = 6
"""Maximum number of stages for which boundaries between stages are moved."""
_ROUNDING = 1e-9
"""Relative tolerance of lower bounds, because sums in another order round differently."""


@dataclass(frozen=True, slots=True)
class Solver:
    """The search for partitions of one chain on at most `devices` devices."""

    line: BlockLine
    devices: int
    train: bool

    def partitions(self, table: OptionTable, least: float, limit: float) -> Iterator[Partition]:
        """Yield the fastest partition, then the fastest one of smaller depth, and so on while it
        can be better.

        least: lower bound on the seconds per micro-batch of the slowest stage.
        limit: upper bound on the seconds of a step.
        """
        levels = self.levels(table)
        while levels:
            target = self.fastest(table, least, limit / table.micro_batches, levels)
            if target is None:
                return
            answer = self.shallowest(table, target, levels)
            yield answer
            if answer.step_s < limit * _WORTH_WIDENING:
                answer = self._improved(answer, table)
                yield answer
            limit = min(limit, answer.step_s)
            levels = answer.depth - 1
            least = target

    def single_stage(self, table: OptionTable) -> Partition | None:
        """Return the fastest partition with a single stage, or None if none fits the memory."""
        at = (0, table.places - 1)
        fitting = (option for option in table.options if option.holds(*at, 1))
        best = min(fitting, key=lambda option: float(option.seconds[at]), default=None)
        return None if best is None else self._estimated((best.stage(*at, 1),), table)

    def levels(self, table: OptionTable) -> int:
        """Return the maximum depth of a pipeline."""
        return min(self.devices, table.places - 1)

    def fastest(self, table: OptionTable, low: float, high: float, levels: int) -> float | None:
        """Return the minimum time per micro-batch of the slowest stage over all partitions of depth
        up to `levels`, if it is between `low` and `high`; otherwise None.
        """
        slowest = (
            np.max(each.seconds, where=each.seconds < np.inf, initial=0.0) for each in table.options
        )
        high = min(high, float(max(slowest)))
        # First search upwards in growing steps. The first step is about the time that each stage
        # gains if there is one stage less.
        step = low / levels
        while 0 < step < high - low:
            if self.meets(table, low + step, levels):
                high = low + step
                break
            low += step
            step *= 2
        else:
            if high < low or not self.meets(table, high, levels):
                return None
        low *= 1 - _ROUNDING
        found = (
            each.seconds[(each.seconds >= low) & (each.seconds <= high) & (each.most > 0)]
            for each in table.options
        )
        values = np.unique(np.concatenate(list(found)))
        best = bisect.bisect_left(
            range(len(values) - 1),
            True,
            key=lambda place: self.meets(table, float(values[place]), levels),
        )
        return float(values[best])

    def meets(self, table: OptionTable, target: float, levels: int) -> bool:
        """True if a partition of depth up to `levels` meets the target on the available devices.

        The faster test without levels decides most cases.
        """
        needs = table.needs(target, levels)
        if minimum_devices(needs[1], table.runs) > self.devices:
            return False
        if needs[1] is needs[-1] and levels == self.levels(table):
            # The needs are equal at all levels, and the depth is not limited.
            return True
        probe = TargetProbe(needs.__getitem__, table.places, table.runs, levels)
        return probe.solve(self.line.regions)[0] <= self.devices

    def shallowest(self, table: OptionTable, target: float, levels: int) -> Partition:
        """Return the partition that meets the target with the minimum micro-batches in flight."""
        # The minimum is usually close to `levels`, so search downwards in growing steps first.
        fewer = 1
        while fewer < levels and self.meets(table, target, levels - fewer):
            levels -= fewer
            fewer *= 2
        low = max(levels - fewer, 0) + 1
        levels = low + bisect.bisect_left(
            range(low, levels), True, key=lambda middle: self.meets(table, target, middle)
        )
        needs = table.needs(target, levels)
        probe = TargetProbe(needs.__getitem__, table.places, table.runs, levels, traced=True)
        _, stages = probe.solve(self.line.regions)
        return self._estimated(tuple(table.stage(stage, target) for stage in stages), table)

    def _improved(self, answer: Partition, table: OptionTable) -> Partition:
        """Return the partition improved by a greedy search.

        Each step assigns unused devices to a stage, or moves a boundary by one block if there are
        at most `_FEW_STAGES` stages. The change that shortens the step the most is kept, until none
        does.
        """
        best = answer
        while True:
            drafts = best.drafts
            spare = list(table.runs)
            for draft in drafts:
                spare[draft.run] -= draft.degree
            others = [
                self._estimated((*drafts[:index], wider, *drafts[index + 1 :]), table)
                for index, draft in enumerate(drafts)
                for wider in _variants(draft, table, more=range(1, spare[draft.run] + 1))
            ]
            if len(drafts) <= _FEW_STAGES:
                others += (
                    self._estimated(moved, table)
                    for moved in self._with_moved_boundaries(drafts, table)
                )
            better = min(others, key=lambda other: other.step_s, default=best)
            if better.step_s >= best.step_s:
                return best
            best = better

    def _with_moved_boundaries(
        self, drafts: tuple[DraftStage, ...], table: OptionTable
    ) -> Iterator[tuple[DraftStage, ...]]:
        """Yield the stages with one boundary moved by one block, if depths and recomputation do not
        change and the stages fit the memory.
        """
        depths = depths_to_end(len(drafts), self._edges(drafts))
        for index, (one, other) in enumerate(itertools.pairwise(drafts)):
            for cut in (one.stop - 1, one.stop + 1):
                if not one.start < cut < other.stop:
                    continue
                ends = (
                    _variants(replace(one, stop=cut), table),
                    _variants(replace(other, start=cut), table),
                )
                for first, second in itertools.product(*ends):
                    found = (*drafts[:index], first, second, *drafts[index + 2 :])
                    same = (first.recompute, second.recompute) == (one.recompute, other.recompute)
                    if same and depths_to_end(len(found), self._edges(found)) == depths:
                        yield found

    def _estimated(self, drafts: tuple[DraftStage, ...], table: OptionTable) -> Partition:
        edges = self._edges(drafts)
        depths = depths_to_end(len(drafts), edges)
        step = _step_seconds(
            lambda count: _estimated_seconds(drafts, edges, depths, count, self.train),
            max(depths),
            table.micro_batches,
        )
        memory = max(draft.memory / table.limits[draft.run] for draft in drafts)
        return Partition(self.line, drafts, table.size, max(depths), step, memory)

    def _edges(self, drafts: Sequence[DraftStage]) -> list[tuple[int, int]]:
        """Return the pairs (source, target) of stages such that the target reads from the
        source.
        """
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
    draft: DraftStage, table: OptionTable, more: range = range(1)
) -> Iterator[DraftStage]:
    """Yield the options for a stage with `more` additional devices of its run that fit its
    micro-batches in flight into memory.
    """
    own = (draft.start, draft.stop, draft.in_flight)
    for option in table.options:
        if option.run == draft.run and option.degree - draft.degree in more and option.holds(*own):
            yield option.stage(*own)


_BLOCKS_PER_DEVICE = 24
"""Number of blocks per device, within the two following limits. The time of the search grows with
the square of the number of blocks.
"""
_MIN_BLOCKS = 96
"""Minimum number of blocks into which a large graph is divided."""
_MAX_BLOCKS = 224
"""Maximum number of blocks."""

_CLOSE = 1.005
"""Partitions whose estimated steps differ by at most this factor are simulated, because the
estimate is not more accurate.
"""

_CLOSE_AMONG_NODES = 1.01
"""The factor for clusters of several nodes, for which the search does not know the link of a
message.
"""

_MAX_TRIALS = 4
"""Maximum number of partitions that are simulated."""
_HALVINGS = 14
"""Number of bisection steps for the minimum excess over the memory limit: a precision of 1 /
10,000.
"""
_TRUSTED_MEMORY = 0.9
"""Maximum estimated fraction of the memory for which a partition is accepted without simulation."""
_NEAR = 1.2
"""Another chain is searched if the step exceeds the bound of pure computation by this factor."""


class MicroBatchSearch:
    """The search over chains and micro-batch sizes.

    `units` are the groups of nodes that stay in one stage, `weights` the time of each node.
    """

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
        """Lower bound on the seconds per micro-batch of each size, with all devices always busy."""
        self.close = _CLOSE_AMONG_NODES if problem.cluster.node_count > 1 else _CLOSE

    def _load(self, size: int) -> float:
        """Return a lower bound on the seconds of a micro-batch on one device: the time of the
        fastest device type, or of its host if the host is slower.

        Each parameter and each operator counts once. With measured times, the bound is the minimum
        over degrees of degree times the measured time of 1 / degree of an operator.
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
        gradient_bytes = float(state_of(problem, names).gradient_bytes)
        added = min(
            mean_accumulate_seconds(kind, gradient_bytes, problem.batch_size // size, tensors=0)
            for kind in kinds
        )
        launch_s = min(kind.host_launch_s for kind in kinds)
        started = sum(
            each.operators + each.backward_operators * problem.train for each in problem.work
        )
        return max(every + added, started * launch_s)

    def best(self, trees: Iterable[Tree]) -> Placement:
        """Return the placement of the best partition over `trees`.

        Among partitions with nearly equal estimates, the one with the shortest simulated step is
        chosen. Further trees are searched only while the best step exceeds the bound of pure
        computation by the factor `_NEAR`. Raises InfeasibleError, with the minimum excess over the
        memory limit, if no stages fit the memory.
        """
        found: list[Partition] = []
        near = _NEAR if len(self.units.nodes) > FEW_UNITS else 1.0
        bound = min(load * (self.problem.batch_size // size) for size, load in self.loads.items())
        blocks = min(max(_BLOCKS_PER_DEVICE * self.devices, _MIN_BLOCKS), _MAX_BLOCKS)
        lines: list[BlockLine] = []
        least = np.inf
        for tree in trees:
            lines.append(
                make_line(self.problem.graph, self.units, tree, self.weights, blocks, self.devices)
            )
            found += self._partitions(lines[-1], least)
            least = min((each.step_s for each in found), default=np.inf)
            if least <= bound * near:
                break
        chosen = self._chosen(found)
        if chosen is None:
            raise self._too_little_memory(lines[0])
        return chosen

    def _chosen(self, found: list[Partition]) -> Placement | None:
        """Return the placement of the best partition, or None if none fits the memory."""
        # Several chains may give equal partitions.
        found = list({(each.size, each.step_s): each for each in reversed(found)}.values())
        found.sort(key=lambda each: each.step_s)
        least = found[0].step_s if found else 0.0
        # The estimate of a single stage is exact, because no tasks overlap.
        close = [
            each
            for each in found
            if each.step_s / (self.close if len(each.drafts) > 1 else 1) <= least
        ]
        best = None
        least_s = np.inf
        for number, each in enumerate((*close, *(other for other in found if other not in close))):
            if best is not None and number >= min(len(close), _MAX_TRIALS):
                break
            placement = self._placement(each)
            if len(close) == 1 and best is None and each.memory <= _TRUSTED_MEMORY:
                return placement
            seconds, used = trial(resized(self.problem, each.size), placement)
            if used <= 1 and seconds < least_s:
                best = placement
                least_s = seconds
        return best

    def _partitions(self, line: BlockLine, best: float) -> Iterator[Partition]:
        """Yield partitions of a chain whose estimated step is below `best`, or close to it."""
        batch = self.problem.batch_size
        solver, tables = self._solver(line)
        # Start with one stage on all devices and the largest micro-batches that fit the memory. It
        # is found quickly and is often good.
        for size in sorted(self.loads, reverse=True) if best == np.inf else ():
            table = option_table(tables, self.seconds, size, (self.devices,))
            answer = solver.single_stage(table) if table.options else None
            if answer is not None:
                best = answer.step_s
                yield answer
                break
        # Visit sizes in the order of an estimate that counts warm-up and cool-down as two
        # micro-batches.
        for size in sorted(self.loads, key=lambda size: self.loads[size] * (batch // size + 2)):
            limit = best * self.close
            if self.loads[size] * (batch // size) > limit:
                continue
            table = option_table(tables, self.seconds, size, self.degrees)
            for answer in solver.partitions(table, self.loads[size], limit):
                best = min(best, answer.step_s)
                yield answer

    def _solver(self, line: BlockLine) -> tuple[Solver, Tables]:
        return Solver(line, self.devices, self.problem.train), make_tables(
            self.problem, line.chain, self.samples
        )

    def _placement(self, found: Partition) -> Placement:
        """Return the placement of a partition.

        Stages get consecutive devices of their runs, the stages with most devices first. If degrees
        and node sizes are powers of two, no stage that fits into a node then spans two nodes. Among
        stages with equally many devices, neighbours of the chain get neighbouring devices.
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
        """Return the error that names the stage with the largest excess in the partition with the
        minimum excess over the memory limit, for the smallest micro-batches.
        """
        problem = self.problem
        solver, tables = self._solver(line)

        def table(spare: float) -> OptionTable:
            return option_table(tables, self.seconds, min(self.loads), self.degrees, spare)

        def holds(spare: float) -> bool:
            """True if a partition of any speed fits memory limits that are `spare` bytes higher."""
            found = table(spare)
            return solver.meets(found, np.inf, solver.levels(found))

        low = 0.0
        high = float(problem.memory_of(0))
        while not holds(high):
            low = high
            high = 2 * high
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if holds(middle) else (middle, high)
        nearest = table(high)
        found = solver.shallowest(nearest, np.inf, solver.levels(nearest))
        firsts = [stage.devices[0] for stage in self._placement(found).stages]
        excess = [
            draft.memory - problem.memory_of(first)
            for draft, first in zip(found.drafts, firsts, strict=True)
        ]
        worst = max(range(len(firsts)), key=excess.__getitem__)
        device = firsts[worst]
        need = max(found.drafts[worst].memory, problem.memory_of(device) + 1)
        return out_of_memory(problem, [worst], len(found.drafts), device, need, least=True)
