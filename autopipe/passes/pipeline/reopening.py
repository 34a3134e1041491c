"""Recreation of the problem and the simulated step of a stored plan."""

from __future__ import annotations

from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.graph_file import PlannedGraph
from autopipe.ir.plan import Plan
from autopipe.ir.problem import Mode
from autopipe.ir.schedule import StageGraph
from autopipe.ir.words import plural
from autopipe.passes.analysis.loss_division import form_of_loss, with_loss_totals
from autopipe.passes.batching import Batching
from autopipe.passes.frontend import Model
from autopipe.passes.pipeline.problems import make_problem, node_costs
from autopipe.passes.pipeline.reading import read_request_model_uncached
from autopipe.passes.pipeline.request import Request
from autopipe.passes.pipeline.result import PlanResult
from autopipe.passes.schedule.simulate import simulate


def read_planned_model(request: Request, plan: Plan) -> Model:
    """Return the model of a plan, read with the samples of one of its micro-batches. Raise the
    errors of `read_request_model_uncached`, and InfeasibleError if the loss of the model can no
    longer be divided as in the plan.
    """
    model = read_request_model_uncached(request, plan.summary.micro_batch_size)
    if not plan.loss_division.divided:
        return model
    form = form_of_loss(
        model, lambda size: read_request_model_uncached(request, size, model.source, opened=True)
    )
    return with_loss_totals(model, form, Batching(plan.batch_size, plan.summary.micro_batches))


def _stored_model(request: Request, plan: Plan, stored: PlannedGraph) -> Model:
    """Return the model with the graph that is stored in a plan folder. It lacks the data of the
    ONNX file: parsed nodes, warnings, and the other form of the losses (saved or recomputed
    logits).
    """
    graph = stored.graph
    return Model(
        graph=graph,
        path=request.model,
        digest=stored.model_digest,
        batch=plan.summary.micro_batch_size if graph.batch_axes else None,
        loss=stored.loss,
        mode=Mode(plan.mode) if request.mode is None else request.mode,
        nodes_before=len(graph.nodes),
        configurations=(),
        unsupported=(),
        warnings=(),
        scores=stored.scores,
    )


def reopen_plan(request: Request, plan: Plan, stored: PlannedGraph | None = None) -> PlanResult:
    """Return the plan with its problem, and with a step that is simulated from the predictions of
    the plan.

    The problem is created from the graph `stored` in the plan folder, or from the model's file if
    `stored` is None. `request` must have the mode, the batch size and the micro-batches of the
    plan. Raise ConfigurationError if the plan does not belong to the graph or to the request.
    """
    batching = Batching(plan.batch_size, plan.summary.micro_batches)
    if stored is None:
        model = read_planned_model(request, plan)
        annotated = None
    else:
        model = _stored_model(request, plan, stored)
        annotated = stored.constraints
    work = node_costs(request, model)
    problem = make_problem(request, model, batching, work, plan.loss_division, annotated)
    if problem.graph.digest() != plan.graph_digest:
        raise ConfigurationError(
            (
                f"the plan was made for another model: the graph of {request.model} differs from "
                "the planned graph"
            ),
            hint="plan again, or restore the model file",
        )
    # The user may have edited the plan's files, so their values are checked.
    if problem.mode.value != plan.mode:
        raise ConfigurationError(
            f"the plan is for mode {plan.mode}, but its configuration is for mode "
            f"{problem.mode.value}"
        )
    devices = plan.schedule.devices
    size = problem.cluster.size
    if plan.placement.devices > size or devices != size:
        raise ConfigurationError(
            f"the plan is for {devices} {plural(devices, 'device')}, but its configuration is "
            f"for {size}"
        )
    if max(max(stage.nodes, default=-1) for stage in plan.placement.stages) >= len(
        problem.graph.nodes
    ):
        raise ConfigurationError(
            "the placement contains nodes that do not exist in the graph of "
            f"{len(problem.graph.nodes)} {plural(len(problem.graph.nodes), 'node')}"
        )
    try:
        plan.placement.verify(problem.graph)
        stage_devices = StageGraph.of(problem, plan.placement).stage_devices
    except InfeasibleError as error:
        raise ConfigurationError(error.message, hint="plan again", where="placement") from error
    return PlanResult(
        plan, problem, simulate(plan.schedule, stage_devices, plan.prediction), model, request
    )
