"""Searches that run a placement strategy several times: over the order in which the pipeline visits
the device groups of a heterogeneous cluster, and over the micro-batch size.
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
from autopipe.ir.errors import CANDIDATE_ERRORS, AutopipeError, InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.stage_nodes import live_nodes
from autopipe.passes.cost.measured import with_micro_batch_size
from autopipe.passes.cost.memory_check import check_stage_devices
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.schedule.limits import quick_step_seconds

_MAX_PERMUTED_TYPES = 3
"""Maximum number of device types for which each order of the types is tried. For more types, only
the order of the cluster and its reverse are tried.
"""


def best_group_order(
    problem: Problem, place: Callable[[Problem], Placement], parts: bool = True
) -> Placement:
    """Return the placement with the shortest simulated step under 1F1B over several orders of the
    cluster's device groups. Ties go to the order that was tried first.

    `place` returns a placement for a problem whose cluster lists the groups in one of these orders.
    The result of `best_group_order` uses the device indices of `problem`. A device group is a set
    of devices of one type. If `parts` is True and no constraint names devices, clusters with only
    some of the device types are tried first. An order is skipped if a lower bound of its step
    (`ideal_step_s`) is not below the shortest step found so far. Set `parts` to False for a
    strategy that can itself leave devices unused. `problem.time_limit` is divided among the orders.

    An order is skipped if it has no placement, if its placement exceeds a memory limit, or if a
    stage of its placement is on devices of different types and the cluster does not allow this. If
    all orders are skipped, the error for the order of `problem.cluster` is raised.
    """
    if len(problem.cluster.groups) < 2:
        found = place(problem)
        check_stage_devices(problem, found)
        return found
    best: tuple[float, Placement] | None = None
    failure: AutopipeError | None = None
    given_order = tuple(range(len(problem.cluster.groups)))
    names_devices = any(each.devices is not None for each in problem.constraints)
    orders = [
        *(partial_group_orders(problem.cluster) if parts and not names_devices else ()),
        *group_orders(problem.cluster),
    ]
    end = None if problem.time_limit is None else time.monotonic() + problem.time_limit
    for position, order in enumerate(orders):
        trial, original_device = _with_group_order(problem, order)
        if end is not None:
            trial = replace(
                trial, time_limit=max(0.0, (end - time.monotonic()) / (len(orders) - position))
            )
        if best is not None:
            trial = replace(trial, known_s=min(problem.known_s, best[0]))
            if ideal_step_s(trial) >= best[0] or trial.time_limit == 0:
                continue
        try:
            found = place(trial)
            check_stage_devices(trial, found)
            sized = with_micro_batch_size(
                trial, max(stage.micro_batch_size for stage in found.stages)
            )
            seconds = quick_step_seconds(sized, found, stage_costs(sized, found))
        except CANDIDATE_ERRORS as error:
            if failure is None or order == given_order:
                failure = error
            continue
        if best is None or seconds < best[0]:
            stages = (
                replace(stage, devices=tuple(original_device[device] for device in stage.devices))
                for stage in found.stages
            )
            best = seconds, replace(found, stages=tuple(stages))
    if best is None:
        assert failure is not None, "the given order was not tried"
        raise failure
    return best[1]


def group_orders(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Yield orders of all device groups (sets of devices of one type) of a cluster, as indices of
    groups: first the order of the cluster, then orders in which the groups of each device type are
    adjacent. With more than `_MAX_PERMUTED_TYPES` types, only the reverse of the cluster's order
    follows. Of orders that visit equal groups in an equal sequence, only the first is yielded.
    """
    given = tuple(range(len(cluster.groups)))
    type_of_group = _type_of_each_group(cluster)
    types = tuple(dict.fromkeys(type_of_group))
    if len(types) <= _MAX_PERMUTED_TYPES:
        orders = [given, *_permuted_groups(type_of_group, types)]
    else:
        orders = [given, given[::-1]]
    by_content: dict[object, tuple[int, ...]] = {}
    for order in orders:
        content = tuple((type_of_group[group], cluster.groups[group]) for group in order)
        by_content.setdefault(content, order)
    yield from by_content.values()


