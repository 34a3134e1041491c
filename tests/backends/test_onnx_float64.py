"""ONNX Runtime in float64: the operators that it lacks there run in float32, and the others do
not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from autopipe.backends.onnxruntime import ReferenceModel
from autopipe.ir.errors import ModelError

SAMPLES = np.random.default_rng(0).standard_normal((2, 3, 6, 6)).astype(np.float32)


def saved(
    folder: Path,
    nodes: Sequence[onnx.NodeProto],
    constants: Mapping[str, np.ndarray],
    kind: int = TensorProto.FLOAT,
) -> Path:
    """Write a model of `nodes` that reads `x`, with the shape of `SAMPLES`, and gives `y`."""
    graph = helper.make_graph(
        list(nodes),
        "model",
        [helper.make_tensor_value_info("x", kind, SAMPLES.shape)],
        [helper.make_tensor_value_info("y", kind, None)],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), str(path))
    return path


def widened(model: Path, samples: np.ndarray = SAMPLES) -> tuple[np.ndarray, np.ndarray]:
    """Return `y` in the model's type, and in float64."""
    reference = ReferenceModel(model, {})
    narrow = reference.run({"x": samples})["y"]
    reference.widen()
    return narrow, reference.run({"x": samples})["y"]


def test_sums_are_those_of_float64(tmp_path: Path) -> None:
    """x + 1e6 - 1e6 keeps the digits of x in float64, and two of them in float32."""
    nodes = [
        helper.make_node("Add", ["x", "large"], ["sum"]),
        helper.make_node("Sub", ["sum", "large"], ["y"]),
    ]
    narrow, wide = widened(saved(tmp_path, nodes, {"large": np.array([1e6], np.float32)}))
    assert wide.dtype == np.float64
    assert np.abs(wide - SAMPLES).max() < 1e-9
    assert np.abs(narrow - SAMPLES).max() > 1e-3


KERNEL = np.random.default_rng(1).standard_normal((4, 3, 3, 3)).astype(np.float32)


@pytest.mark.parametrize(
    ("nodes", "constants"),
    [
        pytest.param(
            [helper.make_node("Conv", ["x", "kernel"], ["z"])], {"kernel": KERNEL}, id="no-kernel"
        ),
        pytest.param(
            [helper.make_node("Gelu", ["x"], ["z"], domain="com.microsoft")], {}, id="contributed"
        ),
        pytest.param([helper.make_node("Gelu", ["x"], ["z"])], {}, id="function"),
        pytest.param(
            [helper.make_node("Resize", ["x", "", "scales"], ["z"])],
            {"scales": np.array([1, 1, 2, 2], np.float32)},
            id="type-by-ONNX",
        ),
        pytest.param(
            [
                helper.make_node("Constant", [], ["one"], value_float=1.5),
                helper.make_node("Shape", ["x"], ["shape"]),
                helper.make_node("ConstantOfShape", ["shape"], ["zeros"]),
                helper.make_node("Cast", ["shape"], ["sizes"], to=TensorProto.FLOAT),
                helper.make_node("ReduceSum", ["sizes"], ["size"]),
                helper.make_node("Sum", ["x", "one", "zeros", "size"], ["z"]),
            ],
            {},
            id="sources",
        ),
        pytest.param(
            [
                helper.make_node("QuantizeLinear", ["x", "scale", "point"], ["bytes"]),
                helper.make_node("DequantizeLinear", ["bytes", "scale", "point"], ["z"]),
            ],
            {"scale": np.array(0.01, np.float32), "point": np.array(128, np.uint8)},
            id="quantized",
        ),
    ],
)
def test_operators_without_float64(
    tmp_path: Path, nodes: Sequence[onnx.NodeProto], constants: Mapping[str, np.ndarray]
) -> None:
    """The sum behind each operator is in float64."""
    behind = [
        helper.make_node("Add", ["z", "large"], ["sum"]),
        helper.make_node("Sub", ["sum", "large"], ["y"]),
    ]
    large = {"large": np.array([1e6], np.float32)}
    narrow, wide = widened(saved(tmp_path, [*nodes, *behind], {**constants, **large}))
    alone = [*nodes, helper.make_node("Identity", ["z"], ["y"])]
    expected = ReferenceModel(saved(tmp_path, alone, constants), {}).run({"x": SAMPLES})["y"]
    assert np.abs(wide - expected).max() < 1e-5 < np.abs(narrow - expected).max()


def test_a_model_in_float16(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["single"], to=TensorProto.FLOAT),
        helper.make_node("Exp", ["single"], ["power"]),
        helper.make_node("Cast", ["power"], ["half"], to=TensorProto.FLOAT16),
        helper.make_node("Mul", ["half", "third"], ["y"]),
    ]
    third = np.array(1 / 3, np.float16)
    samples = SAMPLES.astype(np.float16)
    narrow, wide = widened(saved(tmp_path, nodes, {"third": third}, TensorProto.FLOAT16), samples)
    expected = np.exp(samples.astype(np.float64)) * float(third)
    assert np.allclose(wide, expected, rtol=1e-12)
    assert not np.allclose(narrow, expected, rtol=1e-5)


def test_branches_are_rejected(tmp_path: Path) -> None:
    branch = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["negated"])],
        "branch",
        [],
        [helper.make_tensor_value_info("negated", TensorProto.FLOAT, None)],
    )
    nodes = [helper.make_node("If", ["condition"], ["y"], then_branch=branch, else_branch=branch)]
    reference = ReferenceModel(saved(tmp_path, nodes, {"condition": np.array(True)}), {})
    with pytest.raises(ModelError, match="functions or branches"):
        reference.widen()
