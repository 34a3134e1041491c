"""Where samples come from: every rank reads the same ones, whichever blocks it asks for."""

from __future__ import annotations

import dataclasses
import sys
import tracemalloc
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.backends.torch.runtime.data.sample_order import RunProgress
from autopipe.backends.torch.runtime.data.sources import (
    check_data,
    open_source,
    read_block,
    read_filled_block,
    rows_with_filler,
)
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import DType, Value
from autopipe.ir.problem import AVERAGED_LOSS, LossDivision
from autopipe.ir.program import InputBounds, InputRange, Output
from autopipe.ir.training import DataSettings


def input_range(
    name: str, dtype: str, shape: tuple[int, ...], *more: Any, **bounds: Any
) -> InputRange:
    return InputRange(Value(name, DType(dtype), shape), *more, **bounds)


@dataclass(frozen=True)
class Batches:
    """What sources read of a manifest: three micro-batches of two samples."""

    inputs: tuple[InputRange, ...] = (
        input_range("ids", "int64", (2, 3), 0, 7),
        input_range("picture", "float32", (3, 2, 2), 1, None),
        input_range("rows", "float32", (6, 2), 0, None),
        input_range("table", "float32", (3, 2), None, None),
        input_range("mask", "bool", (2,), 0, 2),
    )
    """`rows` has three rows a sample: a sequence merged into the batch."""
    micro_batches: int = 3
    micro_batch_size: int = 2
    train: bool = True
    outputs: tuple[Output, ...] = (Output(Value("mean", DType.FLOAT32, ()), None, ()),)
    loss_division: LossDivision = AVERAGED_LOSS

    @property
    def batch_size(self) -> int:
        return self.micro_batches * self.micro_batch_size


MANIFEST = Batches()
INFERENCE = Batches(train=False)
IDS, PICTURE, ROWS, TABLE, MASK = MANIFEST.inputs


def arrays(samples: int) -> dict[str, np.ndarray]:
    """Numbers for `samples` samples, all different."""
    found = {}
    for entry in MANIFEST.inputs:
        shape = list(entry.value.shape)
        if entry.batch_axis is not None:
            shape[entry.batch_axis] = shape[entry.batch_axis] // 2 * samples
        found[entry.value.name] = (
            np.arange(np.prod(shape)).reshape(shape).astype(entry.value.dtype.value)
        )
    return found


@pytest.fixture(params=["random", "stored", "compressed", "function"])
def data(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str | None:
    """The same kind of data by every way."""
    if request.param == "random":
        return None
    if request.param == "function":
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "my_batches", raising=False)
        (tmp_path / "my_batches.py").write_text(FUNCTION, encoding="utf-8")
        np.savez(tmp_path / "all.npz", **arrays(12))
        monkeypatch.setenv("ALL", str(tmp_path / "all.npz"))
        return "my_batches:batches"
    save = np.savez if request.param == "stored" else np.savez_compressed
    save(tmp_path / "data.npz", **arrays(12))  # type: ignore[arg-type]
    return str(tmp_path / "data.npz")


FUNCTION = """
import os

import numpy as np


def batches():
    whole = dict(np.load(os.environ["ALL"]))
    for step in range(2):
        yield {
            "ids": whole["ids"][6 * step : 6 * step + 6],
            "picture": whole["picture"][:, 6 * step : 6 * step + 6],
            "rows": whole["rows"][18 * step : 18 * step + 18],
            "table": whole["table"],
            "mask": whole["mask"][6 * step : 6 * step + 6],
        }
"""


@pytest.mark.parametrize("entry", MANIFEST.inputs, ids=lambda entry: entry.value.name)
def test_blocks_are_parts_of_the_micro_batch(data: str | None, entry: InputRange) -> None:
    """A rank that asks for a block alone, with a source of its own, gets that part of what others
    read whole.
    """
    reading_all = open_source(MANIFEST, data, 3)
    everything = tuple((0, extent) for extent in entry.value.shape)
    for sample in range(0, 12, 2):
        whole = read_block(reading_all, MANIFEST, entry, sample, everything)
        assert whole.shape == entry.value.shape
        assert whole.dtype == np.dtype(entry.value.dtype.value)
        for axis, extent in enumerate(entry.value.shape):
            for start in range(extent):
                box = (*everything[:axis], (start, start + 1), *everything[axis + 1 :])
                part = read_block(open_source(MANIFEST, data, 3), MANIFEST, entry, sample, box)
                assert np.array_equal(part, np.take(whole, [start], axis))


