"""The search over candidates: a placement each, in other processes where there are cores, then all
schedules that can still win.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from autopipe.ir.codec import decode, encode
from autopipe.ir.errors import REFUSALS, AutopipeError, InternalError
from autopipe.ir.files import JsonRecord
from autopipe.ir.plan import Alternative
from autopipe.passes import pipeline
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
from autopipe.passes.registry import Scheduler, scheduler_class
from autopipe.passes.schedule.limits import SAME, lower_bound


@dataclass(frozen=True, slots=True)
class ScheduleOutcome:
    """Result of a schedule on a placement: the step it makes, or why there is none."""

    scheduler: Scheduler
    scheduled: pipeline.Scheduled | None = None
    refused: AutopipeError | None = None

    @property
    def step_s(self) -> float:
        """Seconds of the step; infinite where there is none."""
        return math.inf if self.scheduled is None else self.scheduled.timeline.end


@dataclass(slots=True, eq=False)
class CandidateTrial:
    """A candidate's placement, and the step of every schedule that was run on it."""

    candidate: Candidate
    placed: pipeline.Placed | None = None
    bound_s: float = math.inf  # No schedule of the placement takes less.
    refused: AutopipeError | None = None  # Why there is no placement.
    same_as: CandidateTrial | None = None
    """The one before that has the same placement, and alone the runs."""
    runs: list[ScheduleOutcome] = field(default_factory=list)

    @property
    def best(self) -> ScheduleOutcome | None:
        """The run with the shortest step, the first of equals; None where none has one."""
        return min(
            (run for run in self.runs if run.scheduled), key=lambda run: run.step_s, default=None
        )

    @property
    def step_s(self) -> float:
        return math.inf if self.best is None else self.best.step_s

    def has_run(self, scheduler: Scheduler) -> bool:
        return any(run.scheduler == scheduler for run in self.runs)

    def alternatives(self, request: pipeline.Request) -> tuple[Alternative, ...]:
        """Rows kept in the plan: one for every schedule, one where there is none."""
        choice = self.candidate.choice(request)
        placed = self.placed
        bound_s = self.bound_s
        if placed is None:
            return (Alternative(choice, refused=self.refused.line if self.refused else None),)
        figures = bound_s, placed.problem.micro_batches, len(placed.placement.stages)
        row = Alternative(choice, None, *figures)
        runs = (self.same_as or self).runs
        if not runs:
            return (
                replace(
                    row, refused=f"left out: no schedule of it takes less than {bound_s:.4g} s"
                ),
            )
        row = replace(row, same_as=self.same_as.candidate.strategy.name if self.same_as else None)
        found = []
        for run in runs:
            own = replace(row, choice=replace(choice, schedule=run.scheduler.name))
            if run.scheduled is not None:
                step = run.scheduled.timeline
                peak = max(step.peak_memory)
                own = replace(
                    own, step_time_s=step.end, bubble_rate=step.bubble_rate, peak_memory_bytes=peak
                )
            found.append(replace(own, refused=None if run.refused is None else run.refused.line))
        return tuple(found)


_REFUSALS = (*REFUSALS, LeftOutError, InternalError)
"""Errors that end one candidate and never the search: internal errors, too, which are reported."""

_SOON = 2  # Works that are begun before those that take long.
_GENERAL = ("manual", "pipedream")
"""The strategies that say best why there is no plan: manual follows any constraints, pipedream
takes any model.
"""


