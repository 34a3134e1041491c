from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx.helper
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator

from autopipe.passes.frontend.inference import FORMULAS, Inference, evaluate_by_formula

INTEGERS = np.arange(6).reshape(2, 3)
REALS = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
SCALARS = tuple(np.asarray(number, dtype=np.float32) for number in (-1.5, 4.0, 0.75))
SHOWN = np.float32(0).reshape(())
HIDDEN = np.float32(-np.inf).reshape(())

CASES: tuple[tuple[str, tuple[np.ndarray, ...]], ...] = (
    ("Add", (INTEGERS, INTEGERS[0])),
    ("Add", (REALS, SCALARS[0])),
    ("Less", (INTEGERS[:1].T, INTEGERS[:1])),
    ("Less", (REALS, REALS[:1])),
    ("Mul", (REALS, REALS[:, :1])),
    ("Mul", SCALARS[:2]),
    ("Range", tuple(np.asarray(number) for number in (3, 11, 2))),
    ("Range", SCALARS),
    ("Sub", (INTEGERS, INTEGERS[:1])),
    ("Unsqueeze", (REALS, np.asarray([0, 3]))),
    ("Unsqueeze", (INTEGERS > 2, np.asarray([-1]))),
    ("Where", (INTEGERS > 2, SHOWN, HIDDEN)),
    ("Where", (INTEGERS[0] > 1, INTEGERS, INTEGERS[:1])),
)


@pytest.mark.parametrize(("operator", "operands"), CASES)
def test_a_formula_tells_what_the_evaluator_of_onnx_does(
    operator: str, operands: Sequence[np.ndarray]
) -> None:
    names = [f"i{index}" for index in range(len(operands))]
    node = onnx.helper.make_node(operator, names, ["o"])
    (expected,) = ReferenceEvaluator(node, opsets={"": 21}).run(
        None, dict(zip(names, operands, strict=True))
    )
    told = evaluate_by_formula(node, operands)
    assert told is not None
    assert (told[0].dtype, told[0].shape) == (np.asarray(expected).dtype, np.shape(expected))
    assert told[0].tobytes() == np.asarray(expected).tobytes()


def test_every_formula_has_a_case() -> None:
    assert {operator for operator, _ in CASES} == set(FORMULAS)


@pytest.mark.parametrize(
    ("operator", "operands"),
    [
        ("Add", (INTEGERS, REALS)),
        ("Add", (REALS,)),
        ("Mul", (REALS, None)),
        ("Less", (INTEGERS > 2, INTEGERS > 3)),
        ("Range", (np.asarray(0), np.asarray(3), np.asarray(0))),
        ("Where", (INTEGERS, REALS, REALS)),
        ("Cos", (REALS,)),
    ],
)
def test_what_has_no_formula_is_left_to_the_evaluator(
    operator: str, operands: Sequence[np.ndarray | None]
) -> None:
    node = onnx.helper.make_node(
        operator, ["" if each is None else "i" for each in operands], ["o"]
    )
    assert evaluate_by_formula(node, operands) is None


def test_attributes_and_other_domains_are_left_to_the_evaluator() -> None:
    stated = onnx.helper.make_node("Unsqueeze", ["x"], ["o"], axes=[0])
    other = onnx.helper.make_node("Add", ["x", "y"], ["o"], domain="com.example")
    assert evaluate_by_formula(stated, (REALS,)) is None
    assert evaluate_by_formula(other, (REALS, REALS)) is None


def test_operators_are_evaluated_as_their_opset_has_them() -> None:
    """Shapes of exports of opset 11 are reckoned with axes as attributes."""
    node = onnx.helper.make_node("Unsqueeze", ["x"], ["y"], axes=[0])
    found = Inference((("", 11),)).evaluate(node, (np.asarray(3),), (None,))
    assert found is not None and found[0].tolist() == [3]


@pytest.mark.parametrize("operator", ["Hardmax", "LogSoftmax", "Softmax"])
@pytest.mark.parametrize("axis", [None, 0, -1])
def test_a_softmax_takes_all_axes_together_below_opset_13(operator: str, axis: int | None) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    info = [onnx.helper.make_tensor_value_info(name, 1, [2, 3, 4]) for name in "xy"]
    node = onnx.helper.make_node(operator, ["x"], ["y"], **({} if axis is None else {"axis": axis}))
    graph = onnx.helper.make_graph([node], "g", info[:1], info[1:])
    opset = onnx.helper.make_opsetid("", 12)
    model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=7).SerializeToString()
    (wanted,) = onnxruntime.InferenceSession(model).run(None, {"x": x})
    found = Inference((("", 12),)).evaluate(node, (x,), (None,))
    assert found is not None
    np.testing.assert_allclose(found[0], wanted, rtol=1e-5)
