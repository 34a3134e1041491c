"""What a folder of checkpoints holds, and whether a run may save there."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.backends.torch.checkpoint import FolderLock, check_unused, committed_steps, remove_leftovers
from autopipe.ir.errors import ConfigurationError

OTHERS = ("notes", "step_00000003.tmp-1-ab", "step_7", "step_00000009.tmp-old")


def test_only_committed_ones_count(tmp_path: Path) -> None:
    for name in (*OTHERS, "step_00000012", "step_123456789"):
        (tmp_path / name).mkdir()
    assert committed_steps(tmp_path) == [12, 123456789]
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"notes", "step_7", "step_00000012", "step_123456789"}


def test_a_run_that_starts_anew_needs_a_folder_without_checkpoints(tmp_path: Path) -> None:
    check_unused(tmp_path / "none")
    for name in OTHERS:
        (tmp_path / name).mkdir()
    check_unused(tmp_path)
    (tmp_path / "step_00000012").mkdir()
    with pytest.raises(ConfigurationError, match="holds a checkpoint after 12 steps") as caught:
        check_unused(tmp_path)
    assert "--resume" in caught.value.hint


def test_without_locks_of_the_file_system_nothing_is_said_to_be_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", unknown)
    lock = FolderLock(tmp_path)
    assert lock.held is False
    lock.release()
