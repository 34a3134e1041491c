"""The candidates of strategy `auto`: each placement strategy with the options that schedules need,
in ascending order of planning time. Also the rules that skip candidates whose search would take too
long for the size of the problem.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autopipe.ir.errors import AutopipeError
from autopipe.ir.plan import Choice
from autopipe.ir.problem import Mode, Scores
from autopipe.ir.words import plural
from autopipe.passes.pipeline import PredictedPlacement, Request
from autopipe.passes.placement.grid import Grid
from autopipe.passes.registry import STRATEGIES, Scheduler, Strategy, strategy_class, strategy_names
from autopipe.passes.schedule.published.base import PlacementPattern, Published


@dataclass(frozen=True, slots=True)
class Candidate:
    """A placement strategy with those settings of a request that `auto` chooses. Only the schedule
    is not chosen yet.
    """

    strategy: Strategy
    micro_batches: int | None = None
    """Number of micro-batches per step; None if the request or the strategy determines it."""
    recompute: str = "none"
    shard: bool = False
    """True if replicas shard the optimizer state."""
    scores: Scores | None = None
    """`keep` if losses save their logits for backward, `recompute` if they recompute them; None to
    use the form that the request names.
    """

    def apply_to(self, request: Request) -> Request:
        """Return the request with the settings of this candidate in its open fields."""
        count = request.micro_batches if self.micro_batches is None else self.micro_batches
        if request.micro_batch_size is not None and request.batch_size is not None:
            count = request.batch_size // request.micro_batch_size
        return dataclasses.replace(
            request,
            strategy=self.strategy,
            micro_batches=count,
            recompute=request.recompute or self.recompute,
            scores=self.scores or request.scores,
            optimizer=dataclasses.replace(
                request.optimizer, shard=request.optimizer.shard or self.shard
            ),
        )

    def choice(self, request: Request, schedule: str | None = None) -> Choice:
        """Return the settings of this candidate with schedule `schedule`. The command-line flags
        for these settings reproduce the candidate. Options that are not texts are written as JSON,
        which YAML also reads.
        """
        assert dataclasses.is_dataclass(self.strategy)
        settled = self.apply_to(request)
        values = {
            field: getattr(self.strategy, field.name) for field in dataclasses.fields(self.strategy)
        }
        given = {field.name: value for field, value in values.items() if value != field.default}
        return Choice(
            strategy=self.strategy.name,
            options=tuple(
                (name, each if isinstance(each, str) else json.dumps(each))
                for name, each in given.items()
            ),
            schedule=schedule,
            micro_batches=settled.micro_batches,
            recompute=settled.recompute or self.recompute,
            shard=settled.optimizer.shard,
            scores=settled.scores,
        )


_FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("manual", {}),
    ("data_parallel", {}),
    ("handcrafted", {}),
    ("one_weird_trick", {}),
    ("pase", {}),
    ("grid", {}),
    ("pipedream", {}),
    ("tessel_shapes", {}),
    *(("tessel_shapes", {"shape": shape}) for shape in ("v", "x", "m", "nn", "k")),
    ("tessel_shapes", {"shape": "v", "stages_per_rank": 2}),
    ("tessel_shapes", {"shape": "v", "stages_per_rank": 2, "style": "v"}),
    ("graphpipe", {}),
    ("grid", {"stages_per_rank": 2}),
    ("grid", {"stages_per_rank": 2, "style": "v"}),
    ("grid", {"opposite": True}),
    ("graphpipe", {"per_stage_micro_batch": True}),
    ("graphpipe", {"intra": "pase"}),
    ("pipedream", {"sweep": True}),
    ("tepdist", {}),
    ("piper", {}),
    ("breadth_first", {}),
    ("mcmc", {}),
)
"""Strategies with their options, in the order in which they are tried. Planning time is about
ascending, so that a first plan is found soon. Shape x of tessel_shapes is for schedule Chimera.
Several stages per rank are for interleaved 1F1B and the zero-bubble V schedules.
"""

_WITH_AND_WITHOUT = ("tepdist",)
"""Strategies that search with and without recomputation at the same time. If memory may not
suffice, one search that permits recomputation replaces two searches.
"""
_FOLLOWERS = ("explicit", "manual")
"""Strategies that follow the user's instructions. `explicit` is no candidate, and `manual` is one
only if there are constraints.
"""


def candidates(request: Request, short: bool = False) -> Iterator[Candidate]:
    """Yield the candidates for a request. Strategies of other packages come last.

    `short` is True if memory may not suffice without recomputation.
    """
    for name, options in _strategies_with_options(request):
        recompute = "auto" if short and name in _WITH_AND_WITHOUT else "none"
        yield Candidate(strategy_class(name)(**options), recompute=recompute)


def candidate_strategies(request: Request) -> tuple[str, ...]:
    """Return the distinct names of the strategies of all candidates. Built-in strategies are not
    imported.
    """
    names = dict.fromkeys(name for name, _ in _strategies_with_options(request))
    return tuple(name if name in STRATEGIES else strategy_class(name).name for name in names)


def _strategies_with_options(request: Request) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (strategy name, options) for each candidate of a request."""
    known = strategy_names()
    listed = dict(_FORMS)
    for name, options in (*_FORMS, *((name, {}) for name in known if name not in listed)):
        is_open = name not in _FOLLOWERS or (name == "manual" and request.constraints)
        if name in known and is_open and may_support_schedule(request, name, options):
            yield name, options


