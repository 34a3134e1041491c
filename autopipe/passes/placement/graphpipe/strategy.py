"""GraphPipe: the strategy and its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.batching import Division
from autopipe.passes.cost.chain_tables import Tables, make_tables
from autopipe.passes.cost.fit import check_operators
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.placement.graphpipe.line import Line, make_line
from autopipe.passes.placement.graphpipe.prices import make_prices
from autopipe.passes.placement.graphpipe.seconds import NodeSeconds
from autopipe.passes.placement.graphpipe.solve import Answer, Solver
from autopipe.passes.placement.graphpipe.stages import placement_of
from autopipe.passes.placement.graphpipe.tree import decompose
from autopipe.passes.placement.graphpipe.units import make_units

_BLOCKS_A_DEVICE = 24
_FEWEST_BLOCKS, _MOST_BLOCKS = 96, 224
"""Into how many blocks a graph is joined: the search's time grows with their square."""


@dataclass(frozen=True, slots=True)
class GraphPipe:
    """Cuts the model's series-parallel graph into stages that take equally long, branches beside one another."""

    name: ClassVar[str] = "graphpipe"

    def division(self, graph: Graph) -> Division:
        """It chooses the size of micro-batches."""
        return Division.OWN

    def requires(self, problem: Problem) -> None:
        """Raise InfeasibleError where there is nothing to place."""
        check_operators(problem)

    def run(self, problem: Problem) -> Placement:
        """The placement with the least expected step time.

        Raises InfeasibleError where memory holds none.
        """
        limit = min(max(_BLOCKS_A_DEVICE * problem.cluster.size, _FEWEST_BLOCKS), _MOST_BLOCKS)
        units = make_units(problem.graph)
        forward, backward = node_seconds(problem.work, problem.cluster.devices[0], problem.precision)
        seconds = forward + backward
        weights = [float(seconds[list(nodes)].sum()) for nodes in units.nodes]
        found = decompose(units.needs, weights)
        line = make_line(problem.graph, units, found.tree, seconds, limit, problem.cluster.size)
        needs = [0] * line.chain.blocks
        for unit, need in zip(units.nodes, units.needs, strict=True):
            block = int(line.chain.block_of[unit[0]])
            for other in range(len(units.nodes)):
                if need >> other & 1:
                    needs[block] |= 1 << int(line.chain.block_of[units.nodes[other][0]])
        tables = make_tables(problem, line.chain)
        best = self._best(problem, line, tables, tuple(needs))
        if best is None:
            raise InfeasibleError("memory")
        return placement_of(line.chain, tables.samples, problem.cluster, best.drafts, best.size)

    def _best(self, problem: Problem, line: Line, tables: Tables, needs: tuple[int, ...]) -> Answer | None:
        solver = Solver(line, needs, problem.cluster.size)
        node = NodeSeconds(problem, tables.samples)
        best: Answer | None = None
        loads = {}
        for size in problem.micro_batch_sizes or (problem.micro_batch_size,):
            ahead, back = node.of(size, 1)
            loads[size] = float((ahead + back).sum())
        count = problem.cluster.size

        def promise(size: int) -> float:
            return loads[size] * (problem.batch_size / size / count + 0.25)

        for size in sorted(loads, key=promise):
            limit = best.step_s if best else np.inf
            if loads[size] / count * (problem.batch_size // size) > limit:
                continue
            degrees = tuple(d for d in range(1, count + 1) if size % d == 0) if problem.graph.batch_axes else (1,)
            prices = make_prices(tables, node, size, degrees, count)
            for answer in solver.answers(prices, loads[size] / count, limit):
                if best is None or answer.step_s < best.step_s:
                    best = answer
        return best
