"""The facts in operator definitions hold for ONNX's reference implementation of the operators."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.defs import get_schema
from onnx.reference import ReferenceEvaluator

from autopipe.ir.graph import DType, Node, Value
from autopipe.ir.ops import OPERATORS, Operator, Signature, operators_with

OPSET = 21
TENSOR = np.array([[0.5, 1.25, 2.0, 0.75], [1.5, 0.25, 1.0, 3.0]])
OTHER = np.array([[1.0, 0.5, 0.75, 2.5], [0.5, 2.25, 1.75, 1.0]])
HIDDEN = 3
"""Number of hidden units of the recurrent layers."""


def evaluated(operator: str, operands: list[np.ndarray], **attributes: Any) -> list[np.ndarray]:
    """Return the results of one node."""
    names = [f"operand_{slot}" for slot in range(len(operands))]
    results = ["result", "second"] if operator in ("Split", "TopK") else ["result"]
    node = helper.make_node(operator, names, results, **attributes)
    kind = TensorProto.UNDEFINED
    graph = helper.make_graph(
        [node],
        "graph",
        [helper.make_tensor_value_info(name, kind, None) for name in names],
        [helper.make_tensor_value_info(name, kind, None) for name in results],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    found = ReferenceEvaluator(model).run(None, dict(zip(names, operands, strict=True)))
    return [np.asarray(each) for each in found]


def standard(names: frozenset[str]) -> list[str]:
    """Return the operators of ONNX's default domain, sorted."""
    return sorted(name for name in names if "." not in name)


