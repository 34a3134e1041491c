"""Every law of polynomials in the number of rows agrees with ONNX's evaluator at given numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.passes.frontend.dynamic_shapes.sizes import (
    ORDER_OPERATORS,
    Number,
    SizeArray,
    evaluate_with_sizes,
    multiply_elements,
)
from autopipe.passes.frontend.inference import Inference
from tests.passes.frontend.building import INT64, integers, node

LARGE = (101, 1000)
"""Numbers of rows that are larger than the coefficients in these tests."""
SMALL = (0, 1, 2, 7)
INFERENCE = Inference((("", 20),))


def sizes(*elements: tuple[int, ...]) -> SizeArray:
    """Return a vector of polynomials with these coefficients, the constant term first."""
    degree = max(map(len, elements))
    padded = [(*each, *[0] * (degree - len(each))) for each in elements]
    return SizeArray.from_coefficients([np.array(each) for each in zip(*padded, strict=True)])


def evaluated(
    operator: onnx.NodeProto, operands: Sequence[np.ndarray | None]
) -> tuple[np.ndarray, ...] | None:
    return INFERENCE.evaluate(operator, tuple(operands), ())


def interpreted(operator: onnx.NodeProto, operands: Sequence[Number]) -> list[SizeArray] | None:
    return evaluate_with_sizes(operator, operands, lambda arrays: evaluated(operator, arrays))


def agrees(operator: onnx.NodeProto, operands: Sequence[Number], numbers: Sequence[int]) -> None:
    found = interpreted(operator, operands)
    assert found is not None
    for number in numbers:
        arrays = [
            each.value_at(number) if isinstance(each, SizeArray) else each for each in operands
        ]
        expected = evaluated(operator, arrays)
        assert expected is not None
        for result, array in zip(found, expected, strict=True):
            assert result.dtype == array.dtype
            np.testing.assert_array_equal(result.value_at(number), array)


N = sizes((0, 1), (4,), (3, 2))
LINEAR: dict[str, tuple[onnx.NodeProto, list[Number]]] = {
    "Add": (node("Add", "a b", "y"), [N, integers(1, 2, 3)]),
    "Sub": (node("Sub", "a b", "y"), [integers(1, 2, 3), N]),
    "Sub of two": (node("Sub", "a b", "y"), [N, sizes((1, 1))]),
    "Cast": (node("Cast", "a", "y", to=INT64), [N]),
    "Concat": (node("Concat", "a b c", "y", axis=0), [integers(7), N, sizes((0, 5))]),
    "Gather": (node("Gather", "a b", "y"), [N, np.array([[2, 0]])]),
    "ReduceSum": (node("ReduceSum", "a", "y", keepdims=0), [N]),
    "Reshape": (node("Reshape", "a b", "y"), [N, integers(3, 1)]),
    "ScatterElements": (
        node("ScatterElements", "a b c", "y"), [N, integers(1), sizes((0, 9))],
    ),
    "ScatterElements that adds": (
        node("ScatterElements", "a b c", "y", reduction="add"), [N, integers(1), sizes((0, 9))],
    ),
    "Slice": (node("Slice", "a b c", "y"), [N, integers(1), integers(3)]),
    "Split": (node("Split", "a b", "y z", axis=0), [N, integers(1, 2)]),
    "Transpose": (node("Transpose", "a", "y"), [N]),
    "Unsqueeze": (node("Unsqueeze", "a b", "y"), [N, integers(0)]),
    "Where": (node("Where", "a b c", "y"), [np.array([True, False, True]), N, integers(8)]),
}  # fmt: skip


@pytest.mark.parametrize("reduction", ["mul", "min", "max"])
def test_a_scatter_with_a_nonlinear_reduction_is_not_evaluated(reduction: str) -> None:
    scatter = node("ScatterElements", "a b c", "y", reduction=reduction)
    assert interpreted(scatter, [N, integers(1), sizes((0, 9))]) is None


@pytest.mark.parametrize("name", LINEAR)
def test_linear_operators_are_applied_to_the_coefficients(name: str) -> None:
    agrees(*LINEAR[name], (*SMALL, *LARGE))


COEFFICIENTS = st.lists(
    st.tuples(st.integers(-3, 5), st.integers(-2, 3), st.integers(0, 1)), min_size=1, max_size=4
).map(lambda each: sizes(*each))


@given(COEFFICIENTS, st.integers(-3, 4))
def test_products_are_exact(elements: SizeArray, factor: int) -> None:
    agrees(node("Mul", "a b", "y"), [elements, np.array(factor)], SMALL)
    agrees(node("Mul", "a b", "y"), [elements, elements], SMALL)
    agrees(node("ReduceProd", "a", "y", keepdims=0), [elements], SMALL)
    assert multiply_elements(elements).value_at(3) == np.prod(elements.value_at(3))


@given(st.sampled_from(sorted(ORDER_OPERATORS)), COEFFICIENTS, st.integers(-5, 9))
def test_order_holds_for_large_numbers_of_rows(
    operator: str, elements: SizeArray, bound: int
) -> None:
    if operator.startswith("Reduce"):
        agrees(node(operator, "a", "y", keepdims=1), [elements], LARGE)
    else:
        agrees(node(operator, "a b", "y"), [elements, np.array([bound])], LARGE)
        agrees(node(operator, "a b", "y"), [elements, sizes((bound, 1))], LARGE)


@given(st.integers(0, 20), st.integers(0, 3), st.integers(1, 4))
def test_a_quotient_by_a_number_is_rounded_down(offset: int, scale: int, divisor: int) -> None:
    operator = node("Div", "a b", "y")
    agrees(operator, [sizes((offset, scale * divisor)), np.array(divisor)], (*SMALL, *LARGE))


def test_quotients_of_polynomials_leave_no_remainder() -> None:
    operator = node("Div", "a b", "y")
    agrees(operator, [sizes((0, 8)), sizes((0, 2))], (1, 2, 7))
    agrees(operator, [sizes((0, 3, 1)), sizes((3, 1))], SMALL)
    assert interpreted(operator, [sizes((0, 3)), np.array(2)]) is None
    assert interpreted(operator, [integers(5), sizes((0, 1))]) is None
    assert interpreted(operator, [sizes((0, 3)), sizes((0, 2))]) is None


def test_a_position_that_depends_on_rows_is_not_followed() -> None:
    operator = node("Gather", "a b", "y")
    assert interpreted(operator, [integers(3, 4, 5), sizes((0, 1))]) is None


def test_a_cast_that_rounds_is_not_followed() -> None:
    half = SizeArray.from_coefficients([np.zeros(1), np.full(1, 0.5)])
    operator = node("Cast", "a", "y", to=INT64)
    assert interpreted(operator, [half]) is None
    agrees(operator, [SizeArray.from_coefficients([np.ones(1), np.full(1, 2.0)])], SMALL)


def test_trailing_zero_coefficients_are_removed() -> None:
    (difference,) = interpreted(node("Sub", "a b", "y"), [sizes((5, 1)), sizes((0, 1))]) or []
    assert difference.degree == 0
    assert difference.offset.tolist() == [5]
