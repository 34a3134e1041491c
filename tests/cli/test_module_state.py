"""`autopipe checkpoint` writes and reads the whole `state_dict` of a module that a file has a
record of.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper as onh
import pytest
import safetensors.numpy

from autopipe.cli.main import main
from autopipe.ir.state_names import INITIALIZER_PREFIX, MAX_TIED_NAMES, METADATA_KEY
from autopipe.passes.frontend import read_model
from tests.cli.test_checkpoint import WEIGHT, imported, refused, said, write_checkpoint
from tests.passes.frontend.building import floats, model, node, saved
from tests.passes.frontend.test_apart import torch_export

COUNTER = f"{INITIALIZER_PREFIX}n.num_batches_tracked"
UNUSED = f"{INITIALIZER_PREFIX}extra.weight"
NAMES = {
    "w": "w",
    "tied": "w",
    "extra.weight": UNUSED,
    "n.num_batches_tracked": COUNTER,
    "table": "table",
}
EXTRA = floats(3, seed=7)
TABLE = np.array([1, 0], np.int64)


def recorded(folder: Path, record: object, name: str = "model.onnx") -> Path:
    """Return a file of one product with a record of its module's state."""
    held = {"w": floats(6, 4), "table": TABLE, UNUSED: EXTRA, COUNTER: np.array(5, np.int64)}
    proto = model(
        [node("MatMul", "x w", "h"), node("Gather", "h table", "y", axis=1)],
        {"x": [2, 6]},
        "y",
        held,
    )
    proto.metadata_props.add(
        key=METADATA_KEY, value=record if isinstance(record, str) else json.dumps(record)
    )
    return saved(proto, folder, name)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return recorded(tmp_path, {"names": NAMES, "counts": {COUNTER: 2}})


def exported(folder: Path, *words: str) -> dict[str, np.ndarray]:
    """Return the tensors of an export of the weights alone."""
    target = folder / "out.safetensors"
    assert (
        main(["checkpoint", "export", str(folder / "saved"), "-o", str(target), "--force", *words])
        == 0
    )
    found: dict[str, np.ndarray] = safetensors.numpy.load_file(target)
    return found


def stored(path: Path) -> dict[str, np.ndarray]:
    return {each.name: onh.to_array(each) for each in onnx.load(path).graph.initializer}


@pytest.mark.parametrize(("forwards", "counted"), [(12, 29), (None, 5)])
def test_every_entry_is_written(path: Path, forwards: int | None, counted: int) -> None:
    write_checkpoint(path.parent / "saved", path, 3, WEIGHT, forwards)
    found = exported(path.parent)
    assert found.keys() == NAMES.keys()
    assert np.array_equal(found["w"], WEIGHT) and np.array_equal(found["tied"], WEIGHT)
    assert np.array_equal(found["extra.weight"], EXTRA)
    assert np.array_equal(found["table"], TABLE)
    assert found["n.num_batches_tracked"] == np.array(counted)
    assert found["n.num_batches_tracked"].dtype == np.int64


def test_a_counter_wraps_around_as_torch_does(tmp_path: Path) -> None:
    path = recorded(tmp_path, {"names": NAMES, "counts": {COUNTER: 2}})
    write_checkpoint(tmp_path / "saved", path, 3, WEIGHT, 2**62)
    assert exported(tmp_path)["n.num_batches_tracked"] == np.array(5 - 2**63)


def test_a_trained_model_keeps_its_record(path: Path) -> None:
    write_checkpoint(path.parent / "saved", path, 3, WEIGHT, 12)
    target = path.with_name("trained.onnx")
    assert main(["checkpoint", "export", str(path.parent / "saved"), "-o", str(target)]) == 0
    found = stored(target)
    assert np.array_equal(found["w"], WEIGHT) and found[COUNTER] == np.array(29)
    assert np.array_equal(found[UNUSED], EXTRA)
    assert {each.key for each in onnx.load(target).metadata_props} == {METADATA_KEY}


def test_the_graph_has_no_tensor_that_is_only_saved(path: Path) -> None:
    graph = read_model(path).graph
    names = {each.value.name for each in (*graph.parameters, *graph.constants)}
    assert "w" in names and not any(name.startswith(INITIALIZER_PREFIX) for name in names)


def whole() -> dict[str, np.ndarray]:
    """Return a `state_dict` of the module with other data."""
    weight = floats(6, 4, seed=9)
    return {
        "w": weight, "tied": weight, "extra.weight": floats(3, seed=8), "n.num_batches_tracked": np.array(7),
        "table": TABLE,
    }  # fmt: skip


