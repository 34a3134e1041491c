"""Weights in every field in which ONNX stores numbers, of initializers and of Constant nodes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
import onnx.helper as oh
import onnx.numpy_helper as onh
import pytest

from autopipe.backends.torch.codegen.stage import emit_forward
from autopipe.backends.torch.runtime.state.parameters import read_block
from autopipe.ir.errors import ModelError
from autopipe.ir.layout import TensorSlice, full_slice
from autopipe.ir.problem import Mode
from autopipe.passes.frontend import Model, read_model
from autopipe.passes.frontend.protobuf_scan import GRAPH_INITIALIZER, MODEL_GRAPH, frame_payload
from autopipe.passes.weight_files import match_weights
from tests.conformance.adapter import forward_of, stage_of, to_array, to_tensor
from tests.passes.frontend.building import FLOAT, floats
from tests.passes.frontend.reference import run

Array = npt.NDArray[np.generic]
TYPES: dict[str, tuple[int, str]] = {
    "float32": (onnx.TensorProto.FLOAT, "float_data"),
    "float64": (onnx.TensorProto.DOUBLE, "double_data"),
    "float16": (onnx.TensorProto.FLOAT16, "int32_data"),
    "bfloat16": (onnx.TensorProto.BFLOAT16, "int32_data"),
    "int8": (onnx.TensorProto.INT8, "int32_data"),
    "uint8": (onnx.TensorProto.UINT8, "int32_data"),
    "int16": (onnx.TensorProto.INT16, "int32_data"),
    "int32": (onnx.TensorProto.INT32, "int32_data"),
    "bool": (onnx.TensorProto.BOOL, "int32_data"),
    "int64": (onnx.TensorProto.INT64, "int64_data"),
    "uint32": (onnx.TensorProto.UINT32, "uint64_data"),
    "uint64": (onnx.TensorProto.UINT64, "uint64_data"),
}
"""By numpy's name ONNX's number of a type, and the field of its numbers besides `raw_data`."""
COLUMNS = {"small": 2, "large": 700}


def _numbers(kind: str, columns: int) -> Array:
    dtype = np.dtype(getattr(ml_dtypes, kind) if kind == "bfloat16" else kind)
    if dtype.kind in "iub":
        return (
            np.random.default_rng(1)
            .integers(0, 2 if dtype.kind == "b" else 100, (4, columns))
            .astype(dtype)
        )
    return floats(4, columns).astype(dtype)


def _tensor(name: str, array: Array, kind: str, raw: bool) -> onnx.TensorProto:
    number, field = TYPES[kind]
    tensor = onnx.TensorProto(name=name, data_type=number, dims=array.shape)
    if raw:
        tensor.raw_data = array.tobytes()
    else:
        bits = array.view(np.uint16) if kind in ("float16", "bfloat16") else array
        getattr(tensor, field).extend(bits.reshape(-1).tolist())
    return tensor


def _file(folder: Path, kind: str, columns: int, raw: bool, in_node: bool) -> tuple[Path, Array]:
    """y = x w, where w is of type `kind` and, unless that is float32, is cast."""
    array = _numbers(kind, columns)
    held = _tensor("w", array, kind, raw)
    nodes = [
        oh.make_node("Cast", ["w"], ["c"], to=FLOAT),
        oh.make_node("MatMul", ["x", "c"], ["y"]),
    ]
    if in_node:
        nodes.insert(0, oh.make_node("Constant", [], ["w"], value=held))
    graph = oh.make_graph(
        nodes,
        "stored",
        [oh.make_tensor_value_info("x", FLOAT, [3, 4])],
        [oh.make_tensor_value_info("y", FLOAT, [3, columns])],
        [] if in_node else [held],
    )
    path = folder / "model.onnx"
    path.write_bytes(
        oh.make_model(
            graph, opset_imports=[oh.make_opsetid("", 21)], ir_version=10
        ).SerializeToString()
    )
    return path, array


def _computed(model: Model, x: Array) -> Array:
    """The output as one device computes it, which reads its weights as ranks do."""
    graph = model.graph
    held = SimpleNamespace(
        device="cpu",
        **{f"c{index}": to_tensor(each.array) for index, each in enumerate(graph.constants)},
        **{
            f"w{index}": read_block(model.path, each, full_slice(each.value.shape), 0)
            for index, each in enumerate(graph.parameters)
        },
    )
    result = forward_of(emit_forward(stage_of(graph)).text)(held, to_tensor(x))
    return to_array(result[0] if isinstance(result, tuple) else result)


@pytest.mark.parametrize("in_node", [False, True], ids=["initializer", "node"])
@pytest.mark.parametrize("raw", [True, False], ids=["raw", "listed"])
@pytest.mark.parametrize("size", COLUMNS)
@pytest.mark.parametrize("kind", TYPES)
def test_numbers_are_those_of_onnxruntime(
    tmp_path: Path, kind: str, size: str, raw: bool, in_node: bool
) -> None:
    path, _ = _file(tmp_path, kind, COLUMNS[size], raw, in_node)
    x = floats(3, 4, seed=2)
    read = read_model(path, mode=Mode.INFER)
    assert not read.warnings
    np.testing.assert_allclose(_computed(read, x), run(path, {"x": x})["y"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_a_rank_reads_its_block_of_listed_numbers(tmp_path: Path, kind: str) -> None:
    path, array = _file(tmp_path, kind, 700, raw=False, in_node=False)
    (parameter,) = read_model(path).graph.parameters
    block = read_block(path, parameter, TensorSlice((1, 300), (3, 500)), 0)
    np.testing.assert_array_equal(block.float().numpy(), array[1:3, 300:500].astype(np.float32))


@pytest.mark.parametrize("size", COLUMNS)
def test_listed_numbers_are_weights_for_another_model(tmp_path: Path, size: str) -> None:
    path, array = _file(tmp_path, "float16", COLUMNS[size], raw=False, in_node=False)
    (tmp_path / "other").mkdir()
    other, _ = _file(tmp_path / "other", "float16", COLUMNS[size], raw=True, in_node=False)
    numbers = match_weights(path, other).numbers["w"]
    np.testing.assert_array_equal(numbers.read(full_slice(array.shape)), array)


def test_listed_numbers_of_another_count_are_rejected(tmp_path: Path) -> None:
    path, _ = _file(tmp_path, "float16", 700, raw=False, in_node=False)
    proto = onnx.load(path)
    proto.graph.initializer[0].int32_data.pop()
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(
        ModelError, match="the tensor has 2799 numbers, and its shape requires 2800"
    ):
        read_model(path)


def test_numbers_that_are_not_packed_are_rejected_and_not_drawn(tmp_path: Path) -> None:
    """protobuf also allows a field of its own for each number; ONNX's schema packs them."""
    path, _ = _file(tmp_path, "float32", 2, raw=True, in_node=False)
    proto = onnx.load(path)
    (tensor,) = proto.graph.initializer
    listed = onnx.TensorProto(name="w", data_type=1, dims=[4, 2]).SerializeToString()
    listed += b"".join(b"\x25" + number.tobytes() for number in onh.to_array(tensor).reshape(-1))
    del proto.graph.initializer[:]
    graph = proto.graph.SerializeToString() + frame_payload(GRAPH_INITIALIZER, listed)
    proto.ClearField("graph")
    path.write_bytes(proto.SerializeToString() + frame_payload(MODEL_GRAPH, graph))
    with pytest.raises(ModelError, match="stores its values as a list of numbers"):
        read_model(path)
