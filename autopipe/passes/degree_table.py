"""Table of alternatives to a plan by degrees of parallelism. A row contains the shortest step of
one factorisation of the devices (pipeline * data * tensor degree), and why it is not the plan.

Strategy `grid` places each factorisation, with the number of micro-batches that gives the shortest
step under 1F1B. A row that could be faster than the plan is also scheduled by the plan's scheduler.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from autopipe.ir.errors import CANDIDATE_ERRORS, AutopipeError, ConfigurationError, OutOfMemoryError
from autopipe.ir.plan import Breakdown, Choice
from autopipe.ir.problem import Scores
from autopipe.ir.words import plural
from autopipe.passes.analysis.constraints import required_micro_batch_sizes, resolve_constraints
from autopipe.passes.auto.candidates import Candidate, is_search_scheduler
from autopipe.passes.degrees import DEGREES, plan_degrees
from autopipe.passes.explain import request_with_open_options
from autopipe.passes.frontend import Model
from autopipe.passes.pipeline import (
    PlanResult,
    PredictedPlacement,
    Request,
    Runner,
    predict_placement,
    schedule_placed,
    strategy_and_scheduler,
    supported_problems,
)
from autopipe.passes.placement.grid import Degrees, Grid, GridSearch, factorisations
from autopipe.passes.registry import Scheduler, scheduler_class, scheduler_names
from autopipe.passes.schedule.breakdown import breakdown_under_1f1b
from autopipe.passes.schedule.limits import SAME, check_memory, lower_bound, step_under_1f1b
from autopipe.passes.schedule.published.base import PlacementPattern, Published

_MOST_ORDERED = 4
"""Maximum number of rows that are also scheduled by the plan's scheduler."""
_MOST_TASKS = 2**13
"""Maximum product of stages and micro-batches for which a row is also scheduled by the plan's
scheduler.
"""
_SEARCH_S = 5.0
"""Time limit, in seconds, of the search for a schedule of one row."""
_MOST_FORMS = 4
"""Maximum number of factorisations on which a schedule that the user names is tried. These are the
factorisations with the shortest steps under 1F1B.
"""
_FEWEST_SECONDS = 1e-12
"""Maximum difference of two times, in seconds, that counts as a rounding error."""


