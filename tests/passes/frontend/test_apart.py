"""Parameters that an exporter merged are trained apart; what a model shares is trained as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

from autopipe.ir.graph import Graph
from autopipe.passes.export import write_trained
from autopipe.passes.frontend import read_model
from autopipe.passes.frontend.signature import CALL, FOLDED, SIGNATURE
from tests.passes.export.test_write import trained as numbers
from tests.passes.frontend.building import INT64, Shape, floats, model, node, saved
from tests.passes.frontend.reference import assert_close, random_feeds, run, run_read


def torch_export(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Shape | tuple[int, Shape]],
    held: Mapping[str, np.ndarray],
    parameters: Sequence[str] = (),
    buffers: Sequence[str] = (),
    folded: Mapping[str, Sequence[str]] | None = None,
    calls: Mapping[str, str] | None = None,
    target: str = "x",
) -> onnx.ModelProto:
    """What torch's newer exporter writes of `parameters` and `buffers`; its older one's file
    without them.
    """
    proto = model(nodes, inputs, "y", held)
    proto.producer_name = "pytorch"
    lines = [f"p_{name.replace('.', '_')}: PARAMETER target='{name}'" for name in parameters]
    lines += [
        f"b_{name.replace('.', '_')}: BUFFER target='{name}' persistent=True" for name in buffers
    ]
    if lines:
        proto.graph.metadata_props.add(key=SIGNATURE, value="\n# inputs\n" + "\n".join(lines))
    for name, origins in (folded or {}).items():
        info = onnx.helper.make_tensor_value_info(name, 1, list(held[name].shape))
        info.metadata_props.add(key=FOLDED, value=str(list(origins)))
        proto.graph.value_info.append(info)
    for each in proto.graph.node:
        if calls and each.output[0] in calls:
            call = (
                f"%{each.output[0]} : [num_users=1] = "
                f"call_function[target=torch.ops.aten.{target}.default](args = "
            )
            each.metadata_props.add(
                key=CALL, value=f"{call}({calls[each.output[0]]}), kwargs = {{}})"
            )
    return proto


def weights(graph: Graph) -> dict[str, bool]:
    return {each.value.name: each.trainable for each in graph.parameters}


TWO_LAYERS = [node("Gemm", "x w b", "h"), node("Gemm", "h v b", "y")]


def test_each_call_reads_the_parameter_that_its_arguments_name(tmp_path: Path) -> None:
    held = {"w": floats(5, 5), "v": floats(5, 5, seed=1), "b": np.zeros(5, np.float32)}
    calls = {"h": "%x, %p_w, %p_b", "y": "%h, %p_v, %p_c"}
    proto = torch_export(TWO_LAYERS, {"x": [4, 5]}, held, ("w", "b", "v", "c"), calls=calls)
    path = saved(proto, tmp_path)
    read = read_model(path)
    assert weights(read.graph) == {"w": True, "v": True, "b": True, "c": True}
    assert [each.inputs[-1] for each in read.graph.nodes] == ["b", "c"]
    new = {
        name: floats(*read.graph.type_of(name).shape, seed=7 + at)
        for at, name in enumerate(("w", "v", "b", "c"))
    }
    write_trained(path, tmp_path / "out.onnx", numbers(new))
    x = floats(4, 5, seed=3)
    found = run(tmp_path / "out.onnx", {"x": x})["y"]
    np.testing.assert_allclose(
        found, (x @ new["w"] + new["b"]) @ new["v"] + new["c"], rtol=1e-4, atol=1e-5
    )
    assert weights(read_model(tmp_path / "out.onnx").graph) == weights(read.graph)


def test_a_layer_that_is_called_twice_stays_one(tmp_path: Path) -> None:
    held = {"w": floats(5, 5), "v": floats(5, 5, seed=1), "b": np.zeros(5, np.float32)}
    calls = {"h": "%x, %p_w, %p_b", "y": "%h, %p_v, %p_b"}
    read = read_model(
        saved(torch_export(TWO_LAYERS, {"x": [4, 5]}, held, ("w", "b", "v"), calls=calls), tmp_path)
    )
    assert weights(read.graph) == {"w": True, "v": True, "b": True}


def test_a_norm_without_a_scale_does_not_train_anothers(tmp_path: Path) -> None:
    """The ones that spell its absence were merged with the scale of a new norm."""
    nodes = [
        node("LayerNormalization", "x s", "h", axis=-1),
        node("LayerNormalization", "h s", "y", axis=-1),
    ]
    calls = {"h": "%x, [5], None, None", "y": "%h, [5], %p_s, None"}
    proto = torch_export(nodes, {"x": [4, 5]}, {"s": np.ones(5, np.float32)}, ("s",), calls=calls)
    read = read_model(saved(proto, tmp_path))
    assert weights(read.graph) == {"s": True}
    assert {each.value.name for each in read.graph.constants} == {"s/constant"}


def test_what_folded_tensors_stood_for_is_told_by_their_places(tmp_path: Path) -> None:
    nodes = [node("Mul", "x exp", "h"), node("Mul", "h exp", "y")]
    calls = {"h": "%x, %exp", "y": "%h, %exp_1"}
    held = {"exp": np.exp(floats(4, 5))}
    proto = torch_export(nodes, {"x": [4, 5]}, held, ("a", "b"), folded={"exp": ["a"]}, calls=calls)
    path = saved(proto, tmp_path)
    read = read_model(path)
    assert weights(read.graph) == {"a": True, "exp_1/log": True}
    feeds = random_feeds(read.graph)
    assert_close(run_read(read, feeds), run(path, feeds))
    new = {name: floats(4, 5, seed=at) for at, name in enumerate(weights(read.graph))}
    write_trained(path, tmp_path / "out.onnx", numbers(new))
    found = run(tmp_path / "out.onnx", feeds)["y"]
    np.testing.assert_allclose(
        found, feeds["x"] * np.exp(new["a"]) * np.exp(new["exp_1/log"]), rtol=1e-5
    )
    assert weights(read_model(tmp_path / "out.onnx").graph) == weights(read.graph)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_an_identity_names_a_parameter(value: float, tmp_path: Path) -> None:
    nodes = [
        node("Identity", "a.bias", "b.bias"),
        node("Gemm", "x w a.bias", "h"),
        node("Gemm", "h v b.bias", "y"),
    ]
    held = {"w": floats(5, 5), "v": floats(5, 5, seed=1), "a.bias": np.full(5, value, np.float32)}
    path = saved(torch_export(nodes, {"x": [4, 5]}, held), tmp_path)
    read = read_model(path)
    assert weights(read.graph) == {"w": True, "v": True, "a.bias": True, "b.bias": True}
    assert not read.warnings
    new = {
        name: floats(*read.graph.type_of(name).shape, seed=at)
        for at, name in enumerate(weights(read.graph))
    }
    write_trained(path, tmp_path / "out.onnx", numbers(new))
    x = floats(4, 5, seed=3)
    found = run(tmp_path / "out.onnx", {"x": x})["y"]
    wanted = (x @ new["w"] + new["a.bias"]) @ new["v"] + new["b.bias"]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert weights(read_model(tmp_path / "out.onnx").graph) == weights(read.graph)


@pytest.mark.parametrize(("second", "count"), [("/layer_1/MatMul", 1), ("/other/MatMul", 2)])
def test_folded_matrices_are_one_where_the_same_module_is_called(
    second: str, count: int, tmp_path: Path
) -> None:
    """Layers that were copied begin equal and are trained apart; a layer that is called twice is
    one.
    """
    nodes = [
        node("Identity", "onnx::MatMul_1", "onnx::MatMul_2"),
        node("MatMul", "x onnx::MatMul_1", "h"),
        node("MatMul", "h onnx::MatMul_2", "y"),
    ]
    nodes[1].name = "/layer/MatMul"
    nodes[2].name = second
    read = read_model(
        saved(torch_export(nodes, {"x": [4, 5]}, {"onnx::MatMul_1": floats(5, 5)}), tmp_path)
    )
    assert len(weights(read.graph)) == count


def test_a_table_that_two_modules_are_given_is_one(tmp_path: Path) -> None:
    """DeBERTa's table of relative positions, which stands first in the products of every layer."""
    nodes = [
        node("Identity", "onnx::MatMul_1", "onnx::MatMul_2"),
        node("MatMul", "onnx::MatMul_1 x", "h"),
        node("MatMul", "onnx::MatMul_2 h", "y"),
    ]
    nodes[1].name = "/layer/MatMul"
    nodes[2].name = "/other/MatMul"
    read = read_model(
        saved(torch_export(nodes, {"x": [5, 4]}, {"onnx::MatMul_1": floats(5, 5)}), tmp_path)
    )
    assert len(weights(read.graph)) == 1


