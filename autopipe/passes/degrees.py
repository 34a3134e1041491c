"""Degrees of parallelism of a placement by any strategy, for each output that shows a plan."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable

from autopipe.ir.degrees import Interval, PlanDegrees
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import StageGraph
from autopipe.passes.analysis.operators import PRODUCT_KINDS, sample_axes
from autopipe.passes.cost.stage_work import StageNode, StageWork, first_shard_holders, stage_work
from autopipe.passes.sharding.regions import weight_values

DEGREES = ("pipeline", "data", "tensor")
"""Names of the options of strategies that are degrees of parallelism."""

_REST = 0.01
"""Maximum fraction of a stage's FLOPs in matmuls whose degrees are omitted from a report."""

_Degrees = tuple[int, int, int]
"""Degrees of data, sequence and tensor parallelism of a node: (data, sequence, tensor)."""


def open_degrees(strategy: object) -> tuple[str, ...]:
    """Return the names of those options of a strategy that are degrees of parallelism and that the
    strategy chooses, because they are None.
    """
    return tuple(name for name in DEGREES if getattr(strategy, name, 0) is None)


def plan_degrees(
    problem: Problem, placement: Placement, settled: tuple[str, ...] = ()
) -> PlanDegrees:
    """Return the degrees of parallelism of a placement. Its stages may form any DAG and use any
    groups of devices.

    `settled` lists the names of those options of the strategy that the user left open.
    """
    works = stage_work(problem, placement)
    stages = placement.stages
    groups: dict[frozenset[int], Counter[int]] = defaultdict(Counter)
    for stage in stages:
        groups[frozenset(stage.devices)][stage.pipeline] += 1
    per_stage = [_stage_degrees(work) for work in works]
    data, sequence, tensor = (
        [each[place] for found in per_stage for each in found] for place in range(3)
    )
    copies = [
        len(work.stage.devices) // math.prod(each)
        for work, found in zip(works, per_stage, strict=True)
        for each in found
    ]
    depth = StageGraph.of(problem, placement).depth
    shards = problem.train and problem.optimizer.shard
    shares = shards and any(len(devices) > 1 for devices in first_shard_holders(works).values())
    return PlanDegrees(
        groups=tuple(map(len, groups)),
        stages_per_group=_interval(
            count for counts in groups.values() for count in counts.values()
        ),
        data=_interval(data),
        tensor=_interval(tensor),
        sequence=_interval(sequence),
        copies=_interval(copies),
        pipelines=placement.pipelines,
        depth=depth if depth < placement.length else 0,
        overlapping=sum(map(len, groups)) > len(frozenset().union(*groups)),
        zero_stage=1 if shares else 0,
        stages=len(stages),
        recomputed_stages=sum(stage.recompute for stage in stages) if problem.train else 0,
        settled=settled,
    )


def _interval(values: Iterable[int]) -> Interval:
    """Return (minimum, maximum) of the values."""
    found = set(values)
    return min(found), max(found)


def _stage_degrees(work: StageWork) -> list[_Degrees]:
    """Return the distinct degrees of a stage's matmuls, those with the most FLOPs first. The last
    degrees are omitted if together they have at most the fraction `_REST` of the FLOPs.

    Only matmuls that read weights count. In a stage without such matmuls, all matmuls count. In a
    stage without FLOPs of matmuls, all operators count, by bytes instead of FLOPs.
    """
    own = work.problem
    weights = weight_values(work.problem.graph)
    products = [each for each in work.nodes if each.use.row.kind in PRODUCT_KINDS]
    weighted = [each for each in products if any(map(weights.get, each.node.inputs))]
    by_flops = {each.index: own.work[each.index].forward_flops for each in weighted or products}
    by_bytes = {each.index: own.work[each.index].forward_bytes for each in work.nodes}
    amounts = by_flops if any(by_flops.values()) else by_bytes
    found: Counter[_Degrees] = Counter()
    for each in work.nodes:
        if amounts.get(each.index):
            found[_degrees_of_node(work, each)] += amounts[each.index]  # type: ignore[assignment]
    kept: list[_Degrees] = []
    left = found.total()
    for degrees, amount in found.most_common():
        if kept and left <= _REST * found.total():
            break
        kept.append(degrees)
        left -= amount
    return kept or [(1, 1, 1)]


def _degrees_of_node(work: StageWork, node: StageNode) -> _Degrees:
    """Return (data, sequence, tensor): the numbers of parts into which the splits of `node` divide
    the samples, the positions within a sample, and the weights.

    An axis that merges samples and positions is split first over samples. In an operator without
    weights, such as the matmuls of attention, all axes except the sample axis count as tensor
    parallelism, because the attention heads are columns of the preceding matmul.
    """
    samples = sample_axes(work.problem.graph)
    weights = weight_values(work.problem.graph)
    pairs = zip(node.node.inputs, node.use.space.operands, strict=True)
    operands = [words for name, words in pairs if name in weights and words is not None]
    of_weights = {axis for words in operands for dimension in words for axis in dimension}
    data = sequence = tensor = 1
    for axis, degree in node.sharing.degrees.items():
        if axis == samples.axes[node.index]:
            shared = math.gcd(degree, max(1, samples.batch.batch))
            data *= shared
            sequence *= degree // shared
        elif operands and axis not in of_weights:
            sequence *= degree
        else:
            tensor *= degree
    return data, sequence, tensor
