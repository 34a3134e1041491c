"""Operators on tensors without elements, such as a decoder's cache before the first token, as ONNX
Runtime has them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from autopipe.ir.errors import ModelError
from autopipe.passes.frontend import read_model
from tests.passes.frontend.building import floats, integers, model, node, saved
from tests.passes.frontend.evaluated import emitted
from tests.passes.frontend.reference import run

TURNED = node("Transpose", "p", "t", perm=[0, 2, 1])
Case = tuple[list[onnx.NodeProto], dict[str, np.ndarray]]
CASES: dict[str, Case] = {
    "Softmax": ([node("Softmax", "p", "y", axis=-1)], {}),
    "Softmax of nothing": ([node("Softmax", "p", "y", axis=1)], {}),
    "ReduceSum of nothing": ([node("ReduceSum", "p a", "y")], {"a": integers(1)}),
    "ReduceProd of nothing": ([node("ReduceProd", "p a", "y")], {"a": integers(1)}),
    "ReduceMax": ([node("ReduceMax", "p a", "y")], {"a": integers(2)}),
    "ReduceMean": ([node("ReduceMean", "p a", "y")], {"a": integers(2)}),
    "MatMul over nothing": ([TURNED, node("MatMul", "t p", "y")], {}),
    "LayerNormalization": (
        [node("LayerNormalization", "p s b", "y")],
        {"s": floats(6), "b": floats(6)},
    ),
    "Where": (
        [node("Greater", "p z", "c"), node("Where", "c p z", "y")],
        {"z": np.zeros((), np.float32)},
    ),
    "Pad": ([node("Pad", "p q", "y")], {"q": integers(0, 1, 0, 0, 2, 0)}),
    "Slice": (
        [node("Slice", "p s e a", "y")],
        {"s": integers(0), "e": integers(5), "a": integers(1)},
    ),
    "Gather": ([node("Gather", "p i", "y", axis=1)], {"i": np.zeros(0, np.int64)}),
    "CumSum": ([node("CumSum", "p a", "y")], {"a": np.array(1)}),
    "TopK": ([node("TopK", "p k", "y i", axis=1)], {"k": integers(0)}),
    "Tile": ([node("Tile", "p r", "y")], {"r": integers(1, 3, 1)}),
    "Reshape": ([node("Reshape", "p r", "y")], {"r": integers(0, 0, 2, 3)}),
    "Flatten": ([node("Flatten", "p", "y", axis=2)], {}),
    "Split": ([node("Split", "p r", "y w", axis=2)], {"r": integers(2, 4)}),
    "ArgMax": ([node("ArgMax", "p", "y", axis=2)], {}),
    "Gemm": ([node("Flatten", "p", "f", axis=2), node("Gemm", "f w", "y")], {"w": floats(6, 3)}),
    "Conv of pads": (
        [TURNED, node("Pad", "t q", "u"), node("Conv", "u w", "y", kernel_shape=[2])],
        {"q": integers(0, 0, 2, 0, 0, 2), "w": floats(4, 6, 2)},
    ),
    "attention": (
        [
            node("Concat", "p x", "k", axis=1),
            node("Transpose", "k", "kt", perm=[0, 2, 1]),
            node("MatMul", "x kt", "s"),
            node("Softmax", "s", "a", axis=-1),
            node("MatMul", "a k", "y"),
        ],
        {},
    ),
    "Einsum over nothing": ([node("Einsum", "p p", "y", equation="bpd,bpe->bde")], {}),
}


def _path(folder: Path, case: Case) -> Path:
    nodes, held = case
    return saved(model(nodes, {"p": ["N", "P", 6], "x": ["N", 3, 6]}, "y", held), folder)


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_onnxruntime(tmp_path: Path, name: str) -> None:
    path = _path(tmp_path, CASES[name])
    feeds = {"p": floats(2, 0, 6), "x": floats(2, 3, 6)}
    found = emitted(read_model(path, dims={"P": 0}, batch=2), feeds)["y"]
    expected = run(path, feeds)["y"]
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("operator", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_a_recurrent_layer_needs_a_step(tmp_path: Path, operator: str, gates: int) -> None:
    nodes = [
        node("Transpose", "p", "t", perm=[1, 0, 2]),
        node(operator, "t w r", "y", hidden_size=3),
    ]
    path = _path(tmp_path, (nodes, {"w": floats(1, 3 * gates, 6), "r": floats(1, 3 * gates, 3)}))
    with pytest.raises(ModelError, match=f"{operator} reads a sequence of length 0"):
        read_model(path, dims={"P": 0}, batch=2)


@pytest.mark.parametrize("operands", ["none x", "x none", "none x none"])
def test_what_adds_nothing_is_not_concatenated(operands: str, tmp_path: Path) -> None:
    """The result is the samples themselves, so that micro-batches give it."""
    nodes = [node("Concat", operands, "c", axis=0), node("Relu", "c", "y")]
    read = read_model(
        saved(model(nodes, {"x": [2, 6]}, "y", {"none": np.zeros((0, 6), np.float32)}), tmp_path)
    )
    assert [each.op for each in read.graph.nodes] == ["Relu"]


def test_an_axis_without_elements_counts_if_another_one_is_concatenated(tmp_path: Path) -> None:
    """Tensors of 2×0 and 3×0 elements are one of 5×0."""
    nodes = [
        node("Concat", "first second", "c", axis=0),
        node("MatMul", "c w", "p"),
        node("Add", "p x", "y"),
    ]
    held = {"first": floats(2, 0), "second": floats(3, 0), "w": floats(0, 4)}
    path = saved(model(nodes, {"x": [5, 4]}, "y", held), tmp_path)
    x = floats(5, 4)
    np.testing.assert_array_equal(
        emitted(read_model(path, batch_axes={"x": None}), {"x": x})["y"], x
    )