def test_offsets_of_other_files_are_one_a_use_and_the_user_is_told(tmp_path: Path) -> None:
    nodes = [
        *TWO_LAYERS[:1],
        node("Gemm", "h v b", "z"),
        node("SoftmaxCrossEntropyLoss", "z labels", "y"),
    ]
    held = {"w": floats(5, 5), "v": floats(5, 5, seed=1), "b": np.zeros(5, np.float32)}
    proto = model(nodes, {"x": [4, 5], "labels": (INT64, [4])}, "y", held)
    read = read_model(saved(proto, tmp_path))
    assert weights(read.graph) == {"w": True, "v": True, "b": True, "b/gemm_z": True}
    assert any("'b/gemm_z': trained apart" in each for each in read.warnings)


def test_equal_numbers_that_nothing_reads_are_no_table(tmp_path: Path) -> None:
    """Beside a new table that is resized there may be tensors without a reader."""
    sizes = np.array([1, 1, 4, 4])
    nodes = [node("Resize", "onnx::Resize_1   sizes", "r", mode="nearest"), node("Add", "x r", "y")]
    nodes[0].input[:] = ["onnx::Resize_1", "", "", "sizes"]
    held = {
        "onnx::Resize_1": np.zeros((1, 1, 2, 2), np.float32),
        "onnx::Concat_2": np.zeros((3, 2), np.float32),
    }
    read = read_model(
        saved(torch_export(nodes, {"x": [1, 1, 4, 4]}, {**held, "sizes": sizes}), tmp_path)
    )
    assert weights(read.graph) == {"onnx::Resize_1": True}
