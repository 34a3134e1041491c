"""The passes that turn a request into a plan, in order: read, cost, place, predict, schedule,
simulate.

`make_plan` runs all passes; the other functions run single passes. A `Runner` measures the time of
each pass and adds the name of the pass to errors.
"""

from autopipe.passes.pipeline.further_options import memory_hints, untried_options
from autopipe.passes.pipeline.placing import (
    PredictedPlacement,
    predict_given_placement,
    predict_placement,
    run_strategy,
)
from autopipe.passes.pipeline.planning import make_plan, pass_names
from autopipe.passes.pipeline.problems import batch_divisions, costed_problem, supported_problems
from autopipe.passes.pipeline.reading import (
    read_request_model,
    read_request_model_uncached,
    use_whole_batch,
)
from autopipe.passes.pipeline.reopening import read_planned_model, reopen_plan
from autopipe.passes.pipeline.request import Request, strategy_and_scheduler
from autopipe.passes.pipeline.result import (
    PlanResult,
    add_other_loss_form,
    assemble_plan,
    loss_form_costs,
    planned_graph,
)
from autopipe.passes.pipeline.runner import Observer, Runner
from autopipe.passes.pipeline.scheduling import (
    SimulatedSchedule,
    run_scheduler,
    schedule_placed,
    simulate_schedule,
)

__all__ = [
    "Observer",
    "PlanResult",
    "PredictedPlacement",
    "Request",
    "Runner",
    "SimulatedSchedule",
    "add_other_loss_form",
    "assemble_plan",
    "batch_divisions",
    "costed_problem",
    "loss_form_costs",
    "make_plan",
    "memory_hints",
    "pass_names",
    "planned_graph",
    "predict_given_placement",
    "predict_placement",
    "read_planned_model",
    "read_request_model",
    "read_request_model_uncached",
    "reopen_plan",
    "run_scheduler",
    "run_strategy",
    "schedule_placed",
    "simulate_schedule",
    "strategy_and_scheduler",
    "supported_problems",
    "untried_options",
    "use_whole_batch",
]