@pytest.mark.parametrize("entry", MANIFEST.inputs, ids=lambda entry: entry.value.name)
def test_files_are_read_sample_by_sample_and_filled_up(tmp_path: Path, entry: InputRange) -> None:
    np.savez(tmp_path / "data.npz", **arrays(5))
    source = open_source(INFERENCE, str(tmp_path / "data.npz"), 0)
    whole = arrays(5)[entry.value.name]
    found = rows_with_filler(source, INFERENCE, entry, 0, 3, 6)  # type: ignore[arg-type]
    if entry.batch_axis is None:
        assert np.array_equal(found, whole)
        return
    samples = np.split(whole, 5, entry.batch_axis)
    assert np.array_equal(
        found, np.concatenate([samples[index] for index in (3, 4, 0)], entry.batch_axis)
    )


def test_an_epoch_of_a_file_in_training_is_its_whole_batches(tmp_path: Path) -> None:
    """Of 20 samples 18, which are 3 batches; inputs of any number of rows a sample keep
    together.
    """
    np.savez(tmp_path / "data.npz", **arrays(20))
    source = open_source(MANIFEST, str(tmp_path / "data.npz"), 0)
    starts = [source.first_sample(step) for step in range(7)]
    assert starts == [0, 6, 12, 20, 26, 32, 40]
    assert [source.epoch(step) for step in range(7)] == [1, 1, 1, 2, 2, 2, 3]
    assert all(source.sample_count(step) == 6 for step in range(7))
    assert source.skipped_samples == 2
    for entry in (IDS, PICTURE, ROWS):
        assert np.array_equal(
            source.rows(entry, starts[3], starts[3] + 6), source.rows(entry, 0, 6)
        )


def test_an_epoch_that_was_begun_with_other_batches_goes_on(tmp_path: Path) -> None:
    """After four samples there are two batches of six left of 20, and then a new epoch."""
    np.savez(tmp_path / "data.npz", **arrays(20))
    source = open_source(MANIFEST, str(tmp_path / "data.npz"), 0, RunProgress(1, 4))
    assert [source.first_sample(step) for step in range(1, 6)] == [4, 10, 20, 26, 32]
    late = open_source(MANIFEST, str(tmp_path / "data.npz"), 0, RunProgress(4, 16))
    assert [late.first_sample(step) for step in range(4, 7)] == [20, 26, 32]


def test_a_file_in_inference_ends(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **arrays(20))
    source, _ = check_data(INFERENCE, str(tmp_path / "data.npz"), None)
    assert source is not None and source.steps_until_end == 4
    assert [source.sample_count(step) for step in range(6)] == [6, 6, 6, 2, 0, 0]
    (said,) = source.notes(9)
    assert "20 samples are 4 batches of 6, the last of 2 ('mean': the last value also" in said
    assert said.endswith("; it ends before step 4 of 9")
    assert source.notes(3) == []


def test_arrays_of_unequal_length_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **(arrays(12) | {"ids": arrays(13)["ids"]}))
    for manifest in (MANIFEST, INFERENCE):
        with pytest.raises(
            ConfigurationError,
            match="differ in the number of samples: 'ids' 13, 'picture' 12, 'rows' 12",
        ):
            open_source(manifest, str(tmp_path / "data.npz"), 0)
    np.savez(tmp_path / "data.npz", **(arrays(12) | {"rows": np.zeros((37, 2))}))
    with pytest.raises(ConfigurationError, match="'rows' has 37 rows, expected a multiple"):
        open_source(MANIFEST, str(tmp_path / "data.npz"), 0)


def test_training_needs_a_whole_batch(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **arrays(5))
    with pytest.raises(ConfigurationError, match="have 5 samples, fewer than a batch of 6"):
        open_source(MANIFEST, str(tmp_path / "data.npz"), 0)


