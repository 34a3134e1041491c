"""The plan that is chosen where a request leaves the strategy open.

A rule of thumb gives the first candidate, then come all strategies; other numbers of micro-batches,
recomputation and shared state are tried for what these results promise most for, at last all
schedules.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from autopipe.ir.errors import (
    REFUSALS,
    AutopipeError,
    ConfigurationError,
    InfeasibleError,
    OutOfMemoryError,
)
from autopipe.ir.graph import Graph
from autopipe.ir.problem import SCORES, Problem
from autopipe.passes.analysis.constraints import resolved_constraints
from autopipe.passes.auto.candidates import (
    Candidate,
    LeftOutError,
    candidates,
    may_suit,
    strategies_of,
)
from autopipe.passes.auto.plan_cache import (
    FORMAT,
    Store,
    answer_form,
    answer_key,
    answer_of,
    with_alternatives,
)
from autopipe.passes.auto.search import CandidateTrial, PlanSearch
from autopipe.passes.auto.workers import SpeculativePool, free_cores
from autopipe.passes.batching import AUTO_PER_DEVICE, Division, climb, divisors
from autopipe.passes.cost.loss_scores import compare_scores, may_be_short
from autopipe.passes.cost.stage_work import holders_of, stage_work
from autopipe.passes.pipeline import (
    Observer,
    PlanResult,
    Request,
    Runner,
    assemble_plan,
    cost,
    divisions,
    read,
    with_whole_batch,
)
from autopipe.passes.placement.grid import Grid
from autopipe.passes.registry import SCHEDULERS, scheduler_class, scheduler_names

_FIRST = ("kfkb", "1f1b", "gpipe")
"""Schedules that take any placement of whole micro-batches: kFkB also those of stages with their
own.
"""
_LAST = ("tessel",)
"""Schedules that are searched: they take longest, and need not be asked where another one meets the
bound.
"""


def choose(
    request: Request, observer: Observer | None = None, store: Store | None = None
) -> PlanResult:
    """The plan with the shortest simulated step that any candidate gives, with what came of the
    others. What `store` holds for the same request is not searched again. Raises what speaks
    against the first candidates where none has a plan.
    """
    runner = Runner(observer)
    if store is None:
        return _searched(request, runner)
    name = answer_key(request, read(request, runner))
    record = store.read(name, FORMAT)
    try:
        if record is not None:
            return answer_of(record, request, runner)
    except (AutopipeError, ArithmeticError, LookupError, TypeError, ValueError):
        pass  # Whatever a damaged file says, there is a plan without it.
    found = _searched(request, runner)
    # What was found in a limited time, or past a mistake of ours, may not be the best.
    if request.time_limit is None and not runner.failures:
        store.write(name, answer_form(found))
    return found


def _searched(request: Request, runner: Runner) -> PlanResult:
    return chosen(weigh(request, runner))


def chosen(search: PlanSearch) -> PlanResult:
    """The best plan of a search, with what came of the others."""
    best = search.best
    assert best is not None and best.placed is not None
    run = best.best
    assert run is not None and run.scheduled is not None
    named = replace(best.candidate.settled(search.request), scheduler=run.scheduler)
    found = assemble_plan(named, best.placed, run.scheduled, search.runner)
    return with_alternatives(
        found, tuple(row for each in search.trials for row in each.alternatives(search.request))
    )


def weigh(
    request: Request, runner: Runner, clock: Callable[[], float] = time.monotonic
) -> PlanSearch:
    """All that is tried for a request, with a best plan among it. Candidates are weighed twice:
    each is placed, and its step simulated under one schedule; then all schedules are tried on those
    whose placement bears a shorter step than the best so far. By `clock` no new one is begun once
    the request's time is over and there is a plan. Raises as `choose` does.
    """
    end = None if request.time_limit is None else clock() + request.time_limit
    request = with_whole_batch(request, runner)
    request, scores_open = _with_scores(request, runner)
    with SpeculativePool(free_cores()) as pool:
        search = PlanSearch(request, runner, _scheduler_names(), end, clock, pool)
        first = first_candidate(request, read(request, runner).graph)
        search.try_all(() if first is None else (first,))
        problem = open_problem(request, runner)
        # One batch for all, or steps tell nothing.
        search.request = request = replace(request, batch_size=problem.batch_size)
        short = problem.train and may_be_short(problem)
        every = tuple(
            candidates(replace(request, mode=problem.mode), short and request.recompute is None)
        )
        search.expect(every)
        search.expect(foreseeable(every, problem, request))
        search.try_all(every)
        try_variations(search, problem, short, scores_open)
        finer = tuple(refine(search))
        search.expect(finer)
        search.try_all(finer)
        search.schedule_all()
    if search.best is None:
        raise search.reason()
    return search


def weighed_names(request: Request) -> tuple[str, ...]:
    """The passes that run while `choose` weighs candidates, about in the order in which they first
    do.
    """
    schedulers = [
        name if name in SCHEDULERS else scheduler_class(name).name for name in _scheduler_names()
    ]
    if request.scheduler is not None:
        schedulers = [request.scheduler.name]
    return ("read", "cost", *strategies_of(request), "predict", *schedulers, "simulate")


def _scheduler_names() -> tuple[str, ...]:
    """All schedules that may be taken, those that are searched last. csv follows a file that
    somebody names.
    """
    middle = [name for name in scheduler_names() if name not in (*_FIRST, *_LAST, "csv")]
    return (*_FIRST, *middle, *_LAST)


def _with_scores(request: Request, runner: Runner) -> tuple[Request, bool]:
    """Return (request, open) with the form of the losses that candidates have first.

    request: with the faster form of the losses, each by itself; unchanged if the model or the
    request has one form. open: True if that form keeps scores, so that candidates short of memory
    are tried with recomputed scores, too.
    """
    model = read(request, runner)
    if request.scores is not None or model.other is None:
        return request, False
    problem, other = (open_problem(replace(request, scores=scores), runner) for scores in SCORES)
    found = compare_scores(problem, other.graph, "keep")
    keeps = found.keep_s <= found.recompute_s
    return replace(request, scores="keep" if keeps else "recompute"), keeps


def open_problem(request: Request, runner: Runner) -> Problem:
    """The problem with the largest micro-batches that the model takes, whatever the strategy.
    Raises what is wrong with the request itself: its model, its batch, its constraints.
    """
    refused: AutopipeError | None = None
    try:
        for batching in divisions(request, Division.OWN, read(request, runner)):
            try:
                _, problem = cost(request, batching, runner)
            except REFUSALS as error:
                refused = refused or error
                continue
            pipelines = 1 + max((each.pipeline for each in problem.constraints), default=0)
            resolved_constraints(problem, pipelines, own_sizes=True)
            return problem
    except ConfigurationError:
        if not isinstance(refused, InfeasibleError):
            raise
    assert refused is not None, "there is a division, or an error says why not"
    raise refused


_SHARE = (
    1 / 4
)  # The part of a device's memory that parameters and what is kept beside them may fill.
_PER_STAGE = 4  # Micro-batches a stage, about: a pipeline then idles a fifth of the step.
_FEWEST = 16  # Micro-batches of few stages: one stage needs all at once that backward needs of one.


def first_candidate(request: Request, graph: Graph) -> Candidate | None:
    """The devices of a node share each layer; as few stages as memory allows, and replicas of
    those. Stages run their forward again where memory asks for it. None where the request says
    otherwise, the schedule cannot run such stages, or the batch cannot be shared so.
    """
    if (
        request.batch_size is None
        or request.micro_batches
        or request.micro_batch_size
        or request.constraints
    ):
        return None
    if not may_suit(request, Grid.name, {}):
        return None
    cluster = request.cluster
    tensor = max(each for each in divisors(cluster.size) if each <= cluster.devices_per_node)
    state = sum(parameter.value.bytes for parameter in graph.parameters) * (
        2 + request.optimizer.states + (request.training.ema_decay is not None)
    )
    limit = request.memory_limit or min(device.memory_bytes for device in cluster.devices)
    groups = cluster.size // tensor
    stages = [count for count in divisors(groups) if state / (count * tensor) <= _SHARE * limit]
    pipeline = min(stages, default=groups)
    data = groups // pipeline
    counts = [
        count for count in divisors(request.batch_size) if request.batch_size // count % data == 0
    ]
    if not counts:
        return None
    enough = [count for count in counts if count >= max(_FEWEST, _PER_STAGE * pipeline)]
    return Candidate(
        Grid(pipeline, data, tensor), min(enough, default=counts[-1]), recompute="auto"
    )


def refine(search: PlanSearch) -> Iterator[Candidate]:
    """Grids with several stages per rank that were left out, with the pipeline, micro-batches and the rest of the
    best grid without.
    """
    best = search.best
    if best is None or best.placed is None or not isinstance(best.candidate.strategy, Grid):
        return
    pipeline = len(best.placed.placement.stages)
    count = best.placed.problem.micro_batches
    for each in search.trials:
        form = each.candidate.strategy
        is_left_out = isinstance(each.refused, LeftOutError) and each.candidate == Candidate(form)
        if is_left_out and isinstance(form, Grid) and pipeline > 1:
            yield replace(
                best.candidate, strategy=replace(form, pipeline=pipeline), micro_batches=count
            )


# Candidates that are planned again with recomputation, or with shared state: one of each strategy.
_MOST = 3
_BASELINES = (
    "breadth_first",
    "mcmc",
)  # Strategies that pase is at least as good as: tried once, and not varied.
_OFTEN_SHARED = ("tepdist",)
"""Strategies that search long, and promise so much as a rule that shared state is asked for, too.
"""

_ALWAYS_OR_NEVER = (
    "pase",
)  # Searches in whose tables a stage keeps as much of one micro-batch, recomputed or not.
_NEAR = 1.5
"""How many times the shortest step a candidate's bound may be for more numbers of micro-batches to
be looked at.
"""


def foreseeable(
    every: Iterable[Candidate], problem: Problem, request: Request
) -> Iterator[Candidate]:
    """Slow candidates that are usually needed once all others are tried."""
    if _may_share(problem, request):
        yield from (
            replace(each, shard=True) for each in every if each.strategy.name in _OFTEN_SHARED
        )


def _may_share(problem: Problem, request: Request) -> bool:
    """True if replicas may have a share of the optimizer's state each, and do not anyway."""
    return (
        request.shard_open
        and not request.optimizer.shard
        and problem.train
        and problem.cluster.size > 1
    )


