"""In which order the groups of a mixed cluster stand along a pipeline: all orders of few kinds are tried."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from autopipe.ir.cluster import Cluster
from autopipe.ir.errors import AutopipeError, ConfigurationError, InfeasibleError, ModelError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Constraint, Problem
from autopipe.passes.cost.kinds import check_kinds
from autopipe.passes.cost.resized import resized
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.schedule.trial import fitting_step_s

_FEW_KINDS = 3
"""Of so many kinds at most all orders are tried; of more the one that is given, and its reverse."""


def best_order(problem: Problem, place: Callable[[Problem], Placement]) -> Placement:
    """What `place` makes of the problem with its cluster's groups in the order whose simulated step is shortest.

    The placement's devices are those of the problem as it is given. Of equal orders the first counts, which is the
    given one. Raises what `place` raises for that where no order has a placement, and InfeasibleError for a stage that
    straddles kinds without being asked to.
    """
    if len(problem.cluster.groups) < 2:
        found = place(problem)
        check_kinds(problem, found)
        return found
    best: tuple[float, Placement] | None = None
    refused: AutopipeError | None = None
    for order in orders_of(problem.cluster):
        ordered, old = _reordered(problem, order)
        try:
            found = place(ordered)
            check_kinds(ordered, found)
            seconds = _step_s(ordered, found)
        except (ConfigurationError, InfeasibleError, ModelError) as error:
            refused = refused or error
            continue
        if best is None or seconds < best[0]:
            best = seconds, _on_devices(found, old)
    if best is None:
        assert refused is not None, "there is the order that is given"
        raise refused
    return best[1]


def orders_of(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Orders of a cluster's groups that differ in more than names, the given one first; groups of one kind together."""
    given = tuple(range(len(cluster.groups)))
    firsts = itertools.accumulate((group.size for group in cluster.groups[:-1]), initial=0)
    kinds = [cluster.devices[first] for first in firsts]
    every = list(dict.fromkeys(kinds))
    if len(every) <= _FEW_KINDS:
        permuted = itertools.permutations(every)
        orders = [tuple(sorted(given, key=lambda group: each.index(kinds[group]))) for each in permuted]
    else:
        orders = [given[::-1]]
    seen = set()
    for order in (given, *orders):
        alike = tuple((kinds[each], cluster.groups[each]) for each in order)
        if alike not in seen:
            seen.add(alike)
            yield order


def _reordered(problem: Problem, order: Sequence[int]) -> tuple[Problem, tuple[int, ...]]:
    """The problem with its groups in another order, and for each of its devices the index it has in the given one."""
    cluster, old = problem.cluster.reordered(order)
    new = {device: index for index, device in enumerate(old)}

    def moved(constraint: Constraint) -> Constraint:
        if constraint.devices is None:
            return constraint
        return replace(constraint, devices=tuple(new.get(device, device) for device in constraint.devices))

    return replace(problem, cluster=cluster, constraints=tuple(map(moved, problem.constraints))), old


def _on_devices(placement: Placement, devices: Sequence[int]) -> Placement:
    stages = (replace(stage, devices=tuple(devices[device] for device in stage.devices)) for stage in placement.stages)
    return replace(placement, stages=tuple(stages))


def _step_s(problem: Problem, placement: Placement) -> float:
    """Seconds of a step under 1F1B. Raises InfeasibleError where memory does not hold it."""
    sized = resized(problem, max(stage.micro_batch_size for stage in placement.stages))
    return fitting_step_s(sized, placement, stage_costs(sized, placement))