@dataclass(frozen=True, slots=True)
class DegreeRow:
    """One factorisation of the devices, and its step if it has one."""

    pipeline: int | None
    """Degree of pipeline parallelism. None if no factorisation has the requested degrees and this
    degree was not requested.
    """
    data: int | None
    """Degree of data parallelism; None as for `pipeline`."""
    tensor: int | None
    """Degree of tensor parallelism; None as for `pipeline`."""
    schedule: str
    """Name of the schedule of the step, or of the requested schedule if there is no step."""
    text: str = ""
    """Text of the degrees of the placement (`PlanDegrees.text`); "" if there is no placement."""
    micro_batches: int | None = None
    micro_batch_size: int | None = None
    step_time_s: float | None = None
    lower_bound_s: float | None = None
    """Lower bound of the step time of any schedule of the placement, in seconds."""
    peak_memory_bytes: int | None = None
    mfu: float | None = None
    choice: Choice | None = None
    """Strategy, schedule and options that reproduce this step; None if there is no step."""
    is_plan: bool = False
    """True if the plan has these degrees, and one stage per group of devices."""
    reason: str = ""
    """Why the row is not the plan: the parts of its step that take longer than in the plan or, if
    the row has no step, the error.
    """

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key: rows with shorter steps come first, rows without a step last."""
        return self.step_time_s is None, self.step_time_s or 0.0


def scheduler_family(prefix: str) -> tuple[Scheduler, ...]:
    """Return the schedulers whose names begin with `prefix`, except `csv`, which reads a schedule
    from a file. Raise ConfigurationError if there is none.
    """
    names = [name for name in scheduler_names() if name.startswith(prefix)]
    found = [scheduler_class(name)() for name in names if name != "csv"]
    if not prefix or not found:
        # `scheduler_class` raises an error with the nearest name, unless `prefix` is "csv". In this
        # case the next statement raises the error.
        scheduler_class(prefix)
        raise ConfigurationError(
            f"schedule {prefix!r} is read from a file and does not depend on degrees"
        )
    return tuple(found)


def degree_rows(
    planned: PlanResult,
    wanted: Mapping[str, int],
    family: str | None = None,
    started: Callable[[str], None] = lambda what: None,
) -> tuple[DegreeRow, ...]:
    """Return a row for each factorisation of the plan's devices that has the degrees `wanted` (by
    name: pipeline, data, tensor), the shortest step first.

    If no factorisation has them, return one row that contains the reason. If `family` is given,
    return one row for each schedule whose name begins with `family`, with the best factorisation
    for this schedule. `started` is called before each trial, with a text of its degrees or its
    schedule.
    """
    schedulers = () if family is None else scheduler_family(family)
    table = _Table(planned)
    given = {name: wanted.get(name) for name in DEGREES}
    every = tuple(
        factorisations(planned.problem.cluster, given["pipeline"], given["data"], given["tensor"])
    )
    if not every:
        return (_impossible_row(planned, wanted),)
    rows = []
    for degrees in every:
        started(f"pipeline {degrees.pipeline}, data {degrees.data}, tensor {degrees.tensor}")
        rows.append(table.row(degrees))
    if family is None:
        rows = table.ordered(rows)
    else:
        best = sorted(rows, key=lambda each: each.row.rank)
        rows = []
        for scheduler in schedulers:
            started(scheduler.name)
            rows.append(table.best_of_schedule(scheduler, best))
    return tuple(sorted((each.row for each in rows), key=lambda row: row.rank))


def _impossible_row(planned: PlanResult, wanted: Mapping[str, int]) -> DegreeRow:
    """Return the row for the degrees `wanted`, which no factorisation of the devices has. Its
    reason is the error of strategy `grid` for these degrees, if there is one.
    """
    pipeline, data, tensor = (wanted.get(name) for name in DEGREES)
    try:
        Grid(pipeline, data, tensor).requires(planned.problem)
        size = planned.problem.cluster.size
        reason = f"no factorisation of the {size} {plural(size, 'device')} has these degrees"
    except AutopipeError as error:
        reason = error.message
    return DegreeRow(pipeline, data, tensor, planned.plan.summary.schedule, reason=reason)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A row of the table with the candidate and the placement that it describes; both are None if
    there is no placement.
    """

    row: DegreeRow
    degrees: Degrees
    candidate: Candidate | None = None
    placed: PredictedPlacement | None = None


