"""`autopipe checkpoint` as a user types it, on checkpoints written by hand; no rank runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper as onh
import pytest
import safetensors.numpy

from autopipe.backends.torch.checkpoint import (
    Checkpoint,
    StoredParameter,
    StoredSlice,
    StoredTensor,
    TensorContent,
    checkpoint_path,
    manifest_document,
    manifest_text,
    read_checkpoint,
    write_shard,
)
from autopipe.cli.main import main
from autopipe.ir.graph import DType, Value
from autopipe.ir.layout import TensorSlice
from autopipe.passes.export import TensorData
from autopipe.passes.frontend.load import load
from autopipe.passes.safetensors_files import read_safetensors, write_safetensors
from tests.passes.frontend.building import floats, model, node, saved
from tests.passes.frontend.test_apart import torch_export

WEIGHT = floats(6, 4, seed=1)
STATE = floats(6, 4, seed=2)
HALVES = [TensorSlice((0, 0), (6, 2)), TensorSlice((0, 2), (6, 4))]


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """A model of one product, and the checkpoints of steps 3 and 5 of two ranks that hold half of
    the columns each.
    """
    path = saved(
        model([node("MatMul", "x w", "y")], {"x": [2, 6]}, "y", {"w": floats(6, 4)}), tmp_path
    )
    for step in (3, 5):
        write_checkpoint(tmp_path / "saved", path, step, WEIGHT * step)
    return tmp_path


def write_checkpoint(
    folder: Path, path: Path, step: int, weight: np.ndarray, forwards: int | None = None
) -> None:
    """Write both halves of `weight` and of an optimizer's state, in a file each, after `forwards`
    micro-batches.
    """
    target = checkpoint_path(folder, step)
    target.mkdir(parents=True)
    files = []
    values = []
    states = []
    for rank, box in enumerate(HALVES):
        region = tuple(map(slice, box.starts, box.stops))
        parts = {"w": weight[region], "w.m": STATE[region]}
        contents = [
            TensorContent(key, "float32", box.shape, memoryview(part.tobytes()))
            for key, part in parts.items()
        ]
        file, offsets = write_shard(target / f"rank_{rank:05d}.safetensors", contents)
        files.append(file)
        values.append(StoredSlice(box, rank, offsets["w"], "w"))
        states.append(StoredSlice(box, rank, offsets["w.m"], "w.m"))
    stored = [StoredTensor("float32", (6, 4), tuple(blocks)) for blocks in (values, states)]
    parameter = StoredParameter("w", True, stored[0], (("momentum_buffer", stored[1]),))
    checkpoint = Checkpoint(
        str(path), load(path).digest, "a" * 64, 2, step, 8 * step, 0, {"name": "sgd", "lr": 0.1}, tuple(files),
        (parameter,), (), forwards=forwards,
    )  # fmt: skip
    (target / "manifest.json").write_text(manifest_text(checkpoint), encoding="utf-8")


def said(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    """What a command that ends well prints with --json."""
    assert main(["checkpoint", *map(str, words), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], code: int, *words: object) -> str:
    """The error of a command that ends with `code`."""
    assert main(["checkpoint", *map(str, words)]) == code
    error: str = capsys.readouterr().err
    assert error.startswith("error: ")
    return error


def test_inspect(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, "inspect", given / "saved")
    assert [each["step"] for each in found["checkpoints"]] == [3, 5]
    assert (found["step"], found["samples"], found["world_size"]) == (5, 40, 2)
    (parameter,) = found["parameters"]
    assert (parameter["name"], parameter["shape"], parameter["bytes"]) == ("w", [6, 4], 96)
    assert parameter["state"] == {"momentum_buffer": {"dtype": "float32", "bytes": 96}}
    assert parameter["shards"] == [
        {"starts": [0, 0], "stops": [6, 2], "file": "rank_00000.safetensors"},
        {"starts": [0, 2], "stops": [6, 4], "file": "rank_00001.safetensors"},
    ]
    assert said(capsys, "inspect", given / "saved", "--step", "3")["step"] == 3
    one = said(capsys, "inspect", checkpoint_path(given / "saved", 3))
    assert [each["step"] for each in one["checkpoints"]] == [3]
    assert main(["checkpoint", "inspect", str(given / "saved")]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("w "))
    assert line.split() == ["w", "float32[6,", "4]", "2", "momentum_buffer", "(96", "B)"]


def test_verify(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [each["step"] for each in said(capsys, "verify", given / "saved")["checkpoints"]] == [
        3,
        5,
    ]
    file = checkpoint_path(given / "saved", 5) / "rank_00001.safetensors"
    whole = file.read_bytes()
    for damaged, message in (
        (whole[:-1] + bytes([whole[-1] ^ 1]), "SHA-256 differs"),
        (whole[:-1], f"has {len(whole) - 1} bytes, not {len(whole)}"),
        (None, "cannot be read"),
    ):
        file.unlink()
        if damaged is not None:
            file.write_bytes(damaged)
        else:
            file.mkdir()
        error = refused(capsys, 5, "verify", given / "saved")
        assert str(file) in error and message in error
        assert len(said(capsys, "verify", given / "saved", "--step", "3")["checkpoints"]) == 1
        if damaged is None:
            file.rmdir()
            file.touch()
    manifest = checkpoint_path(given / "saved", 3) / "manifest.json"
    manifest.write_text(
        manifest.read_text(encoding="utf-8").replace("momentum", "nomentum"), encoding="utf-8"
    )
    assert str(manifest) in refused(capsys, 5, "verify", given / "saved", "--step", "3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"starts": (0, 1), "stops": (6, 3)}, "two of its blocks overlap"),
        ({"stops": (6, 3)}, "18 elements, its shape 24"),
        ({"starts": (0, 4), "stops": (6, 6)}, "outside of its shape"),
        ({"starts": (0,)}, "1 dimension, not 2"),
        ({"starts": (7, 2)}, "ends before it begins"),
        ({"file": 2}, "file 2 of 2"),
        ({"offset": 10**6}, "behind the end of rank_00001.safetensors"),
    ],
)
def test_verify_looks_whether_blocks_are_the_tensor(
    given: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], message: str
) -> None:
    """Of a manifest that is as it was written, and wrong."""
    path = checkpoint_path(given / "saved", 5)
    checkpoint = read_checkpoint(path)
    (parameter,) = checkpoint.parameters
    first, second = parameter.value.blocks
    box = TensorSlice(
        change.get("starts", second.box.starts), change.get("stops", second.box.stops)
    )
    places = {key: value for key, value in change.items() if key in ("file", "offset")}
    blocks = (first, dataclasses.replace(second, box=box, **places))
    wrong = dataclasses.replace(
        parameter, value=dataclasses.replace(parameter.value, blocks=blocks)
    )
    changed = dataclasses.replace(checkpoint, parameters=(wrong,))
    assert manifest_document(changed) != manifest_document(checkpoint)
    (path / "manifest.json").write_text(manifest_text(changed), encoding="utf-8")
    error = refused(capsys, 5, "verify", given / "saved")
    assert message in error and "parameter 'w'" in error and str(path / "manifest.json") in error


def test_export(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = given / "trained.onnx"
    for words, factor in (((), 5), (("--step", 3), 3)):
        found = said(capsys, "export", given / "saved", "-o", target, *words)
        assert (found["step"], found["parameters"], found["replaced"], found["added"]) == (
            factor,
            1,
            1,
            0,
        )
        (weight,) = onnx.load(str(target)).graph.initializer
        assert np.array_equal(onh.to_array(weight), WEIGHT * factor)


def test_a_model_that_has_moved(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moved = given / "moved.onnx"
    (given / "model.onnx").rename(moved)
    target = given / "trained.onnx"
    error = refused(capsys, 2, "export", given / "saved", "-o", target)
    assert str(given / "model.onnx") in error and "--model FILE" in error
    assert said(capsys, "export", given / "saved", "-o", target, "--model", moved)["model"] == str(
        moved
    )
    other = saved(
        model([node("MatMul", "x v", "y")], {"x": [2, 6]}, "y", {"v": floats(6, 4)}),
        given,
        "other.onnx",
    )
    target.unlink()
    assert "not the model" in refused(
        capsys, 2, "export", given / "saved", "-o", target, "--model", other
    )
    assert not target.exists()


def test_weights_go_into_an_export_for_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = {"w": floats(6, 4), "ratio": np.float32(0.1), "on": np.array(True)}
    nodes = [node("Dropout", "x ratio on", "kept"), node("MatMul", "kept w", "y")]
    trained = saved(model(nodes, {"x": [2, 6]}, "y", held), tmp_path)
    write_checkpoint(tmp_path / "saved", trained, 3, WEIGHT)
    evaluated = model([node("MatMul", "x w", "y")], {"x": [2, 6]}, "y", {"w": floats(6, 4)})
    path = saved(evaluated, tmp_path, "evaluated.onnx")
    target = tmp_path / "out.onnx"
    said(capsys, "export", tmp_path / "saved", "-o", target, "--model", path)
    proto = onnx.load(str(target))
    assert [each.op_type for each in proto.graph.node] == ["MatMul"]
    np.testing.assert_array_equal(onh.to_array(proto.graph.initializer[0]), WEIGHT)
    trained.unlink()
    error = refused(capsys, 2, "export", tmp_path / "saved", "-o", target, "--model", path)
    assert "not the model that the checkpoint was trained from" in error and str(trained) in error


def test_there_is_no_such_checkpoint(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = given / "empty"
    empty.mkdir()
    assert "no complete checkpoint" in refused(capsys, 2, "inspect", empty)
    assert "checkpoint folder does not exist" in refused(capsys, 2, "verify", given / "nowhere")
    assert "use one of 3, 5" in refused(
        capsys, 2, "export", given / "saved", "-o", given / "o.onnx", "--step", "4"
    )
    assert "folder" in refused(capsys, 2, "export", given / "saved", "-o", given)


def test_weights_go_to_safetensors_and_back_into_a_model(
    given: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = given / "w.safetensors"
    target = given / "again.onnx"
    assert (
        main(["checkpoint", "export", str(given / "saved"), "-o", str(weights), "--step", "3"]) == 0
    )
    stored = safetensors.numpy.load_file(weights)
    assert list(stored) == ["w"] and np.array_equal(stored["w"], WEIGHT * 3)
    (path,) = given.glob("*.onnx")
    command = ["checkpoint", "import", str(weights), "--model", str(path), "-o", str(target)]
    assert main(command) == 0
    (tensor,) = onnx.load(target).graph.initializer
    assert np.array_equal(onh.to_array(tensor), WEIGHT * 3)
    half = given / "half.safetensors"
    safetensors.numpy.save_file({"w": (WEIGHT * 3).astype(np.float16), "other": STATE}, half)
    assert main([*command[:2], str(half), *command[3:]]) == 2
    assert "lacks 1 of the tensors" in capsys.readouterr().err
    assert main([*command[:2], str(half), *command[3:], "--partial"]) == 0
    (tensor,) = onnx.load(target).graph.initializer
    assert np.array_equal(onh.to_array(tensor), (WEIGHT * 3).astype(np.float16).astype(np.float32))
    assert "'other'" in capsys.readouterr().err
    assert (
        main([*command[:2], str(target), "--model", str(path), "-o", str(given / "third.onnx")])
        == 0
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the header length is"),
        ((8).to_bytes(8, "little") + b"{[[[[[[[", "not a safetensors file"),
        ((2**40).to_bytes(8, "little") + b"{}", "the header length is"),
        (
            (56).to_bytes(8, "little")
            + b'{"w":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}} ',
            "do not match its shape",
        ),
        (
            (57).to_bytes(8, "little")
            + b'{"w":{"dtype":"F32","shape":[-1],"data_offsets":[0,36]}} ',
            "expected an integer",
        ),
    ],
)
def test_what_is_no_safetensors_file_is_refused(
    given: Path, content: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = given / "bad.safetensors"
    weights.write_bytes(content)
    (path,) = given.glob("*.onnx")
    command = [
        "checkpoint",
        "import",
        str(weights),
        "--model",
        str(path),
        "-o",
        str(given / "never.onnx"),
    ]
    assert main(command) == 2
    assert message in capsys.readouterr().err
    assert not (given / "never.onnx").exists()


def test_weights_of_another_model_are_refused(
    given: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = given.glob("*.onnx")
    for tensors, message in (
        ({"v": WEIGHT}, "the first is 'w'"),
        ({"w": WEIGHT.T.copy()}, "has shape [4, 6]"),
    ):
        safetensors.numpy.save_file(tensors, given / "other.safetensors")
        command = [
            "import",
            given / "other.safetensors",
            "--model",
            path,
            "-o",
            given / "never.onnx",
        ]
        assert main(["checkpoint", *map(str, command)]) != 0
        assert message in capsys.readouterr().err


@pytest.fixture
def perceptron(tmp_path: Path) -> Path:
    """A model of two products whose second weight is the larger one."""
    nodes = [node("MatMul", "x a", "h"), node("MatMul", "h b", "y")]
    return saved(model(nodes, {"x": [2, 6]}, "y", {"a": floats(6, 4), "b": floats(4, 9)}), tmp_path)


def imported(weights: Path, path: Path, *words: str) -> tuple[int, dict[str, np.ndarray]]:
    """The exit code of an import into `path`, and the tensors of the model that it wrote."""
    target = path.with_name("started.onnx")
    target.unlink(missing_ok=True)
    code = main(
        ["checkpoint", "import", str(weights), "--model", str(path), "-o", str(target), *words]
    )
    if not target.exists():
        return code, {}
    return code, {each.name: onh.to_array(each) for each in onnx.load(target).graph.initializer}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a",), "lacks 1 of 2 parameters, the first is 'b'"),
        (("a", "b", "c"), "lacks 1 of the tensors of"),
        (("a", "c"), "the first is 'b'; "),
    ],
)
def test_a_tensor_that_one_side_lacks_is_an_error(
    perceptron: Path, names: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = {"a": floats(6, 4, seed=3), "b": floats(4, 9, seed=4), "c": floats(2, seed=5)}
    weights = perceptron.with_name("w.safetensors")
    safetensors.numpy.save_file({name: tensors[name] for name in names}, weights)
    assert imported(weights, perceptron) == (2, {})
    error = capsys.readouterr().err
    assert message in error and "--partial" in error
    code, found = imported(weights, perceptron, "--partial")
    assert code == 0
    assert np.array_equal(found["a"], tensors["a"])
    assert np.array_equal(found["b"], tensors["b"] if "b" in names else floats(4, 9))


def test_files_without_a_common_tensor_are_an_error_in_any_case(
    perceptron: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = perceptron.with_name("w.safetensors")
    safetensors.numpy.save_file({"c": floats(2)}, weights)
    assert imported(weights, perceptron, "--partial") == (2, {})
    assert "'a'" in capsys.readouterr().err


def test_a_counter_of_batches_needs_no_place(
    perceptron: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = perceptron.with_name("w.safetensors")
    tensors = {
        "a": floats(6, 4, seed=3),
        "b": floats(4, 9, seed=4),
        "n.num_batches_tracked": np.array(3),
    }
    safetensors.numpy.save_file(tensors, weights)
    assert imported(weights, perceptron)[0] == 0
    assert "n.num_batches_tracked" in capsys.readouterr().err


def test_a_sharded_set_is_read_by_its_index(perceptron: Path) -> None:
    tensors = {"a": floats(6, 4, seed=3), "b": floats(4, 9, seed=4)}
    for name, array in tensors.items():
        safetensors.numpy.save_file({name: array}, perceptron.with_name(f"{name}.safetensors"))
    index = perceptron.with_name("model.safetensors.index.json")
    index.write_text(
        json.dumps(
            {"metadata": {}, "weight_map": {name: f"{name}.safetensors" for name in tensors}}
        )
    )
    code, found = imported(index, perceptron)
    assert code == 0
    assert all(np.array_equal(found[name], array) for name, array in tensors.items())


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a": "../a.safetensors"}, "expected a file in the folder"),
        ({"a": ""}, "expected a file in the folder"),
        ({"a": "nowhere.safetensors"}, "No such file"),
        ({"b": "a.safetensors"}, "assigns tensor 'b' to the file"),
        ({"a": 3}, "does not map each tensor to a file"),
        ([], "does not map each tensor to a file"),
        (None, "not an index of safetensors files"),
    ],
)
def test_an_index_that_does_not_fit_is_an_error(
    perceptron: Path, files: object, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    safetensors.numpy.save_file({"a": floats(6, 4)}, perceptron.with_name("a.safetensors"))
    index = perceptron.with_name("model.safetensors.index.json")
    index.write_text(json.dumps({} if files is None else {"weight_map": files}))
    assert imported(index, perceptron) == (2, {})
    assert message in capsys.readouterr().err


def test_weights_are_written_in_shards(given: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = given.glob("*.onnx")
    command = ["checkpoint", "export", str(given / "saved"), "-o"]
    assert main([*command, str(given / "one.safetensors"), "--max-shard-size", "5GB"]) == 0
    assert not list(given.glob("*.index.json"))
    assert main([*command, str(given / "w.safetensors.index.json"), "--max-shard-size", "10B"]) == 0
    index = json.loads((given / "w.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 96},
        "weight_map": {"w": "w-00001-of-00001.safetensors"},
    }
    code, found = imported(given / "w.safetensors.index.json", path)
    assert code == 0 and np.array_equal(found["w"], WEIGHT * 5)
    assert main([*command, str(given / "w.onnx"), "--max-shard-size", "5GB"]) == 2
    assert main([*command, str(given / "x.safetensors"), "--max-shard-size", "large"]) == 2
    (given / "taken-00001-of-00001.safetensors").write_text("notes")
    assert main([*command, str(given / "taken.safetensors.index.json")]) == 2
    assert "is not a safetensors file" in capsys.readouterr().err


def test_a_shard_has_at_most_the_size_that_is_asked_for(tmp_path: Path) -> None:
    tensors = [
        TensorData(Value(name, DType.FLOAT32, (4,)), lambda box: floats(4)[box.slices])
        for name in "abcde"
    ]
    paths, size = write_safetensors(tmp_path / "w.safetensors", tensors, most=40)
    assert size == 80
    assert [path.name for path in paths] == [
        *(f"w-0000{number}-of-00003.safetensors" for number in (1, 2, 3)),
        "w.safetensors.index.json",
    ]
    assert [sorted(safetensors.numpy.load_file(path)) for path in paths[:-1]] == [
        ["a", "b"],
        ["c", "d"],
        ["e"],
    ]
    found = read_safetensors(paths[-1])
    assert sorted(found) == list("abcde")


def test_weights_go_out_and_in_in_the_layout_of_the_module(tmp_path: Path) -> None:
    """torch's exporter writes the weight of a linear layer transposed."""
    proto = torch_export(
        [node("MatMul", "x val_0", "y")], {"x": [2, 6]}, {"val_0": floats(6, 4)}, ("w",),
        folded={"val_0": ["w"]}, calls={"y": "%x, %p_w"}, target="linear",
    )  # fmt: skip
    path = saved(proto, tmp_path)
    write_checkpoint(tmp_path / "saved", path, 3, WEIGHT)
    weights = tmp_path / "w.safetensors"
    assert main(["checkpoint", "export", str(tmp_path / "saved"), "-o", str(weights)]) == 0
    stored = safetensors.numpy.load_file(weights)
    assert list(stored) == ["w"] and np.array_equal(stored["w"], WEIGHT.T)
    code, found = imported(weights, path)
    assert code == 0 and np.array_equal(found["val_0"], WEIGHT)
    started = path.with_name("trained.onnx")
    assert main(["checkpoint", "export", str(tmp_path / "saved"), "-o", str(started)]) == 0
    code, found = imported(started, path)
    assert code == 0 and np.array_equal(found["val_0"], WEIGHT)
    safetensors.numpy.save_file({"w": WEIGHT}, weights)
    assert imported(weights, path) == (3, {})
