"""Strategy `auto`: choose the plan if the request does not name a strategy.

The search tries candidates in this order: first a candidate by a rule of thumb; then each strategy
with one schedule; then variations of the most promising candidates (other numbers of micro-batches,
recomputation, sharded optimizer state); and finally all schedules for the placements that can still
be the best.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from autopipe.ir.errors import (
    CANDIDATE_ERRORS,
    AutopipeError,
    ConfigurationError,
    InfeasibleError,
    OutOfMemoryError,
)
from autopipe.ir.graph import Graph
from autopipe.ir.problem import SCORES, Problem
from autopipe.passes.analysis.constraints import resolve_constraints
from autopipe.passes.auto.candidates import (
    Candidate,
    SkippedError,
    candidate_strategies,
    candidates,
    may_support_schedule,
)
from autopipe.passes.auto.plan_cache import (
    FORMAT,
    JsonStore,
    add_alternatives,
    cache_key,
    decode_result,
    encode_result,
)
from autopipe.passes.auto.search import CandidateTrial, PlanSearch
from autopipe.passes.auto.workers import SpeculativePool, free_cores
from autopipe.passes.batching import AUTO_PER_DEVICE, Division, divisors, hill_climb
from autopipe.passes.cost.loss_scores import compare_scores, may_exceed_memory
from autopipe.passes.cost.stage_work import first_shard_holders, stage_work
from autopipe.passes.pipeline import (
    Observer,
    PlanResult,
    Request,
    Runner,
    assemble_plan,
    batch_divisions,
    costed_problem,
    read_request_model,
    use_whole_batch,
)
from autopipe.passes.placement.grid import Grid
from autopipe.passes.registry import SCHEDULERS, scheduler_class, scheduler_names

_FIRST = ("kfkb", "1f1b", "gpipe")
"""Schedules that support every placement in which all stages have one micro-batch size. kFkB also
supports different sizes.
"""
_LAST = ("tessel",)
"""Schedules that search an order of tasks, which takes the longest. They are not needed if another
schedule reaches the lower bound.
"""


def choose_plan(
    request: Request, observer: Observer | None = None, store: JsonStore | None = None
) -> PlanResult:
    """Return the plan with the shortest simulated step over all candidates. The plan contains a
    list of all alternatives.

    If `store` contains a result for an equal request, it is used without a search. If no candidate
    gives a plan, raise the error of a strategy that supports most models.
    """
    runner = Runner(observer)
    if store is None:
        return _search_and_choose(request, runner)
    name = cache_key(request, read_request_model(request, runner))
    record = store.read(name, FORMAT)
    try:
        if record is not None:
            return decode_result(record, request, runner)
    except (AutopipeError, ArithmeticError, LookupError, TypeError, ValueError):
        # The stored result is damaged or no longer valid for the request, so a new search replaces
        # it.
        pass
    found = _search_and_choose(request, runner)
    # With a time limit, or after an internal error, the result may not be the best, so it is not
    # stored.
    if request.time_limit is None and not runner.failures:
        store.write(name, encode_result(found))
    return found


def _search_and_choose(request: Request, runner: Runner) -> PlanResult:
    """Return the result of a new search."""
    return best_plan(search_plans(request, runner))


def best_plan(search: PlanSearch) -> PlanResult:
    """Return the best plan of a search, with the list of all alternatives."""
    best = search.best
    assert best is not None and best.placed is not None
    run = best.best
    assert run is not None and run.scheduled is not None
    named = replace(best.candidate.apply_to(search.request), scheduler=run.scheduler)
    found = assemble_plan(named, best.placed, run.scheduled, search.runner)
    return add_alternatives(
        found, tuple(row for each in search.trials for row in each.alternatives(search.request))
    )


def search_plans(
    request: Request, runner: Runner, clock: Callable[[], float] = time.monotonic
) -> PlanSearch:
    """Try all candidates of a request, and return the search with their trials. At least one of
    them has a plan.

    In the first phase each candidate is placed, and its step is simulated under one schedule. In
    the second phase all schedules are tried on the placements whose lower bound is below the best
    step. After the request's time limit, measured by `clock`, no new candidate starts if there is a
    plan. Raise the errors of `choose_plan`.
    """
    end = None if request.time_limit is None else clock() + request.time_limit
    request = use_whole_batch(request, runner)
    request, scores_open = _choose_faster_loss_form(request, runner)
    with SpeculativePool(free_cores()) as pool:
        search = PlanSearch(request, runner, _scheduler_names(), end, clock, pool)
        first = rule_of_thumb_candidate(request, read_request_model(request, runner).graph)
        search.try_all(() if first is None else (first,))
        problem = problem_with_largest_micro_batches(request, runner)
        # All candidates use one batch size, because steps with different batch sizes are not
        # comparable.
        search.request = request = replace(request, batch_size=problem.batch_size)
        short = problem.train and may_exceed_memory(problem)
        every = tuple(
            candidates(replace(request, mode=problem.mode), short and request.recompute is None)
        )
        search.start_early(every)
        search.start_early(early_candidates(every, problem, request))
        search.try_all(every)
        try_variations(search, problem, short, scores_open)
        finer = tuple(interleaved_candidates(search))
        search.start_early(finer)
        search.try_all(finer)
        search.try_all_schedules()
    if search.best is None:
        raise search.failure_reason()
    return search


def search_pass_names(request: Request) -> tuple[str, ...]:
    """Return the names of the passes that run during `choose_plan`, roughly in the order in which
    they first run.
    """
    schedulers = [
        name if name in SCHEDULERS else scheduler_class(name).name for name in _scheduler_names()
    ]
    if request.scheduler is not None:
        schedulers = [request.scheduler.name]
    return ("read", "cost", *candidate_strategies(request), "predict", *schedulers, "simulate")


def _scheduler_names() -> tuple[str, ...]:
    """Return the names of all schedules that may be chosen, with those that search last. Schedule
    csv is omitted, because it needs a file that the user names.
    """
    middle = [name for name in scheduler_names() if name not in (*_FIRST, *_LAST, "csv")]
    return (*_FIRST, *middle, *_LAST)


def _choose_faster_loss_form(request: Request, runner: Runner) -> tuple[Request, bool]:
    """Return (request, open). Losses can save their logits for backward or recompute them.

    request: the given request with the faster of the two forms, which candidates use first;
    unchanged if it names a form or the model has only one.
    open: True if the faster form saves logits, so that candidates that exceed memory are also tried
    with recomputed logits.
    """
    model = read_request_model(request, runner)
    if request.scores is not None or model.other is None:
        return request, False
    problem, other = (
        problem_with_largest_micro_batches(replace(request, scores=scores), runner)
        for scores in SCORES
    )
    found = compare_scores(problem, other.graph, "keep")
    keeps = found.keep_s <= found.recompute_s
    return replace(request, scores="keep" if keeps else "recompute"), keeps


def problem_with_largest_micro_batches(request: Request, runner: Runner) -> Problem:
    """Return the problem with the largest micro-batches that the model supports, without regard to
    a strategy.

    Raise the errors of an invalid request: of its model, its batch or its constraints.
    """
    refused: AutopipeError | None = None
    try:
        for batching in batch_divisions(request, Division.OWN, read_request_model(request, runner)):
            try:
                _, problem = costed_problem(request, batching, runner)
            except CANDIDATE_ERRORS as error:
                refused = refused or error
                continue
            pipelines = 1 + max((each.pipeline for each in problem.constraints), default=0)
            resolve_constraints(problem, pipelines, own_sizes=True)
            return problem
    except ConfigurationError:
        if not isinstance(refused, InfeasibleError):
            raise
    assert refused is not None, "there is a division, or an error says why not"
    raise refused


_STATE_FRACTION = 1 / 4
"""Maximum fraction of a device's memory that the candidate by a rule of thumb uses for parameters,
gradients and optimizer state.
"""
_PER_STAGE = 4
"""Number of micro-batches per stage of the candidate by a rule of thumb. With 4 per stage, about a
fifth of a step is idle.
"""
_MIN_MICRO_BATCHES = 16
"""Minimum number of micro-batches of the candidate by a rule of thumb. It limits the memory of a
micro-batch.
"""


def rule_of_thumb_candidate(request: Request, graph: Graph) -> Candidate | None:
    """Return the candidate by a rule of thumb: tensor parallelism inside a node, the minimum number
    of pipeline stages with which parameters and their state fit the memory, and data parallelism
    over the remaining devices.

    Stages recompute if memory requires it. Return None if the request leaves the batch size open,
    determines micro-batches or has constraints, if its schedule does not support such stages, or if
    the replicas cannot divide the batch.
    """
    if (
        request.batch_size is None
        or request.micro_batches
        or request.micro_batch_size
        or request.constraints
    ):
        return None
    if not may_support_schedule(request, Grid.name, {}):
        return None
    cluster = request.cluster
    tensor = max(each for each in divisors(cluster.size) if each <= cluster.devices_per_node)
    state = sum(parameter.value.bytes for parameter in graph.parameters) * (
        2 + request.optimizer.states + (request.training.ema_decay is not None)
    )
    limit = request.memory_limit or min(device.memory_bytes for device in cluster.devices)
    groups = cluster.size // tensor
    stages = [
        count for count in divisors(groups) if state / (count * tensor) <= _STATE_FRACTION * limit
    ]
    pipeline = min(stages, default=groups)
    data = groups // pipeline
    counts = [
        count for count in divisors(request.batch_size) if request.batch_size // count % data == 0
    ]
    if not counts:
        return None
    enough = [count for count in counts if count >= max(_MIN_MICRO_BATCHES, _PER_STAGE * pipeline)]
    return Candidate(
        Grid(pipeline, data, tensor), min(enough, default=counts[-1]), recompute="auto"
    )


def interleaved_candidates(search: PlanSearch) -> Iterator[Candidate]:
    """Yield the candidates of strategy grid with several stages per rank that were skipped at
    first.

    They get the number of pipeline groups, the micro-batches and the other settings of the best
    plan, so that only few degrees of parallelism remain to be searched. Yield nothing if the best
    plan is not of strategy grid, or has one stage only.
    """
    best = search.best
    if best is None or best.placed is None or not isinstance(best.candidate.strategy, Grid):
        return
    pipeline = len(best.placed.placement.stages)
    count = best.placed.problem.micro_batches
    for each in search.trials:
        form = each.candidate.strategy
        is_left_out = isinstance(each.refused, SkippedError) and each.candidate == Candidate(form)
        if is_left_out and isinstance(form, Grid) and pipeline > 1:
            yield replace(
                best.candidate, strategy=replace(form, pipeline=pipeline), micro_batches=count
            )


_MAX_PROMISING = 3
"""Maximum number of candidates, one per strategy, that are planned again with recomputation or with
sharded optimizer state.
"""
_BASELINES = ("breadth_first", "mcmc")
"""Baseline strategies, which are not better than pase. They are tried once, without variations."""
_OFTEN_SHARDED = ("tepdist",)
"""Strategies with long searches whose variation with sharded optimizer state is usually tried
later, so that this search is started early.
"""
_ALWAYS_OR_NEVER = ("pase",)
"""Strategies whose search counts the same memory for a stage with and without recomputation. They
are not planned again with recomputation.
"""
_NEAR = 1.5
"""Maximum ratio of a candidate's lower bound to the best step for which further numbers of
micro-batches are tried.
"""


def early_candidates(
    every: Iterable[Candidate], problem: Problem, request: Request
) -> Iterator[Candidate]:
    """Yield variations of `every` that have long searches and will usually be tried later, so that
    their searches can be started early.
    """
    if _may_shard_optimizer(problem, request):
        yield from (
            replace(each, shard=True) for each in every if each.strategy.name in _OFTEN_SHARDED
        )


def _may_shard_optimizer(problem: Problem, request: Request) -> bool:
    """True if candidates with sharded optimizer state may be tried: for training on several
    devices, if the request permits it and does not require it already.
    """
    return (
        request.shard_open
        and not request.optimizer.shard
        and problem.train
        and problem.cluster.size > 1
    )


def try_variations(
    search: PlanSearch, problem: Problem, short: bool, scores_open: bool = False
) -> None:
    """Try variations of the candidates that exceed memory, and of the most promising candidates.

    They are tried in this order: other numbers of micro-batches for strategies that do not choose
    the number; if memory may not suffice, losses that recompute their logits and recomputation of
    stages, unless the request sets them; sharded optimizer state for the best candidates and for
    candidates that exceed the memory. Each variation uses the results of the preceding ones.

    problem: the problem with the largest micro-batches that the model supports.
    short: True if memory may not suffice for a training step.
    scores_open: True if losses save their logits and may recompute them instead.
    """
    varied = _Variations(search, problem, short)
    varied.climb_micro_batches(varied.candidates_with_given_count())
    if short and scores_open:
        varied.try_recomputed_logits()
    if search.request.recompute is None and short:
        varied.try_recomputation()
    sharing = varied.sharded_candidates()
    search.start_early(sharing)
    search.try_all(sharing)


@dataclass(frozen=True, slots=True)
class _Variations:
    """Tries variations of the candidates of a search. The fields are the arguments of
    `try_variations`.
    """

    search: PlanSearch
    problem: Problem
    short: bool

    def try_recomputed_logits(self) -> None:
        """Try the candidates that exceed memory, and the most promising ones, with losses that
        recompute their logits.
        """
        refused = [each for each in self.search.trials if _exceeds_memory(each)]
        again = _distinct_candidates(
            each.candidate for each in [*self._promising_trials(), *refused]
        )
        again = [replace(each, scores="recompute") for each in again]
        self.search.start_early(again)
        self.search.try_all(again)
        short = [each.candidate.strategy for each in refused]
        self.climb_micro_batches(
            replace(each, scores="recompute")
            for each in self.candidates_with_given_count()
            if each.strategy in short
        )

    def try_recomputation(self) -> None:
        """Try the candidates that exceed memory, and the most promising ones, with recomputation in
        the stages that need it.
        """
        trials = self.search.trials
        # Omit a candidate that exceeds memory if another one was tried that differs only in that
        # its losses recompute logits, because that one needs less memory.
        lean = {
            replace(each.candidate, scores=None)
            for each in trials
            if each.candidate.scores == "recompute"
        }
        refused = [each for each in trials if _exceeds_memory(each) and each.candidate not in lean]
        own = _distinct_candidates(each.candidate for each in [*self._promising_trials(), *refused])
        plain = [
            each
            for each in own
            if each.recompute == "none" and each.strategy.name not in _ALWAYS_OR_NEVER
        ]
        again = [replace(each, recompute="auto") for each in plain if each.micro_batches is None]
        # At the same time, other processes search variations with sharded optimizer state for the
        # candidates that are the most promising now. Most of these results are needed later.
        self.search.start_early([*again, *self.sharded_candidates()])
        self.search.try_all(again)
        scores = {each.candidate.strategy: each.candidate.scores for each in refused}
        given = [each for each in self.candidates_with_given_count() if each.strategy in scores]
        self.climb_micro_batches(
            replace(each, recompute="auto", scores=scores[each.strategy]) for each in given
        )

    def sharded_candidates(self) -> list[Candidate]:
        """Return candidates with sharded optimizer state: variations of the best candidates whose
        parameters are replicated, and of candidates that exceed memory.
        """
        request = self.search.request
        if not _may_shard_optimizer(self.problem, request):
            return []
        found = [each for each in self._promising_trials() if _has_replicated_parameters(each)]
        if self.short and self.problem.states_of(False):
            most = "auto" if request.recompute is None else "none"
            found += (
                each
                for each in self.search.trials
                if _exceeds_memory(each) and each.candidate.recompute == most
            )
        return [
            replace(each, shard=True)
            for each in _distinct_candidates(each.candidate for each in found)
        ]

    def _promising_trials(self) -> list[CandidateTrial]:
        """Return the trials with the shortest steps, followed by the trials with the lowest bounds.
        Each of the two groups has at most `_MAX_PROMISING` trials, one per strategy.
        """
        found: list[CandidateTrial] = []
        for rank in (lambda each: each.step_s, lambda each: each.bound_s):
            best: dict[str, CandidateTrial] = {}
            for each in sorted(self.search.trials, key=rank):
                if not math.isinf(each.step_s):
                    best.setdefault(each.candidate.strategy.name, each)
            found += list(best.values())[:_MAX_PROMISING]
        return found

    def candidates_with_given_count(self) -> list[Candidate]:
        """Return the candidates for which other numbers of micro-batches are tried: their
        strategies prefer many micro-batches (`Division.MANY`), and do not choose the number,
        whatever their options. Return [] if the request determines the number.
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

    def climb_micro_batches(self, given: Iterable[Candidate]) -> None:
        """Search the number of micro-batches of each candidate by hill climbing. The climb starts
        from the candidate's own number or from the number of the best plan.

        Other processes start the first steps of the climbs in advance. Their results are discarded
        if they are not needed.
        """
        search = self.search
        problem = self.problem
        every = list(given)
        sizes = problem.micro_batch_sizes or (problem.micro_batch_size,)
        counts = sorted(problem.batch_size // size for size in sizes)
        trials = {each.candidate: each for each in search.trials}
        best = None if search.best is None else _micro_batch_count(search.best)
        wanted: list[Candidate] = []
        for each in every:
            found = trials.get(each)
            own = None if found is None else _micro_batch_count(found)
            steps = {best} - {own, None}
            if found is not None and own is not None and found.bound_s < _NEAR * search.step_s:
                place = bisect_left(counts, own)
                steps |= {
                    counts[other] for other in (place + 1, place - 1) if 0 <= other < len(counts)
                }
            wanted += [replace(each, micro_batches=count) for count in sorted(filter(None, steps))]
        search.start_early(each for each in dict.fromkeys(wanted) if each not in trials)
        for each in every:
            self._climb_one(each, counts)

    def _climb_one(self, candidate: Candidate, counts: list[int]) -> None:
        """Search the number of micro-batches of one candidate by hill climbing; `counts` contains
        all possible numbers.

        Start from the candidate's own number, or from that of the best plan if the trial with it
        has the smaller lower bound. First increase the number while memory does not suffice. Then
        move to neighbouring numbers while the lower bound decreases.
        """
        found = self._find_or_run_trial(candidate)
        if self.search.best is not None:
            found = min(
                found,
                self._find_or_run_trial(candidate, _micro_batch_count(self.search.best)),
                key=lambda each: each.bound_s,
            )
        count = _micro_batch_count(found) or AUTO_PER_DEVICE * self.problem.cluster.size
        place = min(bisect_left(counts, count), len(counts) - 1)
        while _exceeds_memory(found) and place + 1 < len(counts):
            place += 1
            found = self._find_or_run_trial(candidate, counts[place])
        if found.bound_s < min(math.inf, _NEAR * self.search.step_s):
            hill_climb(
                counts, place, lambda count: self._find_or_run_trial(candidate, count).bound_s
            )

    def _find_or_run_trial(self, candidate: Candidate, count: int | None = None) -> CandidateTrial:
        """Return the trial of the candidate, with `count` micro-batches unless it is None. Try the
        candidate if there is no such trial yet.
        """
        wanted = candidate if count is None else replace(candidate, micro_batches=count)
        for each in self.search.trials:
            if each.candidate == wanted or (
                each.candidate == candidate and count == _micro_batch_count(each)
            ):
                return each
        self.search.try_all((wanted,))
        return (
            self.search.trials[-1]
            if self.search.trials[-1].candidate == wanted
            else CandidateTrial(wanted)
        )


def _distinct_candidates(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the distinct candidates, without candidates with sharded optimizer state and without
    the strategies of `_BASELINES`, for which no variations are tried.
    """
    found = (each for each in candidates if not each.shard and each.strategy.name not in _BASELINES)
    return list(dict.fromkeys(found))


def _micro_batch_count(trial: CandidateTrial) -> int | None:
    """Return the number of micro-batches of the trial's placement; None without a placement."""
    return None if trial.placed is None else trial.placed.problem.micro_batches


def _has_replicated_parameters(trial: CandidateTrial) -> bool:
    """True if several devices hold equal copies of a parameter or of a shard of it."""
    placed = trial.placed
    assert placed is not None, "a trial with a step has a placement"
    holders = first_shard_holders(stage_work(placed.problem, placed.placement))
    return any(len(devices) > 1 for devices in holders.values())


def _exceeds_memory(trial: CandidateTrial) -> bool:
    """True if the candidate has no plan because memory does not suffice."""
    reasons = [trial.refused, *(run.refused for run in trial.runs)]
    return math.isinf(trial.step_s) and any(isinstance(each, OutOfMemoryError) for each in reasons)
