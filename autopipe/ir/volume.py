"""How much of a tensor has to move for a group to hold it in another layout: t_x of PaSE (IPDPS 2021, section III).

A device lacks what it needs and does not have. At an outer level of the cluster it is a node that lacks what its
devices need and none of them has: each block enters a node once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.layout import Layout, MeshAxes, MeshAxis, WindowedBlocks, degree_of, merged, place_along


def lacking(source: Layout, target: Layout, group: int) -> NDArray[np.int64]:
    """For each position of a group, the elements of its block under `target` that it lacks under `source`."""
    if not target.shape:
        return np.zeros(group, dtype=np.int64)
    (first, last), (held, end) = _ranges(target, group), _ranges(source, group)
    need = np.maximum(last - first, 0).prod(axis=1)
    overlap = np.minimum(last, end) - np.maximum(first, held)
    missing: NDArray[np.int64] = need - np.maximum(overlap, 0).prod(axis=1)
    return missing


def of_neighbours(layout: Layout, size: int) -> Layout:
    """The layout as each `size` neighbouring devices hold it together, counted as one device.

    Where neighbours' blocks do not make up one block, it is the smallest that has them all.
    """
    windows = layout.windows or (None,) * len(layout.cuts)
    cut = [cut_by_neighbours(axes, window, size) for axes, window in zip(layout.cuts, windows, strict=True)]
    cuts = tuple(axes for axes, _ in cut)
    return Layout(layout.shape, cuts, windows=tuple(window for _, window in cut) if layout.windows else ())


def cut_by_neighbours(
    axes: MeshAxes, window: WindowedBlocks | None, size: int
) -> tuple[MeshAxes, WindowedBlocks | None]:
    """The same along one dimension, cut by `axes` and read through `window`, if by any."""
    outer = _outer(axes, size)
    if window is None or not outer:
        return outer, None
    return outer, window.joined(degree_of(axes) // degree_of(outer))


def _outer(axes: MeshAxes, size: int) -> MeshAxes:
    """The part of `axes` that tells one set of neighbours from another, up to the first axis that lies within one."""
    found = []
    for axis in axes:
        part = _part(axis, size)
        if part is not None:
            found.append(part)
        if part is None or part.degree < axis.degree:
            break
    return merged(found)


def _part(axis: MeshAxis, size: int) -> MeshAxis | None:
    """An axis between sets of `size` devices: whole, or its outer part."""
    if axis.stride % size == 0:
        return MeshAxis(axis.degree, axis.stride // size)
    span = axis.stride * axis.degree
    return MeshAxis(span // size, 1) if span > size and span % size == 0 and size % axis.stride == 0 else None


def _ranges(layout: Layout, group: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the part of each device's block that lies in the tensor begins and ends, [group, dimensions]."""
    positions = np.arange(group)
    starts = np.zeros((group, len(layout.shape)), dtype=np.int64)
    stops = np.zeros_like(starts)
    for dimension, (block, axes) in enumerate(zip(layout.blocks(), layout.cuts, strict=True)):
        starts[:, dimension] = place_along(axes, positions) * block.step + block.offset
        stops[:, dimension] = starts[:, dimension] + block.length
    return np.maximum(starts, 0), np.minimum(stops, layout.shape)
