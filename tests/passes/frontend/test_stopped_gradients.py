"""Files that say where no gradient flows: calls of `detach`, and parameters that are frozen."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from autopipe.ir.errors import ModelError
from autopipe.ir.problem import Mode
from autopipe.passes.frontend import read_model
from autopipe.passes.frontend.detached import DetachedReads, find_detached_reads
from autopipe.passes.frontend.signature import Signature
from tests.passes.frontend.building import INT64, floats, model, node, saved

CALL = "pkg.torch.onnx.fx_node"


def detach(source: str, result: str) -> onnx.NodeProto:
    """The node that torch's exporter writes for `source.detach()`."""
    found = node("Identity", source, result)
    text = (
        f"%{result} : [num_users=1] = call_function[target=torch.ops.aten.detach.default](args = "
        f"(%{source},))"
    )
    found.metadata_props.add(key=CALL, value=text)
    return found


def with_loss(nodes: list[onnx.NodeProto], last: str) -> onnx.ModelProto:
    nodes = [*nodes, node("ReduceMean", last, "loss", keepdims=0)]
    return model(nodes, {"x": [2, 4]}, "loss", {"w": floats(4, 4), "v": floats(4, 4, seed=1)})


def test_a_detach_stops_the_gradient(tmp_path: Path) -> None:
    nodes = [node("MatMul", "x w", "h"), detach("h", "stopped"), node("MatMul", "stopped v", "y")]
    read = read_model(saved(with_loss(nodes, "y"), tmp_path))
    assert [each.op for each in read.graph.nodes] == [
        "MatMul",
        "StopGradient",
        "MatMul",
        "ReduceMean",
    ]
    assert {each.value.name: each.trainable for each in read.graph.parameters} == {
        "w": False,
        "v": True,
    }


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


@pytest.mark.parametrize(
    ("operator", "operands", "known"), [("Identity", "h", True), ("Mul", "h h", False)]
)
def test_a_dropped_argument_leaves_the_others_known_by_their_names(
    operator: str, operands: str, known: bool
) -> None:
    """The optimization drops the empty tensor of a concatenation; two operands of one name may both
    be the value.
    """
    last = node(operator, operands, "y")
    text = (
        "%y : [num_users=1] = call_function[target=torch.ops.aten.cat.default](args = ([%detach_, "
        "%h, %empty],))"
    )
    last.metadata_props.add(key=CALL, value=text)
    unknown = () if known else (f"Mul {last.name!r}",)
    found = find_detached_reads([node("MatMul", "x w", "h"), last], Signature())
    assert found == DetachedReads(frozenset(), unknown)


def lookup(arguments: str) -> onnx.ModelProto:
    """A lookup that torch's exporter writes for `embedding` with these arguments behind the table
    and the indices.
    """
    found = node("Gather", "w indices", "rows")
    text = (
        "%rows : [num_users=1] = call_function[target=torch.ops.aten.embedding.default](args = "
        f"(%p_w, %x{arguments}"
    )
    found.metadata_props.add(key=CALL, value=text)
    nodes = [found, node("ReduceMean", "rows", "loss", keepdims=0)]
    return model(nodes, {"indices": (INT64, [2, 3])}, "loss", {"w": floats(4, 4)})


@pytest.mark.parametrize(
    ("arguments", "stops"),
    {
        ", 3), kwargs = {})": True,
        ", 0), kwargs = {})": True,
        "), kwargs = {padding_idx: 3})": True,
        "), kwargs = {})": False,
        ", -1), kwargs = {})": False,
        ", -1, True), kwargs = {})": False,
    }.items(),
)
def test_the_padding_of_an_embedding_has_no_gradient(
    arguments: str, stops: bool, tmp_path: Path
) -> None:
    path = saved(lookup(arguments), tmp_path)
    operators = [each.op for each in read_model(path).graph.nodes]
    expected = ["StopGradient", "Equal", "Unsqueeze", "Where"] if stops else []
    assert sorted(operators) == sorted(["Gather", *expected, "ReduceMean"])
    plain = read_model(path, mode=Mode.INFER).graph
    assert [each.op for each in plain.nodes] == ["Gather", "ReduceMean"]


def test_a_file_that_states_its_stops_has_no_others(tmp_path: Path) -> None:
    proto = lookup(", 3), kwargs = {})")
    proto.metadata_props.add(key="autopipe.frozen", value="[]")
    assert [each.op for each in read_model(saved(proto, tmp_path)).graph.nodes] == [
        "Gather",
        "ReduceMean",
    ]


def test_frozen_parameters_are_not_trained(tmp_path: Path) -> None:
    proto = with_loss([node("MatMul", "x w", "h"), node("MatMul", "h v", "y")], "y")
    proto.metadata_props.add(key="autopipe.frozen", value=json.dumps(["w"]))
    path = saved(proto, tmp_path)
    read = read_model(path)
    assert {each.value.name: each.trainable for each in read.graph.parameters} == {
        "w": False,
        "v": True,
    }
    assert {each.value.name: each.why for each in read.tensors}["w"] == "frozen, as the file states"
    trained = read_model(path, trainable=("w",))
    assert all(each.trainable for each in trained.graph.parameters)


@pytest.mark.parametrize("text", ["w", '{"w": 1}'])
def test_a_list_of_frozen_parameters_that_is_none_is_named(text: str, tmp_path: Path) -> None:
    proto = with_loss([node("MatMul", "x w", "y")], "y")
    proto.metadata_props.add(key="autopipe.frozen", value=text)
    with pytest.raises(ModelError, match=r"autopipe\.frozen"):
        read_model(saved(proto, tmp_path))
