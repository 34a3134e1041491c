"""Trained numbers in a copy of the file: the file's own nodes, its own names, and nothing lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.helper as oh
import onnx.numpy_helper as onh
import pytest

from autopipe.ir.errors import ConfigurationError, ModelError
from autopipe.ir.graph import DType, Value
from autopipe.ir.layout import TensorSlice
from autopipe.passes import export as pieces
from autopipe.passes.export import TensorData, write_trained
from autopipe.passes.frontend import read_model
from tests.passes.frontend.building import INT64, floats, integers, model, node, saved
from tests.passes.frontend.reference import run

Arrays = dict[str, np.ndarray]
LIMITS = [1 << 30, 0]
"""Bytes that may stand in the file: all of them, or none but small tensors."""


def trained(arrays: Arrays, dtypes: dict[str, DType] | None = None) -> dict[str, TensorData]:
    """Numbers by name; blocks must be asked for inside of the tensor."""

    def reader(array: np.ndarray) -> Callable[[TensorSlice], np.ndarray]:
        def read(box: TensorSlice) -> np.ndarray:
            assert all(
                0 <= start <= stop for start, stop in zip(box.starts, box.stops, strict=True)
            )
            return array[tuple(map(slice, box.starts, box.stops))].reshape(box.shape)

        return read

    return {
        name: TensorData(
            Value(name, (dtypes or {}).get(name, DType(array.dtype.name)), array.shape),
            reader(array),
        )
        for name, array in arrays.items()
    }


def held(path: Path) -> Arrays:
    """The initializers of a file that onnx itself loads and checks."""
    onnx.checker.check_model(str(path), full_check=True)
    return {each.name: onh.to_array(each) for each in onnx.load(str(path)).graph.initializer}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the tests are written in many pieces."""
    monkeypatch.setattr(pieces, "PIECE", 100)


@pytest.mark.parametrize("limit", LIMITS)
def test_initializers_take_new_numbers(tmp_path: Path, limit: int) -> None:
    nodes = [node("Gemm", "x w b", "h"), node("Mul", "h two", "g"), node("MatMul", "g large", "y")]
    given = {
        "w": floats(40, 30),
        "b": floats(30),
        "two": np.array(2.0, np.float32),
        "large": floats(30, 50),
    }
    path = saved(model(nodes, {"x": [2, 40]}, "y", given), tmp_path)
    new = {"w": floats(40, 30, seed=1), "b": floats(30, seed=2)}
    target = tmp_path / "elsewhere" / "trained.onnx"
    target.parent.mkdir()
    counted: list[int] = []
    written = write_trained(path, target, trained(new), counted.append, limit)
    expected = {**given, **new}
    found = held(target)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], array) for name, array in expected.items())
    assert (written.replaced, written.added) == (2, 0)
    assert sum(counted) == written.bytes
    assert max(counted) <= 120, "a row of 30 numbers is the least that is read at a time"
    assert [each.exists() for each in written.files] == [True] * (1 if limit else 2)
    x = floats(2, 40, seed=3)
    found_y = run(target, {"x": x})["y"]
    np.testing.assert_allclose(found_y, (x @ new["w"] + new["b"]) * 2 @ given["large"], rtol=1e-4)


def test_weights_that_the_file_lacks_become_initializers(tmp_path: Path) -> None:
    proto = model([node("MatMul", "x w", "y")], {"x": [2, 3]}, "y", types={"w": [3, 4]})
    proto.ir_version = 3
    path = saved(proto, tmp_path)
    new = {"w": floats(3, 4)}
    written = write_trained(path, tmp_path / "out.onnx", trained(new))
    assert written.added == 1
    assert np.array_equal(held(tmp_path / "out.onnx")["w"], new["w"])


@pytest.mark.parametrize("limit", LIMITS)
def test_constants_in_nodes(tmp_path: Path, limit: int) -> None:
    """They take new numbers in their places."""
    fill = oh.make_tensor("value", 1, [1], [0.5])
    nodes = [
        node("Constant", "", "w", value=onh.from_array(floats(300, 70))),
        node("ConstantOfShape", "shape", "k", value=fill),
        node("MatMul", "x w", "h"),
        node("MatMul", "h k", "g"),
        node("Constant", "", "c", value=onh.from_array(floats(100, 5))),
        node("Concat", "g c", "y", axis=0),
    ]
    path = saved(model(nodes, {"x": [2, 300]}, "y", {"shape": integers(70, 5)}), tmp_path)
    parameters = {each.value.name: each.value.shape for each in read_model(path).graph.parameters}
    assert parameters == {"w": (300, 70), "k": (70, 5), "c": (100, 5)}
    new = {name: floats(*shape, seed=7) for name, shape in parameters.items()}
    write_trained(path, tmp_path / "out.onnx", trained(new), inline_limit=limit)
    assert np.array_equal(held(tmp_path / "out.onnx")["k"], new["k"])
    graph = onnx.load(str(tmp_path / "out.onnx")).graph
    assert sorted(each.op_type for each in graph.node) == [
        "Concat",
        "Constant",
        "Constant",
        "MatMul",
        "MatMul",
    ]
    constants = {
        each.output[0]: onh.to_array(each.attribute[0].t)
        for each in graph.node
        if each.op_type == "Constant"
    }
    assert np.array_equal(constants["w"], new["w"]) and np.array_equal(constants["c"], new["c"])
    assert {each.value.name for each in read_model(tmp_path / "out.onnx").graph.parameters} == {
        "w",
        "k",
        "c",
    }
    x = floats(2, 300, seed=3)
    found_y = run(tmp_path / "out.onnx", {"x": x})["y"]
    np.testing.assert_allclose(found_y[:2], x @ new["w"] @ new["k"], rtol=1e-3)