_BRANCHED = ("m", "nn", "k")
"""Shapes of tessel_shapes that combine stages on all devices with stages on one device. No
published schedule supports these shapes.
"""


def may_support_schedule(request: Request, name: str, options: Mapping[str, Any]) -> bool:
    """Return False if a candidate of strategy `name` with `options` is of no use for the schedule
    of the request, and otherwise True.

    If the request names a published schedule for training, the strategy and its options must give
    placements of the shape that the schedule requires. Option `opposite` of grid is for these
    schedules only, so the result is False for it in all other requests. The placements of strategy
    manual and of strategies of other packages are not known in advance, so the result for these
    strategies is True.
    """
    scheduler = request.scheduler
    if options.get("opposite") and (
        not isinstance(scheduler, Published) or request.mode is Mode.INFER
    ):
        # For schedules that are not published ones, and for inference, strategy tessel_shapes
        # already offers two opposite pipelines as its shape x. Option `opposite` of grid is
        # therefore skipped.
        return False
    if not isinstance(scheduler, Published) or request.mode is Mode.INFER or name in _FOLLOWERS:
        return True
    pattern: PlacementPattern | None = getattr(scheduler, "pattern", None)
    if pattern is None or name not in STRATEGIES:
        return True
    if pattern.pipelines == 2:
        return options.get("shape") == "x" or bool(options.get("opposite"))
    if pattern.returns:
        return options.get("style") == "v"
    if (
        options.get("style") == "v"
        or options.get("opposite")
        or options.get("shape") in ("x", *_BRANCHED)
    ):
        return False
    return pattern.repeats or options.get("stages_per_rank", 1) == 1


_MAX_SIZE = {
    **dict.fromkeys(("breadth_first", "mcmc"), 2**14),
    **dict.fromkeys(
        (
            "graphpipe",
            "grid, several stages per rank",
            "pase",
            "pipedream",
            "piper",
            "tepdist",
            "tessel_shapes",
        ),
        2**16,
    ),
}
"""By strategy: maximum number of operators times devices for which the strategy is a candidate. The
planning time of strategies that are not listed hardly depends on the number of devices.
"""

QUICK = ("data_parallel", "handcrafted", "manual", "one_weird_trick")
"""Strategies without a search. They run in this process."""
LONG = ("tepdist", "piper")
"""Strategies with the longest searches. They are started early in other processes."""
_MUCH_IN_COMMON = ("graphpipe", "grid", "tessel_shapes")
"""Strategies whose searches with different options share cached intermediate results."""
_OTHER_FIELDS = ("micro_batches", "recompute", "shard", "scores")
"""Names of the fields of a candidate other than its strategy."""
_MAX_TASKS = 2**14
"""Maximum number of stages times micro-batches for which a placement is simulated even if the lower
bound on its step exceeds the best step.
"""
_MAX_SEARCHED = 2**11
"""Maximum number of stages times micro-batches for which a schedule is searched."""


class SkippedError(AutopipeError):
    """The reason why strategy `auto` skips a candidate or a schedule."""


def skip_reason(strategy: Strategy, operators: int, devices: int) -> SkippedError | None:
    """Return the reason to skip a strategy because its search for `operators` operators on
    `devices` devices would take too long. Return None if it is not skipped.
    """
    # The estimate of a step with interleaved stages needs a list of all tasks, which takes long, so
    # such grids have a limit of their own.
    is_interleaved = (
        isinstance(strategy, Grid) and strategy.stages_per_rank > 1 and strategy.pipeline is None
    )
    form = "grid, several stages per rank" if is_interleaved else strategy.name
    if operators * devices <= _MAX_SIZE.get(form, math.inf):
        return None
    size = f"{operators} {plural(operators, 'operator')} on {devices} {plural(devices, 'device')}"
    return SkippedError(
        f"skipped: {form} would search long for {size}; name it to have it searched"
    )


def shared_work_key(candidate: Candidate) -> object:
    """Return a key that is equal for candidates that share most of their work. One process should
    run all candidates with equal keys.
    """
    if candidate.strategy.name in _MUCH_IN_COMMON:
        return candidate.strategy.name, *(getattr(candidate, name) for name in _OTHER_FIELDS)
    return candidate


def is_search_scheduler(scheduler: Scheduler) -> bool:
    """True if the scheduler searches an order of tasks. This takes longer than all published
    schedules.
    """
    return scheduler.name == "tessel"


def scheduler_skip_reason(scheduler: Scheduler, placed: PredictedPlacement) -> SkippedError | None:
    """Return the reason to skip a scheduler because its search for this placement would take too
    long. Return None if it is not skipped.
    """
    stages = len(placed.placement.stages)
    count = placed.problem.micro_batches
    if not is_search_scheduler(scheduler) or stages * count <= _MAX_SEARCHED:
        return None
    size = f"{stages} {plural(stages, 'stage')} and {count} {plural(count, 'micro-batch')}"
    return SkippedError(
        f"skipped: {scheduler.name} would search long for {size}; name it to have it searched"
    )


def has_many_tasks(placed: PredictedPlacement) -> bool:
    """True if stages times micro-batches exceed `_MAX_TASKS`. Then the step is simulated only if
    its lower bound is below the best step.
    """
    return len(placed.placement.stages) * placed.problem.micro_batches > _MAX_TASKS
