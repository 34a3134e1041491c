"""The scanner of protobuf framing, against the parser that onnx uses."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.numpy_helper as onh
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.ir.errors import ModelError
from autopipe.passes.frontend.protobuf_scan import LARGE_FLOATS, strip_weights
from tests.passes.frontend.building import floats, model, node

KINDS = ("float32", "float64", "float16", "int64")


@given(st.lists(st.tuples(st.integers(1, 600), st.sampled_from(KINDS)), max_size=6))
def test_slices_hold_the_numbers_and_the_rest_is_unchanged(tensors: list[tuple[int, str]]) -> None:
    random = np.random.default_rng(0)
    held = {
        f"w{i}": random.standard_normal(size).astype(kind) for i, (size, kind) in enumerate(tensors)
    }
    data = model([node("Neg", "x", "y")], {"x": [2]}, "y", held).SerializeToString()
    stripped, slices = strip_weights(memoryview(data))
    for name, array in held.items():
        if array.dtype.kind == "f":
            place = slices[name]
            assert data[place.offset : place.offset + place.length] == array.tobytes()
        else:
            assert name not in slices
    parsed = onnx.ModelProto.FromString(stripped)
    original = onnx.ModelProto.FromString(data)
    for tensor, whole in zip(parsed.graph.initializer, original.graph.initializer, strict=True):
        if len(whole.raw_data) >= LARGE_FLOATS and whole.data_type != onnx.TensorProto.INT64:
            assert not tensor.raw_data
            whole.ClearField("raw_data")
    assert parsed == original


def test_constants_of_nodes_are_found_by_what_they_write() -> None:
    array = floats(40, 40)
    constant = onnx.helper.make_node("Constant", [], ["w"], value=onh.from_array(array))
    data = model([constant, node("MatMul", "x w", "y")], {"x": [2, 40]}, "y").SerializeToString()
    stripped, slices = strip_weights(memoryview(data))
    place = slices["w"]
    assert data[place.offset : place.offset + place.length] == array.tobytes()
    assert len(stripped) < 500


def test_unknown_fields_are_kept() -> None:
    data = model([node("Neg", "x", "y")], {"x": [2]}, "y").SerializeToString() + b"\xfa\x3f\x03abc"
    assert strip_weights(memoryview(data))[0] == data


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_or_copied(data: bytes) -> None:
    try:
        stripped, slices = strip_weights(memoryview(data))
    except ModelError as error:
        assert "not an ONNX model" in error.message
    else:
        assert not slices and len(stripped) <= len(data) + 10


@pytest.mark.parametrize("data", [b"\xff" * 11, b"\x3a\xff\xff\xff\xff\x0f", b"\x3b", b"\x00\x01"])
def test_broken_framing(data: bytes) -> None:
    with pytest.raises(ModelError, match="not an ONNX model"):
        strip_weights(memoryview(data))
