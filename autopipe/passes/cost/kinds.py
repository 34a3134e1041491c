"""Devices of different kinds in one cluster: which neighbours a stage may have without being asked to straddle them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

from autopipe.ir.cluster import Cluster
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem

_HINT = "set cluster.straddle to true, or take a strategy that makes stages: pipedream, graphpipe, tepdist or grid"


def equal_device_runs(cluster: Cluster) -> tuple[range, ...]:
    """The longest runs of neighbouring devices that one stage may have: of one kind, or all where stages may straddle.

    Their order is that of the devices.
    """
    if cluster.straddle:
        return (range(cluster.size),)
    lengths = (len(list(run)) for _, run in itertools.groupby(cluster.devices))
    ends = list(itertools.accumulate(lengths, initial=0))
    return tuple(range(first, end) for first, end in itertools.pairwise(ends))


def describe_kinds(cluster: Cluster, devices: Iterable[int]) -> str:
    """The kinds among `devices` in words: `8 A100-SXM4-80GB and 8 V100-SXM2-32GB`."""
    counts = Counter(cluster.devices[device].name for device in devices)
    return " and ".join(f"{count} {name}" for name, count in counts.items())


def may_share(problem: Problem, devices: Sequence[int]) -> bool:
    """True if a stage may have all of these devices: of one kind, or straddling kinds as it is asked to."""
    cluster = problem.cluster
    if cluster.straddle or len(cluster.kinds_among(devices)) == 1:
        return True
    asked = (each.devices or range(cluster.size) for each in problem.constraints if each.devices is not None)
    return any(set(each) == set(devices) for each in asked)


def check_one_kind(problem: Problem, strategy: str) -> None:
    """Raise InfeasibleError where a strategy's one stage on all devices would straddle kinds without being asked to."""
    cluster = problem.cluster
    if not may_share(problem, range(cluster.size)):
        raise InfeasibleError(
            f"{strategy} would put one stage on devices of different kinds: "
            f"{describe_kinds(cluster, range(cluster.size))}",
            hint=_HINT,
        )


def check_kinds(problem: Problem, placement: Placement) -> None:
    """Raise InfeasibleError for a stage that straddles kinds without being asked to."""
    if len(equal_device_runs(problem.cluster)) == 1:
        return
    for index, stage in enumerate(placement.stages):
        if not may_share(problem, stage.devices):
            raise InfeasibleError(
                f"stage {index} would have devices of different kinds: "
                f"{describe_kinds(problem.cluster, stage.devices)}",
                hint=_HINT,
            )