BOUNDED = input_range(
    "ids",
    "int64",
    (2, 3),
    0,
    7,
    allowed=(InputBounds(0, 7, (0, 0), (2, 1)), InputBounds(-9, 9, (0, 1), (2, 3))),
)
LABELS = input_range(
    "labels", "int64", (2,), 0, 5, allowed=(InputBounds(0, 5, (0,), (2,)),), ignored=-100
)


@pytest.mark.parametrize(
    ("name", "place", "number", "message"),
    [
        ("ids", (17, 0), 7, "'ids' row 17 contains 7, expected from 0 to 6"),
        ("ids", (23, 0), -1, "'ids' row 23 contains -1, expected from 0 to 6"),
        ("ids", (4, 2), 9, "'ids' row 4 contains 9, expected from -9 to 8"),
        ("labels", (11,), 5, "'labels' row 11 contains 5, expected from 0 to 4, or -100"),
        ("ids", (4, 2), 8, ""),
        ("ids", (4, 2), -9, ""),
        ("labels", (11,), -100, ""),
    ],
)
@pytest.mark.parametrize("dtype", ["int64", "int32", "int16"])
@pytest.mark.parametrize("compressed", [False, True])
def test_numbers_out_of_range_are_found_by_row(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    place: tuple[int, ...],
    number: int,
    message: str,
    dtype: str,
    compressed: bool,
) -> None:
    """In pieces of a few rows, of any type; each part of an input has its own bounds."""
    manifest = Batches(inputs=(BOUNDED, LABELS))
    given = {"ids": np.ones((24, 3), dtype), "labels": np.zeros(24, dtype)}
    given[name][place] = number
    path = tmp_path / "data.npz"
    (np.savez_compressed if compressed else np.savez)(path, **given)  # type: ignore[arg-type]
    monkeypatch.setattr("autopipe.backends.torch.runtime.data.sources._PIECE_BYTES", 200)
    if not message:
        check_data(manifest, str(path), None)
        return
    with pytest.raises(ConfigurationError, match=message) as caught:
        check_data(manifest, str(path), None)
    assert caught.value.where == str(path)
    step = place[0] // 6
    check_data(manifest, str(path), step)
    entry = BOUNDED if name == "ids" else LABELS
    with pytest.raises(ConfigurationError, match=message):
        open_source(manifest, str(path), 0).rows(entry, 6 * step, 6 * step + 6)


@pytest.mark.parametrize(("dtype", "most"), [("int64", 1 << 20), ("int32", 1 << 26)])
def test_large_files_are_looked_at_where_they_lie(tmp_path: Path, dtype: str, most: int) -> None:
    """Indices of 96 MiB take none, or a piece's where they have another type, and are looked at to
    the last.
    """
    rows = (96 << 20) // 3 // np.dtype(dtype).itemsize
    given = np.zeros((rows, 3), dtype)
    given[-1] = 8
    np.savez(tmp_path / "data.npz", ids=given)
    tracemalloc.start()
    with pytest.raises(ConfigurationError, match=f"row {rows - 1:,} contains 8"):
        check_data(
            Batches(inputs=(dataclasses.replace(BOUNDED, allowed=BOUNDED.allowed[:1]),)),
            str(tmp_path / "data.npz"),
            None,
        )
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < most + (1 << 24)


def test_random_numbers_cover_the_table_of_each_column() -> None:
    """Each column of a recommender's input has a table of its own; a label may begin above 0."""
    bounds = (
        InputBounds(-9, 2, (0, 0), (2, 1)),
        InputBounds(10, 1000, (0, 1), (2, 2)),
        InputBounds(-5, -2, (0, 2), (2, 3)),
    )
    source = open_source(
        Batches(inputs=(input_range("ids", "int64", (2, 3), 0, 2, drawn=bounds),)), None, 0
    )
    found = source.rows(input_range("ids", "int64", (2, 3), 0, 2, drawn=bounds), 0, 4000)
    assert set(found[:, 0]) == {0, 1}
    assert found[:, 1].min() < 20 and found[:, 1].max() > 990 and found[:, 1].min() >= 10
    assert set(found[:, 2]) == {-5, -4, -3}


