"""Masks that a file computes several times have one root."""

from __future__ import annotations

import numpy as np
import pytest

from autopipe.ir.graph import DType, Value
from autopipe.passes.frontend.dynamic_shapes.mask_roots import MaskRoots
from tests.passes.frontend.building import node

ARRAYS: dict[str, np.ndarray] = {"zero": np.zeros(4, np.float32), "flat": np.array([4], np.int64)}
TYPES = {
    name: Value(name, DType(array.dtype.name), array.shape) for name, array in ARRAYS.items()
} | {
    "x": Value("x", DType.FLOAT32, (2, 2)),
    "first": Value("first", DType.BOOL, (2, 2)),
    "second": Value("second", DType.BOOL, (2, 2)),
}


@pytest.mark.parametrize("operator", ["IsInf", "IsNaN"])
def test_equal_masks_have_one_root(operator: str) -> None:
    nodes = [
        node(operator, "x", "first"),
        node(operator, "x", "second"),
        node("Reshape", "second flat", "view"),
    ]
    roots = MaskRoots(nodes)
    assert roots.root("first", TYPES, ARRAYS) == "first"
    assert roots.root("view", TYPES, ARRAYS) == "first"


def test_masks_with_other_attributes_differ() -> None:
    nodes = [
        node("IsInf", "x", "first"),
        node("IsInf", "x", "second", detect_negative=0),
    ]
    roots = MaskRoots(nodes)
    assert roots.root("first", TYPES, ARRAYS) == "first"
    assert roots.root("second", TYPES, ARRAYS) == "second"
