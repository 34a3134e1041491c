"""Limits of a search by the size of the problem alone: searches that take too long for their promise are left out."""

from __future__ import annotations

from autopipe.ir.errors import AutopipeError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.auto.candidate import Candidate
from autopipe.passes.base import Scheduler, Strategy
from autopipe.passes.placement.grid import Grid

_MOST_SIZE = {
    "breadth_first": 2**14,
    "mcmc": 2**14,
    "graphpipe": 2**16,
    "grid with chunks": 2**16,
    "pase": 2**16,
    "pipedream": 2**16,
    "piper": 2**16,
    "tepdist": 2**16,
    "tessel_shapes": 2**16,
}
"""By what is searched the most operators times devices; others take about as long for any number of devices.

32 devices with a thousand operators each are below all but the least: those are baselines of pase's.
"""

_QUICK = ("data_parallel", "expert", "manual", "one_weird_trick")
"""Strategies that search nothing."""

_LONG = ("tepdist", "piper")
"""Strategies whose search takes longest."""

_MUCH_IN_COMMON = ("graphpipe", "grid", "tessel_shapes")
"""Strategies whose forms read the same from a model on micro-batches of one size."""

_MOST_TASKS = 2**14
"""The most stages times micro-batches for which every schedule is simulated, whatever bounds say."""

_MOST_SEARCHED = 2**11
"""The most of them for which a schedule is searched."""


class LeftOutError(AutopipeError):
    """A choice that the search for the best plan does not look into."""


def left_out(strategy: Strategy, operators: int, devices: int) -> LeftOutError | None:
    """Reason to leave out a strategy that would search too long for `operators` on `devices`."""
    most = _MOST_SIZE.get(_form(strategy))
    if most is None or operators * devices <= most:
        return None
    return LeftOutError(
        f"left out: {_form(strategy)} would search long for {operators} operators on {devices} devices; "
        "name it to have it searched"
    )


def _form(strategy: Strategy) -> str:
    """Kind of search: the step of stages that a line passes again and again needs a list of all tasks."""
    is_open = isinstance(strategy, Grid) and strategy.chunks > 1 and strategy.pipeline is None
    return "grid with chunks" if is_open else strategy.name


def is_quick(strategy: Strategy) -> bool:
    """True if a strategy answers so soon that no other process needs to be asked."""
    return strategy.name in _QUICK


def takes_long(strategy: Strategy) -> bool:
    """True if a search should be begun early, so that it is not what the others are waited for in the end."""
    return strategy.name in _LONG


def in_common(candidate: Candidate) -> object:
    """Equal for candidates that have most of their work in common, which a process does once."""
    if candidate.strategy.name in _MUCH_IN_COMMON:
        return candidate.strategy.name, candidate.micro_batches, candidate.recompute, candidate.shard
    return candidate


def is_searched(scheduler: Scheduler) -> bool:
    """True if an order of tasks is searched, which takes longer than all named schedules together."""
    return scheduler.name == "tessel"


def check_scheduler(scheduler: Scheduler, problem: Problem, placement: Placement) -> None:
    """Raise LeftOutError for a search of the order of too many tasks."""
    if is_searched(scheduler) and _size(problem, placement) > _MOST_SEARCHED:
        raise LeftOutError(
            f"left out: {scheduler.name} would search long for {len(placement.stages)} stages and "
            f"{problem.micro_batches} micro-batches; name it to have it searched"
        )


def is_large(problem: Problem, placement: Placement) -> bool:
    """True if a step has enough tasks that it is simulated only where it could be the shortest."""
    return _size(problem, placement) > _MOST_TASKS


def _size(problem: Problem, placement: Placement) -> int:
    return len(placement.stages) * problem.micro_batches
