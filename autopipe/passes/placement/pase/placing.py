"""From a problem to a placement in one stage, whichever search chooses the configurations."""

from __future__ import annotations

from collections.abc import Callable

from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.cost.fit import fitted
from autopipe.passes.lower.stages import assign_nodes
from autopipe.passes.placement.pase.ground import Terms
from autopipe.passes.placement.pase.tables import Tables, make_tables
from autopipe.passes.solvers.min_sum import Answer


def in_one_stage(problem: Problem, choose: Callable[[Tables], Answer]) -> Placement:
    """The model over all devices as `choose` answers its tables. Raises InfeasibleError where memory does not do."""
    graph = problem.graph
    devices = tuple(range(problem.cluster.size))
    stage = Stage(tuple(range(len(graph.nodes))), devices, problem.micro_batch_size)
    wanted = (problem.loss,) if problem.train and problem.loss is not None else graph.outputs
    (plan,) = assign_nodes(graph, Placement((stage,)), wanted)
    tables = make_tables(problem, [node for node, _ in plan.nodes], devices, Terms(given=frozenset(plan.outputs)))
    splits = tables.splits(choose(tables).choice)
    return fitted(problem, Placement((Stage(stage.nodes, devices, problem.micro_batch_size, splits),)))
