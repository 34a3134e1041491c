"""Poolings that round the number of windows up, in every opset, as ONNX Runtime computes them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from tests.passes.frontend.building import floats
from tests.passes.frontend.evaluated import both

OPSETS = {
    "MaxPool": (10, 12, 17, 21, 22),
    "AveragePool": (10, 11, 17, 19, 21, 22),
    "LpPool": (18, 21, 22),
}
GEOMETRIES = [
    (extent, kernel, stride, begin, end)
    for extent, kernel, stride, begin, end in itertools.product(
        (5, 6, 8), (2, 3), (2, 3), (0, 1), (0, 1)
    )
    if max(begin, end) < kernel
]
"""Extent, window, stride, and pads at the begin and at the end."""


@pytest.mark.parametrize(
    ("operator", "opset"), [(name, opset) for name, opsets in OPSETS.items() for opset in opsets]
)
def test_the_last_window(operator: str, opset: int, tmp_path: Path) -> None:
    for extent, kernel, stride, begin, end in GEOMETRIES:
        settings: dict[str, object] = {
            "kernel_shape": [kernel], "strides": [stride], "pads": [begin, end], "ceil_mode": 1,
        }  # fmt: skip
        own, expected = both(
            tmp_path, operator, [floats(1, 2, extent)], domain="", opset=opset, **settings
        )
        case = (extent, kernel, stride, begin, end)
        assert own["y"].shape == expected["y"].shape, case
        np.testing.assert_allclose(own["y"], expected["y"], rtol=1e-5, atol=1e-6, err_msg=str(case))


@pytest.mark.parametrize("opset", [10, 17, 19, 22])
def test_means_that_count_pads(opset: int, tmp_path: Path) -> None:
    for extent, kernel, stride, begin, end in GEOMETRIES:
        settings: dict[str, object] = {
            "kernel_shape": [kernel], "strides": [stride], "pads": [begin, end], "ceil_mode": 1, "count_include_pad": 1,
        }  # fmt: skip
        own, expected = both(
            tmp_path, "AveragePool", [floats(1, 2, extent)], domain="", opset=opset, **settings
        )
        case = (extent, kernel, stride, begin, end)
        assert own["y"].shape == expected["y"].shape, case
        np.testing.assert_allclose(own["y"], expected["y"], rtol=1e-5, atol=1e-6, err_msg=str(case))
