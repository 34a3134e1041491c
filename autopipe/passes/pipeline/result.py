"""The result of planning: the plan with its problem, its simulated step and its request."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopipe.ir.graph_file import PlannedGraph
from autopipe.ir.plan import LossScores, Plan, plan_digest
from autopipe.ir.problem import Problem
from autopipe.ir.timeline import Timeline
from autopipe.passes.cost.loss_scores import compare_scores
from autopipe.passes.frontend import Model
from autopipe.passes.pipeline.placing import PredictedPlacement
from autopipe.passes.pipeline.request import Request, strategy_and_scheduler
from autopipe.passes.pipeline.runner import Runner
from autopipe.passes.pipeline.scheduling import SimulatedSchedule


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A plan with its problem, its simulated step, its model, and a request from which an equal
    plan follows. This request names the strategy and the scheduler.
    """

    plan: Plan
    problem: Problem
    timeline: Timeline
    model: Model
    request: Request

    @property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of the decisions and the graph of the plan. Search times do not
        affect it.
        """
        return plan_digest(self.plan)


def assemble_plan(
    request: Request, placed: PredictedPlacement, scheduled: SimulatedSchedule, runner: Runner
) -> PlanResult:
    """Return the plan of a request that names strategy and scheduler, given the placement and the
    schedule.
    """
    from autopipe.passes.degrees import open_degrees

    # This import loads all of lowering, which the candidates of a search do not need, so it is not
    # at the top of the module.
    from autopipe.passes.summary import finished_plan

    strategy, scheduler = strategy_and_scheduler(request)
    problem = placed.problem
    timeline = scheduled.timeline
    step = placed.placement, placed.prediction, scheduled.schedule, timeline
    names = strategy.name, scheduler.name
    plan = finished_plan(
        request.model,
        names,
        problem,
        *step,
        tuple(runner.seconds.items()),
        loss_form_costs(placed),
        open_degrees(strategy),
    )
    return PlanResult(plan, problem, timeline, placed.model, request)


def loss_form_costs(placed: PredictedPlacement) -> LossScores | None:
    """Return the costs of both forms of the losses (saved or recomputed logits); None if the losses
    have only one form.
    """
    other = placed.model.other
    return None if other is None else compare_scores(placed.problem, other, placed.model.scores)


def add_other_loss_form(
    result: PlanResult, step_s: float | None = None, refused: str | None = None
) -> PlanResult:
    """Return the result with data about the plan with the other form of the losses (saved or
    recomputed logits): its step time `step_s` in seconds, or the reason `refused` why there is no
    such plan.
    """
    scores = result.plan.summary.scores
    if scores is None:
        return result
    summary = replace(
        result.plan.summary, scores=replace(scores, other_step_s=step_s, other_refused=refused)
    )
    return replace(result, plan=replace(result.plan, summary=summary))


def planned_graph(planned: PlanResult) -> PlannedGraph:
    """Return the graph of a plan, with the data that `reopen_plan` needs to create the problem
    again.
    """
    own = len(planned.request.constraints)
    return PlannedGraph(
        graph=planned.problem.graph,
        model_digest=planned.model.digest,
        loss=planned.model.loss,
        scores=planned.model.scores,
        constraints=planned.problem.constraints[own:],
    )
