"""Runs all passes in order, from a request that names strategy and scheduler to its plan."""

from __future__ import annotations

from dataclasses import replace

from autopipe.ir.errors import InfeasibleError, OutOfMemoryError
from autopipe.passes.cost.loss_scores import may_exceed_memory
from autopipe.passes.pipeline.further_options import memory_hints
from autopipe.passes.pipeline.placing import PredictedPlacement
from autopipe.passes.pipeline.reading import read_request_model, use_whole_batch
from autopipe.passes.pipeline.request import Request, strategy_and_scheduler
from autopipe.passes.pipeline.result import (
    PlanResult,
    add_other_loss_form,
    assemble_plan,
    loss_form_costs,
)
from autopipe.passes.pipeline.runner import Observer, Runner
from autopipe.passes.pipeline.scheduling import SimulatedSchedule, place_and_schedule


def make_plan(
    request: Request, observer: Observer | None = None, advise: bool = False
) -> PlanResult:
    """Return the plan of a request that names strategy and scheduler: read the model, compute
    costs, place, schedule, and simulate a step.

    If the request leaves open whether losses save or recompute their logits, a plan that saves them
    is made first. A second plan that recomputes them is made if memory may not suffice or if
    recomputation is faster for the loss itself. The plan with the shorter step time per sample is
    returned. Raise ConfigurationError, ModelError or InfeasibleError; the error names the pass
    unless it has another location. With `advise`, the hint of an OutOfMemoryError names options
    with which the plan fits, if they are found within about `_OPTIONS_S` seconds.
    """
    runner = Runner(observer)
    request = use_whole_batch(request, runner)
    try:
        return _make_best_plan(request, runner)
    except OutOfMemoryError as error:
        if advise:
            error.hint = "; ".join((*memory_hints(request, runner), error.hint))
        raise


def _make_best_plan(request: Request, runner: Runner) -> PlanResult:
    """Return the plan of a request whose batch size is known, with the form of the losses (saved or
    recomputed logits) that gives the shorter step per sample.
    """
    if request.scores is not None or read_request_model(request, runner).other is None:
        return assemble_plan(request, *place_and_schedule(request, runner), runner)
    keeping = replace(request, scores="keep")
    recomputing = replace(request, scores="recompute")
    kept: tuple[PredictedPlacement, SimulatedSchedule] | None = None
    refused: str | None = None
    try:
        kept = place_and_schedule(keeping, runner)
    except InfeasibleError as error:
        refused = error.line
    if kept is not None and not _may_gain_by_recomputing(kept[0]):
        return assemble_plan(keeping, *kept, runner)
    try:
        recomputed = place_and_schedule(recomputing, runner)
    except InfeasibleError as error:
        if kept is None:
            raise
        return add_other_loss_form(assemble_plan(keeping, *kept, runner), refused=error.line)
    if kept is None or _seconds_per_sample(recomputed) < _seconds_per_sample(kept):
        result = assemble_plan(recomputing, *recomputed, runner)
        return add_other_loss_form(result, kept and kept[1].timeline.end, refused)
    return add_other_loss_form(assemble_plan(keeping, *kept, runner), recomputed[1].timeline.end)


def _may_gain_by_recomputing(kept: PredictedPlacement) -> bool:
    """True if a plan that recomputes logits could have a shorter step than `kept`, which saves
    them.
    """
    found = loss_form_costs(kept)
    return found is None or found.recompute_s < found.keep_s or may_exceed_memory(kept.problem)


def _seconds_per_sample(planned: tuple[PredictedPlacement, SimulatedSchedule]) -> float:
    """Return the seconds of a step divided by its samples. Plans with different forms of the losses
    may have different batch sizes if the request leaves the batch size open.
    """
    placed, scheduled = planned
    return scheduled.timeline.end / placed.problem.batch_size


def pass_names(request: Request) -> tuple[str, ...]:
    """Return the names of the passes of `make_plan`, in the order in which they run."""
    strategy, scheduler = strategy_and_scheduler(request)
    return ("read", "cost", strategy.name, "predict", scheduler.name, "simulate")
