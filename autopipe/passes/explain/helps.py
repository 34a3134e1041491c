"""What-if analysis: the plan made again, or its placement scheduled again, under a changed problem."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopipe.ir.cluster import Cluster, Level
from autopipe.ir.errors import REFUSALS
from autopipe.ir.problem import Problem
from autopipe.passes.pipeline import PlanResult, make_plan, predict_placement, schedule, strategy_and_scheduler
from autopipe.passes.request import Request
from autopipe.passes.runner import NullObserver, Runner

_MOST_S = 5.0
"""Seconds that the strategy may have taken for it to be asked again for each wish."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A change of what a plan is made for, in words."""

    what: str
    request: Request


@dataclass(frozen=True, slots=True)
class WhatIfResult:
    """Result of a what-if."""

    what: str
    planned_again: bool
    """True if the strategy was asked again; else the placement is that of the plan, ordered anew."""
    samples_per_s: float | None = None
    """Of the new step; None where there is none."""
    refused: str | None = None


def wishes(planned: PlanResult) -> Iterator[WhatIf]:
    """More memory, faster links, more micro-batches: twice as much of each, one at a time."""
    request, problem = planned.request, planned.problem
    cluster = request.cluster
    if request.memory_limit is None:
        roomy = tuple(replace(device, memory_bytes=2 * device.memory_bytes) for device in cluster.devices)
        yield WhatIf("twice the memory", replace(request, cluster=replace(cluster, devices=roomy)))
    else:
        yield WhatIf("twice the memory", replace(request, memory_limit=2 * request.memory_limit))
    for inside, where in ((True, "inside nodes"), (False, "between nodes")):
        faster = _faster(cluster, inside)
        if faster != cluster:
            yield WhatIf(f"twice the bandwidth {where}", replace(request, cluster=faster))
    count, size = problem.micro_batches, problem.batch_size
    if size % (2 * count) == 0:
        halves = replace(request, batch_size=size, micro_batches=2 * count, micro_batch_size=None)
        yield WhatIf("twice the micro-batches, of half the size", halves)
    longer = replace(request, batch_size=2 * size, micro_batches=2 * count, micro_batch_size=None)
    yield WhatIf("twice the micro-batches, of the same size", longer)


def is_quick(planned: PlanResult) -> bool:
    """True if the strategy took so little time that it can be asked again for each wish."""
    strategy, _ = strategy_and_scheduler(planned.request)
    return dict(planned.plan.summary.search_time_s).get(strategy.name, 0.0) <= _MOST_S


def granted(planned: PlanResult, wish: WhatIf, again: bool) -> WhatIfResult:
    """Result of a change: planned `again` by strategy and scheduler, else the placement as it is, ordered anew."""
    try:
        if again:
            return WhatIfResult(wish.what, True, make_plan(wish.request).plan.summary.samples_per_s)
        return _kept(planned, wish)
    except REFUSALS as error:
        return WhatIfResult(wish.what, again, refused=error.line)


def _kept(planned: PlanResult, wish: WhatIf) -> WhatIfResult:
    """The step of the same placement, ordered anew."""
    problem = _changed(planned.problem, wish.request)
    if problem is None:
        return WhatIfResult(wish.what, False, refused="asks for another placement, and this one was long searched for")
    runner = Runner(NullObserver())
    placed = predict_placement(planned.model, problem, planned.plan.placement, runner)
    found = schedule(placed, strategy_and_scheduler(planned.request)[1], runner)
    return WhatIfResult(wish.what, False, problem.batch_size / found.timeline.end)


def _changed(problem: Problem, request: Request) -> Problem | None:
    """The problem under the request; None where its micro-batches are of another size, or its devices others."""
    count, size = request.micro_batches or problem.micro_batches, request.batch_size or problem.batch_size
    if request.cluster.size != problem.cluster.size or size // count != problem.micro_batch_size:
        return None
    limit = request.memory_limit
    return replace(problem, cluster=request.cluster, memory_limit=limit, micro_batches=count, batch_size=size)


def _faster(cluster: Cluster, inside: bool) -> Cluster:
    """The cluster with twice the bandwidth inside its nodes, or of all other links; what was measured stays."""
    if cluster.groups:
        groups = tuple(replace(group, levels=_faster_levels(group.levels, inside)) for group in cluster.groups)
        joined = cluster.levels if inside else tuple(map(_doubled, cluster.levels))
        return replace(cluster, groups=groups, levels=joined)
    return replace(cluster, levels=_faster_levels(cluster.levels, inside))


def _faster_levels(levels: tuple[Level, ...], inside: bool) -> tuple[Level, ...]:
    return tuple(_doubled(level) if (place == 0) == inside else level for place, level in enumerate(levels))


def _doubled(level: Level) -> Level:
    if level.size == 1:
        return level
    return replace(level, link=replace(level.link, bandwidth_bytes_per_s=2 * level.link.bandwidth_bytes_per_s))
