"""Placements of a request: the result of a strategy, with the predicted times of stages and
messages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopipe.ir.errors import InfeasibleError, OutOfMemoryError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import StageGraph
from autopipe.ir.timeline import Prediction
from autopipe.ir.words import plural
from autopipe.passes.analysis.micro_batches import check_micro_batch_sizes
from autopipe.passes.batching import Batching, Division
from autopipe.passes.cost.memory_check import with_16_bit_copies
from autopipe.passes.cost.stage_work import check_unsharded_matrices
from autopipe.passes.frontend import Model
from autopipe.passes.pipeline.problems import costed_problem, supported_problems
from autopipe.passes.pipeline.request import Request
from autopipe.passes.pipeline.runner import Runner
from autopipe.passes.registry import Strategy
from autopipe.passes.schedule.boundary_gathers import choose_gathers
from autopipe.passes.schedule.predict import predict


@dataclass(frozen=True, slots=True)
class PredictedPlacement:
    """A placement with its problem, and with the predicted times of its stages and messages."""

    model: Model
    problem: Problem
    placement: Placement
    graph: StageGraph
    prediction: Prediction


def run_strategy(
    request: Request, strategy: Strategy, runner: Runner
) -> tuple[Model, Problem, Placement]:
    """Return (model, problem, placement) for the first division of the batch into micro-batches for
    which the strategy finds a placement.

    A strategy with `Division.FEW` starts with the largest micro-batches, and tries smaller ones if
    memory does not suffice. If the strategy chooses micro-batch sizes, the returned model is read
    with the chosen size (the least common multiple if the sizes of stages differ). If the frontend
    simplifies that model to other operators, the strategy runs again. Raise the errors of
    `make_plan`.
    """

    def place(problem: Problem) -> Placement:
        """Return the verified placement of the strategy."""
        return runner.run(
            strategy.name,
            lambda: strategy.run(problem),
            lambda: strategy.requires(problem),
            lambda found: found.verify(problem.graph),
        )

    refused: OutOfMemoryError | None = None
    for model, problem in supported_problems(request, strategy, runner):
        try:
            placement = place(problem)
        except OutOfMemoryError as error:
            if strategy.division(problem.graph) is not Division.FEW:
                raise
            refused = error
            continue
        while problem.micro_batch_sizes:
            size = math.lcm(*(stage.micro_batch_size for stage in placement.stages))
            if size == problem.micro_batch_size:
                break
            sizes = tuple(each for each in problem.micro_batch_sizes if size % each == 0)
            known = [(node.op, node.name, node.outputs) for node in problem.graph.nodes]
            model, problem = costed_problem(
                request, Batching(problem.batch_size, problem.batch_size // size, sizes), runner
            )
            if [(node.op, node.name, node.outputs) for node in problem.graph.nodes] != known:
                placement = place(problem)
        return model, problem, placement
    assert refused is not None, "there is a problem, or an error says why not"
    raise refused


def predict_given_placement(
    request: Request, batching: Batching, placement: Placement, runner: Runner
) -> PredictedPlacement:
    """Return the given `placement` with its problem and predicted times, for the division of the
    batch `batching`. Raise the errors of `make_plan`, and InfeasibleError if the placement needs
    more devices or does not fit the graph.
    """
    model, problem = costed_problem(request, batching, runner)
    if placement.devices > problem.cluster.size:
        raise InfeasibleError(
            f"the placement uses {placement.devices} {plural(placement.devices, 'device')}, but "
            f"the cluster has {problem.cluster.size}"
        )
    placement.verify(problem.graph)
    return predict_placement(model, problem, placement, runner)


def predict_placement(
    model: Model, problem: Problem, placement: Placement, runner: Runner
) -> PredictedPlacement:
    """Return a placement of the problem's graph with the predicted times of its stages and
    messages.

    Stages gather received tensors if that is faster than receiving them in full. Raise
    ConfigurationError or InfeasibleError if a stage cannot run on micro-batches of its size.
    """
    check_micro_batch_sizes(problem.graph, placement, problem.loss if problem.train else None)
    check_unsharded_matrices(problem, placement)
    placement = choose_gathers(problem, with_16_bit_copies(problem, placement))
    prediction = runner.run("predict", lambda: predict(problem, placement))
    return PredictedPlacement(
        model, problem, placement, StageGraph.of(problem, placement), prediction
    )
