"""The same problem on micro-batches of another size."""

from __future__ import annotations

from dataclasses import replace

from autopipe.ir.batch import rebatched
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.ir.problem import Problem
from autopipe.passes.cost.measured import costed_work


@remembered(GRAPHS)
def resized(problem: Problem, size: int) -> Problem:
    """The problem with the graph and work of `size` samples, of which a step has as many micro-batches as it takes.

    Nodes keep their indices. Raises ConfigurationError where `size` does not divide the micro-batch, ModelError where
    the graph's samples are not alike: see `rebatched`.
    """
    if size == problem.micro_batch_size:
        return problem
    graph = rebatched(problem.graph, size)
    return replace(
        problem,
        graph=graph,
        work=costed_work(graph, problem.precision, problem.cluster, problem.costs),
        micro_batches=problem.batch_size // size,
        micro_batch_sizes=tuple(each for each in problem.micro_batch_sizes if size % each == 0),
    )
