"""Files of tokens and folders of arrays, as a model's inputs take them."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autopipe.backends.torch.runtime.data.sample_source import SampleSource
from autopipe.backends.torch.runtime.data.sources import check_data, open_source
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import DType, Value
from autopipe.ir.program import InputBounds, InputRange, Output
from autopipe.ir.training import DataSettings


def index_input(
    name: str, shape: tuple[int, ...], below: int = 50, axis: int = 0, first: int = 0
) -> InputRange:
    """An input of indices below a bound, of which the loss or the table reads those from column
    `first` on.
    """
    starts = (0,) * (len(shape) - 1) + (first,)
    allowed = (InputBounds(0, below, starts, shape),)
    return InputRange(Value(name, DType.INT64, shape), axis, below, allowed=allowed)


def mask_input(name: str, shape: tuple[int, ...]) -> InputRange:
    return InputRange(Value(name, DType.INT64, shape), 0, 2)


@dataclass(frozen=True)
class Batches:
    """What sources read of a manifest: two micro-batches of two samples."""

    inputs: tuple[InputRange, ...]
    micro_batch_size: int = 2
    batch_size: int = 4
    train: bool = True
    outputs: tuple[Output, ...] = ()


TOKENS = index_input("tokens", (2, 8))
LABELS = index_input("labels", (2, 8))
GPT = Batches((TOKENS, LABELS))


def write_tokens(folder: Path, count: int = 100, dtype: str = "<u2", below: int = 50) -> Path:
    (np.random.default_rng(0).integers(0, below, count)).astype(dtype).tofile(folder / "tokens.bin")
    return folder / "tokens.bin"


def opened(manifest: Batches, path: Path, **settings: Any) -> SampleSource:
    return open_source(manifest, str(path), 0, settings=DataSettings(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<i8"])
def test_labels_are_the_tokens_moved_by_one(tmp_path: Path, dtype: str) -> None:
    path = write_tokens(tmp_path, 100, dtype)
    whole = np.fromfile(path, dtype)
    source = opened(GPT, path)
    assert np.array_equal(source.rows(TOKENS, 4, 8), whole[32:64].reshape(4, 8))
    assert np.array_equal(source.rows(LABELS, 4, 8), whole[33:65].reshape(4, 8))
    assert source.rows(TOKENS, 0, 2).dtype == np.int64
    assert [source.epoch(step) for step in range(4)] == [1, 1, 1, 2], "12 samples"


def test_the_last_sample_needs_its_label(tmp_path: Path) -> None:
    assert check_data(GPT, str(write_tokens(tmp_path, 96)), None)[0].samples == 11  # type: ignore[arg-type, union-attr]
    assert check_data(GPT, str(write_tokens(tmp_path, 97)), None)[0].samples == 12  # type: ignore[arg-type, union-attr]


def test_shapes_and_inputs_of_other_models(tmp_path: Path) -> None:
    """Labels that the graph moves itself, sequences merged into the batch or first, and what
    transformers take.
    """
    inside = index_input("labels", (2, 8), first=1)
    flat = index_input("decoder.labels", (16,))
    turned = index_input("input_ids", (8, 2), axis=1)
    mask, types, places = (
        mask_input(name, (2, 8)) for name in ("attention_mask", "token_type_ids", "position_ids")
    )
    path = write_tokens(tmp_path)
    whole = np.fromfile(path, "<u2").astype(int)
    source = opened(Batches((inside, flat, turned, mask, types, places)), path)
    assert np.array_equal(source.rows(inside, 1, 3), whole[8:24].reshape(2, 8))
    assert np.array_equal(source.rows(flat, 1, 3), whole[9:25])
    assert np.array_equal(source.rows(turned, 1, 3), whole[8:24].reshape(2, 8).T)
    assert (source.rows(mask, 0, 2) == 1).all() and not source.rows(types, 0, 2).any()
    assert source.rows(places, 0, 2).tolist() == [list(range(8))] * 2


def test_the_type_follows_from_the_vocabulary_the_numbers_or_megatrons_index(
    tmp_path: Path,
) -> None:
    large = Batches((index_input("tokens", (2, 8), 100_000),))
    write_tokens(tmp_path, 100, "<u4", 99_999)
    source, _ = check_data(large, str(tmp_path / "tokens.bin"), None)  # type: ignore[arg-type]
    assert source is not None and source.samples == 12
    write_tokens(tmp_path, 100, "<i8", 99_999)
    source, _ = check_data(large, str(tmp_path / "tokens.bin"), None)  # type: ignore[arg-type]
    assert source is not None and source.samples == 12
    path = write_tokens(tmp_path, 100, "<i4")
    (tmp_path / "tokens.idx").write_bytes(struct.pack("<9sQB", b"MMIDIDX\x00\x00", 1, 4))
    assert check_data(GPT, str(path), None)[0].samples == 12  # type: ignore[arg-type, union-attr]
    (tmp_path / "tokens.idx").write_bytes(b"something else, long enough")
    with pytest.raises(ConfigurationError, match=r"tokens\.idx is not an index of integer tokens"):
        check_data(GPT, str(path), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("manifest", "settings", "message"),
    [
        (
            GPT,
            {"sequence_length": 16},
            "data.sequence_length is 16, but a sample of 'tokens' has 8 tokens",
        ),
        (
            Batches((TOKENS, index_input("others", (2, 8)))),
            {},
            "but the model has tokens, others",
        ),
        (Batches((LABELS,)), {}, "but the model has none"),
        (
            Batches((TOKENS, index_input("labels", (2, 4)))),
            {},
            "a sample of 'labels' has 4 elements, one of 'tokens' 8",
        ),
        (
            Batches((TOKENS, InputRange(Value("picture", DType.FLOAT32, (2, 8)), 0, None))),
            {},
            "but the model has tokens, picture",
        ),
        (
            Batches((index_input("tokens", (2, 200)),)),
            {},
            "have 100 tokens, fewer than a sample of 200",
        ),
        (
            Batches((index_input("tokens", (2, 8), 49),)),
            {},
            r"'tokens' row \d+ contains 49, expected from 0 to 48",
        ),
    ],
)
def test_token_files_that_do_not_fit(
    tmp_path: Path, manifest: Batches, settings: Any, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_data(manifest, str(write_tokens(tmp_path)), None, DataSettings(**settings))  # type: ignore[arg-type]


def test_bytes_that_are_no_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokens.bin").write_bytes(b"\x01" * 33)
    with pytest.raises(ConfigurationError, match="a remainder of 1 byte for tokens of type uint16"):
        opened(GPT, tmp_path / "tokens.bin")


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.npz", "tokens.npy"])
def test_a_pointer_of_git_lfs_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    )
    with pytest.raises(ConfigurationError, match=f"{name} is a pointer of Git LFS") as caught:
        opened(GPT, tmp_path / name)
    assert caught.value.hint == "git lfs pull"


def test_a_folder_holds_a_file_for_each_input(tmp_path: Path) -> None:
    tokens = np.arange(80).reshape(10, 8) % 50
    np.save(tmp_path / "tokens.npy", tokens)
    with pytest.raises(ConfigurationError, match="lack an array for input 'labels'") as caught:
        opened(GPT, tmp_path)
    assert caught.value.hint == "the data contain tokens"
    np.save(tmp_path / "labels.npy", np.asfortranarray(tokens[::-1]))
    source = opened(GPT, tmp_path)
    assert np.array_equal(source.rows(LABELS, 1, 3), tokens[::-1][1:3])
    assert np.array_equal(
        opened(Batches((TOKENS,)), tmp_path / "tokens.npy").rows(TOKENS, 1, 3), tokens[1:3]
    )
    with pytest.raises(ConfigurationError, match="the data are one array, but the model has"):
        opened(GPT, tmp_path / "tokens.npy")
    np.save(tmp_path / "labels.npy", np.array([[{}] * 8] * 10), allow_pickle=True)
    with pytest.raises(
        ConfigurationError, match="'labels' cannot be read: the array contains Python objects"
    ):
        opened(GPT, tmp_path).rows(LABELS, 0, 1)


def test_paths_that_hold_no_data(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        opened(GPT, tmp_path / "nothing")
    (tmp_path / "notes.txt").write_text("unknown format")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(ConfigurationError, match="has an unknown format"):
            opened(GPT, path)


def test_shuffled_samples_keep_their_labels_and_name_their_row(tmp_path: Path) -> None:
    tokens = np.arange(80).reshape(10, 8) % 50
    for name in ("tokens", "labels"):
        np.save(tmp_path / f"{name}.npy", tokens)
    source = opened(GPT, tmp_path, shuffle=True)
    first = [source.rows(entry, 0, 8) for entry in GPT.inputs]
    second = source.rows(TOKENS, 10, 18)
    assert (
        np.array_equal(*first)
        and not np.array_equal(first[0], tokens[:8])
        and not np.array_equal(first[0], second)
    )
    assert {tuple(row) for row in first[0]} <= {tuple(row) for row in tokens}
    tokens[7, 3] = 50
    np.save(tmp_path / "tokens.npy", tokens)
    with pytest.raises(ConfigurationError, match="'tokens' row 7 contains 50"):
        opened(GPT, tmp_path, shuffle=True).rows(TOKENS, 0, 10)


def test_of_a_large_file_pieces_are_checked_and_the_rest_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopipe.backends.torch.runtime.data.sources._PIECE_BYTES", 80)
    monkeypatch.setattr("autopipe.backends.torch.runtime.data.sources._MAX_CHECKED_BYTES", 320)
    manifest = Batches((TOKENS,))
    tokens = np.zeros((200, 8), "<u2")
    np.save(tmp_path / "tokens.npy", tokens)
    _, said = check_data(manifest, str(tmp_path / "tokens.npy"), None)  # type: ignore[arg-type]
    assert said == "checked 'tokens': 20 of 200 samples; ranks check the others as they read them"
    for row in (0, 199):
        wrong = tokens.copy()
        wrong[row, 5] = 50
        np.save(tmp_path / "tokens.npy", wrong)
        with pytest.raises(ConfigurationError, match=f"row {row} contains 50"):
            check_data(manifest, str(tmp_path / "tokens.npy"), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "header", ["{'descr': (", "{'descr': '<i8'L '", "(" * 9000, "{[]: 0}", "1 +"]
)
def test_a_header_that_is_no_literal_is_refused(tmp_path: Path, header: str) -> None:
    text = header.encode() + b"\n"
    path = tmp_path / "tokens.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
    with pytest.raises(ConfigurationError, match=r"tokens\.npy: 'tokens' cannot be read") as caught:
        opened(Batches((TOKENS,)), path)
    assert "\n" not in caught.value.line
