"""The search over lines and sizes of micro-batches, and the choice among their answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
from autopipe.passes.placement.graphpipe.line import BlockLine, make_line
from autopipe.passes.placement.graphpipe.orders import FEW
from autopipe.passes.placement.graphpipe.prices import StagePrices, make_prices
from autopipe.passes.placement.graphpipe.seconds import NodeSeconds
from autopipe.passes.placement.graphpipe.solve import Partition, Solver
from autopipe.passes.placement.graphpipe.stages import stages_of
from autopipe.passes.placement.graphpipe.tree import Tree
from autopipe.passes.placement.graphpipe.trial import trial
from autopipe.passes.placement.graphpipe.units import Units
from autopipe.passes.placement.graphpipe.ways import ways_of

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
