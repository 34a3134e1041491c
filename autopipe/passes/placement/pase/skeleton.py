"""Template before splits are searched: nodes and devices of each stage, and the splits of constraints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.constraints import ResolvedConstraint, required_splits, wishes_of
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.partition.chain_cut import cut_into_stages
from autopipe.passes.sharding.configurations import Splits
from autopipe.passes.sharding.regions import check_degrees, settled_stages


@dataclass(frozen=True, slots=True)
class StageTemplate:
    """Stages without splits, and the splits that constraints ask for, by node."""

    placement: Placement
    wished: dict[int, Splits]


def skeleton_of(problem: Problem, count: int) -> StageTemplate:
    """The problem as `count` stages that follow its constraints.

    Raises ConfigurationError naming constraints that contradict one another or cannot be followed.
    """
    wishes = wishes_of(problem)
    wished = required_splits(wishes, sample_axes(problem.graph))
    groups = _groups(problem, wishes, count)
    fixed = settled_stages(wishes, groups, "pase")
    recompute = problem.train and problem.recompute == "full"
    stages = (
        Stage(nodes, group, problem.micro_batch_size, recompute=recompute)
        for nodes, group in zip(cut_into_stages(problem, groups, fixed), groups, strict=True)
    )
    placement = Placement(tuple(stages))
    check_degrees(problem, wished, placement)
    return StageTemplate(placement, wished)


def _groups(problem: Problem, wishes: Sequence[ResolvedConstraint], count: int) -> list[tuple[int, ...]]:
    """The devices of each stage: equal groups in order; those asked for where there is one stage."""
    size = problem.cluster.size
    if size % count:
        raise ConfigurationError(
            f"{size} devices cannot be shared equally by {count} stages",
            hint="the number of stages must divide that of devices",
            where="strategy.stages",
        )
    asked = [wish for wish in wishes if wish.devices is not None]
    if count > 1 or not asked:
        return [tuple(range(start, start + size // count)) for start in range(0, size, size // count)]
    other = next((wish for wish in asked if wish.devices != asked[0].devices), None)
    if other is not None:
        raise ConfigurationError(
            f"{asked[0]} and {other} ask for different devices, and there is one stage",
            hint="ask for several stages (strategy.stages), or let pase choose",
        )
    return [asked[0].devices or ()]
