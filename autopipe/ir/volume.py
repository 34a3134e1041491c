"""How much of a tensor has to move for a group to hold it in another layout: t_x of PaSE (IPDPS 2021, section III).

A device lacks what it needs and does not have. At an outer level of the cluster it is a node that lacks what its
devices need and none of them has: each block enters a node once.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.layout import Layout, MeshAxes, MeshAxis, merged


def lacking(source: Layout, target: Layout, group: int) -> NDArray[np.int64]:
    """For each position of a group, the elements of its block under `target` that it lacks under `source`."""
    need = np.array(target.local_shape(), dtype=np.int64)
    if not len(need):
        return np.zeros(group, dtype=np.int64)
    have = np.array(source.local_shape(), dtype=np.int64)
    wanted, held = _starts(target, group), _starts(source, group)
    overlap = np.minimum(wanted + need, held + have) - np.maximum(wanted, held)
    missing: NDArray[np.int64] = need.prod() - np.maximum(overlap, 0).prod(axis=1)
    return missing


def of_neighbours(layout: Layout, size: int) -> Layout:
    """The layout as each `size` neighbouring devices hold it together, counted as one device.

    Where neighbours' blocks do not make up one block, it is the smallest that has them all.
    """
    return Layout(layout.shape, tuple(_outer(axes, size) for axes in layout.cuts))


def _outer(axes: MeshAxes, size: int) -> MeshAxes:
    """The part of `axes` that tells one set of neighbours from another, up to the first axis that lies within one."""
    parts = (_part(axis, size) for axis in axes)
    return merged(part for part in itertools.takewhile(lambda part: part is not None, parts) if part is not None)


def _part(axis: MeshAxis, size: int) -> MeshAxis | None:
    """An axis between sets of `size` devices: whole, or its outer part."""
    if axis.stride % size == 0:
        return MeshAxis(axis.degree, axis.stride // size)
    span = axis.stride * axis.degree
    return MeshAxis(span // size, 1) if span > size and span % size == 0 and size % axis.stride == 0 else None


def _starts(layout: Layout, group: int) -> NDArray[np.int64]:
    """Where each device's block begins, [group, dimensions]."""
    positions = np.arange(group)
    found = np.zeros((group, len(layout.shape)), dtype=np.int64)
    for dimension, (extent, axes) in enumerate(zip(layout.local_shape(), layout.cuts, strict=True)):
        index = np.zeros(group, dtype=np.int64)
        for axis in axes:
            index = index * axis.degree + positions // axis.stride % axis.degree
        found[:, dimension] = index * extent
    return found
