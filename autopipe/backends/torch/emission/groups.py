"""How generated code spells the ranks that exchange something: a stage's group, or those along axes of its mesh."""

from __future__ import annotations

from collections.abc import Iterator

from autopipe.ir.layout import MeshAxes, MeshAxis
from autopipe.ir.program import Compute, StageCode


def group_code(axes: MeshAxes, group: int) -> str:
    """The code of this rank's group along `axes`, or of the whole of a group of `group` ranks."""
    if axes == (MeshAxis(group, 1),):
        return "p.group"
    return f"p.group.along({', '.join(str((axis.degree, axis.stride)) for axis in axes)})"


def meshes_of(stage: StageCode) -> tuple[MeshAxes, ...]:
    """The axes along which ranks of a stage exchange anything, but for those of the whole group; each once, sorted."""
    whole = (MeshAxis(len(stage.devices), 1),)
    return tuple(sorted({axes for axes in _exchanged(stage) if axes and axes != whole}))


def _exchanged(stage: StageCode) -> Iterator[MeshAxes]:
    for operation in stage.operations:
        if isinstance(operation, Compute):
            yield from map(operation.mesh_of, operation.joint)
        elif operation.kind != "slice":
            yield operation.relayout.over
