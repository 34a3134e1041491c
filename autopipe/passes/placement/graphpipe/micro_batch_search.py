"""The search over chains, micro-batch sizes and target times of GraphPipe, and the choice among the
partitions that it finds.

A chain lists blocks of nodes in a topological order. A partition divides a chain into stages. For
each chain and micro-batch size, a binary search over the time of the slowest stage (Jeon et al.,
"GraphPipe" (2024), Algorithm 1) finds the best partition for each depth of the pipeline. Partitions
whose estimated steps are nearly equal are simulated.
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
from autopipe.passes.cost.measured import with_micro_batch_size
from autopipe.passes.cost.memory import parameter_state
from autopipe.passes.cost.memory_check import equal_device_ranges, out_of_memory_error
from autopipe.passes.cost.range_tables import RangeTables, make_range_tables
from autopipe.passes.cost.roofline import mean_accumulate_seconds
from autopipe.passes.placement.graphpipe.search import TargetProbe, minimum_devices
from autopipe.passes.placement.graphpipe.series_parallel import (
    FEW_UNITS,
    BlockChain,
    Tree,
    make_block_chain,
)
from autopipe.passes.placement.graphpipe.stage_costs import (
    DraftStage,
    NodeSeconds,
    OptionTable,
    option_table,
)
from autopipe.passes.schedule.limits import step_under_1f1b
from autopipe.passes.schedule.predict import predict

_PERIODS = 3
"""Number of periods after which the step of a pipeline is assumed to be periodic. In a period, each
stage runs as many micro-batches as the pipeline is deep.
"""


def _step_seconds(seconds: Callable[[int], float], depth: int, micro_batches: int) -> float:
    """Return the seconds of a step with `micro_batches` micro-batches in a pipeline of `depth`
    stages.

    `seconds(n)` returns the seconds of a step with n micro-batches. For a large number of
    micro-batches, the result is extrapolated linearly from two smaller numbers, because each
    further period of `depth` micro-batches takes equally long.
    """
    enough = _PERIODS * depth + 2
    if micro_batches <= enough + depth:
        return seconds(micro_batches)
    first = seconds(enough)
    second = seconds(enough + depth)
    return second + (second - first) / depth * (micro_batches - enough - depth)


def simulate_1f1b(problem: Problem, placement: Placement) -> tuple[float, float]:
    """Return (seconds, memory) of the simulated 1F1B step of a placement.

    `memory` is the maximum over devices of peak bytes divided by available bytes; the placement
    fits if it is at most 1. The micro-batch size of `problem` must be that of the placement.
    """
    graph = StageGraph.of(problem, placement)
    prediction = predict(problem, placement)
    shares = [0.0]

    def seconds(micro_batches: int) -> float:
        """Return the seconds of a step with this number of micro-batches, and append to `shares`
        the peak bytes of each device divided by its available bytes.
        """
        step = step_under_1f1b(graph, prediction, micro_batches, problem.train)
        shares.extend(
            peak / problem.memory_of(device) for device, peak in enumerate(step.peak_memory)
        )
        return step.end

    return _step_seconds(seconds, graph.depth, problem.micro_batches), max(shares)


def _estimate_step_seconds(
    drafts: Sequence[DraftStage],
    edges: Sequence[tuple[int, int]],
    depths: Sequence[int],
    count: int,
    train: bool,
) -> float:
    """Return the estimated seconds of a step of `count` micro-batches under 1F1B.

    `edges` contains the (source, target) pairs of stages that communicate, and `depths` the number
    of stages from each stage to the end of the pipeline. `train` is False for inference, which has
    no backward.

    A task is the forward or backward of one micro-batch in one stage. It starts when its stage is
    free and its messages have arrived. Tasks are visited in ascending order of a sort key: 2m -
    depth(s) for the forward of micro-batch m in stage s, and 2m + depth(s) - 1 for its backward. On
    each stage this is the order of 1F1B, and each task comes after the tasks that it depends on.
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
    """A partition of a chain (`line`) into stages (`drafts`), for micro-batches of `size` samples.

    depth: number of stages on the longest path through the pipeline.
    step_s: estimated seconds of a step.
    memory: estimated maximum over devices of peak bytes divided by available bytes.
    """

    line: BlockChain
    drafts: tuple[DraftStage, ...]
    size: int
    depth: int
    step_s: float
    memory: float


_WORTH_WIDENING = 1.2
"""A partition is improved with its unused devices (`PartitionSolver._improve`) if its step is
shorter than this factor times the limit on the step.
"""

