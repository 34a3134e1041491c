"""A model exported in training mode, read for training and for inference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from autopipe.backends.onnxruntime import ReferenceModel
from autopipe.ir.problem import Mode
from autopipe.passes.frontend import read_model
from autopipe.passes.frontend.load import load
from autopipe.passes.weight_files import are_same_model


def save(path: Path, nodes: list[onnx.NodeProto], outputs: list[str]) -> Path:
    held = [
        helper.make_tensor("ratio", TensorProto.FLOAT, [], [0.5]),
        helper.make_tensor("yes", TensorProto.BOOL, [], [True]),
        *(
            numpy_helper.from_array(np.full(3, value, np.float32), f"bn{value}")
            for value in (1, 2, 3, 4)
        ),
    ]
    shape = [2, 3, 4]
    graph = helper.make_graph(
        nodes,
        "model",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(name, kind, None) for name, kind in _typed(outputs)],
        held,
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        str(path),
    )
    return path


def _typed(outputs: list[str]) -> list[tuple[str, int]]:
    return [(name, TensorProto.BOOL if name == "mask" else TensorProto.FLOAT) for name in outputs]


def dropout(source: str, *results: str) -> onnx.NodeProto:
    return helper.make_node("Dropout", [source, "ratio", "yes"], results, f"drop {source}")


def operators(path: Path, mode: Mode) -> list[str]:
    return [node.op for node in read_model(path, mode=mode).graph.nodes]


def test_dropout_goes_at_inference(tmp_path: Path) -> None:
    nodes = [
        dropout("x", "a"),
        dropout("a", "b"),
        helper.make_node("Relu", ["b"], ["c"]),
        dropout("c", "y"),
    ]
    path = save(tmp_path / "m.onnx", nodes, ["y"])
    assert operators(path, Mode.TRAIN) == ["Dropout", "Dropout", "Relu", "Dropout"]
    assert operators(path, Mode.INFER) == ["Relu"]
    assert read_model(path, mode=Mode.INFER).graph.outputs == ("y",)


def test_a_mask_that_is_read_is_of_ones(tmp_path: Path) -> None:
    path = save(tmp_path / "m.onnx", [dropout("x", "y", "mask")], ["y", "mask"])
    (node,) = read_model(path, mode=Mode.INFER).graph.nodes
    assert node.op == "Dropout" and len(node.inputs) == 2
    reference = ReferenceModel(path, {})
    data = np.ones((2, 3, 4), np.float32)
    found = reference.run({"x": data})
    assert reference.dropouts == 1 and found["mask"].all()
    np.testing.assert_array_equal(found["y"], data)


def test_batches_are_normalised_by_running_statistics_at_inference(tmp_path: Path) -> None:
    operands = ["x", "bn1", "bn2", "bn3", "bn4"]
    results = ["y", "mean", "variance"]
    node = helper.make_node("BatchNormalization", operands, results, "bn", training_mode=1)
    path = save(tmp_path / "m.onnx", [node], ["y"])
    (found,) = read_model(path, mode=Mode.INFER).graph.nodes
    assert (found.outputs, found.attributes) == (("y",), ())
    (found,) = read_model(path, mode=Mode.TRAIN).graph.nodes
    assert len(found.outputs) > 1
    data = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    (result,) = ReferenceModel(path, {}, train=False).run({"x": data}).values()
    np.testing.assert_allclose(result, (data - 3) / np.sqrt(4 + 1e-5) + 2, rtol=1e-5)


def test_a_graph_that_gives_the_new_statistics_keeps_them(tmp_path: Path) -> None:
    operands = ["x", "bn1", "bn2", "bn3", "bn4"]
    node = helper.make_node(
        "BatchNormalization", operands, ["y", "mean", "variance"], "bn", training_mode=1
    )
    path = save(tmp_path / "m.onnx", [node], ["y", "mean"])
    graph = read_model(path, mode=Mode.INFER).graph
    assert [node.op for node in graph.nodes] == ["BatchNormalization"]
    assert graph.nodes[0].outputs[:2] == ("y", "mean")
    assert graph.outputs == ("y", "mean")


def test_random_operators_are_neither_computed_nor_merged(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("RandomNormalLike", ["bn1"], ["a"], "first"),
        helper.make_node("RandomNormalLike", ["bn1"], ["b"], "second"),
        helper.make_node("Dropout", ["bn2", "ratio", "yes"], ["c"], "third"),
        helper.make_node("Sum", ["a", "b", "c"], ["y"], "sum"),
    ]
    path = save(tmp_path / "m.onnx", nodes, ["y"])
    assert operators(path, Mode.TRAIN) == ["RandomNormalLike", "RandomNormalLike", "Dropout", "Sum"]
    assert ReferenceModel(path, {}).random == ("RandomNormalLike",)


def batch_norm(source: str, *results: str, training: bool) -> onnx.NodeProto:
    mode = {"training_mode": 1} if training else {}
    return helper.make_node(
        "BatchNormalization", [source, "bn1", "bn2", "bn3", "bn4"], results, "bn", **mode
    )


def test_a_model_is_trained_as_at_evaluation_where_that_is_asked_for(tmp_path: Path) -> None:
    nodes = [dropout("x", "a"), batch_norm("a", "b", "mean", "variance", training=True)]
    nodes.append(helper.make_node("ReduceMean", ["b"], ["y"], "mean", keepdims=0))
    path = save(tmp_path / "m.onnx", nodes, ["y"])
    asked = read_model(path, loss="y", training=False).graph
    assert [node.op for node in asked.nodes] == ["BatchNormalization", "ReduceMean"]
    assert asked.nodes[0].attributes == ()
    assert asked.nodes == read_model(path, mode=Mode.INFER).graph.nodes
    assert operators(path, Mode.TRAIN)[0] == "Dropout"
    assert read_model(path, mode=Mode.INFER, training=True).graph.nodes[0].op == "Dropout"


def test_an_export_for_evaluation_is_the_same_model(tmp_path: Path) -> None:
    relu = [helper.make_node("Relu", [name], ["y"]) for name in ("b", "bn")]
    nodes = [dropout("x", "a"), batch_norm("a", "b", "mean", "variance", training=True), relu[0]]
    one = load(save(tmp_path / "train.onnx", nodes, ["y"]))
    evaluated = save(
        tmp_path / "eval.onnx", [batch_norm("x", "bn", training=False), relu[1]], ["y"]
    )
    model = onnx.load(str(evaluated))
    del model.graph.initializer[:2]  # An export for evaluation has neither the ratio nor the mode.
    onnx.save(model, str(evaluated))
    assert are_same_model(one, load(evaluated)) and are_same_model(load(evaluated), one)
    for other in (
        [batch_norm("x", "bn", training=False), helper.make_node("Tanh", ["bn"], ["y"])],
        [batch_norm("x", "bn", training=False), relu[1], helper.make_node("Relu", ["y"], ["z"])],
        [helper.make_node("Relu", ["x"], ["a"]), batch_norm("a", "y", training=False)],
        [
            helper.make_node("BatchNormalization", ["x", "bn2", "bn1", "bn3", "bn4"], ["bn"]),
            relu[1],
        ],
    ):
        outputs = ["z" if other[-1].output[0] == "z" else "y"]
        assert not are_same_model(one, load(save(tmp_path / "other.onnx", other, outputs)))