def partial_group_orders(cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Yield orders of the groups of some, but not all, device types, as indices of groups, from few
    types to many. For more than `_MAX_PERMUTED_TYPES` types, yield only the groups of each single
    type.
    """
    type_of_group = _type_of_each_group(cluster)
    types = tuple(dict.fromkeys(type_of_group))
    for count in range(1, len(types)) if len(types) <= _MAX_PERMUTED_TYPES else (1,):
        for chosen in itertools.combinations(types, count):
            yield from _permuted_groups(type_of_group, chosen)


def _permuted_groups(
    type_of_group: Sequence[Device], types: Sequence[Device]
) -> list[tuple[int, ...]]:
    """Return, for each permutation of `types`, the indices of the device groups of these types:
    first the groups of the first type in the permutation, and so on. `type_of_group` contains the
    device type of each group.
    """
    groups = [group for group, device in enumerate(type_of_group) if device in types]
    return [
        tuple(sorted(groups, key=lambda group: permutation.index(type_of_group[group])))
        for permutation in itertools.permutations(types)
    ]


def _type_of_each_group(cluster: Cluster) -> list[Device]:
    """Return the first device of each group, which stands for the device type of the group."""
    firsts = itertools.accumulate((group.size for group in cluster.groups[:-1]), initial=0)
    return [cluster.devices[first] for first in firsts]


def ideal_step_s(problem: Problem) -> float:
    """Return a lower bound, in seconds, of the step under any placement and schedule on this
    cluster. Return 0 if an operator has measured times or no times are known.

    Let t_k(v) be the seconds of node v per micro-batch on device type k without launch overhead,
    T_k the sum of t_k(v) over all nodes, and r the sum of 1 / T_k over all devices. The bound is

        micro_batches * sum over v of min over k of t_k(v) / (T_k * r)

    Proof: the busy time of the busiest device is at least the mean over all devices with weights 1
    / (T_k * r). In this mean, node v counts at least its minimum over k, even if several devices
    compute fractions of it.
    """
    counts = Counter(problem.cluster.devices)
    work = [problem.work[node] for node in live_nodes(problem.graph, problem.wanted)]
    seconds = []
    for device in counts:
        forward, backward = node_seconds(
            work, replace(device, launch_latency_s=0.0), problem.precision
        )
        seconds.append(forward + (backward if problem.train else 0.0))
    totals = [float(each.sum()) for each in seconds]
    if not all(totals) or any(node.measured for node in work):
        return 0.0
    rate = sum(count / total for count, total in zip(counts.values(), totals, strict=True))
    minimum = np.minimum.reduce(
        [each / (total * rate) for each, total in zip(seconds, totals, strict=True)]
    )
    return problem.micro_batches * float(minimum.sum())


def _with_group_order(problem: Problem, order: Sequence[int]) -> tuple[Problem, tuple[int, ...]]:
    """Return (reordered problem, original devices): the problem with its device groups in the order
    `order`, and for each device of that problem its index in the original cluster.
    """
    cluster, original = problem.cluster.with_pool_order(order)
    new_index = {device: index for index, device in enumerate(original)}
    constraints = (
        replace(
            constraint,
            devices=constraint.devices
            and tuple(new_index.get(device, device) for device in constraint.devices),
        )
        for constraint in problem.constraints
    )
    return replace(problem, cluster=cluster, constraints=tuple(constraints)), original


def best_micro_batch_size(
    problem: Problem, place: Callable[[Problem, float], tuple[Placement, float]]
) -> Placement:
    """Return the placement with the shortest step over all micro-batch sizes that the problem
    allows. Ties go to the first size.

    `place(problem, best_s)` returns (placement, seconds of its step) for a problem with one of the
    sizes. `best_s` is the shortest step found before, infinity at first; `place` may raise
    InfeasibleError if it finds no shorter step. If no size has a placement, the InfeasibleError of
    the first size is raised.
    """
    best: tuple[Placement, float] | None = None
    failure: InfeasibleError | None = None
    for size in problem.micro_batch_sizes or (problem.micro_batch_size,):
        try:
            found = place(with_micro_batch_size(problem, size), best[1] if best else math.inf)
        except InfeasibleError as error:
            failure = failure or error
            continue
        if best is None or found[1] < best[1]:
            best = found
    if best is None:
        assert failure is not None, "there are no micro-batch sizes"
        raise failure
    return best[0]
