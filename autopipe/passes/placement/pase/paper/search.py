"""Paper mode from a problem to its answer: the graph, the tables, the solver."""

from __future__ import annotations

from collections.abc import Callable

from autopipe.ir.problem import Problem
from autopipe.passes.placement.pase.paper.costs import WORD_OPERATIONS
from autopipe.passes.placement.pase.paper.samples import data_parallel
from autopipe.passes.placement.pase.paper.strategy import PaperStrategy, cost_of, find_strategy
from autopipe.passes.placement.pase.paper.tables import PaperTables, build_tables
from autopipe.passes.placement.pase.paper.view import layer_graph
from autopipe.passes.solvers.min_sum import Assignment, MinSum, solve


def tables_of(problem: Problem, rate: float = WORD_OPERATIONS) -> PaperTables:
    """The paper's costs of a problem's graph on all devices of its cluster; `rate` is r, operations a word."""
    return build_tables(layer_graph(problem.graph), problem.cluster.size, rate)


def search(
    problem: Problem, solver: Callable[[MinSum], Assignment] = solve, rate: float = WORD_OPERATIONS
) -> PaperStrategy:
    """The best strategy in the paper's space; `placing.placement_of` makes a placement of it."""
    return find_strategy(tables_of(problem, rate), solver)


def data_parallel_cost(problem: Problem, rate: float = WORD_OPERATIONS) -> float:
    """Cost of data parallelism under the same model."""
    layers = layer_graph(problem.graph)
    return cost_of(layers, data_parallel(problem.graph, layers, problem.cluster.size), rate)
