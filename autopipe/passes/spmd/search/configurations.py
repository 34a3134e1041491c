"""The configurations of a node: every executable way to share its iteration space among a group (PaSE, section II)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autopipe.ir.layout import is_one_block, mixed_dimensions
from autopipe.ir.placement import Split
from autopipe.ir.space import Axis, AxisKind, Dimension, Space

Splits = tuple[Split, ...]
"""One configuration of a node: splits outer to inner over the group's devices; () where all compute it whole."""


def configurations(space: Space, group: int, outermost: str | None = None) -> tuple[Splits, ...]:
    """All splits of `space` that `group` devices can execute, the first of them none.

    Degrees divide extents, their product divides `group`, and no axis is split that must stay whole. The axis
    `outermost`, where samples are counted, is split outside of all others, which keep the order of the space: so equal
    degrees of neighbours fall on the same devices.
    """
    axes = sorted(space.axes, key=lambda axis: axis.name != outermost)
    splittable = [axis for axis in axes if axis.kind is not AxisKind.WHOLE and axis.extent > 1]
    found: Iterable[Splits] = _shared_out(splittable, group)
    mixed = mixed_dimensions(space)
    if mixed:
        extents = {axis.name: axis.extent for axis in axes}
        found = (splits for splits in found if _are_blocks(mixed, extents, splits))
    return tuple(sorted(found, key=len))


def _are_blocks(mixed: Sequence[Dimension], extents: Mapping[str, int], splits: Splits) -> bool:
    """True if each device has one block of the dimensions that several axes make up."""
    degrees = {split.axis: split.degree for split in splits}
    return all(is_one_block(dimension, extents, degrees) for dimension in mixed)


def _shared_out(axes: Sequence[Axis], group: int) -> list[Splits]:
    """Every way to split `axes`, in order, whose degrees' product divides `group`."""
    divisors = [count for count in range(1, group + 1) if group % count == 0]
    # Of the axes so far, innermost first: the ways to split them for each number of devices left.
    known: dict[int, list[Splits]] = {left: [()] for left in divisors}
    for axis in reversed(axes):
        own = {degree: (Split(axis.name, degree),) if degree > 1 else () for degree in divisors}
        degrees = [degree for degree in divisors if axis.extent % degree == 0]
        known = {
            left: [
                (*own[degree], *inner) for degree in degrees if left % degree == 0 for inner in known[left // degree]
            ]
            for left in divisors
        }
    return known[group]
