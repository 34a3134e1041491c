"""Fusion of a matrix product with the cross-entropy of its result: which graphs are fused, and that
both forms agree.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from autopipe.backends.torch.codegen import normalization
from autopipe.passes.frontend import CrossEntropy, Model, read_model
from tests.passes.frontend.building import FLOAT, INT64, Shape, floats, integers, model, node, saved
from tests.passes.frontend.fusion.test_programs import trained
from tests.passes.frontend.reference import assert_close, random_feeds

HIDDEN = 6
CLASSES = 12
HELD = {
    "w": floats(HIDDEN, CLASSES), "table": floats(CLASSES, HIDDEN), "b": floats(CLASSES), "flat": integers(-1),
    "rows": integers(-1, CLASSES), "cap": np.float32(3), "one": integers(1), "end": integers(99), "last": integers(-1),
    "first": integers(-99),
}  # fmt: skip
TOKENS: dict[str, Shape | tuple[int, Shape]] = {
    "x": (FLOAT, [2, 5, HIDDEN]),
    "labels": (INT64, [2, 5]),
}
ROWS: dict[str, Shape | tuple[int, Shape]] = {"x": (FLOAT, [4, HIDDEN]), "labels": (INT64, [4])}
IN_ROWS = [node("Reshape", "z rows", "s"), node("Reshape", "labels flat", "t")]
LOSS = node("SoftmaxCrossEntropyLoss", "s t", "y", ignore_index=3)

CASES: dict[str, tuple[list[onnx.NodeProto], dict[str, Shape | tuple[int, Shape]], list[str]]] = {
    "tied embeddings": (
        [node("Transpose", "table", "w2", perm=[1, 0]), node("MatMul", "x w2", "z"), *IN_ROWS, LOSS], TOKENS,
        ["Transpose", "LinearCrossEntropy"],
    ),
    "a softcap and shifted tokens": (
        [
            node("MatMul", "x w", "a"), node("Div", "a cap", "c"), node("Tanh", "c", "d"), node("Mul", "d cap", "f"),
            node("Slice", "f one end one", "z"), node("Slice", "labels one end one", "l"),
            node("Reshape", "z rows", "s"), node("Reshape", "l flat", "t"), LOSS,
        ], TOKENS, ["Slice", "Slice", "LinearCrossEntropy"],
    ),
    "a bias, and a loss for each label": (
        [
            node("MatMul", "x w", "a"), node("Add", "b a", "z"), *IN_ROWS,
            node("SoftmaxCrossEntropyLoss", "s t", "y", reduction="none"),
        ], TOKENS, ["Reshape", "Reshape", "LinearCrossEntropy"],
    ),
    "weighted classes in axis 1": (
        [
            node("Constant", "", "weights", value_floats=[1.0, 2.0, 3.0] * 4),
            node("MatMul", "x w", "z"), node("Transpose", "z", "s", perm=[0, 2, 1]),
            node("SoftmaxCrossEntropyLoss", "s labels weights", "y"),
        ], TOKENS, ["LinearCrossEntropy"],
    ),
    "the logarithm and the likelihood apart": (
        [
            node("Gemm", "x table b", "s", transB=1), node("LogSoftmax", "s", "p", axis=1),
            node("NegativeLogLikelihoodLoss", "p labels", "y", reduction="sum"),
        ], ROWS, ["LinearCrossEntropy"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_fused_and_unfused_losses_agree(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, inputs, expected = CASES[case]
    monkeypatch.setattr(normalization, "MAX_CLASSES_PER_BLOCK", 5)
    plain, fused = both(nodes, inputs, tmp_path)
    assert [each.op for each in fused.graph.nodes] == expected
    assert fused.fused == {"LinearCrossEntropy": 1}
    feeds = random_feeds(fused.graph, top=CLASSES)
    assert_close(trained(fused, feeds), trained(plain, feeds))


def both(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, Shape | tuple[int, Shape]],
    folder: Path,
    outputs: str = "y",
) -> tuple[Model, Model]:
    """Return the model with logits that are saved, and with logits that are recomputed."""
    read = {name for each in nodes for name in each.input}
    path = saved(
        model(nodes, inputs, outputs, {name: each for name, each in HELD.items() if name in read}),
        folder,
    )
    plain = read_model(path)
    assert "LinearCrossEntropy" not in plain.fused
    return plain, read_model(path, scores="recompute")


@pytest.mark.parametrize(
    ("between", "after"),
    [
        (
            [node("Identity", "z", "s")],
            [node("ReduceMax", "z", "a", keepdims=0), node("Add", "l a", "y")],
        ),
        ([node("Slice", "z last first one last", "s")], [node("Identity", "l", "y")]),
        ([node("Transpose", "z", "s", perm=[1, 0])], [node("Identity", "l", "y")]),
    ],
    ids=["read by others", "classes in another order", "classes of samples"],
)
def test_other_logits_are_not_fused(
    between: list[onnx.NodeProto], after: list[onnx.NodeProto], tmp_path: Path
) -> None:
    square: dict[str, Shape | tuple[int, Shape]] = {
        "x": (FLOAT, [CLASSES, HIDDEN]),
        "labels": (INT64, [CLASSES]),
    }
    nodes = [
        node("MatMul", "x w", "z"),
        *between,
        node("SoftmaxCrossEntropyLoss", "s labels", "l"),
        *after,
    ]
    plain, fused = both(nodes, square, tmp_path)
    assert fused.graph == plain.graph


def test_an_output_that_training_does_not_need_is_not_saved(tmp_path: Path) -> None:
    path = saved(
        model([node("MatMul", "x w", "logits")], {"x": [2, 5, HIDDEN]}, "logits", {"w": HELD["w"]}),
        tmp_path,
    )
    loss = CrossEntropy("logits", ignored=-100)
    read = read_model(path, loss=loss, normalize="tokens", scores="recompute")
    last = {name: node for node in read.graph.nodes for name in node.outputs}[read.loss]
    assert (last.op, last.inputs) == ("LinearCrossEntropy", ("x", "labels", "", "w"))
    assert read.graph.outputs[0] == "logits", "which inference gives"
