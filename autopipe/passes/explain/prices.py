"""Step of a plan under another placement, everything else as it is.

The price of a change is the step of the edited placement, ordered by the plan's own scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from autopipe.ir.errors import REFUSALS, InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.passes.pipeline import Placed, PlanResult, predict_placement, schedule, strategy_and_scheduler
from autopipe.passes.runner import NullObserver, Runner
from autopipe.passes.schedule.limits import lower_bound
from autopipe.passes.schedule.simulate import simulate

_MOST = 6
"""Changes that are scheduled anew, before it is given up to find as many as are wanted."""


@dataclass(frozen=True, slots=True)
class Change:
    """An edited placement, and what was edited, in words."""

    kind: str
    """Of changes of one kind only the best is of interest."""
    what: str
    placement: Placement


@dataclass(frozen=True, slots=True)
class EditPrice:
    """A change and what its step takes, or why there is none."""

    what: str
    placement: Placement
    step_s: float | None = None
    peak_memory_bytes: int | None = None
    """The most on any device."""
    refused: str | None = None

    @property
    def rank(self) -> float:
        """Seconds of the step, infinite where there is none."""
        return math.inf if self.step_s is None else self.step_s


def priced(planned: PlanResult, change: Change) -> EditPrice:
    """Plan the edited placement with the plan's own scheduler."""
    try:
        placed = _placed(planned, change.placement)
        found = schedule(placed, strategy_and_scheduler(planned.request)[1], Runner(NullObserver()))
    except REFUSALS as error:
        return EditPrice(change.what, change.placement, refused=error.line)
    return EditPrice(change.what, change.placement, found.timeline.end, max(found.timeline.peak_memory))


def cheapest(planned: PlanResult, changes: Iterable[Change], wanted: int) -> tuple[EditPrice, ...]:
    """The best change of each kind, the one that costs least first; then those that looked as cheap and have no plan.

    All are weighed in the order of the plan's schedule, the most promising are scheduled anew.
    """
    weighed = [(_weight(planned, each), each) for each in _once(changes)]
    possible = sorted((each for each in weighed if not math.isinf(each[0])), key=lambda each: each[0])
    best: dict[str, Change] = {}
    for _, change in possible:
        best.setdefault(change.kind, change)
    found: list[EditPrice] = []
    for change in list(best.values())[:_MOST]:
        if sum(each.step_s is not None for each in found) < wanted:
            found.append(priced(planned, change))
    return tuple(sorted(found, key=lambda each: each.rank))


def _once(changes: Iterable[Change]) -> list[Change]:
    """The changes without those that come to a placement seen before."""
    return list({each.placement: each for each in reversed(list(changes))}.values())[::-1]


def _weight(planned: PlanResult, change: Change) -> float:
    """About what a change's step takes: infinite where it cannot be placed."""
    try:
        placed = _placed(planned, change.placement)
    except REFUSALS:
        return math.inf
    if len(placed.placement.stages) == len(planned.plan.placement.stages):
        try:
            return simulate(planned.plan.schedule, placed.graph.stage_devices, placed.prediction).end
        except InfeasibleError:
            pass  # The order cannot run any more: its scheduler finds another one.
    return lower_bound(placed.problem, placed.placement, placed.prediction)


def _placed(planned: PlanResult, placement: Placement) -> Placed:
    placement.verify(planned.problem.graph)
    return predict_placement(planned.model, planned.problem, placement, Runner(NullObserver()))