@dataclass(slots=True, eq=False)
class PlanSearch:
    """One search and its trials. What is strictly shorter wins, so that the order of candidates
    settles ties.
    """

    request: pipeline.Request
    runner: pipeline.Runner
    scheduler_names: tuple[str, ...]
    """Where the request leaves the schedule open: the first that takes a placement says about what
    its step takes; the others are run where they could win.
    """
    end: float | None = None  # When to stop, by `clock`, once there is a plan.
    clock: Callable[[], float] = time.monotonic  # Seconds.
    pool: SpeculativePool = field(default_factory=lambda: SpeculativePool(1))
    """Where placements are searched before their turn."""
    trials: list[CandidateTrial] = field(default_factory=list)

    def schedulers(self) -> Iterator[Scheduler]:
        """The one that is named, or all, each loaded as it is asked for."""
        if self.request.scheduler is not None:
            yield self.request.scheduler
        else:
            yield from (scheduler_class(name)() for name in self.scheduler_names)

    @property
    def best(self) -> CandidateTrial | None:
        """The candidate with the shortest step, the first of equals; None where none has one."""
        found = min(self.trials, key=lambda each: each.step_s, default=None)
        return None if found is None or math.isinf(found.step_s) else found

    @property
    def step_s(self) -> float:
        return math.inf if self.best is None else self.best.step_s

    def is_over(self) -> bool:
        """True if there is a plan and no more time."""
        return self.end is not None and self.best is not None and self.clock() >= self.end

    def expect(self, candidates: Iterable[Candidate]) -> None:
        """Have the placements of candidates that are going to be tried searched meanwhile, each
        once. Those with much in common follow one another in one process, which remembers it.
        """
        together: dict[object, dict[str, Work]] = {}
        slow = set()
        for candidate in () if self.is_over() else candidates:
            if candidate.strategy.name in QUICK or self.pool.is_coming(repr(candidate)):
                continue
            if self._left_out(candidate) is None:
                key = in_common(candidate)
                together.setdefault(key, {})[repr(candidate)] = self._told(
                    partial(self._decide, candidate)
                )
                slow |= {key} if candidate.strategy.name in LONG else set()
        # The first ones are asked for first, whatever the others take.
        keys = list(together)
        for key in (*keys[:_SOON], *sorted(keys[_SOON:], key=lambda key: key not in slow)):
            self.pool.expect(together[key])

    def _told(self, work: Work) -> Work:
        """The same work, or its refusal, in another process."""

        def answer() -> Answer:
            # A copy of a process tells nobody, and times its own passes.
            self.runner.observer = pipeline.Observer()
            self.runner.seconds = {}
            try:
                return work()
            except AutopipeError as error:
                return refused_form(error)

        return answer

    def _decide(self, candidate: Candidate) -> Answer:
        settled = self._within_time(candidate.settled(self.request))
        _, problem, placement = pipeline.run_strategy(settled, candidate.strategy, self.runner)
        return encode(PlacementDecision.of(placement, problem))

    def _order(self, placed: pipeline.Placed, scheduler: Scheduler) -> Answer:
        return schedule_form(pipeline.run_scheduler(placed, scheduler, self.runner))

    def try_all(self, candidates: Iterable[Candidate]) -> None:
        """Place each candidate and simulate its step under the first schedule that takes it."""
        for candidate in candidates:
            if self.is_over():
                break
            self._try(candidate)

    def schedule_all(self) -> None:
        """Try all schedules on the placements that can still win, the one with the least bound
        first. Schedules that are searched, of placements that can win as yet, are searched
        meanwhile in other processes.
        """
        own = (each for each in self.trials if each.same_as is None)
        ranked = sorted(own, key=lambda each: (each.step_s, each.bound_s))
        for each in ranked:
            if (placed := each.placed) is None or self._cannot_win(each):
                continue
            for scheduler in filter(is_searched, self.schedulers()):
                if not each.has_run(scheduler) and scheduler_left_out(scheduler, placed) is None:
                    self.pool.expect(
                        {
                            _order_key(each, scheduler): self._told(
                                partial(self._order, placed, scheduler)
                            )
                        }
                    )
        for each in ranked:
            for scheduler in self.schedulers():
                if self.is_over() or each.placed is None or self._cannot_win(each):
                    break
                if not each.has_run(scheduler):
                    self.run(each, each.placed, scheduler)

    def _try(self, candidate: Candidate) -> None:
        try:
            placed = self._placed(candidate)
        except _REFUSALS as error:
            self._report(error)
            self.trials.append(CandidateTrial(candidate, refused=error))
            return
        same = next(
            (each for each in self.trials if each.placed and _are_equal(each.placed, placed)), None
        )
        if same is not None:
            self.trials.append(CandidateTrial(candidate, same.placed, same.bound_s, same_as=same))
            return
        found = CandidateTrial(
            candidate, placed, lower_bound(placed.problem, placed.placement, placed.prediction)
        )
        self.trials.append(found)
        if is_large(placed) and self._cannot_win(found):
            return
        for scheduler in self.schedulers():
            if is_searched(scheduler) and found.runs and self.best is not None:
                break  # `schedule_all` asks for it, where it can win by then.
            if self.run(found, placed, scheduler).scheduled:
                break

    def _placed(self, candidate: Candidate) -> pipeline.Placed:
        """The placement: of another process where it was expected."""
        if (reason := self._left_out(candidate)) is not None:
            raise reason
        settled = self._within_time(candidate.settled(self.request))
        strategy = candidate.strategy
        record = self._record(strategy.name, repr(candidate))
        if record is None:
            return pipeline.predict_placement(
                *pipeline.run_strategy(settled, strategy, self.runner), self.runner
            )
        decision: PlacementDecision = decode(record, PlacementDecision)
        return pipeline.place_as(settled, decision.batching, decision.proven, self.runner)

    def _left_out(self, candidate: Candidate) -> LeftOutError | None:
        operators = len(pipeline.read(self.request, self.runner).graph.nodes)
        return left_out(candidate.strategy, operators, self.request.cluster.size)

    def _record(self, name: str, key: str) -> JsonRecord | None:
        """Answer of another process, as the pass of that name; None where it is not expected, or
        failed. Raises the refusal that it found.
        """

        def awaited() -> JsonRecord | None:
            limited = self.end is not None and self.best is not None
            found = self.pool.answer(
                key, self._within_time(self.request).time_limit if limited else None
            )
            if found is None:
                if self.is_over():
                    raise LeftOutError("left out: the time was over")
                return None
            record = JsonRecord(found, key)
            if record.has("refused"):
                raise refused_of(record)
            return record

        return self.runner.run(name, awaited) if self.pool.is_coming(key) else None

    def _cannot_win(self, trial: CandidateTrial) -> bool:
        return trial.bound_s >= self.step_s * (1 - SAME)

    def run(
        self, trial: CandidateTrial, placed: pipeline.Placed, scheduler: Scheduler
    ) -> ScheduleOutcome:
        """Run a schedule on a placement, and report it where it is the best so far. A schedule is
        of another process where it was expected.
        """
        known_s = self.step_s
        try:
            if (reason := scheduler_left_out(scheduler, placed)) is not None:
                raise reason
            record = self._record(scheduler.name, _order_key(trial, scheduler))
            if record is None:
                order = pipeline.run_scheduler(placed, scheduler, self.runner)
            else:
                order = schedule_of(record)
                order.verify(placed.graph, placed.problem.train)
            known = tuple(each.scheduled for each in trial.runs if each.scheduled is not None)
            run = ScheduleOutcome(
                scheduler, pipeline.time_schedule(placed, order, self.runner, known)
            )
        except _REFUSALS as error:
            self._report(error)
            run = ScheduleOutcome(scheduler, refused=error)
        trial.runs.append(run)
        if run.step_s < known_s:
            bound_s = min(each.bound_s for each in self.trials)
            self.runner.observer.improved(run.step_s, bound_s)
        return run

    def _report(self, error: AutopipeError) -> None:
        if isinstance(error, InternalError):
            self.runner.failures += 1
            self.runner.observer.failed(error)

    def _within_time(self, request: pipeline.Request) -> pipeline.Request:
        if self.end is None:
            return request
        return replace(request, time_limit=max(0.0, self.end - self.clock()))

    def reason(self) -> AutopipeError:
        """Why there is no plan: what speaks against the strategy that takes most models and
        requests.
        """
        trials = [each for each in self.trials if not isinstance(each.refused, LeftOutError)]
        names = [each.candidate.strategy.name for each in trials]
        found = trials[names.index(next((name for name in _GENERAL if name in names), names[0]))]
        refused = found.refused or next((run.refused for run in found.runs if run.refused), None)
        assert refused is not None, "there is a plan, or something speaks against each"
        return refused


def _order_key(trial: CandidateTrial, scheduler: Scheduler) -> str:
    return f"{scheduler.name} of {trial.candidate!r}"


def _are_equal(first: pipeline.Placed, second: pipeline.Placed) -> bool:
    """True if two placements are equal, of one problem."""
    one, other = (
        (each.model.scores, each.problem.micro_batches, each.problem.optimizer, each.placement)
        for each in (first, second)
    )
    return one == other
