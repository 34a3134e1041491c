"""Statistics that devices exchange where each has a part of an operator's joint axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopipe.ir.dtype import DType
from autopipe.ir.space import Space


@dataclass(frozen=True, slots=True)
class Statistic:
    """One exchange that an operator makes itself, over the devices along `axes`."""

    axes: tuple[str, ...]
    """The split axes over whose devices it goes, in the order of the space."""
    bytes: int
    """Of the tensor that is reduced, or of the whole that is gathered."""
    kind: str = "all_reduce"
    """`all_reduce`, `all_gather` or `reduce_scatter`."""
    backward: bool = False
    """True if it is made in backward, where a gradient comes."""
    times: int = 1
    """How often it is made in one evaluation."""
    through: tuple[int, ...] = (0,)
    """In backward: it is made where a gradient goes to one of these operands."""


def joint_splits(space: Space, degrees: Mapping[str, int], names: Iterable[str] | None = None) -> tuple[str, ...]:
    """The joint axes, of those called `names` or of all, that are split."""
    chosen = None if names is None else set(names)
    return tuple(
        axis.name
        for axis in space.axes
        if axis.kind.is_joint and degrees.get(axis.name, 1) > 1 and (chosen is None or axis.name in chosen)
    )


def points(space: Space, degrees: Mapping[str, int], names: Iterable[str]) -> int:
    """How many points of the axes called `names` one device has."""
    return math.prod(space.axis(name).extent // degrees.get(name, 1) for name in names)


def rows(space: Space, degrees: Mapping[str, int]) -> int:
    """On one device, the elements of the first operand without its joint axes."""
    names = {name for dimension in space.operands[0] or () for name in dimension}
    return points(space, degrees, (name for name in names if not space.axis(name).kind.is_joint))


def reduced(
    axes: tuple[str, ...],
    elements: int,
    forward: Iterable[int],
    backward: Iterable[int],
    through: tuple[int, ...] = (0,),
) -> tuple[Statistic, ...]:
    """An all-reduce for each of `forward` and `backward`, the bytes of one element; none where no axis is split."""
    if not axes:
        return ()
    return (
        *(Statistic(axes, elements * width) for width in forward),
        *(Statistic(axes, elements * width, backward=True, through=through) for width in backward),
    )


def single(dtype: DType) -> int:
    """Bytes of a statistic of values of a type: those of double precision keep it, all others have single."""
    return 8 if dtype is DType.FLOAT64 else 4