_FEW_STAGES = 6
"""Maximum number of stages for which the improvement of a partition also moves boundaries between
stages.
"""
_ROUNDING = 1e-9
"""Relative tolerance of lower bounds, because sums of equal terms in another order round
differently.
"""


@dataclass(frozen=True, slots=True)
class PartitionSolver:
    """The search for partitions of the chain `line` into stages, on at most `devices` devices.
    `train` is False for inference.

    The argument `table` of the methods contains the costs of all possible stages for one
    micro-batch size.
    """

    line: BlockChain
    devices: int
    train: bool

    def search_partitions(
        self, table: OptionTable, least: float, limit: float
    ) -> Iterator[Partition]:
        """Yield partitions of decreasing depth, while a smaller depth can give a shorter step.

        For each maximum depth, the partition whose slowest stage takes the least time is yielded.
        If its step is nearly as short as `limit`, the partition is yielded again after an
        improvement by `_improve`.

        least: lower bound on the seconds per micro-batch of the slowest stage.
        limit: upper bound on the seconds of a step. It is replaced by shorter steps that are found.
        """
        levels = self.maximum_depth(table)
        while levels:
            target = self.minimum_target(table, least, limit / table.micro_batches, levels)
            if target is None:
                return
            answer = self.shallowest_partition(table, target, levels)
            yield answer
            if answer.step_s < limit * _WORTH_WIDENING:
                answer = self._improve(answer, table)
                yield answer
            limit = min(limit, answer.step_s)
            levels = answer.depth - 1
            least = target

    def single_stage_partition(self, table: OptionTable) -> Partition | None:
        """Return the partition with a single stage that takes the least time per micro-batch, or
        None if no single stage fits the memory.
        """
        at = (0, table.block_boundaries - 1)
        fitting = (option for option in table.options if option.fits_memory(*at, 1))
        best = min(fitting, key=lambda option: float(option.seconds[at]), default=None)
        return None if best is None else self._estimate_partition((best.make_stage(*at, 1),), table)

    def maximum_depth(self, table: OptionTable) -> int:
        """Return the maximum possible depth of a pipeline: the smaller of the numbers of devices
        and blocks.
        """
        return min(self.devices, table.block_boundaries - 1)

    def minimum_target(
        self, table: OptionTable, low: float, high: float, levels: int
    ) -> float | None:
        """Return the minimum over all partitions of the seconds per micro-batch of the slowest
        stage. Only partitions of depth up to `levels` count.

        Return None if no partition takes at most `high` seconds. `low` is a lower bound on the
        result.
        """
        slowest = (
            np.max(each.seconds, where=each.seconds < np.inf, initial=0.0) for each in table.options
        )
        high = min(high, float(max(slowest)))
        # First search upwards in growing steps. One stage less makes each remaining stage longer by
        # about low / levels seconds, so this is the size of the first step.
        step = low / levels
        while 0 < step < high - low:
            if self.can_meet_target(table, low + step, levels):
                high = low + step
                break
            low += step
            step *= 2
        else:
            if high < low or not self.can_meet_target(table, high, levels):
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
            key=lambda place: self.can_meet_target(table, float(values[place]), levels),
        )
        return float(values[best])

    def can_meet_target(self, table: OptionTable, target: float, levels: int) -> bool:
        """True if a partition of depth up to `levels` exists whose stages take at most `target`
        seconds per micro-batch, on the available devices.

        A faster test that ignores the depth (`minimum_devices`) is run first; it decides most
        cases.
        """
        needs = table.minimum_devices_by_level(target, levels)
        if minimum_devices(needs[1], table.runs) > self.devices:
            return False
        if needs[1] is needs[-1] and levels == self.maximum_depth(table):
            # The required devices do not depend on the level, and `levels` is the maximum depth.
            # Ignoring the depth therefore changes nothing, and the faster test is exact.
            return True
        probe = TargetProbe(needs.__getitem__, table.block_boundaries, table.runs, levels)
        return probe.solve(self.line.regions)[0] <= self.devices

    def shallowest_partition(self, table: OptionTable, target: float, levels: int) -> Partition:
        """Return the partition of minimum depth, and so with the fewest micro-batches in flight,
        whose stages take at most `target` seconds. A partition of depth `levels` must exist.
        """
        # The minimum depth is usually close to `levels`. The search therefore first goes downwards
        # from `levels` in growing steps, and then bisects the last step.
        fewer = 1
        while fewer < levels and self.can_meet_target(table, target, levels - fewer):
            levels -= fewer
            fewer *= 2
        low = max(levels - fewer, 0) + 1
        levels = low + bisect.bisect_left(
            range(low, levels), True, key=lambda middle: self.can_meet_target(table, target, middle)
        )
        needs = table.minimum_devices_by_level(target, levels)
        probe = TargetProbe(
            needs.__getitem__, table.block_boundaries, table.runs, levels, traced=True
        )
        _, stages = probe.solve(self.line.regions)
        return self._estimate_partition(
            tuple(table.make_stage(stage, target) for stage in stages), table
        )

    def _improve(self, answer: Partition, table: OptionTable) -> Partition:
        """Return the partition after a greedy improvement of its estimated step.

        A change gives unused devices to a stage, or, if there are at most `_FEW_STAGES` stages,
        moves a boundary between two stages by one block. The change that shortens the step the most
        is applied, until no change shortens it.
        """
        best = answer
        while True:
            drafts = best.drafts
            spare = list(table.runs)
            for draft in drafts:
                spare[draft.run] -= draft.degree
            others = [
                self._estimate_partition((*drafts[:index], wider, *drafts[index + 1 :]), table)
                for index, draft in enumerate(drafts)
                for wider in _stage_variants(draft, table, more=range(1, spare[draft.run] + 1))
            ]
            if len(drafts) <= _FEW_STAGES:
                others += (
                    self._estimate_partition(moved, table)
                    for moved in self._move_boundaries(drafts, table)
                )
            better = min(others, key=lambda other: other.step_s, default=best)
            if better.step_s >= best.step_s:
                return best
            best = better

    def _move_boundaries(
        self, drafts: tuple[DraftStage, ...], table: OptionTable
    ) -> Iterator[tuple[DraftStage, ...]]:
        """Yield the stages with one boundary between two stages moved by one block. Only stages
        that fit the memory are yielded, and only if the depth of each stage and its recomputation
        do not change.
        """
        depths = depths_to_end(len(drafts), self._stage_edges(drafts))
        for index, (one, other) in enumerate(itertools.pairwise(drafts)):
            for cut in (one.stop - 1, one.stop + 1):
                if not one.start < cut < other.stop:
                    continue
                ends = (
                    _stage_variants(replace(one, stop=cut), table),
                    _stage_variants(replace(other, start=cut), table),
                )
                for first, second in itertools.product(*ends):
                    found = (*drafts[:index], first, second, *drafts[index + 2 :])
                    same = (first.recompute, second.recompute) == (one.recompute, other.recompute)
                    if same and depths_to_end(len(found), self._stage_edges(found)) == depths:
                        yield found

    def _estimate_partition(self, drafts: tuple[DraftStage, ...], table: OptionTable) -> Partition:
        """Return the partition with the stages `drafts`, its estimated step and its estimated
        memory.
        """
        edges = self._stage_edges(drafts)
        depths = depths_to_end(len(drafts), edges)
        step = _step_seconds(
            lambda count: _estimate_step_seconds(drafts, edges, depths, count, self.train),
            max(depths),
            table.micro_batches,
        )
        memory = max(draft.memory / table.limits[draft.run] for draft in drafts)
        return Partition(self.line, drafts, table.size, max(depths), step, memory)

    def _stage_edges(self, drafts: Sequence[DraftStage]) -> list[tuple[int, int]]:
        """Return the (source, target) pairs of stages for which stage `target` reads a value of
        stage `source`.
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


def _stage_variants(
    draft: DraftStage, table: OptionTable, more: range = range(1)
) -> Iterator[DraftStage]:
    """Yield the stage with other numbers of devices, with and without recomputation, if its
    micro-batches in flight fit the memory.

    The devices are of the same run (range of equal devices) as those of `draft`. `more` contains
    the permitted numbers of additional devices.
    """
    own = (draft.start, draft.stop, draft.in_flight)
    for option in table.options:
        if (
            option.run == draft.run
            and option.degree - draft.degree in more
            and option.fits_memory(*own)
        ):
            yield option.make_stage(*own)


_BLOCKS_PER_DEVICE = 24
"""Number of blocks of a chain per device, limited by `_MIN_BLOCKS` and `_MAX_BLOCKS`. The time of
the search grows with the square of the number of blocks.
"""
_MIN_BLOCKS = 96
"""Minimum number of blocks into which the chain of a large graph is divided."""
_MAX_BLOCKS = 224
"""Maximum number of blocks into which a chain is divided."""

_CLOSE = 1.005
"""Partitions whose estimated step is at most this factor times the shortest estimate are simulated,
because the estimates are not accurate enough to choose among them.
"""

_CLOSE_AMONG_NODES = 1.01
"""Replaces `_CLOSE` in a cluster of several nodes. Estimates are less accurate there, because the
search does not know over which link a message is sent.
"""

_MAX_TRIALS = 4
"""Maximum number of partitions that are simulated."""
_HALVINGS = 14
"""Number of bisection steps for the minimum number of bytes by which all memory limits would have
to be higher: a precision of about 1 / 10,000.
"""
_TRUSTED_MEMORY = 0.9
"""Maximum estimated fraction of a device's memory for which a partition is accepted without a
simulation.
"""
_NEAR = 1.2
"""Another chain is searched only if the best step is longer than this factor times a lower bound,
in which all devices compute all the time.
"""


class MicroBatchSearch:
    """The search over chains and micro-batch sizes for one problem.

    `units` contains the groups of nodes that stay in one stage. `weights` contains the seconds of
    each node.
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
            size: self._minimum_device_seconds(size) / self.devices
            for size in problem.micro_batch_sizes or (problem.micro_batch_size,)
        }
        """By micro-batch size: lower bound on the seconds per micro-batch of the slowest stage. In
        the bound, all devices compute all the time.
        """
        self.close = _CLOSE_AMONG_NODES if problem.cluster.node_count > 1 else _CLOSE

    def _minimum_device_seconds(self, size: int) -> float:
        """Return a lower bound on the seconds that one device needs for a micro-batch of `size`
        samples: the time of the fastest device type, or the time of its host to launch all
        operators if that is longer.

        Each operator and the gradient accumulation of each parameter count once. If operators have
        measured times, the bound for an operator is the minimum over degrees d of d times its time
        on 1 / d of the samples.
        """
        problem = self.problem
        kinds = self.problem.cluster.kinds
        some = self.seconds.measured.any()
        degrees = [degree for degree in self.degrees if size % degree == 0] if some else [1]
        shares = (
            [degree * each for each in self.seconds.forward_and_backward(size, degree, (kind,))]
            for kind in kinds
            for degree in degrees
        )
        phases = zip(*shares, strict=True)
        every = float(sum(np.minimum.reduce(each).sum() for each in phases))
        names = ((parameter.value.name, 1) for parameter in problem.graph.parameters)
        gradient_bytes = float(parameter_state(problem, names).gradient_bytes)
        added = min(
            mean_accumulate_seconds(kind, gradient_bytes, problem.batch_size // size, tensors=0)
            for kind in kinds
        )
        launch_s = min(kind.host_launch_s for kind in kinds)
        started = sum(
            each.operators + each.backward_operators * problem.train for each in problem.work
        )
        return max(every + added, started * launch_s)

    def find_best_placement(self, trees: Iterable[Tree]) -> Placement:
        """Return the placement of the best partition over all `trees`, each of which determines a
        chain.

        Among partitions with nearly equal estimates, the one with the shortest simulated step is
        chosen. Further trees are searched only while the best step exceeds a lower bound, in which
        all devices compute all the time; for graphs with more than `FEW_UNITS` units, only while it
        exceeds `_NEAR` times the bound. Raise InfeasibleError, with the minimum excess over the
        memory limit, if no partition fits the memory.
        """
        found: list[Partition] = []
        near = _NEAR if len(self.units.nodes) > FEW_UNITS else 1.0
        bound = min(load * (self.problem.batch_size // size) for size, load in self.loads.items())
        blocks = min(max(_BLOCKS_PER_DEVICE * self.devices, _MIN_BLOCKS), _MAX_BLOCKS)
        lines: list[BlockChain] = []
        least = np.inf
        for tree in trees:
            lines.append(
                make_block_chain(
                    self.problem.graph, self.units, tree, self.weights, blocks, self.devices
                )
            )
            found += self._find_partitions(lines[-1], least)
            least = min((each.step_s for each in found), default=np.inf)
            if least <= bound * near:
                break
        chosen = self._choose_placement(found)
        if chosen is None:
            raise self._out_of_memory_error(lines[0])
        return chosen

    def _choose_placement(self, found: list[Partition]) -> Placement | None:
        """Return the placement of the best partition of `found`, or None if no partition fits the
        memory.
        """
        # Different chains of blocks may lead to partitions of equal micro-batch size and step time.
        # Only the first partition of each such set is examined.
        found = list({(each.size, each.step_s): each for each in reversed(found)}.values())
        found.sort(key=lambda each: each.step_s)
        least = found[0].step_s if found else 0.0
        # The estimate for a single stage is exact, because its tasks run one after the other. So a
        # single stage needs no tolerance.
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
            placement = self._make_placement(each)
            if len(close) == 1 and best is None and each.memory <= _TRUSTED_MEMORY:
                return placement
            seconds, used = simulate_1f1b(with_micro_batch_size(self.problem, each.size), placement)
            if used <= 1 and seconds < least_s:
                best = placement
                least_s = seconds
        return best

    def _find_partitions(self, line: BlockChain, best: float) -> Iterator[Partition]:
        """Yield partitions of a chain. A partition is searched only if its slowest stage alone
        makes the step at most `self.close` times as long as `best` seconds and as the shortest
        estimated step found so far. Its own estimated step may be longer.
        """
        batch = self.problem.batch_size
        solver, tables = self._make_solver(line)
        # Start with one stage on all devices and the largest micro-batches that fit the memory.
        # This partition is found quickly, is often good, and limits the search that follows.
        for size in sorted(self.loads, reverse=True) if best == np.inf else ():
            table = option_table(tables, self.seconds, size, (self.devices,))
            answer = solver.single_stage_partition(table) if table.options else None
            if answer is not None:
                best = answer.step_s
                yield answer
                break
        # Visit sizes in ascending order of an estimated step, in which warm-up and cool-down count
        # as two micro-batches.
        for size in sorted(self.loads, key=lambda size: self.loads[size] * (batch // size + 2)):
            limit = best * self.close
            if self.loads[size] * (batch // size) > limit:
                continue
            table = option_table(tables, self.seconds, size, self.degrees)
            for answer in solver.search_partitions(table, self.loads[size], limit):
                best = min(best, answer.step_s)
                yield answer

    def _make_solver(self, line: BlockChain) -> tuple[PartitionSolver, RangeTables]:
        """Return the solver for a chain, and the tables from which the costs of its stages are
        computed.
        """
        return PartitionSolver(line, self.devices, self.problem.train), make_range_tables(
            self.problem, line.chain, self.samples
        )

    def _make_placement(self, found: Partition) -> Placement:
        """Return the placement of a partition.

        The devices of the cluster form runs: ranges of equal devices. A stage gets consecutive
        devices of the run that its draft names. Stages with more devices are placed first, so if
        all degrees and node sizes are powers of two, a stage that fits into a node of the cluster
        does not span two nodes. Stages with equally many devices are placed in the order of the
        chain, so neighbouring stages get neighbouring devices.
        """
        runs = equal_device_ranges(self.problem.cluster)
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

    def _out_of_memory_error(self, line: BlockChain) -> InfeasibleError:
        """Return the error for a chain no partition of which fits the memory.

        The error is for the partition that exceeds the memory limits the least, with the smallest
        micro-batches, and names the stage of this partition with the largest excess.
        """
        problem = self.problem
        solver, tables = self._make_solver(line)

        def options_with_spare(spare: float) -> OptionTable:
            """Return the stage options if each memory limit is `spare` bytes higher."""
            return option_table(tables, self.seconds, min(self.loads), self.degrees, spare)

        def partition_fits(spare: float) -> bool:
            """True if a partition, however slow, fits memory limits that are `spare` bytes
            higher.
            """
            found = options_with_spare(spare)
            return solver.can_meet_target(found, np.inf, solver.maximum_depth(found))

        low = 0.0
        high = float(problem.memory_of(0))
        while not partition_fits(high):
            low = high
            high = 2 * high
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if partition_fits(middle) else (middle, high)
        nearest = options_with_spare(high)
        found = solver.shallowest_partition(nearest, np.inf, solver.maximum_depth(nearest))
        firsts = [stage.devices[0] for stage in self._make_placement(found).stages]
        excess = [
            draft.memory - problem.memory_of(first)
            for draft, first in zip(found.drafts, firsts, strict=True)
        ]
        worst = max(range(len(firsts)), key=excess.__getitem__)
        device = firsts[worst]
        need = max(found.drafts[worst].memory, problem.memory_of(device) + 1)
        return out_of_memory_error(problem, [worst], len(found.drafts), device, need, least=True)
