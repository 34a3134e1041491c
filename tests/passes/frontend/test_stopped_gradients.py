"""Files that say where no gradient flows: calls of `detach`, and parameters that are frozen."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from autopipe.ir.errors import ModelError
from autopipe.ir.problem import Mode
from autopipe.passes.frontend import read_model
from tests.passes.frontend.building import floats, model, node, saved

CALL = "pkg.torch.onnx.fx_node"


def detach(source: str, result: str) -> onnx.NodeProto:
    """The node that torch's exporter writes for `source.detach()`."""
    found = node("Identity", source, result)
    text = f"%{result} : [num_users=1] = call_function[target=torch.ops.aten.detach.default](args = (%{source},))"
    found.metadata_props.add(key=CALL, value=text)
    return found


def with_loss(nodes: list[onnx.NodeProto], last: str) -> onnx.ModelProto:
    nodes = [*nodes, node("ReduceMean", last, "loss", keepdims=0)]
    return model(nodes, {"x": [2, 4]}, "loss", {"w": floats(4, 4), "v": floats(4, 4, seed=1)})


def test_a_detach_stops_the_gradient(tmp_path: Path) -> None:
    nodes = [node("MatMul", "x w", "h"), detach("h", "stopped"), node("MatMul", "stopped v", "y")]
    read = read_model(saved(with_loss(nodes, "y"), tmp_path))
    assert [each.op for each in read.graph.nodes] == ["MatMul", "StopGradient", "MatMul", "ReduceMean"]
    assert {each.value.name: each.trainable for each in read.graph.parameters} == {"w": False, "v": True}


def test_a_value_with_another_path_keeps_its_gradient(tmp_path: Path) -> None:
    nodes = [node("MatMul", "x w", "h"), detach("h", "stopped"), node("Mul", "stopped h", "y")]
    read = read_model(saved(with_loss(nodes, "y"), tmp_path))
    assert "StopGradient" in [each.op for each in read.graph.nodes]
    assert {each.value.name: each.trainable for each in read.graph.parameters} == {"w": True}


@pytest.mark.parametrize("mode", [Mode.TRAIN, Mode.INFER])
def test_a_detach_that_stops_nothing_is_removed(mode: Mode, tmp_path: Path) -> None:
    """In training that of an input, without training any."""
    source = "x" if mode is Mode.TRAIN else "h"
    nodes = [node("MatMul", "x w", "h"), detach(source, "stopped"), node("Add", "stopped h", "y")]
    read = read_model(saved(with_loss(nodes, "y"), tmp_path), mode=mode)
    assert "StopGradient" not in [each.op for each in read.graph.nodes]


def test_frozen_parameters_are_not_trained(tmp_path: Path) -> None:
    proto = with_loss([node("MatMul", "x w", "h"), node("MatMul", "h v", "y")], "y")
    proto.metadata_props.add(key="autopipe.frozen", value=json.dumps(["w"]))
    path = saved(proto, tmp_path)
    read = read_model(path)
    assert {each.value.name: each.trainable for each in read.graph.parameters} == {"w": False, "v": True}
    assert {each.value.name: each.why for each in read.tensors}["w"] == "frozen, as the file states"
    trained = read_model(path, trainable=("w",))
    assert all(each.trainable for each in trained.graph.parameters)


@pytest.mark.parametrize("text", ["w", '{"w": 1}'])
def test_a_list_of_frozen_parameters_that_is_none_is_named(text: str, tmp_path: Path) -> None:
    proto = with_loss([node("MatMul", "x w", "y")], "y")
    proto.metadata_props.add(key="autopipe.frozen", value=text)
    with pytest.raises(ModelError, match=r"autopipe\.frozen"):
        read_model(saved(proto, tmp_path))