def int64(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


@dataclass(frozen=True)
class Case:
    """A node: the number of its floating-point operands, the other operands before and after them,
    and the attributes.
    """

    floating: int = 1
    before: tuple[np.ndarray, ...] = ()
    after: tuple[np.ndarray, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)

    def run(self, operator: str, *floating: np.ndarray) -> list[np.ndarray]:
        return evaluated(operator, [*self.before, *floating, *self.after], **self.attributes)


LINEAR_CASES = {
    "Add": Case(2),
    "Cast": Case(attributes={"to": TensorProto.DOUBLE}),
    "Concat": Case(2, attributes={"axis": 1}),
    "Div": Case(2),
    "Einsum": Case(2, attributes={"equation": "ij,kj->ik"}),
    "Expand": Case(after=(int64(3, 2, 4),)),
    "Gather": Case(after=(int64(2, 0, 3, 1),), attributes={"axis": 1}),
    "MatMul": Case(2),
    "Mean": Case(2),
    "Mul": Case(2),
    "Pad": Case(after=(int64(0, 1, 0, 1),)),
    "ReduceMean": Case(after=(int64(1),)),
    "ReduceSum": Case(after=(int64(1),)),
    "Reshape": Case(after=(int64(4, 2),)),
    "Slice": Case(after=(int64(1), int64(3), int64(1))),
    "Split": Case(attributes={"axis": 1, "num_outputs": 2}),
    "Squeeze": Case(after=(int64(0),)),
    "Sub": Case(2),
    "Sum": Case(2),
    "Tile": Case(after=(int64(1, 2),)),
    "Unsqueeze": Case(after=(int64(0),)),
    "Where": Case(2, before=(TENSOR > 1,)),
}
"""Nodes of operators that need more than one floating-point operand."""


@pytest.mark.parametrize("operator", standard(operators_with(lambda row: row.linear)))
def test_linear_operators_commute_with_a_factor(operator: str) -> None:
    linear = OPERATORS[operator].linear
    case = LINEAR_CASES.get(operator, Case())
    operands = [TENSOR, OTHER][: case.floating]
    if operator == "MatMul":
        operands[1] = OTHER.T
    if operator == "Squeeze":
        operands[0] = TENSOR[None]
    results = case.run(operator, *operands)
    slots: dict[str, list[list[int]]] = {
        "together": [[*range(case.floating)]],
        "each": [[slot] for slot in range(case.floating)],
        "first": [[0]],
    }
    for scaled in slots[linear]:
        factors = [3.0 if slot in scaled else 1.0 for slot in range(case.floating)]
        pairs = zip(operands, factors, strict=True)
        found = case.run(operator, *[operand * factor for operand, factor in pairs])
        for expected, result in zip(results, found, strict=True):
            np.testing.assert_allclose(result, 3.0 * expected, rtol=1e-12)


@pytest.mark.parametrize("operator", standard(operators_with(lambda row: row.same_elements)))
def test_operators_with_the_same_elements_keep_their_order(operator: str) -> None:
    operand = TENSOR[None] if operator == "Squeeze" else TENSOR
    (result,) = LINEAR_CASES.get(operator, Case()).run(operator, operand)
    assert result.dtype == operand.dtype
    np.testing.assert_array_equal(result.reshape(-1), operand.reshape(-1))


def signature(
    operator: str, operands: list[np.ndarray], results: list[np.ndarray], **attributes: Any
) -> Signature:
    """Return the signature of a node whose integer operands are constants."""
    names = [f"operand_{slot}" for slot in range(len(operands))]
    written = [f"result_{slot}" for slot in range(len(results))]
    stated = tuple(
        (name, tuple(value) if isinstance(value, list) else value)
        for name, value in sorted(attributes.items())
    )
    values = [
        Value(name, DType(array.dtype.name), array.shape)
        for name, array in zip([*names, *written], [*operands, *results], strict=True)
    ]
    return Signature(
        Node("node", operator, tuple(names), tuple(written), stated),
        tuple(values[: len(operands)]),
        tuple(values[len(operands) :]),
        tuple(array if array.dtype.kind == "i" else None for array in operands),
        OPSET,
    )


@pytest.mark.parametrize("operator", standard(operators_with(lambda row: row.moved and row.linear)))
def test_moved_elements_are_the_elements_of_the_operand(operator: str) -> None:
    move = OPERATORS[operator].moved
    assert move is not None
    case = LINEAR_CASES.get(operator, Case())
    floating = [TENSOR, OTHER][: case.floating]
    if operator == "Squeeze":
        floating[0] = TENSOR[None]
    results = case.run(operator, *floating)
    operands = [*case.before, *floating, *case.after]
    use = signature(operator, operands, results, **case.attributes)
    for number, result in enumerate(results):
        held = np.zeros(result.shape, bool)
        for slot in range(len(case.before), len(case.before) + case.floating):
            positions = np.arange(operands[slot].size).reshape(operands[slot].shape)
            found = move(use, slot, number, positions)
            assert found is not None
            assert found.shape == result.shape
            is_held = (found >= 0) & (result == operands[slot].reshape(-1)[found])
            assert operator == "Where" or is_held[found >= 0].all()
            held |= is_held
        assert held.all() == (operator != "Pad")
        assert (result[~held] == 0).all()


INDICES = {
    "Gather": ([TENSOR, int64(0, -3, 3)], 1, {"axis": 1}),
    "GatherElements": ([TENSOR, np.array([[0, 3], [-1, -4]])], 1, {"axis": 1}),
    "GatherND": ([TENSOR, np.array([[0, 3], [1, -4]])], 1, {}),
    "NegativeLogLikelihoodLoss": ([TENSOR, int64(3, 0)], 1, {}),
    "OneHot": ([int64(0, 2), np.array(3), np.array([0.0, 1.0])], 0, {}),
    "ScatterElements": ([TENSOR, np.array([[0, -1], [3, -4]]), OTHER[:, :2]], 1, {"axis": 1}),
    "ScatterND": ([TENSOR, np.array([[0, 3], [-2, 1]]), OTHER[0, :2]], 1, {}),
    "SoftmaxCrossEntropyLoss": ([TENSOR, int64(3, 0)], 1, {}),
}
"""By operator: operands, the operand with indices, and attributes."""


@pytest.mark.parametrize("operator", INDICES)
def test_indices_below_the_end_of_their_range_select_elements(operator: str) -> None:
    operands, slot, attributes = INDICES[operator]
    results = evaluated(operator, operands, **attributes)
    use = signature(operator, operands, results, **attributes)
    for other in range(len(operands)):
        assert (OPERATORS[operator].index_range(use, other) is None) == (other != slot)
    bounds = OPERATORS[operator].index_range(use, slot)
    assert bounds is not None
    least, below = (np.broadcast_to(bound, operands[slot].shape) for bound in bounds)
    assert (operands[slot] >= least).all()
    assert (operands[slot] < below).all()
    # The reference implementations of these operators accept any index.
    if operator not in ("GatherElements", "OneHot"):
        beyond = [*operands]
        beyond[slot] = below
        with pytest.raises((IndexError, ValueError)):
            evaluated(operator, beyond, **attributes)


@pytest.mark.parametrize("operator", standard(operators_with(lambda row: row.mask)))
def test_masks_are_booleans_of_the_shape_of_their_operands(operator: str) -> None:
    floating = OPERATORS[operator].comparison or operator.startswith("Is")
    first, second = (TENSOR, OTHER) if floating else (TENSOR > 1, OTHER > 1)
    operands = [first] if operator in ("Not", "IsNaN", "IsInf") else [first, second]
    (result,) = evaluated(operator, operands)
    assert result.dtype == np.bool_
    assert result.shape == TENSOR.shape


def test_comparisons_are_masks() -> None:
    comparisons = operators_with(lambda row: row.comparison)
    assert comparisons < operators_with(lambda row: row.mask)


def with_neutral(operator: str, array: np.ndarray) -> np.ndarray:
    """Return the array with two columns of the operator's neutral element."""
    return np.concatenate([array, np.full((len(array), 2), OPERATORS[operator].neutral)], 1)


@pytest.mark.parametrize("operator", standard(operators_with(lambda row: row.neutral is not None)))
def test_neutral_elements_change_no_result(operator: str) -> None:
    columns = TENSOR.shape[1]
    more = with_neutral(operator, TENSOR)
    if operator in ("MatMul", "Gemm", "Einsum"):
        attributes = {"equation": "ij,jk->ik"} if operator == "Einsum" else {}
        (expected,) = evaluated(operator, [TENSOR, OTHER.T], **attributes)
        weight = np.concatenate([OTHER.T, OTHER.T[:2]])
        (found,) = evaluated(operator, [more, weight], **attributes)
    elif operator == "CumSum":
        (expected,) = evaluated(operator, [TENSOR, np.array(1)])
        (found,) = evaluated(operator, [more, np.array(1)])
        found = found[:, :columns]
    elif operator.startswith("Reduce"):
        (expected,) = evaluated(operator, [TENSOR, int64(1)])
        (found,) = evaluated(operator, [more, int64(1)])
        if operator == "ReduceMean":
            found = found * more.shape[1] / columns
    else:
        (expected,) = evaluated(operator, [TENSOR], axis=1)
        (found,) = evaluated(operator, [more], axis=1)
        if not operator.startswith("Arg"):
            found = found[:, :columns]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


FINITE_CASES = sorted(
    (name, slot, element)
    for name, row in OPERATORS.items()
    for slot, element in row.finite_at
    if "." not in name
)
INDEXING = operators_with(lambda row: row.loss) | {"Gather", "GatherElements", "GatherND"}


@pytest.mark.parametrize(("operator", "slot", "element"), FINITE_CASES)
def test_results_are_finite_around_the_stated_element(
    operator: str, slot: int, element: int
) -> None:
    if operator in INDEXING:
        shape = {"GatherElements": TENSOR.shape, "GatherND": (2, 1)}.get(operator, (2,))
        (result,) = evaluated(operator, [TENSOR, np.full(shape, element)])
        assert np.isfinite(result).all()
        return
    step = 1e-6
    steps = np.array([[-step, 0.0, step, 0.0]])
    operands = [np.full(TENSOR.shape, 1.5)] * (2 if operator in ("Div", "Mod", "Pow") else 1)
    operands[slot] = np.full(TENSOR.shape, float(element)) + steps
    attributes = {"fmod": 1} if operator == "Mod" else {}
    (result,) = evaluated(operator, operands, **attributes)
    assert np.isfinite(result).all()
    if OPERATORS[operator].kind == "elementwise" and operator != "Mod":
        assert (np.abs(result - result[:, 1:2]) < 100 * step).all()


REDUCTIONS = operators_with(lambda row: row.reads_axis and row.kind == "reduction")


@pytest.mark.parametrize("operator", standard(REDUCTIONS))
def test_results_of_reductions_depend_on_the_first_column(operator: str) -> None:
    tensor = TENSOR.copy()
    tensor[:, 0] = -100.0 if "Min" in operator else 100.0
    results = []
    for array in (TENSOR, tensor):
        if operator.startswith("Reduce"):
            (result,) = evaluated(operator, [array, int64(1)])
        elif operator.startswith("Cum"):
            (result,) = evaluated(operator, [array, np.array(1)])
        elif operator == "TopK":
            (result,) = evaluated(operator, [array, int64(1)], axis=1)[:1]
        else:
            (result,) = evaluated(operator, [array], axis=1)
        results.append(result[:, -1])
    assert (results[0] != results[1]).any()


@pytest.mark.parametrize("operator", standard(operators_with(lambda row: row.has_zero_gradient)))
def test_operators_with_zero_gradient_are_constant_between_steps(operator: str) -> None:
    tensor = TENSOR + 0.1
    np.testing.assert_array_equal(
        evaluated(operator, [tensor]), evaluated(operator, [tensor + 1e-6])
    )


@pytest.mark.parametrize("operator", standard(operators_with(lambda row: row.lookup)))
def test_lookups_select_rows(operator: str) -> None:
    (result,) = evaluated(operator, [TENSOR, int64(1, 0, 1)])
    np.testing.assert_array_equal(result, TENSOR[[1, 0, 1]])


@pytest.mark.parametrize("operator", standard(operators_with(lambda row: row.interpolation)))
def test_default_modes_are_those_of_onnx(operator: str) -> None:
    opset = 9 if operator == "Upsample" else OPSET  # The last opset that is not deprecated.
    default = get_schema(operator, opset).attributes["mode"].default_value
    assert default.s.decode() == OPERATORS[operator].interpolation


@pytest.mark.parametrize("operator", standard(operators_with(lambda row: row.adds)))
def test_sums_add_or_subtract_elements(operator: str) -> None:
    (result,) = evaluated(operator, [TENSOR, OTHER])
    sign = -1.0 if operator == "Sub" else 1.0
    np.testing.assert_allclose(result, TENSOR + sign * OTHER, rtol=1e-12)
    assert OPERATORS[operator].linear == "together"


@pytest.mark.parametrize("operator", standard(operators_with(lambda row: row.gates)))
def test_weights_of_recurrent_layers_have_rows_per_gate(operator: str) -> None:
    rows = OPERATORS[operator].gates * HIDDEN
    steps = TENSOR.astype(np.float32)[:, None]
    weight = np.full((1, rows, TENSOR.shape[1]), 0.5, np.float32)
    recurrence = np.full((1, rows, HIDDEN), 0.25, np.float32)
    (result,) = evaluated(operator, [steps, weight, recurrence], hidden_size=HIDDEN)
    assert result.shape == (len(TENSOR), 1, 1, HIDDEN)
    assert 1 not in OPERATORS[operator].scales_and_biases


@pytest.mark.parametrize("operator", standard(operators_with(lambda row: row.loss)))
def test_losses_read_labels_and_a_weight_per_class(operator: str) -> None:
    labels = np.array([3, 1])
    weights = np.array([0.0, 2.0, 0.0, 1.0])
    scores = np.log(TENSOR / TENSOR.sum(1, keepdims=True))
    (result,) = evaluated(operator, [scores, labels, weights], reduction="sum")
    np.testing.assert_allclose(result, -scores[0, 3] - 2.0 * scores[1, 1], rtol=1e-12)


@pytest.mark.parametrize("row", OPERATORS.values(), ids=lambda row: row.name)
def test_facts_do_not_contradict_one_another(row: Operator) -> None:
    assert set(row.scales_and_biases) <= set(row.layer_weights)
    assert bool(row.gates) <= (row.kind == "recurrent")
    assert row.linear in ("", "together", "each", "first")
    assert not (row.mask and row.differentiable)
    assert row.neutral is None or not math.isnan(row.neutral)
    assert set(row.sizes) <= set(row.static)
    assert row.loss or set(row.copied_weights) <= set(row.layer_weights)
