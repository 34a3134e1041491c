"""Placements by trial: orders of a mixed cluster's groups along the pipeline, and sizes of
micro-batches.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from autopipe.ir.cluster import Cluster, Device
from autopipe.ir.errors import REFUSALS, AutopipeError, InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.stage_nodes import live_nodes
from autopipe.passes.cost.measured import resized
from autopipe.passes.cost.memory_check import check_kinds
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.schedule.limits import quick_step_seconds

_FEW_KINDS = (
    3  # Up to this many kinds all orders are tried; of more the given one, and its reverse.
)


def best_order(
    problem: Problem, place: Callable[[Problem], Placement], parts: bool = True
) -> Placement:
    """Place the problem with its cluster's groups in the order whose simulated step is shortest.

    With `parts` the groups of some kinds are tried without the others first, where no constraint
    names devices: fewer devices are searched sooner, and their step ends the search among all of
    them early. It is not for strategies that leave devices out by themselves. The placement's
    devices are those of the problem as it is given. Of equal steps the first counts. Raises what
    `place` raises for the given order where none has a placement, and InfeasibleError for a stage
    that straddles kinds without being asked to.
    """
    if len(problem.cluster.groups) < 2:
        found = place(problem)
        check_kinds(problem, found)
        return found
    best: tuple[float, Placement] | None = None
    refused: AutopipeError | None = None
    given = tuple(range(len(problem.cluster.groups)))
    named = any(each.devices is not None for each in problem.constraints)
    orders = [
        *(parts_of(problem.cluster) if parts and not named else ()),
        *orders_of(problem.cluster),
    ]
    end = None if problem.time_limit is None else time.monotonic() + problem.time_limit
    for position, order in enumerate(orders):
        trial, old = _reordered(problem, order)
        if end is not None:
            trial = replace(
                trial, time_limit=max(0.0, (end - time.monotonic()) / (len(orders) - position))
            )
        if best is not None:
            trial = replace(trial, known_s=min(problem.known_s, best[0]))
            if ideal_s(trial) >= best[0] or trial.time_limit == 0:
                continue
        try:
            found = place(trial)
            check_kinds(trial, found)
            sized = resized(trial, max(stage.micro_batch_size for stage in found.stages))
            seconds = quick_step_seconds(sized, found, stage_costs(sized, found))
        except REFUSALS as error:
            if refused is None or order == given:
                refused = error
            continue
        if best is None or seconds < best[0]:
            stages = (
                replace(stage, devices=tuple(old[device] for device in stage.devices))
                for stage in found.stages
            )
            best = seconds, replace(found, stages=tuple(stages))
    if best is None:
        assert refused is not None, "there is the order that is given"
        raise refused
    return best[1]


def orders_of(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Orders of a cluster's groups that differ in more than names, the given one first; groups of
    one kind together.
    """
    given = tuple(range(len(cluster.groups)))
    kinds = _kinds(cluster)
    every = tuple(dict.fromkeys(kinds))
    orders = [given, *(_permuted(kinds, every) if len(every) <= _FEW_KINDS else [given[::-1]])]
    by_content: dict[object, tuple[int, ...]] = {}
    for order in orders:
        by_content.setdefault(tuple((kinds[each], cluster.groups[each]) for each in order), order)
    yield from by_content.values()


def parts_of(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Orders of the groups of some kinds alone, few kinds first; of more than a few kinds each by
    itself.
    """
    kinds = _kinds(cluster)
    every = tuple(dict.fromkeys(kinds))
    for count in range(1, len(every)) if len(every) <= _FEW_KINDS else (1,):
        for some in itertools.combinations(every, count):
            yield from _permuted(kinds, some)


def _permuted(kinds: Sequence[Device], some: Sequence[Device]) -> list[tuple[int, ...]]:
    """The groups of `some` kinds, each kind's together, in every order of the kinds."""
    mine = [group for group, kind in enumerate(kinds) if kind in some]
    return [
        tuple(sorted(mine, key=lambda group: each.index(kinds[group])))
        for each in itertools.permutations(some)
    ]


def _kinds(cluster: Cluster) -> list[Device]:
    """The kind of each group, by its first device."""
    firsts = itertools.accumulate((group.size for group in cluster.groups[:-1]), initial=0)
    return [cluster.devices[first] for first in firsts]


def ideal_s(problem: Problem) -> float:
    """Seconds that no step can be shorter than, whoever computes what and however it is split. The
    fullest device is no less busy than any weighted mean of all. Weighted by their speeds, a node
    adds least where that is least; shares of it are counted as that part of what it takes, and
    launches as nothing.
    """
    counts = Counter(problem.cluster.devices)
    work = [problem.work[node] for node in live_nodes(problem.graph, problem.wanted)]
    seconds = []
    for kind in counts:
        forward, backward = node_seconds(
            work, replace(kind, launch_latency_s=0.0), problem.precision
        )
        seconds.append(forward + (backward if problem.train else 0.0))
    wholes = [float(each.sum()) for each in seconds]
    if not all(wholes) or any(each.measured for each in work):
        return 0.0
    rate = sum(count / whole for count, whole in zip(counts.values(), wholes, strict=True))
    least = np.minimum.reduce(
        [each / (whole * rate) for each, whole in zip(seconds, wholes, strict=True)]
    )
    return problem.micro_batches * float(least.sum())


def _reordered(problem: Problem, order: Sequence[int]) -> tuple[Problem, tuple[int, ...]]:
    """The problem with its groups in another order, and for each of its devices the index it has in
    the given one.
    """
    cluster, old = problem.cluster.reordered(order)
    new = {device: index for index, device in enumerate(old)}
    constraints = (
        replace(
            each, devices=each.devices and tuple(new.get(device, device) for device in each.devices)
        )
        for each in problem.constraints
    )
    return replace(problem, cluster=cluster, constraints=tuple(constraints)), old


def best_size(
    problem: Problem, place: Callable[[Problem, float], tuple[Placement, float]]
) -> Placement:
    """Of the placements for each size that the problem leaves open the one with the shortest step.
    `place` gives a placement with the seconds of its step. It is told those of the shortest so far:
    it may raise InfeasibleError where it has none that takes less. Raises the InfeasibleError of
    the smallest micro-batches where there is none for any size.
    """
    best: tuple[Placement, float] | None = None
    refused: InfeasibleError | None = None
    for size in problem.micro_batch_sizes or (problem.micro_batch_size,):
        try:
            found = place(resized(problem, size), best[1] if best else math.inf)
        except InfeasibleError as error:
            refused = refused or error
            continue
        if best is None or found[1] < best[1]:
            best = found
    if best is None:
        assert refused is not None, "there is a size at least"
        raise refused
    return best[0]
