"""GraphPipe: the strategy and its options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.batching import Division
from autopipe.passes.cost.chain_tables import Tables, make_tables
from autopipe.passes.cost.fit import check_operators, out_of_memory
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.placement.graphpipe.check import check_stages
from autopipe.passes.placement.graphpipe.line import Line, make_line
from autopipe.passes.placement.graphpipe.notes import region_notes
from autopipe.passes.placement.graphpipe.prices import Prices, make_prices
from autopipe.passes.placement.graphpipe.seconds import NodeSeconds
from autopipe.passes.placement.graphpipe.solve import Answer, Solver
from autopipe.passes.placement.graphpipe.stages import stages_of
from autopipe.passes.placement.graphpipe.tree import decompose
from autopipe.passes.placement.graphpipe.trial import trial
from autopipe.passes.placement.graphpipe.units import make_units
from autopipe.passes.placement.graphpipe.ways import ways_of
from autopipe.passes.spmd.search.further import split_further

_BLOCKS_A_DEVICE = 24
_FEWEST_BLOCKS, _MOST_BLOCKS = 96, 224
"""Into how many blocks a graph is joined: the search's time grows with their square."""

_CLOSE = 1.005
"""Steps that differ by no more than this factor are simulated: the search's own prices are no better than that."""

_CLOSE_AMONG_NODES = 1.02
"""The same where devices are in several nodes: the search does not know which link a message takes."""

_MOST_TRIALS = 4

_HALVINGS = 24
"""How closely the least excess over the memory limit is found."""

_ROOM = 0.9
"""Share of the memory up to which the search's own count of it is trusted."""


@dataclass(frozen=True, slots=True)
class GraphPipe:
    """Cuts the model's series-parallel graph into stages that take equally long, branches beside one another."""

    intra: Literal["data_parallel", "pase"] = "data_parallel"
    """How the devices of a stage share its work: by samples, or as the search for splits makes a step shorter."""

    name: ClassVar[str] = "graphpipe"

    def division(self, graph: Graph) -> Division:
        """It chooses the size of micro-batches."""
        return Division.OWN

    def requires(self, problem: Problem) -> None:
        """Raise InfeasibleError where there is nothing to place."""
        check_operators(problem)

    def run(self, problem: Problem) -> Placement:
        """The placement with the least expected step time.

        It uses all devices that make the slowest stage faster; others have no stage. Raises InfeasibleError where
        memory holds no stages, saying by how much those that need least exceed it.
        """
        graph, devices = problem.graph, problem.cluster.size
        units = make_units(graph)
        forward, backward = node_seconds(problem.work, problem.cluster.devices[0], problem.precision)
        seconds = forward + backward
        found = decompose(units.needs, [float(seconds[list(nodes)].sum()) for nodes in units.nodes])
        limit = min(max(_BLOCKS_A_DEVICE * devices, _FEWEST_BLOCKS), _MOST_BLOCKS)
        line = make_line(graph, units, found.tree, seconds, limit, devices)
        search = _Sizes(problem, line)
        placement = search.placed(region_notes(graph, units, found.regions))
        check_stages(graph, placement)
        return split_further(problem, placement) if self.intra == "pase" else placement


class _Sizes:
    """The search over sizes of micro-batches."""

    def __init__(self, problem: Problem, line: Line) -> None:
        self.problem, self.line = problem, line
        self.tables: Tables = make_tables(problem, line.chain)
        self.seconds = NodeSeconds(problem, self.tables.samples)
        several = problem.cluster.size > problem.cluster.levels[0].size
        self.close = _CLOSE_AMONG_NODES if several else _CLOSE
        self.solver = Solver(line, problem.cluster.size, problem.train)

    def placed(self, notes: tuple[str, ...]) -> Placement:
        """The best answer's placement; of those that promise about the same, the one whose simulated step is best."""
        answers = sorted(self._answers(), key=lambda answer: answer.step_s)
        least = answers[0].step_s if answers else 0.0
        answers.sort(key=lambda answer: self._at_best(answer) > least)
        best: tuple[float, Placement] | None = None
        close = sum(self._at_best(answer) <= least for answer in answers)
        for tried, answer in enumerate(answers):
            if best is not None and tried >= min(close, _MOST_TRIALS):
                break
            placement = self._placement(answer, notes)
            if close == 1 and best is None and answer.memory <= _ROOM:
                return placement
            seconds, used = trial(self.problem, placement)
            if used <= 1 and (best is None or seconds < best[0]):
                best = seconds, placement
        if best is not None:
            return best[1]
        raise self._too_little_memory()

    def _answers(self) -> Iterator[Answer]:
        problem = self.problem
        devices, batch = problem.cluster.size, problem.batch_size
        loads = {
            size: float(sum(each.sum() for each in self.seconds.of(size, 1))) / devices
            for size in problem.micro_batch_sizes or (problem.micro_batch_size,)
        }
        best = np.inf

        def promise(size: int) -> float:
            # Filling and draining a pipeline takes about as long as a few micro-batches.
            return loads[size] * (batch // size + 2)

        for size in sorted(loads, key=promise):
            limit = best * self.close
            if loads[size] * (batch // size) > limit:
                continue
            for answer in self.solver.answers(self._prices(size), loads[size], limit):
                best = min(best, answer.step_s)
                yield answer

    def _prices(self, size: int, spare: float = 0.0) -> Prices:
        """The prices of a size; each device has its memory limit, and `spare` bytes more."""
        problem, devices = self.problem, self.problem.cluster.size
        shared = bool(problem.graph.batch_axes)
        degrees = [degree for degree in range(1, devices + 1) if size % degree == 0 and (shared or degree == 1)]
        ways = [way for degree in degrees for way in ways_of(self.tables, self.seconds, size, degree)]
        limit = min(map(problem.memory_of, range(devices))) + spare
        return make_prices(ways, size, problem.batch_size // size, limit, devices)

    def _placement(self, answer: Answer, notes: tuple[str, ...]) -> Placement:
        stages = stages_of(self.line.chain, self.tables.samples, self.problem.cluster, answer.drafts, answer.size)
        return Placement(stages, notes=notes)

    def _too_little_memory(self) -> InfeasibleError:
        """The error for the stages that exceed the memory limit by least, on the smallest micro-batches."""
        problem = self.problem
        size = min(problem.micro_batch_sizes or (problem.micro_batch_size,))
        limit = min(map(problem.memory_of, range(problem.cluster.size)))
        low, high = 0.0, float(limit)
        while self._least(size, high) is None:
            low, high = high, 2 * high
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._least(size, middle) else (middle, high)
        answer = self._least(size, high)
        assert answer is not None, "what met the limit meets it again"
        worst = max(range(len(answer.drafts)), key=lambda stage: answer.drafts[stage].memory)
        device = self._placement(answer, ()).stages[worst].devices[0]
        need = max(answer.drafts[worst].memory, problem.memory_of(device) + 1)
        return out_of_memory(problem, [worst], len(answer.drafts), device, need, least=True)

    def _least(self, size: int, spare: float) -> Answer | None:
        """Some answer with so many more bytes of memory on each device."""
        return self.solver.any_answer(self._prices(size, spare))

    def _at_best(self, answer: Answer) -> float:
        """What a step may turn out to take; nothing overlaps in one stage, whose time is known."""
        return answer.step_s / (self.close if len(answer.drafts) > 1 else 1)
