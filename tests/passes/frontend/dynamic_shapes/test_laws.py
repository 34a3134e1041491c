"""The facts that each law of the abstract domain records, and the values that it leaves static."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import DType, Value
from autopipe.passes.frontend.dynamic_shapes.domain import (
    CountedNumbers,
    Fact,
    Indices,
    SelectedRows,
    Selection,
)
from autopipe.passes.frontend.dynamic_shapes.laws import OPERATOR_CLASSES
from tests.passes.frontend.building import FLOAT, floats, integers, node
from tests.passes.frontend.dynamic_shapes.interpreting import facts_of

INPUTS = {
    "x": Value("x", DType.FLOAT32, (6, 4)),
    "keep": Value("keep", DType.BOOL, (6,)),
    "other": Value("other", DType.BOOL, (6,)),
    "grid": Value("grid", DType.BOOL, (6, 3)),
    "limit": Value("limit", DType.INT64, ()),
}
HELD = {
    "zero": np.array(0), "one": np.array(1), "two": np.array(2), "axis0": integers(0), "axis1": integers(1),
    "end2": integers(2), "last": integers(-1), "pairs": integers(-1, 2), "table": floats(5, 4), "wide": floats(6, 3, 4),
    "weight": floats(4, 4), "kernel": floats(2, 4, 3),
}  # fmt: skip
KEPT = node("Compress", "x keep", "kept", axis=0)
FOUND = [node("NonZero", "grid", "found"), node("Transpose", "found", "places", perm=[1, 0])]
COUNT = [KEPT, node("Shape", "kept", "shape"), node("Gather", "shape axis0", "count")]
FIRST = [
    node("Range", "zero limit one", "range"),
    node("Cast", "range", "f", to=FLOAT),
    node("Unsqueeze", "f axis0", "row"),
    node("Unsqueeze", "row axis0", "steps"),
]


def fact(*nodes: onnx.NodeProto, name: str = "y") -> Fact | None:
    """Return the fact of a value of a small graph; None if the value is static."""
    read = {operand for each in nodes for operand in each.input}
    inputs = {key: each for key, each in INPUTS.items() if key in read}
    held = {key: each for key, each in HELD.items() if key in read}
    facts, types = facts_of(nodes, inputs, held, {"range": 12})
    assert (name in facts) != (name in types)
    return facts.get(name)


def rows(*nodes: onnx.NodeProto) -> SelectedRows:
    found = fact(*nodes)
    assert isinstance(found, SelectedRows)
    return found


def indices(*nodes: onnx.NodeProto) -> Indices:
    found = fact(*nodes)
    assert isinstance(found, Indices)
    return found


def elements(*nodes: onnx.NodeProto) -> list[tuple[float, ...]]:
    found = fact(*nodes)
    assert isinstance(found, CountedNumbers)
    return found.numbers.elements()


def test_an_operator_belongs_to_one_class() -> None:
    counts = Counter(operator for each in OPERATOR_CLASSES for operator in each.operators)
    assert [operator for operator, count in counts.items() if count > 1] == []


def test_nonzero_has_the_coordinates() -> None:
    found = indices(node("NonZero", "grid", "y"))
    assert found.row_type.shape == (2, 1)
    assert found.axis == 1
    assert [term.reshape(-1).tolist() for term in found.terms] == [[0, 0], [1, 0], [0, 1], [0, 0]]
    assert found.selection.shape == (6, 3)


def test_nonzero_of_an_expanded_mask_is_broadcast() -> None:
    held = node("Expand", "column target", "m")
    nodes = [node("Unsqueeze", "keep axis1", "column"), held, node("NonZero", "m", "y")]
    facts, _ = facts_of(
        nodes, {"keep": INPUTS["keep"]}, {"axis1": integers(1), "target": integers(6, 4)}
    )
    found = facts["y"]
    assert found.selection.mask_shape == (6, 1)
    assert found.selection.shape == (6, 4)


def test_compress_selects_slices() -> None:
    found = rows(node("Compress", "x keep", "y", axis=0))
    assert (found.row_type.shape, found.shape, found.over) == ((1, 4), (6, 4), (0,))


def test_linear_operators_move_indices() -> None:
    found = indices(
        *FOUND,
        node("Gather", "places one", "c", axis=1),
        node("Mul", "c two", "d"),
        node("Add", "d one", "y"),
    )
    assert [term.item() for term in found.terms] == [1, 0, 2, 0]


def test_a_product_of_indices_is_rows() -> None:
    assert rows(node("NonZero", "grid", "n"), node("Mul", "n n", "y")).row_type.shape == (2, 1)


def test_a_size_is_counted() -> None:
    assert elements(KEPT, node("Shape", "kept", "y")) == [(0, 1), (4, 0)]
    assert elements(KEPT, node("Size", "kept", "y")) == [(0, 4)]
    assert elements(*COUNT, node("Mul", "count two", "y")) == [(0, 2)]


def test_a_size_that_cancels_out_is_static() -> None:
    assert fact(*COUNT, node("Sub", "count count", "y")) is None


def test_a_size_that_is_no_polynomial_is_computed_while_running() -> None:
    assert fact(*COUNT, node("Div", "count two", "y")) is None


def test_a_count_added_to_indices_is_computed_while_running() -> None:
    found = rows(node("NonZero", "keep", "n"), node("Shape", "n", "s"),
                 node("Gather", "s one", "c"), node("Add", "n c", "y"))  # fmt: skip
    assert found.row_type.shape == (1, 1)


def test_range_to_the_count_numbers_the_rows() -> None:
    found = indices(*COUNT, node("Squeeze", "count axis0", "n"), node("Range", "zero n one", "y"))
    assert [term.item() for term in found.terms] == [0, 0, 1]


def test_rows_are_computed_one_by_one() -> None:
    found = rows(KEPT, node("MatMul", "kept weight", "h"), node("Relu", "h", "y"))
    assert (found.axis, found.over, found.row_type.shape) == (0, (0,), (1, 4))


def test_a_gather_of_all_coordinates_keeps_their_axes() -> None:
    gather = [*FOUND, node("GatherND", "wide places", "y")]
    assert rows(*gather).over == (0, 1)
    token = [*FOUND, node("Gather", "places zero", "token", axis=1), node("Gather", "x token", "y")]
    assert rows(*token).over == (0,)


def test_a_gather_by_rank_is_static() -> None:
    assert fact(KEPT, node("Gather", "kept end2", "y")) is None


def test_reductions_are_static() -> None:
    assert fact(KEPT, node("ReduceSum", "kept axis0", "y")) is None
    assert fact(KEPT, node("ReduceMean", "kept axis0", "y")) is None
    assert fact(KEPT, node("ArgMax", "kept", "y", axis=0)) is None


def test_running_sums_and_softmax_have_a_row_per_row() -> None:
    assert rows(KEPT, node("CumSum", "kept zero", "y")).axis == 0
    assert rows(KEPT, node("Softmax", "kept", "y", axis=0)).axis == 0


def test_topk_of_a_known_number_is_static() -> None:
    nodes = [KEPT, node("TopK", "kept end2", "y i", axis=0)]
    assert fact(*nodes) is None


def test_topk_of_all_keeps_the_selection() -> None:
    found = rows(*COUNT, node("TopK", "kept count", "y i", axis=0))
    assert found.selection.mask == "keep"


def test_scatters_are_static() -> None:
    assert (
        fact(*FOUND, node("GatherND", "wide places", "u"), node("ScatterND", "wide places u", "y"))
        is None
    )


def test_joined_rows_have_a_selection_of_their_own() -> None:
    found = rows(KEPT, node("Concat", "kept table", "y", axis=0))
    assert found.selection.shape == (11,)
    again = rows(KEPT, node("Concat", "table kept kept", "y", axis=0))
    assert again.selection.shape == (17,)


def test_flattened_rows_broadcast_the_mask() -> None:
    found = rows(KEPT, node("Reshape", "kept pairs", "y"))
    assert found.row_type.shape == (1, 2)
    assert (found.selection.mask_shape, found.selection.shape) == ((6, 1), (6, 2))


def test_a_slice_restricts_the_selection() -> None:
    first = rows(KEPT, node("Slice", "kept axis0 end2 axis0", "y"))
    assert first.selection.first_rows is not None
    rest = rows(KEPT, node("Slice", "kept axis1 last axis0", "y"))
    assert rest.selection.first_rows is None
    assert rest.selection.key != rows(KEPT, node("Relu", "kept", "y")).selection.key


def test_windows_over_first_rows_have_their_own_number() -> None:
    prefix = node("Expand", "steps four", "rows")
    held = {**HELD, "four": integers(1, 4, 1)}
    nodes = [*FIRST, prefix, node("Conv", "rows kernel", "y")]
    read = {operand for each in nodes for operand in each.input}
    facts, _ = facts_of(
        nodes,
        {"limit": INPUTS["limit"]},
        {name: each for name, each in held.items() if name in read},
        {"range": 12},
    )
    found = facts["y"]
    assert found.selection.first_rows is not None
    assert (found.selection.first_rows.scale, found.selection.first_rows.offset) == (1, -2)
    assert found.selection.shape == (10,)


def test_rows_of_two_selections_do_not_meet() -> None:
    nodes = [KEPT, node("Compress", "x other", "b", axis=0), node("Add", "kept b", "y")]
    with pytest.raises(ModelError, match="combines rows that Compress"):
        fact(*nodes)


@pytest.mark.parametrize("operator", ["Hardmax", "ReduceLogSumExp"])
def test_an_operator_without_neutral_element_is_rejected(operator: str) -> None:
    nodes = [KEPT, node(operator, "kept", "y", **({"axis": 0} if operator == "Hardmax" else {}))]
    if operator == "Hardmax":
        with pytest.raises(ModelError, match="shape of the result is unknown"):
            fact(*nodes)
    else:
        assert fact(*nodes) is None


def test_the_key_of_a_selection_ignores_dimensions() -> None:
    flat = Selection("m", (12,), (12,), "NonZero")
    wide = Selection("m2", (3, 4), (3, 4), "NonZero", root="m")
    assert flat.key == wide.key
    assert Selection("m", (12, 1), (12, 5), "NonZero").key != flat.key
