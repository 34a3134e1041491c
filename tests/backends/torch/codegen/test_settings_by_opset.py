"""Operators that took their settings as attributes before they took them as operands, against ONNX
Runtime at each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from autopipe.ir.ops import signature_of
from tests.backends.torch.codegen.reference import compare
from tests.conformance.adapter import to_tensor
from tests.ir.ops.splitting import Use, computed


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def integers(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int64)


def scalar(value: float) -> np.ndarray:
    return np.array(value, np.float32)


REDUCTIONS = (
    "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp",
    "ReduceSumSquare",
)  # fmt: skip


@pytest.mark.parametrize("opset", [7, 11, 13, 18])
@pytest.mark.parametrize("op", [*REDUCTIONS, "ReduceSum"])
def test_axes_of_reductions(op: str, opset: int) -> None:
    data = np.abs(normal(2, 3, 4)) + 0.5
    by_operand = opset >= (13 if op == "ReduceSum" else 18)
    for axes in ((1,), (0, 2)):
        given: dict[str, Any] = {} if by_operand else {"axes": axes}
        operands = [data, integers(axes)] if by_operand else [data]
        compare(op, operands, opset=opset, keepdims=0, **given)
        compare(op, operands, opset=opset, **given)
    compare(op, [data], opset=opset)
    if by_operand:
        compare(op, [data], opset=opset, noop_with_empty_axes=1)


@pytest.mark.parametrize("opset", [7, 11, 13, 21])
def test_dimensions_of_one(opset: int) -> None:
    for op, data, axes in (
        ("Squeeze", normal(1, 2, 1, 3), (0, 2)),
        ("Unsqueeze", normal(2, 3), (0, 2)),
    ):
        if opset < 13:
            compare(op, [data], opset=opset, axes=axes)
        else:
            compare(op, [data, integers(axes)], opset=opset)
    compare("Squeeze", [normal(1, 2, 1, 3)], opset=opset)


@pytest.mark.parametrize("opset", [7, 10, 13])
def test_slices(opset: int) -> None:
    for starts, ends, axes in (
        ((1, -3), (2, -1), (0, 2)),
        ((0,), (2**31 - 1,), (1,)),
        ((5,), (9,), (1,)),
    ):
        if opset < 10:
            compare("Slice", [normal(2, 3, 4)], opset=opset, starts=starts, ends=ends, axes=axes)
        else:
            compare(
                "Slice",
                [normal(2, 3, 4), integers(starts), integers(ends), integers(axes)],
                opset=opset,
            )


@pytest.mark.parametrize(
    ("start", "end", "step"), [(5, 0, -1), (-1, -100, -2), (7, 1, -3), (0, 6, 4), (100, -100, -1)]
)
def test_slices_with_steps(start: int, end: int, step: int) -> None:
    operands = [normal(2, 6), *(integers([value]) for value in (start, end, 1, step))]
    compare("Slice", operands, opset=13)


@pytest.mark.parametrize("opset", [7, 11, 13, 18, 19])
@pytest.mark.parametrize("mode", ["constant", "reflect", "edge", "wrap"])
def test_padding(opset: int, mode: str) -> None:
    if mode == "wrap" and opset < 19:
        pytest.skip("since opset 19")
    pads = (0, 1, 2, 0, 2, 1)
    if opset < 11:
        compare("Pad", [normal(2, 3, 4)], opset=opset, mode=mode, pads=pads, value=0.5)
    else:
        compare("Pad", [normal(2, 3, 4), integers(pads), scalar(0.5)], opset=opset, mode=mode)
    if opset >= 18:
        compare(
            "Pad", [normal(2, 3, 4), integers([1, 2]), None, integers([-1])], opset=opset, mode=mode
        )


@pytest.mark.parametrize("opset", [7, 11, 12, 13])
def test_bounds_of_clip(opset: int) -> None:
    if opset < 11:
        compare("Clip", [normal(3, 4)], opset=opset, min=-0.5, max=0.25)
        compare("Clip", [normal(3, 4)], opset=opset, max=0.25)
        return
    compare("Clip", [normal(3, 4), scalar(-0.5), scalar(0.25)], opset=opset)
    compare("Clip", [normal(3, 4), None, scalar(0.25)], opset=opset)
    compare("Clip", [normal(3, 4)], opset=opset)


@pytest.mark.parametrize("opset", [7, 10, 12, 13])
def test_dropout_at_inference(opset: int) -> None:
    given: dict[str, Any] = {"ratio": 0.5} if opset < 12 else {}
    compare("Dropout", [normal(3, 4)], opset=opset, **given)


@pytest.mark.parametrize("opset", [9, 10, 11])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_top_k(opset: int, axis: int) -> None:
    data = normal(4, 5)
    if opset < 10:
        compare("TopK", [data], opset=opset, outputs=(True, True), axis=axis, k=3)
    else:
        compare("TopK", [data, integers([3])], opset=opset, outputs=(True, True), axis=axis)


@pytest.mark.parametrize("opset", [7, 11, 13, 18])
def test_splits(opset: int) -> None:
    data = normal(6, 4)
    sizes = (1, 2, 3)
    three = (True, True, True)
    if opset < 13:
        compare("Split", [data], opset=opset, outputs=three, axis=0, split=sizes)
    else:
        compare("Split", [data, integers(sizes)], opset=opset, outputs=three, axis=0)
    even: dict[str, Any] = {"num_outputs": 3} if opset >= 18 else {}
    compare("Split", [data], opset=opset, outputs=three, **even)
    _check_without_second(compare("Split", [data], opset=opset, outputs=three, **even))
    if opset >= 18:
        compare("Split", [normal(7, 4)], opset=opset, outputs=three, **even)


def _check_without_second(use: Use) -> None:
    """ONNX Runtime crashes where a result in the middle is not asked for; ours must give the others
    unchanged.
    """
    tensors = {name: to_tensor(array) for name, array in use.arrays.items()}
    signature = signature_of(use.graph, use.node)
    first, _, third = computed(signature, tensors)
    results = (signature.results[0], None, signature.results[2])
    left, right = computed(replace(signature, results=results), tensors)
    assert torch.equal(first, left)
    assert torch.equal(third, right)


@pytest.mark.parametrize("opset", [9, 11, 13, 16, 18])
@pytest.mark.parametrize("axis", [0, 1])
def test_scattered_elements(opset: int, axis: int) -> None:
    places = np.array([[0, 2], [1, 0]], np.int64)
    op = "ScatterElements" if opset >= 11 else "Scatter"
    compare(op, [normal(3, 3), places, normal(2, 2)], opset=opset, axis=axis)
    for reduction in ("add", "mul", "max", "min") if opset >= 18 else ():
        compare(
            op,
            [normal(3, 3), places - 1, normal(2, 2)],
            opset=opset,
            axis=axis,
            reduction=reduction,
        )
        pairs = np.array([[0, 1], [0, 1], [2, -1]], np.int64)
        compare(
            "ScatterND", [normal(3, 3, 2), pairs, normal(3, 2)], opset=opset, reduction=reduction
        )


@pytest.mark.parametrize("opset", [7, 11, 13])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_hardmax_flattened_before_13(opset: int, axis: int) -> None:
    compare("Hardmax", [normal(2, 3, 4)], opset=opset, axis=axis)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_gathers_count_from_either_end(axis: int, dtype: type[np.generic]) -> None:
    data = (10 * normal(3, 3, 3)).astype(dtype)
    places = np.array([[0, -1], [2, -3]], np.int64)
    compare("Gather", [data, places], opset=13, axis=axis)
    compare("GatherElements", [data, places[:, :, None]], opset=13, axis=axis)
    compare("GatherND", [data, places], opset=13)
    compare("GatherND", [data, places[:1, :, None].repeat(3, 0)], opset=13, batch_dims=1)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.int64])
def test_ranges(dtype: type[np.generic]) -> None:
    for start, limit, step in ((0, 5, 1), (2, 11, 3), (5, -3, -2), (3, 3, 1)):
        compare("Range", [np.array(value, dtype) for value in (start, limit, step)], opset=13)


@pytest.mark.parametrize("target", [1, 6, 7, 9, 10, 11])
def test_casts(target: int) -> None:
    for data in (
        np.array([-2.7, -0.5, 0.0, 0.5, 2.7], np.float32),
        np.array([0, 1, 2, 3], np.int64),
        np.array([True, False]),
    ):
        compare("Cast", [data], opset=13, to=target)
