"""The passes that turn a request into a plan, in order: read, cost, place, predict, schedule,
simulate.

`make_plan` runs all passes; the other functions run single passes. A `Runner` measures the time of
each pass and adds the name of the pass to errors.
"""

from autopipe.passes.pipeline.further_options import memory_hints, untried_options
from autopipe.passes.pipeline.placing import Placed, place_given, predict_placement, run_strategy
from autopipe.passes.pipeline.planning import make_plan, pass_names
from autopipe.passes.pipeline.problems import batch_divisions, costed_problem, supported_problems
from autopipe.passes.pipeline.reading import read, read_uncached, with_whole_batch
from autopipe.passes.pipeline.reopening import read_planned_model, reopen_plan
from autopipe.passes.pipeline.request import Request, strategy_and_scheduler
from autopipe.passes.pipeline.result import (
    PlanResult,
    assemble_plan,
    loss_form_costs,
    planned_graph,
    with_other_loss_form,
)
from autopipe.passes.pipeline.runner import Observer, Runner
from autopipe.passes.pipeline.scheduling import (
    Scheduled,
    run_scheduler,
    schedule_placed,
    simulate_schedule,
)

__all__ = [
    "Observer",
    "Placed",
    "PlanResult",
    "Request",
    "Runner",
    "Scheduled",
    "assemble_plan",
    "batch_divisions",
    "costed_problem",
    "loss_form_costs",
    "make_plan",
    "memory_hints",
    "pass_names",
    "place_given",
    "planned_graph",
    "predict_placement",
    "read",
    "read_planned_model",
    "read_uncached",
    "reopen_plan",
    "run_scheduler",
    "run_strategy",
    "schedule_placed",
    "simulate_schedule",
    "strategy_and_scheduler",
    "supported_problems",
    "untried_options",
    "with_other_loss_form",
    "with_whole_batch",
]
