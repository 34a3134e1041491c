"""Operands that tell settings or shapes and that are no constants: rejected by name, or computed
while running.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.runner import Runner

from autopipe.ir.errors import ModelError
from autopipe.ir.ops import OPERATORS
from autopipe.passes.frontend.read import read_model
from tests.conformance.cases import all_cases, data_of, model_of, tolerances
from tests.conformance.frontend_cases import READ
from tests.passes.frontend.building import INT64, floats, integers, model, node, saved
from tests.passes.frontend.evaluated import emitted

UNTESTED = {("DFT", 1)}
"""Operators and operands for which ONNX ships no case."""


def _cases() -> dict[tuple[str, int], list[TestCase]]:
    """The cases of one node by operator and place of each static operand that they have."""
    found: dict[tuple[str, int], list[TestCase]] = {}
    for kind, name in READ:
        case = all_cases()[kind, name]
        nodes = model_of(case).graph.node if kind == "node" else []
        if len(nodes) == 1 and nodes[0].op_type in OPERATORS:
            for place in OPERATORS[nodes[0].op_type].static:
                if place < len(nodes[0].input) and nodes[0].input[place]:
                    found.setdefault((nodes[0].op_type, place), []).append(case)
    return found


CASES = _cases()


def _with_input(
    case: TestCase, place: int, path: Path
) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Write the case with its static operands as constants, but for that at `place`, and with
    stated result types.

    Return what is to be fed, and the expected results.
    """
    arrays, expected = next(data_of(case))
    proto = onnx.ModelProto()
    proto.CopyFrom(model_of(case))
    (only,) = proto.graph.node
    given = dict(zip((info.name for info in proto.graph.input), arrays, strict=True))
    held = [
        only.input[other] for other in OPERATORS[only.op_type].static if other < len(only.input)
    ]
    for name in {name for name in held if name in given and name != only.input[place]}:
        proto.graph.initializer.append(numpy_helper.from_array(np.asarray(given.pop(name)), name))
    kept = [info for info in proto.graph.input if info.name in given]
    del proto.graph.input[:]
    proto.graph.input.extend(kept)
    for info, array in zip(proto.graph.output, expected, strict=True):
        info.CopyFrom(
            helper.make_tensor_value_info(
                info.name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape
            )
        )
    onnx.save(proto, path)
    return given, expected


def test_every_static_operand_has_a_case() -> None:
    static = {(row.name, place) for row in OPERATORS.values() for place in row.static}
    assert static - CASES.keys() == UNTESTED


@pytest.mark.parametrize(("operator", "place"), sorted(CASES))
def test_a_setting_that_is_an_input(operator: str, place: int, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    for case in CASES[operator, place]:
        given, expected = _with_input(case, place, path)
        axes = dict.fromkeys(given)
        if place in OPERATORS[operator].computable:
            rtol, atol = tolerances().get(case.name, (case.rtol, case.atol))
            results = [*emitted(read_model(path, batch_axes=axes), given).values()]
            Runner.assert_similar_outputs(expected, results, rtol=rtol, atol=atol)
            continue
        with pytest.raises(
            ModelError,
            match=r"operand '\w+' must be a constant, but '\w+' is an input",
        ):
            read_model(path, batch_axes=axes)


def test_a_shape_made_of_an_input_is_rejected_though_the_file_states_the_result(
    tmp_path: Path,
) -> None:
    proto = model(
        [node("Concat", "rows columns", "shape", axis=0), node("Reshape", "x shape", "y")],
        {"x": [2, 6], "rows": (INT64, [1])},
        "y",
        {"columns": integers(4)},
        types={"y": [3, 4]},
    )
    with pytest.raises(
        ModelError,
        match="operand 'shape' must be a constant, but 'shape' is computed",
    ):
        read_model(saved(proto, tmp_path))


@pytest.mark.parametrize(
    ("operator", "operands", "attributes", "held"),
    [
        ("Resize", "x roi _ sizes", {"mode": "nearest"}, {"sizes": integers(2, 12)}),
        ("Pad", "x pads value", {"mode": "edge"}, {"pads": integers(0, 1, 0, 1)}),
    ],
)
def test_an_operand_that_the_mode_does_not_read_may_be_an_input(
    tmp_path: Path,
    operator: str,
    operands: str,
    attributes: dict[str, str],
    held: dict[str, np.ndarray],
) -> None:
    name = "roi" if operator == "Resize" else "value"
    shape = [4] if operator == "Resize" else []
    proto = model(
        [node(operator, operands, "y", **attributes)], {"x": [2, 6], name: shape}, "y", held
    )
    read = read_model(saved(proto, tmp_path), batch_axes={"x": None, name: None})
    x = floats(2, 6)
    result = emitted(read, {"x": x, name: floats(*shape)})["y"]
    expected = (
        np.repeat(x, 2, axis=1)
        if operator == "Resize"
        else np.pad(x, ((0, 0), (1, 1)), mode="edge")
    )
    np.testing.assert_array_equal(result, expected)
