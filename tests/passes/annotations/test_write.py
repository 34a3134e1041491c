"""The copy of a file with annotations: everything else in it is as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from autopipe.ir.errors import ConfigurationError
from autopipe.passes.annotations import write_annotated
from autopipe.passes.frontend import read_model
from autopipe.passes.frontend.device_annotations import Annotation, Configuration, Sharding
from tests.passes.frontend.building import floats, model, node, saved

MINE = Configuration(
    "mine", 2, ("a", "b"), (Annotation(0, 1, (Sharding("h", ((1, 2),), ((0,), (1,))),)),)
)


def product(**more: object) -> onnx.ModelProto:
    nodes = [node("MatMul", "x w", "h"), node("Relu", "h", "y")]
    return model(nodes, {"x": [8, 64]}, "y", {"w": floats(64, 64)}, **more)  # type: ignore[arg-type]


def without_annotations(proto: onnx.ModelProto) -> onnx.ModelProto:
    plain = onnx.ModelProto()
    plain.CopyFrom(proto)
    plain.ClearField("configuration")
    plain.ir_version = 10
    for each in plain.graph.node:
        each.ClearField("device_configurations")
    return plain


def test_all_else_is_as_it_was(tmp_path: Path) -> None:
    proto = product()
    write_annotated(saved(proto, tmp_path), tmp_path / "out.onnx", MINE)
    written = onnx.load(tmp_path / "out.onnx")
    assert without_annotations(written) == onnx.load(tmp_path / "model.onnx")
    assert read_model(tmp_path / "out.onnx").configurations == (MINE,)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "out.onnx"]


def test_a_newer_version_of_the_format_is_kept(tmp_path: Path) -> None:
    proto = product()
    proto.ir_version = 12
    write_annotated(saved(proto, tmp_path), tmp_path / "out.onnx", MINE)
    assert onnx.load(tmp_path / "out.onnx").ir_version == 12


def test_configurations_for_as_many_devices_are_replaced(tmp_path: Path) -> None:
    path = saved(product(), tmp_path)
    four = Configuration("four", 4, (), (Annotation(1, 0, ()),))
    other = Configuration("other", 2, (), (Annotation(1, 0, ()),))
    for name, each in (("a.onnx", four), ("b.onnx", other), ("c.onnx", MINE)):
        write_annotated(path, tmp_path / name, each)
        path = tmp_path / name
    assert read_model(path).configurations == (four, MINE)


def test_annotated_copies_have_the_digest_of_the_model(tmp_path: Path) -> None:
    """So that a checkpoint of either is one of both."""
    path = saved(product(), tmp_path)
    digest = read_model(path).digest
    write_annotated(path, tmp_path / "a.onnx", MINE)
    write_annotated(
        tmp_path / "a.onnx",
        tmp_path / "b.onnx",
        Configuration("four", 4, (), (Annotation(1, 0, ()),)),
    )
    assert (
        read_model(tmp_path / "a.onnx").digest == read_model(tmp_path / "b.onnx").digest == digest
    )
    other = product()
    other.graph.node[1].op_type = "Tanh"
    assert read_model(saved(other, tmp_path)).digest != digest


def test_weights_in_files_stay_there(tmp_path: Path) -> None:
    proto = onnx.load(saved(product(), tmp_path))
    onnx.save(
        proto,
        tmp_path / "model.onnx",
        save_as_external_data=True,
        location="w.bin",
        size_threshold=0,
    )
    size = (tmp_path / "model.onnx").stat().st_size
    write_annotated(tmp_path / "model.onnx", tmp_path / "out.onnx", MINE)
    assert (tmp_path / "out.onnx").stat().st_size < size + 100
    onnx.checker.check_model(tmp_path / "out.onnx")
    feeds = {"x": floats(8, 64)}
    results = [
        onnxruntime.InferenceSession(tmp_path / name, providers=["CPUExecutionProvider"]).run(
            None, feeds
        )[0]
        for name in ("model.onnx", "out.onnx")
    ]
    assert np.array_equal(*results)
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(
        ConfigurationError, match="not in the folder of the model, which contains the external data"
    ):
        write_annotated(tmp_path / "model.onnx", tmp_path / "elsewhere/out.onnx", MINE)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_functions_are_inlined(tmp_path: Path) -> None:
    proto = model(
        [onnx.helper.make_node("Twice", ["x"], ["y"], domain="own")],
        {"x": [2]},
        "y",
        domains=["own"],
    )
    body = [node("Add", "a a", "b"), node("Neg", "b", "c")]
    imports = [onnx.helper.make_opsetid("", 20)]
    proto.functions.append(onnx.helper.make_function("own", "Twice", ["a"], ["c"], body, imports))
    path = saved(proto, tmp_path)
    (add, _) = read_model(path).graph.nodes
    both = tuple(Annotation(at, at, (Sharding(add.outputs[0], (), ((at,),)),)) for at in range(2))
    write_annotated(path, tmp_path / "out.onnx", Configuration("mine", 2, (), both))
    written = read_model(tmp_path / "out.onnx")
    assert not onnx.load(tmp_path / "out.onnx").functions
    assert written.graph.nodes == read_model(path).graph.nodes
    assert written.configurations[0].annotations == both
    onnx.checker.check_model(tmp_path / "out.onnx")


def test_the_model_itself_is_not_written_over(tmp_path: Path) -> None:
    path = saved(product(), tmp_path)
    before = path.read_bytes()
    with pytest.raises(ConfigurationError, match="is the model itself"):
        write_annotated(path, path, MINE)
    with pytest.raises(ConfigurationError, match="cannot be written"):
        write_annotated(path, tmp_path / "nowhere" / "out.onnx", MINE)
    assert path.read_bytes() == before