def try_variations(
    search: PlanSearch, problem: Problem, short: bool, scores_open: bool = False
) -> None:
    """Try variations of what memory refused, and of the most promising candidates; further ones go
    by these results.

    The order of the variations: other numbers of micro-batches for strategies that take the number
    they are given; losses that recompute their scores; recomputation of stages if memory is short;
    replicas with a share of the optimizer's state each, for the best candidates and for those that
    have no plan without. `problem` is the one with the largest micro-batches that the model takes.
    `short` is True if memory may be less than a step of training needs, `scores_open` if losses
    keep their scores so far and need not.
    """
    varied = _Variations(search, problem, short)
    varied.climb_all(varied.given_counts())
    if short and scores_open:
        varied.with_recomputed_scores()
    if search.request.recompute is None and short:
        varied.with_recomputation()
    sharing = varied.sharing()
    search.expect(sharing)
    search.try_all(sharing)


@dataclass(frozen=True, slots=True)
class _Variations:
    search: PlanSearch
    problem: Problem
    short: bool

    def with_recomputed_scores(self) -> None:
        refused = [each for each in self.search.trials if _is_refused(each)]
        again = _once(each.candidate for each in [*self._promising(), *refused])
        again = [replace(each, scores="recompute") for each in again]
        self.search.expect(again)
        self.search.try_all(again)
        short = [each.candidate.strategy for each in refused]
        self.climb_all(
            replace(each, scores="recompute")
            for each in self.given_counts()
            if each.strategy in short
        )

    def with_recomputation(self) -> None:
        trials = self.search.trials
        # Of two candidates that differ in the form of their losses only, the one that needs less
        # memory.
        lean = {
            replace(each.candidate, scores=None)
            for each in trials
            if each.candidate.scores == "recompute"
        }
        refused = [each for each in trials if _is_refused(each) and each.candidate not in lean]
        own = _once(each.candidate for each in [*self._promising(), *refused])
        plain = [
            each
            for each in own
            if each.recompute == "none" and each.strategy.name not in _ALWAYS_OR_NEVER
        ]
        again = [replace(each, recompute="auto") for each in plain if each.micro_batches is None]
        # Shared state is looked into meanwhile for what promises most so far: most of that is asked
        # for anyway.
        self.search.expect([*again, *self.sharing()])
        self.search.try_all(again)
        scores = {each.candidate.strategy: each.candidate.scores for each in refused}
        given = [each for each in self.given_counts() if each.strategy in scores]
        self.climb_all(
            replace(each, recompute="auto", scores=scores[each.strategy]) for each in given
        )

    def sharing(self) -> list[Candidate]:
        """Candidates with shared state: of the best whose devices hold copies, and of what memory
        refuses otherwise.
        """
        request = self.search.request
        if not _may_share(self.problem, request):
            return []
        found = [each for each in self._promising() if _has_copies(each)]
        if self.short and self.problem.states_of(False):
            most = "auto" if request.recompute is None else "none"
            found += (
                each
                for each in self.search.trials
                if _is_refused(each) and each.candidate.recompute == most
            )
        return [replace(each, shard=True) for each in _once(each.candidate for each in found)]

    def _promising(self) -> list[CandidateTrial]:
        """The candidates with the shortest steps, then those with the least bounds: of each
        strategy the first.
        """
        found: list[CandidateTrial] = []
        for rank in (lambda each: each.step_s, lambda each: each.bound_s):
            best: dict[str, CandidateTrial] = {}
            for each in sorted(self.search.trials, key=rank):
                if not math.isinf(each.step_s):
                    best.setdefault(each.candidate.strategy.name, each)
            found += list(best.values())[:_MOST]
        return found

    def given_counts(self) -> list[Candidate]:
        """Candidates whose strategy takes as many micro-batches as it is given, and has no form
        that chooses.
        """
        request = self.search.request
        if request.micro_batches is not None or request.micro_batch_size is not None:
            return []
        plain = [
            own for each in self.search.trials if (own := each.candidate) == Candidate(own.strategy)
        ]
        wanted = {each: each.strategy.division(self.problem.graph) for each in plain}
        choosing = {each.strategy.name for each in plain if wanted[each] is Division.OWN}
        return [
            each
            for each in wanted
            if wanted[each] is Division.MANY and each.strategy.name not in choosing
        ]

    def climb_all(self, given: Iterable[Candidate]) -> None:
        """Climb from each candidate's own number of micro-batches, or the best plan's. The search
        is told before of where climbs begin, and of the first steps of those that promise to be
        looked at: what nobody asks for in the end is given up.
        """
        search = self.search
        problem = self.problem
        every = list(given)
        sizes = problem.micro_batch_sizes or (problem.micro_batch_size,)
        counts = sorted(problem.batch_size // size for size in sizes)  # All that there can be.
        trials = {each.candidate: each for each in search.trials}
        best = None if search.best is None else _count(search.best)
        wanted: list[Candidate] = []
        for each in every:
            found = trials.get(each)
            own = None if found is None else _count(found)
            steps = {best} - {own, None}
            if found is not None and own is not None and found.bound_s < _NEAR * search.step_s:
                place = bisect_left(counts, own)
                steps |= {
                    counts[other] for other in (place + 1, place - 1) if 0 <= other < len(counts)
                }
            wanted += [replace(each, micro_batches=count) for count in sorted(filter(None, steps))]
        search.expect(each for each in dict.fromkeys(wanted) if each not in trials)
        for each in every:
            self._climb(each, counts)

    def _climb(self, candidate: Candidate, counts: list[int]) -> None:
        """On from its own count, or the best plan's if it promises more: while memory refuses, then
        as bounds fall.
        """
        found = self._trial(candidate)
        if self.search.best is not None:
            found = min(
                found,
                self._trial(candidate, _count(self.search.best)),
                key=lambda each: each.bound_s,
            )
        count = _count(found) or AUTO_PER_DEVICE * self.problem.cluster.size
        place = min(bisect_left(counts, count), len(counts) - 1)
        while _is_refused(found) and place + 1 < len(counts):
            place += 1
            found = self._trial(candidate, counts[place])
        if found.bound_s < min(math.inf, _NEAR * self.search.step_s):
            climb(counts, place, lambda count: self._trial(candidate, count).bound_s)

    def _trial(self, candidate: Candidate, count: int | None = None) -> CandidateTrial:
        """Result of the candidate, or of it with `count` micro-batches; it is tried where it was
        not.
        """
        wanted = candidate if count is None else replace(candidate, micro_batches=count)
        for each in self.search.trials:
            if each.candidate == wanted or (each.candidate == candidate and count == _count(each)):
                return each
        self.search.try_all((wanted,))
        return (
            self.search.trials[-1]
            if self.search.trials[-1].candidate == wanted
            else CandidateTrial(wanted)
        )


def _once(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Candidates worth a variation, each once."""
    found = (each for each in candidates if not each.shard and each.strategy.name not in _BASELINES)
    return list(dict.fromkeys(found))


def _count(trial: CandidateTrial) -> int | None:
    """Micro-batches of its placement; None where there is none."""
    return None if trial.placed is None else trial.placed.problem.micro_batches


def _has_copies(trial: CandidateTrial) -> bool:
    """True if devices hold the same parameters."""
    placed = trial.placed
    assert placed is not None, "what has a step has a placement"
    holders = holders_of(stage_work(placed.problem, placed.placement))
    return any(len(devices) > 1 for devices in holders.values())


def _is_refused(trial: CandidateTrial) -> bool:
    """True if memory speaks against it under all schedules that were tried."""
    reasons = [trial.refused, *(run.refused for run in trial.runs)]
    return math.isinf(trial.step_s) and any(isinstance(each, OutOfMemoryError) for each in reasons)
