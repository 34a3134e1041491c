"""Effects of constraints before splits are searched: the stage of a node, and a check that its group can split it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.constraints import ResolvedConstraint
from autopipe.passes.spmd.search.configurations import Splits


def settled_stages(
    wishes: Sequence[ResolvedConstraint], groups: Sequence[tuple[int, ...]], strategy: str
) -> dict[int, int]:
    """The stage of each node for which a constraint asks for a stage, or for the devices of one of `groups`.

    `strategy` is who makes the stages. Raises ConfigurationError, naming the constraint, for stages or devices that
    there are not, and for a stage that has other devices than are asked for.
    """
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
                    f"{wish} asks for stage {stage}, and {strategy} makes {len(groups)}"
                    if stage >= len(groups)
                    else f"{wish} asks for stage {stages[0]} and for the devices of stage {stage}",
                    hint="ask for more stages: --stages" if stage >= len(groups) else "give it one of the two",
                )
            found.update(dict.fromkeys(wish.nodes, stage))
    return found


def check_degrees(problem: Problem, wished: Mapping[int, Splits], placement: Placement) -> None:
    """Raise ConfigurationError for a node that cannot be split as `wished` over the devices of its stage."""
    stage_of = placement.stage_of()
    for node, splits in wished.items():
        group = len(placement.stages[stage_of[node]].devices)
        if group % math.prod(split.degree for split in splits):
            raise ConfigurationError(
                f"constraints split this node {' '.join(map(str, splits))}, but its stage has {group} devices",
                hint="the product of the degrees must divide the number of devices",
                where=repr(problem.graph.nodes[node].name),
            )