def test_an_expanded_weight_is_expanded_again(tmp_path: Path) -> None:
    row = floats(1, 5)
    nodes = [node("Add", "x w", "h"), node("MatMul", "h m", "y")]
    path = saved(
        model(nodes, {"x": [3, 5]}, "y", {"w": np.repeat(row, 3, axis=0), "m": floats(5, 5)}),
        tmp_path,
    )
    assert {each.value.name for each in read_model(path).graph.parameters} == {"w/row", "m"}
    new = floats(1, 5, seed=1)
    write_trained(path, tmp_path / "out.onnx", trained({"w/row": new, "m": floats(5, 5)}))
    assert np.array_equal(held(tmp_path / "out.onnx")["w"], np.repeat(new, 3, axis=0))


@pytest.mark.parametrize("limit", LIMITS)
def test_a_tables_folded_copy_is_trained_with_it(tmp_path: Path, limit: int) -> None:
    table = floats(60, 8)
    nodes = [node("Gather", "table x", "e"), node("Relu", "e", "h"), node("MatMul", "h val_7", "y")]
    given = {"table": table, "val_7": np.ascontiguousarray(table.T)}
    path = saved(model(nodes, {"x": (INT64, [2, 3])}, "y", given), tmp_path)
    assert [each.value.name for each in read_model(path).graph.parameters] == ["table"]
    new = floats(60, 8, seed=1)
    write_trained(path, tmp_path / "out.onnx", trained({"table": new}), inline_limit=limit)
    found = held(tmp_path / "out.onnx")
    assert np.array_equal(found["table"], new)
    assert np.array_equal(found["val_7"], new.T)


def test_data_beside_the_model_comes_along(tmp_path: Path) -> None:
    """Tensors that were not trained are copied: the exported model needs nothing of the first one's
    folder.
    """
    nodes = [node("MatMul", "x w", "h"), node("MatMul", "h v", "y")]
    given = {"w": floats(40, 30), "v": floats(30, 20)}
    path = saved(model(nodes, {"x": [2, 40]}, "y", given), tmp_path)
    proto = onnx.load(str(path))
    onnx.save(proto, str(path), save_as_external_data=True, location="model.bin", size_threshold=0)
    target = tmp_path / "out" / "model.onnx"
    target.parent.mkdir()
    new = {"w": floats(40, 30, seed=1)}
    write_trained(path, target, trained(new))
    path.unlink()
    (tmp_path / "model.bin").unlink()
    found = held(target)
    assert np.array_equal(found["w"], new["w"]) and np.array_equal(found["v"], given["v"])


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64])
def test_element_types(tmp_path: Path, dtype: DType) -> None:
    number = {DType.FLOAT16: 10, DType.BFLOAT16: 16, DType.FLOAT64: 11}[dtype]
    proto = model([node("MatMul", "x w", "y")], {"x": (number, [2, 30])}, "y")
    bits = np.random.default_rng(0).integers(0, 1 << 14, (30, 20)).astype("<u2")
    new = bits if dtype is DType.BFLOAT16 else floats(30, 20).astype(dtype.value)
    old = onnx.TensorProto(name="w", data_type=number, dims=[30, 20], raw_data=b"\0" * new.nbytes)
    proto.graph.initializer.append(old)
    path = saved(proto, tmp_path)
    write_trained(path, tmp_path / "out.onnx", trained({"w": new}, {"w": dtype}))
    (tensor,) = onnx.load(str(tmp_path / "out.onnx")).graph.initializer
    assert tensor.raw_data == new.tobytes()


def test_parameters_that_no_tensor_holds_are_refused_by_name(tmp_path: Path) -> None:
    path = saved(
        model([node("MatMul", "x w", "y")], {"x": [2, 3]}, "y", {"w": floats(3, 4)}), tmp_path
    )
    for arrays, message in (
        ({"made/up": floats(3, 4)}, "no tensor of the file holds this parameter"),
        ({"x": floats(2, 3)}, "no tensor of the file holds this parameter"),
        (
            {"w": floats(4, 3)},
            r"trained as float32\[4, 3\], but the model file stores it as float32\[3, 4\]",
        ),
        ({"w": floats(3, 4).astype(np.float64)}, "trained as float64"),
    ):
        with pytest.raises(ModelError, match=message) as caught:
            write_trained(path, tmp_path / "out.onnx", trained(arrays))
        assert repr(next(iter(arrays))) in caught.value.where
    assert list(tmp_path.iterdir()) == [path]


def test_the_models_own_files_are_not_written_over(tmp_path: Path) -> None:
    proto = model([node("MatMul", "x w", "y")], {"x": [2, 30]}, "y", {"w": floats(30, 40)})
    path = tmp_path / "model.onnx"
    onnx.save(
        proto, str(path), save_as_external_data=True, location="out.onnx.data", size_threshold=0
    )
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    for target in (path, tmp_path / "out.onnx"):
        with pytest.raises(ConfigurationError, match="belongs to the model itself"):
            write_trained(path, target, trained({"w": floats(30, 40, seed=1)}), inline_limit=0)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_nothing_is_left_of_an_export_that_fails(tmp_path: Path) -> None:
    path = saved(
        model([node("MatMul", "x w", "y")], {"x": [2, 30]}, "y", {"w": floats(30, 40)}), tmp_path
    )

    def read(box: TensorSlice) -> np.ndarray:
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigurationError, match="No space left"):
        write_trained(
            path,
            tmp_path / "out.onnx",
            {"w": TensorData(Value("w", DType.FLOAT32, (30, 40)), read)},
        )
    assert list(tmp_path.iterdir()) == [path]
