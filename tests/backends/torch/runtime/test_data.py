"""Where samples come from: every rank reads the same ones, whichever blocks it asks for."""

from __future__ import annotations

import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.backends.torch.runtime.data import Position, open_source, read_block
from autopipe.backends.torch.runtime.manifest import InputEntry
from autopipe.ir.errors import ConfigurationError


@dataclass(frozen=True)
class Batches:
    """What sources read of a manifest: three micro-batches of two samples."""

    inputs: tuple[InputEntry, ...] = (
        InputEntry("ids", "int64", (2, 3), 0, 7),
        InputEntry("picture", "float32", (3, 2, 2), 1, None),
        InputEntry("rows", "float32", (6, 2), 0, None),
        InputEntry("table", "float32", (3, 2), None, None),
        InputEntry("mask", "bool", (2,), 0, 2),
    )
    """`rows` has three rows a sample: a sequence merged into the batch."""
    micro_batches: int = 3
    micro_batch_size: int = 2

    @property
    def batch_size(self) -> int:
        return self.micro_batches * self.micro_batch_size


MANIFEST = Batches()
IDS, PICTURE, ROWS, TABLE, MASK = MANIFEST.inputs


def arrays(samples: int) -> dict[str, np.ndarray]:
    """Numbers for `samples` samples, all different."""
    found = {}
    for entry in MANIFEST.inputs:
        shape = list(entry.shape)
        if entry.batch_axis is not None:
            shape[entry.batch_axis] = shape[entry.batch_axis] // 2 * samples
        found[entry.name] = np.arange(np.prod(shape)).reshape(shape).astype(entry.dtype)
    return found


@pytest.fixture(params=["random", "stored", "compressed", "function"])
def data(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str | None:
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


@pytest.mark.parametrize("entry", MANIFEST.inputs, ids=lambda entry: entry.name)
def test_blocks_are_parts_of_the_micro_batch(data: str | None, entry: InputEntry) -> None:
    """A rank that asks for a block alone, with a source of its own, gets that part of what others read whole."""
    reading_all = open_source(MANIFEST, data, 3)
    everything = tuple((0, extent) for extent in entry.shape)
    for sample in range(0, 12, 2):
        whole = read_block(reading_all, MANIFEST, entry, sample, everything)
        assert whole.shape == entry.shape
        assert whole.dtype == np.dtype(entry.dtype)
        for axis, extent in enumerate(entry.shape):
            for start in range(extent):
                box = (*everything[:axis], (start, start + 1), *everything[axis + 1 :])
                part = read_block(open_source(MANIFEST, data, 3), MANIFEST, entry, sample, box)
                assert np.array_equal(part, np.take(whole, [start], axis))


@pytest.mark.parametrize("entry", MANIFEST.inputs, ids=lambda entry: entry.name)
def test_files_are_read_sample_by_sample_and_again(tmp_path: Path, entry: InputEntry) -> None:
    np.savez(tmp_path / "data.npz", **arrays(5))
    source = open_source(MANIFEST, str(tmp_path / "data.npz"), 0)
    whole = arrays(5)[entry.name]
    found = source.rows(entry, 3, 7)
    if entry.batch_axis is None:
        assert np.array_equal(found, whole)
        return
    samples = np.split(whole, 5, entry.batch_axis)
    assert np.array_equal(found, np.concatenate([samples[index] for index in (3, 4, 0, 1)], entry.batch_axis))


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
    assert not np.array_equal(first.rows(ROWS, 0, 2).ravel()[:4], first.rows(PICTURE, 0, 2).ravel()[:4])


def test_values_without_samples_follow_the_steps_of_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that reads nothing else must not stay at the first batch."""
    monkeypatch.syspath_prepend(str(tmp_path))
    lines = ["import numpy as np", "def batches():", "    for step in range(3):"]
    lines.append("        yield {'table': np.full((3, 2), step)}")
    (tmp_path / "tables_of_steps.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    source = open_source(MANIFEST, "tables_of_steps:batches", 0)
    found = [read_block(source, MANIFEST, TABLE, sample, ((0, 1), (0, 1))).item() for sample in (0, 2, 6, 16)]
    assert found == [0, 0, 1, 2]


def test_after_other_batches_a_function_goes_on_at_the_step_and_a_file_at_the_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps of four samples each, and now six a step."""
    monkeypatch.syspath_prepend(str(tmp_path))
    lines = ["import numpy as np", "def batches():", "    for step in range(9):"]
    lines.append("        yield {'ids': np.arange(18).reshape(6, 3) + 100 * step}")
    (tmp_path / "later_batches.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    source = open_source(MANIFEST, "later_batches:batches", 0, Position(3, 12))
    found = [source.rows(IDS, sample, sample + 2)[:, 0].tolist() for sample in (12, 14, 16, 18, 28)]
    assert found == [[300, 303], [306, 309], [312, 315], [400, 403], [512, 515]]
    np.savez(tmp_path / "data.npz", **arrays(40))
    stored = open_source(MANIFEST, str(tmp_path / "data.npz"), 0, Position(3, 12))
    assert stored.rows(IDS, 12, 13).tolist() == [[36, 37, 38]]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((6, 4), np.int64), r"'ids' is \[6, 4\], not \[samples, 3\]"),
        (np.zeros(6, np.int64), r"'ids' is \[6\], not \[samples, 3\]"),
        (np.zeros((0, 3), np.int64), "'ids' has no samples"),
        (np.full((6, 3), 0.5), "'ids' holds numbers that are no int64"),
        (np.full((6, 3), np.nan), "'ids' holds numbers that are no int64"),
        (np.full((6, 3), "a"), "'ids' holds <U1, not int64"),
        (np.full((6, 3), 1j), "'ids' holds complex128, not int64"),
    ],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_arrays_that_do_not_fit(tmp_path: Path, array: np.ndarray, message: str, compressed: bool) -> None:
    path = tmp_path / "data.npz"
    save = np.savez_compressed if compressed else np.savez
    save(path, **(arrays(6) | {"ids": array}))  # type: ignore[arg-type]
    source = open_source(MANIFEST, str(path), 0)
    with pytest.raises(ConfigurationError, match=message) as caught:
        source.rows(IDS, 0, 2)
    assert str(path) in str(caught.value)


