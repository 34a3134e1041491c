"""Pipeline stages by integer program, without putting operators in one line (Alibaba PAI, "TePDist", 2023).

Of all divisions whose stages take at most (1 + unbalance) times the mean work, that which sends the fewest bytes
between stages. The best line of operators is where it begins, so that what is found never crosses more.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autopipe.ir.graph import Graph
from autopipe.ir.placement import recomputed_nodes
from autopipe.ir.problem import Problem
from autopipe.passes.placement.tepdist.division.flow import Places, flow_of
from autopipe.passes.placement.tepdist.division.search import DivisionProblem
from autopipe.passes.placement.tepdist.division.windows import Windows, windows_of
from autopipe.passes.solvers.milp import SolverName

_SAME = 1e-9
"""Bytes that differ by no more than this share are equal."""


@dataclass(frozen=True, slots=True)
class StageDivision:
    """The nodes of each stage, ascending, and what is known of how good that is."""

    nodes: tuple[tuple[int, ...], ...]
    crossing_bytes: float
    """Bytes between stages for each micro-batch: every message, and the gradient that comes back for it."""
    bound: float
    """No division, of the groups of operators that were kept together, crosses less; 0 where nothing is proven."""
    unbalance: float
    """By how much, as a share of the mean, the largest stage takes more work than the mean."""
    line_bytes: float
    """Bytes that cross in the best line of operators under the same limit; infinite where there is none."""
    groups: int
    """Groups of operators that the integer program divided."""

    @property
    def proven(self) -> bool:
        """True if the groups cannot be divided better."""
        return self.crossing_bytes <= self.bound * (1 + _SAME)


def divide(
    problem: Problem,
    stages: int,
    unbalance: float,
    settled: Mapping[int, int] | None = None,
    time_limit: float = 30.0,
    solver: SolverName = "auto",
) -> StageDivision:
    """The nodes in `stages` stages, each with work, of which none takes over (1 + `unbalance`) times the mean.

    `settled` nodes are in the stages that are asked for. Stages are numbered so that each reads from earlier ones only.
    Raises ConfigurationError where `settled` allows no division, InfeasibleError where the limit allows none, with the
    smallest unbalance that does.
    """
    flow, nodes = flow_of(problem)
    settled = settled or {}
    windows = windows_of(problem.graph, flow, nodes, stages, settled)
    # In this order a line can have the settled operators where they belong.
    order = np.lexsort((np.arange(flow.operators), windows.last, windows.first))
    flow, nodes = flow.reordered(order), nodes[order]
    windows = Windows(windows.first[order], windows.last[order])
    search = DivisionProblem(flow, stages, windows, unbalance, time.monotonic() + time_limit, solver)
    found = search.run()
    mean = float(flow.work.sum()) / stages
    return StageDivision(
        nodes=_with_shared(problem.graph, nodes, found.stage, stages, settled),
        crossing_bytes=flow.crossing(found.stage),
        bound=found.bound,
        unbalance=float(flow.loads(found.stage, stages).max()) / mean - 1,
        line_bytes=found.line_bytes,
        groups=found.groups,
    )


def _with_shared(
    graph: Graph, nodes: Places, stage: Places, stages: int, settled: Mapping[int, int]
) -> tuple[tuple[int, ...], ...]:
    """The nodes of each stage; those that every reader computes for itself are where they are asked for, or where they
    are read first."""
    found = dict(zip(nodes.tolist(), stage.tolist(), strict=True))
    shared, consumers = recomputed_nodes(graph), graph.consumers()
    for node in sorted(shared, reverse=True):
        readers = [found[reader] for name in graph.nodes[node].outputs for reader in consumers.get(name, ())]
        found[node] = settled.get(node, min(readers, default=0))
    members: list[list[int]] = [[] for _ in range(stages)]
    for node in sorted(found):
        members[found[node]].append(node)
    return tuple(map(tuple, members))