@pytest.mark.parametrize("below", [None, 5])
@pytest.mark.parametrize("drawn", [(), (InputBounds(2, 4, (), ()),)])
def test_random_data_of_an_input_that_is_one_number(
    below: int | None, drawn: tuple[InputBounds, ...]
) -> None:
    entry = input_range("scale", "float32", (), None, below, drawn=drawn)
    found = open_source(Batches(inputs=(entry,)), None, 0).rows(entry, 0, 0)
    assert (found.shape, found.dtype) == ((), np.float32)
    assert not drawn or found.item() in {2, 3}


@given(st.integers(0, 40), st.integers(1, 10))
def test_random_samples_do_not_depend_on_how_they_are_grouped(start: int, count: int) -> None:
    source = open_source(MANIFEST, None, 1)
    for entry in (IDS, PICTURE, ROWS):
        assert entry.batch_axis is not None
        together = source.rows(entry, start, start + count)
        single = [source.rows(entry, index, index + 1) for index in range(start, start + count)]
        assert np.array_equal(together, np.concatenate(single, entry.batch_axis))


def test_random_numbers_keep_to_their_ranges() -> None:
    source = open_source(MANIFEST, None, 1)
    assert set(np.unique(source.rows(IDS, 0, 200))) == set(range(7))
    assert set(np.unique(source.rows(MASK, 0, 200))) == {False, True}
    assert abs(source.rows(PICTURE, 0, 500).std() - 1) < 0.1


def test_random_inputs_differ_from_one_another_and_by_seed() -> None:
    first, second = (open_source(MANIFEST, None, seed) for seed in (1, 2))
    assert not np.array_equal(first.rows(ROWS, 0, 2), second.rows(ROWS, 0, 2))
    assert not np.array_equal(
        first.rows(ROWS, 0, 2).ravel()[:4], first.rows(PICTURE, 0, 2).ravel()[:4]
    )


def test_values_without_samples_follow_the_steps_of_a_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that reads nothing else must not stay at the first batch."""
    monkeypatch.syspath_prepend(str(tmp_path))
    lines = ["import numpy as np", "def batches():", "    for step in range(3):"]
    lines.append("        yield {'table': np.full((3, 2), step)}")
    (tmp_path / "tables_of_steps.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    source = open_source(MANIFEST, "tables_of_steps:batches", 0)
    found = [
        read_block(source, MANIFEST, TABLE, sample, ((0, 1), (0, 1))).item()
        for sample in (0, 2, 6, 16)
    ]
    assert found == [0, 0, 1, 2]


def test_after_other_batches_a_function_goes_on_at_the_step_and_a_file_at_the_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps of four samples each, and now six a step."""
    monkeypatch.syspath_prepend(str(tmp_path))
    lines = ["import numpy as np", "def batches():", "    for step in range(9):"]
    lines.append("        yield {'ids': np.arange(18).reshape(6, 3) + 100 * step}")
    (tmp_path / "later_batches.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    source = open_source(MANIFEST, "later_batches:batches", 0, RunProgress(3, 12))
    found = [source.rows(IDS, sample, sample + 2)[:, 0].tolist() for sample in (12, 14, 16, 18, 28)]
    assert found == [[300, 303], [306, 309], [312, 315], [400, 403], [512, 515]]
    np.savez(tmp_path / "data.npz", **arrays(40))
    stored = open_source(MANIFEST, str(tmp_path / "data.npz"), 0, RunProgress(3, 12))
    assert stored.rows(IDS, 12, 13).tolist() == [[36, 37, 38]]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((6, 4), np.int64), r"'ids' has shape \[6, 4\], expected \[samples, 3\]"),
        (np.zeros(6, np.int64), r"'ids' has shape \[6\], expected \[samples, 3\]"),
        (np.zeros((0, 3), np.int64), "'ids' contains 0 samples"),
        (np.full((6, 3), 0.5), "'ids' is of type float64, expected int64"),
        (np.full((6, 3), 5, np.float16), "'ids' is of type float16, expected int64"),
        (np.full((6, 3), 2**63, np.uint64), "'ids' contains numbers that int64 cannot"),
        (np.full((6, 3), "a"), "'ids' is of type <U1, expected int64"),
        (np.full((6, 3), 1j), "'ids' is of type complex128, expected int64"),
    ],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_arrays_that_do_not_fit(
    tmp_path: Path, array: np.ndarray, message: str, compressed: bool
) -> None:
    path = tmp_path / "data.npz"
    save = np.savez_compressed if compressed else np.savez
    save(path, **(arrays(6) | {"ids": array}))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=message) as caught:
        check_data(MANIFEST, str(path), None)
    assert str(path) in str(caught.value)


