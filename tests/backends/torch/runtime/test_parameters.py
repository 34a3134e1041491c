"""A rank's blocks of parameters equal the same blocks of the whole, drawn, filled or read from a file."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.backends.torch.runtime.manifest import ParameterEntry, ShardEntry, Storage
from autopipe.backends.torch.runtime.parameters import read_block
from autopipe.ir.errors import ConfigurationError, LaunchError

NOWHERE = Path("/nonexistent")


@st.composite
def blocks(draw: st.DrawFn) -> tuple[tuple[int, ...], ShardEntry]:
    """A shape of up to three dimensions and a block of it."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    starts = tuple(draw(st.integers(0, extent - 1)) for extent in shape)
    stops = tuple(draw(st.integers(start + 1, extent)) for start, extent in zip(starts, shape, strict=True))
    return shape, ShardEntry(draw(st.integers(0, 3)), starts, stops, (0,))


def region(shard: ShardEntry) -> tuple[slice, ...]:
    return tuple(slice(*each) for each in zip(shard.starts, shard.stops, strict=True))


def whole_of(shape: tuple[int, ...], shard: ShardEntry) -> ShardEntry:
    return ShardEntry(shard.parameter, (0,) * len(shape), shape, (0,))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("scheme", ["normal", "uniform", "zeros", "ones"])
@settings(max_examples=25)
@given(blocks())
def test_drawn_blocks(scheme: str, dtype: str, block: tuple[tuple[int, ...], ShardEntry]) -> None:
    shape, shard = block
    entry = ParameterEntry("w", dtype, shape, True, Storage("draw", scheme=scheme, scale=0.5))
    whole = read_block(NOWHERE, NOWHERE, entry, whole_of(shape, shard), 9)
    part = read_block(NOWHERE, NOWHERE, entry, shard, 9)
    assert whole.shape == shape
    assert part.dtype is whole.dtype is getattr(torch, dtype)
    assert torch.equal(part, whole[region(shard)])
    if scheme == "uniform":
        assert whole.abs().max() <= 0.5
    if scheme in ("zeros", "ones"):
        assert bool((whole == (scheme == "ones")).all())


@given(blocks())
def test_filled_blocks(block: tuple[tuple[int, ...], ShardEntry]) -> None:
    shape, shard = block
    entry = ParameterEntry("w", "float32", shape, True, Storage("fill", value=1.5))
    assert torch.equal(read_block(NOWHERE, NOWHERE, entry, shard, 0), torch.full(shard.shape, 1.5))


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int64", "int8", "bool", "bfloat16"])
@pytest.mark.parametrize("external", [False, True])
@settings(max_examples=25)
@given(block=blocks(), offset=st.integers(0, 9))
def test_stored_blocks(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: str,
    external: bool,
    block: tuple[tuple[int, ...], ShardEntry],
    offset: int,
) -> None:
    shape, shard = block
    folder = tmp_path_factory.mktemp("model")
    numbers = torch.arange(math.prod(shape)).reshape(shape).to(getattr(torch, dtype))
    raw = numbers.view(torch.int16).numpy() if dtype == "bfloat16" else numbers.numpy()
    name = "weights.bin" if external else "model.onnx"
    (folder / name).write_bytes(b"\xff" * offset + raw.tobytes() + b"\xff")
    storage = Storage("file", file=name if external else "", offset=offset, length=raw.nbytes)
    entry = ParameterEntry("w", dtype, shape, True, storage)
    found = read_block(folder, folder / "model.onnx", entry, shard, 0)
    assert found.dtype is numbers.dtype
    assert torch.equal(found, numbers[region(shard)])


@pytest.mark.parametrize("file", ["", "weights.bin"])
def test_a_file_that_is_not_there_is_named(tmp_path: Path, file: str) -> None:
    model = tmp_path / "model.onnx"
    entry = ParameterEntry("w", "float32", (4,), True, Storage("file", file, offset=0, length=16))
    with pytest.raises(ConfigurationError, match="is not there") as caught:
        read_block(tmp_path, model, entry, ShardEntry(0, (0,), (4,), (0,)), 0)
    assert caught.value.where == str(tmp_path / (file or model.name))


@pytest.mark.parametrize("size", [0, 15])
def test_files_that_are_too_short(tmp_path: Path, size: int) -> None:
    (tmp_path / "model.onnx").write_bytes(b"\0" * size)
    entry = ParameterEntry("layer.weight", "float32", (4,), True, Storage("file", offset=0, length=16))
    with pytest.raises(LaunchError, match=r"parameter 'layer\.weight' cannot be read"):
        read_block(tmp_path, tmp_path / "model.onnx", entry, ShardEntry(0, (0,), (4,), (0,)), 0)


def test_numbers_are_little_endian(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(np.array([1, 2], "<f4").tobytes())
    entry = ParameterEntry("w", "float32", (2,), True, Storage("file", offset=0, length=8))
    found = read_block(tmp_path, tmp_path / "model.onnx", entry, ShardEntry(0, (1,), (2,), (0,)), 0)
    assert found.tolist() == [2.0]
