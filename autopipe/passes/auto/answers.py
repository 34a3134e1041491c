"""An answer as it is kept between runs, and the plan that is made of it again.

What is kept is what was decided. All else is worked out anew from the model, and has to come to the same step.
"""

from __future__ import annotations

import dataclasses
import json
import math

from autopipe.ir.codec import JsonRecord
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.plan import Alternative
from autopipe.ir.plan_file import alternatives_form, alternatives_of
from autopipe.passes.auto.candidate import Candidate
from autopipe.passes.auto.decided import PlacementDecision, decode_decision, encode_decision
from autopipe.passes.auto.ordered import schedule_form, schedule_of
from autopipe.passes.batching import Batching
from autopipe.passes.pipeline import PlanResult, assemble_plan, place_as, verify_and_simulate
from autopipe.passes.registry import scheduler_class, strategy_class
from autopipe.passes.request import Request
from autopipe.passes.runner import Runner

FORMAT = "autopipe.answer/1"


def answer_form(found: PlanResult) -> dict[str, object]:
    """Decisions as lists, dicts and scalars. `found.plan.alternatives` has the choice that was best."""
    plan = found.plan
    chosen = min(plan.alternatives, key=lambda each: math.inf if each.step_time_s is None else each.step_time_s)
    batching = Batching(plan.batch_size, plan.summary.micro_batches, found.problem.micro_batch_sizes)
    return {
        "format": FORMAT,
        "graph_digest": plan.graph_digest,
        "chosen": alternatives_form((chosen,)),
        "decided": encode_decision(PlacementDecision(plan.placement, batching)),
        "step_time_s": plan.summary.step_time_s,
        "schedule": schedule_form(plan.schedule),
        "alternatives": alternatives_form(plan.alternatives),
    }


def answer_of(record: JsonRecord, request: Request, runner: Runner) -> PlanResult:
    """The plan that was found for `request`, made again.

    Raises AutopipeError where what is kept cannot be read, or does not give the plan that it is said to; numbers that
    make no sense may raise Python's own errors.
    """
    (chosen,) = alternatives_of(record.at("chosen"))
    decided = decode_decision(record.at("decided"))
    candidate = _candidate_of(chosen)
    settled = candidate.settled(dataclasses.replace(request, batch_size=decided.batching.batch_size))
    placed = place_as(settled, decided.batching, decided.placement, runner)
    if placed.problem.graph.digest() != record.at("graph_digest").text():
        raise ConfigurationError("the graph is not the one that was planned", where=record.file)
    scheduler = request.scheduler or scheduler_class(chosen.choice.schedule or "")()
    scheduled = verify_and_simulate(placed, schedule_of(record.at("schedule")), runner)
    if scheduled.timeline.end != record.at("step_time_s").number():
        raise ConfigurationError("the step is not the one that was planned", where=record.file)
    found = assemble_plan(settled, candidate.strategy, scheduler, placed, scheduled, runner)
    rows = alternatives_of(record.at("alternatives"))
    return dataclasses.replace(found, plan=dataclasses.replace(found.plan, alternatives=rows))


def _candidate_of(chosen: Alternative) -> Candidate:
    choice = chosen.choice
    options = {name: _option(value) for name, value in choice.options}
    try:
        strategy = strategy_class(choice.strategy)(**options)
    except TypeError as error:
        raise ConfigurationError(f"{choice.strategy} has no such options: {error}") from error
    return Candidate(strategy, choice.micro_batches, choice.recompute, choice.shard)


def _option(text: str) -> object:
    """The value that an option of a choice spells: JSON's spelling, or a text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text
