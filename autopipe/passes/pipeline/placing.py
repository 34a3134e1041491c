"""Placements of a request: the strategy's, with predicted times of stages and messages."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopipe.ir.errors import InfeasibleError, OutOfMemoryError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import StageGraph
from autopipe.ir.timeline import Prediction
from autopipe.ir.words import plural
from autopipe.passes.analysis.micro_batches import check_portions
from autopipe.passes.batching import Batching, Division
from autopipe.passes.cost.memory_check import with_copies
from autopipe.passes.cost.stage_work import check_whole_matrices
from autopipe.passes.frontend import Model
from autopipe.passes.pipeline.problems import cost, problems_of
from autopipe.passes.pipeline.request import Request
from autopipe.passes.pipeline.runner import Runner
from autopipe.passes.registry import Strategy
from autopipe.passes.schedule.boundary_gathers import choose_gathers
from autopipe.passes.schedule.predict import predict


@dataclass(frozen=True, slots=True)
class Placed:
    """A placement with its problem and the predicted times of its stages and messages."""

    model: Model
    problem: Problem
    placement: Placement
    graph: StageGraph
    prediction: Prediction


def run_strategy(
    request: Request, strategy: Strategy, runner: Runner
) -> tuple[Model, Problem, Placement]:
    """Return (model, problem, placement) for the first division of the batch that has a placement.

    A strategy with `Division.FEW` starts with the largest micro-batches. If memory does not
    suffice, it tries smaller ones. A strategy that chooses micro-batch sizes gets the model on the
    chosen size (the largest size if stages differ). If the frontend simplifies that model to other
    operators, the strategy runs again. Raises as `make_plan`.
    """

    def answer(problem: Problem) -> Placement:
        return runner.run(
            strategy.name,
            lambda: strategy.run(problem),
            lambda: strategy.requires(problem),
            lambda found: found.verify(problem.graph),
        )

    refused: OutOfMemoryError | None = None
    for model, problem in problems_of(request, strategy, runner):
        try:
            placement = answer(problem)
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
            model, problem = cost(
                request, Batching(problem.batch_size, problem.batch_size // size, sizes), runner
            )
            if [(node.op, node.name, node.outputs) for node in problem.graph.nodes] != known:
                placement = answer(problem)
        return model, problem, placement
    assert refused is not None, "there is a problem, or an error says why not"
    raise refused


def place_as(request: Request, batching: Batching, placement: Placement, runner: Runner) -> Placed:
    """Return a given placement with its problem and predicted times, for a division of the batch.
    Raises as `make_plan`, and InfeasibleError if the placement does not fit the graph.
    """
    model, problem = cost(request, batching, runner)
    if placement.devices > problem.cluster.size:
        raise InfeasibleError(
            f"the placement uses {placement.devices} {plural(placement.devices, 'device')}, but "
            f"the cluster has {problem.cluster.size}"
        )
    placement.verify(problem.graph)
    return predict_placement(model, problem, placement, runner)


def predict_placement(
    model: Model, problem: Problem, placement: Placement, runner: Runner
) -> Placed:
    """Return a placement of the problem's graph with predicted times of stages and messages.

    Stages gather received tensors if that is faster. Raises ConfigurationError or InfeasibleError
    if a stage cannot run on micro-batches of its size.
    """
    check_portions(problem.graph, placement, problem.loss if problem.train else None)
    check_whole_matrices(problem, placement)
    placement = choose_gathers(problem, with_copies(problem, placement))
    prediction = runner.run("predict", lambda: predict(problem, placement))
    return Placed(model, problem, placement, StageGraph.of(problem, placement), prediction)
