"""Shards and manifests without torch: any block comes back from any blocks, and a changed byte is
refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
from safetensors import safe_open

from autopipe.backends.torch import checkpoint as document
from autopipe.backends.torch.checkpoint import (
    Checkpoint,
    CheckpointReader,
    StoredFile,
    StoredGenerator,
    StoredParameter,
    StoredSlice,
    StoredTensor,
    TensorContent,
    manifest_text,
    numpy_type,
    read_checkpoint,
    verify_file,
    write_shard,
)
from autopipe.ir.errors import ConfigurationError, LaunchError
from autopipe.ir.layout import TensorSlice

HOSTILE = "__metadata__/../'\"\n"


def boxes_of(shape: tuple[int, ...], random: Random) -> list[TensorSlice]:
    """Blocks that make up a tensor, cut at random."""
    found = [TensorSlice((0,) * len(shape), shape)]
    for _ in range(5):
        box = random.choice(found)
        cuts = [(axis, at) for axis, extent in enumerate(box.shape) for at in range(1, extent)]
        if cuts:
            axis, at = random.choice(cuts)
            middle = box.starts[axis] + at
            found.remove(box)
            found.append(
                TensorSlice(box.starts, (*box.stops[:axis], middle, *box.stops[axis + 1 :]))
            )
            found.append(
                TensorSlice((*box.starts[:axis], middle, *box.starts[axis + 1 :]), box.stops)
            )
    return found


def stored(
    folder: Path, dtype: str, shape: tuple[int, ...], random: Random
) -> tuple[np.ndarray, Checkpoint]:
    """A tensor of random bytes in blocks, spread over two files, and the manifest of them."""
    generator = np.random.default_rng(random.randrange(1000))
    size = numpy_type(dtype).itemsize
    data = (
        generator.integers(0, 2, (*shape, size), np.uint8)
        .reshape(-1)
        .view(numpy_type(dtype))
        .reshape(shape)
    )
    blocks: list[tuple[TensorSlice, int]] = [
        (box, random.randrange(2)) for box in boxes_of(shape, random)
    ]
    files = []
    places = []
    for number in range(2):
        contents = [TensorContent("random", "uint8", (3,), memoryview(b"abc"))]
        for index, (box, home) in enumerate(blocks):
            if home == number:
                region = tuple(slice(*each) for each in zip(box.starts, box.stops, strict=True))
                part = np.ascontiguousarray(data[region]).reshape(-1).view(np.uint8)
                contents.append(TensorContent(f"b{index}", dtype, box.shape, memoryview(part)))
        file, offsets = write_shard(folder / f"rank_{number}.safetensors", contents)
        files.append(file)
        places.append(offsets)
    tensor = StoredTensor(
        dtype,
        shape,
        tuple(
            StoredSlice(box, home, places[home][f"b{i}"], f"b{i}")
            for i, (box, home) in enumerate(blocks)
        ),
    )
    state = StoredTensor(
        "uint8", (3,), (StoredSlice(TensorSlice((0,), (3,)), 1, places[1]["random"], "random"),)
    )
    parameter = StoredParameter(HOSTILE, True, tensor, (("exp_avg", tensor),), (("step", 3.0),))
    found = Checkpoint("m.onnx", "digest", "plan", 2, 5, 40, 7, {"name": "adamw", "lr": 0.1}, tuple(files),
                       (parameter,), (StoredGenerator(1, "cpu", state),))  # fmt: skip
    (folder / "manifest.json").write_text(manifest_text(found), encoding="utf-8")
    return data, found


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float64", "int8", "bool", "complex64", "complex128"]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (4, 6, 3)])
def test_any_block_comes_back(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    random = Random(f"{dtype}{shape}")
    data, written = stored(tmp_path, dtype, shape, random)
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint == written
    parameter = checkpoint.parameter(HOSTILE)
    assert parameter is not None and checkpoint.parameter("other") is None
    reader = CheckpointReader(tmp_path, checkpoint)
    assert reader.read(parameter.value).tobytes() == data.tobytes()
    assert reader.read(checkpoint.random[0].state).tobytes() == b"abc"
    for box in boxes_of(shape, random):
        region = tuple(slice(*each) for each in zip(box.starts, box.stops, strict=True))
        assert reader.read(parameter.value, box).tobytes() == data[region].tobytes()
    for file in checkpoint.files:
        verify_file(tmp_path, file)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_files_are_what_safetensors_reads(tmp_path: Path, dtype: str) -> None:
    import torch

    numbers = torch.arange(6).reshape(2, 3).to(getattr(torch, dtype))
    contents = [
        TensorContent("three", "uint8", (3,), memoryview(b"abc")),
        TensorContent(
            "w", dtype, (2, 3), memoryview(numbers.view(torch.uint8).numpy().reshape(-1))
        ),
    ]
    file, _ = write_shard(tmp_path / "rank_00000.safetensors", contents)
    assert file.size == (tmp_path / file.name).stat().st_size
    with safe_open(tmp_path / file.name, "pt") as opened:
        assert set(opened.keys()) == {"three", "w"}
        assert torch.equal(opened.get_tensor("w"), numbers)


def test_only_the_blocks_that_are_needed_are_read(tmp_path: Path) -> None:
    contents = [
        TensorContent(f"b{row}", "float32", (1, 2), memoryview(np.full(2, row, "<f4")).cast("B"))
        for row in range(4)
    ]
    file, offsets = write_shard(tmp_path / "rank_00000.safetensors", contents[:3])
    rows = [
        StoredSlice(TensorSlice((row, 0), (row + 1, 2)), 0, offsets[f"b{row}"], f"b{row}")
        for row in range(3)
    ]
    elsewhere = StoredSlice(TensorSlice((3, 0), (4, 2)), 1, 0, "b3")
    gone = StoredFile("rank_00001.safetensors", 0, "")
    tensor = StoredTensor("float32", (4, 2), (*rows, elsewhere))
    checkpoint = Checkpoint("", "", "", 2, 0, 0, 0, {}, (file, gone), (), ())
    assert CheckpointReader(tmp_path, checkpoint).read(
        tensor, TensorSlice((1, 1), (3, 2))
    ).tolist() == [
        [1.0],
        [2.0],
    ]
    with pytest.raises(LaunchError, match="cannot be read"):
        CheckpointReader(tmp_path, checkpoint).read(tensor, TensorSlice((1, 1), (4, 2)))
    with pytest.raises(LaunchError, match="lacks 2 of 4 elements"):
        CheckpointReader(tmp_path, checkpoint).read(
            StoredTensor("float32", (4, 2), tuple(rows)), TensorSlice((2, 0), (4, 2))
        )


def test_every_flipped_byte_is_refused(tmp_path: Path) -> None:
    _, checkpoint = stored(tmp_path, "float32", (2, 3), Random(1))
    name = checkpoint.files[0].name
    for path in (tmp_path / "manifest.json", tmp_path / name):
        whole = path.read_bytes()
        for position in range(0, len(whole), 3):
            path.write_bytes(
                whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :]
            )
            with pytest.raises(LaunchError, match=r"damaged|format") as caught:
                for file in read_checkpoint(tmp_path).files:
                    verify_file(tmp_path, file)
            assert "remove" in caught.value.hint
        path.write_bytes(whole)


def test_a_short_or_missing_file_is_refused(tmp_path: Path) -> None:
    _, checkpoint = stored(tmp_path, "float32", (2, 3), Random(1))
    path = tmp_path / checkpoint.files[0].name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(LaunchError, match="bytes, not"):
        verify_file(tmp_path, checkpoint.files[0])
    path.unlink()
    with pytest.raises(LaunchError, match="No such file"):
        verify_file(tmp_path, checkpoint.files[0])


@pytest.mark.parametrize("change", ["..", "a/b", "/etc/passwd"])
def test_files_elsewhere_are_refused(tmp_path: Path, change: str) -> None:
    _, checkpoint = stored(tmp_path, "float32", (2,), Random(1))
    form = document.manifest_document(checkpoint)
    form["files"][0]["name"] = change
    with pytest.raises(
        ConfigurationError, match=r"files\[0\]\.name is .*expected a file of the checkpoint"
    ):
        document.parse_manifest(json.loads(json.dumps(form)))
