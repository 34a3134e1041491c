"""Parquet, Arrow and what `datasets` saves, as a model's inputs take them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from autopipe.backends.torch.runtime.data.sample_source import SampleSource
from autopipe.backends.torch.runtime.data.sources import check_data
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import DType, Value
from autopipe.ir.program import InputRange
from tests.backends.torch.runtime.data.test_stored_arrays import (
    TOKENS,
    Batches,
    index_input,
    opened,
)

PICTURE = InputRange(Value("picture", DType.FLOAT32, (2, 3, 4)), 0, None)
TURNED = InputRange(Value("turned", DType.FLOAT32, (3, 2)), 1, None)
FLAT = index_input("flat", (16,))
LABEL = index_input("label", (2,))
ENTRIES = (TOKENS, PICTURE, TURNED, FLAT, LABEL)
MANIFEST = Batches(ENTRIES)
ROWS = 10


def numbers() -> dict[str, np.ndarray]:
    """A row a sample."""
    drawn = np.random.default_rng(0)
    return {
        "tokens": drawn.integers(0, 50, (ROWS, 8)),
        "picture": drawn.normal(size=(ROWS, 3, 4)).astype(np.float32),
        "turned": drawn.normal(size=(ROWS, 3)),
        "flat": drawn.integers(0, 50, (ROWS, 8)).astype(np.int32),
        "label": drawn.integers(0, 50, ROWS).astype(np.uint8),
    }


def table() -> pa.Table:
    """Lists, lists of lists, lists of a fixed length and plain numbers, in chunks of 4 rows."""
    found = numbers()
    columns = {
        "tokens": pa.array(found["tokens"].tolist()),
        "picture": pa.array(found["picture"].tolist(), pa.list_(pa.list_(pa.float32()))),
        "turned": pa.array(found["turned"].tolist(), pa.list_(pa.float64(), 3)),
        "flat": pa.array(found["flat"].tolist(), pa.large_list(pa.int32())),
        "label": pa.array(found["label"]),
        "text": pa.array(["some"] * ROWS),
    }
    whole = pa.table(columns)
    return pa.concat_tables([whole.slice(first, 4) for first in range(0, ROWS, 4)])


def write_stream(path: Path, found: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, found.schema) as writer:
        writer.write_table(found)


def write_file(path: Path, found: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, found.schema) as writer:
        writer.write_table(found)


def write_dataset(path: Path, found: pa.Table) -> None:
    """As `datasets.Dataset.save_to_disk` does, in two files."""
    path.mkdir()
    names = [f"data-{number:05}-of-00002.arrow" for number in range(2)]
    for name, part in zip(names, (found.slice(0, 7), found.slice(7)), strict=True):
        write_stream(path / name, part)
    (path / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names]})
    )


def write_folder(path: Path, found: pa.Table) -> None:
    path.mkdir()
    parquet.write_table(found.slice(0, 3), path / "0.parquet", row_group_size=2)
    parquet.write_table(found.slice(3), path / "1.parquet")


WRITERS: dict[str, Callable[[Path, pa.Table], None]] = {
    "table.parquet": lambda path, found: parquet.write_table(found, path, row_group_size=3),
    "table.arrow": write_stream,
    "table.feather": write_file,
    "saved": write_dataset,
    "folder": write_folder,
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_row_is_a_sample_and_a_column_an_input(tmp_path: Path, name: str, shuffle: bool) -> None:
    WRITERS[name](tmp_path / name, table())
    source = opened(MANIFEST, tmp_path / name, shuffle=shuffle)
    found = numbers()
    order = np.arange(ROWS)
    if shuffle:
        labels = source.rows(LABEL, 0, ROWS)
        order = np.array(
            [next(iter(np.flatnonzero((found["flat"] == row).all(1)))) for row in flat_rows(source)]
        )
        assert np.array_equal(labels, found["label"][order]) and not np.array_equal(
            order, np.arange(ROWS)
        )
    order = order[3:9]
    assert np.array_equal(source.rows(TOKENS, 3, 9), found["tokens"][order])
    assert np.array_equal(source.rows(PICTURE, 3, 9), found["picture"][order])
    assert np.array_equal(source.rows(TURNED, 3, 9), found["turned"][order].T.astype(np.float32))
    assert np.array_equal(source.rows(FLAT, 3, 9), found["flat"][order].reshape(-1))
    assert np.array_equal(source.rows(LABEL, 3, 9), found["label"][order])
    assert source.rows(FLAT, 0, 1).dtype == np.int64


def flat_rows(source: SampleSource) -> np.ndarray:
    return source.rows(FLAT, 0, ROWS).reshape(ROWS, 8)


def changed(column: str, value: object) -> pa.Table:
    found = table()
    return found.set_column(found.schema.get_field_index(column), column, [value])


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (table().drop_columns(["label"]), "lack an array for input 'label'"),
        (
            changed("tokens", [[1] * 8] * 6 + [[1] * 7] + [[1] * 9] * 3),
            "row 6 of column 'tokens' has 7 elements, but a sample of the",
        ),
        (
            changed("tokens", [[1] * 8] * 9 + [[]]),
            "row 9 of column 'tokens' has 0 elements, but a sample of the input has 8",
        ),
        (changed("tokens", [[1] * 8] * 9 + [None]), "'tokens' contains nulls"),
        (changed("tokens", [[1] * 8] * 9 + [[None] * 8]), "'tokens' contains nulls"),
        (changed("tokens", ["some"] * 10), "'tokens' is of type string, expected numbers"),
        (
            changed("tokens", [[1] * 8] * 9 + [[1] * 7 + [50]]),
            "'tokens' row 9 contains 50, expected from 0 to 49",
        ),
        (
            changed("flat", [[1] * 8] * 9 + [[1] * 7 + [50]]),
            "'flat' row 79 contains 50, expected from 0 to 49",
        ),
        (changed("label", [1.5] * 10), "'label' is of type float64, expected int64"),
    ],
)
def test_tables_that_do_not_fit(tmp_path: Path, found: pa.Table, message: str) -> None:
    for name in ("table.parquet", "table.arrow"):
        WRITERS[name](tmp_path / name, found)
        with pytest.raises(ConfigurationError, match=message):
            check_data(MANIFEST, str(tmp_path / name), None)  # type: ignore[arg-type]


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    for name in ("table.parquet", "table.arrow"):
        (tmp_path / name).write_bytes(b"ARROW1 not really, PAR1")
        with pytest.raises(ConfigurationError, match="the table cannot be read"):
            opened(MANIFEST, tmp_path / name)
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="does not describe a dataset: KeyError"):
        opened(MANIFEST, tmp_path)


def test_of_several_datasets_one_is_named_and_no_file_outside_is_read(tmp_path: Path) -> None:
    write_dataset(tmp_path / "train", table())
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(ConfigurationError, match="contains several datasets") as caught:
        opened(MANIFEST, tmp_path)
    assert caught.value.hint == f"choose one of the splits: {tmp_path / 'train'}"
    opened(MANIFEST, tmp_path / "train")
    (tmp_path / "train" / "state.json").write_text(
        '{"_data_files": [{"filename": "../outside.arrow"}]}'
    )
    write_stream(tmp_path / "outside.arrow", table())
    with pytest.raises(ConfigurationError, match="the table cannot be read"):
        opened(MANIFEST, tmp_path / "train")


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WRITERS["table.arrow"](tmp_path / "table.arrow", table())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigurationError, match="requires the package pyarrow") as caught:
        opened(MANIFEST, tmp_path / "table.arrow")
    assert "autopipe[data]" in caught.value.hint
