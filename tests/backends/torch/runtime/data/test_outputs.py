"""Outputs of inference are written as they come, and lie as numpy reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from autopipe.backends.torch.runtime.data.outputs import RowFile


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_])
def test_rows_are_one_array(tmp_path: Path, axis: int, dtype: type[np.generic]) -> None:
    rows = np.random.default_rng(0).integers(0, 2, (7, 3, 4)).astype(dtype)
    file = RowFile(tmp_path / "rows.npy")
    for start, stop in ((0, 3), (3, 6), (6, 7)):
        file.append(rows[start:stop])
    file.finish(axis)
    found = np.load(tmp_path / "rows.npy", allow_pickle=False)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, np.moveaxis(rows, 0, axis))


def test_there_may_be_no_rows(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "rows.npy")
    file.finish()
    assert np.load(tmp_path / "rows.npy", allow_pickle=False).shape == (0,)