def test_a_whole_state_is_read(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = path.with_name("fresh.safetensors")
    given = whole()
    safetensors.numpy.save_file(given, weights)
    code, found = imported(weights, path)
    assert code == 0 and "note" not in capsys.readouterr().err
    assert np.array_equal(found["w"], given["w"])
    assert np.array_equal(found[UNUSED], given["extra.weight"])
    assert found[COUNTER] == np.array(7)
    del given["tied"], given["n.num_batches_tracked"]  # As Hugging Face's libraries save it.
    safetensors.numpy.save_file(given, weights)
    assert imported(weights, path)[0] == 0


def test_a_second_name_suffices_and_must_have_equal_data(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = path.with_name("fresh.safetensors")
    given = whole()
    given["tied"] = floats(6, 4, seed=11)
    safetensors.numpy.save_file(given, weights)
    assert imported(weights, path) == (3, {})
    assert "'w' and 'tied' have different data" in capsys.readouterr().err
    del given["w"]
    safetensors.numpy.save_file(given, weights)
    assert np.array_equal(imported(weights, path)[1]["w"], given["tied"])


@pytest.mark.parametrize("name", ["w", "extra.weight", "other"])
def test_a_name_of_one_side_is_an_error(
    name: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = path.with_name("fresh.safetensors")
    given = whole()
    del given["tied"]
    if name in given:
        del given[name]
    else:
        given[name] = EXTRA
    safetensors.numpy.save_file(given, weights)
    assert imported(weights, path) == (2, {})
    assert repr(name) in capsys.readouterr().err
    assert imported(weights, path, "--partial")[0] == 0


def test_weights_of_another_file_with_a_record_are_read(path: Path) -> None:
    write_checkpoint(path.parent / "saved", path, 3, WEIGHT, 12)
    trained = path.with_name("trained.onnx")
    assert main(["checkpoint", "export", str(path.parent / "saved"), "-o", str(trained)]) == 0
    code, found = imported(trained, path)
    assert code == 0 and found[COUNTER] == np.array(29) and np.array_equal(found["w"], WEIGHT)


MANY = {f"w{index}": "w" for index in range(MAX_TIED_NAMES + 1)}
BAD: Mapping[str, tuple[object, str]] = {
    "no JSON": ("{", "is not valid JSON"),
    "nested too deeply": ("[" * 100_000, "is not valid JSON"),
    "a list": ([], "is not an object with the keys 'names' and 'counts'"),
    "another member": (
        {"names": {}, "counts": {}, "more": 1},
        "is not an object with the keys 'names' and 'counts'",
    ),
    "names are a list": ({"names": [], "counts": {}}, "does not map each name to a tensor"),
    "a number for a tensor": (
        {"names": {"w": 1}, "counts": {}},
        "does not map each name to a tensor",
    ),
    "no such tensor": (
        {"names": {"w": "v"}, "counts": {}},
        "names the tensor 'v', which the model does not contain",
    ),
    "too many names": (
        {"names": MANY, "counts": {}},
        f"has {MAX_TIED_NAMES + 1} names of tensor 'w'",
    ),
    "a count of a weight": ({"names": {"w": "w"}, "counts": {"w": 1}}, "counts in 'w'"),
    "a count of nothing": (
        {"names": {}, "counts": {f"{INITIALIZER_PREFIX}x": 1}},
        f"counts in '{INITIALIZER_PREFIX}x'",
    ),
    "a negative count": ({"names": {}, "counts": {COUNTER: -1}}, "are not integers from 0"),
    "a huge count": ({"names": {}, "counts": {COUNTER: 2**80}}, "are not integers from 0"),
    "a true count": ({"names": {}, "counts": {COUNTER: True}}, "are not integers from 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_record_that_does_not_fit_is_an_error(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, message = BAD[case]
    path = recorded(tmp_path, record)
    write_checkpoint(tmp_path / "saved", path, 3, WEIGHT, 12)
    for target in ("out.safetensors", "out.onnx"):
        assert message in refused(capsys, 3, "export", tmp_path / "saved", "-o", tmp_path / target)
        assert not (tmp_path / target).exists()
    weights = tmp_path / "fresh.safetensors"
    safetensors.numpy.save_file(whole(), weights)
    assert imported(weights, path) == (3, {})
    assert message in capsys.readouterr().err


def test_a_name_that_safetensors_reserves_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recorded(tmp_path, {"names": {"__metadata__": "w"}, "counts": {}})
    write_checkpoint(tmp_path / "saved", path, 3, WEIGHT, 12)
    error = refused(capsys, 2, "export", tmp_path / "saved", "-o", tmp_path / "out.safetensors")
    assert "'__metadata__'" in error


def test_a_tensor_that_is_only_saved_must_fill_its_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recorded(tmp_path, {"names": NAMES, "counts": {}})
    proto = onnx.load(path)
    for tensor in proto.graph.initializer:
        if tensor.name == UNUSED:
            tensor.dims[0] = 2**40
    path = saved(proto, tmp_path)
    write_checkpoint(tmp_path / "saved", path, 3, WEIGHT, 12)
    error = refused(capsys, 3, "export", tmp_path / "saved", "-o", tmp_path / "out.safetensors")
    assert "its shape requires" in error


def test_names_of_torch_that_are_not_in_the_file_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a record: a second name of a tied weight, and a counter that the exporter has
    dropped.
    """
    proto = torch_export(
        [node("MatMul", "x w", "h"), node("Gather", "h table", "g", axis=1), node("Add", "g offset", "y")],
        {"x": [2, 6]}, {"w": floats(6, 4), "table": TABLE, "offset": floats(2)},
        ("w", "tied"), ("table", "n.num_batches_tracked"),
    )  # fmt: skip
    entry = next(each for each in proto.graph.metadata_props if "PARAMETER" in each.value)
    entry.value += "\nb_offset: BUFFER target='offset' persistent=False"
    path = saved(proto, tmp_path)
    write_checkpoint(tmp_path / "saved", path, 3, WEIGHT, 12)
    found = said(capsys, "export", tmp_path / "saved", "-o", tmp_path / "out.safetensors")
    assert found["absent"] == ["tied", "n.num_batches_tracked"]
    assert safetensors.numpy.load_file(tmp_path / "out.safetensors").keys() == {"w", "table"}
    assert (
        main(
            [
                "checkpoint",
                "export",
                str(tmp_path / "saved"),
                "-o",
                str(tmp_path / "again.safetensors"),
            ]
        )
        == 0
    )
    assert (
        "'tied', 'n.num_batches_tracked'; load_state_dict needs strict=False"
        in capsys.readouterr().err
    )