def test_float_ids_name_the_file_and_how_to_save_them(tmp_path: Path) -> None:
    path = tmp_path / "data.npz"
    np.savez(path, **(arrays(6) | {"ids": np.ones((6, 3), np.float32)}))
    with pytest.raises(ConfigurationError) as caught:
        check_data(MANIFEST, str(path), None)
    error = caught.value
    assert error.where == str(path)
    assert error.message == "array 'ids' is of type float32, expected int64"
    assert error.hint == "save the array as int64: ids.astype('int64')"


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (1.5, "'ids' row 5 contains 1.5, expected an integer from 0 to 9"),
        (10.0, "'ids' row 5 contains 10, expected an integer from 0 to 9"),
        (np.nan, "'ids' row 5 contains nan, expected an integer from 0 to 9"),
        (9.0, ""),
    ],
)
def test_ids_that_a_model_declares_floating_point_are_integers(
    tmp_path: Path, number: float, message: str
) -> None:
    allowed = (InputBounds(0, 10, (0, 0), (2, 3)),)
    manifest = Batches(inputs=(input_range("ids", "float32", (2, 3), 0, None, allowed=allowed),))
    ids = np.ones((6, 3), np.float32)
    ids[5, 1] = number
    np.savez(tmp_path / "data.npz", ids=ids)
    if not message:
        check_data(manifest, str(tmp_path / "data.npz"), None)  # type: ignore[arg-type]
        return
    with pytest.raises(ConfigurationError, match=message):
        check_data(manifest, str(tmp_path / "data.npz"), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("mask", [np.uint8, np.float32])
def test_integers_of_other_types_are_taken(tmp_path: Path, mask: type) -> None:
    np.savez(
        tmp_path / "data.npz",
        **(arrays(6) | {"ids": np.full((6, 3), 5, np.uint16), "mask": np.ones(6, mask)}),
    )
    source = open_source(MANIFEST, str(tmp_path / "data.npz"), 0)
    assert source.rows(IDS, 0, 2).tolist() == [[5] * 3] * 2
    assert source.rows(MASK, 0, 2).tolist() == [True, True]


def test_columns_first(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "data.npz",
        **{name: np.asfortranarray(array) for name, array in arrays(6).items()},
    )
    source = open_source(MANIFEST, str(tmp_path / "data.npz"), 0)
    assert np.array_equal(source.rows(PICTURE, 2, 4), arrays(6)["picture"][:, 2:4])


def test_objects_are_not_unpickled(tmp_path: Path) -> None:
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "data.npz", **(arrays(6) | {"ids": np.array([[{}] * 3] * 6)}))  # type: ignore[operator]
        with pytest.raises(ConfigurationError, match="'ids' cannot be read"):
            open_source(MANIFEST, str(tmp_path / "data.npz"), 0).rows(IDS, 0, 2)


@pytest.mark.parametrize("text", [b"", b"PK\x03\x04 not really", b"numbers"])
def test_files_that_are_no_archives(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "data.npz").write_bytes(text)
    with pytest.raises(ConfigurationError, match="data cannot be read"):
        open_source(MANIFEST, str(tmp_path / "data.npz"), 0)


@pytest.mark.parametrize("compressed", [False, True])
def test_damaged_members(tmp_path: Path, compressed: bool) -> None:
    path = tmp_path / "data.npz"
    method = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", method) as archive:
        for entry in MANIFEST.inputs:
            archive.writestr(f"{entry.value.name}.npy", b"\x93NUMPY\x01\x00 short")
    with pytest.raises(ConfigurationError, match="'ids' cannot be read"):
        open_source(MANIFEST, str(path), 0).rows(IDS, 0, 2)


