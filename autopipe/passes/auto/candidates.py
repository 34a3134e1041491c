"""Candidates of a search for the best plan: every strategy in the forms that schedules ask for, the
cheap ones first; and which of them search too long for their promise, by the size of the problem
alone.
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
from autopipe.passes.pipeline import Placed, Request
from autopipe.passes.placement.grid import Grid
from autopipe.passes.registry import STRATEGIES, Scheduler, Strategy, strategy_class, strategy_names
from autopipe.passes.schedule.published.base import PlacementPattern, Published


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request in which the schedule alone is open, told by what it settles."""

    strategy: Strategy
    micro_batches: int | None = None
    """None where the request says how many, or the strategy does."""
    recompute: str = "none"
    shard: bool = False
    """True if the optimizer's state is shared out among replicas."""
    scores: Scores | None = None
    """Form of the losses, which keep their scores or recompute them; None for the form that the
    request says.
    """

    def settled(self, request: Request) -> Request:
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
        """Command-line choice that reproduces this candidate. JSON's spelling of options is YAML's,
        too.
        """
        assert dataclasses.is_dataclass(self.strategy)
        settled = self.settled(request)
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
"""Strategies and options in the order in which they are tried: about that of the time they take, so
that there is a plan soon. Shape x is for Chimera; several stages per rank are for
interleaved 1F1B and the zero-bubble V schedules.
"""

_WITH_AND_WITHOUT = ("tepdist",)
"""Strategies that weigh what recomputes against what does not: one search where memory asks for it,
instead of two.
"""
_FOLLOWERS = ("explicit", "manual")
"""Strategies that follow what somebody writes; of them, constraints make manual a candidate."""


def candidates(request: Request, short: bool = False) -> Iterator[Candidate]:
    """The candidates for a request, those of other packages' strategies last. `short` says whether
    there may be less memory than a step wants, and recomputation may help.
    """
    for name, options in _forms(request):
        recompute = "auto" if short and name in _WITH_AND_WITHOUT else "none"
        yield Candidate(strategy_class(name)(**options), recompute=recompute)


def strategies_of(request: Request) -> tuple[str, ...]:
    """The names of the candidates' strategies, each once; our own need not be loaded for that."""
    names = dict.fromkeys(name for name, _ in _forms(request))
    return tuple(name if name in STRATEGIES else strategy_class(name).name for name in names)


def _forms(request: Request) -> Iterator[tuple[str, dict[str, Any]]]:
    known = strategy_names()
    listed = dict(_FORMS)
    for name, options in (*_FORMS, *((name, {}) for name in known if name not in listed)):
        is_open = name not in _FOLLOWERS or (name == "manual" and request.constraints)
        if name in known and is_open and may_suit(request, name, options):
            yield name, options


_BRANCHED = ("m", "nn", "k")
"""Shapes of tessel_shapes with stages on all devices beside stages on one, which no published form
admits.
"""


def may_suit(request: Request, name: str, options: Mapping[str, Any]) -> bool:
    """Return False if the request names a schedule that cannot run what the built-in strategy
    `name` gives with `options`. Strategy manual and the strategies of other packages may give any
    form.
    """
    scheduler = request.scheduler
    if options.get("opposite") and (
        not isinstance(scheduler, Published) or request.mode is Mode.INFER
    ):
        return False  # A search over all schedules has such placements by tessel_shapes.
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


_MOST_SIZE = {
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
"""By what is searched the most operators times devices; others take about as long for any number of
devices. 32 devices with a thousand operators each are below all but the least: those are baselines
of pase's.
"""

QUICK = ("data_parallel", "handcrafted", "manual", "one_weird_trick")
"""Strategies that search nothing: no other process needs to be asked."""
LONG = ("tepdist", "piper")  # Strategies whose search takes longest: it is begun early.
_MUCH_IN_COMMON = ("graphpipe", "grid", "tessel_shapes")
"""Strategies whose forms read the same from a model on micro-batches of one size."""
_BESIDE_STRATEGY = ("micro_batches", "recompute", "shard", "scores")
"""Fields of a candidate besides its strategy."""
_MOST_TASKS = (
    2**14
)  # The most stages times micro-batches for which every schedule is simulated, whatever bounds say.
_MOST_SEARCHED = 2**11  # The most of them for which a schedule is searched.


class LeftOutError(AutopipeError):
    """A choice that the search for the best plan does not look into."""


def left_out(strategy: Strategy, operators: int, devices: int) -> LeftOutError | None:
    """Reason to leave out a strategy that would search too long for `operators` on `devices`."""
    # The step of stages that a line passes again and again needs a list of all tasks.
    is_interleaved = (
        isinstance(strategy, Grid) and strategy.stages_per_rank > 1 and strategy.pipeline is None
    )
    form = "grid, several stages per rank" if is_interleaved else strategy.name
    if operators * devices <= _MOST_SIZE.get(form, math.inf):
        return None
    size = f"{operators} {plural(operators, 'operator')} on {devices} {plural(devices, 'device')}"
    return LeftOutError(
        f"left out: {form} would search long for {size}; name it to have it searched"
    )


def in_common(candidate: Candidate) -> object:
    """Equal for candidates that have most of their work in common, which a process does once."""
    if candidate.strategy.name in _MUCH_IN_COMMON:
        return candidate.strategy.name, *(getattr(candidate, name) for name in _BESIDE_STRATEGY)
    return candidate


def is_searched(scheduler: Scheduler) -> bool:
    """True if an order of tasks is searched, which takes longer than all named schedules
    together.
    """
    return scheduler.name == "tessel"


def scheduler_left_out(scheduler: Scheduler, placed: Placed) -> LeftOutError | None:
    """Reason to leave out a search of the order of too many tasks."""
    stages = len(placed.placement.stages)
    count = placed.problem.micro_batches
    if not is_searched(scheduler) or stages * count <= _MOST_SEARCHED:
        return None
    size = f"{stages} {plural(stages, 'stage')} and {count} {plural(count, 'micro-batch')}"
    return LeftOutError(
        f"left out: {scheduler.name} would search long for {size}; name it to have it searched"
    )


def is_large(placed: Placed) -> bool:
    """True if a step has enough tasks that it is simulated only where it could be the shortest."""
    return len(placed.placement.stages) * placed.problem.micro_batches > _MOST_TASKS
