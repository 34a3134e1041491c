"""What a plan's step would take under another placement, everything else as it is.

The price of a change is what planning the edited placement gives: the plan's own scheduler orders it anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from autopipe.ir.errors import REFUSALS, InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.passes.pipeline import Placed, Planned, foreseen, named, schedule
from autopipe.passes.runner import Runner, Silent
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
class Price:
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


def priced(planned: Planned, change: Change) -> Price:
    """What planning the edited placement, with the plan's own scheduler, gives."""
    try:
        placed = _placed(planned, change.placement)
        found = schedule(placed, named(planned.request)[1], Runner(Silent()))
    except REFUSALS as error:
        return Price(change.what, change.placement, refused=error.line)
    return Price(change.what, change.placement, found.timeline.end, max(found.timeline.peak_memory))


def cheapest(planned: Planned, changes: Iterable[Change], wanted: int) -> tuple[Price, ...]:
    """The best change of each kind, the one that costs least first; then those that looked as cheap and have no plan.

    All are weighed in the order of the plan's schedule, the most promising are scheduled anew.
    """
    weighed = [(_weight(planned, each), each) for each in _once(changes)]
    possible = sorted((each for each in weighed if not math.isinf(each[0])), key=lambda each: each[0])
    best: dict[str, Change] = {}
    for _, change in possible:
        best.setdefault(change.kind, change)
    found: list[Price] = []
    for change in list(best.values())[:_MOST]:
        if sum(each.step_s is not None for each in found) < wanted:
            found.append(priced(planned, change))
    return tuple(sorted(found, key=lambda each: each.rank))


def _once(changes: Iterable[Change]) -> list[Change]:
    """The changes without those that come to a placement seen before."""
    return list({each.placement: each for each in reversed(list(changes))}.values())[::-1]


def _weight(planned: Planned, change: Change) -> float:
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


def _placed(planned: Planned, placement: Placement) -> Placed:
    placement.verify(planned.problem.graph)
    return foreseen(planned.model, planned.problem, placement, Runner(Silent()))
