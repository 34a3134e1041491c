"""Operators whose meaning changed between opsets, against ONNX Runtime at each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backends.torch.codegen.reference import compare


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
@pytest.mark.parametrize("opset", [7, 11, 12, 13, 21])
@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
def test_softmax_flattened_before_13(op: str, opset: int, axis: int) -> None:
    if opset < 11 and axis < 0:
        pytest.skip("axes count from the front")
    compare(op, [normal(2, 3, 4)], opset=opset, axis=axis)
    compare(op, [normal(2, 3, 4)], opset=opset)


@pytest.mark.parametrize("opset", [7, 9, 14, 15])
def test_batch_normalization_at_inference(opset: int) -> None:
    arrays = [normal(2, 3, 4), *(np.abs(normal(3)) + place for place in range(4))]
    compare("BatchNormalization", arrays, opset=opset, epsilon=1e-3)


@pytest.mark.parametrize("opset", [9, 11, 13, 18, 21])
@pytest.mark.parametrize("biased", [True, False])
def test_gemm(opset: int, biased: bool) -> None:
    if opset < 11 and not biased:
        pytest.skip("C may be absent since opset 11")
    for shape in ((5,), (2, 5), (1, 5), (2, 1), (1,), ()):
        arrays = [normal(3, 2), normal(5, 3), *([normal(*shape)] if biased else [])]
        compare("Gemm", arrays, opset=opset, transA=1, transB=1, alpha=0.5, beta=2.0)
        compare("Gemm", [normal(2, 3), *arrays[1:]], opset=opset, transB=1)
        compare("Gemm", [arrays[0], normal(3, 5), *arrays[2:]], opset=opset, transA=1, beta=0.0)


@pytest.mark.parametrize(
    ("op", "opset", "mode"),
    [
        (op, opset, mode)
        for op, opset in (("Upsample", 9), ("Resize", 10))
        for mode in ("nearest", "linear")
    ],
)
def test_resizing_before_11(op: str, opset: int, mode: str) -> None:
    compare(op, [normal(1, 2, 4, 3), np.array([1, 1, 2, 3], np.float32)], opset=opset, mode=mode)
    compare(
        op, [normal(1, 2, 4, 5), np.array([1, 1, 1.5, 2.5], np.float32)], opset=opset, mode=mode
    )


def test_nearest_by_the_rule_of_tensorflow() -> None:
    scales = np.array([1, 1, 0.4, 1.6], np.float32)
    attributes = {"coordinate_transformation_mode": "tf_half_pixel_for_nn", "nearest_mode": "floor"}
    compare("Resize", [normal(1, 2, 7, 5), np.zeros(0, np.float32), scales], opset=11, **attributes)


def test_upsample_by_attribute() -> None:
    compare("Upsample", [normal(1, 2, 4, 3)], opset=7, scales=[1.0, 1.0, 2.0, 3.0])


@given(
    st.sampled_from(("nearest", "linear", "cubic")),
    st.sampled_from(
        ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "half_pixel_symmetric")
    ),
    st.sampled_from(("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")),
    st.sampled_from((0.5, 0.75, 1.0, 1.5, 2.0, 3.0)),
    st.sampled_from((0.5, 1.0, 1.25, 2.0)),
    st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_resize(
    mode: str, places: str, rounding: str, high: float, wide: float, exclude: bool
) -> None:
    attributes: dict[str, Any] = {"mode": mode, "coordinate_transformation_mode": places}
    if mode == "nearest":
        attributes["nearest_mode"] = rounding
    if mode == "cubic":
        attributes["exclude_outside"] = int(exclude)
    scales = np.array([1, 1, high, wide], np.float32)
    compare("Resize", [normal(1, 2, 4, 8), None, scales], opset=19, **attributes)


@given(
    st.integers(1, 3),
    st.lists(st.integers(1, 3), min_size=2, max_size=2),
    st.lists(st.integers(1, 3), min_size=2, max_size=2),
    st.lists(st.integers(0, 2), min_size=4, max_size=4),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_pooling(
    dilation: int, kernel: list[int], strides: list[int], pads: list[int], ceil: bool, counted: bool
) -> None:
    pads = [min(pad, kernel[place % 2] - 1) for place, pad in enumerate(pads)]
    shared = {"kernel_shape": kernel, "strides": strides, "pads": pads, "ceil_mode": int(ceil)}
    x = normal(1, 2, 8, 9)
    compare("MaxPool", [x], opset=12, dilations=[dilation, 1], **shared)
    compare("MaxPool", [x], opset=12, outputs=(True, True), **shared)
    if not ceil:
        compare(
            "AveragePool",
            [x],
            opset=19,
            count_include_pad=int(counted),
            dilations=[1, dilation],
            **shared,
        )
        compare("LpPool", [x], opset=18, p=3, **shared)


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.lists(st.integers(0, 2), min_size=2, max_size=2),
    st.integers(0, 2),
    st.sampled_from(("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")),
)
@settings(max_examples=60, deadline=None)
def test_convolution(
    stride: int, dilation: int, kernel: int, pads: list[int], more: int, policy: str
) -> None:
    attributes: dict[str, Any] = {
        "strides": [stride],
        "dilations": [dilation],
        "auto_pad": policy,
        "group": 2,
    }
    if policy == "NOTSET":
        attributes["pads"] = pads
    if policy.startswith("SAME"):
        attributes["dilations"] = [1]
    compare("Conv", [normal(2, 4, 11), normal(6, 2, kernel), normal(6)], opset=21, **attributes)
    attributes["output_padding"] = [min(more, stride - 1)]
    reach = attributes["dilations"][0] * (kernel - 1)
    if policy == "NOTSET" and sum(pads) <= reach + 4:
        compare(
            "ConvTranspose",
            [normal(2, 4, 6), normal(4, 3, kernel), normal(6)],
            opset=21,
            **attributes,
        )


def test_products_of_integers() -> None:
    left = np.arange(-6, 6, dtype=np.int64).reshape(3, 4) * 2**40
    compare("MatMul", [left, np.arange(8, dtype=np.int64).reshape(4, 2)], opset=13)
    compare("MatMul", [left.astype(np.int32), np.arange(4, dtype=np.int32)], opset=13)
