"""The passes that turn a request into a plan, in order: read, cost, place, predict, schedule,
simulate.

`make_plan` runs all passes; the other functions run single passes. A `Runner` measures the time of
each pass and adds the name of the pass to errors.
"""

from autopipe.passes.pipeline.further_options import memory_options, untried_options
from autopipe.passes.pipeline.placing import Placed, place_as, predict_placement, run_strategy
from autopipe.passes.pipeline.planning import make_plan, pass_names
from autopipe.passes.pipeline.problems import cost, divisions, problems_of
from autopipe.passes.pipeline.reading import read, read_for, with_whole_batch
from autopipe.passes.pipeline.reopening import read_planned, reopen
from autopipe.passes.pipeline.request import Request, strategy_and_scheduler
from autopipe.passes.pipeline.result import (
    PlanResult,
    assemble_plan,
    planned_graph,
    scores_of,
    with_other_scores,
)
from autopipe.passes.pipeline.runner import Observer, Runner
from autopipe.passes.pipeline.scheduling import (
    Scheduled,
    run_scheduler,
    schedule_placed,
    time_schedule,
)

__all__ = [
    "Observer",
    "Placed",
    "PlanResult",
    "Request",
    "Runner",
    "Scheduled",
    "assemble_plan",
    "cost",
    "divisions",
    "make_plan",
    "memory_options",
    "pass_names",
    "place_as",
    "planned_graph",
    "predict_placement",
    "problems_of",
    "read",
    "read_for",
    "read_planned",
    "reopen",
    "run_scheduler",
    "run_strategy",
    "schedule_placed",
    "scores_of",
    "strategy_and_scheduler",
    "time_schedule",
    "untried_options",
    "with_other_scores",
    "with_whole_batch",
]
