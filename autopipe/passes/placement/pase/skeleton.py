"""What is fixed before splits are searched: which stage has which nodes on which devices, and what constraints ask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.cost.constraints import Wish, wishes_of
from autopipe.passes.cost.splits import sample_axes
from autopipe.passes.cost.wished import wished_splits
from autopipe.passes.placement.pase.cutting import cut_into_stages
from autopipe.passes.spmd.search.configurations import Splits


@dataclass(frozen=True, slots=True)
class Skeleton:
    """Stages without splits, and the splits that constraints ask for, by node."""

    placement: Placement
    wished: dict[int, Splits]


def skeleton_of(problem: Problem, count: int) -> Skeleton:
    """The problem as `count` stages that follow its constraints.

    Raises ConfigurationError naming constraints that contradict one another or cannot be followed.
    """
    wishes = wishes_of(problem)
    wished = wished_splits(wishes, sample_axes(problem.graph))
    groups = _groups(problem, wishes, count)
    fixed = _fixed(wishes, groups)
    recompute = problem.train and problem.recompute == "full"
    stages = (
        Stage(nodes, group, problem.micro_batch_size, recompute=recompute)
        for nodes, group in zip(cut_into_stages(problem, count, fixed), groups, strict=True)
    )
    placement = Placement(tuple(stages))
    _check_degrees(problem, wished, placement)
    return Skeleton(placement, wished)


def _groups(problem: Problem, wishes: Sequence[Wish], count: int) -> list[tuple[int, ...]]:
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


def _fixed(wishes: Sequence[Wish], groups: Sequence[tuple[int, ...]]) -> dict[int, int]:
    """The stage of each node for which a constraint asks for a stage, or for the devices of one."""
    found: dict[int, int] = {}
    for wish in wishes:
        stages = [wish.constraint.stage] if wish.constraint.stage is not None else []
        if wish.devices is not None:
            mine = [stage for stage, group in enumerate(groups) if set(group) == set(wish.devices)]
            if not mine:
                raise ConfigurationError(
                    f"{wish} asks for devices {list(wish.devices)}, which no stage has",
                    hint=f"the stages have devices {', '.join(str(list(group)) for group in groups)}",
                )
            stages += mine
        for stage in stages:
            if stage >= len(groups) or stage != stages[0]:
                raise ConfigurationError(
                    f"{wish} asks for stage {stage}, and pase makes {len(groups)}"
                    if stage >= len(groups)
                    else f"{wish} asks for stage {stages[0]} and for the devices of stage {stage}",
                    hint="set strategy.stages" if stage >= len(groups) else "give it one of the two",
                )
            found.update(dict.fromkeys(wish.nodes, stage))
    return found


def _check_degrees(problem: Problem, wished: dict[int, tuple[Split, ...]], placement: Placement) -> None:
    """Raise ConfigurationError for a node that cannot be split so over the devices of its stage."""
    stage_of = placement.stage_of()
    for node, splits in wished.items():
        group = len(placement.stages[stage_of[node]].devices)
        if group % math.prod(split.degree for split in splits):
            raise ConfigurationError(
                f"constraints split this node {' '.join(map(str, splits))}, but its stage has {group} devices",
                hint="the product of the degrees must divide the number of devices",
                where=repr(problem.graph.nodes[node].name),
            )
