"""The search over candidates: place each candidate, in other processes if there are free CPU cores,
and then try all schedules on the placements that can still be the best.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from autopipe.ir.codec import decode, encode
from autopipe.ir.errors import CANDIDATE_ERRORS, AutopipeError, InternalError
from autopipe.ir.files import JsonRecord
from autopipe.ir.plan import Alternative
from autopipe.passes import pipeline
from autopipe.passes.auto.candidates import (
    LONG,
    QUICK,
    Candidate,
    SkippedError,
    has_many_tasks,
    is_search_scheduler,
    scheduler_skip_reason,
    shared_work_key,
    skip_reason,
)
from autopipe.passes.auto.plan_cache import (
    PlacementDecision,
    decode_error,
    decode_schedule,
    encode_error,
    encode_schedule,
)
from autopipe.passes.auto.workers import Answer, SpeculativePool, Work
from autopipe.passes.registry import Scheduler, scheduler_class
from autopipe.passes.schedule.limits import SAME, lower_bound


@dataclass(frozen=True, slots=True)
class ScheduleOutcome:
    """The result of running a scheduler on a placement: the schedule with its simulated step, or
    the error.
    """

    scheduler: Scheduler
    scheduled: pipeline.SimulatedSchedule | None = None
    refused: AutopipeError | None = None

    @property
    def step_s(self) -> float:
        """Seconds of the step; infinite if there is an error."""
        return math.inf if self.scheduled is None else self.scheduled.timeline.end


@dataclass(slots=True, eq=False)
class CandidateTrial:
    """A candidate's placement, and the results of the schedulers that were run on it.

    bound_s: lower bound on the seconds of a step under any schedule.
    refused: the error if there is no placement.
    same_as: an earlier trial with an equal placement. Only the earlier trial has results of
    schedulers (`runs`).
    """

    candidate: Candidate
    placed: pipeline.PredictedPlacement | None = None
    bound_s: float = math.inf
    refused: AutopipeError | None = None
    same_as: CandidateTrial | None = None
    runs: list[ScheduleOutcome] = field(default_factory=list)

    @property
    def best(self) -> ScheduleOutcome | None:
        """The result of the scheduler with the shortest step; ties: the first result. None if no
        scheduler gave a step.
        """
        return min(
            (run for run in self.runs if run.scheduled), key=lambda run: run.step_s, default=None
        )

    @property
    def step_s(self) -> float:
        """Seconds of the shortest step; infinite if no scheduler gave a step."""
        return math.inf if self.best is None else self.best.step_s

    def has_run(self, scheduler: Scheduler) -> bool:
        """True if the scheduler was run on the placement, with or without success."""
        return any(run.scheduler == scheduler for run in self.runs)

    def alternatives(self, request: pipeline.Request) -> tuple[Alternative, ...]:
        """Return the entries of this trial in the plan's list of alternatives: one per schedule
        that was run, or a single entry with the reason why none was run.
        """
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
                replace(row, refused=f"skipped: no schedule of it takes less than {bound_s:.4g} s"),
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


_REFUSALS = (*CANDIDATE_ERRORS, SkippedError, InternalError)
"""Errors that end the trial of a candidate but not the search. Internal errors are also reported to
the observer.
"""

_SOON = 2
"""Number of tasks for other processes that are started before those of the strategies with the
longest searches.
"""
_GENERAL = ("manual", "pipedream")
"""Strategies whose error explains best why there is no plan: manual follows all constraints, and
pipedream supports all models.
"""


@dataclass(slots=True, eq=False)
class PlanSearch:
    """A search for the best plan, with its trials. If steps are equal, the first candidate wins.

    scheduler_names: names of the schedulers, in order, if the request names none. The first
    scheduler that supports a placement gives an estimate of its step. The others run only if they
    can give the best step.
    end: time by `clock`, in seconds, after which the search stops if there is a plan; None for no
    limit.
    pool: processes that search placements and schedules in advance.
    """

    request: pipeline.Request
    runner: pipeline.Runner
    scheduler_names: tuple[str, ...]
    end: float | None = None
    clock: Callable[[], float] = time.monotonic
    pool: SpeculativePool = field(default_factory=lambda: SpeculativePool(1))
    trials: list[CandidateTrial] = field(default_factory=list)

    def schedulers(self) -> Iterator[Scheduler]:
        """Yield the scheduler of the request, or all schedulers if it names none. A scheduler is
        imported only when it is needed.
        """
        if self.request.scheduler is not None:
            yield self.request.scheduler
        else:
            yield from (scheduler_class(name)() for name in self.scheduler_names)

    @property
    def best(self) -> CandidateTrial | None:
        """The trial with the shortest step; ties: the first trial. None if no trial has a step."""
        found = min(self.trials, key=lambda each: each.step_s, default=None)
        return None if found is None or math.isinf(found.step_s) else found

    @property
    def step_s(self) -> float:
        """Seconds of the best step so far; infinite if there is none."""
        return math.inf if self.best is None else self.best.step_s

    def is_over(self) -> bool:
        """True if there is a plan and the time limit has passed."""
        return self.end is not None and self.best is not None and self.clock() >= self.end

    def start_early(self, candidates: Iterable[Candidate]) -> None:
        """Start, in other processes, the searches of candidates that will be tried later.

        Candidates that share much work run one after the other in one process, which caches the
        results that they share.
        """
        together: dict[object, dict[str, Work]] = {}
        slow = set()
        for candidate in () if self.is_over() else candidates:
            if candidate.strategy.name in QUICK or self.pool.is_pending(repr(candidate)):
                continue
            if self._skip_reason(candidate) is None:
                key = shared_work_key(candidate)
                together.setdefault(key, {})[repr(candidate)] = self._encode_errors_of(
                    partial(self._encoded_placement, candidate)
                )
                slow |= {key} if candidate.strategy.name in LONG else set()
        # The results of the first candidates are needed first. After them, start the longest
        # searches.
        keys = list(together)
        for key in (*keys[:_SOON], *sorted(keys[_SOON:], key=lambda key: key not in slow)):
            self.pool.queue(together[key])

    def _encode_errors_of(self, work: Work) -> Work:
        """Return a function for another process. It runs `work` and returns its result, or its
        error in encoded form (`encode_error`).
        """

        def run_work() -> Answer:
            # A forked process must neither report progress nor add to the times of passes.
            self.runner.observer = pipeline.Observer()
            self.runner.seconds = {}
            try:
                return work()
            except AutopipeError as error:
                return encode_error(error)

        return run_work

    def _encoded_placement(self, candidate: Candidate) -> Answer:
        """Return the encoded placement of a candidate."""
        settled = self._limit_to_remaining_time(candidate.apply_to(self.request))
        _, problem, placement = pipeline.run_strategy(settled, candidate.strategy, self.runner)
        return encode(PlacementDecision.of(placement, problem))

    def _encoded_schedule(
        self, placed: pipeline.PredictedPlacement, scheduler: Scheduler
    ) -> Answer:
        """Return the encoded schedule of a scheduler for a placement."""
        return encode_schedule(pipeline.run_scheduler(placed, scheduler, self.runner))

    def try_all(self, candidates: Iterable[Candidate]) -> None:
        """Place each candidate, and simulate its step under the first schedule that supports the
        placement.
        """
        for candidate in candidates:
            if self.is_over():
                break
            self._try_candidate(candidate)

    def try_all_schedules(self) -> None:
        """Try all schedules on the placements that can still be the best. The placements are
        visited in ascending order of their shortest step so far; ties: in ascending order of the
        lower bound.

        Other processes run schedulers that search, such as Tessel's, in advance.
        """
        own = (each for each in self.trials if each.same_as is None)
        ranked = sorted(own, key=lambda each: (each.step_s, each.bound_s))
        for each in ranked:
            if (placed := each.placed) is None or self._cannot_win(each):
                continue
            for scheduler in filter(is_search_scheduler, self.schedulers()):
                if not each.has_run(scheduler) and scheduler_skip_reason(scheduler, placed) is None:
                    self.pool.queue(
                        {
                            _schedule_key(each, scheduler): self._encode_errors_of(
                                partial(self._encoded_schedule, placed, scheduler)
                            )
                        }
                    )
        for each in ranked:
            for scheduler in self.schedulers():
                if self.is_over() or each.placed is None or self._cannot_win(each):
                    break
                if not each.has_run(scheduler):
                    self.run_scheduler(each, each.placed, scheduler)

    def _try_candidate(self, candidate: Candidate) -> None:
        """Place one candidate, simulate its step, and store the trial."""
        try:
            placed = self._place(candidate)
        except _REFUSALS as error:
            self._report_internal_error(error)
            self.trials.append(CandidateTrial(candidate, refused=error))
            return
        same = next(
            (
                each
                for each in self.trials
                if each.placed and _are_equal_placements(each.placed, placed)
            ),
            None,
        )
        if same is not None:
            self.trials.append(CandidateTrial(candidate, same.placed, same.bound_s, same_as=same))
            return
        found = CandidateTrial(
            candidate, placed, lower_bound(placed.problem, placed.placement, placed.prediction)
        )
        self.trials.append(found)
        if has_many_tasks(placed) and self._cannot_win(found):
            return
        for scheduler in self.schedulers():
            if is_search_scheduler(scheduler) and found.runs and self.best is not None:
                # A scheduler that searches runs here only if it is the first scheduler for this
                # placement, or if no step is known yet. Otherwise method `try_all_schedules` runs
                # it later, if its schedule can be the best.
                break
            if self.run_scheduler(found, placed, scheduler).scheduled:
                break

    def _place(self, candidate: Candidate) -> pipeline.PredictedPlacement:
        """Return the placement of a candidate. It comes from another process if the search was
        started there. Raise the error if there is no placement.
        """
        if (reason := self._skip_reason(candidate)) is not None:
            raise reason
        settled = self._limit_to_remaining_time(candidate.apply_to(self.request))
        strategy = candidate.strategy
        record = self._worker_result(strategy.name, repr(candidate))
        if record is None:
            return pipeline.predict_placement(
                *pipeline.run_strategy(settled, strategy, self.runner), self.runner
            )
        decision: PlacementDecision = decode(record, PlacementDecision)
        return pipeline.predict_given_placement(
            settled, decision.batching, decision.placement_with_proof, self.runner
        )

    def _skip_reason(self, candidate: Candidate) -> SkippedError | None:
        """Return the reason to skip the candidate, or None."""
        operators = len(pipeline.read_request_model(self.request, self.runner).graph.nodes)
        return skip_reason(candidate.strategy, operators, self.request.cluster.size)

    def _worker_result(self, name: str, key: str) -> JsonRecord | None:
        """Wait for the result of another process for `key`, and return it. Return None if its work
        was not started or failed.

        The time of waiting counts for the pass `name`. Raise the error that the other process
        found, and SkippedError if the time limit passes.
        """

        def await_result() -> JsonRecord | None:
            """Wait for the result of the other process."""
            limited = self.end is not None and self.best is not None
            found = self.pool.wait_for(
                key, self._limit_to_remaining_time(self.request).time_limit if limited else None
            )
            if found is None:
                if self.is_over():
                    raise SkippedError("skipped: the time limit of the search was reached")
                return None
            record = JsonRecord(found, key)
            if record.has("refused"):
                raise decode_error(record)
            return record

        return self.runner.run(name, await_result) if self.pool.is_pending(key) else None

    def _cannot_win(self, trial: CandidateTrial) -> bool:
        """True if the lower bound of the trial shows that no schedule gives a shorter step than the
        best one.
        """
        return trial.bound_s >= self.step_s * (1 - SAME)

    def run_scheduler(
        self, trial: CandidateTrial, placed: pipeline.PredictedPlacement, scheduler: Scheduler
    ) -> ScheduleOutcome:
        """Run a scheduler on the placement of a trial, and store and return the result. Report the
        step to the observer if it is the best so far.

        The schedule comes from another process if its search was started there.
        """
        known_s = self.step_s
        try:
            if (reason := scheduler_skip_reason(scheduler, placed)) is not None:
                raise reason
            record = self._worker_result(scheduler.name, _schedule_key(trial, scheduler))
            if record is None:
                order = pipeline.run_scheduler(placed, scheduler, self.runner)
            else:
                order = decode_schedule(record)
                order.verify(placed.graph, placed.problem.train)
            known = tuple(each.scheduled for each in trial.runs if each.scheduled is not None)
            run = ScheduleOutcome(
                scheduler, pipeline.simulate_schedule(placed, order, self.runner, known)
            )
        except _REFUSALS as error:
            self._report_internal_error(error)
            run = ScheduleOutcome(scheduler, refused=error)
        trial.runs.append(run)
        if run.step_s < known_s:
            bound_s = min(each.bound_s for each in self.trials)
            self.runner.observer.improved(run.step_s, bound_s)
        return run

    def _report_internal_error(self, error: AutopipeError) -> None:
        """Report an internal error to the observer, and count it. Other errors are ignored."""
        if isinstance(error, InternalError):
            self.runner.failures += 1
            self.runner.observer.failed(error)

    def _limit_to_remaining_time(self, request: pipeline.Request) -> pipeline.Request:
        """Return the request with the remaining seconds of the search as its time limit; unchanged
        if the search has no time limit.
        """
        if self.end is None:
            return request
        return replace(request, time_limit=max(0.0, self.end - self.clock()))

    def failure_reason(self) -> AutopipeError:
        """Return the error that explains why there is no plan: that of the most general strategy
        that was tried.
        """
        trials = [each for each in self.trials if not isinstance(each.refused, SkippedError)]
        names = [each.candidate.strategy.name for each in trials]
        found = trials[names.index(next((name for name in _GENERAL if name in names), names[0]))]
        refused = found.refused or next((run.refused for run in found.runs if run.refused), None)
        assert refused is not None, "a trial without a plan has an error"
        return refused


def _schedule_key(trial: CandidateTrial, scheduler: Scheduler) -> str:
    """Return the key of the work that runs a scheduler on the placement of a trial."""
    return f"{scheduler.name} of {trial.candidate!r}"


def _are_equal_placements(
    first: pipeline.PredictedPlacement, second: pipeline.PredictedPlacement
) -> bool:
    """True if two placements are equal, and their problems agree in micro-batches, optimizer and
    form of the losses.
    """
    one, other = (
        (each.model.scores, each.problem.micro_batches, each.problem.optimizer, each.placement)
        for each in (first, second)
    )
    return one == other
