"""A rank's blocks of parameters equal the same blocks of the whole, drawn, filled or read from a
file.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.backends.torch.runtime.state.parameters import read_block
from autopipe.ir.errors import ConfigurationError, LaunchError
from autopipe.ir.graph import DType, FileSlice, Fill, Initializer, Parameter, Storage, Value
from autopipe.ir.layout import TensorSlice, full_slice

NOWHERE = Path("/nonexistent")


def parameter(dtype: str, shape: tuple[int, ...], storage: Storage, name: str = "w") -> Parameter:
    return Parameter(Value(name, DType(dtype), shape), storage)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[tuple[int, ...], TensorSlice]:
    """A shape of up to three dimensions and a block of it."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    starts = tuple(draw(st.integers(0, extent - 1)) for extent in shape)
    stops = tuple(
        draw(st.integers(start + 1, extent)) for start, extent in zip(starts, shape, strict=True)
    )
    return shape, TensorSlice(starts, stops)


def region(box: TensorSlice) -> tuple[slice, ...]:
    return tuple(slice(*each) for each in zip(box.starts, box.stops, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("scheme", ["normal", "uniform", "zeros", "ones"])
@settings(max_examples=25)
@given(blocks())
def test_drawn_blocks(scheme: str, dtype: str, block: tuple[tuple[int, ...], TensorSlice]) -> None:
    shape, box = block
    drawn = parameter(dtype, shape, Initializer(scheme, 0.5))
    every = read_block(NOWHERE, drawn, full_slice(shape), 9)
    part = read_block(NOWHERE, drawn, box, 9)
    assert every.shape == shape
    assert part.dtype is every.dtype is getattr(torch, dtype)
    assert torch.equal(part, every[region(box)])
    if scheme == "uniform":
        assert every.abs().max() <= 0.5
    if scheme in ("zeros", "ones"):
        assert bool((every == (scheme == "ones")).all())


@given(blocks())
def test_filled_blocks(block: tuple[tuple[int, ...], TensorSlice]) -> None:
    shape, box = block
    found = read_block(NOWHERE, parameter("float32", shape, Fill(1.5)), box, 0)
    assert torch.equal(found, torch.full(box.shape, 1.5))


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", "int64", "int8", "bool", "bfloat16"]
)
@pytest.mark.parametrize("external", [False, True])
@settings(max_examples=25)
@given(block=blocks(), offset=st.integers(0, 9))
def test_stored_blocks(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: str,
    external: bool,
    block: tuple[tuple[int, ...], TensorSlice],
    offset: int,
) -> None:
    shape, box = block
    folder = tmp_path_factory.mktemp("model")
    numbers = torch.arange(math.prod(shape)).reshape(shape).to(getattr(torch, dtype))
    raw = numbers.view(torch.int16).numpy() if dtype == "bfloat16" else numbers.numpy()
    name = "weights.bin" if external else "model.onnx"
    (folder / name).write_bytes(b"\xff" * offset + raw.tobytes() + b"\xff")
    storage = FileSlice(name if external else "", offset, raw.nbytes)
    found = read_block(folder / "model.onnx", parameter(dtype, shape, storage), box, 0)
    assert found.dtype is numbers.dtype
    assert torch.equal(found, numbers[region(box)])


@pytest.mark.parametrize("file", ["", "weights.bin"])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, file: str) -> None:
    model = tmp_path / "model.onnx"
    with pytest.raises(ConfigurationError, match="does not exist") as caught:
        read_block(model, parameter("float32", (4,), FileSlice(file, 0, 16)), full_slice((4,)), 0)
    assert caught.value.where == str(tmp_path / (file or model.name))


@pytest.mark.parametrize("size", [0, 15])
def test_files_that_are_too_short(tmp_path: Path, size: int) -> None:
    (tmp_path / "model.onnx").write_bytes(b"\0" * size)
    weight = parameter("float32", (4,), FileSlice("", 0, 16), "layer.weight")
    with pytest.raises(LaunchError, match=r"parameter 'layer\.weight' cannot be read"):
        read_block(tmp_path / "model.onnx", weight, full_slice((4,)), 0)


def test_numbers_are_little_endian(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(np.array([1, 2], "<f4").tobytes())
    weight = parameter("float32", (2,), FileSlice("", 0, 8))
    found = read_block(tmp_path / "model.onnx", weight, TensorSlice((1,), (2,)), 0)
    assert found.tolist() == [2.0]