def test_missing_files_arrays_and_functions(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="data cannot be read"):
        open_source(MANIFEST, str(tmp_path / "none.npz"), 0)
    np.savez(tmp_path / "data.npz", other=np.zeros(3))
    with pytest.raises(ConfigurationError, match="lack an array for input 'ids'") as caught:
        open_source(MANIFEST, str(tmp_path / "data.npz"), 0)
    assert caught.value.hint == "the data contain other"
    for name in ("nowhere", "nowhere:batches", "os:batches"):
        with pytest.raises(ConfigurationError, match=name):
            open_source(MANIFEST, name, 0)


def spelt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, *sizes: int) -> str:
    """A function that gives batches of `ids` of these sizes, numbered from 0."""
    monkeypatch.syspath_prepend(str(tmp_path))
    lines = [
        "import numpy as np",
        "def batches():",
        f"    for step, size in enumerate({list(sizes)}):",
    ]
    lines.append("        yield {'ids': np.full((size, 3), step)}")
    (tmp_path / f"{name}.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"{name}:batches"


def test_functions_that_end_begin_again_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch that is not whole is left out."""
    source = open_source(MANIFEST, spelt(tmp_path, monkeypatch, "two_and_a_half", 6, 6, 3), 0)
    assert [source.rows(IDS, 6 * step, 6 * step + 6)[0, 0] for step in range(3)] == [0, 1, 0]
    assert (source.epoch(2), source.skipped_samples) == (2, 3)


def test_functions_that_end_end_inference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(INFERENCE, spelt(tmp_path, monkeypatch, "one_and_a_half", 6, 3), 0)
    assert [source.sample_count(0), source.sample_count(1)] == [6, 3]
    assert source.rows(IDS, 6, 9).tolist() == [[1] * 3] * 3
    assert not source.sample_count(2)


def test_functions_that_give_too_little_or_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = {
        (5,): "epoch 1 contains less than a batch of 6 samples",
        (5, 6): "batch 0 has 5 samples, not 6, and is not the last",
        (7,): "batch 0 contains 7 samples, expected 6",
    }
    for number, (sizes, message) in enumerate(cases.items()):
        source = open_source(
            MANIFEST, spelt(tmp_path, monkeypatch, f"odd_batches{number}", *sizes), 0
        )
        with pytest.raises(ConfigurationError, match=message):
            source.rows(IDS, 0, 2)
    source = open_source(MANIFEST, spelt(tmp_path, monkeypatch, "ids_alone", 6), 0)
    with pytest.raises(ConfigurationError, match="a batch of the data function lacks input 'rows'"):
        source.rows(ROWS, 0, 2)


def test_a_module_of_the_current_folder_is_found_with_what_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_batches.py").write_text("ROWS = 3\n")
    (tmp_path / "this.py").write_text("raise SystemExit('taken for a module of Python')\n")
    text = "import beside_batches, this\nbatches = lambda: iter([beside_batches.ROWS])\n"
    (tmp_path / "batches_here.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    open_source(MANIFEST, "batches_here:batches", 0)
    assert sys.modules["batches_here"].__file__ == str(tmp_path / "batches_here.py")
    assert sys.path[-1] == str(tmp_path) and sys.path.count(str(tmp_path)) == 1


def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> str:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / f"{name}.py").write_text(f"import numpy as np\n{text}", encoding="utf-8")
    return f"{name}:batches"


def test_a_function_of_the_step_gives_any_step_and_is_not_asked_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "asked = []\ndef batches(step, batch_size, seed):\n    asked.append(step)\n"
    text += (
        "    return None if step == 9 else {'ids': np.full((batch_size - (step == 8), 3), step + "
        "seed)}\n"
    )
    name = written(tmp_path, monkeypatch, "of_the_step", text)
    source = open_source(MANIFEST, name, 40, RunProgress(5, 30))
    assert [source.rows(IDS, sample, sample + 2)[0, 0] for sample in (30, 34, 42)] == [45, 45, 47]
    assert sys.modules["of_the_step"].asked == [5, 7]
    inference = open_source(INFERENCE, name, 40, RunProgress(7, 42))
    assert [inference.sample_count(step) for step in (7, 8, 9)] == [6, 5, 0]
    with pytest.raises(ConfigurationError, match="the data function has no batch"):
        open_source(MANIFEST, name, 0, RunProgress(9, 54)).rows(IDS, 54, 55)


def test_an_iterator_may_be_made_for_a_batch_size_and_a_seed_and_end_with_its_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def batches(seed, batch_size=2):\n    for size in (batch_size, batch_size, 4):\n"
    text += "        yield {'ids': np.full((size, 3), seed)}\n"
    name = written(tmp_path, monkeypatch, "seeded", text)
    for last_batch, counts in (("drop", [6, 6, 6, 6, 0]), ("pad", [6, 6, 4, 6, 6, 4, 0])):
        settings = DataSettings(epochs=2, last_batch=last_batch)  # type: ignore[arg-type]
        source = open_source(MANIFEST, name, 5, settings=settings)
        assert [source.sample_count(step) for step in range(len(counts))] == counts
        assert open_source(MANIFEST, name, 5).rows(IDS, 0, 1).tolist() == [[5, 5, 5]]


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("def batches(path): pass", {}, "has the parameters path"),
        ("def batches(): return [[1, 2]]", {}, "batch 0 is list, not a dict of arrays by input"),
        (
            "def batches(): return [{'ids': np.zeros((6, 3))}]",
            {"shuffle": True},
            "data.shuffle is not supported",
        ),
        ("def batches(step): return {}", {"epochs": 2}, "data.epochs is not supported"),
        (
            "def batches(): return [{'ids': np.full((6, 3), 7)}]",
            {},
            "batch 0: array 'ids' row 0 contains 7, expected from 0",
        ),
        (
            "def batches(): return [{'ids': np.full((6, 3), 'a')}]",
            {},
            "batch 0: array 'ids' is of type <U1, expected int64",
        ),
    ],
)
def test_functions_that_do_not_keep_the_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, settings: Any, message: str
) -> None:
    manifest = Batches(inputs=(dataclasses.replace(BOUNDED, allowed=BOUNDED.allowed[:1]),))
    name = written(tmp_path, monkeypatch, f"contract{abs(hash(text))}", text + "\n")
    with pytest.raises(ConfigurationError) as caught:
        open_source(manifest, name, 0, settings=DataSettings(**settings)).rows(
            manifest.inputs[0], 0, 6
        )
    assert message in str(caught.value)


LOSS_LABELS = dataclasses.replace(LABELS, value=Value("labels", DType.INT64, (2,)))


@pytest.mark.parametrize(("train", "filled"), [(True, -100), (False, 1)])
def test_a_batch_is_filled_up_with_its_first_sample_whose_label_counts_for_nothing(
    tmp_path: Path, train: bool, filled: int
) -> None:
    """Of 9 samples the second batch has 3, in micro-batches of 2: the last one has none and is
    weighed with nothing.
    """
    manifest = Batches(inputs=(LOSS_LABELS, ROWS), train=train)
    given = {
        "labels": np.array([0, 0, 0, 0, 0, 0, 1, 2, 3]),
        "rows": np.arange(54.0).reshape(27, 2),
    }
    np.savez(tmp_path / "data.npz", **given)
    source = open_source(
        manifest, str(tmp_path / "data.npz"), 0, settings=DataSettings(last_batch="pad")
    )
    assert source.sample_count(1) == 3
    blocks = [
        read_filled_block(source, manifest, LOSS_LABELS, 1, offset, ((0, 2),)).tolist()  # type: ignore[arg-type]
        for offset in (0, 2, 4)
    ]
    assert blocks == [[1, 2], [3, filled], [1, 1]]
    part = read_filled_block(source, manifest, ROWS, 1, 2, ((2, 6), (1, 2)))  # type: ignore[arg-type]
    assert part.tolist() == [[53], [37], [39], [41]]
