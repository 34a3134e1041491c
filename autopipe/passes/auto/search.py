"""The search over candidates: a placement each, in other processes where there are cores, then all schedules that can
still win.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from autopipe.ir.codec import JsonRecord, decode, encode
from autopipe.ir.errors import REFUSALS, AutopipeError, InternalError
from autopipe.ir.plan import Alternative
from autopipe.passes.auto.candidates import (
    LONG,
    QUICK,
    Candidate,
    LeftOutError,
    in_common,
    is_large,
    is_searched,
    left_out,
    scheduler_left_out,
)
from autopipe.passes.auto.plan_cache import (
    PlacementDecision,
    refused_form,
    refused_of,
    schedule_form,
    schedule_of,
)
from autopipe.passes.auto.workers import Answer, SpeculativePool, Work
from autopipe.passes.batching import Batching
from autopipe.passes.pipeline import (
    Placed,
    Request,
    Runner,
    Scheduled,
    place_as,
    predict_placement,
    read,
    run_scheduler,
    run_strategy,
    time_schedule,
)
from autopipe.passes.registry import Scheduler
from autopipe.passes.schedule.limits import SAME, lower_bound


@dataclass(frozen=True, slots=True)
class ScheduleOutcome:
    """Result of a schedule on a placement: the step it makes, or why there is none."""

    scheduler: Scheduler
    scheduled: Scheduled | None = None
    refused: AutopipeError | None = None

    @property
    def step_s(self) -> float:
        """Seconds of the step; infinite where there is none."""
        return math.inf if self.scheduled is None else self.scheduled.timeline.end


@dataclass(slots=True, eq=False)
class CandidateTrial:
    """A candidate that was tried: its placement, and the step of every schedule that was tried on it."""

    candidate: Candidate
    placed: Placed | None = None
    bound_s: float = math.inf
    """No schedule of the placement takes less."""
    refused: AutopipeError | None = None
    """Why there is no placement."""
    same_as: CandidateTrial | None = None
    """The one tried before that has the same placement, and the runs."""
    runs: list[ScheduleOutcome] = field(default_factory=list)

    @property
    def best(self) -> ScheduleOutcome | None:
        """The run with the shortest step, the first of equals; None where none has one."""
        return min((run for run in self.runs if run.scheduled), key=lambda run: run.step_s, default=None)

    @property
    def step_s(self) -> float:
        """Seconds of the shortest step; infinite where there is none."""
        return math.inf if self.best is None else self.best.step_s

    def has_run(self, scheduler: Scheduler) -> bool:
        """True if the schedule was tried on it."""
        return any(run.scheduler == scheduler for run in self.runs)

    @property
    def origin(self) -> CandidateTrial:
        """The one that has the placement, its bound and the runs."""
        return self.same_as or self

    def alternatives(self, request: Request) -> tuple[Alternative, ...]:
        """Rows kept in the plan: one for every schedule, one where there is none."""
        choice, placed, bound_s = self.candidate.choice(request), self.origin.placed, self.origin.bound_s
        if placed is None:
            return (Alternative(choice, refused=self.refused.line if self.refused else None),)
        row = Alternative(
            choice,
            lower_bound_s=bound_s,
            micro_batches=placed.problem.micro_batches,
            stages=len(placed.placement.stages),
        )
        if not self.origin.runs:
            return (replace(row, refused=f"left out: no schedule of it takes less than {bound_s:.4g} s"),)
        row = replace(row, same_as=self.same_as.candidate.strategy.name if self.same_as else None)
        found = []
        for run in self.origin.runs:
            timeline = None if run.scheduled is None else run.scheduled.timeline
            found.append(
                replace(
                    row,
                    choice=self.candidate.choice(request, run.scheduler.name),
                    step_time_s=None if timeline is None else timeline.end,
                    bubble_rate=None if timeline is None else timeline.bubble_rate,
                    peak_memory_bytes=None if timeline is None else max(timeline.peak_memory),
                    refused=None if run.refused is None else run.refused.line,
                )
            )
        return tuple(found)


_REFUSALS = (*REFUSALS, LeftOutError, InternalError)
"""Errors that end one candidate and never the search: internal errors, too, which are reported."""

_SOON = 2
"""Works that are begun before those that take long."""

_GENERAL = ("manual", "pipedream")
"""The strategies that say best why there is no plan: manual follows any constraints, pipedream takes any model."""


@dataclass(slots=True, eq=False)
class PlanSearch:
    """One search: what it has tried. What is strictly shorter wins, so that the order of candidates settles ties."""

    request: Request
    runner: Runner
    schedulers: Callable[[], Iterable[Scheduler]]
    """All of them, each loaded as it is asked for: the first that takes a placement says about what its step takes; the
    others are tried where they could win."""
    end: float | None = None
    """When to stop, by `clock`, once there is a plan."""
    clock: Callable[[], float] = time.monotonic
    """Seconds."""
    ahead: SpeculativePool = field(default_factory=lambda: SpeculativePool(1))
    """Where placements are searched before their turn."""
    tried: list[CandidateTrial] = field(default_factory=list)

    @property
    def best(self) -> CandidateTrial | None:
        """The candidate with the shortest step, the first of equals; None where none has one."""
        found = min(self.tried, key=lambda each: each.step_s, default=None)
        return None if found is None or math.isinf(found.step_s) else found

    @property
    def step_s(self) -> float:
        """Seconds of the shortest step; infinite where there is none."""
        return math.inf if self.best is None else self.best.step_s

    def is_over(self) -> bool:
        """True if there is a plan and no more time."""
        return self.end is not None and self.best is not None and self.clock() >= self.end

    def expect(self, candidates: Iterable[Candidate]) -> None:
        """Have the placements of candidates that are going to be tried searched meanwhile, each once.

        Those with much in common follow one another in one process, which remembers it.
        """
        together: dict[object, dict[str, Work]] = {}
        slow = set()
        for candidate in () if self.is_over() else candidates:
            if candidate.strategy.name in QUICK or self.ahead.is_coming(repr(candidate)):
                continue
            if self._left_out(candidate) is None:
                key = in_common(candidate)
                together.setdefault(key, {})[repr(candidate)] = partial(self._decide, candidate)
                slow |= {key} if candidate.strategy.name in LONG else set()
        # The first ones are asked for first, whatever the others take.
        keys = list(together)
        for key in (*keys[:_SOON], *sorted(keys[_SOON:], key=lambda key: key not in slow)):
            self.ahead.expect(together[key])

    def _decide(self, candidate: Candidate) -> Answer:
        """Decision of a strategy, or its refusal, in another process."""
        self.runner.silence()
        asked = self._within_time(candidate.settled(self.request))
        try:
            _, problem, placement = run_strategy(asked, candidate.strategy, self.runner)
        except AutopipeError as error:
            return refused_form(error)
        batching = Batching(problem.batch_size, problem.micro_batches, problem.micro_batch_sizes)
        return encode(PlacementDecision.of(placement, batching))

    def try_all(self, candidates: Iterable[Candidate]) -> None:
        """Place each candidate and simulate its step under the first schedule that takes it."""
        for candidate in candidates:
            if self.is_over():
                break
            self._try(candidate)

    def schedule_all(self) -> None:
        """Try all schedules on the placements that can still win, the one with the least bound first.

        Schedules that are searched, of placements that can win as yet, are searched meanwhile in other processes.
        """
        ranked = sorted(self.tried, key=lambda one: (one.step_s, one.bound_s))
        for each in ranked:
            if each.placed is not None and not self._cannot_win(each):
                for scheduler in filter(is_searched, self.schedulers()):
                    if not each.has_run(scheduler) and scheduler_left_out(scheduler, each.placed) is None:
                        work = partial(self._order, each.placed, scheduler)
                        self.ahead.expect({_order_key(each, scheduler): work})
        for each in ranked:
            for scheduler in self.schedulers():
                if self.is_over() or each.placed is None or self._cannot_win(each):
                    break
                if not each.has_run(scheduler):
                    self._run(each, each.placed, scheduler)

    def _order(self, placed: Placed, scheduler: Scheduler) -> Answer:
        """Schedule of a placement, or its refusal, in another process."""
        self.runner.silence()
        try:
            return schedule_form(run_scheduler(placed, scheduler, self.runner))
        except AutopipeError as error:
            return refused_form(error)

    def schedule(self, tried: CandidateTrial) -> None:
        """Try all schedules on a candidate's placement, those that cannot win, too."""
        assert tried.placed is not None
        for scheduler in self.schedulers():
            if not tried.has_run(scheduler):
                self._run(tried, tried.placed, scheduler)

    def _try(self, candidate: Candidate) -> None:
        try:
            placed = self._placed(candidate)
        except _REFUSALS as error:
            self._tell(error)
            self.tried.append(CandidateTrial(candidate, refused=error))
            return
        same = next((each for each in self.tried if each.placed and _are_same(each.placed, placed)), None)
        if same is not None:
            self.tried.append(CandidateTrial(candidate, same_as=same))
            return
        found = CandidateTrial(candidate, placed, lower_bound(placed.problem, placed.placement, placed.prediction))
        self.tried.append(found)
        if is_large(placed) and self._cannot_win(found):
            return
        for scheduler in self.schedulers():
            if is_searched(scheduler) and found.runs and self.best is not None:
                break  # `schedule_all` asks for it, where it can win by then.
            if self._run(found, placed, scheduler).scheduled:
                break

    def _placed(self, candidate: Candidate) -> Placed:
        """The placement: of another process where it was expected."""
        asked = self._within_time(candidate.settled(self.request))
        if (reason := self._left_out(candidate)) is not None:
            raise reason
        strategy, key, record = candidate.strategy, repr(candidate), None
        if self.ahead.is_coming(key):
            record = self.runner.run(strategy.name, lambda: self._awaited(key))
        if record is None:
            return predict_placement(*run_strategy(asked, strategy, self.runner), self.runner)
        decided: PlacementDecision = decode(record, PlacementDecision)
        return place_as(asked, decided.batching, decided.proven, self.runner)

    def _left_out(self, candidate: Candidate) -> LeftOutError | None:
        operators = len(read(self.request, self.runner).graph.nodes)
        return left_out(candidate.strategy, operators, self.request.cluster.size)

    def _awaited(self, key: str) -> JsonRecord | None:
        """Result of another process; None where it failed. Raises the refusal that it found."""
        limited = self.end is not None and self.best is not None
        found = self.ahead.answer(key, self._within_time(self.request).time_limit if limited else None)
        if found is None:
            if self.is_over():
                raise LeftOutError("left out: the time was over")
            return None
        record = JsonRecord(found, key)
        if record.has("refused"):
            raise refused_of(record)
        return record

    def _cannot_win(self, tried: CandidateTrial) -> bool:
        return tried.bound_s >= self.step_s * (1 - SAME)

    def _run(self, tried: CandidateTrial, placed: Placed, scheduler: Scheduler) -> ScheduleOutcome:
        """Run a schedule on a placement, and report it where it is the best so far.

        A schedule is of another process where it was expected.
        """
        known_s, key, record = self.step_s, _order_key(tried, scheduler), None
        try:
            if (reason := scheduler_left_out(scheduler, placed)) is not None:
                raise reason
            if self.ahead.is_coming(key):
                record = self.runner.run(scheduler.name, lambda: self._awaited(key))
            if record is None:
                order = run_scheduler(placed, scheduler, self.runner)
            else:
                order = schedule_of(record)
                order.verify(placed.graph, placed.problem.train)
            known = tuple(each.scheduled for each in tried.runs if each.scheduled is not None)
            run = ScheduleOutcome(scheduler, time_schedule(placed, order, self.runner, known))
        except _REFUSALS as error:
            self._tell(error)
            run = ScheduleOutcome(scheduler, refused=error)
        tried.runs.append(run)
        if run.step_s < known_s:
            bound_s = min(each.bound_s for each in self.tried)
            self.runner.observer.improved(run.step_s, bound_s)
        return run

    def _tell(self, error: AutopipeError) -> None:
        if isinstance(error, InternalError):
            self.runner.failures += 1
            self.runner.observer.failed(error)

    def _within_time(self, request: Request) -> Request:
        if self.end is None:
            return request
        return replace(request, time_limit=max(0.0, self.end - self.clock()))

    def reason(self) -> AutopipeError:
        """Why there is no plan: what speaks against the strategy that takes most models and requests."""
        tried = [each for each in self.tried if not isinstance(each.refused, LeftOutError)]
        names = [each.candidate.strategy.name for each in tried]
        general = next((name for name in _GENERAL if name in names), names[0])
        found = tried[names.index(general)]
        refused = found.refused or next((run.refused for run in found.runs if run.refused), None)
        assert refused is not None, "there is a plan, or something speaks against each"
        return refused


def _order_key(tried: CandidateTrial, scheduler: Scheduler) -> str:
    """Key of a schedule that is searched by another process."""
    return f"{scheduler.name} of {tried.candidate!r}"


def _are_same(first: Placed, second: Placed) -> bool:
    """True if two placements are one, of one problem."""
    a, b = first.problem, second.problem
    return (a.micro_batches, a.optimizer) == (b.micro_batches, b.optimizer) and first.placement == second.placement
