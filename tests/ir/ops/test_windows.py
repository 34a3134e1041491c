"""Convolution and pooling in parts along their spatial axes: each part from what its windows read,
without pads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopipe.ir.layout import are_even_splits
from autopipe.ir.placement import Split
from autopipe.ir.space import AxisKind
from tests.ir.ops.splitting import Use, check_splits, divisible_axes, smallest_factor
from tests.ir.ops.uses import use_of


@dataclass(frozen=True, slots=True)
class Geometry:
    """Extents, kernel and the attributes that say how windows lie."""

    extents: tuple[int, ...]
    kernel: tuple[int, ...]
    attributes: dict[str, Any]


@st.composite
def geometries(draw: st.DrawFn, pooling: bool = False) -> Geometry:
    """One to three spatial axes; pads stated, or by a policy."""
    rank = draw(st.integers(1, 3))

    def some(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(least, most)) for _ in range(rank))

    kernel = some(1, 3)
    dilations = some(1, 2)
    reach = [dilation * (size - 1) + 1 for size, dilation in zip(kernel, dilations, strict=True)]
    attributes: dict[str, Any] = {"strides": some(1, 3), "dilations": dilations}
    policy = draw(st.sampled_from(["NOTSET", "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"]))
    if policy == "NOTSET":
        most = [size - 1 if pooling else size + 1 for size in kernel]
        attributes["pads"] = tuple(draw(st.integers(0, each)) for each in (*most, *most))
        if pooling:
            attributes["ceil_mode"] = draw(st.integers(0, 1))
    else:
        attributes["auto_pad"] = policy
    extents = tuple(each + more for each, more in zip(reach, some(0, 7), strict=True))
    return Geometry(extents, kernel, attributes)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(math.prod(shape)).standard_normal(shape)


def check_spatial(use: Use) -> set[str]:
    """Split each spatial axis that can be, and all of them at once; their names."""
    splits: tuple[Split, ...] = ()
    for axis in divisible_axes(use.space):
        if axis.name.startswith("o"):
            split = Split(axis.name, smallest_factor(axis.size))
            check_splits(use, (split,))
            splits = (*splits, split)
    if len(splits) > 1 and math.prod(split.degree for split in splits) <= 12:
        assert are_even_splits(use.space, splits)
        check_splits(use, splits)
    return {split.axis for split in splits}


@given(geometries(), st.sampled_from([1, 2]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_convolution(geometry: Geometry, groups: int, biased: bool) -> None:
    arrays = [normal(1, 2 * groups, *geometry.extents), normal(groups, 2, *geometry.kernel)]
    use = use_of(
        "Conv",
        [*arrays, *([normal(groups)] if biased else [])],
        group=groups,
        **geometry.attributes,
    )
    assert check_spatial(use) == {
        axis.name for axis in use.space.axes if axis.name[0] == "o" and axis.size > 1
    }


@given(
    geometries(pooling=True),
    st.sampled_from(["MaxPool", "AveragePool", "LpPool"]),
    st.integers(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_pooling(geometry: Geometry, op: str, counted: int) -> None:
    extra = {"count_include_pad": counted} if op == "AveragePool" else {}
    use = use_of(
        op,
        [normal(1, 2, *geometry.extents)],
        kernel_shape=geometry.kernel,
        **extra,
        **geometry.attributes,
    )
    assume(0 not in use.graph.values[0].shape)
    whole = {
        axis.name
        for axis in use.space.axes
        if axis.kind is AxisKind.UNSPLITTABLE and axis.name[0] == "o"
    }
    assert not whole or op == "AveragePool"
    check_spatial(use)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_whole_numbers_have_a_least(dtype: type) -> None:
    bounds = np.iinfo(dtype)
    image = np.random.default_rng(0).integers(bounds.min, bounds.max, (1, 1, 6, 6), dtype)
    use = use_of("MaxPool", [image], kernel_shape=(3, 3), pads=(1, 1, 1, 1))
    assert check_spatial(use) == {"o0", "o1"}


def test_means_whose_divisor_changes_stay_whole() -> None:
    pads = {"kernel_shape": (3, 3), "pads": (1, 0, 1, 0)}
    kinds = {
        axis.name: axis.kind
        for axis in use_of("AveragePool", [normal(1, 1, 8, 8)], **pads).space.axes
    }
    assert (kinds["o0"], kinds["o1"]) == (AxisKind.UNSPLITTABLE, AxisKind.PARALLEL)
    rounded = use_of(
        "AveragePool",
        [normal(1, 1, 7)],
        kernel_shape=(2,),
        strides=(2,),
        ceil_mode=1,
        count_include_pad=1,
    )
    assert rounded.space.axis("o0").kind is AxisKind.UNSPLITTABLE
