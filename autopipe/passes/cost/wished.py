"""The splits that constraints ask for, node by node, checked against what each node can do."""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.layout import are_blocks, even_degree_hint
from autopipe.ir.placement import Split
from autopipe.ir.space import AxisKind
from autopipe.passes.cost.constraints import BATCH_AXIS, ResolvedConstraint
from autopipe.passes.cost.splits import SampleAxes


def required_splits(wishes: Sequence[ResolvedConstraint], samples: SampleAxes) -> dict[int, tuple[Split, ...]]:
    """By node the splits, outer to inner, that `wishes` ask for; () where they ask for none on purpose.

    Of a wish's axes a node is split along those that it has. Raises ConfigurationError, naming the wish and the node,
    for axes that no node of the wish has, that cannot be split, or that the degrees do not divide.
    """
    found: dict[int, tuple[Split, ...]] = {}
    for wish in wishes:
        asked = wish.constraint.split
        if asked is None:
            continue
        for axis, _ in asked:
            if not any(_own_name(samples, node, axis) for node in wish.nodes):
                axes = ", ".join(each.name for each in samples.uses[wish.nodes[0]].space.axes)
                raise ConfigurationError(
                    f"{wish} splits axis {axis!r}, which none of its nodes has",
                    hint=f"{samples.graph.nodes[wish.nodes[0]].name!r} has {axes or 'none'}",
                )
        for node in wish.nodes:
            own = [(name, degree) for axis, degree in asked if (name := _own_name(samples, node, axis)) is not None]
            if own or not asked:
                found[node] = checked_splits(str(wish), samples, node, own)
    return found


def _own_name(samples: SampleAxes, node: int, axis: str) -> str | None:
    """An axis of a constraint as the node calls it; None where it has no such axis."""
    name = samples.axes[node] if axis == BATCH_AXIS else axis
    return name if any(each.name == name for each in samples.uses[node].space.axes) else None


def checked_splits(who: str, samples: SampleAxes, node: int, asked: Sequence[tuple[str, int]]) -> tuple[Split, ...]:
    """A node's splits along axes that it has, outer to inner; those into one part are none.

    Raises ConfigurationError, naming `who` asks for them and the node, for an axis that stands twice, that cannot be
    split, or that the degrees do not divide.
    """
    space = samples.uses[node].space
    where = repr(samples.graph.nodes[node].name)
    for position, (name, degree) in enumerate(asked):
        axis = space.axis(name)
        if any(name == other for other, _ in asked[:position]):
            raise ConfigurationError(f"{who} splits axis {name!r} twice", f"{BATCH_AXIS!r} is the samples' axis", where)
        if degree < 1 or (degree > 1 and axis.kind is AxisKind.WHOLE):
            raise ConfigurationError(
                f"{who} splits axis {name!r} into {degree} parts, along which this node cannot be split",
                hint=f"its iteration space is {space}",
                where=where,
            )
        if axis.extent % degree:
            raise ConfigurationError(
                f"{who} splits axis {name!r} into {degree} parts, which do not divide its extent {axis.extent}",
                hint=even_degree_hint(axis.extent, degree),
                where=where,
            )
    splits = tuple(Split(name, degree) for name, degree in asked if degree > 1)
    if not are_blocks(space, splits):
        raise ConfigurationError(
            f"{who} splits {', '.join(map(str, splits))}, which leaves a device several blocks of a tensor",
            hint=f"its iteration space is {space}",
            where=where,
        )
    return splits
