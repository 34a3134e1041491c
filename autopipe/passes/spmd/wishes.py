"""True if a placement does what constraints ask for, for strategies that do not look at them as they decide."""

from __future__ import annotations

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.constraints import BATCH_AXIS, ResolvedConstraint, wishes_of
from autopipe.passes.analysis.operators import SampleAxes, sample_axes


def check_wishes(problem: Problem, placement: Placement, strategy: str) -> None:
    """Raise ConfigurationError, naming constraint and node, for one that a placement of one pipeline does not fulfil.

    As for strategy manual, a split along an axis asks nothing of nodes that do not have it.
    """
    wishes = wishes_of(problem)
    if not wishes:
        return
    stage_of = placement.stage_of()
    samples = sample_axes(problem.graph)
    for wish in wishes:
        for node in wish.nodes:
            number = stage_of[node]
            reason = _difference(wish, node, number, placement.stages[number], samples)
            if reason:
                raise ConfigurationError(
                    f"{wish} asks for {reason}",
                    hint=f"{strategy} decides for itself; strategy manual follows any constraint",
                    where=repr(problem.graph.nodes[node].name),
                )


def _difference(wish: ResolvedConstraint, node: int, number: int, stage: Stage, samples: SampleAxes) -> str:
    """Difference between what a constraint asks for and what a node gets; empty where there is none."""
    wanted = wish.constraint
    if wanted.stage not in (None, number):
        return f"stage {wanted.stage}, and this node is in stage {number}"
    if wish.devices is not None and set(wish.devices) != set(stage.devices):
        return f"devices {list(wish.devices)}, and this node is on {list(stage.devices)}"
    if wanted.split is None:
        return ""
    asked = [
        (samples.axes[node] if axis == BATCH_AXIS else axis, degree) for axis, degree in wanted.split if degree > 1
    ]
    has = {axis.name for axis in samples.uses[node].space.axes}
    if any(axis not in has for axis, _ in asked):
        return ""
    given = [(split.axis, split.degree) for split in stage.splits_of(node)]
    return "" if asked == given else f"split {_text(wanted.split)}, and this node is split {_text(given)}"


def _text(splits: object) -> str:
    assert isinstance(splits, (list, tuple))
    return " ".join(f"{axis}:{degree}" for axis, degree in splits) or "not at all"
