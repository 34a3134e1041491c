"""The plan that is chosen where a request leaves the strategy open."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import partial

from autopipe.ir.codec import JsonRecord
from autopipe.ir.errors import AutopipeError
from autopipe.passes.auto.ahead import SpeculativePool, free_cores
from autopipe.passes.auto.answers import FORMAT, answer_form, answer_of
from autopipe.passes.auto.candidates import candidates, strategies_of
from autopipe.passes.auto.first import first_candidate
from autopipe.passes.auto.keys import answer_key
from autopipe.passes.auto.memory import may_be_short
from autopipe.passes.auto.narrowed import refine
from autopipe.passes.auto.search import PlanSearch
from autopipe.passes.auto.store import Store
from autopipe.passes.auto.variations import foreseeable, variations
from autopipe.passes.base import Scheduler
from autopipe.passes.pipeline import PlanResult, assemble_plan
from autopipe.passes.registry import SCHEDULERS, scheduler_class, scheduler_names
from autopipe.passes.request import Request, first_model, open_problem
from autopipe.passes.runner import NullObserver, Observer, Runner

_FIRST = ("kfkb", "1f1b", "gpipe")
"""Schedules that take any placement of whole micro-batches: kFkB also those of stages with their own."""
_LAST = ("tessel",)
"""Schedules that are searched: they take longest, and need not be asked where another one meets the bound."""


def choose(request: Request, observer: Observer | None = None, store: Store | None = None) -> PlanResult:
    """The plan with the shortest simulated step that any candidate gives, with what came of the others.

    What `store` holds for the same request is not searched again. Raises what speaks against the first candidates
    where none has a plan.
    """
    runner = Runner(observer or NullObserver())
    if store is None:
        return _searched(request, runner)
    name = answer_key(request, first_model(request, runner))
    kept = _kept(request, runner, store.read(name, FORMAT))
    if kept is not None:
        return kept
    found = _searched(request, runner)
    # What was found in a limited time, or past a mistake of ours, may not be the best.
    if request.time_limit is None and not runner.failures:
        store.write(name, answer_form(found))
    return found


def _kept(request: Request, runner: Runner, record: JsonRecord | None) -> PlanResult | None:
    """The plan that a kept answer gives; None where there is none, or what is kept is not right."""
    try:
        return None if record is None else answer_of(record, request, runner)
    except (AutopipeError, ArithmeticError, LookupError, TypeError, ValueError):
        return None  # Whatever a damaged file says, there is a plan without it.


def _searched(request: Request, runner: Runner) -> PlanResult:
    return chosen(weigh(request, runner), runner)


def chosen(search: PlanSearch, runner: Runner) -> PlanResult:
    """The best plan of a search, with what came of the others."""
    request, best = search.request, search.best
    assert best is not None
    assert best.placed is not None
    run = best.best
    assert run is not None and run.scheduled is not None
    settled = best.candidate.settled(request)
    found = assemble_plan(settled, best.candidate.strategy, run.scheduler, best.placed, run.scheduled, runner)
    rows = tuple(row for each in search.tried for row in each.alternatives(request))
    return dataclasses.replace(found, plan=dataclasses.replace(found.plan, alternatives=rows))


def weigh(request: Request, runner: Runner, clock: Callable[[], float] = time.monotonic) -> PlanSearch:
    """All that is tried for a request, with a best plan among it.

    Candidates are weighed twice: each is placed, and its step simulated under one schedule; then all schedules are
    tried on those whose placement bears a shorter step than the best so far. By `clock` no new one is begun once the
    request's time is over and there is a plan. Raises as `choose` does.
    """
    end = None if request.time_limit is None else clock() + request.time_limit
    with SpeculativePool(free_cores()) as ahead:
        search = PlanSearch(request, runner, partial(_schedulers, request), end, clock, ahead)
        first = first_candidate(request, first_model(request, runner).graph)
        search.try_all(() if first is None else (first,))
        problem = open_problem(request, runner)
        # One batch for all, or steps tell nothing.
        search.request = request = dataclasses.replace(request, batch_size=problem.batch_size)
        short = problem.train and may_be_short(problem)
        every = tuple(candidates(request, short and request.recompute is None))
        search.expect(every)
        search.expect(foreseeable(every, problem, request))
        search.try_all(every)
        search.try_all(variations(search, problem, short))
        finer = tuple(refine(search))
        search.expect(finer)
        search.try_all(finer)
        search.schedule_all()
    if search.best is None:
        raise search.reason()
    return search


def weighed_names(request: Request) -> tuple[str, ...]:
    """The passes that run while `choose` weighs candidates, about in the order in which they first do."""
    if request.scheduler is not None:
        schedulers: tuple[str, ...] = (request.scheduler.name,)
    else:
        schedulers = tuple(name if name in SCHEDULERS else scheduler_class(name).name for name in _scheduler_names())
    return ("read", "cost", *strategies_of(request), "predict", *schedulers, "simulate")


def _schedulers(request: Request) -> Iterator[Scheduler]:
    """The schedules that may be taken: the one that is named, or all, those that are searched last."""
    if request.scheduler is not None:
        yield request.scheduler
    else:
        yield from (scheduler_class(name)() for name in _scheduler_names())


def _scheduler_names() -> tuple[str, ...]:
    # csv follows a file that somebody names.
    middle = [name for name in scheduler_names() if name not in (*_FIRST, *_LAST, "csv")]
    return (*_FIRST, *middle, *_LAST)