class _Table:
    """Computes the rows for one plan. All searches share the models that were read and their
    costs.
    """

    def __init__(self, planned: PlanResult) -> None:
        self._planned = planned
        self._runner = Runner()
        batch = planned.problem.batch_size
        opened = replace(
            request_with_open_options(planned),
            batch_size=batch,
            micro_batches=None,
            micro_batch_size=None,
        )
        self._request = replace(
            opened, recompute="auto" if planned.problem.train else opened.recompute
        )
        self._plan_breakdown = planned.plan.breakdown
        self._searches: dict[
            tuple[Grid, bool, Scores | None, str | None], tuple[Request, Model, GridSearch]
        ] = {}

    def row(self, degrees: Degrees) -> _Trial:
        """Return the row of a factorisation under 1F1B. Recomputation and sharded optimizer state
        are enabled if the factorisation does not fit into memory without them.
        """
        return self._trial(degrees, Grid(), "1f1b")

    def _trial(
        self,
        degrees: Degrees,
        form: Grid,
        schedule: str,
        most: int | None = None,
        recompute: str | None = None,
    ) -> _Trial:
        """Return the placement of a factorisation with the shortest step under 1F1B, or the reason
        why there is none.

        form: strategy `grid` with the placement pattern: stages per rank and their order, or two
        pipelines in opposite directions.
        schedule: name of the schedule for the row.
        most: maximum number of samples of a micro-batch; None is no maximum.
        recompute: recomputation mode, instead of the mode of the request.
        """
        row = DegreeRow(degrees.pipeline, degrees.data, degrees.tensor, schedule)
        refused: AutopipeError | None = None
        for shard, scores in self._variations():
            try:
                request, model, search = self._search(
                    form, shard, scores, recompute or self._request.recompute
                )
                sizes = required_micro_batch_sizes(
                    search.problem, resolve_constraints(search.problem)
                )
                open_sizes = [size for size in sizes if most is None or size <= most]
                if not open_sizes:
                    # All permitted micro-batch sizes exceed the maximum `most`, so no variation can
                    # satisfy it. The loop ends, and the row states the reason.
                    break
                search.best = None
                search.refused = []
                search.run((degrees,), open_sizes)
                assert search.best is not None, "run raises if there is no placement"
                problem = search.sized(search.best.size)
                placed = predict_placement(model, problem, search.best.placement, self._runner)
                return self._with_1f1b_step(row, degrees, form, request, placed)
            except OutOfMemoryError as error:
                refused = refused or error
            except CANDIDATE_ERRORS as error:
                return _Trial(replace(row, reason=(refused or error).message), degrees)
        reason = (
            refused.message
            if refused is not None
            else "the schedule needs more micro-batches than the batch has"
        )
        return _Trial(replace(row, reason=reason), degrees)

    def _variations(self) -> Iterator[tuple[bool, Scores | None]]:
        """Yield (True for a sharded optimizer state, variant of the losses): first the values of
        the plan, then values that use less memory.

        The variant states whether losses save their logits for backward or recompute them; None if
        the model has no such losses.
        """
        own = self._planned.problem.optimizer.shard
        settled = self._planned.plan.summary.scores
        scores = None if settled is None else settled.choice
        shards = (own,) if own or not self._planned.problem.train else (False, True)
        forms: tuple[Scores | None, ...] = ("keep", "recompute") if scores == "keep" else (scores,)
        yield from ((shard, form) for form, shard in itertools.product(forms, shards))

    def _search(
        self, form: Grid, shard: bool, scores: Scores | None, recompute: str | None
    ) -> tuple[Request, Model, GridSearch]:
        """Return (request, model, search) for trials with these options; equal options share one
        search.

        form: strategy `grid` with the placement pattern: stages per rank and their order, or two
        pipelines in opposite directions.
        shard: True for a sharded optimizer state.
        scores: variant of the losses; None for that of the request.
        recompute: recomputation mode.
        """
        key = form, shard, scores, recompute
        if key not in self._searches:
            optimizer = replace(self._request.optimizer, shard=shard)
            request = replace(
                self._request, strategy=form, optimizer=optimizer, recompute=recompute
            )
            request = replace(request, scores=scores or request.scores)
            model, problem = next(supported_problems(request, form, self._runner))
            self._searches[key] = (
                request,
                model,
                GridSearch(problem, form.stages_per_rank, form.style, form.opposite),
            )
        return self._searches[key]

    def _with_1f1b_step(
        self,
        row: DegreeRow,
        degrees: Degrees,
        form: Grid,
        request: Request,
        placed: PredictedPlacement,
    ) -> _Trial:
        """Return the trial of the placement `placed`, with the step under 1F1B in its row. Raise
        OutOfMemoryError if the step does not fit into memory.
        """
        problem = placed.problem
        step = step_under_1f1b(
            placed.graph, placed.prediction, problem.micro_batches, problem.train
        )
        check_memory(problem, placed.placement, step)
        found = breakdown_under_1f1b(problem, placed.placement, placed.prediction, step.end)
        candidate = Candidate(
            replace(form, pipeline=degrees.pipeline, data=degrees.data, tensor=degrees.tensor),
            problem.micro_batches,
            request.recompute or "none",
            problem.optimizer.shard,
            request.scores,
        )
        filled = replace(
            row,
            text=plan_degrees(problem, placed.placement).text,
            micro_batches=problem.micro_batches,
            micro_batch_size=problem.micro_batch_size,
            lower_bound_s=lower_bound(problem, placed.placement, placed.prediction),
        )
        trial = _Trial(filled, degrees, candidate, placed)
        return self._with_step(trial, row.schedule, step.end, max(step.peak_memory), found)

    def _with_step(
        self, trial: _Trial, schedule: str, step_s: float, peak: int, found: Breakdown
    ) -> _Trial:
        """Return the trial with a step of `step_s` seconds under `schedule` in its row.

        `peak` is the maximum peak memory of any device in bytes, and `found` the breakdown of the
        step.
        """
        assert trial.candidate is not None and trial.placed is not None
        problem = trial.placed.problem
        row = replace(
            trial.row,
            is_plan=self._is_plan(trial),
            schedule=schedule,
            step_time_s=step_s,
            peak_memory_bytes=peak,
            mfu=problem.step_flops / (step_s * problem.peak_flops) if step_s else None,
            choice=trial.candidate.choice(self._request, schedule),
        )
        return replace(trial, row=replace(row, reason=self._reason(row, found)))

    def ordered(self, trials: Sequence[_Trial]) -> list[_Trial]:
        """Return `trials` by the length of their steps under 1F1B. Up to `_MOST_ORDERED` of them
        whose lower bound is shorter than the plan's step get a schedule by the plan's scheduler, if
        it is shorter than 1F1B.
        """
        _, scheduler = strategy_and_scheduler(self._planned.request)
        plan_s = self._planned.plan.summary.step_time_s
        left = _MOST_ORDERED
        found = []
        for trial in sorted(trials, key=lambda each: each.row.rank):
            bound_s = trial.row.lower_bound_s
            placed = trial.placed
            if (
                bound_s is not None
                and placed is not None
                and left
                and bound_s < plan_s * (1 - SAME)
            ):
                left -= 1
                trial = self._with_schedule(trial, placed, scheduler)
            found.append(trial)
        return found

    def _with_schedule(
        self, trial: _Trial, placed: PredictedPlacement, scheduler: Scheduler, always: bool = False
    ) -> _Trial:
        """Return the trial with the step that `scheduler` gives its placement `placed`.

        Unless `always`, the trial is returned unchanged if this step is not shorter, if the
        scheduler fails, or if the placement has too many tasks (`_MOST_TASKS`). With `always`, a
        trial whose scheduler fails has no step.
        """
        problem = placed.problem
        if len(placed.placement.stages) * problem.micro_batches > _MOST_TASKS and not always:
            return trial
        if is_search_scheduler(scheduler):
            placed = replace(placed, problem=replace(problem, time_limit=_SEARCH_S))
        try:
            placed, scheduled = schedule_placed(placed, scheduler, self._runner)
        except CANDIDATE_ERRORS as error:
            if always:
                return replace(
                    trial,
                    row=replace(_without_step(trial.row, scheduler.name), reason=error.message),
                )
            return trial
        step = scheduled.timeline
        if not always and trial.row.step_time_s is not None and step.end >= trial.row.step_time_s:
            return trial
        found = breakdown_under_1f1b(placed.problem, placed.placement, placed.prediction, step.end)
        return self._with_step(
            replace(trial, placed=placed), scheduler.name, step.end, max(step.peak_memory), found
        )

    def best_of_schedule(self, scheduler: Scheduler, trials: Sequence[_Trial]) -> _Trial:
        """Return the trial with the shortest step under a schedule.

        At most `_MOST_FORMS` factorisations are tried: the first ones of `trials` with which the
        placement pattern of the schedule is possible. `trials` are sorted by their steps under
        1F1B. The search ends at a factorisation whose step under 1F1B is not shorter than the best
        step found.
        """
        form = _grid_for_scheduler(scheduler)
        found: list[_Trial] = []
        for trial in [each for each in trials if _is_possible_with(form, each.degrees)][
            :_MOST_FORMS
        ]:
            steps = (each.row.step_time_s for each in found)
            known_s = min((step_s for step_s in steps if step_s is not None), default=math.inf)
            if trial.row.step_time_s is not None and trial.row.step_time_s >= known_s:
                break
            found.append(self._best_under_schedule(trial.degrees, form, scheduler))
        if not found:
            first = trials[0].row
            reason = (
                f"{scheduler.name} needs two groups of devices or more in a line, and an even "
                "number in two directions"
            )
            return _Trial(
                replace(_without_step(first, scheduler.name), reason=reason), trials[0].degrees
            )
        return min(found, key=lambda each: each.row.rank)

    def _best_under_schedule(self, degrees: Degrees, form: Grid, scheduler: Scheduler) -> _Trial:
        """Return a trial of a factorisation under a schedule, placed by the strategy `form`;
        without a step if nothing fits.

        Micro-batches and recomputation are chosen for 1F1B, but the schedule can need more
        micro-batches or more memory. If it fails, smaller micro-batches are tried, and then
        recomputation of all stages.
        """
        first: _Trial | None = None
        for recompute in (None, "full") if self._planned.problem.train else (None,):
            trial = self._trial(degrees, form, scheduler.name, recompute=recompute)
            while trial.placed is not None:
                ordered = self._with_schedule(trial, trial.placed, scheduler, always=True)
                if ordered.row.step_time_s is not None:
                    return ordered
                first = first or ordered
                size = trial.placed.problem.micro_batch_size
                trial = self._trial(degrees, form, scheduler.name, size // 2, recompute)
            first = first or trial
        assert first is not None, "at least one trial was made"
        return first

    def _reason(self, row: DegreeRow, found: Breakdown) -> str:
        """Return, as text, why the row is not the plan: the two parts of its step that take most
        additional time, and whether even the shortest possible schedule is too long.

        `found` is the breakdown of the row's step.
        """
        plan = self._planned.plan
        step_s = row.step_time_s or 0.0
        plan_s = plan.summary.step_time_s
        if row.is_plan:
            return "the degrees of the plan"
        if step_s <= plan_s * (1 + SAME):
            return "not longer than the plan"
        own = plan.breakdown
        told = []
        if own is not None:
            parts = [field.name for field in dataclasses.fields(Breakdown)]
            more = {
                name.removesuffix("_s"): getattr(found, name) - getattr(own, name) for name in parts
            }
            most = sorted(more.items(), key=lambda each: -each[1])[:2]
            longer = [(name, seconds) for name, seconds in most if seconds > _FEWEST_SECONDS]
            # The plan's step time is 0 if the graph only moves data, so a percentage is undefined.
            told = [
                f"{name} {seconds / plan_s:+.1%}" if plan_s else name for name, seconds in longer
            ]
        reason = ", ".join(told) or "longer"
        if row.lower_bound_s is not None and row.lower_bound_s >= plan_s * (1 - SAME):
            reason += "; too long under any schedule"
        return reason

    def _is_plan(self, trial: _Trial) -> bool:
        """True if the plan has the degrees of the trial, one pipeline, and one stage per group of
        devices, with groups of equal size.
        """
        own = self._planned.plan.summary.degrees
        row = trial.row
        assert trial.candidate is not None
        form = replace(cast(Grid, trial.candidate.strategy), pipeline=None, data=None, tensor=None)
        if own is None or form != Grid():
            return False
        same = (row.pipeline, (row.data, row.data), (row.tensor, row.tensor)) == (
            own.pipeline,
            own.data,
            own.tensor,
        )
        alone = (
            own.pipelines == 1
            and own.stages_per_group == (1, 1)
            and own.sequence == own.copies == (1, 1)
        )
        return same and alone and len(set(own.groups)) == 1


def _without_step(row: DegreeRow, schedule: str) -> DegreeRow:
    """Return a row with the degrees and micro-batches of `row`, without a step."""
    return DegreeRow(
        row.pipeline,
        row.data,
        row.tensor,
        schedule,
        row.text,
        row.micro_batches,
        row.micro_batch_size,
    )


def _grid_for_scheduler(scheduler: Scheduler) -> Grid:
    """Return strategy `grid` without degrees, with the placement pattern that a schedule requires:
    stages per rank, style, or two pipelines in opposite directions.
    """
    pattern: PlacementPattern | None = (
        getattr(scheduler, "pattern", None) if isinstance(scheduler, Published) else None
    )
    if pattern is None:
        return Grid()
    if pattern.pipelines == 2:
        return Grid(opposite=True)
    return Grid(
        stages_per_rank=2 if pattern.returns or pattern.repeats else 1,
        style="v" if pattern.returns else "loop",
    )


def _is_possible_with(form: Grid, degrees: Degrees) -> bool:
    """True if stages with these degrees can be placed in the pattern of `form`: two pipelines in
    opposite directions, several stages per rank, or one stage per rank.
    """
    if form.opposite:
        return degrees.pipeline % 2 == 0
    return degrees.pipeline > 1 or form.stages_per_rank == 1
