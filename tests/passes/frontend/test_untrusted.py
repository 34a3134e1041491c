"""Hostile, broken and unsupported files are refused in one clear line, or survived; none is a
traceback.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
import onnx
import onnx.helper as oh
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopipe.ir.errors import ConfigurationError, ModelError
from autopipe.passes.frontend import read_model
from autopipe.passes.frontend.model import unsupported_reason
from tests.passes.frontend.building import (
    floats,
    integers,
    linear,
    linear_beside,
    model,
    node,
    saved,
)
from tests.passes.frontend.reference import assert_close, random_feeds, run, run_read


def refused(path: Path, words: str) -> ModelError:
    with pytest.raises(ModelError, match=words) as caught:
        read_model(path)
    assert str(path) in caught.value.where and "\n" not in str(caught.value)
    assert caught.value.exit_code == 3
    return caught.value


def test_what_is_no_model(tmp_path: Path) -> None:
    refused(tmp_path / "absent.onnx", "does not exist")
    refused(tmp_path, "not a file")
    (tmp_path / "model.onnx").write_bytes(b"")
    assert "'model.onnx'" in refused(tmp_path, "not a file").hint
    for name, content, words in (
        ("empty.onnx", b"", "empty"),
        ("text.onnx", b"hello, this is no model at all", "not an ONNX"),
        ("zeros.onnx", bytes(64), "not an ONNX"),
        (
            "nothing.onnx",
            onnx.ModelProto(ir_version=10).SerializeToString(),
            "its graph is missing or empty",
        ),
        ("cut.onnx", linear().SerializeToString()[:-9], "not an ONNX"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        refused(path, words)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 255)), min_size=1, max_size=8))
def test_broken_bytes_are_refused_or_read(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    nodes = [
        node("Reshape", "x shape", "a", allowzero=1), node("Gemm", "a w b", "c", transB=1),
        oh.make_node("Constant", [], ["two"], value=onnx.numpy_helper.from_array(floats(1))), node("Shape", "c", "s"),
        node("ConstantOfShape", "s", "zeros"), node("Add", "c zeros", "d"), node("Mul", "d two", "e"),
        node("Cast", "e", "f", to=1), node("Identity", "f", "g"), node("Transpose", "g", "y", perm=[1, 0]),
    ]  # fmt: skip
    held = {"shape": integers(2, 3), "w": floats(4, 3), "b": floats(4)}
    content = bytearray(model(nodes, {"x": ["batch", 3]}, "y", held).SerializeToString())
    for place, byte in changes:
        content[place % len(content)] = byte
    path = tmp_path / "broken.onnx"
    path.write_bytes(bytes(content))
    with contextlib.suppress(ModelError, ConfigurationError):  # a symbol may have got another name
        read_model(path, with_unsupported=True)


@pytest.mark.parametrize("opset", [1, 6, 999])
def test_opsets_that_are_unknown(opset: int, tmp_path: Path) -> None:
    refused(saved(linear(opset=opset), tmp_path), f"the model uses opset {opset}, expected")


def test_unknown_operators_are_listed_with_their_numbers(tmp_path: Path) -> None:
    nodes = [
        oh.make_node("Frobnicate", ["x"], ["a"], domain="org.example"),
        oh.make_node("Frobnicate", ["a"], ["b"], domain="org.example"),
        oh.make_node("Sofmax", ["b"], ["y"]),
    ]
    error = refused(
        saved(model(nodes, {"x": [2]}, "y", domains=["org.example"]), tmp_path), "not supported"
    )
    assert "org.example.Frobnicate (2)" in error.message and "Sofmax (1)" in error.message
    assert "did you mean 'Softmax'?" in error.hint and "org.example" in error.hint


@pytest.mark.parametrize(
    ("operator", "reason"),
    [
        ("ai.onnx.ml.TreeEnsembleClassifier", "classical machine learning"),
        ("com.microsoft.SoftmaxCrossEntropyLossGrad", "training within the model"),
        ("ai.onnx.preview.training.Adam", "an optimizer within the model"),
        ("StringSplit", "text"),
        ("Sigmid", "did you mean 'Sigmoid'?"),
    ],
)
def test_hints_come_from_what_an_operator_is(operator: str, reason: str) -> None:
    assert reason in unsupported_reason(operator)


def test_strings(tmp_path: Path) -> None:
    text = model([node("Identity", "x", "y")], {"x": (onnx.TensorProto.STRING, [2])}, "y")
    refused(saved(text, tmp_path), "element type STRING is not supported")


def test_structure(tmp_path: Path) -> None:
    cycle = model([node("Add", "x b", "a"), node("Neg", "a", "b")], {"x": [2]}, "b")
    refused(saved(cycle, tmp_path), "cycle")
    twice = model([node("Neg", "x", "y"), node("Exp", "x", "y")], {"x": [2]}, "y")
    refused(saved(twice, tmp_path), "two nodes write the value 'y'")
    absent = model([node("Neg", "x", "y")], {"x": [2]}, "y z")
    refused(saved(absent, tmp_path), "no node writes the model output 'z'")
    shapes = model([node("Add", "x w", "y")], {"x": [2, 3]}, "y", {"w": floats(4)})
    assert "add_y" in refused(saved(shapes, tmp_path), "do not fit").where


def test_nodes_out_of_order_and_of_equal_names_are_read(tmp_path: Path) -> None:
    nodes = [node("Neg", "a", "y"), node("Exp", "x", "a")]
    for each in nodes:
        each.name = "same"
    read = read_model(saved(model(nodes, {"x": [2]}, "y"), tmp_path))
    assert [each.op for each in read.graph.nodes] == ["Exp", "Neg"]
    assert len({each.name for each in read.graph.nodes}) == 2


@pytest.mark.parametrize(
    "name", ['"); import os #', "class", "../../etc/passwd", "a\nb", "'", "日本", "x y", "{0}"]
)
def test_hostile_names_stay_names(name: str, tmp_path: Path) -> None:
    operation = oh.make_node("MatMul", ["x", name], [name + "!"], name=name)
    proto = model([operation], {"x": [2, 3]}, "", {name: floats(3, 4)})
    proto.graph.output.append(onnx.ValueInfoProto(name=name + "!"))
    path = saved(proto, tmp_path)
    read = read_model(path)
    assert read.graph.nodes[0].name == name and read.graph.parameters[0].value.name == name
    feeds = random_feeds(read.graph)
    assert_close(run_read(read, feeds), run(path, feeds))


def test_external_data_inside_the_folder_is_a_slice(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/data.bin").write_bytes(bytes(16) + floats(3, 4).tobytes())
    read = read_model(linear_beside(tmp_path, "weights/data.bin", offset=16))
    feeds = random_feeds(read.graph)
    assert_close(run_read(read, feeds), {"y": feeds["x"] @ floats(3, 4)})


@pytest.mark.parametrize(
    "location", ["../data.bin", "/etc/passwd", "a/../../data.bin", "", "..\\data.bin", "a\0b"]
)
def test_external_data_outside_the_folder(location: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "data.bin").write_bytes(bytes(48))
    refused(linear_beside(folder, location), "expected a file inside the model's folder")


@pytest.mark.parametrize("linked", ["weights/data.bin", "weights"])
def test_external_data_behind_a_link(linked: str, tmp_path: Path) -> None:
    (tmp_path / "secret/weights").mkdir(parents=True)
    (tmp_path / "secret/weights/data.bin").write_bytes(bytes(48))
    (tmp_path / "model" / linked).parent.mkdir(parents=True)
    (tmp_path / "model" / linked).symlink_to(tmp_path / "secret" / linked)
    refused(linear_beside(tmp_path / "model", "weights/data.bin"), "is a link to a file outside")


def test_external_data_beside_the_file_that_the_model_is_a_link_to(tmp_path: Path) -> None:
    """As huggingface_hub lays out its cache: links in a snapshot's folder, files with other names
    in one folder.
    """
    for folder in ("blobs", "snapshot/weights"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "blobs/1f").write_bytes(floats(3, 4).tobytes())
    linear_beside(tmp_path / "blobs", "weights/data.bin").rename(tmp_path / "blobs/2e")
    (tmp_path / "snapshot/weights/data.bin").symlink_to(tmp_path / "blobs/1f")
    (tmp_path / "snapshot/model.onnx").symlink_to("../blobs/2e")
    read = read_model(tmp_path / "snapshot/model.onnx")
    feeds = random_feeds(read.graph)
    assert_close(run_read(read, feeds), {"y": feeds["x"] @ floats(3, 4)})


def test_external_data_that_is_too_short_no_file_or_wrongly_sized(tmp_path: Path) -> None:
    (tmp_path / "short.bin").write_bytes(bytes(47))
    refused(linear_beside(tmp_path, "short.bin"), "has 47 bytes, and the tensor requires")
    (tmp_path / "folder").mkdir()
    refused(linear_beside(tmp_path, "folder"), "is not a regular file")
    refused(linear_beside(tmp_path, "short.bin", length=40), "its shape requires 48")


def test_external_data_that_is_absent_is_warned_of(tmp_path: Path) -> None:
    read = read_model(linear_beside(tmp_path, "gone.bin"))
    assert any("'w'" in warning and "at random" in warning for warning in read.warnings)


def test_weights_are_not_read(tmp_path: Path) -> None:
    """A weight of 8 TiB, in a file that has no blocks."""
    proto = model(
        [node("MatMul", "x w", "y")], {"x": [2, 1 << 20]}, "y", types={"w": [1 << 20, 1 << 21]}
    )
    tensor = proto.graph.initializer.add(
        name="w", data_type=onnx.TensorProto.FLOAT, dims=[1 << 20, 1 << 21]
    )
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="huge.bin")
    with (tmp_path / "huge.bin").open("wb") as file:
        os.truncate(file.fileno(), 8 << 40)
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    assert read_model(path).graph.parameters[0].value.bytes == 8 << 40


def test_weights_that_do_not_fill_their_shape(tmp_path: Path) -> None:
    proto = linear()
    proto.graph.initializer[0].raw_data = bytes(44)
    refused(saved(proto, tmp_path), "44 bytes, and its shape requires 48")
    proto.graph.initializer[0].dims[:] = [-3, 4]
    refused(saved(proto, tmp_path), "shape")


def test_weights_that_are_no_numbers_survive(tmp_path: Path) -> None:
    weights = floats(3, 4)
    weights[1] = np.nan
    path = saved(model([node("MatMul", "x w", "y")], {"x": [2, 3]}, "y", {"w": weights}), tmp_path)
    read = read_model(path)
    assert np.isnan(run_read(read, random_feeds(read.graph))["y"]).all()


def test_annotations_for_devices_are_checked(tmp_path: Path) -> None:
    proto = linear()
    proto.configuration.add(name="", num_devices=-3)
    refused(saved(proto, tmp_path), "lacks a name")


def test_shapes_that_depend_on_data(tmp_path: Path) -> None:
    nodes = [
        node("NonZero", "x", "n"),
        node("Cast", "n", "f", to=onnx.TensorProto.FLOAT),
        node("Hardmax", "f", "y"),
    ]
    assert (
        "nonzero_n"
        in refused(saved(model(nodes, {"x": [2, 3]}, "y"), tmp_path), "is unknown").message
    )


def test_a_huge_constant_is_not_computed(tmp_path: Path) -> None:
    nodes = [node("Expand", "one shape", "big"), node("Mul", "x big", "y")]
    held = {"one": np.ones(1, dtype=np.int64), "shape": integers(1 << 40)}
    read = read_model(
        saved(model(nodes, {"x": (onnx.TensorProto.INT64, [1])}, "y", held), tmp_path)
    )
    assert [each.op for each in read.graph.nodes] == ["Expand", "Mul"]


def test_functions_are_inlined(tmp_path: Path) -> None:
    proto = model(
        [oh.make_node("Twice", ["x"], ["y"], domain="local")], {"x": [2, 3]}, "y", domains=["local"]
    )
    body = [node("Add", "a a", "b")]
    proto.functions.append(
        oh.make_function("local", "Twice", ["a"], ["b"], body, [oh.make_opsetid("", 20)])
    )
    (only,) = read_model(saved(proto, tmp_path)).graph.nodes
    assert (only.op, only.inputs) == ("Add", ("x", "x"))
