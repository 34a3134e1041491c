"""Result of a candidate: its placement, and the step of every schedule that was tried on it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autopipe.ir.errors import AutopipeError
from autopipe.ir.plan import Alternative
from autopipe.passes.auto.candidate import Candidate
from autopipe.passes.base import Scheduler
from autopipe.passes.pipeline import Placed, Scheduled
from autopipe.passes.request import Request


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
    """A candidate that was tried."""

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
        placed, runs = self.origin.placed, self.origin.runs
        if placed is None:
            return (Alternative(self.candidate.choice(request), refused=self.refused.line if self.refused else None),)
        if not runs:
            return (self._unscheduled(request, placed),)
        return tuple(self._row(request, placed, run) for run in runs)

    def _unscheduled(self, request: Request, placed: Placed) -> Alternative:
        """The row of a placement that cannot have the shortest step, and was not simulated."""
        return Alternative(
            choice=self.candidate.choice(request),
            lower_bound_s=self.origin.bound_s,
            micro_batches=placed.problem.micro_batches,
            stages=len(placed.placement.stages),
            refused=f"left out: no schedule of it takes less than {self.origin.bound_s:.4g} s",
        )

    def _row(self, request: Request, placed: Placed, run: ScheduleOutcome) -> Alternative:
        timeline = None if run.scheduled is None else run.scheduled.timeline
        return Alternative(
            choice=self.candidate.choice(request, run.scheduler.name),
            step_time_s=None if timeline is None else timeline.end,
            lower_bound_s=self.origin.bound_s,
            micro_batches=placed.problem.micro_batches,
            stages=len(placed.placement.stages),
            bubble_rate=None if timeline is None else timeline.bubble_rate,
            peak_memory_bytes=None if timeline is None else max(timeline.peak_memory),
            refused=None if run.refused is None else run.refused.line,
            same_as=self.same_as.candidate.strategy.name if self.same_as else None,
        )