def test_whole_numbers_written_as_others_are_taken(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **(arrays(6) | {"ids": np.full((6, 3), 5.0), "mask": np.ones(6, np.uint8)}))
    source = open_source(MANIFEST, str(tmp_path / "data.npz"), 0)
    assert source.rows(IDS, 0, 2).tolist() == [[5] * 3] * 2
    assert source.rows(MASK, 0, 2).tolist() == [True, True]


def test_columns_first(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **{name: np.asfortranarray(array) for name, array in arrays(6).items()})
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
            archive.writestr(f"{entry.name}.npy", b"\x93NUMPY\x01\x00 short")
    with pytest.raises(ConfigurationError, match="'ids' cannot be read"):
        open_source(MANIFEST, str(path), 0).rows(IDS, 0, 2)


def test_missing_files_arrays_and_functions(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="data cannot be read"):
        open_source(MANIFEST, str(tmp_path / "none.npz"), 0)
    np.savez(tmp_path / "data.npz", other=np.zeros(3))
    with pytest.raises(ConfigurationError, match="no array for input 'ids'") as caught:
        open_source(MANIFEST, str(tmp_path / "data.npz"), 0)
    assert caught.value.hint == "it has other"
    for name in ("nowhere", "nowhere:batches", "os:batches"):
        with pytest.raises(ConfigurationError, match=name):
            open_source(MANIFEST, name, 0)


def test_functions_that_end_or_give_too_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "import numpy as np\ndef batches():\n    yield {'ids': np.zeros((5, 3), int)}\n"
    (tmp_path / "short_batches.py").write_text(text, encoding="utf-8")
    source = open_source(MANIFEST, "short_batches:batches", 0)
    with pytest.raises(ConfigurationError, match="'ids' has 5 rows, a batch 6"):
        source.rows(IDS, 0, 2)
    with pytest.raises(ConfigurationError, match="a batch lacks input 'rows'"):
        source.rows(ROWS, 0, 2)
    with pytest.raises(ConfigurationError, match="ended after 1 batches"):
        source.rows(IDS, 6, 8)
